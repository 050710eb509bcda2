"""The verb `apply_scheme_`: closed-form initializations with the true gains, dropout factors and fans.

Two families of rules are easily mixed up. By *norms* (the paper): `forward` keeps the length of the whole
signal, so it divides by the outputs. By *units* (LeCun, Glorot, He): the variance of each unit is kept, so
the forward rule divides by the inputs. Their compromise is the same.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hessinit.errors import ProblemError, choose, did_you_mean
from hessinit.init import weights
from hessinit.init.context import is_homogeneous
from hessinit.init.draws import DISTRIBUTIONS, Draft, Drawn, draw_values
from hessinit.init.mean_field import variance_corrections
from hessinit.init.trace import Context, WeightUse
from hessinit.problem.layers import check_present
from hessinit.problem.problem import Forward
from hessinit.problem.validate import check_model, check_switches, unwrap
from hessinit.results.initialization import PlannedWeight, SchemePlan

BY_NORMS = ["forward", "backward", "compromise"]
CLOSED_FORM = [*BY_NORMS, "lecun", "glorot", "he"]
SCHEMES = [*CLOSED_FORM, "orthogonal", "delta-orthogonal", "lsuv", "default"]
USES_GAIN = [*BY_NORMS, "he", "orthogonal", "delta-orthogonal"]
SYNONYMS = {"kaiming": "he", "xavier": "glorot", "msra": "he", "pytorch": "default", "torch": "default"}
_UNIT_RULES = ["he", "orthogonal", "delta-orthogonal"]

# What a reader calls the end of a context without an activation in it.
_ENDS = {"weight": "a layer", "mix": "attention", "state": "hidden state", "several": "several uses"}

# Tracing patches torch.nn.Module for everybody, and a run borrows the global generators.
_ONE_AT_A_TIME = threading.RLock()


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
) -> SchemePlan:
    """Draw new weights by a closed form, in place on the same Parameters; returns what each weight got.

    By norms: "forward", "backward", "compromise" (the paper's). By units: "lecun" and "glorot" (bare), "he"
    (with the true gain of the activation). Also "orthogonal" and "delta-orthogonal" (with gain), "lsuv"
    (needs `sample`) and "default" (PyTorch's own).

    The model is traced in execution order: on `sample`, an input as `model(sample)` takes it, or symbolically
    without one. So every weight gets the gain of its own activation, the factor √(1−p) of its own dropout
    (`dropout=False` leaves it out) and its true fans. In deep networks of GELU, SiLU and their like each gain
    gets a small variance correction. `residual="scaled"` divides the weight that ends a residual branch by
    the root of the number of branches. `gains` overrides the gain of layers by name or glob, or, for "lsuv",
    the standard deviation of their output. Biases become 0 (or PyTorch's, for "default"); `biases="keep"`
    leaves them. `undo()` of the result restores everything; with `dry_run=True` only the plan is made.

    Everything is drawn in fp32 or better, on the CPU unless `generator` lives elsewhere, before anything is
    written. Costs about one forward and one copy of the weights.

    >>> model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.36), nn.Linear(16, 10))
    >>> plan = apply_scheme_(model, "he", dry_run=True)
    >>> [round(layer.std[0], 6) for layer in plan]  # 1/√64 at the input, then √2 · √(1−0.36) / √16
    [0.125, 0.282843]
    """
    check_model(model, forward)
    choose("scheme", scheme, SCHEMES, SYNONYMS)
    choose("residual", residual, ["plain", "scaled"])
    choose("biases", biases, ["auto", "zero", "keep"])
    if distribution is not None:
        choose("distribution", distribution, list(DISTRIBUTIONS))
    if distribution is not None and scheme not in CLOSED_FORM:
        raise ProblemError(
            f"distribution={distribution!r} has no meaning for scheme={scheme!r}, which draws in its own "
            "way; leave it out."
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ProblemError(
            f"generator is a {type(generator).__name__}; it must be a torch.Generator, such as "
            "torch.Generator().manual_seed(0)."
        )
    check_switches(dropout=dropout, dry_run=dry_run)
    if gains and scheme not in [*USES_GAIN, "lsuv"]:
        raise ProblemError(f"gains has no meaning for scheme={scheme!r}, which uses no gain; leave it out.")
    if scheme == "lsuv" and sample is None:
        raise ProblemError(
            "scheme='lsuv' measures the outputs of the layers, so it needs data: pass sample=, a batch of "
            "inputs as the model gets them."
        )
    model = unwrap(model)
    check_present(model)
    targets = weights.find_targets(model, layers)
    if not targets:
        where = "the model has" if layers is None else f"layers={layers!r} names"
        raise ProblemError(f"{where} no weight of two or more dimensions, so a scheme has nothing to set.")
    with _ONE_AT_A_TIME:
        traced = weights.find_weight_uses(model, sample, forward, dropout=dropout)
    drafts = _draft_all(targets, traced, _Options(scheme, dropout, residual, gains))
    notes = *traced.notes, *(one.note for one in drafts if one.note), *_advice(drafts, scheme, residual)
    name = (distribution or "normal") if scheme in CLOSED_FORM else None
    if dry_run and scheme in CLOSED_FORM:
        planned = tuple(draft.planned for draft in drafts)
        return SchemePlan(scheme=scheme, distribution=name, layers=planned, notes=notes)
    with _ONE_AT_A_TIME, _restored(generator) if dry_run else contextlib.nullcontext():
        drawn = draw_values(model, drafts, scheme, name, biases, generator, sample, forward)
    plan = SchemePlan(scheme=scheme, distribution=name, layers=drawn.planned, notes=(*notes, *drawn.notes))
    if dry_run:
        return plan
    go_back = _write_(drawn)
    return replace(plan, notes=(*plan.notes, *_notes_on_parametrized(drawn)), _go_back=go_back)


def _advice(drafts: list[Draft], scheme: str, residual: str) -> list[str]:
    """What a formula cannot do here."""
    uses = [draft.use for draft in drafts if draft.use is not None]
    branches = sum(use.closes_residual for use in uses)
    normalized = any(use.norm_follows or use.upstream.end == "norm" for use in uses)
    advice = []
    if residual == "plain" and branches >= 4 and not normalized:
        advice.append(
            f"{branches} residual branches are added without a normalization: the variance may double with "
            'each. residual="scaled" keeps it within a factor of 3.'
        )
    functions = {use.upstream.words: use.upstream.function for use in uses}
    bent = [words for words, one in functions.items() if one is not None and not is_homogeneous(one)]
    if scheme in BY_NORMS and bent and weights.widths_change(uses):
        advice.append(
            f"{scheme!r} keeps lengths, so units change in size where widths do, but the gain of {bent[0]} "
            "is that of size 1: lengths are kept only roughly. 'he' keeps the size of units."
        )
    return advice


@contextlib.contextmanager
def _restored(generator: torch.Generator | None) -> Iterator[None]:
    """The next run draws what a dry run has drawn."""
    source = generator or torch.default_generator
    state = source.get_state()
    try:
        yield
    finally:
        source.set_state(state)


def _write_(drawn: Drawn) -> Callable[[], None]:
    """All or nothing: a parametrization may refuse a value. Returns the way back."""
    restore = weights.snapshot([target for target, _ in drawn.weights])
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


def _notes_on_parametrized(drawn: Drawn) -> tuple[str, ...]:
    """Some parametrizations change the value that they are given, as a spectral norm does."""
    changed = []
    for target, given in drawn.weights:
        if target.is_parametrized:
            stored = target.value
            rounding = max(4 * torch.finfo(stored.dtype).eps, 1e-4)
            if not bool((stored.to(given) - given).abs().max() <= rounding * given.abs().max()):
                changed.append(target.name)
    note = f"{', '.join(changed)}: the parametrization changes its value; the plan shows what was given."
    return (note,) if changed else ()


# --- The rules --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factors:
    """The gains of the activations, and the fractions that dropout keeps, on both sides of a weight.

    The gain upstream is 1/√E f(z)², downstream 1/√E f'(z)². A dropout that keeps a fraction q of the units
    and scales them by 1/q multiplies the squared length of a signal by 1/q, in both passes; hence σ·√q.
    """

    gain_upstream: float = 1.0
    gain_downstream: float = 1.0
    keep_upstream: float = 1.0
    keep_downstream: float = 1.0


def variance(scheme: str, fans: weights.Fans, factors: Factors) -> float:
    """The variance of the weight's entries under one of the closed forms.

    >>> fans = weights.Fans(50, 20)
    >>> variance("he", fans, Factors(2**0.5)), variance("forward", fans, Factors())
    (0.04000000000000001, 0.05)
    """
    up, down = factors.gain_upstream**2, factors.gain_downstream**2
    if scheme == "compromise":
        # The harmonic mean of forward and backward: 2/(in + out) where there is neither gain nor dropout.
        return 2 / (
            fans.outputs / (up * factors.keep_upstream) + fans.inputs / (down * factors.keep_downstream)
        )
    return {
        "forward": up * factors.keep_upstream / fans.outputs,
        "backward": down * factors.keep_downstream / fans.inputs,
        "lecun": factors.keep_upstream / fans.inputs,
        "glorot": 2 * factors.keep_upstream / (fans.inputs + fans.outputs),
        "he": up * factors.keep_upstream / fans.inputs,
    }[scheme]


def gain_used(scheme: str, factors: Factors) -> float:
    """The gain that the scheme multiplies by, for the table; a mean where there are two, 1 for bare ones."""
    if scheme not in USES_GAIN:
        return 1.0
    if scheme == "backward":
        return factors.gain_downstream
    if scheme == "compromise":
        return (
            variance(scheme, weights.Fans(1, 1), Factors(factors.gain_upstream, factors.gain_downstream))
            ** 0.5
        )
    return factors.gain_upstream


# --- From the uses of the weights to a plan: one std for each output block of each weight -----------------


@dataclass(frozen=True)
class _Options:
    scheme: str
    dropout: bool
    residual: str
    gains: Mapping[str, float] | None


def _draft_all(
    targets: Sequence[weights.Target], traced: weights.TracedWeights, options: _Options
) -> list[Draft]:
    """A draft for each target, in execution order; weights that the forward does not use come last."""
    uses = traced.uses
    by_key: dict[str, list[WeightUse]] = {}
    for use in uses:
        by_key.setdefault(use.parameter, []).append(use)
    gains = _resolve_gains(targets, options.gains)
    branches = len({use.parameter for use in uses if use.closes_residual})
    # A rule by norms lets the size of units change with the widths, which the correction does not know.
    by_units = options.scheme in _UNIT_RULES or (
        options.scheme == "forward" and not weights.widths_change(uses)
    )
    corrections = variance_corrections(uses) if by_units else {}
    drafts = []
    for target in targets:
        reason = target.reason_unchanged
        if not reason and target.key not in by_key:
            reason = traced.unmet.get(target.key, "not used by the forward")
        elif not reason and any(use.computed for use in by_key[target.key]) and not target.is_parametrized:
            reason = "the forward changes it before using it"
        if reason:
            shape = tuple(target.stored[0].shape)
            kept = PlannedWeight(name=target.name, aliases=target.aliases, shape=shape, unchanged=reason)
            drafts.append(Draft(target, kept))
            continue
        candidates = [
            _draft(target, use, options, gains.get(target.key), corrections.get(use.order, 1.0), branches)
            for use in (_as_written(target, use) for use in by_key[target.key])
        ]
        drafts.append(_most_cautious(candidates))
    met = {key: found[0].order for key, found in by_key.items()}
    return sorted(drafts, key=lambda draft: met.get(draft.target.key, math.inf))


def _as_written(target: weights.Target, use: WeightUse) -> WeightUse:
    """The use with the shape of the weight as it is written.

    A parametrization may transpose inside, as the orthogonal ones do with wide weights.
    """
    if not target.is_parametrized or use.shape == tuple(target.value.shape):
        return use
    return replace(use, shape=use.shape[::-1], outputs_last=not use.outputs_last)


def _most_cautious(candidates: Sequence[Draft]) -> Draft:
    """A weight with several uses must suit the one that would explode first; a note tells the others."""
    chosen = min(candidates, key=lambda draft: max(draft.planned.std, default=math.inf))
    largest = max(candidates, key=lambda draft: max(draft.planned.std, default=-math.inf))
    std, other = max(chosen.planned.std, default=0.0), max(largest.planned.std, default=0.0)
    if other <= 2 * std:
        return chosen
    note = (
        f"{chosen.planned.name} is drawn for its use as {chosen.planned.kind} (std {std:.3g}); as "
        f"{largest.planned.kind} alone it would get {other:.3g}, so its output there starts small."
    )
    return replace(chosen, note=note)


def _draft(
    target: weights.Target,
    use: WeightUse,
    options: _Options,
    gain: float | None,
    correction: float,
    branches: int,
) -> Draft:
    scheme = options.scheme
    plain = _factors(target, use, options, gain)
    factors = replace(plain, gain_upstream=plain.gain_upstream * (correction if gain is None else 1.0))
    undropped = Factors(factors.gain_upstream, factors.gain_downstream)
    fans = weights.fans_of(use)
    branch = math.sqrt(branches) if options.residual == "scaled" and use.closes_residual else 1.0
    if scheme in CLOSED_FORM:
        factor = math.sqrt(variance(scheme, fans[0], factors) / variance(scheme, fans[0], undropped))
        std = tuple(math.sqrt(variance(scheme, one, factors)) / branch for one in fans)
    else:
        measured = scheme == "lsuv" and use.upstream.dropout_active  # then the data show what dropout does
        factor = 1.0 if measured else math.sqrt(factors.keep_upstream)
        std = tuple(gain_used(scheme, factors) * factor / branch * root for root in _unit_std(scheme, use))
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
        variance_correction=gain_used(scheme, factors) / gain_used(scheme, plain),
        std=std,
    )
    size = asked / branch if scheme == "lsuv" else gain_used(scheme, factors) / branch * factor
    if use.kind == "embedding" and scheme in ("orthogonal", "delta-orthogonal"):
        size *= math.sqrt(
            max(use.shape)
        )  # entries as large as those of a normal table: a lookup sums nothing
    return Draft(target, planned, use, size, factor)


def _unit_std(scheme: str, use: WeightUse) -> tuple[float, ...]:
    """The root mean square of the entries of a (delta-)orthogonal weight of gain 1; () for other schemes."""
    if scheme not in ("orthogonal", "delta-orthogonal"):
        return ()
    if use.kind == "embedding":
        return (1.0,)
    roots = []
    for groups in weights.block_views(use, torch.empty(use.shape, device="meta")):
        outputs, inputs, *kernel = groups[0].shape
        spread = math.prod(kernel) * inputs if scheme == "orthogonal" else inputs
        rest = 1 if scheme == "orthogonal" else math.prod(kernel)
        roots.append(1 / math.sqrt(max(outputs, spread) * rest))
    return tuple(roots)


def _factors(target: weights.Target, use: WeightUse, options: _Options, gain: float | None) -> Factors:
    scheme = options.scheme
    uses_up, uses_down = scheme != "backward", scheme in ("backward", "compromise")
    keeps = [
        context.keep if options.dropout and needed else 1.0
        for context, needed in ((use.upstream, uses_up), (use.downstream, uses_down))
    ]
    if not min(keeps) > 0:
        raise ProblemError(
            f"a dropout of p = 1 stands next to {target.name}: nothing passes, so no weight is right. Lower "
            "p, or pass dropout=False."
        )
    return Factors(
        _gain(target, use.upstream, "before", uses_up and scheme in USES_GAIN, gain),
        _gain(target, use.downstream, "after", uses_down, gain),
        *keeps,
    )


def _gain(target: weights.Target, context: Context, side: str, needed: bool, given: float | None) -> float:
    if not needed or given is not None:
        return given if needed and given is not None else 1.0
    if context.trouble:
        raise ProblemError(
            f"{context.trouble} {side} {target.name} is not elementwise, so its gain has no closed form; "
            f"pass gains={{{target.name!r}: 1.0}} with the gain you want, or scheme='lsuv', which needs none."
        )
    if not 0 < context.moment < math.inf:
        what = "E f(z)²" if side == "before" else "E f'(z)²"
        raise ProblemError(
            f"{context.words} {side} {target.name} has {what} = {context.moment:g}, so no gain can keep the "
            f"signal's size; pass gains={{{target.name!r}: 1.0}} with the gain you want."
        )
    return 1 / math.sqrt(context.moment)


def _words(context: Context) -> str:
    """The functions of the context, shortened where an activation is written out step by step."""
    met = re.sub(r"\bweight\b", "a layer", context.words).split(", ")
    return ", ".join([*met[:2], "…", met[-1]] if len(met) > 4 else met) or _ENDS.get(context.end, context.end)


def _resolve_gains(targets: Sequence[weights.Target], gains: Mapping[str, float] | None) -> dict[str, float]:
    if gains is not None and not isinstance(gains, Mapping):
        raise ProblemError(f"gains is a {type(gains).__name__}; it must map names to gains: {{'fc2': 1.5}}.")
    found: dict[str, float] = {}
    names_of = {target.key: {target.name, target.key, *target.aliases} for target in targets}
    exact = {name for names in names_of.values() for name in names}
    # A name beats a glob, whatever their order.
    for pattern, gain in sorted((gains or {}).items(), key=lambda entry: entry[0] in exact):
        if not isinstance(pattern, str):
            raise ProblemError(f"gains holds the key {pattern!r}; keys are names or globs, such as 'fc2'.")
        if not 0 < as_number(gain) < math.inf:
            raise ProblemError(f"gains[{pattern!r}] is {gain!r}; a gain is a positive number.")
        fitting = [
            key
            for key, own in names_of.items()
            if pattern in own or any(fnmatch.fnmatchcase(name, pattern) for name in own)
        ]
        if not fitting:
            names = [target.name for target in targets]
            raise ProblemError(
                f"gains names {pattern!r}, which fits no weight; there are {', '.join(names[:8])}."
                + did_you_mean(str(pattern), names)
            )
        found.update(dict.fromkeys(fitting, float(gain)))
    return found


def as_number(value: Any) -> float:
    """The value as a number; nan for what is none, as a text or a switch."""
    try:
        return math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        return math.nan
