"""Lipschitz constants of the pieces that networks are built from, by the kind of their node in the graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hessinit.curvature.engines import LanczosSettings
from hessinit.curvature.layer_uses import Node
from hessinit.curvature.singular_values import BatchedMap, largest_singular_values
from hessinit.problem.activations import REARRANGING
from hessinit.products.spectral_norms import exact_norms
from hessinit.products.taps import overlap

_LARGEST_EXACT = 512


@dataclass(frozen=True)
class Piece:
    """A node on the way of the signal, which comes in at `position`; shapes are those of the forward."""

    node: Node
    position: int
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    effort: LanczosSettings


def lipschitz_constant(piece: Piece) -> float | None:
    """The constant in Euclidean norm, or an upper bound on it; None when none is known."""
    kind = type(piece.node).__name__
    if kind in _CONSTANTS:
        return _CONSTANTS[kind]
    return _COMPUTED[kind](piece) if kind in _COMPUTED else None


# The largest |f'|. GELU, SiLU and Mish overshoot 1; their maxima are rounded up.
_CONSTANTS = {
    "AbsBackward0": 1.0, "CeluBackward0": 1.0, "ClampBackward0": 1.0, "ClampBackward1": 1.0,
    "ClampMinBackward0": 1.0, "ClampMaxBackward0": 1.0, "ConstantPadNdBackward0": 1.0,
    "ErfBackward0": 2 / math.sqrt(math.pi), "FlipBackward0": 1.0, "GeluBackward0": 1.12905,
    "HardsigmoidBackward0": 0.16667, "HardswishBackward0": 1.5, "HardtanhBackward0": 1.0,
    "LogSigmoidBackward0": 1.0, "MishBackward0": 1.08851, "NegBackward0": 1.0, "PixelShuffleBackward0": 1.0,
    "ReluBackward0": 1.0, "RollBackward0": 1.0, "SelectBackward0": 1.0, "SigmoidBackward0": 0.25,
    "SiluBackward0": 1.09985, "SinBackward0": 1.0, "SliceBackward0": 1.0, "SoftmaxBackward0": 0.5,
    "SoftplusBackward0": 1.0, "SoftshrinkBackward0": 1.0, "TanhBackward0": 1.0, "TransposeBackward1": 1.0,
    "CeluBackward1": 1.0,  # in place
    **dict.fromkeys(REARRANGING, 1.0),
}  # fmt: skip


def _dense(piece: Piece) -> float:
    node, name = piece.node, type(piece.node).__name__
    if name == "MmBackward0":
        return _matrix_norm(node._saved_mat2 if piece.position == 0 else node._saved_self, piece.effort)
    if piece.position == 0:  # the signal is what is added
        return abs(float(node._saved_beta if hasattr(node, "_saved_beta") else 1.0))
    matrix = node._saved_mat2 if piece.position == 1 else node._saved_mat1
    return abs(float(node._saved_alpha)) * _matrix_norm(matrix, piece.effort)


def _matrix_norm(matrix: Tensor, effort: LanczosSettings) -> float:
    stack = matrix.detach().unsqueeze(0)
    if min(matrix.shape) <= _LARGEST_EXACT:
        return float(exact_norms(stack).upper[0])
    found = largest_singular_values(
        BatchedMap.of(stack), dtype=stack.dtype, device=stack.device, **effort.options
    )
    return float(found.upper[0])


def _convolution(piece: Piece) -> float | None:
    """Of the convolution as a linear map of images of the size at hand, by Lanczos."""
    if piece.position != 0:
        return None
    node, weight = piece.node, piece.node._saved_weight.detach()
    single = (1, *piece.shape_in[1:])
    empty = weight.new_zeros(single)
    settings = (node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed,
                node._saved_output_padding, node._saved_groups)  # fmt: skip
    out = (1, *piece.shape_out[1:])

    def push(images: Tensor) -> Tensor:
        return torch.ops.aten.convolution(images.view(single), weight, None, *settings).reshape(1, -1)

    def pull(cotangents: Tensor) -> Tensor:
        return torch.ops.aten.convolution_backward(
            cotangents.view(out), empty, weight, None, *settings, [True, False, False]
        )[0].reshape(1, -1)

    maps = BatchedMap(1, math.prod(single), math.prod(out), push, pull)
    found = largest_singular_values(maps, dtype=weight.dtype, device=weight.device, **piece.effort.options)
    return float(found.upper[0])


def _repeats(piece: Piece) -> float:
    """√ of how often broadcasting repeats the signal."""
    return math.sqrt(max(1.0, math.prod(piece.shape_out) / max(1, math.prod(piece.shape_in))))


def _sum(piece: Piece) -> float:
    scaled = piece.position == 1 or type(piece.node).__name__ == "RsubBackward1"
    alpha = abs(float(getattr(piece.node, "_saved_alpha", 1.0))) if scaled else 1.0
    return alpha * _repeats(piece)


def _product(piece: Piece) -> float:
    factor = piece.node._saved_other if piece.position == 0 else piece.node._saved_self
    return float(torch.as_tensor(factor).detach().abs().max()) * _repeats(piece)


def _quotient(piece: Piece) -> float | None:
    if piece.position != 0:
        return None
    smallest = float(torch.as_tensor(piece.node._saved_other).detach().abs().min())
    return _repeats(piece) / smallest if smallest > 0 else None


def _reduced(piece: Piece) -> float:
    """How many numbers go into one."""
    return math.prod(piece.shape_in) / max(1, math.prod(piece.shape_out))


def _max_pool(piece: Piece) -> float:
    node = piece.node
    stride = node._saved_stride or node._saved_kernel_size
    return math.sqrt(overlap(node._saved_kernel_size, stride, node._saved_dilation))


def _average_pool(piece: Piece) -> float | None:
    """√(largest row sum · largest column sum): every row averages, every element is in `overlap` rows."""
    node = piece.node
    if getattr(node, "_saved_divisor_override", None) is not None:
        return None
    kernel = node._saved_kernel_size
    windows = overlap(kernel, node._saved_stride or kernel, [1] * len(kernel))
    padded = any(node._saved_padding) and not node._saved_count_include_pad
    whole = not (padded or node._saved_ceil_mode)  # windows at the border are divided by less
    return math.sqrt(windows / math.prod(kernel)) if whole else math.sqrt(windows)


def _adaptive_pool(piece: Piece) -> float | None:
    """Neighbouring windows share at most one element in each dimension, as long as the image shrinks."""
    pairs = list(zip(piece.shape_in, piece.shape_out, strict=True))
    if any(after > before for before, after in pairs):
        return None
    return math.sqrt(2.0 ** sum(before % after != 0 for before, after in pairs))


def _batch_norm(piece: Piece) -> float | None:
    node = piece.node
    if node._saved_training or node._saved_running_var is None:
        return None
    scale = (node._saved_running_var.detach().double() + node._saved_eps).rsqrt()
    if node._saved_weight is not None:
        scale = scale * node._saved_weight.detach().abs()
    return float(scale.max())


def _elu(piece: Piece) -> float:
    node = piece.node
    scale = abs(float(node._saved_scale))
    return max(scale, scale * abs(float(node._saved_alpha) * float(node._saved_input_scale)))


def _leaky_relu(piece: Piece) -> float:
    return max(1.0, abs(float(piece.node._saved_negative_slope)))


_COMPUTED: dict[str, Callable[[Piece], float | None]] = {
    "AdaptiveAvgPool2DBackward0": _adaptive_pool,
    "AdaptiveAvgPool3DBackward0": _adaptive_pool,
    "AdaptiveMaxPool2DBackward0": _adaptive_pool,
    "AdaptiveMaxPool3DBackward0": _adaptive_pool,
    "AddBackward0": _sum,
    "AddmmBackward0": _dense,
    "AvgPool2DBackward0": _average_pool,
    "AvgPool3DBackward0": _average_pool,
    "ConvolutionBackward0": _convolution,
    "DivBackward0": _quotient,
    "EluBackward0": _elu,
    "EluBackward1": _elu,  # in place
    "ExpandBackward0": _repeats,
    "LeakyReluBackward0": _leaky_relu,
    "LeakyReluBackward1": _leaky_relu,  # in place
    "MaxPool2DWithIndicesBackward0": _max_pool,
    "MaxPool3DWithIndicesBackward0": _max_pool,
    "MeanBackward0": lambda piece: 1 / math.sqrt(_reduced(piece)),
    "MeanBackward1": lambda piece: 1 / math.sqrt(_reduced(piece)),
    "MmBackward0": _dense,
    "MulBackward0": _product,
    "NativeBatchNormBackward0": _batch_norm,
    "NativeDropoutBackward0": lambda piece: 1 / (1 - piece.node._saved_p) if piece.node._saved_p < 1 else 0.0,
    "PreluKernelBackward0": lambda piece: max(1.0, float(piece.node._saved_weight.detach().abs().max())),
    "RsubBackward1": _sum,
    "SubBackward0": _sum,
    "SumBackward0": lambda piece: math.sqrt(_reduced(piece)),
    "SumBackward1": lambda piece: math.sqrt(_reduced(piece)),
}
