"""Fixup (Zhang, Dauphin & Ma 2019, arXiv:1901.09321): every residual branch begins at zero."""

from __future__ import annotations

import math

import torch
from torch import nn

from arena.competitors.evaluation import seeded_generator
from arena.competitors.scales import is_bias
from hessinit.init.draws import draw_


def fixup_(model: nn.Module, *, seed: int = 0) -> None:
    """Draw the weights of a residual network anew, in place. Costs no gradient.

    For residual networks without normalization. The model says what its branches are: `residual_branches()`
    lists the layers of each in order, and `classifier` is its last layer. With L branches, of m layers each:
    the classifier and the last layer of every branch are zero, the other layers of a branch are He's times
    L^(−1/(2m−2)), all further dense and convolutional layers He's, all biases zero.

    Fixup's own networks also have a scalar bias before every layer and a scalar factor in every branch. They
    are part of the network, not of the scheme: where a model has scalar parameters, those named `bias…` get
    0 and the others 1; none are added.
    """
    branches, classifier = _parts(model)
    generator = seeded_generator(seed, "Fixup's weights")
    factors = {layer: 1.0 for layer in model.modules() if isinstance(layer, _LAYERS)}
    for branch in branches:
        for layer in branch[:-1]:
            factors[layer] = len(branches) ** (-1 / (2 * len(branch) - 2))
        factors[branch[-1]] = 0.0
    factors[classifier] = 0.0
    with torch.no_grad():
        for layer, factor in factors.items():
            # fan_in of He: what one output sums over
            draw_(layer.weight, factor * math.sqrt(2 / layer.weight[0].numel()), generator=generator)
            if layer.bias is not None:
                layer.bias.zero_()
        for name, parameter in model.named_parameters():
            if parameter.numel() == 1 and parameter.ndim <= 1 and not _belongs_to_layer(model, name):
                parameter.fill_(0.0 if is_bias(name) else 1.0)


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _parts(model: nn.Module) -> tuple[list[list[nn.Module]], nn.Module]:
    kind = type(model).__name__
    if not hasattr(model, "residual_branches") or not hasattr(model, "classifier"):
        raise ValueError(
            f"{kind} does not say what its residual branches are, and Fixup is for residual networks; "
            "give it a method `residual_branches()` and an attribute `classifier`, or leave Fixup out."
        )
    branches = [list(branch) for branch in model.residual_branches()]
    layers = [layer for branch in branches for layer in branch] + [model.classifier]
    wrong = [type(layer).__name__ for layer in layers if not isinstance(layer, _LAYERS)]
    if wrong or not all(branches):
        raise ValueError(
            f"{kind} lists {wrong[0] if wrong else 'an empty branch'} among its residual branches; "
            "list only layers with a weight (Linear, Conv), in the order in which they run."
        )
    return branches, model.classifier


def _belongs_to_layer(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), _LAYERS)
