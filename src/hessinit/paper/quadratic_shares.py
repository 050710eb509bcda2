"""Restarts for Tables 2 and 3: how near Theorem 1 comes to the exact quadratic form along a random direction.

A restart draws the weights, the mini-batch and one direction in each layer anew. What is kept of it is the
ratio exact / approximation in each layer, sign included: both relative errors follow from it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hessinit.measurement.quadratic_form import quadratic_form
from hessinit.paper.experiment import Job, Setting
from hessinit.paper.minibatches import images_of
from hessinit.paper.networks import glorot_
from hessinit.results.result import Plain, read_number, to_plain
from hessinit.training.seeds import derive, generator

RESTARTS_PER_JOB = 50
APPROXIMATION, EXACT = "approximation", "exact value"


@dataclass(frozen=True)
class Case:
    """An activation and a batch size: one set of restarts."""

    label: str
    activation: str
    batch: int


# The same seed has the same weights and directions in every case, so that cases differ by their case alone.
CASES: Mapping[str, Case] = {
    "tanh": Case("tanh", "tanh", 32),
    "sgd": Case("tanh, batch of one", "tanh", 1),
    "relu": Case("ReLU", "relu", 32),
    "gelu": Case("GELU", "gelu", 32),
    "silu": Case("SiLU", "silu", 32),
}


@dataclass(frozen=True)
class SharesTable:
    """What tells Table 2 from Table 3.

    `rows` gives each layer its name in the paper; the paper's errors seem to be divided by `relative_to`.
    """

    experiment: str
    networks: Mapping[str, Plain]  # by variant, for the record
    build: Callable[[str, tuple[int, int, int], str], nn.Module]  # from variant, image shape, activation
    flat: bool
    rows: Mapping[str, str]
    tolerances: tuple[float, ...]
    relative_to: str
    seconds: float  # of a restart, about


def configure(table: SharesTable, setting: Setting) -> dict[str, Plain]:
    """Every choice that the numbers depend on."""
    return {
        "network": table.networks[setting.variant],
        "layers": list(table.rows),
        "initialization": "Glorot uniform, biases zero",
        "inputs": "pixels in [0, 1]",
        "loss": "cross-entropy",
        "directions": "one random direction in each layer",
        "cases": {key: {"activation": case.activation, "batch": case.batch} for key, case in CASES.items()},
        "tolerances": list(table.tolerances),
        "relative to": table.relative_to,
    }


def plan(table: SharesTable, setting: Setting) -> list[Job]:
    """Each job makes some restarts of one case."""
    jobs = []
    for case, first in itertools.product(CASES, range(0, len(setting.seeds), RESTARTS_PER_JOB)):
        seeds = setting.seeds[first : first + RESTARTS_PER_JOB]
        key = f"{case} seeds {seeds[0]} to {seeds[-1]}"
        jobs.append(Job(setting, key, {"case": case, "seeds": list(seeds)}, len(seeds) * table.seconds))
    return jobs


def run(table: SharesTable, job: Job) -> Plain:
    """exact / approximation by layer, one for each restart."""
    images, case = images_of(job.setting), CASES[job.parameters["case"]]
    model = table.build(job.setting.variant, images.shape, case.activation)
    ratios: dict[str, list[float]] = {layer: [] for layer in table.rows}
    for seed in job.parameters["seeds"]:
        glorot_(model, generator(seed, "weights"))
        batch = images.batch(images.draw(case.batch, generator(seed, "batch")), flat=table.flat)
        directions = derive(seed, "directions")
        forms = quadratic_form(model, nn.CrossEntropyLoss(), batch, layers=list(table.rows), seed=directions)
        for layer, found in ratios.items():
            found.append(divide(forms[layer].exact[0], forms[layer].theorem1[0]))
    return to_plain(ratios)


def divide(exact: float, approximation: float) -> float:
    """The ratio to 7 significant digits; 1 where both are nothing, and inf where the approximation alone is.

    >>> divide(1.0, -3.0), divide(0.0, 0.0), divide(1.0, 0.0)
    (-0.3333333, 1.0, inf)
    """
    if approximation == 0:
        return 1.0 if exact == 0 else math.inf
    return float(f"{exact / approximation:.7g}")


def gather(
    table: SharesTable, setting: Setting, case: str, results: Mapping[str, Plain]
) -> dict[str, list[float]]:
    """A case's ratios by layer, from all its jobs."""
    keys = [job.key for job in plan(table, setting) if job.parameters["case"] == case]
    return {
        layer: [read_number(ratio) for key in keys for ratio in results[key][layer]] for layer in table.rows
    }


def relative_error(ratio: float, relative_to: str) -> float:
    """|exact − approximation| divided by |approximation|, or by |exact|.

    >>> relative_error(0.25, APPROXIMATION), relative_error(0.25, EXACT), relative_error(-1.0, EXACT)
    (0.75, 3.0, 2.0)
    """
    if relative_to == APPROXIMATION:
        return abs(ratio - 1)
    return abs(1 - 1 / ratio) if ratio != 0 else math.inf


def share_within(ratios: Sequence[float], tolerance: float, relative_to: str) -> tuple[float, float]:
    """The share of them in per cent, and its binomial standard error.

    >>> share_within([1.0, 1.4, 0.5, -1.0], 0.5, APPROXIMATION)
    (75.0, 21.650635094610966)
    """
    share = statistics.fmean(relative_error(ratio, relative_to) <= tolerance for ratio in ratios)
    return 100 * share, 100 * math.sqrt(share * (1 - share) / len(ratios))
