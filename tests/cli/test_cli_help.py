from __future__ import annotations

import os
import re
import resource
from typing import get_type_hints

import pytest
from typer.models import OptionInfo

import hessinit
from hessinit.cli import app

LOADED = (
    "import sys; from hessinit.cli import app; app({!r}, standalone_mode=False); print(sorted(sys.modules))"
)


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        (["--help"], "hessinit measure net.py:problem"),
        (["demo", "--help"], "hessinit demo --seed 1 --html demo.html"),
        (["measure", "-h"], "hessinit measure net.py:problem --curvature both --layers 'conv*'"),
        (["reproduce", "--help"], "hessinit reproduce table-4 --reading one-hidden"),
        (["show", "--help"], "hessinit show report.json --html report.html"),
    ],
)
def test_help_gives_examples_line_by_line(run, arguments, example):
    result = run(*arguments)
    assert result.exit_code == 0
    assert re.search(rf"^ +{re.escape(example)}( |$)", result.stdout, flags=re.MULTILINE)


def test_help_names_no_command_that_does_not_exist(run):
    listed = run("--help").stdout.split("Commands:")[1]
    commands = re.findall(r"^  (\w+)", listed, flags=re.MULTILINE)
    assert commands == ["demo", "measure", "compare", "sweep", "reproduce", "show"]


def test_help_fits_a_narrow_terminal(run_process):
    for arguments in (["--help"], ["demo", "--help"], ["reproduce", "--help"], ["show", "--help"]):
        assert max(map(len, run_process(*arguments, COLUMNS="60").stdout.splitlines())) <= 60


def test_without_a_command_the_help_is_shown(run):
    result = run()
    assert "Usage: hessinit" in result.output
    assert "hessinit demo" in result.output


def test_the_version_is_the_package_s(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"hessinit {hessinit.__version__}\n")


def test_a_mistyped_command_is_wrong_usage(run_process):
    result = run_process("mesure")
    assert result.returncode == 2
    assert "No such command 'mesure'" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["measure", "--help"], ["reproduce", "--help"], ["--version"]]
)
def test_help_loads_nothing_heavy(run_python, arguments):
    result = run_python(LOADED.format(arguments))
    assert result.returncode == 0, result.stderr
    modules = set(re.findall(r"'([\w.]+)'", result.stdout.splitlines()[-1]))
    assert "hessinit.cli.measure" in modules
    assert modules.isdisjoint({"torch", "numpy", "matplotlib", "jinja2", "hessinit.measuring"})


def test_help_takes_less_than_half_a_second_of_the_processor(run_process):
    def cost() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_process("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cost() for _ in range(3)) < 0.5, os.getloadavg()


@pytest.mark.parametrize("command", [each.callback for each in app.registered_commands])
def test_an_option_called_like_its_value_is_spelled_out(command):
    """Versions of typer before 0.29 take `--FOLDER` from a metavar FOLDER of the parameter folder."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, OptionInfo) and (option.metavar or "").lower() == name:
                assert option.default == f"--{name}"  # where typer keeps a first name until it looks
