"""Tables 2 and 3: ratios against dense fp64 autograd, shares of hand-made cases, and what is concluded."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hessinit import Problem
from hessinit.analysis import EvaluatedProblem
from hessinit.jobs import Job, derive, generator
from hessinit_paper.experiments import PaperSetting, find_experiment, run_job
from hessinit_paper.images import load_images
from hessinit_paper.networks import build, glorot_
from hessinit_paper.reproduction import Plain
from hessinit_paper.tables_2_3 import APPROXIMATION, CASES, EXACT, divide, share_within
from hessinit_paper.theorem_1 import draw_random

LOSS = nn.CrossEntropyLoss()
BOTH = [find_experiment("table-2"), find_experiment("table-3")]
tables = pytest.mark.parametrize("table", BOTH, ids=lambda table: table.name)


def make_setting(table: Any, seeds: int = 3, variant: str = "", data: str = "digits") -> PaperSetting:
    return PaperSetting(table.name, data, variant or next(iter(table.variants)), tuple(range(seeds)))


def run(table: Any, setting: PaperSetting, case: str) -> Plain:
    (job,) = [job for job in table.plan(setting) if job.parameters["case"] == case]
    return run_job(Job(job.key, (setting, job.parameters)))["value"]


def true_ratio(model: nn.Module, batch: tuple[Tensor, Tensor], name: str, direction: Tensor) -> float:
    """gᵀHg / vᵀH_z v in fp64, by forward derivatives of the loss along the direction."""
    model, (inputs, labels) = model.double(), (batch[0].double(), batch[1])
    weight = dict(model.named_parameters())[name]

    def output(step: Tensor) -> Tensor:
        return torch.func.functional_call(model, {name: weight.detach() + step * direction.double()}, inputs)

    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    exact = torch.autograd.functional.hessian(lambda step: LOSS(output(step), labels), zero)
    logits, change = torch.autograd.functional.jvp(output, zero, torch.ones_like(zero))
    p = logits.softmax(1)
    form = (p * change.square()).sum(1) - (p * change).sum(1).square()
    return float(exact / form.mean())


@pytest.mark.parametrize("case", ["tanh", "sgd", "gelu", "silu"])
@tables
def test_ratios_are_those_of_dense_autograd(table: Any, case: str) -> None:
    setting = make_setting(table, seeds=1)
    found, images, (activation, size) = run(table, setting, case), load_images("digits"), CASES[case]
    model = build(table.variants[setting.variant].network, images.shape, activation)
    glorot_(model, generator(0, "weights"))
    batch = images.sample(size, generator(0, "batch"), flat=table.name == "table-2")
    problem = Problem(model, LOSS, batch, layers=list(table.rows), seed=derive(0, "directions"))
    evaluated = EvaluatedProblem(problem)
    for layer in evaluated.layers:
        direction = next(draw_random(evaluated, layer, 1, 1)).tensor[0]
        truth = true_ratio(model, batch, layer.parameter, direction)
        model.float()
        assert found[layer.name][0] == pytest.approx(truth, rel=2e-3, abs=2e-3)


@tables
def test_relu_is_exact(table: Any) -> None:
    for variant in table.variants:
        by_layer = run(table, make_setting(table, 5, variant), "relu")
        ratios = [ratio for layer in by_layer.values() for ratio in layer]
        assert max(abs(ratio - 1) for ratio in ratios) < 1e-4
        assert share_within(ratios, 0.5, APPROXIMATION) == share_within(ratios, 0.5, EXACT)
        assert share_within(ratios, 0.5, EXACT)[:2] == (100.0, 0.0)


# The first seeds on the digits, as recorded before.
RECORDED = {
    "table-2": ("narrow-first", "tanh", {
        "dense1": [1.20321, 0.425915, -0.3623224], "dense2": [1.151105, 1.010766, 0.1683341],
        "dense3": [1.236868, 0.5719533, 1.297237], "dense4": [1.161923, 0.9583863, 0.6357803],
        "dense5": [1.0, 1.0, 1.0],
    }),
    "table-3": ("lenet-5", "sgd", {"conv1": [-3.040745, -2.597691], "conv2": [-1.746297, 0.3288388]}),
}  # fmt: skip


@tables
def test_a_job_gives_the_recorded_numbers(table: Any) -> None:
    variant, case, ratios = RECORDED[table.name]
    found = run(table, make_setting(table, len(next(iter(ratios.values()))), variant), case)
    for layer, values in ratios.items():
        assert found[layer] == pytest.approx(values, rel=1e-4)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_shares_of_a_hand_made_case() -> None:
    ratios = [1.0, 1.5, 2.0, 0.5, 0.0, -1.0, math.inf, 0.4]
    # Errors of 0, ½, 1, ½, 1, 2, ∞, 0.6 of the approximation, and 0, ⅓, ½, 1, ∞, 2, 1, 1.5 of the value.
    shares = [share_within(ratios, 0.55, way)[0] for way in (APPROXIMATION, EXACT)]
    assert shares == [37.5, 37.5]
    assert share_within(ratios, 1.0, APPROXIMATION)[0] == 75.0
    assert share_within(ratios, 1.0, EXACT)[:2] == (62.5, pytest.approx(100 * math.sqrt(0.625 * 0.375 / 8)))
    assert (divide(2.0, 3.0), divide(-1.0, 0.0), divide(0.0, 0.0)) == (0.6666667, math.inf, 1.0)
