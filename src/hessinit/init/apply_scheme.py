"""The verb `apply_scheme_`: closed-form initializations with true gains, dropout factors and fans.

Two families of rules are easily mixed up. By *norms* (the paper): `forward` keeps the length of the
whole signal, so it divides by the outputs. By *units* (LeCun, Glorot, He): the variance of each
unit is kept, so the forward rule divides by the inputs. Their compromise is the same.
"""

from __future__ import annotations

import fnmatch
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError, check_positive, choose, did_you_mean
from hessinit.init import draws, mean_field
from hessinit.init.trace import Context, WeightUse
from hessinit.init.weights import (
    Fans,
    Target,
    TracedWeights,
    fans_of,
    find_targets,
    find_weight_uses,
    snapshot,
    widths_change,
)
from hessinit.problem.checks import check_model, check_present, check_switches, unwrap
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Forward, Problem
from hessinit.problem.ranks import check_each
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

# A run borrows the global generators and torch's switch of fused layers.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class Scheme:
    """A scheme by its name, and how `apply_scheme_` shall apply it; checked when it is made."""

    name: str
    distribution: str | None = None
    gains: Mapping[str, float] | None = None
    dropout: bool = True
    residual: str = "plain"
    biases: str = "auto"

    def __post_init__(self) -> None:
        choose("scheme", self.name, SCHEMES, SYNONYMS)
        choose("residual", self.residual, list(RESIDUAL_POWERS))
        choose("biases", self.biases, ["auto", "zero", "keep"])
        check_switches(dropout=self.dropout)
        if self.distribution is not None:
            choose("distribution", self.distribution, list(draws.DISTRIBUTIONS))
            if not self.is_closed_form:
                raise ProblemError(
                    f"distribution={self.distribution!r} has no meaning for scheme={self.name!r}, "
                    "which draws in its own way; leave it out."
                )
        if self.gains is not None and not isinstance(self.gains, Mapping):
            raise ProblemError(
                f"gains is a {type(self.gains).__name__}; it must map names to gains: "
                "{'fc2': 1.5}."
            )
        if self.gains and self.name not in [*USES_GAIN, "lsuv"]:
            raise ProblemError(
                f"gains has no meaning for scheme={self.name!r}, which uses no gain; leave it out."
            )

    @property
    def is_closed_form(self) -> bool:
        return self.name in CLOSED_FORM

    @property
    def drawn_from(self) -> str | None:
        """The distribution of the entries; None for a scheme that draws in its own way."""
        return (self.distribution or "normal") if self.is_closed_form else None

    @property
    def reads_upstream(self) -> bool:
        return self.name != "backward"

    @property
    def reads_downstream(self) -> bool:
        return self.name in ("backward", "compromise")


@uninterrupted
def apply_scheme_(
    problem: Problem | nn.Module,
    scheme: str,
    *,
    sample: Any = None,
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
    """Draw new weights by a closed form, in place; returns what each weight got.

    By norms: "forward", "backward", "compromise" (the paper's). By units: "lecun" and "glorot"
    (bare), "he" (with the true gain of the activation). Also "orthogonal" and "delta-orthogonal"
    (with gain), and "lsuv" (needs `sample`). PyTorch's own weights come from each module's
    `reset_parameters()`.

    One forward is recorded: on `sample`, an input as `model(sample)` takes it, or on the first
    batch of a `Problem`, called by its `forward`; without either, on zeros of a shape that the
    model takes. So every weight gets the gain of its own activation, the factor √(1−p) of its own
    dropout (`dropout=False` leaves it out) and its true fans. In deep networks of GELU, SiLU and
    similar activations each gain gets a small variance correction. `residual="scaled"` divides the
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
    model: Any = problem
    forward = None
    if isinstance(problem, Problem):
        if sample is not None or layers is not None:
            raise ProblemError(
                "a Problem already holds the sample and the layers; leave sample= and layers= out, "
                "or change them by dataclasses.replace(problem, layers=...)."
            )
        model = problem.model
        forward = problem.forward
        sample = problem.batches[0].inputs
        layers = problem.layers
    check_each("apply_scheme_", distributed, model)
    check_model(model, forward)
    options = Scheme(scheme, distribution, gains, dropout, residual, biases)
    check_switches(dry_run=dry_run)
    if not isinstance(generator, torch.Generator | None):
        raise ProblemError(f"generator={generator!r} must be a torch.Generator.")
    return draw_scheme_(model, options, sample, forward, layers, generator, dry_run)


@torch.inference_mode(False)
def draw_scheme_(
    model: nn.Module,
    scheme: Scheme,
    sample: Any,
    forward: Forward | None,
    layers: str | Iterable[str] | None = None,
    generator: torch.Generator | None = None,
    dry_run: bool = False,
) -> SchemePlan:
    """`apply_scheme_` to a model that is called by `forward`."""
    if scheme.name == "lsuv" and sample is None:
        raise ProblemError(
            "scheme='lsuv' measures the outputs of the layers, so it needs data: pass sample=, a "
            "batch of inputs as the model gets them."
        )
    model = unwrap(model)
    check_present(model)
    targets = find_targets(model, layers)
    if not targets:
        subject = "the model has" if layers is None else f"layers={layers!r} names"
        raise ProblemError(
            f"{subject} no weight of two or more dimensions, so a scheme has nothing to set."
        )
    with _ONE_AT_A_TIME:
        traced = find_weight_uses(model, sample, forward, dropout=scheme.dropout)
    job = draws.DrawingJob(model, sample, forward, generator)
    return write_scheme_(job, scheme, targets, traced, dry_run=dry_run)


def write_scheme_(
    job: draws.DrawingJob,
    scheme: Scheme,
    targets: Sequence[Target],
    traced: TracedWeights,
    *,
    dry_run: bool = False,
) -> SchemePlan:
    """Draw and write weights for the `targets` of a model whose forward was recorded."""
    drafts = _draft_all(targets, traced, scheme)
    plan = SchemePlan(
        scheme=scheme.name,
        distribution=scheme.drawn_from,
        layers=tuple(draft.planned for draft in drafts),
        notes=(*traced.notes, *_notes_on_branches(traced.uses, scheme)),
    )
    if dry_run and scheme.is_closed_form:
        return plan
    source = job.generator or torch.default_generator
    with _ONE_AT_A_TIME:
        state = source.get_state()
        drawn = draws.draw_values(job, drafts, scheme.name, scheme.drawn_from, scheme.biases)
        if dry_run:  # the next run draws the same
            source.set_state(state)
    plan = replace(plan, layers=drawn.planned, notes=(*plan.notes, *drawn.notes))
    if dry_run:
        return plan
    restore = _write_(drawn)
    changed = [target.name for target, value in drawn.weights if not _holds(target, value)]
    notes = plan.notes
    if changed:
        names = ", ".join(changed)
        notes += (
            f"{names}: the parametrization changes its value; the plan shows what was given.",
        )
    return replace(plan, notes=notes, _go_back=restore)


def _notes_on_branches(uses: Sequence[WeightUse], scheme: Scheme) -> list[str]:
    branches = sum(use.closes_residual for use in uses)
    normalized = any(use.norm_follows or use.upstream.end == "norm" for use in uses)
    if scheme.residual != "plain" or branches < 4 or normalized:
        return []
    note = (
        f"{branches} residual branches are added without a normalization: the variance may double "
        'with each. residual="scaled" keeps it within a factor of 3.'
    )
    return [note]


def _write_(drawn: draws.Drawn) -> Callable[[], None]:
    """Write all values, or none where a parametrization refuses one; returns the way back."""
    restore = snapshot([target for target, _ in drawn.weights])
    try:
        for target, value in drawn.weights:
            target.write_(value)
        with torch.no_grad():
            for bias, value in drawn.biases.items():
                bias.copy_(value)
    except BaseException:
        restore()
        raise
    return restore


def _holds(target: Target, value: Tensor) -> bool:
    """Whether the weight has the value that was written; a spectral norm, for one, changes it."""
    if not target.is_parametrized:
        return True
    written = target.value
    error = (written.to(value) - value).abs().max()
    rounding = max(4 * torch.finfo(written.dtype).eps, 1e-4)
    return bool(error <= rounding * value.abs().max())


def variance(scheme: str, fans: Fans, gains: Pair = (1.0, 1.0), keeps: Pair = (1.0, 1.0)) -> float:
    """The variance of the weight's entries under one of the closed forms.

    `gains` are those of the activations upstream and downstream, 1/√E f(z)² and 1/√E f'(z)²;
    `keeps` the fractions that dropout keeps there. Scaled by 1/q, a fraction q of the units has 1/q
    times the squared length, in both passes.

    >>> fans = Fans(50, 20)
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


def _gain_used(scheme: str, gains: Pair) -> float:
    """The gain that the scheme multiplies by, for the table; a mean for the compromise."""
    if scheme == "compromise":
        return math.sqrt(variance(scheme, Fans(1, 1), gains))
    return gains[1] if scheme == "backward" else gains[0]


# --- From the uses of the weights to a plan: one std for each output block of each weight


def _draft_all(
    targets: Sequence[Target], traced: TracedWeights, scheme: Scheme
) -> list[draws.Draft]:
    """A draft for each target, in execution order; weights without a use come last."""
    uses_by_key: dict[str, list[WeightUse]] = {}
    for use in traced.uses:
        uses_by_key.setdefault(use.parameter, []).append(use)
    gains = _resolve_gains(targets, scheme.gains)
    corrections = _variance_corrections(traced.uses, scheme)
    closing = {use.parameter for use in traced.uses if use.closes_residual}
    divisor = max(len(closing), 1) ** RESIDUAL_POWERS[scheme.residual]
    drafts = []
    for target in targets:
        uses = uses_by_key.get(target.key, [])
        reason = _reason_unchanged(target, uses, traced)
        if reason:
            unchanged = PlannedWeight(
                name=target.name,
                aliases=target.aliases,
                shape=tuple(target.stored[0].shape),
                unchanged=reason,
            )
            drafts.append(draws.Draft(target, unchanged))
            continue
        candidates = [
            _draft(
                target,
                _as_stored(use, target),
                scheme,
                user_gain=gains.get(target.key),
                correction=corrections.get(use.order, 1.0),
                branch=divisor if use.closes_residual else 1.0,
            )
            for use in uses
        ]
        # A weight with several uses must suit the one that would explode first.
        drafts.append(min(candidates, key=lambda draft: max(draft.planned.std, default=draft.gain)))
    orders = {key: uses[0].order for key, uses in uses_by_key.items()}
    return sorted(drafts, key=lambda draft: orders.get(draft.target.key, math.inf))


def _reason_unchanged(target: Target, uses: Sequence[WeightUse], traced: TracedWeights) -> str:
    if target.reason_unchanged:
        return target.reason_unchanged
    if not uses:
        return traced.unmet.get(target.key, "not used by the forward")
    if any(use.computed for use in uses) and not target.is_parametrized:
        return "the forward changes it before using it"
    return ""


def _variance_corrections(uses: Sequence[WeightUse], scheme: Scheme) -> dict[int, float]:
    # A rule by norms lets the size of units change with the widths, which the correction does not
    # know.
    if scheme.name in _UNIT_RULES or (scheme.name == "forward" and not widths_change(uses)):
        return mean_field.variance_corrections(uses)
    return {}


def _as_stored(use: WeightUse, target: Target) -> WeightUse:
    if not target.is_parametrized or use.shape == tuple(target.value.shape):
        return use
    # The parametrization transposes inside, as the orthogonal ones do with wide weights.
    return replace(use, shape=use.shape[::-1], outputs_last=not use.outputs_last)


def _keeps(target: Target, use: WeightUse, scheme: Scheme) -> Pair:
    """The fractions that dropout keeps upstream and downstream, as far as the scheme reads them."""
    upstream = use.upstream.keep if scheme.dropout and scheme.reads_upstream else 1.0
    downstream = use.downstream.keep if scheme.dropout and scheme.reads_downstream else 1.0
    if not min(upstream, downstream) > 0:
        raise ProblemError(
            f"a dropout of p = 1 stands next to {target.name}: nothing passes, so no weight is "
            "right. Lower p, or pass dropout=False."
        )
    return upstream, downstream


def _gains(target: Target, use: WeightUse, scheme: Scheme, user_gain: float | None) -> Pair:
    """The gains of the activations upstream and downstream, as far as the scheme uses them."""
    upstream = downstream = 1.0
    if scheme.reads_upstream and scheme.name in USES_GAIN:
        upstream = user_gain or _gain(target.name, use.upstream, "before")
    if scheme.reads_downstream:
        downstream = user_gain or _gain(target.name, use.downstream, "after")
    return upstream, downstream


def _draft(
    target: Target,
    use: WeightUse,
    scheme: Scheme,
    user_gain: float | None,
    correction: float,
    branch: float,
) -> draws.Draft:
    """The plan for one use of a weight; `user_gain` replaces the gain of its activation."""
    name = scheme.name
    fans = fans_of(use)
    keeps = _keeps(target, use, scheme)
    plain = gains = _gains(target, use, scheme, user_gain)
    if user_gain is None:
        gains = (plain[0] * correction, plain[1])
    std: tuple[float, ...] = ()
    # Where a dropout is active, the data of "lsuv" show what it does.
    factor = 1.0 if name == "lsuv" and use.upstream.dropout_active else math.sqrt(keeps[0])
    if scheme.is_closed_form:
        variances = [variance(name, block, gains, keeps) for block in fans]
        std = tuple(math.sqrt(block) / branch for block in variances)
        factor = math.sqrt(variances[0] / variance(name, fans[0], gains))
    plain_gain = _gain_used(name, plain)
    correction = _gain_used(name, gains) / plain_gain
    size = _gain_used(name, gains) / branch * factor
    if name == "lsuv":  # drawn first, then measured
        plain_gain = user_gain or plain_gain
        size = plain_gain / branch
    if use.kind == "embedding" and name in ("orthogonal", "delta-orthogonal"):
        # Entries as large as those of a normal table: a lookup sums nothing.
        size *= math.sqrt(max(use.shape))
    planned = PlannedWeight(
        name=target.name,
        aliases=target.aliases,
        shape=use.shape,
        kind=use.kind,
        fan_in=tuple(block.inputs for block in fans),
        fan_out=tuple(block.outputs for block in fans),
        upstream=_words(use.upstream),
        downstream=_words(use.downstream),
        norm_follows=use.norm_follows,
        closes_residual=use.closes_residual,
        gain=plain_gain,
        dropout_factor=factor,
        variance_correction=correction,
        std=std,
    )
    return draws.Draft(target, planned, use, size, factor)


def _gain(name: str, context: Context, side: str) -> float:
    if context.trouble:
        raise ProblemError(
            f"{context.trouble} {side} {name} is not elementwise, or not finite, so its gain has "
            f"no closed form; pass gains={{{name!r}: 1.0}} with the gain you want, or "
            "scheme='lsuv', which needs none."
        )
    if not 0 < context.moment < math.inf:
        symbol = "E f(z)²" if side == "before" else "E f'(z)²"
        raise ProblemError(
            f"{context.words} {side} {name} has {symbol} = {context.moment:g}, so no gain can keep "
            f"the signal's size; pass gains={{{name!r}: 1.0}} with the gain you want."
        )
    return 1 / math.sqrt(context.moment)


def _words(context: Context) -> str:
    """The functions of the context, shortened where an activation is written out step by step."""
    functions = re.sub(r"\bweight\b", "a layer", context.words).split(", ")
    if len(functions) > 4:
        functions = [*functions[:2], "…", functions[-1]]
    return ", ".join(functions) or _ENDS.get(context.end, context.end)


def _resolve_gains(
    targets: Sequence[Target], gains: Mapping[str, float] | None
) -> dict[str, float]:
    """The gain of each target that `gains` names; a name beats a glob, whatever their order."""
    resolved: dict[str, float] = {}
    names_of = {target.key: {target.name, target.key, *target.aliases} for target in targets}
    exact = set().union(*names_of.values())
    for pattern, gain in sorted((gains or {}).items(), key=lambda entry: entry[0] in exact):
        check_positive(f"gains[{pattern!r}]", gain, "such as 1.5")
        matching = [
            key
            for key, names in names_of.items()
            if pattern in names or fnmatch.filter(names, str(pattern))
        ]
        if not matching:
            names = [target.name for target in targets]
            raise ProblemError(
                f"gains names {pattern!r}, which fits no weight; there are "
                f"{', '.join(names[:8])}.{did_you_mean(str(pattern), names)}"
            )
        resolved.update(dict.fromkeys(matching, float(gain)))
    return resolved
