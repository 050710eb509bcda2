from __future__ import annotations

import json
import re

import pytest
import safetensors.torch

from hessinit import initialize_, measure
from hessinit.results.initialization import Initialization

from .exact_problems import EXACT


@pytest.fixture
def exact(tmp_path, monkeypatch):
    (tmp_path / "exact.py").write_text(EXACT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(EXACT, "exact.py", "exec"), names)
    return names


def without_seconds(data):
    if isinstance(data, list):
        return [without_seconds(each) for each in data]
    if isinstance(data, dict):
        return {key: without_seconds(value) for key, value in data.items() if key != "seconds"}
    return data


def test_json_is_exactly_what_the_library_does(run, exact):
    options = ["--lr", "0.1", "--scheme", "he", "--optimizer", "momentum", "--momentum", "0.5", "--seed", "3"]
    result = run("initialize", "exact.py:problem", "--json", *options)
    assert result.exit_code == 0, result.output
    expected = initialize_(
        *exact["problem"](), lr=0.1, scheme="he", optimizer="momentum", momentum=0.5, seed=3
    )
    assert without_seconds(json.loads(result.stdout)) == without_seconds(expected.to_dict())


def test_the_weights_that_are_written_have_the_norm_that_is_printed(run, exact, tmp_path):
    result = run("initialize", "exact.py:problem", "--target", 2, "--json", "--weights", "w.safetensors")
    assert result.stderr == "Wrote w.safetensors.\n"
    model, loss, batch = exact["problem"]()
    safetensors.torch.load_model(model, tmp_path / "w.safetensors")
    shown = Initialization.from_json(result.stdout)
    assert measure(model, loss, batch).network.norm == pytest.approx(shown.after.network.norm, rel=1e-3)
    assert shown.after.network.norm == pytest.approx(2, rel=0.05)


def test_without_weights_it_says_that_nothing_was_written_and_how(run, exact, tmp_path):
    result = run("initialize", "exact.py:problem", "--lr", "auto")
    assert result.exit_code == 0
    assert result.stderr == "No weights were written. Pass --weights FILE.safetensors to keep them.\n"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["exact.py"]


def test_a_target_that_is_not_met_ends_with_1_and_still_writes(run, exact, tmp_path):
    result = run("initialize", "exact.py:regression", "--target", 2, "--weights", "w.safetensors", "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["converged"]
    assert result.stderr == "Wrote w.safetensors.\nTarget not met: the result says why.\n"
    assert (tmp_path / "w.safetensors").exists()


def test_a_start_that_is_left_gentle_on_purpose_is_no_failure(run, tmp_path):
    """By a rate a quadratic loss is not sharpened: the library does not warn, and the command succeeds."""
    (tmp_path / "gentle.py").write_text(EXACT, encoding="utf-8")
    result = run("initialize", f"{tmp_path / 'gentle.py'}:problem", "--lr", "1e-6", "--json")
    shown = Initialization.from_json(result.stdout)
    assert (shown.converged, shown.scaling) == (False, "none")
    assert result.exit_code == 0


def test_files_are_written_and_can_be_shown(run, exact, tmp_path):
    files = ["--save", "i.json", "--html", "i.html"]
    result = run("initialize", "exact.py:problem", "--target", 2, *files)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "i.html").read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    shown = run("show", "i.json")
    assert shown.stdout == f"{Initialization.load('i.json')}\n"


def test_the_function_s_keywords_that_mean_the_same_are_taken(run, tmp_path):
    path = tmp_path / "keyed.py"
    path.write_text(
        EXACT
        + "\n\ndef keyed():\n"
        + "    call = lambda model, inputs: 2 * model(inputs)\n"
        + "    return (*problem(), {'forward': call, 'curvature': 'both', 'layers': ['0', '2'], 'top': 3})\n",
        encoding="utf-8",
    )
    result = run("initialize", f"{path}:keyed", "--target", 2, "--json", "--scheme", "keep")
    assert result.exit_code == 0, result.output
    assert f"{path}:keyed also gives curvature, top, which only hessinit measure looks at." in result.stderr
    shown = Initialization.from_json(result.stdout)
    assert set(shown.scales) == {"0", "2"}
    names: dict[str, object] = {}
    exec(compile(EXACT, "exact.py", "exec"), names)
    model, loss, batch = names["problem"]()
    doubled = measure(model, loss, batch, forward=lambda model, x: 2 * model(x), layers=["0", "2"])
    assert shown.before.network.norm == pytest.approx(doubled.network.norm, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "fast"], "'fast' is no number; give a rate such as 0.1, or auto."),
        (["--lr", "-1"], "-1.0 must be a number above 0, such as 0.1."),
        (["--lr", "nan"], "nan must be a number above 0"),
        (["--lr", "1", "--target", "1"], "Error: --lr 1.0 and --target 1.0 both set the norm to aim at"),
        (["--target", "0"], "Error: --target 0.0 must be a positive, finite number"),
        (
            ["--scheme", "kaiming"],
            "Error: --scheme 'kaiming' is unknown; choose from 'auto', .*Did you mean 'he'",
        ),
        (["--scaling", "all"], "Invalid value for '--scaling'"),
        (
            ["--rule", "layers", "--scaling", "gain"],
            "Error: --scaling 'gain' has no meaning for --rule 'layers'",
        ),
        (["--curvature", "both"], "Invalid value for '--curvature'"),
        (
            ["--momentum", "1", "--optimizer", "momentum"],
            "Error: --momentum 1.0 must be a number from 0 up to",
        ),
        (["--tolerance", "0"], "Error: --tolerance 0.0"),
        (["--layers", "7"], "Error: --layers '7' fits no parameter of the model"),
        (["--weights", "w.pt"], "Error: --weights w.pt must end in .safetensors; .* such as w.safetensors."),
        (
            ["--weights", "no/w.safetensors"],
            "Error: --weights no/w.safetensors cannot be written: the folder no",
        ),
        (["--weights", "w.safetensors", "--dry-run"], "Error: --weights and --dry-run do not go together"),
        (
            ["--weights", "w.safetensors", "--save", "w.safetensors"],
            "Error: --save and --weights both name w.safetensors; give them different files.",
        ),
        (["--device", "cuad"], "Error: --device cuad cannot be used here: "),
    ],
)
def test_a_wrong_option_is_answered_in_the_command_s_own_words(run, exact, tmp_path, options, message):
    result = run("initialize", "exact.py:problem", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["exact.py"]




def test_every_file_on_a_full_disk_is_told_and_none_is_left_in_part(run, exact, tmp_path):
    resource = pytest.importorskip("resource", reason="sets a limit")
    files = {"--save": "r.json", "--weights": "w.safetensors", "--html": "r.html", "--picture": "r.pdf"}
    before = {path.name for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as of a disk that is full after 100 bytes
    try:
        options = [word for pair in files.items() for word in pair]
        result = run("initialize", "exact.py:problem", "--target", 2, *options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 2
    told = result.stderr.splitlines()
    assert [line.split(": ")[1] for line in told] == [f"cannot write {name}" for name in files.values()]
    assert all("File too large" in line for line in told), told
    assert {path.name for path in tmp_path.iterdir() if path.name != "__pycache__"} == before










FROZEN = (
    "no weight of two or more dimensions can be set (0: frozen, 1: frozen, 2: frozen); unfreeze one, or name "
    "others with layers=."
)
ODD = """

def with_nan():
    model, loss, (inputs, targets) = problem()
    inputs[1, 1] = float("nan")
    return model, loss, (inputs, targets)

def too_narrow():
    model, loss, (inputs, targets) = problem()
    return model, loss, (inputs[:, :2], targets)

def frozen():
    model, loss, batch = problem()
    return model.requires_grad_(False), loss, batch
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("with_nan", "Error: the inputs hold 1 NaN or inf among 24 values; clean them first.\n"),
        ("frozen", f"Error: {FROZEN}\n"),
    ],
)
def test_a_problem_that_cannot_be_initialized_is_refused_in_words(run, tmp_path, function, message):
    path = tmp_path / "odd.py"
    path.write_text(EXACT + ODD, encoding="utf-8")
    result = run("initialize", f"{path}:{function}", "--lr", "0.1")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", message)


