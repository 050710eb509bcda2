"""What a checkpoint remembers of a followed run: the file it wrote to, and the examples it measured."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hessinit.problem.batches import tensors_in

KEY = "hessinit"
_MOST_BYTES = 16 * 2**20  # of a batch that is put into every checkpoint


@dataclass(frozen=True)
class Memory:
    """Plain text. A file is told by its first point, which holds timings: names are used again."""

    file: str
    first_point: str
    examples: str

    @classmethod
    def read(cls, kept: Any) -> Memory | None:
        """From what a checkpoint holds; None for anything else."""
        names = cls.__dataclass_fields__
        if not isinstance(kept, Mapping) or not all(isinstance(kept.get(name), str) for name in names):
            return None
        return cls(**{name: kept[name] for name in names})

    def plain(self) -> dict[str, str]:
        return asdict(self)

    def find_file(self, folder: str | os.PathLike[str]) -> Path | None:
        """Where the file is now: where it was, or in the `folder` that this run writes to."""
        places = (Path(self.file), Path(folder) / Path(self.file).name)
        return next(
            (one for one in places if self.first_point and digest_start(one) == self.first_point), None
        )


def digest_start(path: Path) -> str:
    """Of the first point in a file of JSON lines; empty without any."""
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n") and "norm" in json.loads(line):
                    return hashlib.sha256(line.encode()).hexdigest()
    except (OSError, ValueError):  # gone, or not ours
        pass
    return ""


def digest_examples(batch: Any) -> str:
    """Of every tensor in the batch; empty for what gives its examples only when iterated."""
    found = hashlib.sha256()
    tensors = list(tensors_in(batch))
    for tensor in tensors:
        own = tensor.detach()
        if own.layout is not torch.strided or own.is_quantized:
            return ""
        found.update(f"{own.dtype} {tuple(own.shape)}".encode())
        found.update(own.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest() if tensors else ""


def small_copy(batch: Any) -> Any:
    """A copy for a checkpoint, or None where it is too large or holds what `weights_only` loading refuses."""
    try:
        size = sum(tensor.nbytes for tensor in tensors_in(batch))
        return _plain_copy(batch) if size <= _MOST_BYTES else None
    except TypeError:
        return None


def _plain_copy(part: Any) -> Any:
    if type(part) is Tensor:
        return part.detach().cpu().clone()
    if type(part) is dict:
        return {_plain_copy(name): _plain_copy(value) for name, value in part.items()}
    if type(part) in (list, tuple):
        return type(part)(_plain_copy(value) for value in part)
    if part is None or type(part) in (str, int, float, bool):
        return part
    raise TypeError(f"a {type(part).__name__} is not plain")
