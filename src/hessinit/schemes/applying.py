"""The verb `apply_scheme_`: closed-form starts that know the activation, the dropout and the true fans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError, choose
from hessinit.problem.layers import check_present
from hessinit.problem.problem import Forward
from hessinit.problem.validate import check_model, check_switches, unwrap
from hessinit.results.initialization import SchemePlan
from hessinit.schemes.chains import is_homogeneous
from hessinit.schemes.draw import DISTRIBUTIONS
from hessinit.schemes.drawing import Drawn, draw_values
from hessinit.schemes.geometry import widths_change
from hessinit.schemes.planning import Choices, Draft, draft_all
from hessinit.schemes.rules import BY_NORMS, CLOSED_FORM, SCHEMES, SYNONYMS, USES_GAIN
from hessinit.schemes.targets import find_targets
from hessinit.schemes.walk import find_sites

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
    drift: bool = True,
    residual: str = "plain",
    biases: str = "auto",
    generator: torch.Generator | None = None,
    dry_run: bool = False,
) -> SchemePlan:
    """Draw new weights by a closed form, in place on the same Parameters; returns what each one got.

    By norms: "forward", "backward", "compromise" (the paper's). By units: "lecun" and "glorot" (bare), "he"
    (with the true gain of the activation at hand). Also "orthogonal" and "delta-orthogonal" (with gain),
    "lsuv" (needs `sample`) and "default" (what PyTorch does).

    The model is walked in the order it runs: on `sample`, an input as `model(sample)` takes it, or without
    one by tracing. So every weight gets the gain of its own activation, the factor √(1−p) of its own dropout
    (`dropout=False` leaves it out) and its true fans. In deep networks of GELU, SiLU and their like a gain is
    not enough, because examples drift apart: there each layer gets a small correction on top (`drift=False`
    leaves it out). `residual="scaled"` divides the weight that ends a residual branch by the root of the
    number of branches. `gains` overrides the gain of layers by name or glob, or, for "lsuv", the standard
    deviation that their output shall have. Biases become 0 (or PyTorch's,
    for "default"); `biases="keep"` leaves them. `undo()` of the result takes everything back; with
    `dry_run=True` the plan is all you get, and nothing is touched.

    Everything is drawn in fp32 or better, on the CPU unless `generator` lives elsewhere, before anything is
    written. Costs about one forward and one copy of the weights.

    >>> model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.36), nn.Linear(16, 10))
    >>> plan = apply_scheme_(model, "he", dry_run=True)
    >>> [round(layer.std[0], 6) for layer in plan]  # 1/√64 at the input, then √2 · √(1−0.36) / √16
    [0.125, 0.282843]
    """
    _check(model, scheme, distribution, forward, residual, biases, generator)
    check_switches(dropout=dropout, drift=drift, dry_run=dry_run)
    if gains and scheme not in [*USES_GAIN, "lsuv"]:
        raise ProblemError(f"gains has no meaning for scheme={scheme!r}, which uses no gain; leave it out.")
    if scheme == "lsuv" and sample is None:
        raise ProblemError(
            "scheme='lsuv' measures what the layers give, so it needs data: pass sample=, a batch of "
            "inputs as the model gets them."
        )
    model = unwrap(model)
    check_present(model)
    targets = find_targets(model, layers)
    if not targets:
        where = "the model has" if layers is None else f"layers={layers!r} names"
        raise ProblemError(f"{where} no weight of two or more dimensions, so a scheme has nothing to set.")
    with _ONE_AT_A_TIME:
        walk = find_sites(model, sample, forward, dropout=dropout)
    drafts = draft_all(targets, walk.sites, walk.unmet, Choices(scheme, dropout, residual, gains, drift))
    notes = (*walk.notes, *(draft.note for draft in drafts if draft.note), *_advice(drafts, scheme, residual))
    name = (distribution or "normal") if scheme in CLOSED_FORM else None
    if dry_run and scheme in CLOSED_FORM:
        planned = tuple(draft.planned for draft in drafts)
        return SchemePlan(scheme=scheme, distribution=name, layers=planned, notes=notes)
    with _ONE_AT_A_TIME, _unmoved(generator) if dry_run else contextlib.nullcontext():
        drawn = draw_values(model, drafts, scheme, name, biases, generator, sample, forward)
    plan = SchemePlan(scheme=scheme, distribution=name, layers=drawn.planned, notes=(*notes, *drawn.notes))
    if dry_run:
        return plan
    go_back = _write_(drawn)
    return replace(plan, notes=(*plan.notes, *_changed_on_the_way(drawn)), _go_back=go_back)


def _check(
    model: Any, scheme: Any, distribution: Any, forward: Any, residual: Any, biases: Any, generator: Any
) -> None:
    check_model(model, forward)
    choose("scheme", scheme, SCHEMES, SYNONYMS)
    choose("residual", residual, ["plain", "scaled"])
    choose("biases", biases, ["auto", "zero", "keep"])
    if distribution is not None:
        choose("distribution", distribution, list(DISTRIBUTIONS))
        if scheme not in CLOSED_FORM:
            raise ProblemError(
                f"distribution={distribution!r} has no meaning for scheme={scheme!r}, which draws in its own "
                "way; leave it out."
            )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ProblemError(
            f"generator is a {type(generator).__name__}; pass torch.Generator().manual_seed({generator!r})."
            if isinstance(generator, int)
            else f"generator is a {type(generator).__name__}; it must be a torch.Generator."
        )


def _advice(drafts: list[Draft], scheme: str, residual: str) -> list[str]:
    """What a formula cannot do here, said before it happens."""
    sites = [draft.site for draft in drafts if draft.site is not None]
    branches = sum(site.closes_residual for site in sites)
    normalized = any(site.norm_follows or site.before.end == "norm" for site in sites)
    advice = []
    if residual == "plain" and branches >= 4 and not normalized:
        advice.append(
            f"{branches} residual branches add up without a normalization: the variance may double with "
            'each. residual="scaled" keeps it within a factor of 3.'
        )
    functions = {
        site.before.words: site.before.function for site in sites if site.before.function is not None
    }
    bent = [words for words, function in functions.items() if not is_homogeneous(function)]
    if scheme in BY_NORMS and bent and widths_change(sites):
        advice.append(
            f"{scheme!r} keeps lengths, so units change in size where widths do, but the gain of {bent[0]} "
            "is that of size 1: lengths are kept only roughly. 'he' keeps the size of units."
        )
    return advice


@contextlib.contextmanager
def _unmoved(generator: torch.Generator | None) -> Iterator[None]:
    """What a dry run draws, the real one draws again."""
    source = generator or torch.default_generator
    state = source.get_state()
    try:
        yield
    finally:
        source.set_state(state)


def _write_(drawn: Drawn) -> Callable[[], None]:
    """All or nothing: a parametrization may refuse a value. Returns the way back."""
    ways = [target.keep() for target, _ in drawn.weights]
    biases = {bias: bias.detach().clone() for bias in drawn.biases}

    def go_back() -> None:
        for way in ways:
            way()
        _copy_(biases)

    try:
        for target, value in drawn.weights:
            target.write_(value)
        _copy_(drawn.biases)
    except BaseException:
        go_back()
        raise
    return go_back


def _changed_on_the_way(drawn: Drawn) -> tuple[str, ...]:
    """Some parametrizations make something else of what they are given, as a spectral norm does."""
    changed = [
        target.name
        for target, value in drawn.weights
        if target.is_parametrized and not _close(target.value, value)
    ]
    if not changed:
        return ()
    return (
        f"{', '.join(changed)}: the parametrization changes what it is given; the plan is what was given.",
    )


def _close(stored: Tensor, given: Tensor) -> bool:
    rounding = 4 * torch.finfo(stored.dtype).eps
    return bool((stored.to(given) - given).abs().max() <= max(rounding, 1e-4) * given.abs().max())


@torch.no_grad()
def _copy_(values: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, value in values.items():
        parameter.copy_(value)
