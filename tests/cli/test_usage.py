"""Help, version, exit codes, and that asking for help loads nothing heavy."""

from __future__ import annotations

import re
import shlex

import pytest

import hessinit
from hessinit.cli.app import app

from .conftest import refused

COMMANDS = {each.callback.__name__: each.callback for each in app.registered_commands}
HEAVY = {"torch", "numpy", "matplotlib", "jinja2", "hessinit.measurement.measure", "hessinit.training"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_with_options_that_exist_and_says_how_it_ends(run, command):
    text = run(command, "--help", columns=200).stdout
    assert text == run(command, "-h", columns=200).stdout
    examples = re.findall(rf"^ +hessinit {command}\b.*", text.split("Examples:")[1], flags=re.MULTILINE)
    assert examples
    for option in re.findall(r"--[\w-]+", " ".join(examples)):
        assert re.search(rf"^  {option}\b", text, flags=re.MULTILINE), option
    assert "Exit status: 0 done," in text


def test_help_lists_every_command_in_a_line_and_the_version_is_the_package_s(run):
    assert "Usage: hessinit" in run().output
    listed = run("--help", columns=80).stdout.split("Commands:")[1]
    assert re.findall(r"^  (\w+)", listed, flags=re.MULTILINE) == list(COMMANDS)
    assert "..." not in listed  # no line is cut
    assert run("--version").stdout == f"hessinit {hessinit.__version__}\n"


def test_help_loads_nothing_heavy(run_python):
    commands = [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
    result = run_python(
        "import sys; from hessinit.cli.app import app\n"
        f"for arguments in {commands!r}: app(arguments, standalone_mode=False)\n"
        "print(sorted(sys.modules))"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Usage: ") == len(commands) - 1
    modules = set(re.findall(r"'([\w.]+)'", result.stdout.splitlines()[-1]))
    assert "hessinit.cli.measure" in modules
    assert modules.isdisjoint(HEAVY)


WRONG = [
    ("mesure", "No such command 'mesure'"),
    ("measure net.py:problem --colour", "No such option"),
    ("measure net.py:problem --curvature hessain", "'hessain' is not one of 'gauss-newton', 'hessian', 'b"),
    ("measure net.py:problem --tolerance 0", "Error: --tolerance 0.0"),
    ("measure net.py:problem --seed 4294967296", "Invalid value for '--seed'"),
    ("measure net.py:problem --device cuad", "Error: --device cuad .*no device of that name.*has cpu"),
    ("compare net.py:problem --device gpu", "--device gpu .*no device of that name.*This machine has cpu"),
    ("measure folder/x.py:problem", "folder/x.py must .*existing.*`hessinit new folder/x.py` writes one"),
    ("measure net.py:problem --lr abc", "'--lr': 'abc' is no number.*such as 0.1"),
    ("track net.py:problem --lr abc", "'--lr': 'abc' is no number.*such as 0.1"),
    ("compare net.py:problem --batch-size 21", "hold 8 .*fewer than --batch-size 21.* 8 or less"),
    ("measure net.py:problem --layers 7", "Error: --layers 7 fits no parameter of the model; its layers"),
    ("measure net.py:problem --lr inf", "inf must be a number above 0"),
    ("initialize net.py:problem --lr fast", "'fast' is no number; give a rate such as 0.1, or auto."),
    ("initialize net.py:problem --lr nan", "nan must be a number above 0"),
    ("initialize net.py:problem --lr 1 --target 1", "--lr 1.0 and --target 1.0 "),
    ("initialize net.py:problem --scheme kaiming", "--scheme kaiming is unknown; .*Did you mean 'he'"),
    ("initialize net.py:problem --momentum 0.5", "--momentum 0.5 is only for --optimizer momentum and nes"),
    ("initialize net.py:problem --weights w.pt", "Error: --weights w.pt must end in .safetensors."),
    ("initialize net.py:problem --weights w.safetensors --dry-run", "--weights and --dry-run contradict"),
    ("initialize net.py:problem --target 1 --trial-steps 9", "--steps, --trial-steps and --batch-size are f"),
    ("initialize net.py:problem --lr 1 --no-trials --steps 9", "are for trials; pass --lr without --no-tri"),
    ("initialize net.py:problem --lr 1 --steps 0", "Invalid value for '--steps'"),
    ("advise net.py:problem --steps 0", "Invalid value for '--steps'"),
    ("advise net.py:problem --batch-size 9", "data hold 8 examples, fewer than --batch-size 9"),
    ("initialize net.py:problem --lr 1 --batch-size 9", "data hold 8 examples, fewer than --batch-size 9"),
    ("initialize net.py:partly_frozen --lr 0.1", "frozen weights .0., .* --layers, or pass --overwrite "),
    ("track net.py:partly_frozen --lr 0.1 --initialize --steps 10 --batch-size 4", "or pass --overwrite "),
    ("initialize net.py:frozen --lr 0.1", "no weight .* can be set .0: frozen, 1: frozen, 2: frozen"),
    ("track net.py:problem", "Missing option '--lr'"),
    ("track net.py:problem --lr 0.1 --steps 0", "Invalid value for '--steps'"),
    ("track net.py:problem --lr 0.1 --batch-size 9 --initialize", "the data hold 8 examples, fewer than"),
    ("track net.py:problem --lr 0.1 --optimizer lion", "'lion' is unknown; choose from sgd, momentum, nes"),
    ("compare net.py:problem --schemes hee", "Error: --schemes hee is unknown; .* Did you mean 'he'"),
    ("compare net.py:problem --learning-rates a,b", "for '--learning-rates': 'a,b' must be numbers separ"),
    ("compare net.py:one_model --batch-size 4 --steps 10 --workers 1", "build.* returned the same model twi"),
    ("sweep net.py:problem --stds 0.1 --stds 0.1", "--stds 0.1,0.1 must be a list of numbers, each once"),
    ("reproduce table-9", "'table-9' is unknown; choose from 'table-1',"),
    ("reproduce table-2 --data-dir nowhere", "nowhere"),
    ("reproduce table-2 --data digits --folder net.py", "--folder net.py/table-2-digits cannot be used"),
    ("demo --folder net.py", "--folder net.py cannot be made: File exists; give another name."),
    ("demo --lr -1", "-1.0 must be a number above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "message"), WRONG)
def test_a_wrong_option_is_refused_without_a_traceback_and_nothing_is_written(run, folder, command, message):
    result = run(*shlex.split(command), columns=300)
    assert re.search(message, re.sub(r"\s+", " ", refused(result))), result.stderr
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["net.py"]
