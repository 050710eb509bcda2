"""Convolutions in one to three dimensions, with every way of striding, dilating, grouping and padding."""

from __future__ import annotations

import torch
from torch import nn

from zoo.problem import Family, Parts, labels

family = Family()


@family.add()
def conv1d_stride_and_dilation() -> Parts:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, dilation=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(5, 2, 12), labels(3, 5))


@family.add()
def conv2d_relu() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(5, 1, 5, 5), labels(3, 5))


@family.add()
def conv2d_rectangular_strides() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(27, 3),
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(4, 2, 5, 7), labels(3, 4))


@family.add()
def conv3d_stride() -> Parts:
    model = nn.Sequential(
        nn.Conv3d(1, 3, 2, stride=2, padding=(1, 0, 0)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(4, 1, 2, 4, 5), labels(2, 4))


@family.add()
def conv2d_groups() -> Parts:
    model = nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(5, 4, 3, 3), labels(3, 5))


@family.add()
def conv2d_depthwise_separable() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3, padding=1, bias=False),
        nn.SiLU(),
        nn.Conv2d(6, 4, 1),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(36, 2),
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(4, 3, 3, 3), labels(2, 4))


@family.add()
def conv1d_same_padding_even_kernel() -> Parts:
    model = nn.Sequential(nn.Conv1d(2, 3, 4, padding="same"), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(5, 2, 6), labels(3, 5))


@family.add()
def conv2d_same_padding_dilated() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), padding="same", dilation=(2, 1)), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(4, 2, 4, 3), labels(3, 4))


@family.add()
def conv2d_circular_padding() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 3),
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(5, 2, 4, 4), labels(3, 5))


@family.add()
def conv2d_reflect_and_replicate_padding() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, padding_mode="reflect"),
        nn.Tanh(),
        nn.Conv2d(3, 3, 2, padding=1, padding_mode="replicate"),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(48, 2),
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(3, 1, 3, 3), labels(2, 3))


@family.add()
def conv_transpose1d() -> Parts:
    model = nn.Sequential(
        nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1, dilation=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(40, 2),
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(4, 3, 4), labels(2, 4))


@family.add()
def conv_transpose2d_groups_pixels_out() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3, stride=2, groups=2, padding=1)
    )
    return model, nn.MSELoss(), (torch.randn(4, 1, 4, 4), torch.randn(4, 2, 3, 3))


@family.add()
def segmentation_logits_per_pixel() -> Parts:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 3, 1))
    return model, nn.CrossEntropyLoss(), (torch.randn(3, 1, 3, 3), labels(3, 3, 3, 3))


@family.add()
def conv2d_then_upsample() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 2),
        nn.Tanh(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(3, 1, 2, stride=2),
    )
    return model, nn.MSELoss(), (torch.randn(4, 1, 4, 4), torch.randn(4, 1, 3, 3))
