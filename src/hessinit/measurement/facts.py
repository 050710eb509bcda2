"""What every measurement reports beside its numbers: the order of the layers, notes, versions."""

from __future__ import annotations

import math
import platform
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hessinit._version import __version__
from hessinit.curvature.evaluation import Evaluation, unused_leaves
from hessinit.problem import checks
from hessinit.problem.checks import EVERYTHING, Layer
from hessinit.problem.functional import FunctionalProblem

SOFTWARE = {
    "hessinit": __version__,
    "torch": str(torch.__version__),
    "python": platform.python_version(),
}


def in_running_order(problem: FunctionalProblem, evaluations: Sequence[Evaluation]) -> list[Layer]:
    """The measured layers in the order in which the first batch's forward used them; unused ones
    last.
    """

    def moment_of(layer: Layer) -> float:
        moment = evaluations[0].moments[layer.parameter]
        return math.inf if moment is None else moment

    return sorted(problem.layers, key=moment_of)


def notes_on(problem: FunctionalProblem, evaluations: Sequence[Evaluation]) -> tuple[str, ...]:
    """Notes for the report: unused, frozen or random parts of the model, and unusual inputs."""
    notes = [*_note_batch_norm(problem.model)]
    if large_inputs := checks.name_large_inputs(problem.batches[0].inputs):
        notes.append(large_inputs)
    unused = unused_leaves(evaluations)
    layers = in_running_order(problem, evaluations)
    if names := [layer.name for layer in layers if layer.parameter in unused]:
        notes.append(f"Not used by the forward, so without curvature: {', '.join(names)}.")
    frozen = sum(
        not parameter.requires_grad and parameter.ndim >= 2 and name not in problem.leaves
        for name, parameter in problem.model.named_parameters()
    )
    if frozen:
        weights = "weight was" if frozen == 1 else "weights were"
        notes.append(f"{frozen} frozen {weights} left out.")
    if problem.dropout == "freeze" and any(evaluation.drew for evaluation in evaluations):
        notes.append(f"Random layers were frozen to one draw (seed {problem.seed}).")
    return tuple(notes)


def _note_batch_norm(model: nn.Module) -> Iterator[str]:
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not module.training
    }
    for name, norm in [*norms.items()][:1]:
        place = (name or "the model") + (" …" if len(norms) > 1 else "")
        batches_seen = norm.num_batches_tracked
        new = ""
        if batches_seen is not None and not batches_seen:
            new = ", still 0 and 1,"
        yield (
            f"BatchNorm is in eval mode ({place}): ‖H‖ is that with its running statistics{new} as "
            "constants. Training uses the batch's: model.train() measures that, and takes longer, "
            "since examples then depend on one another."
        )


def note_unchecked(check: bool) -> tuple[str, ...]:
    if check:
        return ()
    return ("The derivatives were not checked against finite differences (check=False).",)


def note_uncounted(
    problem: FunctionalProblem, moved: Container[str] | None = None
) -> tuple[str, ...]:
    """The note on trained parameters, such as biases, that the network's ‖H‖ does not include.

    `moved` are the names of the parameters that training moves; by default all that are not frozen.
    """
    uncounted = [
        name
        for name, parameter in problem.model.named_parameters()
        if parameter.requires_grad
        and name not in problem.leaves
        and (moved is None or name in moved)
    ]
    if not uncounted:
        return ()
    several = len(uncounted) > 1
    count = f"{len(uncounted)} trained parameter{'s' if several else ''}"
    pronoun = "them" if several else "it"
    shown = ", ".join(uncounted[:3]) + (" …" if len(uncounted) > 3 else "")
    note = (
        f"Not counted in the network's ‖H‖: {count} ({shown}); "
        f"the pattern '{EVERYTHING}' for layers counts {pronoun}."
    )
    return (note,)


def versions_of(problem: FunctionalProblem) -> dict[str, str]:
    """What the numbers were made with; also the model's class, which titles name."""
    return {
        **SOFTWARE,
        "device": str(problem.device),
        "dtype": str(problem.dtype).removeprefix("torch."),
        "model": type(problem.model).__name__,
    }


def facts_of(problem: FunctionalProblem, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The fields that the results of all measurements share."""
    losses = [evaluation.loss_value * evaluation.weight for evaluation in evaluations]
    return {
        "loss": sum(losses),
        "examples": problem.examples,
        "batches": len(problem.batches),
        "seed": problem.seed,
        "versions": versions_of(problem),
    }
