from __future__ import annotations

import pytest

from hessinit.present.example import example_report
from hessinit.present.table import render_text


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "report.json"
    example_report().save(path)
    return path


def test_a_saved_report_is_printed_as_print_does(run, saved):
    result = run("show", saved)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{example_report()}\n"


def test_a_narrow_terminal_gets_a_narrow_report(run, saved):
    result = run("show", saved, columns=60)
    assert max(map(len, result.stdout.splitlines())) <= 60
    assert result.stdout == f"{render_text(example_report(), width=60)}\n"


def test_showing_needs_no_torch(run_python, saved):
    page = saved.with_suffix(".html")
    result = run_python(
        "import sys; from hessinit.cli import app; "
        f"app(['show', {str(saved)!r}, '--html', {str(page)!r}], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    assert result.stdout.splitlines()[-1] == "False", result.stderr
    assert "fc3" in page.read_text()


def test_what_json_printed_can_be_shown(run, net, tmp_path):
    piped = tmp_path / "piped.json"
    piped.write_text(run("measure", f"{net}:problem", "--json").stdout)
    result = run("show", piped)
    assert result.exit_code == 0
    assert "conv" in result.stdout


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("reprot.json", None, "reprot.json does not exist. Did you mean 'report.json'?"),
        ("no/report.json", None, "no/report.json does not exist."),
        ("no.json", None, "no.json does not exist.\n"),
        ("deep.json", b"[" * 100_000, "deep.json cannot be read: its JSON is nested too deeply. Give a file"),
        (".", None, "cannot be read: Is a directory."),
        ("net.py", b"import torch", "net.py is not JSON (Expecting value"),
        ("text.json", b"a", "Give a file that --save, --json or --log of a command, or save() in Python, w"),
        ("zeros.json", bytes(8), "zeros.json is not JSON"),
        ("list.json", b"[1, 2]", "list.json is not a hessinit report: it holds a list"),
        ("new.json", b'{"schema": 99, "layers": []}', "pip install --upgrade hessinit"),
        ("cut.json", b'{"schema": 2, "layers": []}', "cut.json is not a whole report: 'network' is missing"),
    ],
)
def test_a_file_that_is_no_report_is_answered_in_one_paragraph(run, saved, name, content, message):
    path = saved.parent / name
    if content is not None:
        path.write_bytes(content)
    result = run("show", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
