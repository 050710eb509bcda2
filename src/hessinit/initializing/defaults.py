"""The numbers and choices that `initialize_` makes when it is not told; all of them, here."""

from __future__ import annotations

# lr·‖H‖ of the network at the start.
KAPPA = 2.0

# What scheme="auto" and freedom="auto" stand for.
AUTO_SCHEME = "lsuv"
AUTO_FREEDOM = "gain"

# Sharpening stops where it would raise the loss above this many times that of a silent network: beyond, the
# curvature comes with a softmax that is sure of what it does not know, and soon falls again.
MOST_SHARPENING = 2.0

MOST_MEASUREMENTS = {"network": 10, "layers": 12}

# Norms are measured in the search to this part of the tolerance that the result must meet.
SEARCH_SHARE = 0.2
