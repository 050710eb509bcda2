from __future__ import annotations

import pytest

from hessinit.results.comparison import Comparison

from .comparing_examples import DIGITS

SMALL = (
    "--steps",
    "20",
    "--batch-size",
    "20",
    "--seeds",
    "1",
    "--workers",
    "1",
    "--std",
    "0.1",
    "--std",
    "0.01",
)


@pytest.fixture
def digits(tmp_path):
    path = tmp_path / "digits_net.py"
    path.write_text(DIGITS)
    return path


def test_a_sweep_shows_the_norms_of_each_layer_and_the_loss(run, digits, tmp_path):
    saved, picture = tmp_path / "s.json", tmp_path / "s.svg"
    result = run("sweep", f"{digits}:problem", *SMALL, "--save", saved, "--picture", picture)
    assert result.exit_code == 0, result.output
    assert result.stdout.split()[:4] == ["std", "fc1", "fc2", "network"]
    assert "loss after 20 steps" in result.stdout
    comparison = Comparison.load(saved)
    assert (comparison.kind, comparison.stds, comparison.learning_rates) == ("sweep", (0.1, 0.01), (0.01,))
    # A layer's curvature grows with the square of the other's weights; the softmax bends it a little.
    ratio = comparison.norm("std 0.1", layer="fc1") / comparison.norm("std 0.01", layer="fc1")
    assert ratio == pytest.approx(100, rel=0.1)
    assert picture.read_text().startswith("<?xml")
    assert run("show", saved).stdout == result.stdout


def test_only_the_layers_asked_for_are_drawn(run, digits):
    result = run("sweep", f"{digits}:problem", *SMALL, "--layers", "fc1", "--lr", "0.1", "--json")
    comparison = Comparison.from_json(result.stdout)
    assert comparison.learning_rates == (0.1,)
    # fc1's own scale does not matter to its curvature while fc2 stays as it was built.
    ratio = comparison.norm("std 0.1", layer="fc1") / comparison.norm("std 0.01", layer="fc1")
    assert 0.5 < ratio < 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--std", "0"], "Error: 0.0 in --std must be a number above 0, such as 0.1."),
        (["--std", "0.1"], "Error: --std holds 0.1 twice; give every number once."),
        (["--lr", "-1"], "Error: -1.0 in --lr must be a number above 0, such as 0.1."),
        (["--start", "he"], "No such option"),
    ],
)
def test_a_wrong_option_is_answered_in_the_command_s_own_words(run, digits, options, message):
    result = run("sweep", f"{digits}:problem", *SMALL, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_pattern_that_fits_no_layer_is_answered(run, digits):
    result = run("sweep", f"{digits}:problem", *SMALL, "--layers", "conv*")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: --layers 'conv*' fits no parameter of the model; its layers are fc1, fc2." in result.stderr
