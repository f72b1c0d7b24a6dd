"""`python -m drafter_svc.train STAGE`: run one stage of the recipe in a work folder."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from drafter_svc.train.corpus import collect
from drafter_svc.train.distill import train_drafter
from drafter_svc.train.evaluate import evaluate
from drafter_svc.train.export import export_pair
from drafter_svc.train.files import Meter, WorkFolder, save_tokens, workers
from drafter_svc.train.pretrain import pretrain, validate
from drafter_svc.train.recipe import DEFAULT_PATH, Recipe, load_recipe
from drafter_svc.train.regenerate import regenerate
from drafter_svc.train.tokenizer import encode, train_tokenizer


def prepare(recipe: Recipe, work: WorkFolder) -> None:
    """Choose the corpus, learn the vocabulary, write token files. Skipped where they are there."""
    if work.tokens("train").exists():
        return
    meter = Meter()
    corpus = collect(recipe.corpus, workers())
    print(f"{len(corpus.train)} files after {meter.elapsed():.0f} s", flush=True)
    work.target.mkdir(parents=True, exist_ok=True)
    size, megabytes = recipe.target.vocab_size, recipe.corpus.tokenizer_mb
    tokenizer = train_tokenizer(corpus.train, size, megabytes, recipe.seed)
    tokenizer.save(str(work.tokenizer))
    total = sum(len(text.encode()) for text in corpus.validation)
    np.save(work.root / "validation_bytes.npy", np.array([total]))
    save_tokens(work.tokens("validation"), encode(tokenizer, corpus.validation))
    ids = encode(tokenizer, corpus.train)
    save_tokens(work.tokens("train"), ids)
    (work.root / "corpus.json").write_text(json.dumps(corpus.rows, indent=1), encoding="utf-8")
    counts = {"tokens": len(ids), "files": len(corpus.train), "packages": len(corpus.rows)}
    work.note("corpus", counts | {"seconds": round(meter.elapsed(), 1)})


def pretrain_stage(recipe: Recipe, work: WorkFolder) -> None:
    """Corpus if missing, target, its loss."""
    prepare(recipe, work)
    pretrain(recipe, work)
    validate(recipe, work)


STAGES: dict[str, Callable[[Recipe, WorkFolder], None]] = {
    "corpus": prepare,
    "pretrain": pretrain_stage,
    "regenerate": regenerate,
    "drafter": train_drafter,
    "evaluate": evaluate,
    "export": export_pair,
}


def main() -> None:
    """Parse the command line and run the stage."""
    parser = argparse.ArgumentParser(prog="python -m drafter_svc.train", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--recipe", type=Path, default=DEFAULT_PATH, help="TOML file")
    parser.add_argument("--work", type=Path, required=True, help="folder for all files of the run")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe(arguments.recipe, arguments.set)
    STAGES[arguments.stage](recipe, WorkFolder(arguments.work))


if __name__ == "__main__":
    main()
