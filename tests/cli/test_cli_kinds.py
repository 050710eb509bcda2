"""`hessinit show` and `hessinit.load` read whatever was saved."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import hessinit
from hessinit.present.example import example_report
from hessinit.present.initialization_example import example_initialization
from hessinit.results.reproduction import Findings
from result_examples import example_comparison, example_reproduction, example_tracking

KINDS = {
    "curvature report": example_report,
    "initialization": example_initialization,
    "comparison": example_comparison,
    "reproduction": example_reproduction,
    "tracking": example_tracking,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_loaded_equal_to_what_was_saved(tmp_path, kind):
    saved = KINDS[kind]()
    saved.save(tmp_path / "r.json")
    loaded = hessinit.load(tmp_path / "r.json")
    assert type(loaded) is type(saved)
    assert loaded.to_json() == saved.to_json()  # as text, where nan equals nan
    assert json.loads(saved.to_json())["kind"] == f"hessinit {kind}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_shown_as_print_does_as_json_and_as_a_page(run, tmp_path, kind):
    saved, path, page = KINDS[kind](), tmp_path / "r.json", tmp_path / "r.html"
    saved.save(path)
    result = run("show", path, "--html", page, columns=100)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{hessinit.load(path)}\n"
    assert result.stderr == f"Wrote {page}.\n"
    assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    assert run("show", path, "--json").stdout == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn(run, tmp_path, kind):
    saved, picture = tmp_path / "r.json", tmp_path / "r.png"
    KINDS[kind]().save(saved)
    result = run("show", saved, "--picture", picture)
    assert (result.exit_code, result.stderr) == (0, f"Wrote {picture}.\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*tmp"))


def test_what_cannot_be_drawn_is_told(run, tmp_path):
    bare = replace(example_reproduction(), findings=Findings())
    bare.save(tmp_path / "bare.json")
    result = run("show", tmp_path / "bare.json", "--picture", tmp_path / "r.png")
    assert result.exit_code == 2
    assert result.stderr.endswith("r.png cannot be drawn: table-4-mnist has no figure.\n")
    (tmp_path / "list.json").write_text(json.dumps([bare.to_dict()] * 2), encoding="utf-8")
    result = run("show", tmp_path / "list.json", "--picture", tmp_path / "r.png")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "draws one record, and there are 2; show one of them." in result.stderr


def test_showing_any_kind_needs_no_torch(run_python, tmp_path):
    paths = []
    for number, make in enumerate(KINDS.values()):
        paths.append(str(tmp_path / f"{number}.json"))
        make().save(paths[-1])
    result = run_python(
        f"import sys; from hessinit.cli import app\nfor path in {paths!r}:\n"
        "    app(['show', path, '--html', path + '.html'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    assert result.stdout.splitlines()[-1] == "False", result.stderr


def test_the_lines_of_a_tracker_are_loaded_also_when_it_was_killed(run, tmp_path):
    model, inputs = torch.nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    batch = (inputs, torch.zeros(2, 1, dtype=torch.float64))
    path = tmp_path / "c.jsonl"
    with hessinit.track(model, torch.nn.MSELoss(), batch, every=1, lr=0.5, path=path) as tracker:
        tracker.measure()
    whole = hessinit.load(path)
    assert whole.points[0].norm == pytest.approx(1.0)  # closed form: 2/2 XᵀX
    assert run("show", path).stdout == f"{whole}\n"
    header = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(header)
    assert hessinit.load(path).points == ()
    path.write_bytes(header + b'{"step": 0, "nor')
    assert hessinit.load(path).points == ()


def test_a_list_of_reproductions_is_loaded_and_printed_as_json(run, tmp_path):
    path = tmp_path / "list.json"
    path.write_text(json.dumps([example_reproduction().to_dict()] * 2), encoding="utf-8")
    assert [each.to_json() for each in hessinit.load(path)] == [example_reproduction().to_json()] * 2
    assert json.loads(run("show", path, "--json").stdout) == json.loads(path.read_text(encoding="utf-8"))


def test_a_deep_file_is_answered(run, tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000, encoding="utf-8")
    result = run("show", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
