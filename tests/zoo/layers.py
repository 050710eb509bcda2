"""Dense, convolutional, pooling and normalization layers, with every way of setting them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from zoo.problem import Parts, classify, labels, mlp, problems, regress

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "leaky_relu": lambda: nn.LeakyReLU(0.2), "tanh": nn.Tanh, "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU(approximate="tanh"), "silu": nn.SiLU, "mish": nn.Mish,
    "softplus": nn.Softplus, "elu": nn.ELU, "selu": nn.SELU, "prelu": nn.PReLU, "hardswish": nn.Hardswish,
}  # fmt: skip
DENSE: dict[str, Callable[[], Parts]] = {
    **{
        f"mlp_{name}": lambda act=act: classify(mlp(5, 6, 5, 3, act=act), 7, 5)
        for name, act in ACTIVATIONS.items()
    },
    "linear_regression": lambda: regress(nn.Linear(4, 3), (8, 4), (8, 3)),
    "mlp_without_biases": lambda: classify(
        nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)), 6, 4
    ),
    "mlp_wide_output_few_examples": lambda: classify(mlp(4, 5, 20), 2, 4, classes=20),
    "mlp_one_example": lambda: classify(mlp(4, 5, 3, act=nn.SiLU), 1, 4),
    "mlp_in_double_precision": lambda: (
        mlp(4, 5, 3, act=nn.GELU).double(), nn.CrossEntropyLoss(), (torch.randn(6, 4).double(), labels(3, 6))
    ),
}  # fmt: skip


def headed(shape: tuple[int, ...], *body: nn.Module, classes: int = 3) -> Parts:
    """The body, flattened, and a dense layer, on inputs of this shape."""
    with torch.no_grad():
        features = nn.Sequential(*body, nn.Flatten())(torch.zeros(shape)).shape[1]
    return classify(nn.Sequential(*body, nn.Flatten(), nn.Linear(features, classes)), *shape, classes=classes)


def segmentation() -> Parts:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 3, 1))
    return model, nn.CrossEntropyLoss(), (torch.randn(3, 1, 3, 3), labels(3, 3, 3, 3))


CONVOLUTIONS: dict[str, Callable[[], Parts]] = {
    "conv1d_stride_and_dilation": lambda: headed(
        (5, 2, 12), nn.Conv1d(2, 4, 3, stride=2, dilation=2, padding=1), nn.Tanh()
    ),
    "conv2d_relu": lambda: headed(
        (5, 1, 5, 5), nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()
    ),
    "conv2d_rectangular_strides": lambda: headed(
        (4, 2, 5, 7), nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), nn.GELU()
    ),
    "conv3d_stride": lambda: headed(
        (4, 1, 2, 4, 5), nn.Conv3d(1, 3, 2, stride=2, padding=(1, 0, 0)), nn.Tanh(), classes=2
    ),
    "conv2d_groups": lambda: headed((5, 4, 3, 3), nn.Conv2d(4, 6, 2, groups=2), nn.ReLU()),
    "conv2d_depthwise_separable": lambda: headed(
        (4, 3, 3, 3), nn.Conv2d(3, 6, 3, groups=3, padding=1, bias=False), nn.SiLU(),
        nn.Conv2d(6, 4, 1), nn.SiLU(), classes=2,
    ),
    "conv1d_same_padding_even_kernel": lambda: headed(
        (5, 2, 6), nn.Conv1d(2, 3, 4, padding="same"), nn.Tanh()
    ),
    "conv2d_same_padding_dilated": lambda: headed(
        (4, 2, 4, 3), nn.Conv2d(2, 3, (3, 2), padding="same", dilation=(2, 1)), nn.ReLU()
    ),
    "conv2d_circular_padding": lambda: headed(
        (5, 2, 4, 4), nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", stride=2), nn.ReLU()
    ),
    "conv2d_reflect_and_replicate_padding": lambda: headed(
        (3, 1, 3, 3), nn.Conv2d(1, 3, 3, padding=1, padding_mode="reflect"), nn.Tanh(),
        nn.Conv2d(3, 3, 2, padding=1, padding_mode="replicate"), nn.Tanh(), classes=2,
    ),
    "conv_transpose1d": lambda: headed(
        (4, 3, 4), nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1, dilation=2),
        nn.Tanh(), classes=2,
    ),
    "conv_transpose2d_groups_pixels_out": lambda: regress(
        nn.Sequential(
            nn.Conv2d(1, 4, 2, stride=2), nn.ReLU(),
            nn.ConvTranspose2d(4, 2, 3, stride=2, groups=2, padding=1),
        ),
        (4, 1, 4, 4), (4, 2, 3, 3),
    ),
    "segmentation_logits_per_pixel": segmentation,
    "conv2d_then_upsample": lambda: regress(
        nn.Sequential(
            nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(3, 1, 2, stride=2),
        ),
        (4, 1, 4, 4), (4, 1, 3, 3),
    ),
}  # fmt: skip


def pooled_images(pool: nn.Module) -> Parts:
    return headed((5, 1, 6, 6), nn.Conv2d(1, 3, 2), nn.Tanh(), pool)


# FractionalMaxPool is left out: it draws new regions at every call.
POOLING: dict[str, Callable[[], Parts]] = {
    "max_pool2d": lambda: pooled_images(nn.MaxPool2d(2)),
    "max_pool2d_overlapping": lambda: pooled_images(nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)),
    "avg_pool2d": lambda: pooled_images(nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False)),
    "adaptive_max_pool2d": lambda: pooled_images(nn.AdaptiveMaxPool2d((2, 3))),
    "adaptive_avg_pool2d": lambda: pooled_images(nn.AdaptiveAvgPool2d((3, 2))),
    "lp_pool2d": lambda: pooled_images(nn.LPPool2d(2, 2)),
    "max_and_avg_pool1d": lambda: headed(
        (5, 1, 8), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(3, 4, 2), nn.GELU(),
        nn.AvgPool1d(2),
    ),
    "adaptive_pool1d": lambda: headed(
        (5, 2, 7), nn.Conv1d(2, 4, 2), nn.SiLU(), nn.AdaptiveMaxPool1d(4), nn.Conv1d(4, 3, 1), nn.SiLU(),
        nn.AdaptiveAvgPool1d(1),
    ),
    "max_and_avg_pool3d": lambda: headed(
        (4, 1, 3, 5, 5), nn.Conv3d(1, 2, 2), nn.Tanh(), nn.MaxPool3d((1, 2, 2)), nn.AvgPool3d((2, 1, 1)),
        classes=2,
    ),
    "adaptive_pool3d": lambda: headed(
        (4, 1, 3, 3, 3), nn.Conv3d(1, 3, 2), nn.ReLU(), nn.AdaptiveMaxPool3d((2, 2, 1)),
        nn.AdaptiveAvgPool3d(1), classes=2,
    ),
}  # fmt: skip


def normalized(norm: nn.Module) -> Parts:
    body = nn.Conv2d(1, 4, 2), norm, nn.ReLU(), nn.Conv2d(4, 3, 2), nn.GELU()
    return headed((5, 1, 4, 4), *body)


def batch_norm_eval() -> Parts:
    model, loss, batch = normalized(nn.BatchNorm2d(4))
    with torch.no_grad():
        model[1].running_mean.uniform_(-0.5, 0.5)
        model[1].running_var.uniform_(0.5, 2.0)
    return model.eval(), loss, batch


def batch_norm_over_uneven_batches() -> Parts:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    return model, nn.CrossEntropyLoss(), [(torch.randn(size, 4), labels(3, size)) for size in (5, 5, 3)]


class WeightNormByHand(nn.Module):
    def forward(self, length: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        rows = direction.flatten(1)
        return length * (rows / rows.norm(dim=1, keepdim=True)).view_as(direction)


def weight_norm_by_hand(model: Any) -> nn.Module:
    model[0].parametrizations.weight[0] = WeightNormByHand()
    return model


def spectral_norm_eval() -> Parts:
    first = parametrizations.spectral_norm(nn.Linear(4, 5))
    model, loss, batch = classify(nn.Sequential(first, nn.Tanh(), nn.Linear(5, 3)), 6, 4)
    return model.eval(), loss, batch


NORMALIZATION: dict[str, Callable[[], Parts]] = {
    "group_norm": lambda: normalized(nn.GroupNorm(2, 4)),
    "instance_norm": lambda: normalized(nn.InstanceNorm2d(4, affine=True)),
    "layer_norm_images": lambda: normalized(nn.LayerNorm((4, 3, 3), elementwise_affine=False)),
    "batch_norm2d_train": lambda: normalized(nn.BatchNorm2d(4)),
    "batch_norm2d_without_statistics": lambda: normalized(nn.BatchNorm2d(4, track_running_stats=False)),
    "batch_norm2d_eval": batch_norm_eval,
    "instance_norm_with_statistics_train": lambda: normalized(
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    ),
    "batch_norm1d_train_over_uneven_batches": batch_norm_over_uneven_batches,
    "layer_norm": lambda: classify(
        nn.Sequential(
            nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        ),
        6, 5,
    ),
    "rms_norm": lambda: classify(
        nn.Sequential(nn.Linear(5, 6), nn.RMSNorm(6), nn.SiLU(), nn.Linear(6, 3)), 6, 5
    ),
    "weight_norm_linear": lambda: classify(
        nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)), 6, 4
    ),
    "weight_norm_convolution": lambda: headed(
        (5, 1, 3, 3), parametrizations.weight_norm(nn.Conv2d(1, 3, 2)), nn.ReLU()
    ),
    "spectral_norm_eval": spectral_norm_eval,  # train mode moves its vectors, unseen by autograd
}  # fmt: skip

# In train mode norms write their statistics in place, which torch.func does not allow. torch's own second
# derivative of weight norm is wrong (it takes the norm for a constant, and comes out asymmetric).
LOOPS = {"hessian_by": "loops"}
PROBLEMS = problems(
    {**DENSE, **CONVOLUTIONS, **POOLING},
) + problems(
    NORMALIZATION, batch_norm2d_train=LOOPS, instance_norm_with_statistics_train=LOOPS,
    batch_norm1d_train_over_uneven_batches=LOOPS, weight_norm_linear={"stand_in": weight_norm_by_hand},
    weight_norm_convolution={"stand_in": weight_norm_by_hand},
)  # fmt: skip
