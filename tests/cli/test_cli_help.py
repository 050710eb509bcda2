from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
from typer.models import OptionInfo

import hessinit
from hessinit.cli import app


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        (["--help"], "hessinit measure net.py:problem"),
        (["new", "--help"], "hessinit new experiments/net.py"),
        (["measure", "-h"], "hessinit measure net.py:problem --curvature both --layers 'conv*'"),
        (["initialize", "--help"], "hessinit initialize net.py:problem --lr 0.1 --weights start.safetensors"),
        (["track", "--help"], "hessinit track net.py:problem --lr 0.1 --initialize --html track.html"),
        (["reproduce", "--help"], "hessinit reproduce table-4 --variant one-hidden"),
        (["show", "--help"], "hessinit show report.json --html report.html"),
    ],
)
def test_help_gives_examples_line_by_line(run, arguments, example):
    result = run(*arguments)
    assert result.exit_code == 0
    assert re.search(rf"^ +{re.escape(example)}( |$)", result.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("command", [each.callback.__name__ for each in app.registered_commands])
def test_every_command_has_an_example_and_says_how_it_ends(run, command):
    text = run(command, "--help").stdout
    assert re.search(rf"^ +hessinit {command}\b", text, flags=re.MULTILINE)
    assert "Examples:" in text
    if command != "demo":
        assert "Exit status: 0 done," in text


def test_help_lists_every_command_once_in_its_group(run):
    listed = run("--help").stdout.split("-h, --help")[1].split("\n\n")[1:]
    groups = {part.splitlines()[0]: re.findall(r"^  (\w+)", part, flags=re.MULTILINE) for part in listed}
    assert groups == {
        "Begin:": ["demo", "new"],
        "Your network:": ["measure", "initialize", "track"],
        "Many short trainings:": ["compare", "sweep"],
        "The paper:": ["reproduce"],
        "Saved results:": ["show"],
    }
    assert "..." not in "".join(listed)  # no line is cut


def test_help_fits_a_narrow_terminal(run_process):
    for arguments in (["--help"], ["new", "--help"], ["reproduce", "--help"], ["show", "--help"]):
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


HEAVY = {
    "torch",
    "numpy",
    "matplotlib",
    "jinja2",
    "hessinit.measurement.measure",
    "hessinit.training",
}


def test_help_loads_nothing_heavy(run_python):
    commands = [
        ["--help"],
        ["--version"],
        *([each.callback.__name__, "--help"] for each in app.registered_commands),
    ]
    result = run_python(
        "import sys; from hessinit.cli import app\n"
        f"for arguments in {commands!r}: app(arguments, standalone_mode=False)\n"
        "print(sorted(sys.modules))"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Usage: ") == len(commands) - 1
    modules = set(re.findall(r"'([\w.]+)'", result.stdout.splitlines()[-1]))
    assert "hessinit.cli.measure" in modules
    assert modules.isdisjoint(HEAVY)




def options_of(command: Callable[..., None]) -> list[tuple[str, OptionInfo]]:
    # Not get_type_hints: Python 3.10 hides the annotation of what is None by default in an Optional.
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    return [
        (parameter.name, option)
        for parameter in parameters
        for option in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(option, OptionInfo)
    ]




# Where the same word has another meaning, or more to say.
OWN_HELP = {
    ("lr", "measure"), ("lr", "initialize"), ("lr", "track"), ("lr", "compare"), ("lr", "sweep"),
    ("curvature", "measure"), ("layers", "sweep"), ("tolerance", "initialize"), ("optimizer", "initialize"),
    ("steps", "track"), ("folder", "reproduce"), ("seeds", "reproduce"), ("as_json", "reproduce"),
}  # fmt: skip


def test_an_option_has_one_name_metavar_and_help_in_all_commands():
    seen: dict[str, tuple[object, ...]] = {}
    for command in (each.callback for each in app.registered_commands):
        if command.__name__ == "demo":
            continue
        for name, option in options_of(command):
            if (name, command.__name__) not in OWN_HELP:
                shown = (option.metavar, option.help, option.default, option.param_decls)
                assert seen.setdefault(name, shown) == shown, (name, command.__name__)
    assert len(seen) > 20


