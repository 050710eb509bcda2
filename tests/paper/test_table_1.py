"""Table 1 on the digits: its jobs, the same numbers every time, and what they are taken to say."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest

from hessinit.paper.experiment import Job, Setting
from hessinit.paper.table_1 import EXPERIMENT, LAYER, OUTPUTS, SHUFFLES, draw_all
from hessinit.results.result import Plain
from hessinit.training.seeds import reproducible

READINGS = list(EXPERIMENT.variants)


def setting(variant: str = "one-image", data: str = "digits", seeds: int = 2) -> Setting:
    return Setting("table-1", data, variant, tuple(range(seeds)))


def small_jobs(of: Setting, samples: int = 2000) -> list[Job]:
    return [
        dataclasses.replace(job, parameters={**job.parameters, "samples": samples})
        for job in EXPERIMENT.plan(of)
    ]


def run(job: Job) -> Plain:
    with reproducible():
        return EXPERIMENT.run(job)


def test_every_row_and_seed_is_a_job_with_the_papers_number_of_samples() -> None:
    jobs = EXPERIMENT.plan(setting(seeds=EXPERIMENT.seeds))
    assert len({job.key for job in jobs}) == len(jobs) == 20
    assert {(job.parameters["row"], job.parameters["samples"]) for job in jobs} == {
        (OUTPUTS, 10_000),
        (LAYER, 100_000),
    }


@pytest.mark.parametrize("variant", READINGS)
def test_runs_twice_alike_as_json_and_concludes(variant: str) -> None:
    of = setting(variant)
    jobs = small_jobs(of)
    results = {job.key: run(job) for job in jobs}
    text = json.dumps(results, allow_nan=False)
    assert json.loads(text) == results
    assert run(jobs[-1]) == results[jobs[-1].key]
    assert results["outputs-0"]["relu"] != results["outputs-1"]["relu"]
    findings = EXPERIMENT.conclude(of, results)
    first = findings.tables[0]
    assert first.rows == (OUTPUTS, LAYER)
    cell = first.cell(OUTPUTS, "dependent")
    assert cell is not None
    assert (cell.paper, cell.within) == (10, None)  # printed for MNIST
    assert all(sentence.endswith(".") for sentence in findings.sentences)
    json.dumps(EXPERIMENT.configure(of), allow_nan=False)


def test_one_image_is_one_and_new_images_are_many() -> None:
    for variant, most in (("one-image", 1), ("new-image", 10)):
        samples = draw_all(small_jobs(setting(variant))[0])["relu"]
        assert samples.targets.shape == (2000, 10)
        assert int(samples.targets.any(0).sum()) == most


def test_shuffled_samples_are_detected_in_about_five_per_cent() -> None:
    of = setting(seeds=10)
    shuffled = [p for job in small_jobs(of, 500) for p in run(job)["shuffled p"]]
    share = statistics.fmean(p < 0.05 for p in shuffled)
    assert len(shuffled) == 20 * SHUFFLES
    assert abs(share - 0.05) < 4 * (0.05 * 0.95 / len(shuffled)) ** 0.5


def made_up(r: float, p: float, shuffled: list[float]) -> Plain:
    one = {"r": r, "p": p, "expected r": r}
    return {"relu": one, "tanh": {**one, "p": 0.5}, "shuffled p": shuffled}


@pytest.mark.parametrize(("missed", "within"), [(1, True), (2, False)])
def test_detections_are_counted_and_judged(missed: int, within: bool) -> None:
    of = setting(data="mnist", seeds=10)
    results = {
        job.key: made_up(0.01, 0.2 if seed < missed else 0.001, [0.01, 0.3, 0.7, 0.9])
        if job.parameters["row"] == LAYER
        else made_up(-0.1, 1e-6, [0.5, 0.6, 0.7, 0.9])
        for job in EXPERIMENT.plan(of)
        for seed in [job.parameters["seed"]]
    }
    paper, correlations, control = EXPERIMENT.conclude(of, results).tables
    cells = {cell.row: cell for cell in paper.cells if cell.column == "dependent"}
    assert (cells[OUTPUTS].ours, cells[OUTPUTS].within) == (10, True)
    assert (cells[LAYER].ours, cells[LAYER].within, cells[LAYER].paper) == (10 - missed, within, 9)
    tanh = correlations.cell(f"{LAYER}; tanh", "dependent")
    assert tanh is not None
    assert tanh.ours == 0
    assert [cell.ours for cell in control.cells] == [0, 25]
    assert [cell.n for cell in control.cells] == [40, 40]
