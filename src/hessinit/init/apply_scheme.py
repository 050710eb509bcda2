"""The verb `apply_scheme_`: closed-form initializations with the true gains, dropout factors and fans.

Two families of rules are easily mixed up. By *norms* (the paper): `forward` keeps the length of the
whole signal, so it divides by the outputs. By *units* (LeCun, Glorot, He): the variance of each
unit is kept, so the forward rule divides by the inputs. Their compromise is the same.
"""

from __future__ import annotations

import fnmatch
import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hessinit.errors import ProblemError, check_positive, choose, did_you_mean
from hessinit.init import draws, mean_field, trace, weights
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Forward
from hessinit.problem.ranks import check_each
from hessinit.problem.validate import check_model, check_present, check_switches, unwrap
from hessinit.results.initialization import PlannedWeight, SchemePlan

BY_NORMS = ["forward", "backward", "compromise"]
CLOSED_FORM = [*BY_NORMS, "lecun", "glorot", "he"]
SCHEMES = [*CLOSED_FORM, "orthogonal", "delta-orthogonal", "lsuv"]
USES_GAIN = [*BY_NORMS, "he", "orthogonal", "delta-orthogonal"]
# The power of the number of residual branches that divides the weight that ends each.
RESIDUAL_POWERS = {"plain": 0.0, "scaled": 0.5, "small": 1.0}
SYNONYMS = {"kaiming": "he", "xavier": "glorot", "msra": "he"}
_UNIT_RULES = ["he", "orthogonal", "delta-orthogonal"]

# What a reader calls the end of a context without an activation in it.
_ENDS = {
    "weight": "a layer",
    "mix": "attention",
    "state": "hidden state",
    "several": "several uses",
}

Pair = tuple[float, float]

# Tracing patches torch.nn.Module for everybody, and a run borrows the global generators.
_ONE_AT_A_TIME = threading.RLock()


@uninterrupted
@torch.inference_mode(False)
def apply_scheme_(
    model: nn.Module,
    scheme: str,
    *,
    sample: Any = None,
    forward: Forward | None = None,
    layers: str | Iterable[str] | None = None,
    distribution: str | None = None,
    gains: Mapping[str, float] | None = None,
    dropout: bool = True,
    residual: str = "plain",
    biases: str = "auto",
    generator: torch.Generator | None = None,
    dry_run: bool = False,
    distributed: str | None = None,
) -> SchemePlan:
    """Draw new weights by a closed form, in place on the same Parameters; returns what each weight got.

    By norms: "forward", "backward", "compromise" (the paper's). By units: "lecun" and "glorot"
    (bare), "he" (with the true gain of the activation). Also "orthogonal" and "delta-orthogonal"
    (with gain), and "lsuv" (needs `sample`). PyTorch's own weights come from each module's
    `reset_parameters()`.

    The model is traced in execution order: on `sample`, an input as `model(sample)` takes it, or
    symbolically without one. So every weight gets the gain of its own activation, the factor √(1−p)
    of its own dropout (`dropout=False` leaves it out) and its true fans. In deep networks of GELU,
    SiLU and their like each gain gets a small variance correction. `residual="scaled"` divides the
    weight that ends a residual branch by the root of the number of branches, "small" by the number
    itself. `gains` overrides the gain of layers by name or glob, or, for "lsuv", the standard
    deviation of their output. Biases become 0; `biases="keep"` leaves them. `undo()` of the result
    restores everything; with `dry_run=True` only the plan is made. A rank of a distributed job
    draws weights of its own, and only with distributed="each": call it before the model is wrapped
    in DistributedDataParallel, which gives all ranks the weights of rank 0.

    Everything is drawn in fp32 or better, on the CPU unless `generator` lives elsewhere, before
    anything is written. Costs about one forward and one copy of the weights.

    >>> model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.36), nn.Linear(16, 10))
    >>> plan = apply_scheme_(model, "he", dry_run=True)
    >>> [round(layer.std[0], 6) for layer in plan]  # 1/√64 at the input, then √2 · √(1−0.36) / √16
    [0.125, 0.282843]
    """
    check_each("apply_scheme_", distributed, model)
    check_model(model, forward)
    choose("scheme", scheme, SCHEMES, SYNONYMS)
    choose("residual", residual, list(RESIDUAL_POWERS))
    choose("biases", biases, ["auto", "zero", "keep"])
    if distribution is not None:
        choose("distribution", distribution, list(draws.DISTRIBUTIONS))
    if distribution is not None and scheme not in CLOSED_FORM:
        raise ProblemError(
            f"distribution={distribution!r} has no meaning for scheme={scheme!r}, which draws in its own "
            "way; leave it out."
        )
    if not isinstance(generator, torch.Generator | None):
        raise ProblemError(f"generator={generator!r} must be a torch.Generator.")
    check_switches(dropout=dropout, dry_run=dry_run)
    if gains is not None and not isinstance(gains, Mapping):
        raise ProblemError(
            f"gains is a {type(gains).__name__}; it must map names to gains: {{'fc2': 1.5}}."
        )
    if gains and scheme not in [*USES_GAIN, "lsuv"]:
        raise ProblemError(
            f"gains has no meaning for scheme={scheme!r}, which uses no gain; leave it out."
        )
    if scheme == "lsuv" and sample is None:
        raise ProblemError(
            "scheme='lsuv' measures the outputs of the layers, so it needs data: pass sample=, a batch of "
            "inputs as the model gets them."
        )
    model = unwrap(model)
    check_present(model)
    if not (targets := weights.find_targets(model, layers)):
        where = "the model has" if layers is None else f"layers={layers!r} names"
        raise ProblemError(
            f"{where} no weight of two or more dimensions, so a scheme has nothing to set."
        )
    with _ONE_AT_A_TIME:
        traced = weights.find_weight_uses(model, sample, forward, dropout=dropout)
    return write_scheme_(
        model,
        scheme,
        targets,
        traced,
        sample,
        forward,
        distribution,
        gains,
        dropout,
        residual,
        biases,
        generator,
        dry_run,
    )


def write_scheme_(
    model: nn.Module,
    scheme: str,
    targets: Sequence[weights.Target],
    traced: weights.TracedWeights,
    sample: Any,
    forward: Forward | None,
    distribution: str | None = None,
    gains: Mapping[str, float] | None = None,
    dropout: bool = True,
    residual: str = "plain",
    biases: str = "auto",
    generator: torch.Generator | None = None,
    dry_run: bool = False,
) -> SchemePlan:
    """`apply_scheme_` to the `targets` of a model that was traced."""
    drafts = _draft_all(targets, traced, scheme, dropout, residual, gains)
    notes = list(traced.notes)
    branches = sum(use.closes_residual for use in traced.uses)
    normalized = any(use.norm_follows or use.upstream.end == "norm" for use in traced.uses)
    if residual == "plain" and branches >= 4 and not normalized:
        notes.append(
            f"{branches} residual branches are added without a normalization: the variance may double with "
            'each. residual="scaled" keeps it within a factor of 3.'
        )
    name = (distribution or "normal") if scheme in CLOSED_FORM else None
    if dry_run and scheme in CLOSED_FORM:
        planned = tuple(draft.planned for draft in drafts)
        return SchemePlan(scheme=scheme, distribution=name, layers=planned, notes=tuple(notes))
    source = generator or torch.default_generator
    with _ONE_AT_A_TIME:
        state = source.get_state()
        drawn = draws.draw_values(model, drafts, scheme, name, biases, generator, sample, forward)
        if dry_run:  # the next run draws the same
            source.set_state(state)
    plan = SchemePlan(
        scheme=scheme, distribution=name, layers=drawn.planned, notes=(*notes, *drawn.notes)
    )
    if dry_run:
        return plan
    restore = weights.snapshot([target for target, _ in drawn.weights])
    try:  # all or nothing: a parametrization may refuse a value
        for target, value in drawn.weights:
            target.write_(value)
        with torch.no_grad():
            for bias, value in drawn.biases.items():
                bias.copy_(value)
    except BaseException:
        restore()
        raise
    changed = []
    for (
        target,
        given,
    ) in drawn.weights:  # some parametrizations change a value, as a spectral norm does
        error = (
            (target.value.to(given) - given).abs().max()
            if target.is_parametrized
            else torch.zeros(())
        )
        if not bool(
            error <= max(4 * torch.finfo(target.value.dtype).eps, 1e-4) * given.abs().max()
        ):
            changed.append(target.name)
    note = f"{', '.join(changed)}: the parametrization changes its value; the plan shows what was given."
    return replace(plan, notes=(*plan.notes, note) if changed else plan.notes, _go_back=restore)


def variance(
    scheme: str, fans: weights.Fans, gains: Pair = (1.0, 1.0), keeps: Pair = (1.0, 1.0)
) -> float:
    """The variance of the weight's entries under one of the closed forms.

    `gains` are those of the activations upstream and downstream, 1/√E f(z)² and 1/√E f'(z)²;
    `keeps` the fractions that dropout keeps there. Scaled by 1/q, a fraction q of the units has 1/q
    times the squared length, in both passes.

    >>> fans = weights.Fans(50, 20)
    >>> variance("he", fans, (2**0.5, 1.0)), variance("forward", fans)
    (0.04000000000000001, 0.05)
    """
    up, down = (gain**2 * keep for gain, keep in zip(gains, keeps, strict=True))
    return {
        "forward": up / fans.outputs,
        "backward": down / fans.inputs,
        "compromise": 2 / (fans.outputs / up + fans.inputs / down),  # their harmonic mean
        "lecun": keeps[0] / fans.inputs,
        "glorot": 2 * keeps[0] / (fans.inputs + fans.outputs),
        "he": up / fans.inputs,
    }[scheme]


def gain_used(scheme: str, gains: Pair) -> float:
    """The gain that the scheme multiplies by, for the table; a mean for the compromise."""
    if scheme == "compromise":
        return math.sqrt(variance(scheme, weights.Fans(1, 1), gains))
    return gains[1] if scheme == "backward" else gains[0]


# --- From the uses of the weights to a plan: one std for each output block of each weight
# -----------------


def _draft_all(
    targets: Sequence[weights.Target],
    traced: weights.TracedWeights,
    scheme: str,
    dropout: bool,
    residual: str,
    gains: Mapping[str, float] | None,
) -> list[draws.Draft]:
    """A draft for each target, in execution order; weights that the forward does not use come last."""
    uses = traced.uses
    by_key = dict[str, list[trace.WeightUse]]()
    for use in uses:
        by_key.setdefault(use.parameter, []).append(use)
    given = _resolve_gains(targets, gains)
    closing = {use.parameter for use in uses if use.closes_residual}
    branches = len(closing) ** RESIDUAL_POWERS[residual] if closing else 1.0
    # A rule by norms lets the size of units change with the widths, which the correction does not
    # know.
    by_units = scheme in _UNIT_RULES or (scheme == "forward" and not weights.widths_change(uses))
    corrections = mean_field.variance_corrections(uses) if by_units else {}
    drafts = []
    for target in targets:
        reason = target.reason_unchanged
        if not reason and target.key not in by_key:
            reason = traced.unmet.get(target.key, "not used by the forward")
        elif (
            not reason
            and any(use.computed for use in by_key[target.key])
            and not target.is_parametrized
        ):
            reason = "the forward changes it before using it"
        if reason:
            shape = tuple(target.stored[0].shape)
            kept = PlannedWeight(
                name=target.name, aliases=target.aliases, shape=shape, unchanged=reason
            )
            drafts.append(draws.Draft(target, kept))
            continue
        candidates = []
        for use in by_key[target.key]:
            if target.is_parametrized and use.shape != tuple(target.value.shape):
                # It transposes inside, as the orthogonal ones do with wide weights.
                use = replace(use, shape=use.shape[::-1], outputs_last=not use.outputs_last)
            branch = branches if use.closes_residual else 1.0
            correction = corrections.get(use.order, 1.0)
            candidates.append(
                _draft(target, use, scheme, dropout, given.get(target.key), correction, branch)
            )
        # A weight with several uses must suit the one that would explode first.
        drafts.append(min(candidates, key=lambda draft: max(draft.planned.std, default=draft.gain)))
    met = {key: found[0].order for key, found in by_key.items()}
    return sorted(drafts, key=lambda draft: met.get(draft.target.key, math.inf))


def _draft(
    target: weights.Target,
    use: trace.WeightUse,
    scheme: str,
    dropout: bool,
    gain: float | None,
    correction: float,
    branch: float,
) -> draws.Draft:
    needed = scheme != "backward", scheme in ("backward", "compromise")
    up = use.upstream.keep if dropout and needed[0] else 1.0
    down = use.downstream.keep if dropout and needed[1] else 1.0
    if not min(up, down) > 0:
        raise ProblemError(
            f"a dropout of p = 1 stands next to {target.name}: nothing passes, so no weight is right. "
            "Lower p, or pass dropout=False."
        )
    plain = (
        _gain(target.name, use.upstream, "before", needed[0] and scheme in USES_GAIN, gain),
        _gain(target.name, use.downstream, "after", needed[1], gain),
    )
    gains = plain[0] * (correction if gain is None else 1.0), plain[1]
    fans = weights.fans_of(use)
    if scheme in CLOSED_FORM:
        std = tuple(math.sqrt(variance(scheme, one, gains, (up, down))) / branch for one in fans)
        factor = math.sqrt(
            variance(scheme, fans[0], gains, (up, down)) / variance(scheme, fans[0], gains)
        )
    else:  # drawn first, then measured
        std = ()
        seen = (
            scheme == "lsuv" and use.upstream.dropout_active
        )  # then the data show what dropout does
        factor = 1.0 if seen else math.sqrt(up)
    used = gain_used(scheme, gains)
    asked = gain if scheme == "lsuv" and gain is not None else gain_used(scheme, plain)
    planned = PlannedWeight(
        name=target.name,
        aliases=target.aliases,
        shape=use.shape,
        kind=use.kind,
        fan_in=tuple(one.inputs for one in fans),
        fan_out=tuple(one.outputs for one in fans),
        upstream=_words(use.upstream),
        downstream=_words(use.downstream),
        norm_follows=use.norm_follows,
        closes_residual=use.closes_residual,
        gain=asked,
        dropout_factor=factor,
        variance_correction=used / gain_used(scheme, plain),
        std=std,
    )
    size = asked / branch if scheme == "lsuv" else used / branch * factor
    if use.kind == "embedding" and scheme in ("orthogonal", "delta-orthogonal"):
        # Entries as large as those of a normal table: a lookup sums nothing.
        size *= math.sqrt(max(use.shape))
    return draws.Draft(target, planned, use, size, factor)


def _gain(name: str, context: trace.Context, side: str, needed: bool, given: float | None) -> float:
    if not needed or given is not None:
        return given if needed and given is not None else 1.0
    if context.trouble:
        raise ProblemError(
            f"{context.trouble} {side} {name} is not elementwise, or not finite, so its gain has no closed "
            f"form; pass gains={{{name!r}: 1.0}} with the gain you want, or scheme='lsuv', which needs none."
        )
    if not 0 < context.moment < math.inf:
        what = "E f(z)²" if side == "before" else "E f'(z)²"
        raise ProblemError(
            f"{context.words} {side} {name} has {what} = {context.moment:g}, so no gain can keep the "
            f"signal's size; pass gains={{{name!r}: 1.0}} with the gain you want."
        )
    return 1 / math.sqrt(context.moment)


def _words(context: trace.Context) -> str:
    """The functions of the context, shortened where an activation is written out step by step."""
    met = re.sub(r"\bweight\b", "a layer", context.words).split(", ")
    return ", ".join([*met[:2], "…", met[-1]] if len(met) > 4 else met) or _ENDS.get(
        context.end, context.end
    )


def _resolve_gains(
    targets: Sequence[weights.Target], gains: Mapping[str, float] | None
) -> dict[str, float]:
    """The gain of each target that `gains` names; a name beats a glob, whatever their order."""
    found: dict[str, float] = {}
    names_of = {target.key: {target.name, target.key, *target.aliases} for target in targets}
    exact = set().union(*names_of.values())
    for pattern, gain in sorted((gains or {}).items(), key=lambda entry: entry[0] in exact):
        check_positive(f"gains[{pattern!r}]", gain, "such as 1.5")
        pairs = names_of.items()
        fitting = [key for key, own in pairs if pattern in own or fnmatch.filter(own, str(pattern))]
        if not fitting:
            names = [target.name for target in targets]
            raise ProblemError(
                f"gains names {pattern!r}, which fits no weight; there are {', '.join(names[:8])}."
                + did_you_mean(str(pattern), names)
            )
        found.update(dict.fromkeys(fitting, float(gain)))
    return found
