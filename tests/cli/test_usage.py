"""Help, version, exit codes, and that asking for help loads nothing heavy."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable

import pytest
from typer.models import OptionInfo

import hessinit
from hessinit.cli.app import app

COMMANDS = {each.callback.__name__: each.callback for each in app.registered_commands}
HEAVY = {"torch", "numpy", "matplotlib", "jinja2", "hessinit.measurement.measure", "hessinit.training"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_line_by_line_and_says_how_it_ends(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert re.search(rf"^ +hessinit {command}\b", result.stdout, flags=re.MULTILINE)
    assert "Examples:" in result.stdout
    assert "Exit status: 0 done," in result.stdout
    assert run(command, "-h").stdout == result.stdout


def test_every_option_in_an_example_exists(run):
    for command in COMMANDS:
        text = run(command, "--help", columns=200).stdout
        for line in re.findall(rf"^ +hessinit {command} .*", text, flags=re.MULTILINE):
            for option in re.findall(r"--[\w-]+", line):
                assert re.search(rf"^  {option}\b", text, flags=re.MULTILINE), line


def test_help_lists_every_command_in_a_line_of_80_columns(run):
    listed = run("--help", columns=80).stdout.split("Commands:")[1]
    assert re.findall(r"^  (\w+)", listed, flags=re.MULTILINE) == list(COMMANDS)
    assert "..." not in listed  # no line is cut


def test_without_a_command_the_help_is_shown(run):
    assert "Usage: hessinit" in run().output


def test_the_version_is_the_package_s(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"hessinit {hessinit.__version__}\n")


def test_help_fits_a_narrow_terminal(run_process):
    listed = run_process("--help", COLUMNS="60").stdout.split("Options:")[1]
    assert max(map(len, listed.splitlines())) <= 60


def test_a_mistyped_command_is_wrong_usage(run_process):
    result = run_process("mesure")
    assert (result.returncode, result.stdout) == (2, "")
    assert "No such command 'mesure'" in result.stderr


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
    ("lr", "initialize"), ("lr", "measure"), ("lr", "track"), ("layers", "sweep"), ("folder", "reproduce"),
    ("tolerance", "initialize"), ("optimizer", "initialize"), ("steps", "track"), ("seeds", "reproduce"),
}  # fmt: skip


def test_an_option_has_one_name_metavar_and_help_in_all_commands():
    seen: dict[str, tuple[object, ...]] = {}
    for name, command in COMMANDS.items():
        for option, settings in options_of(command) if name != "demo" else ():
            if (option, name) not in OWN_HELP:
                shown = (settings.metavar, settings.help, settings.default, settings.param_decls)
                assert seen.setdefault(option, shown) == shown, (option, name)
    assert len(seen) > 20


WRONG = [
    ("measure net.py:problem --colour", "No such option"),
    ("measure net.py:problem --curvature hessain", "'hessain' is not one of 'gauss-newton', 'hessian', 'b"),
    ("measure net.py:problem --tolerance 0", "Error: tolerance=0.0"),
    ("measure net.py:problem --seed 4294967296", "Invalid value for '--seed'"),
    ("measure net.py:problem --device cuad", "Error: --device cuad cannot be used here: "),
    ("measure net.py:problem --layers 7", "Error: layers='7' fits no parameter of the model; its layers"),
    ("measure net.py:problem --lr 0", "0.0 must be a number above 0, such as 0.1."),
    ("measure net.py:problem --lr inf", "inf must be a number above 0"),
    ("initialize net.py:problem --lr fast", "'fast' is no number; give a rate such as 0.1, or auto."),
    ("initialize net.py:problem --lr -1", "-1.0 must be a number above 0, such as 0.1."),
    ("initialize net.py:problem --lr nan", "nan must be a number above 0"),
    ("initialize net.py:problem --lr 1 --target 1", "lr=1.0 and target=1.0 "),
    ("initialize net.py:problem --target 0", "target=0.0 must be a positive, finite number"),
    ("initialize net.py:problem --scheme kaiming", "scheme='kaiming' is unknown; .*Did you mean 'he'"),
    ("initialize net.py:problem --scaling gain", "'gain' is not one of 'auto', 'all', 'last', 'small-ou"),
    ("initialize net.py:problem --rule layers --scaling all", "scaling='all' .*rule='layers'"),
    ("initialize net.py:problem --curvature both", "Invalid value for '--curvature'"),
    ("initialize net.py:problem --momentum 1 --optimizer momentum", "momentum=1.0 must be a number from 0"),
    ("initialize net.py:problem --momentum 0.5", "--momentum 0.5 is only for --optimizer momentum and nes"),
    ("initialize net.py:problem --tolerance 0", "Error: tolerance=0.0"),
    ("initialize net.py:problem --weights w.pt", "Error: --weights w.pt must end in .safetensors."),
    ("initialize net.py:problem --weights w.safetensors --dry-run", "--weights and --dry-run contradict"),
    ("track net.py:problem", "Missing option '--lr'"),
    ("track net.py:problem --lr 0", "0.0 must be a number above 0"),
    ("track net.py:problem --lr 0.1 --batch-size 4 --max-overhead 2", "max_overhead=2.0 must be a number ab"),
    ("track net.py:problem --lr 0.1 --steps 0", "Invalid value for '--steps'"),
    ("track net.py:problem --lr 0.1 --batch-size 9", "the data hold 8 examples, fewer than batch_size=9"),
    ("track net.py:problem --lr 0.1 --batch-size 9 --initialize", "the data hold 8 examples, fewer than"),
    ("track net.py:problem --lr 0.1 --batch-size 4 --layers 7", "Error: layers='7' fits no parameter"),
    ("track net.py:problem --lr 0.1 --optimizer lion", "'lion' is not one of 'sgd', 'momentum', 'adam'"),
    ("track net.py:frozen --lr 0.1 --batch-size 4", "has no trainable parameter"),
    ("compare net.py:problem --schemes hee", "Error: schemes='hee' is unknown; .* Did you mean 'he'"),
    ("compare net.py:problem --learning-rates a,b", "for '--learning-rates': 'a,b' must be numbers separ"),
    ("compare net.py:problem --learning-rates -0.1", "-0.1 in learning_rates must be a number above 0, suc"),
    ("compare net.py:problem --learning-rates 0.1,0.1", "learning_rates holds 0.1 twice; give every number"),
    ("compare net.py:problem --batch-size 500", "the data hold 8 examples, fewer than batch_size=500"),
    ("compare net.py:problem --batch-size 4 --warmup 201", "warmup=201 is longer than the run"),
    ("compare net.py:problem --batch-size 4 --device cuad", "device='cuad' cannot be used here"),
    ("compare net.py:one_model --batch-size 4 --steps 10 --workers 1", "build.* returned the same model twi"),
    ("sweep net.py:problem --stds 0", "0.0 in stds must be a number above 0, such as 0.1."),
    ("sweep net.py:problem --stds 0.1 --stds 0.1", "stds holds 0.1 twice"),
    ("sweep net.py:problem --learning-rate -1", "-1.0 must be a number above 0, such as 0.1."),
    ("sweep net.py:problem --batch-size 4 --layers 'conv*'", "layers='conv\\*' fits no parameter of the mo"),
    ("sweep net.py:problem --schemes he", "No such option"),
    ("reproduce table-9", "'table-9' is unknown; choose from 'table-1',"),
    ("reproduce table-2 --data cifar", "data='cifar' is unknown; choose from 'paper', 'digits', 'mnist'"),
    ("reproduce table-2 --variant x --data digits", "variant='x' is unknown; choose from"),
    ("reproduce table-2 --seeds 0", "Invalid value for '--seeds'"),
    ("reproduce table-2 --data-dir nowhere", "nowhere"),
    ("reproduce table-2 --data digits --folder net.py", "folder='net.py/table-2-digits' cannot be used"),
    ("demo --folder net.py", "--folder net.py cannot be made: File exists; give another name."),
    ("demo --lr fast", "Invalid value for '--lr'"),
    ("demo --lr -1", "-1.0 must be a number above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "message"), WRONG)
def test_a_wrong_option_is_refused_without_a_traceback_and_nothing_is_written(run, folder, command, message):
    result = run(*shlex.split(command), columns=300)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert re.search(message, re.sub(r"\s+", " ", result.stderr)), result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["net.py"]
