"""What `quadratic_form` costs for all layers of a five-layer MLP, in gradients, and where the time goes.

python benchmarks/quadratic_cost.py            # about a minute
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
from record import processor_name  # noqa: E402
from torch import nn  # noqa: E402

from hessinit import Problem  # noqa: E402
from hessinit.analysis import EvaluatedProblem  # noqa: E402
from hessinit_paper.theorem_1 import SharedPass, draw_random, quadratic_form  # noqa: E402

WIDTHS = (784, 512, 256, 128, 64, 10)
SEED = 0


class Network:
    """784-512-256-128-64-10, tanh, cross-entropy, on random inputs: the network of the paper's Table 2."""

    def __init__(self, examples: int) -> None:
        torch.manual_seed(SEED)
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip(WIDTHS[:-1], WIDTHS[1:], strict=True):
            layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
        self.model, self.loss = nn.Sequential(*layers[:-1]), nn.CrossEntropyLoss()
        self.batch = torch.randn(examples, WIDTHS[0]), torch.randint(WIDTHS[-1], (examples,))

    def gradient(self) -> None:
        """The unit: forward and backward of the batch, to all parameters."""
        inputs, targets = self.batch
        torch.autograd.grad(self.loss(self.model(inputs), targets), list(self.model.parameters()))

    def forms(self, directions: str, draws: int = 1, check: bool = False) -> None:
        problem = Problem(self.model, self.loss, self.batch, check=check)
        quadratic_form(problem, directions=directions, draws=draws)


def best_times(calls: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """The least seconds of each, taken in turns, so that all see the same machine.

    Three in a row: after another's turn the first finds a cold cache, which costs a gradient a third.
    """
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repetitions):
        for name, call in calls.items():
            for _ in range(3):
                start = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def time_parts(network: Network, repetitions: int) -> dict[str, float]:
    """The stages of one call, each alone; the remainder is the passes of the single layers."""
    problem = Problem(network.model, network.loss, network.batch, check=False)
    evaluated = EvaluatedProblem(problem)
    with evaluated.settings():
        (batch,) = evaluated.batches
        times = best_times(
            {
                "checks and copies": lambda: EvaluatedProblem(problem),
                "forward, and its check": lambda: EvaluatedProblem(problem).batches,
                "shared backward": lambda: SharedPass(batch),
                "drawing directions": lambda: [
                    list(draw_random(evaluated, layer, 1, 1)) for layer in evaluated.layers
                ],
            },
            repetitions,
        )
    times["forward, and its check"] -= times["checks and copies"]
    return times


def measure_cost(threads: int, examples: int, repetitions: int) -> tuple[str, str]:
    """A row of the table, and a line on where the time went."""
    torch.set_num_threads(threads)
    network = Network(examples)
    calls = {
        "unit": network.gradient,
        "random": lambda: network.forms("random"),
        "gradient": lambda: network.forms("gradient"),
        "several": lambda: network.forms("random", draws=10),
        "checked": lambda: network.forms("random", check=True),
    }
    best_times(calls, 2)  # the first call of anything is slow
    times = best_times(calls, repetitions)
    unit = times.pop("unit")
    random, gradient, several, checked = (seconds / unit for seconds in times.values())
    row = f"{threads:7}  {examples:5}  {1e3 * unit:8.2f}  {random:6.1f}  {gradient:13.1f}  {several:8.1f}"
    row += f"  {checked:13.1f}"
    parts = {name: seconds / unit for name, seconds in time_parts(network, repetitions).items()}
    parts["the layers' own passes and the rest"] = random - sum(parts.values())
    listed = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
    return row, f"{threads} thread{'s' * (threads > 1)}, batch {examples}: {listed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=20, help="turns; the least counts (default: 20)")
    repetitions = parser.parse_args().repetitions
    print(f"{processor_name()}, Python {platform.python_version()}, torch {torch.__version__}, seed {SEED}")
    print(f"All layers, in gradients of the same batch; the least of 3 in a row, {repetitions} times.\n")
    print("threads  batch  gradient  random  along the gra-  10 draws  random, with")
    print("                     /ms          dient itself    a layer     the check")
    lines = []
    for threads in (1, 2):
        for examples in (32, 128):
            row, line = measure_cost(threads, examples, repetitions)
            print(row)
            lines.append(line)
    print("\nOf one random direction a layer:", *lines, sep="\n")


if __name__ == "__main__":
    main()
