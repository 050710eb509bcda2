from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from hessinit.results.track_record import Tracking
from hessinit.training.train_and_track import train_and_track

from .conftest import SOURCE
from .exact_problems import EXACT

SMALL = ("--steps", "20", "--batch-size", "4", "--every", "5", "--share", "1")


@pytest.fixture
def exact(tmp_path, monkeypatch):
    (tmp_path / "exact.py").write_text(EXACT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(EXACT, "exact.py", "exec"), names)
    return names


def norms(tracking: Tracking) -> dict[int, float]:
    return {point.step: point.norm for point in tracking.points}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_json_is_exactly_what_the_library_tracks(run, exact, optimizer, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)  # then every measurement fits the share
    options = [
        "--lr",
        "0.01",
        "--optimizer",
        optimizer,
        "--warmup",
        "5",
        "--seed",
        "2",
        "--curvature",
        "hessian",
    ]
    result = run("track", "exact.py:problem", *SMALL, *options, "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    shown = Tracking.from_json(result.stdout)
    expected = train_and_track(
        *exact["problem"](), lr=0.01, steps=20, batch_size=4, every=5, max_overhead=1.0, optimizer=optimizer,
        warmup=5, seed=2, curvature="hessian", name="exact.py:problem",
    )  # fmt: skip
    assert shown == expected
    assert list(norms(shown)) == [0, 5, 10, 15, 20]


def test_initialize_fits_the_curvature_to_the_rate_first(run, exact):
    plain, started = (
        Tracking.from_json(run("track", "exact.py:problem", *SMALL, "--lr", "0.2", "--json", *more).stdout)
        for more in ([], ["--initialize"])
    )
    assert plain.initialization is None
    assert plain.points[0].norm == pytest.approx(78.6, rel=0.01)  # as `hessinit measure` has it
    assert started.initialization.lr == 0.2
    assert started.points[0].norm == pytest.approx(started.initialization.after.network.norm, rel=0.02)
    assert started.points[0].norm == pytest.approx(1 / 0.2, rel=0.05)  # κ = 1 for a quadratic loss


def test_ready_batches_and_iterators_are_trained_on_too(run, tmp_path):
    path = tmp_path / "batched.py"
    path.write_text(
        EXACT
        + "\n\ndef batches():\n"
        + "    model, loss, (inputs, targets) = problem()\n"
        + "    return model, loss, list(zip(inputs.split(4), targets.split(4)))\n"
        + "\n\ndef once():\n"
        + "    model, loss, pairs = batches()\n"
        + "    return model, loss, iter(pairs)\n",
        encoding="utf-8",
    )
    found = [
        run("track", f"{path}:{name}", *SMALL, "--lr", "0.02", "--initialize", "--json")
        for name in ("batches", "once")
    ]
    assert [result.exit_code for result in found] == [0, 0], found[1].output
    losses = [Tracking.from_json(result.stdout).losses for result in found]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 20


def test_the_log_holds_every_point_and_a_second_run_keeps_it(run, exact, tmp_path):
    first = run("track", "exact.py:problem", *SMALL, "--lr", "0.02", "--log", "c.jsonl", "--json")
    assert first.stderr == "Wrote c.jsonl.\n"
    assert norms(Tracking.load("c.jsonl")) == norms(Tracking.from_json(first.stdout))
    kept = (tmp_path / "c.jsonl").read_bytes()
    again = run("track", "exact.py:problem", *SMALL, "--lr", "0.01", "--log", "c.jsonl")
    assert again.stderr == "Wrote c-2.jsonl, for c.jsonl was there.\n"
    assert (tmp_path / "c.jsonl").read_bytes() == kept
    assert run("show", "c-2.jsonl").exit_code == 0








MANY = """

def many():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    # Most examples are small and some are large, so that samples of them differ.
    inputs = torch.randn(2000, 5, dtype=torch.float64) * torch.rand(2000, 1).exp() ** 4
    return model, nn.CrossEntropyLoss(), (inputs, torch.arange(2000) % 3)

def many_batches():
    model, loss, (inputs, targets) = many()
    return model, loss, list(zip(inputs.split(100), targets.split(100)))
"""


@pytest.mark.parametrize("function", ["many", "many_batches"])
def test_the_norm_that_was_met_is_the_first_that_is_tracked(run, tmp_path, function):
    path = tmp_path / "many.py"
    path.write_text(EXACT + MANY, encoding="utf-8")
    result = run("track", f"{path}:{function}", "--lr", "0.1", "--steps", "2", "--initialize", "--json")
    assert result.exit_code == 0, result.output
    shown = Tracking.from_json(result.stdout)
    assert shown.initialization.after.examples == shown.examples
    assert shown.points[0].norm == pytest.approx(shown.initialization.after.network.norm, rel=0.01)


@pytest.mark.parametrize("result", ["model.requires_grad_(False), loss, data", "loss, model, data"])
def test_a_model_that_cannot_be_trained_is_refused_in_a_sentence(run, tmp_path, result):
    path = tmp_path / "net.py"
    path.write_text(
        EXACT + f"\n\ndef wrong():\n    model, loss, data = problem()\n    return {result}\n",
        encoding="utf-8",
    )
    shown = run("track", f"{path}:wrong", "--lr", "0.1", "--batch-size", "4")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert re.fullmatch(
        r"Error: the model \((Sequential|MSELoss)\) has no trainable parameter, so there is nothing to "
        r"train; unfreeze some \(requires_grad_\(\)\), and give the model before the loss\.\n",
        shown.stderr,
    ), shown.stderr


def test_files_are_written_and_can_be_shown(run, exact, tmp_path):
    result = run("track", "exact.py:problem", *SMALL, "--lr", "0.02", "--each-layer",
                 "--save", "t.json", "--html", "t.html")  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "Wrote t.json.\nWrote t.html.\n"), result.output
    saved = Tracking.load("t.json")
    assert set(saved.points[0].layers) == {"0", "1", "2"}
    assert run("show", "t.json").stdout == result.stdout == f"{saved}\n"
    assert (tmp_path / "t.html").read_text(encoding="utf-8").lower().startswith("<!doctype html>")


def test_a_divergence_is_shown_and_is_no_failure_of_the_command(run, exact):
    result = run("track", "exact.py:problem", "--steps", "200", "--batch-size", "4", "--lr", "100", "--json")
    assert result.exit_code == 0, result.output
    shown = Tracking.from_json(result.stdout)
    assert len(shown.losses) < 200
    assert any("training ended there" in note for note in shown.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "0"], "0.0 must be a number above 0, such as 0.1."),
        ([], "Missing option '--lr'"),
        (
            ["--lr", "0.1", "--batch-size", "4", "--share", "2"],
            "Error: --share 2.0 must be a number above 0, up to 1",
        ),
        (["--lr", "0.1", "--steps", "0"], "Invalid value for '--steps'"),
        (
            ["--lr", "0.1", "--batch-size", "9"],
            "Error: the data hold 8 examples, fewer than --batch-size 9; pass --batch-size 8 or less",
        ),
        (
            ["--lr", "0.1", "--batch-size", "9", "--initialize"],
            "Error: the data hold 8 examples, fewer than --batch-size 9",
        ),
        (["--lr", "0.1", "--batch-size", "4", "--layers", "7"], "Error: --layers "),
        (
            ["--lr", "0.1", "--log", "no/c.jsonl"],
            "Error: --log no/c.jsonl cannot be written: the folder no does",
        ),
        (["--lr", "0.1", "--optimizer", "lion"], "Invalid value for '--optimizer'"),
        (["--lr", "0.1", "--device", "cuad"], "Error: --device cuad cannot be used here: "),
    ],
)
def test_a_wrong_option_is_answered_in_the_command_s_own_words(run, exact, tmp_path, options, message):
    result = run("track", "exact.py:problem", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["exact.py"]


SLOW = """

def slow():
    import time
    model, loss, batch = problem()
    model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    return model, loss, batch
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
@pytest.mark.parametrize("request_to_end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_training_shows_what_was_tracked(exact, tmp_path, request_to_end):
    (tmp_path / "slow.py").write_text(EXACT + SLOW, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "hessinit", "track", "slow.py:slow", "--lr", "0.01", "--batch-size", "4",
         "--steps", "100000", "--every", "2", "--share", "1",  # so that points come at any load
         "--log", "c.jsonl", "--json", "--save", "t.json"],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log = tmp_path / "c.jsonl"
    deadline = time.monotonic() + 300
    while not (log.exists() and len(log.read_bytes().splitlines()) >= 4):
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.05)
    process.send_signal(request_to_end)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    shown = Tracking.from_json(stdout)
    assert len(shown.points) >= 3
    assert shown == Tracking.load(tmp_path / "t.json")
    assert re.fullmatch(
        r"Wrote t\.json\.\nWrote c\.jsonl\.\nInterrupted: stopped after \d+ of 100000 steps\.\n", stderr
    ), stderr




