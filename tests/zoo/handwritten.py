"""Weights outside the well-known modules, and well-known modules whose forward is not the well-known one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo.embeddings import per_token_cross_entropy
from zoo.problem import Family, Parts, labels

family = Family()


def normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.6 * torch.randn(*shape))


class OwnParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_linear, self.by_matmul, self.by_einsum = normal(5, 4), normal(5, 4), normal(2, 4, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(F.linear(features, self.by_linear))
        hidden = torch.tanh(torch.matmul(hidden, self.by_matmul))
        return torch.einsum("ni,hio->nho", hidden, self.by_einsum).mean(dim=1)


@family.add()
def own_parameters_linear_matmul_einsum() -> Parts:
    return OwnParameters(), nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


class Conv1D(nn.Module):
    """The Hugging Face layer of that name: a linear layer that keeps its weight as (in, out)."""

    def __init__(self, out: int, features: int) -> None:
        super().__init__()
        self.weight, self.bias = normal(features, out), nn.Parameter(torch.zeros(out))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        shape = (*features.shape[:-1], len(self.bias))
        return torch.addmm(self.bias, features.reshape(-1, features.shape[-1]), self.weight).view(shape)


@family.add()
def hugging_face_conv1d() -> Parts:
    model = nn.Sequential(Conv1D(6, 4), nn.GELU(approximate="tanh"), Conv1D(3, 6))
    return model, per_token_cross_entropy, (torch.randn(3, 3, 4), labels(3, 3, 3))


class BilinearModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bilinear = nn.Linear(4, 3), nn.Bilinear(4, 3, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.bilinear(features, torch.relu(self.inner(features)))


@family.add(hessian_by="loops")
def bilinear() -> Parts:
    return BilinearModel(), nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


class WeightStandardizedConv2d(nn.Conv2d):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        centred = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        weight = centred / (centred.pow(2).mean(dim=(1, 2, 3), keepdim=True) + 1e-5).sqrt()
        return F.conv2d(images, weight, self.bias)


@family.add()
def subclass_of_convolution() -> Parts:
    model = nn.Sequential(WeightStandardizedConv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(5, 2, 3, 3), labels(3, 5))


class ScaledLinear(nn.Linear):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return 3.0 * super().forward(features.sin())


@family.add()
def subclass_of_linear() -> Parts:
    model = nn.Sequential(ScaledLinear(4, 5), nn.ReLU(), ScaledLinear(5, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


def double(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def shift(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (inputs[0] + 0.5,)


@family.add()
def users_own_forward_hooks() -> Parts:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].register_forward_hook(double)
    model[2].register_forward_pre_hook(shift)
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


class WeightReadBesideTheCall(nn.Module):
    """The first layer is called as a module, and its weight also scales the output directly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(features))) * self.first.weight.pow(2).mean().exp()


@family.add()
def weight_read_beside_the_call() -> Parts:
    return WeightReadBesideTheCall(), nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


class HyperNetwork(nn.Module):
    """One layer's output is the next one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.head = nn.Linear(2, 12), nn.Linear(4, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        weight = self.maker(features[:, :2]).unflatten(1, (4, 3))
        return self.head(torch.tanh(torch.bmm(weight, features[:, 2:, None]).squeeze(2)))


@family.add()
def weights_made_per_example() -> Parts:
    return HyperNetwork(), nn.CrossEntropyLoss(), (torch.randn(6, 5), labels(3, 6))


class SquareOfWeight(nn.Module):
    """The output is not linear in the weight even when the features are fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = normal(4, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.weight.pow(2)


@family.add()
def output_quadratic_in_the_weight() -> Parts:
    return SquareOfWeight(), nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))
