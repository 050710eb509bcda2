"""`hessinit compare` and `hessinit sweep`: the library's numbers, its refusals, and interruptions."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from hessinit import Comparison, compare
from hessinit.cli.problem_file import PartOf, find_problem, load_rebuildable

from .comparing_examples import DIGITS
from .conftest import SOURCE

SHORT = ("--steps", "20", "--batch-size", "20")
SMALL = (*SHORT, "--seeds", "2", "--schemes", "default,he", "--learning-rates", "0.1")
SWEPT = (*SHORT, "--seeds", "1", "--workers", "1", "--stds", "0.1,0.01")


@pytest.fixture
def digits(tmp_path):
    path = tmp_path / "digits_net.py"
    path.write_text(DIGITS)
    return path


def read(result) -> Comparison:
    assert result.exit_code == 0, result.output
    return Comparison.from_json(result.stdout)


@pytest.mark.parametrize("function", ["problem", "with_lambdas", "batches"])
def test_a_function_of_a_file_is_compared_as_the_library_does(run, digits, function):
    result = run("compare", f"{digits}:{function}", *SMALL, "--workers", 1, "--json")
    names: dict[str, object] = {}
    exec(compile(digits.read_text(), str(digits), "exec"), names)
    _, loss, data, *rest = names[function]()
    truth = compare(
        lambda: names[function]()[0], loss, data, forward=rest[0]["forward"] if rest else None,
        schemes=["default", "he"], learning_rates=[0.1], seeds=2, steps=20, batch_size=20, workers=1,
    )  # fmt: skip
    assert read(result).runs == truth.runs
    assert ("also returns curvature, which only hessinit measure uses" in result.stderr) == (
        function == "with_lambdas"
    )


def test_workers_give_the_same_numbers_and_what_the_file_prints_is_shown_once(run, run_process, digits):
    command = ("compare", "digits_net.py:with_functions_of_the_file", *SMALL, "--json", "--workers")
    together = run_process(*command, "2")
    assert (together.returncode, together.stderr) == (0, "the file is run\n")
    shown = Comparison.from_json(together.stdout)
    assert together.stdout == shown.to_json()
    assert shown == read(
        run("compare", f"{digits}:with_functions_of_the_file", *SMALL, "--json", "--workers", 1)
    )


@pytest.mark.parametrize("function", ["problem", "with_lambdas", "with_functions_of_the_file"])
def test_every_part_of_a_problem_can_be_pickled(digits, function, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded = load_rebuildable(find_problem(f"{digits}:{function}"))
    forward = loaded.keywords.get("forward")
    build, loss, call = pickle.loads(pickle.dumps((loaded.model, loaded.loss, forward)))
    model, (images, labels) = build(), loaded.batch
    output = model(images) if call is None else call(model, images)
    expected = (1.0 if call is None else 2.0) * model(images)
    assert torch.equal(output, expected)
    assert torch.equal(loss(output, labels), nn.functional.cross_entropy(expected, labels))
    weights = []
    for _ in range(2):  # the file draws when it is run, which must change no model
        torch.manual_seed(5)
        weights.append(build().fc1.weight)
    assert torch.equal(*weights)
    assert isinstance(build, PartOf)


def test_the_result_is_printed_as_print_does_and_written_to_files(run, digits, tmp_path):
    page, saved, picture = tmp_path / "c.html", tmp_path / "c.json", tmp_path / "c.PNG"
    result = run("compare", f"{digits}:problem", *SMALL, "--workers", 1,
                 "--html", page, "--save", saved, "--picture", picture)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{Comparison.load(saved)}\n"
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*tmp"))


def test_a_sweep_shows_the_norms_of_each_layer_and_the_loss(run, digits, tmp_path):
    saved, picture = tmp_path / "s.json", tmp_path / "s.svg"
    result = run("sweep", f"{digits}:problem", *SWEPT, "--save", saved, "--picture", picture)
    assert result.exit_code == 0, result.output
    assert result.stdout.split()[:4] == ["std", "fc1", "fc2", "network"]
    swept = Comparison.load(saved)
    assert (swept.kind, swept.stds, swept.learning_rates) == ("sweep", (0.1, 0.01), (0.01,))
    # A layer's curvature grows with the square of the other's weights; the softmax bends it a little.
    ratio = swept.norm("std 0.1", layer="fc1") / swept.norm("std 0.01", layer="fc1")
    assert ratio == pytest.approx(100, rel=0.1)
    assert picture.read_text().startswith("<?xml")
    assert run("show", saved).stdout == result.stdout
    # fc1's own scale does not matter to its curvature while fc2 stays as it was built.
    command = ("sweep", f"{digits}:problem", *SWEPT, "--layers", "fc1", "--learning-rate", "0.1", "--json")
    one = read(run(*command))
    assert 0.5 < one.norm("std 0.1", layer="fc1") / one.norm("std 0.01", layer="fc1") < 2


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("compare", ["--schemes", "hee"], "schemes='?hee'? is unknown; choose from .*Did you mean 'he'?"),
        ("compare", ["--learning-rates", "-0.1"], "-0.1 in .*learning.rates must be a number above 0"),
        (
            "compare",
            ["--learning-rates", "0.1,0.1"],
            "learning.rates holds 0.1 twice; give every number once",
        ),
        ("compare", ["--learning-rates", "fast"], "fast"),
        ("compare", ["--batch-size", "500"], "the data hold 200 examples, fewer than .*500"),
        ("compare", ["--optimizer", "lion"], "optimizer"),
        ("compare", ["--steps", "3"], "Invalid value for '--steps'"),
        ("compare", ["--device", "cuad"], "device.*'?cuad'? cannot be used here"),
        ("compare", ["--warmup", "21"], "warmup.21 is longer than the run; it must be at most .*20"),
        ("compare", ["--picture", "c.bmp"], "--picture c.bmp must end in one of .png, .pdf, .svg"),
        ("sweep", ["--stds", "0"], "0.0 in .*stds must be a number above 0, such as 0.1"),
        ("sweep", ["--learning-rate", "-1"], "learning.rate"),
        ("sweep", ["--schemes", "he"], "No such option"),
        ("sweep", ["--layers", "conv*"], "layers.'conv\\*' fits no parameter of the model; its layers are"),
    ],
)
def test_a_wrong_option_is_refused(run, digits, tmp_path, monkeypatch, command, options, message):
    monkeypatch.chdir(tmp_path)
    small = SWEPT if command == "sweep" else (*SHORT, "--seeds", "2", "--workers", 1)
    result = run(command, f"{digits}:problem", *small, *options)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr


def test_one_model_for_all_runs_is_refused(run, digits):
    result = run("compare", f"{digits}:one_model", *SMALL, "--workers", 1)
    assert result.exit_code == 2
    assert "build() returned the same model twice" in result.stderr


def test_a_failure_in_a_worker_shows_the_users_own_frame(run_process, tmp_path):
    (tmp_path / "late_net.py").write_text(
        DIGITS
        + """
import multiprocessing


def only_here():
    if multiprocessing.parent_process() is not None:
        raise LookupError("no data in a worker")
    return problem()
"""
    )
    result = run_process("compare", "late_net.py:only_here", *SMALL, "--workers", "2")
    assert result.returncode == 2
    assert 'raise LookupError("no data in a worker")' in result.stderr
    assert result.stderr.endswith("failed, as shown above.\n")


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_an_interrupted_command_says_how_to_continue_and_continues(run, digits, tmp_path):
    options = ("digits_net.py:slow", *SMALL[:-1], "0.1,0.01,0.03", "--workers", "2")
    process = subprocess.Popen(
        [sys.executable, "-m", "hessinit", "compare", *options, "--folder", "runs"],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    runs = tmp_path / "runs" / "runs"
    deadline = time.monotonic() + 300
    while not (runs.is_dir() and len(list(runs.glob("[!.]*.json"))) >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (130, ""), stderr
    found = re.search(
        r"Interrupted: stopped; (\d+) of 12 runs are kept in runs\. The same \w+ continues", stderr
    )
    assert found, stderr
    assert 2 <= int(found[1]) < 12
    assert "Traceback" not in stderr
    again = ("compare", f"{digits}:slow", *options[1:-1], "1", "--json")
    assert read(run(*again, "--folder", tmp_path / "runs")) == read(run(*again))


def test_without_a_folder_an_interrupted_command_says_that_nothing_is_kept(run, digits, monkeypatch):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hessinit.training.compare.Trainer.__call__", interrupted)
    result = run("compare", f"{digits}:problem", *SMALL, "--workers", 1)
    assert (result.exit_code, result.stdout) == (130, "")
    assert re.search("Interrupted: stopped after 0 of 4 runs, and none is kept; pass .*folder", result.stderr)
