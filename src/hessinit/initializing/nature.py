"""What the walk tells about a network that the defaults depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hessinit.schemes.site import Site


@dataclass(frozen=True)
class Nature:
    """Whether normalizations set the size of its features, and whether its inputs are tokens."""

    normalized: bool = False
    tokens: bool = False

    @property
    def reason_not_to_sharpen(self) -> str:
        """Empty for a plain network.

        A larger head on features whose size is fixed, or that rare tokens seldom train, only adds noise.
        """
        if self.normalized:
            return "its features are normalized"
        return "it reads tokens" if self.tokens else ""


def nature_of(sites: Sequence[Site]) -> Nature:
    return Nature(
        normalized=any(site.norm_follows or site.before.end == "norm" for site in sites),
        tokens=any(site.kind == "embedding" for site in sites),
    )
