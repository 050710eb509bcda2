"""The starts that meet in the arena, by name.

A start of ours may carry options in brackets: `hessinit[KAPPA.plain=6]` exchanges a constant
of `hessinit.init.options`, `hessinit[scheme="he"]` is told to `initialize_`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from arena.competitors.fixup import fixup_
from arena.competitors.gradinit import gradinit_
from arena.competitors.metainit import metainit_
from arena.tasks import AUTO, OURS, RACED, Task
from hessinit import Fit, Problem, initialize_
from hessinit.init import options as fit_options
from hessinit.init.apply_scheme import apply_scheme_
from hessinit.training.loop import derive
from hessinit.training.trainer import Initializer, read_schemes

BATCHES = 8  # of GradInit
# On the GPU the learned schemes get fewer iterations: their double backward of 110 layers is dear.
ITERATIONS = {"cpu": (150, 100), "cuda": (60, 40)}
OTHERS = (
    "default", "he", "glorot", "orthogonal", "lsuv", "default+warmup", "he+warmup", "lsuv+warmup",
    "gradinit", "metainit", "fixup",
)  # fmt: skip


def is_ours(start: str) -> bool:
    return start.partition("[")[0] in (OURS, RACED, AUTO)


def read_other(start: str, task: Task) -> Initializer:
    """A start of `compare`, or a learned one."""
    own: dict[str, Callable[..., Any]] = {
        "gradinit": functools.partial(_gradinit, task),
        "metainit": functools.partial(_metainit, task),
        "fixup": _fixup,
    }
    return read_schemes({start: own.get(start, start)}, max(1, task.steps // 5))[0]


def write_ours_(
    start: str, task: Task, model: nn.Module, batch: Any, lr: float | str, seed: int, examples: Any
) -> Any:
    """Returns the result of `initialize_`; races are run on `examples`, all that are trained on."""
    name, _, text = start.partition("[")
    options = dict(_read_options(text)) if text else {}
    options = {"report": False, **options}  # nobody reads it here
    if name in (RACED, AUTO):
        options.setdefault("data", examples)
    with _exchanged({key: options.pop(key) for key in [*options] if "." in key}):
        problem = Problem(model, task.loss, batch, seed=derive(seed, "start"))
        fit = Fit(**{name: options.pop(name) for name in [*options] if name in Fit.__annotations__})
        return initialize_(problem, lr=lr, optimizer=task.optimizer, fit=fit, **options)


def _read_options(text: str) -> Iterator[tuple[str, Any]]:
    for part in text.removesuffix("]").split(","):
        found = re.fullmatch(r"\s*([\w.]+)\s*=\s*(.+?)\s*", part)
        if not found:
            raise SystemExit(f"[{text} must be a list such as [KAPPA.plain=6,trial_steps=24].")
        yield found[1], ast.literal_eval(found[2])


@contextlib.contextmanager
def _exchanged(constants: dict[str, Any]) -> Iterator[None]:
    """A process makes one run at a time, so constants can be exchanged during it."""
    homes = {name: getattr(fit_options, name.partition(".")[0]) for name in constants}
    fields = {name: name.partition(".")[2] for name in constants}
    before = {name: getattr(homes[name], fields[name]) for name in constants}
    try:
        for name, value in constants.items():
            object.__setattr__(homes[name], fields[name], value)  # they are frozen
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(homes[name], fields[name], value)


def _gradinit(task: Task, model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
    """From He's weights, as in the paper, on eight batches."""
    apply_scheme_(model, "he", sample=batch[0], generator=torch.Generator().manual_seed(seed))
    inputs, targets = task.data()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed ^ 0x5EED))
    places = order[: BATCHES * task.batch_size].split(task.batch_size)
    batches = [(inputs[some].to(batch[0].device), targets[some].to(batch[1].device)) for some in places]
    optimizer = "adam" if task.optimizer.startswith("adam") else "sgd"
    iterations = ITERATIONS[task.device][0]
    gradinit_(model, loss, batches, lr=lr, optimizer=optimizer, iterations=iterations, seed=seed)


def _metainit(task: Task, model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
    """From Glorot's weights, on random inputs."""
    steps = ITERATIONS[task.device][1]
    apply_scheme_(model, "glorot", sample=batch[0], generator=torch.Generator().manual_seed(seed))
    metainit_(model, loss, batch, steps=steps, seed=seed)


def _fixup(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
    fixup_(model, seed=seed)
