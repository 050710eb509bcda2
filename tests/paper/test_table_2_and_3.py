"""Tables 2 and 3: ratios against dense fp64 autograd, shares of hand-made cases, and what is concluded."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hessinit.measurement.quadratic_form import draw_random
from hessinit.paper import table_2, table_3
from hessinit.paper.experiment import Experiment, Job, Setting
from hessinit.paper.minibatches import images_of
from hessinit.paper.networks import glorot_
from hessinit.paper.quadratic_shares import (
    APPROXIMATION,
    CASES,
    EXACT,
    SharesTable,
    divide,
    relative_error,
    share_within,
)
from hessinit.problem.problem import Problem
from hessinit.results.result import Plain
from hessinit.training.seeds import derive, generator, reproducible

BOTH = [(table_2.TABLE, table_2.EXPERIMENT), (table_3.TABLE, table_3.EXPERIMENT)]
LOSS = nn.CrossEntropyLoss()


def setting(experiment: Experiment, data: str = "digits", seeds: int = 3, variant: str = "") -> Setting:
    chosen = variant or next(iter(experiment.variants))
    return Setting(experiment.name, data, chosen, tuple(range(seeds)))


def run(experiment: Experiment, job: Job) -> Plain:
    with reproducible():
        return experiment.run(job)


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
@pytest.mark.parametrize(("table", "experiment"), BOTH, ids=["table-2", "table-3"])
def test_ratios_are_those_of_dense_autograd(table: SharesTable, experiment: Experiment, case: str) -> None:
    of = setting(experiment, seeds=2)
    (job,) = [job for job in experiment.plan(of) if job.parameters["case"] == case]
    found, images = run(experiment, job), images_of(of)
    for seed in of.seeds:
        model = table.build(of.variant, images.shape, CASES[case].activation)
        glorot_(model, generator(seed, "weights"))
        index = images.draw(CASES[case].batch, generator(seed, "batch"))
        assert len(index) == CASES[case].batch
        batch = images.batch(index, flat=table.flat)
        problem = Problem(model, LOSS, batch, layers=list(table.rows), seed=derive(seed, "directions"))
        for layer in problem.layers:
            direction = next(draw_random(problem, layer, 1, 1)).tensor[0]
            truth = true_ratio(model, batch, layer.parameter, direction)
            model.float()
            assert found[layer.name][seed] == pytest.approx(truth, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("experiment", [each for _, each in BOTH], ids=["table-2", "table-3"])
def test_relu_is_exact(experiment: Experiment) -> None:
    for variant in experiment.variants:
        of = setting(experiment, seeds=5, variant=variant)
        (job,) = [job for job in experiment.plan(of) if job.parameters["case"] == "relu"]
        ratios = [ratio for layer in run(experiment, job).values() for ratio in layer]
        assert max(abs(ratio - 1) for ratio in ratios) < 1e-4
        assert share_within(ratios, 0.5, APPROXIMATION) == share_within(ratios, 0.5, EXACT) == (100.0, 0.0)


def test_shares_of_a_hand_made_case() -> None:
    ratios = [1.0, 1.5, 2.0, 0.5, 0.0, -1.0, math.inf, 0.4]
    errors = {
        APPROXIMATION: [0, 0.5, 1, 0.5, 1, 2, math.inf, 0.6],
        EXACT: [0, 1 / 3, 0.5, 1, math.inf, 2, 1, 1.5],
    }
    for way, expected in errors.items():
        assert [relative_error(ratio, way) for ratio in ratios] == pytest.approx(expected)
    assert share_within(ratios, 0.5, APPROXIMATION)[0] == 37.5
    assert share_within(ratios, 1.0, APPROXIMATION)[0] == 75.0
    assert share_within(ratios, 0.5, EXACT)[0] == 37.5
    assert share_within(ratios, 1.0, EXACT) == (62.5, pytest.approx(100 * math.sqrt(0.625 * 0.375 / 8)))


def test_a_ratio_has_seven_digits_and_is_never_a_division_by_nothing() -> None:
    assert divide(2.0, 3.0) == 0.6666667
    assert divide(-1.0, 0.0) == math.inf
    assert divide(0.0, 0.0) == 1.0


@pytest.mark.parametrize("experiment", [each for _, each in BOTH], ids=["table-2", "table-3"])
def test_seeds_are_shared_out_among_jobs_each_once(experiment: Experiment) -> None:
    of = setting(experiment, seeds=120)
    jobs = experiment.plan(of)
    assert len({job.key for job in jobs}) == len(jobs) == 3 * len(CASES)
    for case in CASES:
        seeds = [seed for job in jobs if job.parameters["case"] == case for seed in job.parameters["seeds"]]
        assert seeds == list(of.seeds)


@pytest.mark.parametrize("experiment", [each for _, each in BOTH], ids=["table-2", "table-3"])
def test_every_run_is_alike_and_json_and_the_digits_are_not_judged(experiment: Experiment) -> None:
    of = setting(experiment)
    jobs = experiment.plan(of)
    results = {job.key: run(experiment, job) for job in jobs}
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert run(experiment, jobs[0]) == results[jobs[0].key]
    findings = experiment.conclude(of, results)
    assert len(findings.tables) == 6
    assert all(cell.n == 3 and cell.within is None for table in findings.tables for cell in table.cells)
    assert all(cell.paper is not None for cell in findings.tables[0].cells)
    assert not any("printed" in sentence for sentence in findings.sentences)
    json.dumps(experiment.configure(of), allow_nan=False)


@pytest.mark.parametrize(("table", "experiment"), BOTH, ids=["table-2", "table-3"])
def test_the_papers_table_divides_as_the_table_says_and_is_judged(
    table: SharesTable, experiment: Experiment
) -> None:
    of = setting(experiment, data=experiment.data[0], seeds=2)
    ratios = [0.4, 100.0]  # errors of 0.6 and 99 of the approximation, of 1.5 and 0.99 of the exact value
    results = {
        job.key: {layer: [1.0, 1.0] if job.parameters["case"] == "relu" else ratios for layer in table.rows}
        for job in experiment.plan(of)
    }
    findings = experiment.conclude(of, results)
    usual, other = [[cell.ours for cell in each.cells[:3]] for each in findings.tables[:2]]
    by_way = {
        "table-2": ([0, 50, 50], [0, 50, 100]),
        "table-3": ([50, 100, 100], [50, 50, 50]),
    }
    assert (usual, other) == by_way[table.experiment]
    assert table.relative_to in findings.tables[0].title
    first = findings.tables[0].cells[0]
    assert first.within is (abs(first.ours - (first.paper or 0)) <= (10 if table is table_2.TABLE else 15))
    assert all(cell.paper is None for each in findings.tables[1:] for cell in each.cells)
    relu = [cell for each in findings.tables[4:] for cell in each.cells if cell.row.startswith("ReLU")]
    assert len(relu) == 2 * 3 * len(table.rows)
    assert all((cell.ours, cell.error, cell.unit) == (100, 0, "%") for cell in relu)
    assert "relative to" in findings.sentences[0]
    assert "equal in all layers, to seven digits" in findings.sentences[1]


def test_networks_have_the_stated_shapes() -> None:
    def shapes(build: partial[nn.Module]) -> list[tuple[int, ...]]:
        return [tuple(weight.shape) for weight in build("tanh").parameters() if weight.ndim > 1]

    dense = partial(table_2.build, "narrow-first", (1, 28, 28))
    assert shapes(dense) == [(32, 784), (256, 32), (32, 256), (16, 32), (10, 16)]
    small = partial(table_3.build, "3x3", (3, 32, 32))
    assert shapes(small) == [(32, 3, 3, 3), (32, 32, 3, 3), (120, 32 * 6 * 6), (84, 120), (10, 84)]
    lenet = partial(table_3.build, "lenet-5", (3, 32, 32))
    assert shapes(lenet) == [(6, 3, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
