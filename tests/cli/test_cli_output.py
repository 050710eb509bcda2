from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hessinit.demo import problem

from hessinit import CurvatureReport, load, measure

from .conftest import read_to_the_end


def test_stdout_holds_the_json_and_nothing_else(run_process, net):
    result = run_process("measure", "net.py:problem", "--json")
    assert result.returncode == 0, result.stderr
    report = CurvatureReport.from_json(result.stdout)
    assert result.stdout == report.to_json()
    assert result.stderr == "a word from the user's own code\n"


def test_a_pipe_gets_what_print_gives(run_process, net):
    result = run_process("measure", "net.py:problem", "--save", "r.json")
    assert result.stdout == f"{load(net.parent / 'r.json')}\n"
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert all(line == line.rstrip() for line in result.stdout.splitlines())


def test_colours_are_on_when_forced_and_off_with_no_color(run_process, net):
    def escapes(**variables: str) -> list[str]:
        result = run_process("show", "r.json", TERM="xterm", **variables)
        assert result.returncode == 0, result.stderr
        return re.findall(r"\x1b\[3\dm", result.stdout)

    measure(*problem()).save(net.parent / "r.json")
    assert escapes(FORCE_COLOR="1")
    assert not escapes(FORCE_COLOR="1", NO_COLOR="1")
    assert not escapes()




def test_a_reader_that_stops_early_sees_no_traceback(run_process, net):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        result = run_process("measure", "net.py:problem", stdout=closed)
    assert "Traceback" not in result.stderr


def test_a_watched_command_spins_on_stderr_and_keeps_stdout_pure(run_process, net):
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    reader, terminal = pty.openpty()
    with ThreadPoolExecutor(1) as beside:
        watching = beside.submit(read_to_the_end, reader)  # a slow machine spins more than one reading holds
        try:
            result = run_process("measure", "net.py:problem", "--json", stderr=terminal, TERM="xterm")
        finally:
            os.close(terminal)
    watched = watching.result()
    assert result.stdout == CurvatureReport.from_json(result.stdout).to_json()
    assert "Measuring net.py:problem …" in watched
    assert "a word from the user's own code" in watched


def test_files_are_written_whole_and_named_on_stderr(run, net, tmp_path):
    page, saved = tmp_path / "r.html", tmp_path / "r.json"
    result = run("measure", f"{net}:problem", "--json", "--html", page, "--save", saved)
    assert result.exit_code == 0
    assert saved.read_text() == result.stdout
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    assert result.stderr.endswith(f"Wrote {saved}.\nWrote {page}.\n")
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix not in (".py", "")) == [
        "r.html",
        "r.json",
    ]




@pytest.mark.parametrize("option", ["--html", "--save"])
@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "missing/r.out",
            "missing/r.out cannot be written: the folder {folder}/missing does not exist. Create",
        ),
        ("there", "there is a folder; give the name of a file."),
        ("net.py/r.out", "the folder {folder}/net.py does not exist."),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(run, net, tmp_path, option, file, message):
    (tmp_path / "there").mkdir()
    net.write_text("raise SystemError('the file was run')")
    result = run("measure", f"{net}:problem", option, tmp_path / file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {option} {tmp_path}")
    assert message.format(folder=tmp_path) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_folder_without_permission_is_refused_before_any_work(run, net, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    result = run("measure", f"{net}:problem", "--html", tmp_path / "r.html")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is read-only for you" in result.stderr




def test_one_file_for_two_things_is_refused(run, net, tmp_path):
    result = run(
        "measure", f"{net}:problem", "--save", tmp_path / "r", "--html", tmp_path / "there" / ".." / "r"
    )
    assert result.exit_code == 2
    assert f"--save and --html both name {tmp_path / 'r'}; give them different files." in result.stderr




def test_a_file_that_fails_does_not_take_the_others_along(run, net, tmp_path, monkeypatch):
    def fail(self: CurvatureReport, path: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CurvatureReport, "to_html", fail)
    files = {option: tmp_path / f"r.{option[2:]}" for option in ("--html", "--save")}
    options = [word for pair in files.items() for word in pair]
    result = run("measure", f"{net}:problem", *options, "--picture", tmp_path / "r.png")
    assert result.exit_code == 2
    assert f"Error: cannot write {files['--html']}: No space left on device.\n" in result.stderr
    assert load(files["--save"]).layers
    assert (tmp_path / "r.png").stat().st_size > 1000


COMMANDS = {
    "measure": ["--html", "--save", "--picture"],
    "initialize": ["--html", "--save", "--picture", "--weights"],
    "track": ["--html", "--save", "--picture", "--log"],
    "compare": ["--html", "--save", "--picture"],
    "sweep": ["--html", "--save", "--picture"],
}


@pytest.mark.parametrize(
    ("command", "option"), [(key, one) for key, all_ in COMMANDS.items() for one in all_]
)
@pytest.mark.parametrize("way", ["itself", "link", "hard link", "module"])
def test_the_problem_s_own_file_is_not_written_over(run, net, tmp_path, monkeypatch, command, option, way):
    monkeypatch.chdir(tmp_path)
    target = {"link": "link.png", "hard link": "hard.png"}.get(way, "./net.py")
    if way == "link":
        os.symlink("net.py", target)
    if way == "hard link":
        os.link("net.py", target)
    before = net.read_bytes()
    place = "net:problem" if way == "module" else "net.py:problem"
    more = ["--lr", "0.1"] if command == "track" else []
    result = run(command, place, option, target, *more)
    assert (result.exit_code, result.stdout) == (2, "")
    name = os.path.normpath(target)
    assert result.stderr == (
        f"Error: {option} {name} is the file that this command reads; give the name of another.\n"
    )
    assert net.read_bytes() == before


@pytest.mark.parametrize("option", ["--html", "--picture"])
def test_the_file_that_is_shown_is_not_written_over(run, tmp_path, option):
    path = tmp_path / "r.png"
    measure(*problem()).save(path)
    before = path.read_bytes()
    result = run("show", path, option, path)
    assert result.exit_code == 2
    assert f"{option} {path} is the file that this command reads" in result.stderr
    assert path.read_bytes() == before
