"""Which weights the one number of rule="network" moves, and how much.

With the number `t`, a weight of exponent `e` is multiplied by exp(t·e). A weight that a normalization follows
does not change what the network computes, however it is scaled: no freedom moves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hessinit.schemes.site import Site
from hessinit.schemes.targets import Target

Freedom = Callable[[Sequence[Target], Sequence[Site]], dict[str, float]]


def gain(targets: Sequence[Target], sites: Sequence[Site]) -> dict[str, float]:
    """One gain for all weights that matter."""
    by_key = sites_by_key(sites)
    if not by_key:
        return {target.name: 1.0 for target in targets}
    matter = [target for target in targets if target.key in by_key and not is_normalized(by_key[target.key])]
    return {target.name: 1.0 for target in matter}


def last(targets: Sequence[Target], sites: Sequence[Site]) -> dict[str, float]:
    """The weights whose result is the output, or else the one that runs last."""
    by_key = sites_by_key(sites)
    known = {target.key: target for target in targets}
    ends = [site for site in sites if site.parameter in known and site.after.end == "output"]
    if not ends:
        movable = [target.key for target in targets if target.name in gain(targets, sites)]
        running = [site for site in sites if site.parameter in movable]
        ends = running[-1:]
    if ends:
        return {known[site.parameter].name: 1.0 for site in ends}
    return {targets[-1].name: 1.0} if targets and not by_key else {}


FREEDOMS: dict[str, Freedom] = {"gain": gain, "last": last}


def sites_by_key(sites: Sequence[Site]) -> dict[str, list[Site]]:
    found: dict[str, list[Site]] = {}
    for site in sites:
        found.setdefault(site.parameter, []).append(site)
    return found


def is_normalized(uses: Sequence[Site]) -> bool:
    """Whether a normalization undoes the weight's scale wherever it is used."""
    return bool(uses) and all(site.norm_follows for site in uses)
