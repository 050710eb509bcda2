"""Every use of a weight in a model, in the order of execution, with what lies before and after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hessinit.errors import ProblemError
from hessinit.problem.layers import layer_name
from hessinit.problem.problem import Forward
from hessinit.problem.validate import unwrap
from hessinit.schemes.before import passage_before
from hessinit.schemes.frozen import notes_on_frozen
from hessinit.schemes.function_record import record_run
from hessinit.schemes.parts import find_parts
from hessinit.schemes.record import Record, Step, shown_name
from hessinit.schemes.residual import closes_residual
from hessinit.schemes.simplify import simplify
from hessinit.schemes.site import Site
from hessinit.schemes.surroundings import Surroundings
from hessinit.schemes.symbolic_record import record_trace

_ROLES = {
    "add": "added to a signal, not a map of one",
    "cat": "joined to a signal, not a map of one",
    "mul": "scales a signal elementwise",
}


@dataclass(frozen=True)
class Walk:
    """The sites in execution order; `unmet` says why a weight has none; `notes` what was not understood."""

    sites: tuple[Site, ...]
    unmet: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def find_sites(
    model: nn.Module, sample: Any = None, forward: Forward | None = None, *, dropout: bool = True
) -> Walk:
    """Walk the model: run it once on `sample`, or trace it symbolically without one.

    A weight that is used several times, or is tied, has several sites under one name. The model, its
    buffers and the random state are left as found. Costs one forward, or less. Without `dropout`, what is
    met of it is named and counts for nothing.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))
    >>> for site in find_sites(model).sites:
    ...     print(site.parameter, "|", site.before.words, "|", round(site.before.moment, 9), site.before.keep)
    0.weight |  | 1.0 1.0
    3.weight | relu, dropout 0.4 | 0.5 0.6
    """
    model = unwrap(model)
    if next(model.parameters(), None) is None:
        return Walk(())
    if sample is None and forward is not None:
        raise ProblemError(
            "forward= says how the model is called on a sample, and there is none; pass sample=."
        )
    record = record_trace(model) if sample is None else record_run(model, sample, forward)
    if not dropout:
        record.steps = [replace(step, keep=1.0) for step in record.steps]
    simplify(record)
    surroundings = Surroundings(record)
    sites = tuple(
        _site(surroundings, step, order)
        for order, step in enumerate(s for s in record.steps if s.use is not None)
    )
    # On zeros, as the first state of a recurrence by hand, a weight does nothing: its other uses tell.
    telling = {site.parameter for site in sites if site.before.end != "constant"}
    sites = tuple(site for site in sites if site.before.end != "constant" or site.parameter not in telling)
    met = {site.parameter for site in sites}
    notes = dict.fromkeys([*record.notes, *_notes(sites), *notes_on_frozen(model, sites)])
    return Walk(sites, _unmet(model, record, met), tuple(notes))


def _site(surroundings: Surroundings, step: Step, order: int) -> Site:
    use = step.use
    assert use is not None
    return Site(
        parameter=use.parameter,
        kind=use.kind,
        shape=use.shape,
        order=order,
        parts=find_parts(surroundings, step),
        outputs_last=use.outputs_last,
        groups=use.groups,
        stride=use.stride,
        before=passage_before(surroundings.record, step),
        after=surroundings.after(step),
        norm_follows=surroundings.norm_follows(step),
        closes_residual=closes_residual(surroundings, step),
        inside=use.inside,
        computed=use.computed,
        step=step.index,
    )


def _unmet(model: nn.Module, record: Record, met: set[str]) -> dict[str, str]:
    reasons = {}
    for name, parameter in model.named_parameters():
        shown = shown_name(name)
        if parameter.ndim < 2 or name in met or (shown in met and ".parametrizations." in f".{name}"):
            continue
        if shown in met:
            reasons[name] = (
                f"makes up {shown} by an old-style hook; use torch.nn.utils.parametrizations instead"
            )
            continue
        use = record.other_uses.get(name)
        reasons[shown] = "not used by the forward"
        if use is not None:
            reasons[shown] = use if " " in use else _ROLES.get(use, f"used by {use}")
    return reasons


def _notes(sites: tuple[Site, ...]) -> list[str]:
    return [
        f"what lies before {layer_name(site.parameter)} is not understood; its input is taken to be of size 1"
        for site in sites
        if site.before.end == "unknown"
    ]
