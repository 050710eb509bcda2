"""Are stability limits of any optimizer right? Against closed-loop runs on a frozen quadratic.

    python benchmarks/optimizer_limits.py        two minutes on one core (results/optimizer_limits.txt)

A network of 293 parameters gives the quadratic (its Gauss-Newton matrix, dense, in float64) and the gradients
of seven mini-batches. `advise`'s limit follows from the optimizer's response to an alternating perturbation.
The closed loop runs two copies of the optimizer for 400 steps on mini-batch gradients in random order, one of
them disturbed by 1e-6 of the weights and with H times its distance from the other added to its gradients: the
limit is where this distance begins to grow, by bisection to 2 %. Three seeds of network and order. Lion,
Schedule-Free, SOAP and others are packages of their own; what is not installed is left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hessinit
from hessinit.curvature.preconditioner import AdamRule, OptimizerCopy, warm_up

STEPS, WARM = 400, 56
SEEDS = (0, 1, 2)
Make = Callable[[list[nn.Parameter], float], Any]


def muon(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    others = [parameter for parameter in parameters if parameter.ndim != 2]
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(others, lr=lr)]


def optimizers() -> dict[str, Make]:
    optim = torch.optim
    made: dict[str, Make] = {
        "SGD": lambda p, lr: optim.SGD(p, lr),
        "SGD, momentum 0.9": lambda p, lr: optim.SGD(p, lr, momentum=0.9),
        "SGD, Nesterov 0.9": lambda p, lr: optim.SGD(p, lr, momentum=0.9, nesterov=True),
        "SGD, dampening 0.5": lambda p, lr: optim.SGD(p, lr, momentum=0.9, dampening=0.5),
        "Adam": optim.Adam,
        "AdamW, β₂ 0.95": lambda p, lr: optim.AdamW(p, lr, betas=(0.9, 0.95)),
        "Adam, amsgrad": lambda p, lr: optim.Adam(p, lr, amsgrad=True),
        "NAdam": optim.NAdam,
        "RAdam": optim.RAdam,
        "RMSprop": optim.RMSprop,
        "RMSprop, momentum 0.9": lambda p, lr: optim.RMSprop(p, lr, momentum=0.9),
        "Adagrad": optim.Adagrad,
        "Adadelta": optim.Adadelta,
        "Adamax": optim.Adamax,
        "ASGD": optim.ASGD,
        "Adafactor": optim.Adafactor,
        "Rprop": optim.Rprop,
        "Muon with AdamW": muon,
    }
    try:
        from lion_pytorch import Lion

        made["Lion"] = Lion
    except ImportError:
        pass
    try:
        from schedulefree import AdamWScheduleFree, SGDScheduleFree

        made |= {"Schedule-Free AdamW": AdamWScheduleFree, "Schedule-Free SGD": SGDScheduleFree}
    except ImportError:
        pass
    try:
        from pytorch_optimizer import ADOPT, SOAP, Shampoo

        made |= {"SOAP": SOAP, "Shampoo": Shampoo, "ADOPT": ADOPT}
    except ImportError:
        pass
    return made


class Quadratic:
    """A network, its dense Gauss-Newton matrix, and mini-batch gradients."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double()
        self.batch = torch.randn(63, 12, dtype=torch.float64), torch.randint(0, 5, (63,))
        self.loss = nn.CrossEntropyLoss()
        self.seed = seed
        self.parameters = list(self.model.parameters())
        inputs, targets = self.batch
        parts = torch.stack([self.gradient(inputs[k::7], targets[k::7]) for k in range(7)])
        mean = parts.mean(0)
        self.gradients = list(mean + (parts - mean) / math.sqrt(7))  # the noise of the whole batch
        operator = hessinit.gauss_newton(hessinit.Problem(self.model, self.loss, self.batch, layers="**"))
        self.matrix = operator.to_dense()

    def gradient(self, inputs: Tensor, targets: Tensor) -> Tensor:
        gradients = torch.autograd.grad(self.loss(self.model(inputs), targets), self.parameters)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def advised(self, make: Make) -> tuple[float, str]:
        problem = hessinit.Problem(self.model, self.loss, self.batch, layers="**")
        optimizer = hessinit.Training(lambda parameters: make(parameters, 1e-3))
        advice = hessinit.advise(problem, optimizer=optimizer, trial_steps=0)
        if advice.optimizer.startswith("Adam(") or advice.optimizer.startswith("AdamW("):
            # Adam's first step has a limit of its own, which a closed loop that goes on does not see.
            beta = optimizer.build(self.model).param_groups[0]["betas"][0]
            return AdamRule(beta1=beta).stability_limit(advice.norm.value), ""
        return advice.stable_learning_rate, advice.stable_reason

    def grows(self, make: Make, lr: float) -> bool:
        """Whether the distance of the two copies is ten times as long in the end."""
        stepper = hessinit.Training(lambda parameters: make(parameters, lr)).build(self.model)
        first = OptimizerCopy(stepper.optimizers, self.parameters)
        warm_up(first, self.gradients, WARM)
        second = OptimizerCopy(first.optimizers, first.parameters)
        generator = torch.Generator().manual_seed(self.seed)
        distance = torch.randn(len(self.matrix), generator=generator, dtype=torch.float64)
        distance *= 1e-6 / distance.norm()
        start = float(distance.norm())
        for _ in range(STEPS):
            gradient = self.gradients[int(torch.randint(7, (1,), generator=generator))]
            update = first.update(gradient)
            distance = distance + second.update(gradient + self.matrix @ distance) - update
            if not float(distance.norm()) < 1e3 * start:
                return True
        return float(distance.norm()) > 10 * start

    def closed_loop(self, make: Make) -> float:
        high = 1e-5
        while not self.grows(make, high) and high < 1e5:
            high *= 4
        low = high / 4
        while high / low > 1.02:
            middle = math.sqrt(low * high)
            if self.grows(make, middle):
                high = middle
            else:
                low = middle
        return math.sqrt(low * high)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    quadratics = [Quadratic(seed) for seed in SEEDS]
    print(f"{'optimizer':24}{'limit':>10}{'closed loop':>13}{'ratio by seed':>22}")
    worst = 1.0
    for name, make in optimizers().items():
        limits = [quadratic.advised(make) for quadratic in quadratics]
        if any(math.isnan(limit) for limit, _ in limits):
            known = sum(not math.isnan(limit) for limit, _ in limits)
            reason = next(reason for limit, reason in limits if math.isnan(limit))
            print(f"{name:24}{f'{known} of {len(limits)}':>10}  {reason}", flush=True)
            continue
        truths = [quadratic.closed_loop(make) for quadratic in quadratics]
        ratios = [limit / truth for (limit, _), truth in zip(limits, truths, strict=True)]
        worst = max(worst, *(max(ratio, 1 / ratio) for ratio in ratios))
        shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
        medians = statistics.median(limit for limit, _ in limits), statistics.median(truths)
        print(f"{name:24}{medians[0]:>10.3g}{medians[1]:>13.3g}{shown:>22}", flush=True)
    print(f"The farthest from the closed loop: a factor {worst:.2f}.")


if __name__ == "__main__":
    main()
