"""`python -m drafter_svc.train STAGE`: run one stage of the recipe in a work folder."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from drafter_svc.train.corpus import collect
from drafter_svc.train.distill import train_drafter
from drafter_svc.train.evaluate import evaluate
from drafter_svc.train.files import Meter, WorkFolder, save_tokens, workers
from drafter_svc.train.losses import validate
from drafter_svc.train.mtp import train_mtp
from drafter_svc.train.pretrain import pretrain
from drafter_svc.train.publish import publish
from drafter_svc.train.recipe import DEFAULT_PATH, Recipe, load_recipe
from drafter_svc.train.regenerate import regenerate
from drafter_svc.train.smoke import check_decoding, smoke_recipe
from drafter_svc.train.tokenizer import encode, load_tokenizer, train_tokenizer


def prepare(recipe: Recipe, work: WorkFolder) -> None:
    """Choose the corpus, learn the vocabulary, write token files. Skipped where they are there."""
    if work.tokens("train").exists():
        print("corpus: the tokens are there", flush=True)
        return
    meter = Meter()
    corpus = collect(recipe.corpus, workers())
    print(f"corpus: {len(corpus.train)} files after {meter.elapsed():.0f} s", flush=True)
    work.target.mkdir(parents=True, exist_ok=True)
    if not work.tokenizer.exists():
        size, megabytes = recipe.target.vocab_size, recipe.corpus.tokenizer_mb
        learned = train_tokenizer(corpus.train, size, megabytes, recipe.seed)
        learned.save(str(work.tokenizer))
    tokenizer = load_tokenizer(work.tokenizer)
    total = sum(len(text.encode()) for text in corpus.validation)
    np.save(work.root / "validation_bytes.npy", np.array([total]))
    save_tokens(work.tokens("validation"), encode(tokenizer, corpus.validation))
    (work.root / "corpus.json").write_text(json.dumps(corpus.rows, indent=1), encoding="utf-8")
    ids = encode(tokenizer, corpus.train)
    save_tokens(work.tokens("train"), ids)
    counts = {"tokens": len(ids), "files": len(corpus.train), "packages": len(corpus.rows)}
    work.note("corpus", counts | {"seconds": round(meter.elapsed(), 1)})


STAGES: dict[str, Callable[[Recipe, WorkFolder], object]] = {
    "corpus": prepare,
    "pretrain": pretrain,
    "validate": validate,
    "mtp": train_mtp,
    "regenerate": regenerate,
    "drafter": train_drafter,
    "evaluate": evaluate,
    "export": publish,
}


def smoke(recipe: Recipe, work: WorkFolder) -> None:
    """Run every stage at toy sizes, both drafters included, so that a bug shows early."""
    meter = Meter()
    for name, stage in STAGES.items():
        for version in (2, 1) if name == "drafter" else (2,):
            stage(smoke_recipe(recipe, version), work)
            print(f"smoke: {name} done after {meter.elapsed():.1f} s", flush=True)
    check_decoding(smoke_recipe(recipe), work)


def main() -> None:
    """Parse the command line and run the stage."""
    parser = argparse.ArgumentParser(prog="python -m drafter_svc.train", description=__doc__)
    parser.add_argument("stage", choices=[*STAGES, "smoke"])
    parser.add_argument("--recipe", type=Path, default=DEFAULT_PATH, help="TOML file")
    parser.add_argument("--work", type=Path, required=True, help="folder for all files of the run")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    recipe, work = load_recipe(arguments.recipe, arguments.set), WorkFolder(arguments.work)
    if arguments.stage == "smoke":
        smoke(recipe, work)
    else:
        STAGES[arguments.stage](recipe, work)


if __name__ == "__main__":
    main()
