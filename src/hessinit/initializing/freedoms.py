"""Which weights the one number of rule="network" moves, and how much.

A weight that a normalization follows does not change what the network computes, however it is scaled: no
freedom moves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hessinit.initializing import defaults
from hessinit.initializing.workbench import Workbench
from hessinit.schemes.site import Site
from hessinit.schemes.targets import Target

# How far the output of a homogeneous network may be from what its powers say, per weight.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Path:
    """With the number `t`, the log of a weight's factor is its offset plus `t` times its exponent.

    `pace` is how fast log λ grows with `t` where the size of the output does not tell; `lowest` is the
    smallest `t` that makes sense.
    """

    name: str
    exponents: Mapping[str, float]
    offsets: Mapping[str, float] = field(default_factory=dict)
    pace: float | None = None
    lowest: float = -math.inf

    def logs(self, t: float) -> dict[str, float]:
        return {name: self.offsets.get(name, 0.0) + t * power for name, power in self.exponents.items()}


Freedom = Callable[[Sequence[Target], Sequence[Site], Workbench, float], Path]


def gain(targets: Sequence[Target], sites: Sequence[Site], bench: Workbench, aim: float) -> Path:
    """One gain for all weights that matter."""
    normalized = any(site.norm_follows or site.before.end == "norm" for site in sites)
    lowest = math.log(defaults.SMALLEST_GAIN_NORMALIZED) if normalized else -math.inf
    return Path("gain", dict.fromkeys(_mattering(targets, sites), 1.0), lowest=lowest)


def last(targets: Sequence[Target], sites: Sequence[Site], bench: Workbench, aim: float) -> Path:
    """The weights whose result is the output, or else the one that runs last."""
    return Path("last", dict.fromkeys(_ends(targets, sites), 1.0))


def quiet(targets: Sequence[Target], sites: Sequence[Site], bench: Workbench, aim: float) -> Path:
    """The largest weight as small as makes the output quiet, all others larger: sharp without being loud.

    A weight's own curvature does not depend on its own size, only on that of the others. So the largest one
    gets as sharp as `aim`, a norm, allows, and what it begins with is next to nothing. Where branches are
    added up, scaling them would change their shares: the first weight on the trunk is the quiet one, and
    those of the output grow. Only homogeneous networks can be scaled like this; for others it is `last`.
    """
    found = _quiet_and_loud(targets, sites, bench)
    if found is None:
        return last(targets, sites, bench, aim)
    quietest, loud, size = found
    powers = dict.fromkeys(loud, 1.0) | {quietest: -float(len(loud))}
    # The network is about as sharp as that weight alone will be, and that follows from its norm now.
    own = bench.own_norm(quietest)
    first = math.log(aim / own) / (2 * len(loud)) if 0 < own < math.inf else 0.0
    offsets = dict.fromkeys(loud, first) | {quietest: math.log(defaults.QUIET / size) - first * len(loud)}
    return Path("quiet", powers, offsets, pace=2.0 * len(loud))


def is_homogeneous(targets: Sequence[Target], sites: Sequence[Site], bench: Workbench) -> bool:
    """Whether `quiet` can scale it."""
    return _quiet_and_loud(targets, sites, bench) is not None


FREEDOMS: dict[str, Freedom] = {"gain": gain, "last": last, "quiet": quiet}


def _quiet_and_loud(
    targets: Sequence[Target], sites: Sequence[Site], bench: Workbench
) -> tuple[str, list[str], float] | None:
    matter = _mattering(targets, sites)
    ends = [name for name in _ends(targets, sites) if name in matter]
    inner = [name for name in matter if name not in ends]
    size = bench.look().size
    if not ends or not inner or not 0 < size < math.inf:
        return None
    if not any(site.closes_residual for site in sites):
        entries = {target.name: target.value.numel() for target in targets}
        quietest = max(inner, key=entries.__getitem__)
        whole = _answers(bench, size, dict.fromkeys(matter, -math.log(2.0)))
        return (quietest, [name for name in matter if name != quietest], size) if whole else None
    names = {target.key: target.name for target in targets}
    running = list(dict.fromkeys(names[site.parameter] for site in sites if site.parameter in names))
    for name in (one for one in running if one in inner):
        if _answers(bench, size, {name: -math.log(4.0)}):
            return name, ends, size
    return None


def _answers(bench: Workbench, size: float, logs: Mapping[str, float]) -> bool:
    """Whether the output shrinks by as much as the weights together, in one forward."""
    bench.scale_(logs)
    found = bench.look().size
    bench.scale_({})
    expected = size * math.exp(sum(logs.values()))
    return abs(found / expected - 1) < _ROUNDING * len(logs) if expected > 0 else False


def _mattering(targets: Sequence[Target], sites: Sequence[Site]) -> list[str]:
    by_key = sites_by_key(sites)
    if not by_key:
        return [target.name for target in targets]
    return [
        target.name for target in targets if target.key in by_key and not is_normalized(by_key[target.key])
    ]


def _ends(targets: Sequence[Target], sites: Sequence[Site]) -> list[str]:
    known = {target.key: target for target in targets}
    ends = [site for site in sites if site.parameter in known and site.after.end == "output"]
    if not ends:
        mattering = set(_mattering(targets, sites))
        running = [site for site in sites if site.parameter in known]
        ends = [site for site in running if known[site.parameter].name in mattering][-1:]
    if ends:
        return list(dict.fromkeys(known[site.parameter].name for site in ends))
    return [targets[-1].name] if targets and not sites else []


def sites_by_key(sites: Sequence[Site]) -> dict[str, list[Site]]:
    found: dict[str, list[Site]] = {}
    for site in sites:
        found.setdefault(site.parameter, []).append(site)
    return found


def is_normalized(uses: Sequence[Site]) -> bool:
    """Whether a normalization undoes the weight's scale wherever it is used."""
    return bool(uses) and all(site.norm_follows for site in uses)
