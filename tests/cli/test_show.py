"""`hessinit show` prints, draws and converts whatever was saved, without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hessinit
from every_kind import EVERY_KIND, FORMS, REPORT, REPRODUCTION
from hessinit.present import to_text

DRAWN = ("curvature report", "initialization", "comparison", "tracking", "reproduction")


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_kind_is_shown_as_text_json_page_and_picture(
    run: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    saved, path, page, picture = (
        EVERY_KIND[kind], tmp_path / "r.json", tmp_path / "r.html", tmp_path / "r.png"
    )  # fmt: skip
    saved.save(path)
    result = run("show", path, "--html", page)
    assert (result.exit_code, result.stderr) == (0, f"Wrote {page}.\n")
    assert result.stdout == f"{to_text(saved, 100)}\n"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert run("show", path, "--json").stdout == path.read_text(encoding="utf-8")
    assert max(map(len, run("show", path, columns=60).stdout.splitlines())) <= 60
    result = run("show", path, "--picture", picture)
    assert result.exit_code == (0 if kind in DRAWN else 2)
    assert picture.exists() == (kind in DRAWN)
    assert not list(tmp_path.glob(".*tmp"))


def test_what_has_no_chart_is_not_drawn(run: Callable[..., Any], tmp_path: Path) -> None:
    FORMS.save(tmp_path / "forms.json")
    result = run("show", tmp_path / "forms.json", "--picture", tmp_path / "r.png")
    assert "has no chart to draw" in result.stderr
    (tmp_path / "list.json").write_text(json.dumps([REPRODUCTION.to_dict()] * 2), encoding="utf-8")
    result = run("show", tmp_path / "list.json", "--picture", tmp_path / "r.png")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "draws one record, and the file holds 2; show one of them." in result.stderr
    shown = run("show", tmp_path / "list.json", "--json").stdout
    assert json.loads(shown) == json.loads((tmp_path / "list.json").read_text(encoding="utf-8"))


def test_showing_any_kind_needs_no_torch(run_python: Callable[..., Any], tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.json") for number in range(len(EVERY_KIND))]
    for path, result in zip(paths, EVERY_KIND.values(), strict=True):
        result.save(path)
    found = run_python(
        f"import sys; from hessinit.cli.app import app\nfor path in {paths!r}:\n"
        "    app(['show', path, '--html', path + '.html'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    assert found.stdout.splitlines()[-1] == "False", found.stderr


def test_the_log_of_a_tracker_is_shown_also_when_it_was_killed(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    model, inputs = torch.nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    batch, path = (inputs, torch.zeros(2, 1, dtype=torch.float64)), tmp_path / "c.jsonl"
    with hessinit.track(model, torch.nn.MSELoss(), batch, every=1, lr=0.5, path=path) as tracker:
        tracker.measure()
    whole = hessinit.load(path)
    assert whole.points[0].norm == pytest.approx(1.0)  # closed form: 2/2 XᵀX
    assert run("show", path).stdout == f"{to_text(whole, 100)}\n"
    header = path.read_bytes().splitlines(keepends=True)[0]
    for rest in (b"", b'{"step": 0, "nor'):
        path.write_bytes(header + rest)
        assert hessinit.load(path).points == ()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("reprot.json", None, "reprot.json does not exist. Did you mean 'report.json'?"),
        ("no/report.json", None, "no/report.json does not exist."),
        (".", None, "cannot be read: Is a directory."),
        ("deep.json", b"[" * 100_000, "deep.json is not JSON (maximum recursion depth"),
        ("net.py", b"import torch", "net.py is not JSON (Expecting value"),
        ("zeros.json", bytes(8), "Give a file that hessinit wrote."),
        ("list.json", b"[1, 2]", "list.json[0] holds a JSON int"),
        ("other.json", b'{"kind": "another"}', "other.json holds 'another'; what can be read back is"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_result_is_answered_in_one_line(
    run: Callable[..., Any], tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    REPORT.save(tmp_path / "report.json")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = run("show", tmp_path / name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
