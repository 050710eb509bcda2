"""The user's file of these tests: float64 and small whole numbers, so that no machine differs."""

from __future__ import annotations

NET = '''
import hessinit
import multiprocessing
import time
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

def mirrored():
    """Every half of the batch has the curvature of the whole, 2·2.5² = 12.5, and the loss, 9 at first."""
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.zero_()
    signs = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64).view(8, 1)
    return model, nn.MSELoss(), (2.5 * signs, 3 * signs)

def problem():
    """Three layers without anything in between."""
    return linear(3, 4, 3, 2), nn.MSELoss(), (numbers(8, 3), numbers(8, 2, first=4))

def drawn():
    """Weights that depend on the seed."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), *problem()[1:]

def loud():
    print("a word from the user's own code")
    return problem()

def with_keywords():
    call = lambda model, inputs: 2 * model(inputs)
    return *problem(), {"forward": call, "curvature": "both", "layers": ["0", "2"], "seed": 3}

def as_a_problem():
    call = lambda model, inputs: 2 * model(inputs)
    return hessinit.Problem(*problem(), forward=call, layers=["0", "2"], seed=3)

def as_a_problem_with_options():
    return as_a_problem(), {"optimizer": half_momentum, "curvature": "both"}

def half_momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)

def with_optimizer():
    model, loss, data = regression()
    pairs = [data]
    return model, loss, iter(pairs), {"optimizer": half_momentum}

def with_lambdas():
    model, _, data = drawn()
    loss = lambda output, target: nn.functional.mse_loss(output, target)
    return model, loss, data, {"forward": lambda model, inputs: 2 * model(inputs), "curvature": "both"}

def half_square(output, target):
    return 0.5 * (output - target).square().mean()

def with_a_function_of_the_file():
    model, _, data = drawn()
    return model, half_square, data

def batches():
    model, loss, (inputs, targets) = drawn()
    return model, loss, list(zip(inputs.split(4), targets.split(4)))

def once():
    model, loss, pairs = batches()
    return model, loss, iter(pairs)

SHARED = linear(3, 4, 3, 2)

def one_model():
    return SHARED, *problem()[1:]

def slow():
    model, loss, data = problem()
    model.register_forward_pre_hook(pause)
    return model, loss, data

def pause(*_):
    time.sleep(0.02)

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

def strictly_unfinished():
    return (*problem(), {"max_iterations": 1, "estimator": "lanczos", "strict": True})

# What fails

def helper():
    raise LookupError("no data here")

def fails():
    helper()

def fails_in_a_worker():
    if multiprocessing.parent_process() is not None:
        helper()
    return problem()

def fails_in_the_loss():
    def loss(output, target):
        return output.nosuch

    model, _, batch = problem()
    return model, loss, batch

def wrong_width():
    model, loss, (inputs, targets) = problem()
    return model, loss, (inputs[:, :2], targets)

def leaves():
    raise SystemExit("usage: net.py [--data]")

def with_dropout():
    model, loss, batch = problem()
    return hessinit.Problem(nn.Sequential(model, nn.Dropout()), loss, batch, dropout="refuse")

def partly_frozen():
    model, loss, batch = problem()
    model[0].requires_grad_(False)
    return model, loss, batch

def frozen():
    model, loss, batch = problem()
    return model.requires_grad_(False), loss, batch
'''
