"""The word2vec experiment from plan to findings, on a small corpus."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from hessinit.measurement.measure import measure
from hessinit.paper import word2vec, word2vec_design
from hessinit.paper.experiment import Setting
from hessinit.paper.skip_gram import MODELS, normal_
from hessinit.paper.skip_gram_training import draw_batches
from hessinit.paper.word2vec import EXPERIMENT, final_loss, thin_out
from hessinit.paper.word2vec_design import DESIGNS, ROWS, Design
from hessinit.training.seeds import derive, generator


@pytest.fixture
def setting(tmp_path, monkeypatch):
    words = [a + b for a in "bdfgk" for b in ("alo", "ero", "imu", "obe", "uta")]
    chosen = random.Random(0)
    lines = [" ".join(chosen.choices(words, k=8)) + "." for _ in range(200)]
    (tmp_path / "wiki.txt").write_text("\n".join(lines), encoding="utf-8")
    small = Design({"softmax": 20, "negative": 25}, (16, 64), (0.025, 0.1), 20)
    monkeypatch.setitem(word2vec_design.DESIGNS, "wikipedia", small)
    word2vec._read_text.cache_clear()
    yield Setting("word2vec", "wikipedia", "mean", (0, 1), str(tmp_path), str(tmp_path / "cache"))
    word2vec._read_text.cache_clear()


def job_of(setting, **wanted):
    return next(job for job in EXPERIMENT.plan(setting) if wanted.items() <= job.parameters.items())


def test_source_is_that_of_the_corpus_and_the_counted_text_is_kept(setting, tmp_path):
    assert EXPERIMENT.prepare(setting).startswith("wiki.txt (md5 ")
    assert len(list((tmp_path / "cache").glob("wikipedia-*.npz"))) == 2


def test_plan_has_a_job_for_each_model_dimension_start_and_seed(setting):
    jobs = EXPERIMENT.plan(setting)
    assert len(jobs) == 2 * 2 * len(ROWS) * 2
    assert len({job.key for job in jobs}) == len(jobs)
    assert all(job.cost > 0 for job in jobs)


@pytest.mark.parametrize("data", DESIGNS)
def test_planned_costs_are_within_the_budget(data):
    setting = Setting("word2vec", data, "mean", tuple(range(EXPERIMENT.seeds)))
    assert sum(job.cost for job in EXPERIMENT.plan(setting)) < {"wikipedia": 1200, "docstrings": 120}[data]
    assert len(DESIGNS[data].rates) * DESIGNS[data].steps >= word2vec_design.CURVE_POINTS


def test_configuration_is_strict_json_and_names_the_rates(setting):
    plain = EXPERIMENT.configure(setting)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["learning rates"] == [2.5, 10.0]
    assert plain["pairs"] == 2000


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("row", ["0.3", "hessinit"])
def test_a_job_gives_the_same_strict_json_every_time(setting, model, row):
    job = job_of(setting, model=model, dimension=16, row=row, seed=1)
    first, second = EXPERIMENT.run(job), EXPERIMENT.run(job)
    assert json.dumps(first, allow_nan=False) == json.dumps(second, allow_nan=False)
    assert json.loads(json.dumps(first)) == first
    assert set(first) == {"0.025", "0.1"}
    for result in first.values():
        assert len(result["curve"]) == 10
        assert result["converged"] is True
        assert result["remark"] if row == "hessinit" else result["remark"] == ""


def test_a_job_draws_nothing_from_the_global_generator(setting):
    before = torch.get_rng_state()
    EXPERIMENT.run(job_of(setting, model="negative", dimension=16, row="0.1", seed=0))
    assert torch.equal(before, torch.get_rng_state())


def test_norms_are_those_of_the_first_batch_before_any_step(setting):
    result = EXPERIMENT.run(job_of(setting, model="negative", dimension=16, row="0.3", seed=1))["0.1"]
    text = word2vec.text_of(setting, "negative")
    model = MODELS["negative"](len(text.vocabulary.words), 16)
    normal_(model, 0.3, generator(1, "weights"))
    batch = next(draw_batches("negative", text, size=100, steps=1, seed=1, negatives=5))
    report = measure(model.double(), model.loss, batch, tolerance=1e-6, seed=derive(0, "others"))
    for name in ("centre", "context"):
        assert result[name] == pytest.approx(report[name].norm, rel=0.01)
    assert result["network"] == pytest.approx(report.network.norm, rel=0.01)
    assert result["first"] == pytest.approx(report.loss, rel=1e-5)


def test_the_higher_rate_ends_lower_from_a_gentle_start(setting):
    result = EXPERIMENT.run(job_of(setting, model="negative", dimension=16, row="0.03", seed=0))
    assert result["0.1"]["final"] < result["0.025"]["final"] < result["0.1"]["first"]


def test_all_jobs_together_give_tables_figures_and_sentences(setting):
    setting = replace(setting, seeds=(0,))
    results = {job.key: EXPERIMENT.run(job) for job in EXPERIMENT.plan(setting)}
    findings = EXPERIMENT.conclude(setting, results)
    assert findings == EXPERIMENT.conclude(setting, json.loads(json.dumps(results)))
    assert [figure.name for figure in findings.figures] == [
        "word2vec-softmax", "word2vec-softmax-curves", "word2vec-negative", "word2vec-negative-curves"
    ]  # fmt: skip
    assert len(findings.tables) == 2 * (2 + 2)
    for table in findings.tables:
        assert all(table.cell(cell.row, cell.column) is cell for cell in table.cells)


def test_final_loss_is_the_mean_of_the_last_tenth():
    assert final_loss([100.0] * 18 + [1.0, 2.0]) == 1.5
    assert final_loss([7.0, 3.0]) == 3.0
    assert final_loss([1.0] * 19 + [math.inf]) == math.inf


def test_curves_are_means_of_equal_pieces():
    assert thin_out([float(number) for number in range(40)]) == [1.5 + 4 * place for place in range(10)]
