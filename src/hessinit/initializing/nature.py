"""What the walk tells about a network that the defaults depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hessinit.initializing import defaults
from hessinit.schemes.site import Site


@dataclass(frozen=True)
class Nature:
    """Whether normalizations set the size of its features, its inputs are tokens, its loss is quadratic."""

    normalized: bool = False
    tokens: bool = False
    quadratic: bool = False

    @property
    def kappa(self) -> float:
        """lr·‖H‖ at which training starts well."""
        if self.normalized:
            return defaults.KAPPA_NORMALIZED
        return defaults.KAPPA_QUADRATIC if self.quadratic else defaults.KAPPA

    @property
    def reason_not_to_sharpen(self) -> str:
        """Empty for a plain network.

        A larger head on features whose size is fixed, or that rare tokens seldom train, only adds noise; and
        no softmax is there to soften what a quadratic loss makes of it.
        """
        if self.normalized:
            return "its features are normalized"
        if self.tokens:
            return "it reads tokens"
        return "its loss is quadratic" if self.quadratic else ""


def nature_of(sites: Sequence[Site], quadratic: bool) -> Nature:
    return Nature(
        normalized=any(site.norm_follows or site.before.end == "norm" for site in sites),
        tokens=any(site.kind == "embedding" for site in sites),
        quadratic=quadratic,
    )
