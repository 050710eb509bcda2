"""New values for the planned weights, drawn in full precision beside the model: nothing is written here."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError
from hessinit.problem.layers import layer_name
from hessinit.problem.preserve import untouched_random_state
from hessinit.problem.problem import Forward
from hessinit.results.initialization import PlannedWeight
from hessinit.schemes.draw import draw_, draw_delta_orthogonal_, draw_orthogonal_
from hessinit.schemes.geometry import blocks_of
from hessinit.schemes.lsuv import UnitVariance
from hessinit.schemes.planning import Draft
from hessinit.schemes.running import left_alone, prepare_sample, run
from hessinit.schemes.targets import Target

# A weight that grew by so much, to more than that, undoes something that was meant to be small.
_GROWN = 1000.0


@dataclass(frozen=True)
class Drawn:
    """What is to be written, and the plan as it came out."""

    weights: Sequence[tuple[Target, Tensor]]
    biases: dict[nn.Parameter, Tensor]
    planned: tuple[PlannedWeight, ...]
    notes: tuple[str, ...] = ()


def draw_values(
    model: nn.Module,
    drafts: Sequence[Draft],
    scheme: str,
    distribution: str | None,
    biases: str,
    generator: torch.Generator | None,
    sample: Any,
    forward: Forward | None,
) -> Drawn:
    """New weights for all drafts that are not left alone, and new biases."""
    if scheme == "default":
        return _default_values(drafts, biases, generator)
    generator = _apart(generator)
    planned = {draft.target.key: draft.planned for draft in drafts}
    written = [draft for draft in drafts if draft.site is not None]
    weights = {draft.target.key: _draw(draft, scheme, distribution, generator) for draft in written}
    zeros = {} if biases == "keep" else _zero_biases(written)
    notes: tuple[str, ...] = ()
    if scheme == "lsuv":
        notes = _scale_to_unit_variance_(model, written, weights, zeros, sample, forward)
        planned |= {draft.target.key: _measured(draft, weights[draft.target.key]) for draft in written}
    return Drawn(
        [(draft.target, weights[draft.target.key]) for draft in written],
        zeros,
        tuple(planned.values()),
        notes,
    )


def _draw(draft: Draft, scheme: str, distribution: str | None, generator: torch.Generator | None) -> Tensor:
    assert draft.site is not None
    kind = torch.float64 if draft.target.stored[0].dtype == torch.float64 else torch.float32
    value = torch.empty(draft.site.shape, dtype=kind, device=generator.device if generator else "cpu")
    for part, groups in enumerate(blocks_of(draft.site, value)):
        for block in groups:
            if distribution is not None:
                draw_(block, draft.planned.std[part], distribution, generator)  # type: ignore[arg-type]
            elif scheme == "delta-orthogonal":
                draw_delta_orthogonal_(block, draft.gain, generator)
            else:
                draw_orthogonal_(block, draft.gain, generator)
    padding = getattr(draft.target.owner, "padding_idx", None)
    if draft.site.kind == "embedding" and padding is not None:
        value[padding] = 0
    return value


def _apart(generator: torch.Generator | None) -> torch.Generator:
    """A generator of our own, seeded from the one that was given, or from the global one.

    After torch.manual_seed(0) the user's data are the numbers that seed 0 gives. Weights drawn from another
    generator of that seed would be those very numbers: the first layer's output is several times too large.
    """
    device = generator.device if generator is not None else torch.device("cpu")
    seed = torch.randint(2**62, (1,), generator=generator, device=device)
    return torch.Generator(device).manual_seed(int(seed))


def _zero_biases(drafts: Sequence[Draft]) -> dict[nn.Parameter, Tensor]:
    found = [bias for draft in drafts for bias in draft.target.biases().values()]
    return {bias: torch.zeros_like(bias, requires_grad=False) for bias in found}


def _scale_to_unit_variance_(
    model: nn.Module,
    drafts: Sequence[Draft],
    weights: dict[str, Tensor],
    biases: dict[nn.Parameter, Tensor],
    sample: Any,
    forward: Forward | None,
) -> tuple[str, ...]:
    """One forward on stand-ins for the weights, which gives the factors; then the dropout's share."""
    stored = {
        draft.target.key: draft.target.stored[0] for draft in drafts if not draft.target.is_parametrized
    }
    stand_ins = {key: weights[key].to(parameter, copy=True) for key, parameter in stored.items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    replaced = stand_ins | {names[id(bias)]: value for bias, value in biases.items()}
    wanted = {draft.target.key: draft.gain for draft in drafts}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    mode = UnitVariance(stand_ins, wanted)
    with left_alone(model):
        run(model, prepare_sample(model, sample), forward, {**buffers, **replaced}, mode)
    if mode.silent and not mode.factors:
        raise ProblemError(
            f"all that {layer_name(mode.silent[0])} gives on this sample is 0, and so behind it, so there is "
            "nothing to measure. Pass a sample of several examples that differ."
        )
    for draft in drafts:
        weights[draft.target.key] *= mode.factors.get(draft.target.key, 1.0) * draft.factor
    shown = {draft.target.key: draft.target.name for draft in drafts}
    through = [target.name for target in (draft.target for draft in drafts) if target.is_parametrized]
    unseen = [name for key, name in shown.items() if key not in mode.factors and name not in through]
    failed = [shown[key] for key in mode.failed]
    notes = []
    if unseen:
        notes.append(f"{', '.join(unseen)}: no output of their own to measure, so left orthogonal.")
    if through:
        notes.append(f"{', '.join(through)}: parametrized, so not scaled; left orthogonal.")
    for key, factor in mode.factors.items():
        size = float(weights[key].double().square().mean().sqrt())
        if factor > _GROWN and size > _GROWN:
            notes.append(
                f"{shown[key]} gets a standard deviation of {size:.2g}, for what it reads is that small. If "
                "a gate or a LayerScale before it is meant to start small, leave it out (layers=)."
            )
    for key, factor in mode.shrunk.items():
        notes.append(
            f"{shown[key]} is used again, where its output would be {1 / factor:.2g} times too large, so it "
            "is that much smaller, and what follows its first use starts small."
        )
    if failed:
        notes.append(f"{', '.join(failed)}: no scale gives variance 1 (a bias? max_norm?), left orthogonal.")
    return tuple(notes)


def _measured(draft: Draft, value: Tensor) -> PlannedWeight:
    """The plan with the root mean square of what was drawn, for schemes without a formula."""
    assert draft.site is not None
    roots = [
        torch.cat([block.reshape(-1) for block in groups]).double().square().mean().sqrt()
        for groups in blocks_of(draft.site, value)
    ]
    return dataclasses.replace(draft.planned, std=tuple(float(root) for root in roots))


def _default_values(drafts: Sequence[Draft], biases: str, generator: torch.Generator | None) -> Drawn:
    """What each owner's own `reset_parameters` gives, on a copy of the owner, times the dropout factor."""
    weights: list[tuple[Target, Tensor]] = []
    new_biases: dict[nn.Parameter, Tensor] = {}
    planned: list[PlannedWeight] = []
    twins: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for draft in drafts:
        target = draft.target
        if draft.site is None:
            planned.append(draft.planned)
            continue
        if target.owner not in twins:
            twins[target.owner] = _reset_twin(target.owner, generator)
        twin = twins[target.owner]
        if target.attribute not in twin:
            reason = "its module has no default of its own"
            planned.append(PlannedWeight(name=target.name, shape=draft.site.shape, unchanged=reason))
            continue
        value = twin[target.attribute].detach() * draft.factor
        weights.append((target, value))
        planned.append(_measured(draft, value))
        for name, bias in target.biases().items():
            if biases != "keep":
                new_biases[bias] = twin[name].detach() if biases == "auto" else torch.zeros_like(bias)
    return Drawn(weights, new_biases, tuple(planned))


def _reset_twin(owner: nn.Module, generator: torch.Generator | None) -> dict[str, nn.Parameter]:
    reset = next((name for name in ("reset_parameters", "_reset_parameters") if hasattr(owner, name)), None)
    if reset is None:
        return {}
    twin = copy.deepcopy(owner)
    kind = next(twin.parameters()).dtype
    # bfloat16 and float16 are drawn in float32, as everything else is.
    twin = twin.to("cpu", torch.float32 if kind in (torch.float16, torch.bfloat16) else kind)
    if generator is None:
        getattr(twin, reset)()
        return dict(twin.named_parameters(recurse=False))
    # Modules draw from the global generator only: it is seeded from the one that was given, and put back.
    seed = _apart(generator).initial_seed()
    with untouched_random_state(torch.device("cpu")):
        torch.default_generator.manual_seed(seed)
        getattr(twin, reset)()
    return dict(twin.named_parameters(recurse=False))
