"""What stdout, stderr, a terminal, a pipe and the files get."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from result_examples import COMPARISON, make_three_layers

from .conftest import ENVIRONMENT, on_a_terminal, refused

PIPED: Any = {"env": ENVIRONMENT, "stderr": subprocess.PIPE, "encoding": "utf-8", "timeout": 300}
TRAINED = "--steps 10 --batch-size 4 --seeds 1 --workers 1"
JSON_COMMANDS = [
    "measure net.py:loud --json --lr 1",
    "initialize net.py:loud --target 2 --json",
    "track net.py:loud --lr 0.5 --steps 10 --batch-size 4 --json",
    f"compare net.py:loud --schemes default --learning-rates 0.01 {TRAINED} --json",
    f"sweep net.py:loud --stds 0.5 --learning-rate 0.03 {TRAINED} --json",
]


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_json_is_all_that_is_on_stdout_and_strict(run, command):
    result = run(*command.split())
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout, parse_constant=pytest.fail)["kind"].startswith("hessinit ")
    assert result.stderr.count("a word from the user's own code\n") == 1


def test_a_terminal_gets_colours_unless_no_color_is_set_and_a_pipe_gets_what_print_gives(run_process):
    make_three_layers().save("r.json")
    assert re.search(r"\x1b\[[\d;]*3\dm", on_a_terminal("show", "r.json"))
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        plain = on_a_terminal("show", "r.json", **variables)
        assert "\x1b" not in plain
        assert "no gradient" in plain
    assert "Measuring net.py:problem …" in on_a_terminal("measure", "net.py:problem")  # the spinner
    piped = run_process("show", "r.json")
    assert piped.stdout == f"{make_three_layers()}\n"
    assert max(map(len, piped.stdout.splitlines())) <= 100
    assert all(line == line.rstrip() for line in piped.stdout.splitlines())
    narrow = run_process("show", "r.json", COLUMNS="40", PYTHONIOENCODING="ascii")
    assert narrow.stdout.isascii()
    assert max(map(len, narrow.stdout.splitlines())) <= 40


@pytest.mark.skipif(sys.platform == "win32", reason="uses a shell")
def test_a_reader_that_stops_early_is_answered_without_a_traceback():
    make_three_layers().save("r.json")
    show = f"{shlex.quote(sys.executable)} -m hessinit show r.json | head -1"
    cut = subprocess.run(["sh", "-c", show], stdout=subprocess.PIPE, **PIPED)
    assert cut.stdout.split() == ["layer", "weight", "‖H‖", "finding"]
    assert cut.stderr == ""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        gone = subprocess.run([sys.executable, "-m", "hessinit", "show", "r.json"], stdout=closed, **PIPED)
    assert gone.stderr == ""


def test_files_are_written_whole_and_named_on_stderr(run, folder):
    result = run("measure", "net.py:problem", "--json", "--html", "r.html", "--save", "r.json",
                 "--picture", "r.PNG")  # fmt: skip
    assert result.exit_code == 0
    assert (folder / "r.json").read_text() == result.stdout
    assert (folder / "r.html").read_text().lstrip().lower().startswith("<!doctype html>")
    assert (folder / "r.PNG").read_bytes().startswith(b"\x89PNG")
    assert result.stderr == "Wrote r.json.\nWrote r.html.\nWrote r.PNG.\n"
    written = {path.name for path in folder.iterdir() if path.is_file()}
    assert written == {"net.py", "r.html", "r.json", "r.PNG"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--html no/r", "--html no/r cannot be written: the folder no is missing, or read-only for you."),
        ("--save there", "--save there is not a file; give the name of a file."),
        ("--save r --html there/../r", "--html there/../r is the file of --save, too; give the name of"),
        ("--save r --weights r", "--weights r is the file of --save, too; give the name of another."),
        ("--picture r.bmp", "--picture r.bmp must end in one of .png, .pdf, .svg."),
        ("--picture link.png", "--picture link.png is the file that this command reads; give the name of"),
        ("--save ./net.py", "--save net.py is the file that this command reads"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(run, folder, options, message):
    (folder / "there").mkdir()
    os.symlink("net.py", "link.png")
    (folder / "net.py").write_text("raise SystemError('the file was run')")
    for place in ("net.py:problem", "net:problem"):
        told = refused(run("initialize", place, *options.split()))
        assert told.startswith(f"Error: {message}")
        assert len(told.splitlines()) == 1


def test_a_log_and_a_file_that_is_shown_are_not_written_over(run, folder):
    COMPARISON.save("r.json")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for command in ("track net.py:problem --lr 0.1 --log net.py", "show r.json --html r.json"):
        told = refused(run(*command.split()))
        assert "is the file that this command reads; give the name of another." in told
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_every_file_on_a_full_disk_is_told_and_none_is_left_in_part(run, folder):
    resource = pytest.importorskip("resource", reason="sets a limit")
    files = {"--save": "r.json", "--weights": "w.safetensors", "--html": "r.html", "--picture": "r.pdf"}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as of a disk that is full after 100 bytes
    try:
        options = [word for pair in files.items() for word in pair]
        result = run("initialize", "net.py:problem", "--target", 2, *options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 2
    told = result.stderr.splitlines()
    assert [line.split(": ")[1] for line in told] == [f"cannot write {name}" for name in files.values()]
    assert {path.name for path in folder.iterdir() if path.name != "__pycache__"} == {"net.py"}


@pytest.mark.parametrize(
    "command",
    [
        "measure net.py:problem --save {name}.json", "show r.json --html {name}.html", "new {name}.py",
        "measure {name}.py:problem", "measure net.py:problem --optimizer {name}.py:build", "show {name}.json",
    ],
)  # fmt: skip
def test_a_name_that_is_too_long_is_told_in_a_sentence(run_process, folder, command):
    make_three_layers().save("r.json")
    before = {path.name for path in folder.iterdir()}
    result = run_process(*command.format(name="n" * 300).split(), PYTHONDONTWRITEBYTECODE="1")
    assert (result.returncode, result.stdout) == (2, "")
    told = r"Error: \S*n{300}\.\w+ cannot be read( or written)?: File name too long\.\n"
    assert re.fullmatch(told, result.stderr)
    assert {path.name for path in folder.iterdir()} == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "command", ["show r.json", "show r.json --json", "new new.py", "--version", "show -h"]
)
def test_a_stdout_that_is_full_is_told_in_a_sentence(command):
    make_three_layers().save("r.json")
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "hessinit", *command.split()]
        result = subprocess.run(line, stdout=full, **PIPED)
    assert result.returncode == 2
    assert result.stderr == "Error: the output cannot be read or written: No space left on device.\n"
