from __future__ import annotations

import json

import pytest
import safetensors.torch

from hessinit import Initialization, initialize_, measure

from .conftest import without_seconds

NOTHING = "No weights were written. Pass --weights FILE.safetensors to keep them.\n"


def test_json_is_exactly_what_the_library_does(run, net):
    options = (
        "--lr 0.1 --scheme he --optimizer momentum --momentum 0.5 --seed 3 --scaling last --tolerance 0.01"
    )
    result = run("initialize", "net.py:problem", "--json", *options.split())
    assert (result.exit_code, result.stderr) == (0, NOTHING), result.output
    expected = initialize_(
        *net.problem(), lr=0.1, scheme="he", optimizer="momentum", momentum=0.5, seed=3, scaling="last",
        tolerance=0.01,
    )  # fmt: skip
    assert without_seconds(json.loads(result.stdout)) == without_seconds(expected.to_dict())


def test_the_weights_that_are_written_have_the_norm_that_is_printed(run, net):
    result = run("initialize", "net.py:problem", "--target", 2, "--json", "--weights", "w.safetensors")
    assert result.stderr == "Wrote w.safetensors.\n"
    model, loss, batch = net.problem()
    safetensors.torch.load_model(model, "w.safetensors")
    shown = Initialization.from_json(result.stdout)
    assert measure(model, loss, batch).network.norm == pytest.approx(shown.after.network.norm, rel=1e-3)
    assert shown.after.network.norm == pytest.approx(2, rel=0.05)


def test_a_dry_run_writes_no_weights_and_says_how_to_keep_them(run, folder):
    result = run("initialize", "net.py:problem", "--target", 1, "--rule", "layers", "--dry-run")
    assert result.exit_code == 0
    assert result.stderr == NOTHING.replace("Pass", "Leave out --dry-run and pass")
    assert run("initialize", "net.py:problem", "--lr", "auto").stderr == NOTHING
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["net.py"]


def test_a_target_that_is_not_met_ends_with_1_and_still_writes(run, folder):
    result = run("initialize", "net.py:regression", "--target", 2, "--weights", "w.safetensors", "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["converged"]
    assert result.stderr == "Wrote w.safetensors.\nTarget not met: the result says why.\n"
    assert (folder / "w.safetensors").exists()


def test_weights_that_are_left_flat_on_purpose_are_no_failure(run):
    """For a small learning rate a quadratic loss is not sharpened: the command succeeds."""
    result = run("initialize", "net.py:problem", "--lr", "1e-6", "--json")
    shown = Initialization.from_json(result.stdout)
    assert (shown.converged, shown.scaling) == (False, "none")
    assert result.exit_code == 0


def test_the_function_s_keywords_that_mean_the_same_are_taken_and_others_are_named(run, net):
    result = run("initialize", "net.py:with_keywords", "--target", 2, "--json", "--scheme", "keep")
    assert result.exit_code == 0, result.output
    assert "net.py:with_keywords also returns curvature, seed, which only hessinit measure" in result.stderr
    shown = Initialization.from_json(result.stdout)
    assert set(shown.scales) == {"0", "2"}
    doubled = measure(*net.problem(), forward=lambda model, x: 2 * model(x), layers=["0", "2"])
    assert shown.before.network.norm == pytest.approx(doubled.network.norm, rel=1e-6)
