"""The numbers and choices that `initialize_` makes when it is not told; all of them, here.

How each was chosen, and what else was tried, is in docs/how-the-default-was-chosen.md.
"""

from __future__ import annotations

# lr·‖H‖ of the network at the start. Training soon lowers the curvature of a plain network, so that twice the
# edge of stability is safe; that of a normalized one rises first.
KAPPA = 4.0
KAPPA_NORMALIZED = 0.5
# A quadratic loss bends as much wherever training gets to: there is nothing to wait for.
KAPPA_QUADRATIC = 1.0
# Normalizations undo much of a gain: a smaller one would have to be so small that it stops the learning.
SMALLEST_GAIN_NORMALIZED = 0.5

# What scheme="auto" stands for; its pre-activations are smaller than 1 where `calm` says so.
AUTO_SCHEME = "lsuv"

# The root mean square of the output of a network that is sharpened quietly.
QUIET = 0.5
# A start that is sharper than it should be by no more than this is made quiet, too, where that is possible.
QUIET_UP_TO = 2.0

# Sharpening by the last weight stops where it would raise the loss above this many times that of a silent
# network: beyond, the curvature comes with a softmax that is sure of what it does not know, and soon falls.
MOST_SHARPENING = 4.0

MOST_MEASUREMENTS = {"network": 10, "layers": 12}

# The old weights are put back if a new one has a standard deviation above the first number and above the
# second number times the old one, or if the loss has grown by the second number. That happens where a small
# factor, such as a LayerScale of 1e-5, precedes a weight that LSUV scales to compensate for it.
ABSURD_SIZE = 1000.0
ABSURD_GROWTH = 100.0

# Norms are measured in the search to this part of the tolerance that the result must meet.
SEARCH_SHARE = 0.2
