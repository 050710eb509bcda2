"""Where the files of a set lie in a data folder: the official names, in the usual places."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hessinit.errors import ProblemError
from hessinit.paper.images.contents import look_up
from hessinit.paper.images.official import CifarSet, IdxSet


@dataclass(frozen=True)
class IdxFiles:
    images: Path
    labels: Path


@dataclass(frozen=True)
class CifarFiles:
    """The five batches in order; or one archive, and in `members` what they are called in it."""

    pickled: bool
    paths: tuple[Path, ...]
    members: tuple[str, ...] = ()

    @property
    def archive(self) -> bool:
        return bool(self.members)


def check_folder(data_dir: Path) -> None:
    found = look_up(data_dir)
    if found is None:
        raise ProblemError(
            f"data_dir={str(data_dir)!r} is not there; give a folder that holds the data files."
        )
    if not stat.S_ISDIR(found.st_mode):
        raise ProblemError(
            f"data_dir={str(data_dir)!r} is a file; give the folder that holds the data files."
        )


def find_idx(data_dir: Path, official: IdxSet) -> IdxFiles:
    """Images and labels from the first place that has both, unpacked before packed."""
    check_folder(data_dir)
    halves = []
    for folder in official.folders:
        images = find_file(data_dir / folder, spellings(official.images.name))
        labels = find_file(data_dir / folder, spellings(official.labels.name))
        if images and labels:
            return IdxFiles(images, labels)
        if images or labels:
            missing = official.labels.name if images else official.images.name
            halves.append(f"{images or labels} is there without {missing}")
    raise missing_files(data_dir, official, halves)


def spellings(name: str) -> list[str]:
    """`train-images-idx3-ubyte` is also found with a full stop, as some unpackers write it, and packed.

    >>> spellings("labels-idx1-ubyte")
    ['labels-idx1-ubyte', 'labels.idx1-ubyte', 'labels-idx1-ubyte.gz', 'labels.idx1-ubyte.gz']
    """
    plain = [name, name.replace("-idx", ".idx")]
    return [*plain, *(f"{spelling}.gz" for spelling in plain)]


def find_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of `names` that is a file; one that is something else only when no other is there."""
    there = [(folder / name, found) for name in names if (found := look_up(folder / name))]
    files = [path for path, found in there if stat.S_ISREG(found.st_mode)]
    others = [path for path, found in there if not stat.S_ISREG(found.st_mode)]
    return next(iter(files + others), None)


def find_cifar(data_dir: Path, official: CifarSet) -> CifarFiles:
    """Binary before pickled, unpacked before packed, a folder of their own before the data folder itself."""
    check_folder(data_dir)
    binary = tuple(batch.name for batch in official.batches)
    pickled = tuple(name.removesuffix(".bin") for name in binary)
    forms = ((False, "cifar-10-batches-bin", binary), (True, "cifar-10-batches-py", pickled))
    incomplete = []
    for base in (data_dir, data_dir / "cifar-10"):
        for folder in (True, False):
            for is_pickled, own, names in forms:
                place = base / own if folder else base
                found = [find_file(place, [name]) for name in names]
                paths = tuple(path for path in found if path)
                if len(paths) == len(names):
                    return CifarFiles(is_pickled, paths)
                if paths:
                    lost = ", ".join(name for name, path in zip(names, found, strict=True) if not path)
                    incomplete.append(f"{place} lacks {lost}")
        for is_pickled, own, names in forms:
            packed = find_file(base, ["cifar-10-python.tar.gz" if is_pickled else "cifar-10-binary.tar.gz"])
            if packed:
                return CifarFiles(is_pickled, (packed,), tuple(f"{own}/{name}" for name in names))
    raise missing_files(data_dir, official, incomplete)


def missing_files(data_dir: Path, official: IdxSet | CifarSet, details: list[str]) -> ProblemError:
    why = f" ({'; '.join(details)})" if details else ""
    return ProblemError(
        f"data_dir={str(data_dir)!r} does not hold {official.title}'s training files{why}. "
        f"Add {wanted_files(official)}, or leave --data-dir out to download them, "
        "or run on --data digits."
    )


def wanted_files(official: IdxSet | CifarSet) -> str:
    """What a folder must hold, in words."""
    if isinstance(official, IdxSet):
        names = f"{official.images.name} and {official.labels.name} (packed as .gz or not)"
        return f"{names}, in a folder {official.folders[0]} or directly"
    return "cifar-10-batches-bin, cifar-10-batches-py, cifar-10-binary.tar.gz or cifar-10-python.tar.gz"
