"""What all runs of a comparison share, and the record by which a folder knows its experiment again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.comparing.batching import Data
from hessinit.comparing.optimizers import MakeOptimizer
from hessinit.comparing.starts import Start, describe
from hessinit.problem.batches import map_tensors
from hessinit.problem.double_backward import default_device
from hessinit.problem.problem import Forward, Loss
from hessinit.results.result import Plain

NUMBERS = ("first loss", "first gradient")  # compared with room for the rounding of another machine

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Job:
    """One run to be made; `measures` says whether the curvature at its start is wanted."""

    start: str
    learning_rate: float
    seed: int
    measures: bool


@dataclass(frozen=True)
class TorchSettings:
    """Switches of torch that a worker process must set as the caller has them, or the numbers differ."""

    dtype: torch.dtype
    device: str
    matmul: str | None

    @classmethod
    def of_this_process(cls) -> TorchSettings:
        try:
            matmul = torch.get_float32_matmul_precision()
        except RuntimeError:  # torch refuses to tell once the newer switches have been used
            matmul = None
        return cls(torch.get_default_dtype(), str(default_device()), matmul)

    def apply(self) -> None:
        torch.set_default_dtype(self.dtype)
        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
        if torch.device(self.device) != default_device():
            torch.set_default_device(self.device)


@dataclass(frozen=True)
class Experiment:
    """The problem and how it is trained; with a `Job` it determines a run."""

    kind: str
    build: Build
    loss: Loss
    data: Data
    forward: Forward | None
    starts: tuple[Start, ...]
    steps: int
    optimizer: str | MakeOptimizer
    device: str | None
    settings: TorchSettings

    def start(self, name: str) -> Start:
        return next(start for start in self.starts if start.name == name)


def fingerprint(
    experiment: Experiment, model: nn.Module, seen: tuple[float, float], curvature_at_start: bool
) -> Plain:
    """What must not change between the runs of one folder, in words that can be shown.

    `model` is a new one, always of the same seed, and `seen` its first loss and the length of its gradient:
    code that changes behind the same names shows in these numbers.
    """
    return {
        "kind": experiment.kind,
        "model": _without_addresses(str(model)),
        "parameters": _shapes(model),
        "loss": _without_addresses(describe(experiment.loss)),
        "forward": describe(experiment.forward),
        "data": _digest(experiment.data),
        "examples": experiment.data.examples,
        "batch_size": experiment.data.batch_size,
        "steps": experiment.steps,
        "optimizer": describe(experiment.optimizer),
        "device": torch.device(experiment.device).type if experiment.device else None,
        "default dtype": str(experiment.settings.dtype),
        "curvature_at_start": curvature_at_start,
        **{name: f"{number:.7g}" for name, number in zip(NUMBERS, seen, strict=True)},
    }


def _shapes(model: nn.Module) -> str:
    shapes = [
        f"{name}: {str(parameter.dtype).removeprefix('torch.')} {tuple(parameter.shape)}"
        + ("" if parameter.requires_grad else " frozen")
        for name, parameter in model.named_parameters()
    ]
    return "; ".join(shapes)


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _digest(data: Data) -> str:
    """A hash of every value, in a minute amount of time compared with training on them."""
    digest = hashlib.sha256()

    def add(tensor: Tensor) -> Tensor:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return tensor

    def add_all(structure: Any) -> None:
        map_tensors(add, structure)

    for part in data.parts():
        add_all(part.inputs)
        add_all(part.targets)
    return digest.hexdigest()[:16]
