"""What a kernel of one output channel gives on every example's own images: the patches, never unfolded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hessinit.curvature.layer_uses import ConvolutionCall
from hessinit.curvature.singular_values import BatchedMap


class Patches:
    """The images of one convolution, `size` examples side by side as channels of one input.

    Every (example, group) is then a group of its own in one large convolution, with its own kernel.
    """

    def __init__(self, call: ConvolutionCall, size: int, time_first: bool) -> None:
        inputs = call.inputs
        self._images, self._pairs = inputs.shape[0] // size, size * call.groups
        if time_first:
            apart = inputs.reshape(self._images, size, *inputs.shape[1:])
        else:
            apart = inputs.reshape(size, self._images, *inputs.shape[1:]).transpose(0, 1)
        self._inputs = apart.reshape(self._images, -1, *inputs.shape[2:]).contiguous()
        kernel, channels = call.weight.shape[2:], inputs.shape[1] // call.groups
        lead = (self._pairs * channels, 1) if call.transposed else (self._pairs, channels)
        self._weight = inputs.new_zeros(*lead, *kernel)
        self._out = tuple(call.output_shape[2:])
        self._settings = (call.stride, call.padding, call.dilation, call.transposed, call.output_padding,
                          self._pairs)  # fmt: skip
        self.outputs = self._images * math.prod(self._out)
        self.kernel_size = self._weight.numel() // self._pairs

    def push(self, kernels: Tensor) -> Tensor:
        """From a kernel for every (example, group) to its outputs at all positions."""
        weight = kernels.reshape(self._weight.shape)
        found: Tensor = torch.ops.aten.convolution(self._inputs, weight, None, *self._settings)
        return found.transpose(0, 1).reshape(self._pairs, -1)

    def pull(self, outputs: Tensor) -> Tensor:
        """The transpose of `push`."""
        signals = outputs.reshape(self._pairs, self._images, *self._out).transpose(0, 1).contiguous()
        found: Tensor = torch.ops.aten.convolution_backward(
            signals, self._inputs, self._weight, None, *self._settings, [False, True, False]
        )[1]
        return found.reshape(self._pairs, -1)


def stacked(patches: Sequence[Patches], pairs: int) -> BatchedMap:
    """The outputs of several convolutions with the same kernels, one after the other."""
    outputs = [one.outputs for one in patches]

    def push(kernels: Tensor) -> Tensor:
        return torch.cat([one.push(kernels) for one in patches], dim=1)

    def pull(cotangents: Tensor) -> Tensor:
        parts = cotangents.split(outputs, dim=1)
        return torch.stack([one.pull(part) for one, part in zip(patches, parts, strict=True)]).sum(0)

    return BatchedMap(pairs, patches[0].kernel_size, sum(outputs), push, pull)
