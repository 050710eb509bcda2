"""Where the backward passes' signals are gathered, a layer at a time: as they are, or as weight gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hessinit.engines.calls import Call, ConvolutionCall
from hessinit.engines.gram import LayerGram, TracedCall, WrittenGram

# Unfolded patches are formed for so many numbers at a time, about what fits into a cache.
_NUMBERS_AT_ONCE = 2**20
_MOST_WRITTEN = 2**16


class Collector:
    """The signals of one call, (examples, columns, outputs per example), filled piece by piece."""

    def __init__(self, call: Call, time_first: bool, size: int, like: Tensor) -> None:
        outputs = int(torch.Size(call.output_shape).numel()) // size
        self._time_first = time_first
        self._size = size
        self._signals = like.new_empty(size, like.shape[0], outputs)
        self._calls: list[Call] = []
        self._part = slice(0, size)

    def start(self, call: Call, part: slice) -> None:
        """The next piece of the examples."""
        self._calls.append(call)
        self._part = part

    def add(self, column: int, gradient: Tensor, by_example: Tensor) -> None:
        """What one column of the root sent to the call's output."""
        self._signals[self._part, column] = by_example

    def finish(self) -> None:
        """The piece is complete."""

    def gram(self, collectors: Sequence[Any], weight_shape: tuple[int, ...], scale: float) -> LayerGram:
        """The layer's Gram operator from the collectors of all its calls, this one first."""
        traced = [TracedCall(_join(one._calls), one._time_first, one._signals) for one in collectors]
        return LayerGram(traced, weight_shape, scale)


class WritingCollector(Collector):
    """For layers with fewer weights than outputs: every signal becomes its own weight gradient at once."""

    def __init__(self, call: ConvolutionCall, size: int, like: Tensor) -> None:
        self._size, self._part = size, slice(0, size)
        self._factor = like.new_empty(size, like.shape[0] * call.weight.shape[0], call.weight[0].numel())
        self._columns: list[Tensor] = []

    def start(self, call: Call, part: slice) -> None:
        assert isinstance(call, ConvolutionCall)
        self._call, self._part, self._columns = call, part, []

    def add(self, column: int, gradient: Tensor, by_example: Tensor) -> None:
        self._columns.append(gradient)

    def finish(self) -> None:
        """Patches times signals, for all columns of a few examples at a time."""
        call, columns, self._columns = self._call, self._columns, []
        step = max(1, _NUMBERS_AT_ONCE // (call.weight[0].numel() * columns[0][0, 0].numel()))
        for first in range(0, call.rows, step):
            part = slice(first, min(first + step, call.rows))
            kernel, dilation = tuple(call.weight.shape[2:]), tuple(call.dilation)
            patches = F.unfold(call.inputs[part], kernel, dilation, tuple(call.padding), tuple(call.stride))
            signals = torch.stack([column[part].flatten(2) for column in columns], dim=1).flatten(1, 2)
            place = self._factor[self._part.start + part.start : self._part.start + part.stop]
            torch.bmm(signals, patches.transpose(1, 2), out=place)
        del self._call  # and with it the piece's activations

    def gram(self, collectors: Sequence[Any], weight_shape: tuple[int, ...], scale: float) -> LayerGram:
        weights = int(torch.Size(weight_shape).numel())
        return WrittenGram(self._factor.view(-1, weights), self._size, weight_shape, scale)


def collector_for(call: Call, time_first: bool, size: int, like: Tensor, uses: int) -> Collector:
    """Written out where that takes less room and there is a fast way to do it."""
    if isinstance(call, ConvolutionCall) and call.is_plain_image_convolution():
        outputs = int(torch.Size(call.output_shape).numel()) // size
        small = call.weight.numel() <= min(outputs, _MOST_WRITTEN)
        if small and uses == 1 and not time_first and call.rows == size:
            return WritingCollector(call, size, like)
    return Collector(call, time_first, size, like)


def _join(calls: Sequence[Call]) -> Call:
    """One call on the examples of all, in order."""
    return calls[0] if len(calls) == 1 else calls[0].on(torch.cat([call.inputs for call in calls]))
