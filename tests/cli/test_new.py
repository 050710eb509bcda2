from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from hessinit.cli.starter import write_starter

SMALL = ("--steps", "10", "--seeds", "1", "--workers", "1")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        ["measure", "net.py:problem", "--json"],
        ["initialize", "net.py:problem", "--lr", "0.1", "--json"],
        ["track", "net.py:problem", "--lr", "0.1", "--steps", "10", "--json"],
        ["compare", "net.py:problem", *SMALL, "--schemes", "he", "--learning-rates", "0.1", "--json"],
        ["sweep", "net.py:problem", *SMALL, "--stds", "0.1", "--json"],
    ],
)
def test_the_file_runs_as_it_is_with_every_command(run, command):
    assert run("new", "net.py").exit_code == 0
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["kind"].startswith("hessinit ")


def test_the_next_command_that_is_printed_runs(run):
    printed = run("new").stdout.splitlines()[-1]
    assert printed == "Next: hessinit measure problem.py:problem"
    result = run(*printed.split()[2:])
    assert result.exit_code == 0, result.output
    assert "hidden1" in result.stdout


def test_the_file_is_sound_python_of_our_own_style(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(write_starter("net.py"), encoding="utf-8")
    options = ["check", "--isolated", "--line-length", "110", "--select", "E,F,B,I,N,PIE,SIM,UP,W", str(path)]
    result = subprocess.run([sys.executable, "-m", "ruff", *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_file_names_itself_where_it_is(run, tmp_path):
    (tmp_path / "nets").mkdir()
    assert run("new", "nets/deep.py").exit_code == 0
    text = (tmp_path / "nets" / "deep.py").read_text(encoding="utf-8")
    assert "hessinit measure nets/deep.py:problem" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "there.py",
            "there.py is there already and was left as it is; choose another name, or pass --force.",
        ),
        ("net.txt", "net.txt must end in .py, such as net.py."),
        ("net", "net must end in .py, such as net.py."),
        (".py", ".py has no name before .py; give one, such as problem.py."),
        (".net", ".net must end in .py, such as .net.py."),
        ("folder", "folder is a folder; give the name of a file in it, such as folder/problem.py."),
        ("no/net.py", "no/net.py cannot be written: the folder no does not exist. Create it first."),
        (
            "random.py",
            "random.py would hide the module 'random' from Python; choose another name, such as my_r",
        ),
        ("torch.py", "torch.py would hide the module 'torch' from Python"),
    ],
)
def test_a_wrong_name_is_answered_in_one_paragraph_and_nothing_is_written(run, tmp_path, name, message):
    (tmp_path / "there.py").write_text("mine")
    (tmp_path / "folder").mkdir()
    result = run("new", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "there.py"]
    assert (tmp_path / "there.py").read_text() == "mine"


def test_force_writes_over_a_file(run, tmp_path):
    (tmp_path / "net.py").write_text("mine")
    assert run("new", "net.py", "--force").exit_code == 0
    assert (tmp_path / "net.py").read_text(encoding="utf-8") == write_starter("net.py")


@pytest.mark.parametrize(
    ("name", "place"),
    [("-x.py", "./-x.py:problem"), ("my net.py", "'my net.py:problem'"), ("$x.py", "'$x.py:problem'")],
)
def test_the_command_that_is_advised_can_be_typed(run, tmp_path, name, place):
    result = run("new", "--", name)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"Next: hessinit measure {place}"
    assert run("measure", *shlex.split(place)).exit_code == 0
    named = place.replace(":problem", "")
    assert f"    hessinit track {named}:problem --lr 0.1 " in (tmp_path / name).read_text(encoding="utf-8")


def test_it_needs_no_torch(run_python):
    result = run_python(
        "import sys; from hessinit.cli import app; app(['new'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    assert result.stdout.splitlines()[-1] == "False", result.stderr
