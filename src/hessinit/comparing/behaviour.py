"""What the user's own functions do, in a few numbers: code that changes behind a name shows in them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hessinit.comparing.batching import place
from hessinit.comparing.experiment import Experiment
from hessinit.comparing.optimizers import make_optimizer
from hessinit.comparing.seeds import as_if_alone, seed_everything
from hessinit.comparing.starts import Normal, Start
from hessinit.comparing.training import build_model, device_of, evaluate_loss, first_look, own_loss
from hessinit.results.result import Plain

OPTIMIZER = "optimizer"
# Momentum shows in the second step, what is kept of past gradients' sizes in the third.
STEPS = 3
# Whatever rates and seeds are asked for, so that more of them are welcome in the folder.
RATE, SEED = 0.1, 0


def behaviour(experiment: Experiment) -> dict[str, Plain]:
    """For the optimizer and the starts that are functions: their settings in words, then numbers.

    Costs a call of each start, with a forward and a backward, and three steps of the optimizer.
    """
    found: dict[str, Plain] = {}
    with as_if_alone():
        if not isinstance(experiment.optimizer, str):
            found[OPTIMIZER] = _of_optimizer(experiment)
        for start in experiment.starts:
            if not isinstance(start.how, (str, Normal)):
                found[f"start {start.name}"] = _of_start(experiment, start)
    return found


def _of_optimizer(experiment: Experiment) -> Plain:
    model = build_model(experiment, SEED)
    loss, chosen = own_loss(experiment, model), experiment.data.starting_batch(SEED)
    seed_everything(SEED, "training")
    optimizer = make_optimizer(experiment.optimizer, model, RATE)
    words = _settings(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        evaluate_loss(model, loss, place(chosen, device_of(model)), experiment.forward).backward()
        optimizer.step()
    return [words, *_numbers(experiment, model)]


def _of_start(experiment: Experiment, start: Start) -> Plain:
    model = build_model(experiment, SEED)
    batch = place(experiment.data.starting_batch(SEED), device_of(model))
    try:
        start.write_(
            model, own_loss(experiment, model), batch, RATE, SEED, experiment.forward, experiment.optimizer
        )
        return ["", *_numbers(experiment, model.train())]
    except Exception as failure:  # its runs will say so
        return [f"fails with a {type(failure).__name__}"]


def _numbers(experiment: Experiment, model: nn.Module) -> list[str]:
    """The length of the weights, then the loss and the length of its gradient."""
    with torch.no_grad():
        length = math.hypot(*(parameter.norm().item() for parameter in model.parameters()))
    return [f"{number:.7g}" for number in (length, *first_look(experiment, model, SEED))]


def _settings(optimizer: Optimizer) -> str:
    """The optimizer's kind and the numbers and words that its groups of parameters are given."""
    groups = [
        ", ".join(f"{name}={value!r}" for name, value in sorted(group.items()) if _is_plain(value))
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(each, (bool, int, float, str)) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))
