"""A small network on real digits, as PyTorch initializes it: what `hessinit demo` measures."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from hessinit.digits import load_digits

if TYPE_CHECKING:
    from torch import Tensor, nn

EXAMPLES = 256


def problem(seed: int = 0) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """A LeNet for 8×8 images with PyTorch's default weights, its loss and the first 256 embedded digits.

    Sigmoids, as in the LeNet of 1989: the loss, ln 10, looks sound; that conv1 hardly matters does not show.
    Torch's random state stays as it was. The command line measures it as `hessinit.demo:problem`, too.

    >>> model, loss, (images, labels) = problem()
    >>> loss(model(images), labels).item() < 2.4, images.shape
    (True, torch.Size([256, 1, 8, 8]))
    """
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, 8, kernel_size=3, padding=1),
                squash1=nn.Sigmoid(),
                pool1=nn.AvgPool2d(2),
                conv2=nn.Conv2d(8, 16, kernel_size=3, padding=1),
                squash2=nn.Sigmoid(),
                pool2=nn.AvgPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(64, 64),
                squash3=nn.Sigmoid(),
                fc2=nn.Linear(64, 10),
            )
        )
    images, labels = load_digits()
    return model, nn.CrossEntropyLoss(), (images[:EXAMPLES], labels[:EXAMPLES])
