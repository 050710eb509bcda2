"""What a frozen weight does to the size of a signal: unlike the others, it will not be set to keep it."""

from __future__ import annotations

from torch import nn

from hessinit.problem.layers import layer_name
from hessinit.schemes.geometry import fans_of
from hessinit.schemes.site import Site


def notes_on_frozen(model: nn.Module, sites: tuple[Site, ...]) -> list[str]:
    """Where a frozen weight feeds another one with a signal that is not of mean square 1.

    The formulas take every layer to keep the size, so they are off by that much behind it. A frozen weight
    multiplies the mean square of what it gets by fan-in · mean w².
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    sizes: dict[int, tuple[str, float]] = {}
    notes = []
    for site in sites:
        feeder = sizes.get(site.before.feeder)
        if feeder is not None and site.parameter not in frozen and not 0.5 < feeder[1] < 2:
            notes.append(
                f"{feeder[0]} is frozen, and what it gives has a mean square of about {feeder[1]:.2g}; "
                f"{layer_name(site.parameter)} is planned as if it were 1 (lsuv would measure it)"
            )
        weight = model.get_parameter(site.parameter) if site.parameter in frozen else None
        if weight is not None and weight.is_floating_point() and not (weight.is_meta or site.computed):
            came = feeder[1] if feeder is not None else 1.0
            gain = fans_of(site)[0].inputs * float(weight.detach().double().square().mean())
            size = came * gain * site.before.moment / (site.before.keep or 1.0)
            sizes[site.step] = layer_name(site.parameter), size
    return notes
