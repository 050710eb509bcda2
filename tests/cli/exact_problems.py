"""The user's file of the tests of exact text: float64 and small whole numbers, so that no machine differs."""

from __future__ import annotations

EXACT = '''
import torch
from torch import nn


def numbers(rows, columns, first=1):
    """Whole numbers from -2 to 2, the same everywhere."""
    counted = torch.arange(first, first + rows * columns, dtype=torch.float64)
    return (counted * 7 % 5 - 2).view(rows, columns)


def linear(*widths):
    layers = [nn.Linear(before, after, bias=False).double() for before, after in zip(widths, widths[1:])]
    for layer in layers:
        layer.weight.data = numbers(*layer.weight.shape) / 2
    return nn.Sequential(*layers)


def regression():
    """Closed form: H = 2/4 X'X with X = diag(1, 2, 3, 5), so that the norm is 12.5."""
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data = torch.ones(1, 4, dtype=torch.float64)
    inputs = torch.diag(torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64))
    return model, nn.MSELoss(), (inputs, torch.zeros(4, 1, dtype=torch.float64))


def problem():
    """Three layers without anything in between."""
    return linear(3, 4, 3, 2), nn.MSELoss(), (numbers(8, 3), numbers(8, 2, first=4))


def odd_names():
    model = nn.Sequential()
    model.add_module("[red]encoder", nn.Linear(2, 2, bias=False).double())
    long_name = "a_name_that_is_much_longer_than_any_terminal_of_forty_columns"
    model.add_module(long_name, nn.Linear(2, 1).double())
    for layer in model:
        layer.weight.data = numbers(*layer.weight.shape)
    return model, nn.MSELoss(), (numbers(4, 2), numbers(4, 1))


def unfinished():
    return (*problem(), {"max_iterations": 1, "estimator": "lanczos"})


def failing():
    raise LookupError("no data here")


def failing_loss():
    def loss(output, target):
        return output.nosuch

    model, _, batch = regression()
    return model, loss, batch
'''
