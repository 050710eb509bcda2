"""Does the check of derivatives find what is wrong, and nothing else? Random networks, right and 5 % wrong.

python benchmarks/check_power.py            # 200 networks made wrong, 500 as they are; two minutes
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
from random_networks import ORDINARY, Parts  # noqa: E402
from record import run_facts, write_record  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

import hessinit  # noqa: E402

WRONG = 1.05
REFUSAL = "is not that of the function that is trained"
CONFIGURATIONS = [(c, p) for c in ("gauss-newton", "hessian") for p in ("float32", "float64")]


class Scaled(torch.autograd.Function):
    """The identity, with a backward that is 5 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return WRONG * gradient


class WrongWeight(nn.Module):
    """As a parametrization: the derivative by this weight alone is wrong."""

    def forward(self, weight: Tensor) -> Tensor:
        return Scaled.apply(weight)


def build(seed: int) -> tuple[Parts, random.Random]:
    chance = random.Random(seed)
    make: Callable[[random.Random], Parts] = ORDINARY[chance.choice(list(ORDINARY))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(chance), chance


def spoil(parts: Parts, chance: random.Random) -> str:
    """Make one layer's derivative wrong, or the loss's; says which."""
    layers = [
        (name, module)
        for name, module in parts.model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding))
        and not parametrize.is_parametrized(module)
        and type(module).__name__ != "NonDynamicallyQuantizableLinear"  # its weight is read past its forward
    ]
    kind = chance.choice(["weight", "output", "loss"])
    if kind == "loss":
        right = parts.loss
        parts.loss = lambda output, target: Scaled.apply(right(output, target))
        return "the loss"
    name, module = chance.choice(layers)
    if kind == "weight":
        parametrize.register_parametrization(module, "weight", WrongWeight())
    else:
        module.register_forward_hook(lambda module, inputs, output: Scaled.apply(output))
    return f"the {kind} of {name}"


def run_one(job: tuple[int, bool]) -> list[dict[str, Any]]:
    seed, wrong = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    records = []
    for curvature, precision in CONFIGURATIONS:
        parts, chance = build(seed)
        where = spoil(parts, chance) if wrong else ""
        parts = parts.double() if precision == "float64" else parts
        reduction = "mean" if isinstance(parts.batch, list) else "auto"
        problem = hessinit.Problem(parts.model, parts.loss, parts.batch, reduction=reduction)
        try:
            report = hessinit.measure(problem, curvature=curvature)
        except hessinit.ProblemError as refusal:
            outcome = "refused" if REFUSAL in str(refusal) else f"other refusal: {str(refusal)[:80]}"
        else:
            outcome = "measured" if report.network.norm > 0 else "no curvature"
        records.append({"seed": seed, "wrong": where, "curvature": curvature, "precision": precision,
                        "outcome": outcome})  # fmt: skip
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wrong", type=int, default=200, help="networks to make wrong (default: 200)")
    parser.add_argument("--right", type=int, default=500, help="networks as they are (default: 500)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--results", type=Path, default=None, help="write the record to this file")
    arguments = parser.parse_args()
    # Other networks than those on which silent_errors.py looks for wrong numbers.
    jobs = [(100_000 + seed, True) for seed in range(arguments.wrong)]
    jobs += [(200_000 + seed, False) for seed in range(arguments.right)]
    records: list[dict[str, Any]] = []
    with ProcessPoolExecutor(arguments.workers) as pool:
        for found in pool.map(run_one, jobs, chunksize=4):
            records += found
    summary: dict[str, Any] = {}
    for curvature, precision in CONFIGURATIONS:
        for name, wrong in (("5 % wrong", True), ("right", False)):
            own = [
                r
                for r in records
                if bool(r["wrong"]) == wrong and (r["curvature"], r["precision"]) == (curvature, precision)
            ]
            summary[f"{curvature}, {precision}, {name}"] = dict(
                collections.Counter(r["outcome"] for r in own)
            )
    record = {
        **run_facts("check_power.py", wrong=arguments.wrong, right=arguments.right),
        "summary": summary,
        "missed": [r for r in records if r["wrong"] and r["outcome"] == "measured"],
        "false alarms": [r for r in records if not r["wrong"] and r["outcome"] == "refused"],
    }
    write_record(record, arguments.results)


if __name__ == "__main__":
    main()
