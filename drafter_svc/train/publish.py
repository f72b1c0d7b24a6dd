"""Put a finished run together: the pair as it is served, the baseline, the report.

Owns what goes where in `export/`. Every part that a run has not made yet is left out, so a run
that broke off can be exported as far as it came.
"""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file

from drafter_svc.train.export import PRIOR, read_tensors, write_json, write_shards
from drafter_svc.train.files import WorkFolder
from drafter_svc.train.recipe import Recipe

SHARD_BYTES = 14_000_000


def publish(recipe: Recipe, work: WorkFolder) -> None:
    """Write `export/`: `target/` with its MTP head, `drafter/`, `drafter-v1/`, the report."""
    out = work.root / "export"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    has_mtp = _publish_target(work, out / "target")
    for version in (1, 2):
        _publish_drafter(work, version, out / work.drafter(version).name)
    pair = [path for part in ("target", "drafter") for path in (out / part).rglob("*.*")]
    weight = sum(path.stat().st_size for path in pair)
    work.note("export", {"bytes": weight, "mtp": has_mtp})
    for name in ("report.json", "corpus.json"):
        if (work.root / name).exists():
            shutil.copy(work.root / name, out / name)


def _publish_target(work: WorkFolder, out: Path) -> bool:
    if not work.target_config.exists():
        return False
    tensors, values = read_tensors(work.target), json.loads(work.target_config.read_text())
    has_mtp = work.mtp.exists()
    if has_mtp:
        tensors |= load_file(work.mtp)
        values["text_config"]["mtp_num_hidden_layers"] = 1
    write_shards(out, tensors, SHARD_BYTES)
    write_json(out / "config.json", values)
    shutil.copy(work.tokenizer, out / work.tokenizer.name)
    return has_mtp


def _publish_drafter(work: WorkFolder, version: int, out: Path) -> None:
    folder = work.drafter(version)
    if not (folder / "config.json").exists():
        return
    config = json.loads((folder / "config.json").read_text())
    fitted = work.read_report().get("calibration", {}).get(f"prior_v{version}")
    if fitted:
        config["dflash_config"][PRIOR] = fitted
    out.mkdir(parents=True)
    shutil.copy(folder / "model.safetensors", out / "model.safetensors")
    write_json(out / "config.json", config)
