"""`hessinit show` prints whatever was saved; what a file may hold is tested with the codec."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import hessinit
from hessinit_paper.reproduction import Findings
from result_examples import COMPARISON, EVERY_KIND, REPORT, REPRODUCTION

from .conftest import refused

NOT_DRAWN = ("measurement plan", "scheme plan", "quadratic forms")


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_kind_is_shown_as_print_does_as_json_and_as_a_page(run, folder, kind):
    EVERY_KIND[kind].save("r.json")
    result = run("show", "r.json", "--html", "r.html")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{hessinit.load('r.json')}\n"
    assert result.stderr == "Wrote r.html.\n"
    assert (folder / "r.html").read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    assert run("show", "r.json", "--json").stdout == (folder / "r.json").read_text(encoding="utf-8")
    assert max(map(len, run("show", "r.json", columns=60).stdout.splitlines())) <= 60
    result = run("show", "r.json", "--picture", "r.png")
    assert result.exit_code == (2 if kind in NOT_DRAWN else 0)
    assert result.stderr.startswith("Error: cannot write r.png: " if kind in NOT_DRAWN else "Wrote r.png.")


def test_what_cannot_be_drawn_is_told(run, folder):
    bare = replace(REPRODUCTION, findings=Findings())
    bare.save("bare.json")
    told = run("show", "bare.json", "--picture", "r.png").stderr
    assert told.startswith("Error: cannot write r.png: ")
    (folder / "list.json").write_text(json.dumps([bare.to_dict()] * 2), encoding="utf-8")
    assert json.loads(run("show", "list.json", "--json").stdout) == [bare.to_dict()] * 2


def test_showing_needs_no_torch(run_python):
    REPORT.save("report.json")
    COMPARISON.save("comparison.json")
    result = run_python(
        "import sys; from hessinit.cli.app import app\n"
        "for name in ('report', 'comparison'):\n"
        "    app(['show', f'{name}.json', '--html', f'{name}.html'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    assert result.stdout.splitlines()[-1] == "False", result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.json", "no.json cannot be read: No such file or directory."),
        (".", ". cannot be read: Is a directory."),
        ("net.py", "net.py is not JSON (Expecting value"),
        ("deep.json", "deep.json is not JSON"),
        ("other.json", "other.json[0] holds 'something else'; what can be read back is"),
    ],
)
def test_a_file_that_is_no_result_is_answered_in_one_paragraph(run, folder, name, message):
    REPORT.save("report.json")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "other.json").write_text('[{"kind": "something else"}]')
    told = refused(run("show", name))
    assert told.startswith(f"Error: {message}")
    assert len(told.splitlines()) == 1
