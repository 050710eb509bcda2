"""The user's file of the tests of `hessinit compare` and `hessinit sweep`."""

from __future__ import annotations

DIGITS = """
import torch
from torch import nn
from hessinit.digits import load_digits

print("the file is run")
NOISE = torch.rand(3)  # draws when the file is run, which must change no model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 12)
        self.fc2 = nn.Linear(12, 10)

    def forward(self, images, scale=1.0):
        return scale * self.fc2(torch.relu(self.fc1(images.flatten(1))))


def data():
    images, labels = load_digits()
    return images[:200], labels[:200]


def problem():
    print("a word from the user's own code")
    return Net(), nn.CrossEntropyLoss(), data()


def with_lambdas():
    call = lambda model, images: model(images, scale=2.0)
    return Net(), lambda output, target: nn.functional.cross_entropy(output, target), data(), {
        "forward": call, "curvature": "both"}


def with_functions_of_the_file():
    return Net(), cross_entropy, data()


def cross_entropy(output, target):
    return nn.functional.cross_entropy(output, target)


def batches():
    images, labels = data()
    return Net(), nn.CrossEntropyLoss(), list(zip(images.split(20), labels.split(20)))


def slow():
    import time
    time.sleep(0.2)
    return problem()


SHARED = Net()


def one_model():
    return SHARED, nn.CrossEntropyLoss(), data()
"""
