from __future__ import annotations

import json
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

from hessinit.cli.rebuilding import ForwardOf, LossOf, ModelOf, load_rebuildable
from hessinit.problem_file import find_problem
from hessinit.results.comparison import Comparison
from hessinit.training.compare import compare

from .comparing_examples import DIGITS
from .conftest import SOURCE

SMALL = (
    "--steps",
    "20",
    "--batch-size",
    "20",
    "--seeds",
    "2",
    "--start",
    "default",
    "--start",
    "he",
    "--lr",
    "0.1",
)


@pytest.fixture
def digits(tmp_path):
    path = tmp_path / "digits_net.py"
    path.write_text(DIGITS)
    return path


def read(result) -> Comparison:
    assert result.exit_code == 0, result.output
    return Comparison.from_json(result.stdout)


def truth(digits, function, **options):
    """The same file imported by hand, compared by the library in this process."""
    names: dict[str, object] = {}
    exec(compile(digits.read_text(), str(digits), "exec"), names)
    given = {"schemes": ["default", "he"], "learning_rates": [0.1], "seeds": 2, "steps": 20, "batch_size": 20}
    _, loss, data, *rest = names[function]()
    forward = rest[0]["forward"] if rest else None
    return compare(
        lambda: names[function]()[0], loss, data, forward=forward, workers=1, **{**given, **options}
    )


@pytest.mark.parametrize("function", ["problem", "with_lambdas", "batches"])
def test_a_file_s_function_is_compared_as_the_library_does(run, digits, function):
    shown = read(run("compare", f"{digits}:{function}", *SMALL, "--workers", 1, "--json"))
    assert shown.runs == truth(digits, function).runs
    assert shown.schemes == ("default", "he")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("problem", "the file is run\na word from the user's own code\n"),
        ("with_functions_of_the_file", "the file is run\n"),
    ],
)
def test_workers_give_the_same_numbers_and_what_the_file_prints_is_shown_once(
    run, run_process, digits, function, said
):
    together = run_process("compare", f"digits_net.py:{function}", *SMALL, "--json", "--workers", "2")
    assert (together.returncode, together.stderr) == (0, said)
    shown = Comparison.from_json(together.stdout)
    assert together.stdout == shown.to_json()
    assert shown == read(run("compare", f"{digits}:{function}", *SMALL, "--json", "--workers", "1"))


@pytest.mark.parametrize(
    ("function", "loss", "forward"),
    [
        ("problem", nn.CrossEntropyLoss, type(None)),
        ("with_lambdas", LossOf, ForwardOf),
        ("with_functions_of_the_file", LossOf, type(None)),
    ],
)
def test_every_part_of_a_problem_can_be_pickled(digits, function, loss, forward, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    problem = load_rebuildable(find_problem(f"{digits}:{function}"))
    assert (type(problem.loss), type(problem.forward)) == (loss, forward)
    sent = pickle.loads(pickle.dumps((problem.build, problem.loss, problem.forward)))
    model, images, labels = sent[0](), *problem.data
    assert model is not problem.loaded.model
    output = model(images) if sent[2] is None else sent[2](model, images)
    expected = (2.0 if sent[2] is not None else 1.0) * model(images)
    assert torch.equal(output, expected)
    assert torch.equal(sent[1](output, labels), nn.functional.cross_entropy(expected, labels))


def test_running_the_file_changes_no_model(digits, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    build = ModelOf(find_problem(f"{digits}:problem"))
    weights = []
    for _ in range(2):  # the first call runs the file, which draws
        torch.manual_seed(5)
        weights.append(build().fc1.weight)
    assert torch.equal(*weights)


def test_the_result_is_printed_as_print_does_and_written_to_files(run, digits, tmp_path):
    page, saved, picture = tmp_path / "c.html", tmp_path / "c.json", tmp_path / "c.PNG"
    result = run("compare", f"{digits}:problem", *SMALL, "--workers", 1,
                 "--html", page, "--save", saved, "--picture", picture)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{Comparison.load(saved)}\n"
    assert result.stderr.endswith(f"Wrote {saved}.\nWrote {page}.\nWrote {picture}.\n")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*tmp"))






def test_a_folder_is_gone_on_with_and_more_rates_are_added(run, digits, tmp_path):
    command = (
        "compare",
        f"{digits}:problem",
        *SMALL,
        "--workers",
        1,
        "--json",
        "--folder",
        tmp_path / "runs",
    )
    first = read(run(*command))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs" / "runs").iterdir()}
    more = read(run(*command, "--lr", 0.01))
    assert more.learning_rates == (0.1, 0.01)
    assert all(
        more.runs_of(start, 0.1)[0].losses == first.runs_of(start, 0.1)[0].losses for start in first.schemes
    )
    assert all(path.stat().st_mtime_ns == changed for path, changed in files.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--start", "hee"], "Error: --start 'hee' is unknown; choose from 'default', .* Did you mean 'he'?"),
        (["--lr", "-0.1"], "Error: -0.1 in --lr must be a number above 0, such as 0.1."),
        (["--lr", "0.1"], "Error: --lr holds 0.1 twice; give every number once."),
        (["--batch-size", "500"], "Error: the data hold 200 examples, fewer than --batch-size 500"),
        (["--optimizer", "lion"], "Invalid value for '--optimizer'"),
        (["--steps", "3"], "Invalid value for '--steps'"),
        (["--device", "cuad"], "Error: --device 'cuad' cannot be used here"),
        (["--warmup", "21"], "Error: --warmup 21 is longer than the run; it must be at most --steps 20."),
        (["--picture", "c.bmp"], "Error: --picture c.bmp must end in one of .png, .pdf, .svg."),
        (["--picture", "no/c.png"], "Error: --picture no/c.png cannot be written: the folder no does not"),
        (["--picture", "c.png", "--save", "c.png"], "Error: --save and --picture both name c.png; give them"),
    ],
)
def test_a_wrong_option_is_answered_in_the_command_s_own_words(
    run, digits, tmp_path, monkeypatch, options, message
):
    monkeypatch.chdir(tmp_path)
    result = run("compare", f"{digits}:problem", *SMALL, "--workers", 1, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), result.stderr), result.stderr
    assert "Traceback" not in result.stderr


def test_one_model_for_all_runs_is_refused(run, digits):
    result = run("compare", f"{digits}:one_model", *SMALL, "--workers", 1)
    assert result.exit_code == 2
    assert "build() returned the same model twice" in result.stderr


def test_keywords_that_are_only_for_measuring_are_named(run, digits):
    result = run("compare", f"{digits}:with_lambdas", *SMALL, "--workers", 1)
    assert result.exit_code == 0, result.output
    assert "also gives curvature, which only hessinit measure looks at." in result.stderr


def test_a_function_that_fails_shows_its_own_frames(run, tmp_path):
    (tmp_path / "bad.py").write_text("def problem():\n    raise LookupError('no data here')\n")
    result = run("compare", f"{tmp_path / 'bad.py'}:problem")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "LookupError: no data here" in result.stderr
    assert result.stderr.endswith("failed, as shown above.\n")


def test_a_failure_in_a_worker_is_the_user_s_own(run_process, tmp_path):
    (tmp_path / "late_net.py").write_text(
        DIGITS
        + """
import multiprocessing


def only_here():
    if multiprocessing.parent_process() is not None:
        raise LookupError("no data in a worker")
    return problem()


def wrong_target():
    model, loss, (images, labels) = problem()
    labels = labels.clone()
    labels[7] = 99
    return model, loss, (images, labels)
"""
    )
    shown = run_process("compare", "late_net.py:only_here", *SMALL, "--workers", "2").stderr
    assert shown.count("Traceback") == 1, shown
    assert 'raise LookupError("no data in a worker")' in shown
    assert re.search(r"Error: only_here\(\) of .*late_net.py failed, as shown above\.\n$", shown)
    shown = run_process("compare", "late_net.py:wrong_target", *SMALL, "--workers", "2").stderr
    assert "Target 99 is out of bounds" in shown
    assert "concurrent" not in shown
    assert shown.endswith("Error: comparing starts of late_net.py:wrong_target failed, as shown above.\n")




def test_a_file_with_the_name_of_a_module_that_nobody_loads_runs_in_workers(run_process, tmp_path, digits):
    (tmp_path / "this.py").write_text(digits.read_text())  # Python's own prints a poem
    command = ("compare", "this.py:with_functions_of_the_file", *SMALL, "--json", "--workers", "2")
    result = run_process(*command)
    assert (result.returncode, result.stderr) == (0, "the file is run\n")


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_an_interrupted_command_says_how_to_go_on_and_goes_on(run, digits, tmp_path):
    options = ("digits_net.py:slow", *SMALL, "--lr", "0.01", "--lr", "0.03", "--workers", "2")
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
        r"Interrupted: stopped; (\d+) of 12 runs are kept in runs\. The same command continues", stderr
    )
    assert found, stderr
    assert 2 <= int(found[1]) < 12
    assert "Traceback" not in stderr
    again = ("compare", f"{digits}:slow", *options[1:-1], "1", "--json")
    assert read(run(*again, "--folder", tmp_path / "runs")) == read(run(*again))


def test_without_a_folder_an_interrupted_command_says_that_nothing_is_kept(run, digits, monkeypatch):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hessinit.training.compare.Experiment.__call__", interrupted)
    result = run("compare", f"{digits}:problem", *SMALL, "--workers", 1)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith(
        "Interrupted: stopped after 0 of 4 runs, and none is kept; pass --folder to keep them next time.\n"
    )


