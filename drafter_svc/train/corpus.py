"""Choose the Python files to train on, by package, licence and novelty.

Owns the rules: permissive licences only, no vendored or generated code, no near duplicate of a
file already taken, no package over its share. Does not know tokens. Held-out files are read
first, then validation packages, so whatever resembles them is dropped from training.
"""

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from pathlib import Path

from drafter_svc.train.recipe import CorpusPlan

ALLOWED = re.compile(
    r"^(MIT(-0|-CMU)?|BSD(-[123]-Clause)?|Apache-2\.0|ISC|PSF-2\.0|Python-2\.0(\.1)?)$"
)
CLASSIFIERS = (
    "MIT License",
    "MIT No Attribution License (MIT-0)",
    "BSD License",
    "Apache Software License",
    "ISC License (ISCL)",
    "Python Software Foundation License",
)
FREE_TEXT = re.compile(
    r"^(the )?(new |modified |revised |[23]-clause )?"
    r"((mit|isc|psf|psf-2\.0)( license)?|bsd([- ][123])?([- ]clause)?( license)?"
    r"|apache( software)?( license)?([ ,-]*(v|version)? ?2(\.0)?)?( license)?"
    r"|python software foundation license)$",
    re.IGNORECASE,
)
VENDORED = re.compile(
    r"(^|/)(_?vendor(ed|s)?|third_?party|_?extern(al|als)?|_distutils|node_modules)(/|$)"
)
GENERATED = re.compile(
    r"(auto-?generated|automatically generated|generated (by|from|using)|do not edit|@generated)",
    re.IGNORECASE,
)
STDLIB = "python-stdlib"


@dataclass(frozen=True, slots=True)
class Package:
    """One source of files: a distribution or the standard library."""

    name: str
    version: str
    licence: str
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """One readable file that passed the rules that look at it alone."""

    package: str
    text: str
    shingles: frozenset[int]


def permissive_licence(dist: Distribution) -> str | None:
    """The licence by the distribution's metadata, if every part of it is permissive."""
    meta = dist.metadata
    expression = meta.get("License-Expression")
    if expression:
        if " WITH " in expression.upper():
            return None
        options = re.split(r"\s+OR\s+", expression.strip("() "), flags=re.IGNORECASE)
        for option in options:
            parts = re.split(r"\s+AND\s+", option, flags=re.IGNORECASE)
            if all(ALLOWED.match(part.strip("() ")) for part in parts):
                return expression
        return None
    named = [
        c.split(" :: ")[-1] for c in meta.get_all("Classifier") or [] if c.startswith("License")
    ]
    named = [name for name in named if name != "OSI Approved"]
    if named:
        return ", ".join(named) if all(name in CLASSIFIERS for name in named) else None
    text = (meta.get("License") or "").strip()
    return text if FREE_TEXT.match(text) else None


def find_packages(plan: CorpusPlan) -> list[Package]:
    """Every permissive distribution in reach and the standard library, by name."""
    search = {"path": list(plan.roots)} if plan.roots else {}
    found: dict[str, Package] = {}
    banned = {name.lower() for name in plan.banned_packages}
    for dist in distributions(**search):
        name = (dist.metadata.get("Name") or "").lower().replace("_", "-")
        licence = permissive_licence(dist)
        if not name or name in found or name in banned or licence is None:
            continue
        paths = [Path(str(dist.locate_file(f))) for f in dist.files or [] if f.suffix == ".py"]
        found[name] = Package(name, dist.version, licence, tuple(sorted(paths)))
    if not plan.roots:
        found[STDLIB] = _standard_library()
    return [found[name] for name in sorted(found)]


def _standard_library() -> Package:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = ("site-packages", "dist-packages", "lib2to3/tests")
    paths = (p for p in root.rglob("*.py") if not any(s in p.as_posix() for s in skipped))
    version = sysconfig.get_python_version()
    return Package(STDLIB, version, "Python Software Foundation License", tuple(sorted(paths)))


def shingles(text: str, lines: int) -> frozenset[int]:
    """Hashes of every run of `lines` non-blank stripped lines; a quarter of them is kept."""
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    hashes = [int.from_bytes(hashlib.blake2b(x.encode(), digest_size=8).digest()) for x in kept]
    out = set()
    for start in range(max(1, len(hashes) - lines + 1)):
        mixed = hash(tuple(hashes[start : start + lines]))
        if mixed % 4 == 0:
            out.add(mixed)
    return frozenset(out)


def acceptable(text: str, plan: CorpusPlan) -> bool:
    """Whether a file reads like something a person wrote."""
    if not plan.min_bytes <= len(text) <= plan.max_bytes or GENERATED.search(text[:1500]):
        return False
    rows = text.splitlines()
    if max(map(len, rows), default=0) > 500 or len(text) > 90 * max(1, len(rows)):
        return False
    digits = sum(map(text.count, "0123456789"))
    return (digits < 0.15 * len(text) and text.isascii()) or digits < 0.05 * len(text)


def _read(job: tuple[str, tuple[Path, ...], CorpusPlan]) -> list[Source]:
    package, paths, plan = job
    out = []
    for path in paths:
        if VENDORED.search(path.as_posix()) or path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if acceptable(text, plan):
            out.append(Source(package, text, shingles(text, plan.shingle_lines)))
    return out


def _jobs(
    packages: Iterable[Package], plan: CorpusPlan
) -> Iterator[tuple[str, tuple[Path, ...], CorpusPlan]]:
    for package in packages:
        for start in range(0, len(package.files), 64):
            yield package.name, package.files[start : start + 64], plan


class Novelty:
    """Says whether a file is new, given all files it has accepted before."""

    def __init__(self, max_overlap: float):
        self.seen: set[int] = set()
        self.max_overlap = max_overlap

    def admit(self, source: Source) -> bool:
        """Accept the file and remember it, unless too much of it was seen before."""
        known = len(self.seen & source.shingles)
        if known > self.max_overlap * max(1, len(source.shingles)):
            return False
        self.seen |= source.shingles
        return True


@dataclass(slots=True)
class Corpus:
    """Texts by part, and what was taken from where."""

    train: list[str]
    validation: list[str]
    rows: list[dict[str, object]]


def collect(plan: CorpusPlan, workers: int) -> Corpus:
    """Read, filter and split all packages; deterministic for equal files."""
    packages = find_packages(plan)
    held_out = set(plan.validation_packages)
    packages = [replace(p, files=p.files[: plan.max_files]) for p in packages]
    packages.sort(key=lambda p: (p.name not in held_out, p.name != STDLIB, p.name))
    by_name: dict[str, list[Source]] = {p.name: [] for p in packages}
    with ProcessPoolExecutor(workers) as pool:
        for batch in pool.map(_read, _jobs(packages, plan), chunksize=4):
            for source in batch:
                by_name[source.package].append(source)
    novelty = Novelty(plan.max_overlap)
    if plan.held_out:
        for path in sorted(Path(plan.held_out).iterdir()):
            if path.is_file():
                novelty.seen |= shingles(path.read_text(encoding="utf-8"), plan.shingle_lines)
    for sources in by_name.values():
        sources[:] = [source for source in sources if novelty.admit(source)]
    _cap(by_name, held_out, plan)
    corpus = Corpus([], [], [])
    for package in packages:
        texts = [source.text for source in by_name[package.name]]
        (corpus.validation if package.name in held_out else corpus.train).extend(texts)
        if texts:
            corpus.rows.append(_row(package, texts, package.name in held_out))
    return corpus


def _cap(by_name: dict[str, list[Source]], held_out: set[str], plan: CorpusPlan) -> None:
    sizes = {n: sum(len(s.text) for s in x) for n, x in by_name.items() if n not in held_out}
    limit = plan.max_package_share * min(sum(sizes.values()), plan.max_total_mb * 1e6)
    for name, size in sizes.items():
        if size > limit:  # keep an even spread of the package, not its first folders
            step = size / limit
            picks = {int(i * step) for i in range(int(len(by_name[name]) / step))}
            by_name[name] = [s for i, s in enumerate(by_name[name]) if i in picks]


def _row(package: Package, texts: list[str], validation: bool) -> dict[str, object]:
    return {
        "package": package.name,
        "version": package.version,
        "licence": package.licence,
        "files": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "part": "validation" if validation else "train",
    }
