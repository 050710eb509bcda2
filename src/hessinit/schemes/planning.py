"""From the uses of the weights and a scheme to a plan: one std for each part of each weight."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hessinit.errors import ProblemError
from hessinit.results.initialization import PlannedWeight
from hessinit.schemes.drift import drift_factors
from hessinit.schemes.geometry import blocks_of, fans_of, widths_change
from hessinit.schemes.given_gains import resolve_gains
from hessinit.schemes.rules import CLOSED_FORM, USES_GAIN, Around, gain_used, variance
from hessinit.schemes.site import BY_SHAPE, Passage, Site
from hessinit.schemes.targets import Target

_GAIN_BEFORE = [scheme for scheme in USES_GAIN if scheme != "backward"]
_UNIT_RULES = ["he", "orthogonal", "delta-orthogonal"]

# What a reader calls the end of a passage without an activation in it.
_ENDS = {"weight": "a layer", "mix": "attention", "state": "hidden state", "several": "several uses"}


@dataclass(frozen=True)
class Choices:
    """What the caller decided."""

    scheme: str
    dropout: bool = True
    residual: str = "plain"
    gains: Mapping[str, float] | None = None
    drift: bool = True


@dataclass(frozen=True)
class Draft:
    """A weight with its plan, and the use that decides about it; None for a weight that is left alone.

    `gain` is what an orthogonal matrix is multiplied by, or, for LSUV, the std that its output shall have;
    `factor` is what the dropout calls for on top of a measured or a default size.
    """

    target: Target
    planned: PlannedWeight
    site: Site | None = None
    gain: float = 1.0
    factor: float = 1.0
    note: str = ""


def draft_all(
    targets: Sequence[Target], sites: Sequence[Site], unmet: Mapping[str, str], choices: Choices
) -> list[Draft]:
    """A draft for each target, in the order in which the forward meets them; unmet ones come last."""
    by_key: dict[str, list[Site]] = {}
    for site in sites:
        by_key.setdefault(site.parameter, []).append(site)
    gains = resolve_gains(targets, choices.gains)
    branches = len({site.parameter for site in sites if site.closes_residual})
    # A rule by norms lets the size of units change with the widths, which the drift does not know.
    by_units = choices.scheme in _UNIT_RULES or (choices.scheme == "forward" and not widths_change(sites))
    drifts = drift_factors(sites) if choices.drift and by_units else {}
    drafts = []
    for target in targets:
        reason = target.reason_to_leave_alone
        if not reason and target.key not in by_key:
            reason = unmet.get(target.key, "not used by the forward")
        elif not reason and any(site.computed for site in by_key[target.key]) and not target.is_parametrized:
            reason = "the forward changes it before using it"
        if reason:
            drafts.append(Draft(target, _left_alone(target, reason)))
            continue
        candidates = [
            _draft(target, site, choices, gains.get(target.key), drifts.get(site.order, 1.0), branches)
            for site in (_as_written(target, site) for site in by_key[target.key])
        ]
        drafts.append(_most_cautious(candidates))
    met = {key: uses[0].order for key, uses in by_key.items()}
    return sorted(drafts, key=lambda draft: met.get(draft.target.key, math.inf))


def _as_written(target: Target, site: Site) -> Site:
    """The site with the shape of the weight as it is written.

    A parametrization may transpose inside, as the orthogonal ones do with wide weights.
    """
    if not target.is_parametrized or site.shape == tuple(target.value.shape):
        return site
    return replace(site, shape=site.shape[::-1], outputs_last=not site.outputs_last)


def _most_cautious(candidates: Sequence[Draft]) -> Draft:
    """A weight with several uses must suit the one that would explode first; the others are told."""
    chosen = min(candidates, key=lambda draft: max(draft.planned.std, default=math.inf))
    largest = max(candidates, key=lambda draft: max(draft.planned.std, default=-math.inf))
    std, other = max(chosen.planned.std, default=0.0), max(largest.planned.std, default=0.0)
    if other <= 2 * std:
        return chosen
    note = (
        f"{chosen.planned.name} is drawn for its use as {chosen.planned.kind} (std {std:.3g}); as "
        f"{largest.planned.kind} alone it would get {other:.3g}, so what follows there starts small."
    )
    return replace(chosen, note=note)


def _draft(
    target: Target, site: Site, choices: Choices, gain: float | None, drift: float, branches: int
) -> Draft:
    scheme = choices.scheme
    plain = _around(target, site, choices, gain)
    around = replace(plain, gain_before=plain.gain_before * (drift if gain is None else 1.0))
    undropped = Around(around.gain_before, around.gain_after)
    fans = fans_of(site)
    branch = math.sqrt(branches) if choices.residual == "scaled" and site.closes_residual else 1.0
    if scheme in CLOSED_FORM:
        factor = math.sqrt(variance(scheme, fans[0], around) / variance(scheme, fans[0], undropped))
        std = tuple(math.sqrt(variance(scheme, one, around)) / branch for one in fans)
    else:
        measured = scheme == "lsuv" and site.before.dropout_runs  # then the data show what dropout does
        factor = 1.0 if measured else math.sqrt(around.keep_before)
        std = tuple(gain_used(scheme, around) * factor / branch * root for root in _unit_std(scheme, site))
    asked = gain if scheme == "lsuv" and gain is not None else gain_used(scheme, plain)
    planned = PlannedWeight(
        name=target.name,
        aliases=target.aliases,
        shape=site.shape,
        kind=site.kind,
        fan_in=tuple(one.inputs for one in fans),
        fan_out=tuple(one.outputs for one in fans),
        upstream=_words(site.before),
        downstream=_words(site.after),
        norm_follows=site.norm_follows,
        closes_residual=site.closes_residual,
        gain=asked,
        dropout_factor=factor,
        variance_correction=gain_used(scheme, around) / gain_used(scheme, plain),
        std=std,
    )
    wanted = asked / branch if scheme == "lsuv" else gain_used(scheme, around) / branch * factor
    return Draft(target, planned, site, wanted * _orthogonal_size(scheme, site), factor)


def _orthogonal_size(scheme: str, site: Site) -> float:
    """What makes the entries of an orthogonal table of embeddings as large as those of a normal one.

    Its columns and rows are many; each output is one entry of it.
    """
    is_table = site.kind == "embedding" and scheme in ("orthogonal", "delta-orthogonal")
    return math.sqrt(max(site.shape)) if is_table else 1.0


def _unit_std(scheme: str, site: Site) -> tuple[float, ...]:
    """The root mean square of the entries of a (delta-)orthogonal weight of gain 1; none for others."""
    if scheme not in ("orthogonal", "delta-orthogonal"):
        return ()
    if site.kind == "embedding":
        return (1.0,)  # a lookup sums over nothing, see `_orthogonal_size`
    roots = []
    for groups in blocks_of(site, torch.empty(site.shape, device="meta")):
        outputs, inputs, *taps = groups[0].shape
        spread = math.prod(taps) * inputs if scheme == "orthogonal" else inputs
        rest = 1 if scheme == "orthogonal" else math.prod(taps)
        roots.append(1 / math.sqrt(max(outputs, spread) * rest))
    return tuple(roots)


def _around(target: Target, site: Site, choices: Choices, gain: float | None) -> Around:
    uses_before, uses_after = choices.scheme != "backward", choices.scheme in ("backward", "compromise")
    return Around(
        _gain(target, site.before, "before", choices.scheme in _GAIN_BEFORE, gain),
        _gain(target, site.after, "after", uses_after, gain),
        _checked_keep(target, site.before.keep) if choices.dropout and uses_before else 1.0,
        _checked_keep(target, site.after.keep) if choices.dropout and uses_after else 1.0,
    )


def _gain(target: Target, passage: Passage, side: str, needed: bool, given: float | None) -> float:
    if not needed:
        return 1.0
    if given is not None:
        return given
    if passage.trouble == BY_SHAPE:
        raise ProblemError(
            f"what lies {side} {target.name} is scaled by a shape, which is not known without data; pass "
            "sample=, an input as the model gets it."
        )
    if passage.trouble:
        raise ProblemError(
            f"{passage.trouble} {side} {target.name} is not elementwise, so its gain has no closed form; "
            f"pass gains={{{target.name!r}: 1.0}} with the gain you want, or scheme='lsuv', which needs none."
        )
    if not 0 < passage.moment < math.inf:
        what = "E f(z)²" if side == "before" else "E f'(z)²"
        raise ProblemError(
            f"what lies {side} {target.name} ({passage.words}) has {what} = {passage.moment:g}, so no gain "
            f"can keep the signal's size; pass gains={{{target.name!r}: 1.0}} with the gain you want."
        )
    return 1 / math.sqrt(passage.moment)


def _checked_keep(target: Target, keep: float) -> float:
    if keep > 0:
        return keep
    raise ProblemError(
        f"a dropout of p = 1 stands next to {target.name}: nothing passes, so no weight is right. Lower p, "
        "or pass dropout=False."
    )


def _words(passage: Passage) -> str:
    """What was met, shortened where an activation is written out step by step."""
    met = re.sub(r"\bweight\b", "a layer", passage.words).split(", ")
    return ", ".join([*met[:2], "…", met[-1]] if len(met) > 4 else met) or _ENDS.get(passage.end, passage.end)


def _left_alone(target: Target, reason: str) -> PlannedWeight:
    shape = tuple(target.stored[0].shape)
    return PlannedWeight(name=target.name, aliases=target.aliases, shape=shape, unchanged=reason)
