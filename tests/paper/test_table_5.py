"""Table 5: rows as printed, the kernels alone swept, jobs that always give the same JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from hessinit.paper.experiment import Setting
from hessinit.paper.minibatches import images_of
from hessinit.paper.printed import printed
from hessinit.paper.std_sweep import plan, run, start, start_norms
from hessinit.paper.std_sweep_findings import conclude
from hessinit.paper.table_5 import EXPERIMENT, SWEEP

DIGITS = Setting("table-5", "digits", "3x3", (2,))


def test_rows_are_named_as_printed() -> None:
    assert list(printed("table-5")["rows"]) == list(SWEEP.stds)


@pytest.mark.parametrize("variant", list(SWEEP.variants))
def test_only_the_kernels_carry_the_std(variant: str) -> None:
    described, images = SWEEP.variants[variant], images_of(DIGITS)
    small, large = (start(described, images, row, seed=1) for row in ("0.001", "0.100"))
    for name, weight in small.named_parameters():
        ratio = 100 if name in ("conv1.weight", "conv2.weight") else 1
        torch.testing.assert_close(ratio * weight, large.get_parameter(name))
    assert small.conv2.weight.std().item() == pytest.approx(0.001, rel=0.1)


@pytest.mark.parametrize("variant", list(SWEEP.variants))
def test_norms_grow_as_the_square_of_the_std(variant: str) -> None:
    described, images = SWEEP.variants[variant], images_of(DIGITS)
    found = [start_norms(described, images, row, seed=1)["approximate"] for row in ("0.001", "0.005")]
    assert [large / small for small, large in zip(*found, strict=True)] == pytest.approx([25, 25], rel=0.01)


@pytest.mark.parametrize("variant", list(SWEEP.variants))
def test_plan_run_and_conclude_always_give_the_same_json(variant: str) -> None:
    setting = dataclasses.replace(DIGITS, variant=variant)
    brief = dataclasses.replace(SWEEP.variants[variant], digits_epochs=2)
    sweep = dataclasses.replace(SWEEP, restarts=2, variants={variant: brief})
    jobs = plan(sweep, setting)
    results = {job.key: run(sweep, job) for job in jobs}
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    again = {job.key: run(sweep, job) for job in jobs[::-5]}
    assert len(again) == 2
    assert all(results[key] == value for key, value in again.items())
    findings = conclude(sweep, setting, results)
    scaling = findings.tables[1]
    for column in scaling.columns:
        assert scaling.cell("power of the std", column).ours == pytest.approx(2, abs=0.05)
    assert findings.figures[0].name == "figure-2"
    exact, approximate = (
        findings.tables[0].cell("0.100", column).ours for column in ("exact 2", "Hessian 2")
    )
    assert exact == pytest.approx(approximate, rel=2e-3)


@pytest.mark.parametrize("data", EXPERIMENT.data)
def test_the_configuration_is_json_and_the_digits_get_as_many_steps(data: str) -> None:
    here = EXPERIMENT.configure(dataclasses.replace(DIGITS, data=data))
    assert json.loads(json.dumps(here, allow_nan=False)) == here
    assert here["training"]["epochs"] == (56 if data == "digits" else 2)  # 784 steps, and 780 of CIFAR-10
