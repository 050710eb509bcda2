"""`hessinit compare`, `sweep` and `track`."""

from __future__ import annotations

import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from hessinit import Comparison, Problem, RunSettings, Tracking, TrackSettings, compare, load
from hessinit.training.loop import read_data, train_and_track
from result_examples import make_comparison, make_run

from .conftest import interrupt, refused

SMALL = "--steps 20 --batch-size 4 --seeds 2 --schemes default,he --learning-rates 0.01"
GIVEN = {"schemes": ["default", "he"], "learning_rates": [0.01], "seeds": 2, "steps": 20, "batch_size": 4}


def read(result) -> Comparison:
    assert result.exit_code == 0, result.output
    return Comparison.from_json(result.stdout)


@pytest.mark.parametrize("function", ["drawn", "with_lambdas", "batches"])
def test_a_file_s_function_is_compared_as_the_library_does(run, net, function):
    result = run("compare", f"net.py:{function}", *SMALL.split(), "--workers", 1, "--json")
    build = getattr(net, function)
    _, loss, data, *rest = build()
    forward = rest[0]["forward"] if rest else None
    problem = Problem(nn.Identity(), loss, data, forward=forward)
    expected = compare(lambda: build()[0], problem, settings=RunSettings(workers=1), **GIVEN)
    assert read(result).runs == expected.runs
    unused = "also returns curvature, which only hessinit measure uses." in result.stderr
    assert unused == (function == "with_lambdas")


def test_workers_give_the_same_numbers_and_what_the_file_prints_is_shown_once(run, folder):
    source = (folder / "net.py").read_text() + "\nprint('the file is run')\n"
    (folder / "this.py").write_text(source)  # the name of a module of Python's, which prints a poem
    command = ["compare", "this.py:with_a_function_of_the_file", *SMALL.split(), "--json"]
    together = run(*command, "--workers", 2)
    assert together.stderr == "the file is run\n"
    assert read(together) == read(run(*command, "--workers", 1))


@pytest.mark.parametrize(
    "command",
    ["compare --schemes default,he --learning-rates 1e-6", "sweep --stds 0.1,0.01 --learning-rate 1e-6"],
)
def test_where_nothing_learns_the_first_line_says_so_and_the_command_ends_with_1(run, folder, command):
    verb, *options = f"{command} --steps 10 --batch-size 4 --seeds 1 --workers 1 --save c.json".split()
    result = run(verb, "net.py:problem", *options)
    assert (result.exit_code, result.stderr.splitlines()) == (
        1, ["Wrote c.json.", "Nothing learned: the result says more."],
    )  # fmt: skip
    assert result.stdout.startswith("No scheme learns at lr 1.0e-06: every loss ends no lower than ")
    assert "other learning rates" in " ".join(result.stdout.partition("\n\n")[0].split())
    with pytest.raises(ValueError, match="no scheme learns"):
        _ = load(folder / "c.json").best


def test_the_exit_status_is_that_of_the_first_line_where_only_one_seed_learns(run, monkeypatch):
    first, second = (make_run("he", 0.1, seed, 1.0 + 0.99 * seed) for seed in (0, 1))
    runs = replace(first, outcome="learned"), replace(second, outcome="did not learn")
    found = make_comparison({("he", 0.1): (1.0, 1.99)}, runs=runs)
    monkeypatch.setattr("hessinit.compare", lambda *arguments, **keywords: found)
    result = run("compare", "net.py:problem", "--workers", 1)
    assert result.stdout.startswith("No scheme learns at lr 0.1")
    assert (result.exit_code, result.stderr) == (1, "Nothing learned: the result says more.\n")


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_an_interrupted_comparison_says_how_to_continue_and_continues(run, folder):
    kept = folder / "kept" / "runs"
    command = ["compare", "net.py:slow", *SMALL.split(), "--learning-rates", "0.02,0.03", "--workers", 1]
    enough = lambda: len(list(kept.glob("[!.]*.json"))) >= 2  # noqa: E731
    code, stdout, stderr = interrupt(signal.SIGINT, enough, *command, "--folder", "kept")
    assert (code, stdout) == (130, ""), stderr
    said = r"Interrupted: stopped; (\d+) of 12 runs are kept in kept\. The same call or command .*\n"
    found = re.fullmatch(said, stderr)
    assert found, stderr
    assert 1 <= int(found[1]) < 12
    assert read(run(*command, "--json", "--folder", "kept")) == read(run(*command, "--json"))


def test_a_sweep_has_the_norms_of_each_layer_and_draws_only_the_layers_asked_for(run):
    command = ["sweep", "net.py:drawn", "--steps", 10, "--batch-size", 4, "--seeds", 1, "--workers", 1,
               "--stds", "0.1,0.01", "--learning-rate", 0.1]  # fmt: skip
    shown = run(*command, "--save", "s.json")
    assert shown.stdout.split()[:4] == ["std", "0", "2", "network"]
    both = load("s.json")
    assert (both.kind, both.stds, both.learning_rates) == ("sweep", (0.1, 0.01), (0.1,))

    def ratio(comparison: Comparison) -> float:
        return comparison.norm("std 0.1", layer="0") / comparison.norm("std 0.01", layer="0")

    # A layer's curvature grows with the square of the other's weights; its own matter little.
    assert ratio(both) == pytest.approx(100, rel=0.1)
    assert 0.5 < ratio(read(run(*command, "--layers", "0", "--json"))) < 2


TRACKED = "--steps 20 --batch-size 4 --every 5 --max-overhead 1"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_json_is_exactly_what_the_library_tracks(run, net, optimizer, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)  # then every measurement fits the overhead
    options = f"--lr 0.01 --optimizer {optimizer} --warmup 5 --seed 2 --curvature hessian --json"
    result = run("track", "net.py:problem", *TRACKED.split(), *options.split())
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    shown = Tracking.from_json(result.stdout)
    model, loss, data = net.problem()
    read = read_data(data, batch_size=4, steps=20)
    expected = train_and_track(
        Problem(model, loss, read.tracked_batch(256, seed=2), seed=2), read, lr=0.01, steps=20, every=5,
        max_overhead=1.0, optimizer=optimizer, warmup=5, name="net.py:problem",
        settings=TrackSettings(curvature="hessian", warn=False),
    )  # fmt: skip
    assert shown == expected
    assert [point.step for point in shown.points] == [0, 5, 10, 15, 20]


def test_initialize_fits_the_curvature_to_the_rate_first(run):
    command = ["track", "net.py:problem", *TRACKED.split(), "--lr", 0.2, "--json"]
    plain, fitted = (Tracking.from_json(run(*command, *more).stdout) for more in ([], ["--initialize"]))
    assert plain.initialization is None
    assert plain.points[0].norm == pytest.approx(78.6, rel=0.01)  # as `hessinit measure` has it
    assert fitted.initialization.lr == 0.2
    assert fitted.points[0].norm == pytest.approx(fitted.initialization.after.network.norm, rel=0.02)
    assert fitted.points[0].norm == pytest.approx(1 / 0.2, rel=0.05)  # κ = 1 for a quadratic loss


MANY = """

def many():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    # Most examples are small and some are large, so that samples of them differ.
    inputs = torch.randn(2000, 5, dtype=torch.float64) * torch.rand(2000, 1).exp() ** 4
    return model, nn.CrossEntropyLoss(), (inputs, torch.arange(2000) % 3)
"""


def test_the_norm_that_was_met_is_the_first_that_is_tracked(run, folder):
    (folder / "many.py").write_text((folder / "net.py").read_text() + MANY)
    result = run("track", "many.py:many", "--lr", 0.1, "--steps", 2, "--initialize", "--json")
    assert result.exit_code == 0, result.output
    shown = Tracking.from_json(result.stdout)
    assert shown.initialization.after.examples == shown.examples
    assert shown.points[0].norm == pytest.approx(shown.initialization.after.network.norm, rel=0.01)


def test_an_iterator_is_trained_on_as_a_list_is(run):
    options = [*TRACKED.split(), "--lr", 0.02, "--initialize", "--json"]
    found = [run("track", f"net.py:{name}", *options) for name in ("batches", "once")]
    assert [result.exit_code for result in found] == [0, 0], found[1].output
    losses = [Tracking.from_json(result.stdout).losses for result in found]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 20


def test_the_log_holds_every_point_and_is_not_written_over(run, folder):
    command = ["track", "net.py:problem", *TRACKED.split(), "--lr", 0.02, "--each-layer", "--log", "c.jsonl"]
    first = run(*command, "--json", "--save", "t.json")
    assert first.stderr == "Wrote t.json.\nWrote c.jsonl.\n"
    shown = Tracking.from_json(first.stdout)
    assert set(shown.points[0].layers) == {"0", "1", "2"}
    assert load("c.jsonl").points == load("t.json").points == shown.points
    assert run("show", "c.jsonl").stdout == f"{load('c.jsonl')}\n"
    kept = (folder / "c.jsonl").read_bytes()
    told = refused(run(*command))
    assert "Error: --log c.jsonl exists and was left as it is; give another name, or remove it" in told
    assert (folder / "c.jsonl").read_bytes() == kept


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_an_interrupted_training_shows_what_was_tracked():
    options = "--lr 0.01 --batch-size 4 --steps 100000 --every 2 --max-overhead 1 --json --save t.json"
    log = Path("c.jsonl")
    code, stdout, stderr = interrupt(
        signal.SIGTERM, lambda: log.exists() and len(log.read_bytes().splitlines()) >= 4, "track",
        "net.py:slow", *options.split(), "--log", log,
    )  # fmt: skip
    assert code == 130, stderr
    shown = Tracking.from_json(stdout)
    assert len(shown.points) >= 3
    assert shown == load("t.json")
    said = r"Wrote t\.json\.\nWrote c\.jsonl\.\nInterrupted: stopped after \d+ of 100000 steps\.\n"
    assert re.fullmatch(said, stderr), stderr
