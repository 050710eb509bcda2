"""Normalization layers, per example and over the batch, and reparametrized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from zoo.problem import Family, Parts, labels

family = Family()


def normalized_images(norm: nn.Module) -> Parts:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 2), norm, nn.ReLU(), nn.Conv2d(4, 3, 2), nn.GELU(), nn.Flatten(), nn.Linear(12, 3)
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(5, 1, 4, 4), labels(3, 5))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "instance_norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "layer_norm_images": lambda: nn.LayerNorm((4, 3, 3), elementwise_affine=False),
}
for _name, _norm in NORMS.items():
    family.add(_name)(lambda norm=_norm: normalized_images(norm()))


# In train mode batch norm writes its statistics in place, which torch.func does not allow.
@family.add(hessian_by="loops")
def batch_norm2d_train() -> Parts:
    return normalized_images(nn.BatchNorm2d(4))


@family.add()
def batch_norm2d_without_statistics() -> Parts:
    return normalized_images(nn.BatchNorm2d(4, track_running_stats=False))


@family.add()
def batch_norm2d_eval() -> Parts:
    model, loss, batch = normalized_images(nn.BatchNorm2d(4))
    with torch.no_grad():
        model[1].running_mean.uniform_(-0.5, 0.5)
        model[1].running_var.uniform_(0.5, 2.0)
    return model.eval(), loss, batch


@family.add(hessian_by="loops")
def instance_norm_with_statistics_train() -> Parts:
    return normalized_images(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))


@family.add(hessian_by="loops")
def batch_norm1d_train_over_uneven_batches() -> Parts:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    batches = [(torch.randn(size, 4), labels(3, size)) for size in (5, 5, 3)]
    return model, nn.CrossEntropyLoss(), batches


@family.add()
def layer_norm() -> Parts:
    model = nn.Sequential(
        nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 5), labels(3, 6))


@family.add()
def rms_norm() -> Parts:
    model = nn.Sequential(nn.Linear(5, 6), nn.RMSNorm(6), nn.SiLU(), nn.Linear(6, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 5), labels(3, 6))


class WeightNormByHand(nn.Module):
    def forward(self, length: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        rows = direction.flatten(1)
        return length * (rows / rows.norm(dim=1, keepdim=True)).view_as(direction)


def weight_norm_by_hand(model: Any) -> nn.Module:
    model[0].parametrizations.weight[0] = WeightNormByHand()
    return model


# torch's own second derivative of weight norm is wrong (it takes the norm for a constant, and comes out
# asymmetric); its first derivative is right.
@family.add(stand_in=weight_norm_by_hand)
def weight_norm_linear() -> Parts:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


@family.add(stand_in=weight_norm_by_hand)
def weight_norm_convolution() -> Parts:
    first = parametrizations.weight_norm(nn.Conv2d(1, 3, 2))
    model = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(5, 1, 3, 3), labels(3, 5))


# In eval mode only: in train mode every forward moves the vectors of the power iteration, unseen by autograd.
@family.add()
def spectral_norm_eval() -> Parts:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
    return model.eval(), nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))
