"""What a measurement was done on: the order of the layers, remarks and versions, the same for every verb."""

from __future__ import annotations

import math
import platform
from collections.abc import Container, Sequence

import torch

from hessinit._version import __version__
from hessinit.operators.evaluation import Evaluation, unused_leaves
from hessinit.problem.layers import EVERYTHING, Layer
from hessinit.problem.problem import Problem


def in_running_order(problem: Problem, evaluations: Sequence[Evaluation]) -> list[Layer]:
    """The measured layers in the order in which the first batch's forward used them; unused ones last."""
    moments = evaluations[0].moments

    def moment(layer: Layer) -> float:
        found = moments[layer.parameter]
        return math.inf if found is None else found

    return sorted(problem.layers, key=moment)


def notes_on(problem: Problem, evaluations: Sequence[Evaluation]) -> tuple[str, ...]:
    """What a reader of the numbers should know: unused, frozen and random parts."""
    notes = []
    leaves = unused_leaves(evaluations)
    unused = [layer.name for layer in in_running_order(problem, evaluations) if layer.parameter in leaves]
    if unused:
        notes.append(f"Not used by the forward, so without curvature: {', '.join(unused)}.")
    frozen = [
        name
        for name, parameter in problem.model.named_parameters()
        if not parameter.requires_grad and parameter.ndim >= 2 and name not in problem.leaves
    ]
    if frozen:
        notes.append(f"{len(frozen)} frozen {'weight was' if len(frozen) == 1 else 'weights were'} left out.")
    if problem.dropout == "freeze":
        notes.append(f"Random layers were frozen to one draw (seed {problem.seed}).")
    return tuple(notes)


def note_unchecked(check: bool) -> tuple[str, ...]:
    """Nothing vouches for derivatives that were not checked."""
    return () if check else ("The derivatives were not checked against finite differences (check=False).",)


def note_uncounted(problem: Problem, moved: Container[str] | None = None) -> tuple[str, ...]:
    """Biases are trained at the same rate as the weights, and may be the sharper ones where inputs are small.

    `moved` are the names of the parameters that training moves; by default all that are not frozen.
    """
    others = [
        name
        for name, parameter in problem.model.named_parameters()
        if parameter.requires_grad and name not in problem.leaves and (moved is None or name in moved)
    ]
    if not others:
        return ()
    count, them = (
        (f"{len(others)} trained parameters", "them") if len(others) > 1 else ("1 trained parameter", "it")
    )
    shown = ", ".join(others[:3]) + (" …" if len(others) > 3 else "")
    return (f'Not counted in the network\'s ‖H‖: {count} ({shown}); layers="{EVERYTHING}" counts {them}.',)


def versions_of(problem: Problem) -> dict[str, str]:
    """The software, the device and the precision."""
    return {
        "hessinit": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": str(problem.device),
        "dtype": str(problem.dtype).removeprefix("torch."),
    }
