"""What stdout, stderr, a terminal, a pipe and the files get."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hessinit import CurvatureReport, load
from result_examples import COMPARISON, REPORT, make_three_layers

from .conftest import ENVIRONMENT, on_a_terminal, read_to_the_end

TRAINED = "--steps 10 --batch-size 4 --seeds 1 --workers 1"
JSON_COMMANDS = [
    "measure net.py:loud --json --lr 1",
    "initialize net.py:loud --target 2 --json",
    "track net.py:loud --lr 0.5 --steps 10 --batch-size 4 --json",
    f"compare net.py:loud --schemes default --learning-rates 0.01 {TRAINED} --json",
    f"sweep net.py:loud --stds 0.1 {TRAINED} --json",
]


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not strict JSON")


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_json_is_all_that_is_on_stdout_and_strict(run, command):
    result = run(*command.split())
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout, parse_constant=refuse)["kind"].startswith("hessinit ")
    assert result.stderr.count("a word from the user's own code\n") == 1


def test_a_watched_command_spins_on_stderr_and_keeps_stdout_pure(run_process):
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    reader, terminal = pty.openpty()
    with ThreadPoolExecutor(1) as beside:
        watching = beside.submit(read_to_the_end, reader)  # a slow machine spins more than one reading holds
        try:
            result = run_process("measure", "net.py:loud", "--json", stderr=terminal)
        finally:
            os.close(terminal)
    watched = watching.result()
    assert result.stdout == CurvatureReport.from_json(result.stdout).to_json()
    assert "Measuring net.py:loud …" in watched
    assert "a word from the user's own code" in watched


def test_a_terminal_gets_colours_unless_no_color_is_set_and_a_pipe_gets_what_print_gives(run_process):
    make_three_layers().save("r.json")
    assert re.search(r"\x1b\[[\d;]*3\dm", on_a_terminal("show", "r.json"))
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        plain = on_a_terminal("show", "r.json", **variables)
        assert "\x1b" not in plain
        assert "verdict" in plain
    piped = run_process("show", "r.json")
    assert piped.stdout == f"{make_three_layers()}\n"
    assert max(map(len, piped.stdout.splitlines())) <= 100
    assert all(line == line.rstrip() for line in piped.stdout.splitlines())


def test_a_pipe_gets_plain_text_of_forty_columns_also_in_ascii(run_process):
    make_three_layers().save("r.json")
    result = run_process("show", "r.json", COLUMNS="40", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.isascii()
    assert max(map(len, result.stdout.splitlines())) <= 40, result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="uses a shell")
def test_a_reader_that_stops_early_and_a_full_disk_are_answered_without_a_traceback():
    make_three_layers().save("r.json")
    show = f"{shlex.quote(sys.executable)} -m hessinit show r.json"

    def shell(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", command], env=ENVIRONMENT, capture_output=True, encoding="utf-8", timeout=300
        )

    cut = shell(f"{show} | head -1")
    assert cut.stdout.split() == ["layer", "weight", "‖H‖", "verdict"]
    assert cut.stderr == ""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        gone = subprocess.run(
            [sys.executable, "-m", "hessinit", "show", "r.json"],
            env=ENVIRONMENT, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=300,
        )  # fmt: skip
    assert gone.stderr == ""
    full = shell(f"{show} > /dev/full")
    assert full.returncode == 2
    assert full.stderr == "Error: the result cannot be printed: No space left on device.\n"


# Files


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
        ("--html no/r", "--html no/r cannot be written: the folder no does not exist. Create it first."),
        ("--save there", "--save there is not a file; give the name of a file."),
        (
            "--weights net.py/r",
            "--weights net.py/r cannot be written: the folder net.py does not exist. Create",
        ),
        ("--save r --html there/../r", "--save and --html both name r; give them different files."),
        ("--save r --weights r", "--save and --weights both name r; give them different files."),
        ("--picture r.bmp", "--picture r.bmp must end in one of .png, .pdf, .svg."),
        ("--picture link.png", "--picture link.png is the file that this command reads; give the name of"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(run, folder, options, message):
    (folder / "there").mkdir()
    os.symlink("net.py", "link.png")
    (folder / "net.py").write_text("raise SystemError('the file was run')")
    result = run("initialize", "net.py:problem", *options.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {message}")
    assert len(result.stderr.splitlines()) == 1


def test_a_folder_without_permission_is_refused_before_any_work(run, monkeypatch):
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    result = run("measure", "net.py:problem", "--html", "r.html")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is read-only for you" in result.stderr


OWN_FILES = {
    "measure": ["--html"],
    "initialize": ["--weights"],
    "track": ["--save", "--log"],
    "sweep": ["--save"],
}


@pytest.mark.parametrize(
    ("command", "option"), [(key, one) for key, all_ in OWN_FILES.items() for one in all_]
)
@pytest.mark.parametrize("way", ["itself", "hard link", "module"])
def test_the_problem_s_own_file_is_not_written_over(run, folder, command, option, way):
    target = "hard.png" if way == "hard link" else "net.py"
    if way == "hard link":
        os.link("net.py", target)
    before = (folder / "net.py").read_bytes()
    place = "net:problem" if way == "module" else "net.py:problem"
    more = ["--lr", "0.1"] if command == "track" else []
    result = run(command, place, option, f"./{target}", *more)
    assert (result.exit_code, result.stdout) == (2, "")
    reads = f"Error: {option} {target} is the file that this command reads; give the name of another.\n"
    assert result.stderr == reads
    assert (folder / "net.py").read_bytes() == before


def test_the_file_that_is_shown_is_not_written_over(run, folder):
    COMPARISON.save("r.png")
    before = (folder / "r.png").read_bytes()
    result = run("show", "r.png", "--picture", "r.png")
    assert result.exit_code == 2
    assert "--picture r.png is the file that this command reads" in result.stderr
    assert (folder / "r.png").read_bytes() == before


def test_a_file_that_fails_does_not_take_the_others_along(run, folder, monkeypatch):
    def fail(result: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hessinit.present.to_page", fail)
    REPORT.save("kept.json")
    result = run("show", "kept.json", "--html", "r.html", "--picture", "r.png")
    assert result.exit_code == 2
    assert "Error: cannot write r.html: No space left on device.\n" in result.stderr
    assert (folder / "r.png").stat().st_size > 1000
    assert load("kept.json").layers


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
    assert all("File too large" in line for line in told), told
    assert {path.name for path in folder.iterdir() if path.name != "__pycache__"} == {"net.py"}
