"""The network of the demo and its digits."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from hessinit.digits import load_digits

if TYPE_CHECKING:
    from torch import Tensor, nn

LAYERS = 10
WIDTH = 64
EXAMPLES = 256  # that the curvature is measured on: the first of those to train on
TRAINED_ON = 1437  # four fifths; the others are held out

# Of the networks tried (LeNets with sigmoids, tanh or ReLU; dense and convolutional ones of 5 to 10 layers)
# it is the plainest of at least eight layers that PyTorch's own start trains at some rate; and of 0.01, 0.03,
# 0.1, 0.3 and 1 this is the rate at which that start has the lowest mean loss over five seeds: no handicap.
LEARNING_RATE = 0.3


def build_network(seed: int) -> nn.Module:
    """Ten dense layers with tanh between them and PyTorch's default weights; torch's random state stays."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        parts: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for number in range(1, LAYERS):
            parts[f"fc{number}"] = nn.Linear(WIDTH, WIDTH)
            parts[f"tanh{number}"] = nn.Tanh()
        parts[f"fc{LAYERS}"] = nn.Linear(WIDTH, 10)
        return nn.Sequential(parts)


def problem(seed: int = 0) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """The network with PyTorch's default weights, its loss and the first 256 embedded digits.

    The loss, ln 10, looks sound; that the first layers hardly matter does not show. The other commands take
    it as `hessinit.demo:problem`.

    >>> model, loss, (images, labels) = problem()
    >>> loss(model(images), labels).item() < 2.4, images.shape
    (True, torch.Size([256, 1, 8, 8]))
    """
    from torch import nn

    images, labels = load_digits()
    return build_network(seed), nn.CrossEntropyLoss(), (images[:EXAMPLES], labels[:EXAMPLES])
