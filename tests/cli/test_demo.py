from __future__ import annotations

import json
import re

import pytest
import torch
from torch.func import functional_call, jacrev

from hessinit import Comparison, Initialization, Tracking, measure
from hessinit.cli import demo

from .conftest import without_seconds


@pytest.fixture
def _shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, few seeds: what is printed and written is of the same kind."""
    monkeypatch.setattr(demo, "STEPS", 20)
    monkeypatch.setattr(demo, "SEEDS", 2)


def test_the_demo_shows_that_the_initialization_decides(run, folder, monkeypatch):
    monkeypatch.setattr(demo, "SEEDS", 1)
    monkeypatch.setattr(demo, "STEPS", 150)
    result = run("demo", columns=80)
    assert result.exit_code == 0, result.output
    assert result.stderr == "Wrote demo-output/demo.html.\nWrote demo-output/curves.png.\n"
    headings = re.findall(r"^\d\. ([^.:]+)", result.stdout, flags=re.MULTILINE)
    assert [heading.split()[0] for heading in headings] == ["Ten", "New", "Training", "Five"]
    assert max(map(len, re.sub("file:.*|Next: .*", "", result.stdout).splitlines())) <= 80
    final = re.findall(r"^ (PyTorch|hessinit) .* (\S+) +[\d.]+ %$", result.stdout, flags=re.MULTILINE)
    losses = {name: float(loss) for name, loss in final}
    assert losses["hessinit"] < 0.5 < losses["PyTorch"] < 2.4  # guessing has ln 10 = 2.3
    page = (folder / "demo-output" / "demo.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "Two initializations of one network" in page
    assert (folder / "demo-output" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "demo-output").iterdir())) == 2


@pytest.mark.usefixtures("_shortened")
def test_json_holds_what_the_library_computes_and_is_all_that_is_printed(run):
    result = run("demo", "--json", "--seed", 3, "--lr", 0.1, "--folder", "d")
    assert (result.exit_code, result.stderr) == (0, "Wrote d/demo.html.\nWrote d/curves.png.\n"), (
        result.output
    )
    shown = json.loads(result.stdout)
    assert shown["kind"] == "hessinit demonstration"
    initialization = Initialization.from_dict(shown["initialization"])
    assert initialization.lr == 0.1
    measured = measure(*demo.problem(seed=3), seed=3)
    assert initialization.before.network.norm == pytest.approx(measured.network.norm, rel=1e-3)
    for _, tracking in shown["runs"]:
        assert len(Tracking.from_dict(tracking).losses) == 20
    comparison = Comparison.from_dict(shown["comparison"])
    assert (comparison.seeds, comparison.learning_rates) == ((3, 4), (0.1,))
    assert set(shown["accuracy"]) == {"PyTorch", "hessinit"}


@pytest.mark.usefixtures("_shortened")
def test_ctrl_c_leaves_no_file_behind(run, folder, monkeypatch):
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hessinit.compare", interrupted)
    result = run("demo")
    assert result.exit_code == 130
    assert result.stderr == "Interrupted: the demo was not finished.\n"
    assert not list((folder / "demo-output").iterdir())


@pytest.mark.usefixtures("_shortened")
def test_a_full_disk_is_told_and_leaves_no_half_file(run, folder, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    result = run("demo", "--folder", "d", "--lr", 1e6)  # and a learning rate far too high is no failure
    assert result.exit_code == 2
    assert result.stderr.count("No space left on device.\n") == 2
    assert list((folder / "d").iterdir()) == []


def test_the_demo_s_problem_can_be_measured_by_name(run):
    result = run("measure", "hessinit.cli.demo:problem", "--json")
    assert result.exit_code == 0, result.output
    measured = measure(*demo.problem(), seed=0).to_dict()
    assert without_seconds(json.loads(result.stdout)) == without_seconds(measured)


def test_the_smallest_norm_is_right_though_it_is_measured_in_fp32():
    """fc2 has 1e-4 beside a loss of 2: its dense Gauss-Newton matrix in fp64 is the truth."""
    before = torch.get_rng_state()
    model, loss, (images, labels) = demo.problem(seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    few = images[:32], labels[:32]
    report = measure(model, loss, few)
    model = model.double()
    fixed = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def outputs(weight: torch.Tensor) -> torch.Tensor:
        return functional_call(model, {**fixed, "fc2.weight": weight}, few[0].double())

    jacobian = jacrev(outputs, chunk_size=80)(fixed["fc2.weight"]).reshape(32, 10, -1)
    shares = outputs(fixed["fc2.weight"]).softmax(dim=1)
    roots = torch.diag_embed(shares.sqrt()) - shares.unsqueeze(2) * shares.sqrt().unsqueeze(1)
    factor = torch.einsum("nki,nkp->nip", roots, jacobian).reshape(320, -1)
    truth = torch.linalg.matrix_norm(factor, 2).item() ** 2 / 32
    assert report["fc2"].norm == pytest.approx(truth, rel=1e-3)
    assert report["fc2"].verdict == "vanishing"
