from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import hessinit
from calls import call, measure
from hessinit import Initialization, initialize_, load
from hessinit.progress import ProgressState
from hessinit.training.loop import read_data
from result_examples import make_compared

from .conftest import on_a_terminal, without_seconds

NOTHING = "No weights were written. Pass --weights FILE.safetensors to keep them.\n"


def test_json_is_exactly_what_the_library_does(run, net):
    options = "--lr 0.1 --scheme he --optimizer momentum --momentum 0.5 --seed 3 --scaling last --no-trials"
    result = run("initialize", "net.py:problem", "--json", "--tolerance", 0.01, *options.split())
    assert (result.exit_code, result.stderr) == (0, NOTHING), result.output
    problem = hessinit.Problem(*net.problem(), seed=3)
    fit = hessinit.Fit(scheme="he", momentum=0.5, scaling="last", tolerance=0.01)
    expected = initialize_(problem, lr=0.1, optimizer="momentum", fit=fit)
    assert without_seconds(json.loads(result.stdout)) == without_seconds(expected.to_dict())


def test_the_weights_that_are_written_have_the_norm_that_is_printed(run, net):
    result = run("initialize", "net.py:problem", "--target", 2, "--json", "--weights", "w.safetensors")
    assert result.stderr == "Wrote w.safetensors.\n"
    model, loss, batch = net.problem()
    safetensors.torch.load_model(model, "w.safetensors")
    shown = Initialization.from_json(result.stdout)
    assert measure(model, loss, batch).network.norm == pytest.approx(shown.after.network.norm, rel=1e-3)
    assert shown.after.network.norm == pytest.approx(2, rel=0.05)


def test_overwrite_draws_what_is_trainable_in_a_model_with_frozen_weights(run, net):
    result = run("initialize", "net.py:partly_frozen", "--target", 2, "--overwrite", "--json")
    expected = initialize_(*net.partly_frozen(), target=2.0, fit=hessinit.Fit(overwrite=True))
    assert without_seconds(json.loads(result.stdout)) == without_seconds(expected.to_dict())


def test_a_dry_run_writes_no_weights_and_says_how_to_keep_them(run, folder):
    result = run("initialize", "net.py:problem", "--target", 1, "--rule", "layers", "--dry-run")
    assert result.exit_code == 0
    assert result.stderr == NOTHING.replace("Pass", "Leave out --dry-run and pass")
    auto = run("initialize", "net.py:problem", "--lr", "auto", "--no-trials")
    assert auto.stderr == NOTHING
    assert auto.stdout.startswith("learning rate: 0.")
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["net.py"]


def test_a_target_that_is_not_met_ends_with_1_and_still_writes(run, folder):
    result = run("initialize", "net.py:regression", "--target", 2, "--weights", "w.safetensors", "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["converged"]
    assert result.stderr == "Wrote w.safetensors.\nTarget not met: the result says why.\n"
    assert (folder / "w.safetensors").exists()


def test_weights_that_are_left_flat_on_purpose_are_no_failure(run):
    """For a small learning rate a quadratic loss is not sharpened: the command succeeds, and says so."""
    result = run("initialize", "net.py:problem", "--lr", "1e-6", "--json", "--no-trials")
    shown = Initialization.from_json(result.stdout)
    assert (shown.converged, shown.scaling, shown.flat_enough) == (False, "none", True)
    assert result.exit_code == 0
    text = run("initialize", "net.py:problem", "--lr", "1e-6", "--no-trials").stdout
    assert "Not sharpened: the network's" in text
    assert "ot met" not in text
    alone = run("initialize", "net.py:problem", "--lr", "1e-6")  # eight examples are one batch
    assert (alone.exit_code, alone.stderr) == (0, NOTHING)
    assert "Not sharpened: the network's" in alone.stdout


def test_old_weights_that_were_put_back_end_with_1(run, calls):
    put_back = {"converged": False, "scaling": "none", "kappa": None, "target": None, "trials": ()}
    calls["result"] = replace(make_compared(), **put_back, reason="the loss blew up in every trial")
    result = run("initialize", "net.py:problem", "--lr", 0.1, "--no-trials")
    assert "Not met: the loss blew up in every trial." in result.stdout
    end = result.stderr.splitlines()[-1]
    assert (result.exit_code, end) == (1, "No weights survived at this rate: the result says why.")


def test_nothing_is_met_where_nothing_was_asked_for(run):
    """Adam's rate asks for no curvature of a network without symmetries."""
    shown = run(
        "initialize",
        "net.py:problem",
        "--lr",
        0.01,
        "--optimizer",
        "adamw",
        "--scheme",
        "lsuv",
        "--no-trials",
    ).stdout
    assert shown.startswith("No curvature was fitted, as steps of AdamW do not grow with the gradient: the w")
    assert "Met" not in shown
    assert "radient descent" not in shown


def test_the_function_s_keywords_that_mean_the_same_are_taken_and_others_are_named(run, net):
    result = run("initialize", "net.py:with_keywords", "--target", 2, "--json", "--scheme", "keep")
    assert result.exit_code == 0, result.output
    assert "net.py:with_keywords also returns curvature, which only hessinit measure" in result.stderr
    shown = Initialization.from_json(result.stdout)
    assert set(shown.scales) == {"0", "2"}
    doubled = measure(*net.problem(), forward=lambda model, x: 2 * model(x), layers=["0", "2"])
    assert shown.before.network.norm == pytest.approx(doubled.network.norm, rel=1e-6)


DEEP = """
import torch
from torch import nn

def problem():
    layers = [part for _ in range(30) for part in (nn.Linear(4, 4), nn.Sigmoid())]
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(32, 4, generator=generator), torch.arange(32) % 3
    return nn.Sequential(*layers, nn.Linear(4, 3)), nn.CrossEntropyLoss(), data
"""
ON_DATA = ("initialize", "net.py:problem", "--lr", 0.02, "--trial-steps", 6, "--batch-size", 4)


@pytest.mark.parametrize("lr", [0.02, "auto"])
def test_trials_are_exactly_the_library_s_on_mini_batches_of_the_data(run, net, lr):
    result = run(*ON_DATA[:3], lr, *ON_DATA[4:], "--json", "--weights", "w.safetensors", "--report")
    assert (result.exit_code, result.stderr) == (0, "Wrote w.safetensors.\n"), result.output
    model, loss, data = net.problem()
    first = read_data(data, 4, 6).initial_batch(0)
    options = {"data": data, "trial_steps": 6, "report": True, "progress": False}
    expected = call(initialize_, model, loss, (first.inputs, first.targets), lr=lr, **options)
    assert {trial.name for trial in expected.trials} == {"hessinit", "your weights"}
    assert without_seconds(json.loads(result.stdout)) == without_seconds(expected.to_dict())
    written = safetensors.torch.load_file("w.safetensors")
    assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())


@pytest.fixture
def calls(monkeypatch):
    """What the command gives to the library, which answers with weights that were chosen, or `result`."""
    found: dict[str, object] = {"result": make_compared()}

    def stub(problem, *, progress=None, **keywords):
        found.update(keywords, batch=problem.batch)
        for step in (1, 2, 3):
            if callable(progress):
                progress(ProgressState("steps", step, 3, 0.0, 0.0, "your weights"))
        if isinstance(found["result"], BaseException):
            raise found["result"]
        return found["result"]

    monkeypatch.setattr(hessinit, "initialize_", stub)
    return found


@pytest.mark.parametrize(
    ("problem", "options", "size", "batches"),
    [
        ("problem", "", 8, None), ("problem", "--batch-size 3", 3, None),
        ("batches", "", 4, [4, 4]), ("once", "", 4, [4, 4]),
    ],
)  # fmt: skip
def test_the_data_are_cut_or_kept_as_ready_batches(run, calls, problem, options, size, batches):
    assert run("initialize", f"net.py:{problem}", "--lr", "auto", *options.split()).exit_code == 0
    assert len(calls["batch"][0]) == size
    data = calls["data"]
    assert len(data[0]) == 8 if batches is None else [len(inputs) for inputs, _ in data] == batches
    assert (calls["lr"], calls["steps"], calls["fit"]) == ("auto", None, hessinit.Fit())


def test_a_longer_training_is_told_to_the_library_and_the_length_of_trials_is_its_own(run, calls):
    run("initialize", "net.py:problem", "--lr", 0.1, "--steps", 5000, "--trial-steps", 9)
    assert (calls["steps"], calls["fit"]) == (5000, hessinit.Fit(trial_steps=9))


@pytest.mark.parametrize("options", ["--lr 0.1 --no-trials", "--target 2", ""])
def test_without_a_rate_or_trials_all_data_are_measured_and_nothing_is_compared(run, calls, options):
    run("initialize", "net.py:problem", *options.split())
    assert len(calls["batch"][0]) == 8
    assert calls["data"] is None


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ("", "the loss blew up in most trials"),
        ("--batch-size 2", "neither the new weights nor yours survive"),
    ],
)
def test_a_rate_at_which_no_weights_survive_ends_with_1(run, options, end):
    """The stability limit of this regression is 2/12.5 = 0.16, whatever the weights."""
    result = run("initialize", "net.py:regression", "--lr", 0.5, *options.split())
    assert f"Not met: at lr = 0.5 {end}" in result.stdout
    assert result.exit_code == 1
    assert result.stderr.endswith("No weights survived at this rate: the result says why.\n")


@pytest.mark.parametrize("lr", ["1e-6", "auto"])
def test_where_no_weights_learn_none_are_written_and_the_command_ends_with_1(run, folder, lr):
    """Gradients vanish in thirty sigmoid layers: no rate of the trials lowers the loss."""
    (folder / "deep.py").write_text(DEEP, encoding="utf-8")
    options = f"--lr {lr} --trial-steps 3 --batch-size 16 --weights w.safetensors --save r.json"
    result = run("initialize", "deep.py:problem", *options.split())
    assert (result.exit_code, result.stderr.splitlines()) == (
        1, ["Wrote r.json.", "Nothing learned, and nothing was written: the result says more."],
    )  # fmt: skip
    first = " ".join(result.stdout.partition("\n\n")[0].split())
    assert first.startswith("Nothing learned in trials of up to ")
    assert "nothing was written. What may help: normalization layers, residual connections" in first
    assert not (folder / "w.safetensors").exists()
    shown = load(folder / "r.json")
    assert (shown.learned, shown.converged, shown.lr) == (False, False, None if lr == "auto" else 1e-6)


def test_ctrl_c_in_the_trials_writes_nothing(run, calls, folder):
    calls["result"] = KeyboardInterrupt()
    result = run(*ON_DATA, "--weights", "w.safetensors", "--save", "r.json")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Interrupted: the initialization was not finished, and nothing was written.\n"
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["net.py"]


def test_on_a_terminal_a_bar_counts_the_steps_and_names_the_weights_and_the_rate():
    seen = on_a_terminal("initialize", "net.py:slow", *map(str, ON_DATA[2:]))
    assert "Initializing net.py:slow" in seen
    assert re.search(r"\d+ of (6|12) steps.*: (hessinit|your weights) at lr = 0.02", seen)
    assert re.search(r"(new weights were chosen|own weights were kept): they came to", seen)
