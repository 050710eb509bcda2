"""Table 4 from plan to conclusion: jobs that always give the same JSON, and findings from known results."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import pytest

from hessinit.paper.experiment import Setting
from hessinit.paper.printed import printed
from hessinit.paper.std_sweep import Sweep, configure, job_key, plan, run
from hessinit.paper.std_sweep_findings import conclude
from hessinit.paper.table_4 import EXPERIMENT, SWEEP
from hessinit.results.result import Plain

MNIST = Setting("table-4", "mnist", "two-hidden", (0, 1, 2))


def short(sweep: Sweep) -> Sweep:
    variants = {
        name: dataclasses.replace(variant, digits_epochs=4) for name, variant in sweep.variants.items()
    }
    return dataclasses.replace(sweep, restarts=2, variants=variants)


def invented(losses: dict[str, list[Plain]]) -> dict[str, Plain]:
    """Results whose conclusions are known: norms 100 and 200 times std², exact ones 1 % above."""
    results: dict[str, Plain] = {}
    for row in SWEEP.rows:
        square = 4 if row == "hessinit" else float(row) ** 2
        for seed in MNIST.seeds:
            spread = 1 + 0.1 * seed
            first, second = 100 * square * spread, 200 * square * spread
            results[job_key("norms", row, seed)] = {
                "approximate": [[first, second], [first, second]],
                "exact": [[1.01 * first, 1.01 * second]] * 2,
                "network": [first + second] * 2,
            }
            loss = losses[row][seed]
            curve = [2.0 + seed, 1.0 + seed] if isinstance(loss, float) else [2.0, "inf"]
            results[job_key("training", row, seed)] = {
                "steps": 3750, "losses": 3750 if isinstance(loss, float) else 80, "training loss": loss,
                "curve": curve,
            }  # fmt: skip
    return results


def usual_losses() -> dict[str, list[Plain]]:
    means = dict(zip(SWEEP.stds, [8.0, 1.2, 0.3, 0.32, 0.4, 0.5], strict=True))
    losses = {row: [mean + 0.001 * seed for seed in MNIST.seeds] for row, mean in means.items()}
    return {**losses, "hessinit": [0.2, 0.21, 0.19]}


def test_rows_are_named_as_printed_and_columns_found() -> None:
    assert list(printed("table-4")["rows"]) == list(SWEEP.stds)
    (table, *_) = EXPERIMENT.conclude(MNIST, invented(usual_losses())).tables
    assert table.rows[-1] == "hessinit"
    for row, columns in printed("table-4")["rows"].items():
        for column, number in columns.items():
            assert table.cell(row, column).paper == number
            assert table.cell(row, column).within is not None


def test_cells_are_means_with_standard_errors_over_starts_and_seeds() -> None:
    table = EXPERIMENT.conclude(MNIST, invented(usual_losses())).tables[0]
    loss, norm = table.cell("0.100", "Training loss"), table.cell("0.100", "Hessian 2")
    assert (loss.ours, loss.n) == (pytest.approx(0.301), 3)
    assert loss.error == pytest.approx(0.001 / math.sqrt(3))
    values = [2.0, 2.0, 2.2, 2.2, 2.4, 2.4]
    assert (norm.ours, norm.n) == (pytest.approx(2.2), 6)
    assert norm.error == pytest.approx(statistics.stdev(values) / math.sqrt(6))
    assert table.cell("0.100", "exact 1").ours == pytest.approx(1.01 * 1.1)


def test_the_power_of_the_std_is_found() -> None:
    findings = EXPERIMENT.conclude(MNIST, invented(usual_losses()))
    scaling = findings.tables[1]
    assert scaling.cell("0.005", "Hessian 1 / std²").ours == pytest.approx(110)
    assert scaling.cell("power of the std", "Hessian 2 / std²").ours == pytest.approx(2)
    assert any("to the power 2 ± " in sentence for sentence in findings.sentences)


def test_sentences_say_what_the_numbers_say() -> None:
    text = " ".join(EXPERIMENT.conclude(MNIST, invented(usual_losses())).sentences)
    assert "0.100 ends with the lowest training loss, 0.301 ± 0.0006 (n = 3)" in text
    assert "is 1.1 and 2.2 at the start (means of 6 starts)" in text
    assert "within a factor of 2.2" in text
    # |ln ‖H‖| of the first weight: 4.7 3.3 0.1 0.5 1.3 5.9, ranks 5 4 1 2 3 6 against 6 5 1 2 3 4.
    assert "ρ = 0.83 (p = 0.058) for the first weight" in text
    assert "further than 1 %" in text
    assert "ends with 0.2 ± 0.006 (n = 3), 0.1 ± 0.006 (34%) lower than from std 0.100" in text
    assert "found by trying six" in text
    assert "not finite" not in text
    assert "cannot be told" not in text


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([0.31, 0.29, 0.303], "do not tell from std 0.100"),
        ([0.6, 0.602, 0.604], r"0.3 ± 0.0006 (100%) higher than from std 0.100"),
        ([0.2, 0.21, "nan"], "against 0.301 ± 0.0006 from std 0.100"),
    ],
)
def test_our_own_row_is_judged_honestly(ours: list[Plain], verdict: str) -> None:
    text = " ".join(EXPERIMENT.conclude(MNIST, invented({**usual_losses(), "hessinit": ours})).sentences)
    assert verdict in text


def test_standard_deviations_that_cannot_be_told_apart_are_named() -> None:
    losses = {**usual_losses(), "0.075": [0.31, 0.29, 0.303]}
    text = " ".join(EXPERIMENT.conclude(MNIST, invented(losses)).sentences)
    assert "told from 0.100" in text or "told from 0.075" in text


def test_a_training_that_broke_off_is_counted_and_ranks_last() -> None:
    findings = EXPERIMENT.conclude(MNIST, invented({**usual_losses(), "1.000": [8.0, "nan", "inf"]}))
    assert "not finite: 2 of 3 at 1.000." in findings.sentences[-1]
    cell = findings.tables[0].cell("1.000", "Training loss")
    assert not math.isfinite(cell.ours)
    assert cell.within is False
    assert "ρ = 0.83" in " ".join(findings.sentences)
    curve = findings.figures[0].curves[0]
    assert (curve.x, curve.y) == ((31.5,), (2.0,))  # up to where the first seed broke off


def test_a_start_without_curvature_does_not_stop_the_conclusion() -> None:
    results = invented(usual_losses())
    flat = {"approximate": [[0.0, 0.0]] * 2, "exact": [[0.0, 0.0]] * 2, "network": [0.0] * 2}
    for seed in MNIST.seeds:
        results[job_key("norms", "1.000", seed)] = flat
        results[job_key("norms", "0.100", seed)] = flat
    findings = EXPERIMENT.conclude(MNIST, results)
    assert findings.tables[0].cell("1.000", "Hessian 1").ours == 0
    assert math.isnan(findings.tables[1].cell("power of the std", "Hessian 1 / std²").ours)


def test_the_figure_has_the_mean_curve_of_every_row() -> None:
    (figure,) = EXPERIMENT.conclude(MNIST, invented(usual_losses())).figures
    assert (figure.name, figure.log_y) == ("figure-1", True)
    assert [curve.name for curve in figure.curves] == [*(f"std {row}" for row in SWEEP.stds), "hessinit"]
    curve = figure.curves[0]
    assert (curve.x, curve.y) == ((31.5, 94.5), (3.0, 2.0))  # chunks of 63 steps
    assert curve.error == pytest.approx([1 / math.sqrt(3)] * 2)


def test_one_seed_has_no_standard_errors() -> None:
    alone = dataclasses.replace(MNIST, seeds=(0,))
    findings = EXPERIMENT.conclude(alone, invented(usual_losses()))
    assert findings.tables[0].cell("0.100", "Training loss").error is None
    assert findings.figures[0].curves[0].error is None
    assert "nan" not in " ".join(findings.sentences)


def test_jobs_are_unique_and_every_row_and_seed_has_two() -> None:
    jobs = EXPERIMENT.plan(MNIST)
    assert len({job.key for job in jobs}) == len(jobs) == 7 * 3 * 2
    assert all(job.cost > 0 for job in jobs)
    assert json.loads(json.dumps([job.parameters for job in jobs])) == [job.parameters for job in jobs]


@pytest.mark.parametrize("variant", list(SWEEP.variants))
@pytest.mark.parametrize("data", EXPERIMENT.data)
def test_the_configuration_is_json_and_differs_between_readings(variant: str, data: str) -> None:
    here = EXPERIMENT.configure(Setting("table-4", data, variant, (0,)))
    assert json.loads(json.dumps(here, allow_nan=False)) == here
    others = [
        EXPERIMENT.configure(Setting("table-4", data, other, (0,)))
        for other in SWEEP.variants
        if other != variant
    ]
    assert here not in others


@pytest.mark.parametrize("variant", list(SWEEP.variants))
def test_plan_run_and_conclude_always_give_the_same_json(variant: str) -> None:
    sweep, setting = short(SWEEP), Setting("table-4", "digits", variant, (1,))
    jobs = plan(sweep, setting)
    results = {job.key: run(sweep, job) for job in jobs}
    again = {job.key: run(sweep, job) for job in jobs[::-5]}  # hessinit's norms first
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert all(results[key] == value for key, value in again.items())
    findings = conclude(sweep, setting, results)
    assert findings == conclude(sweep, setting, json.loads(json.dumps(results)))
    table, losses = findings.tables[0], dict.fromkeys(SWEEP.rows, 0.0)
    for row in losses:
        losses[row] = table.cell(row, "Training loss").ours
        assert table.cell(row, "Hessian 1").n == 2
    assert losses["hessinit"] < losses["0.100"] < losses["0.005"]
    assert configure(sweep, setting)["training"]["epochs"] == 4
    assert len(findings.figures[0].curves[0].x) == len(results[jobs[0].key]["curve"]) <= 60


def test_the_source_of_the_images_is_told_before_any_work() -> None:
    assert EXPERIMENT.prepare(Setting("table-4", "digits", "two-hidden", (0,))).startswith(
        "embedded digits md5"
    )
