"""How often a sliding kernel meets one and the same element of its input."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hessinit.curvature.layer_uses import Call, ConvolutionCall


def overlap(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> int:
    """The most windows that any element lies in.

    >>> overlap([3, 3], [1, 1], [1, 1]), overlap([3, 3], [2, 2], [1, 1]), overlap([3], [2], [2])
    (9, 4, 3)
    """
    # The taps that can meet an element are those of one remainder modulo the stride.
    return math.prod(
        math.ceil(taps / (step // math.gcd(step, spread)))
        for taps, step, spread in zip(kernel, stride, dilation, strict=True)
    )


def most_taps(call: Call) -> int:
    """The most outputs (of one channel) that any element of the call's input takes part in; 1 unless shared.

    Then the map from the weight to the output is at most √taps times as long as the input.
    """
    if not isinstance(call, ConvolutionCall):
        return 1
    kernel = call.weight.shape[2:]
    if call.transposed:
        return math.prod(kernel)  # every element is spread over the whole kernel
    positions = math.prod(call.output_shape[2:])
    return min(overlap(kernel, call.stride, call.dilation), positions)
