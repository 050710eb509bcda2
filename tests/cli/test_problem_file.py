"""Where a problem is found, what its function may return, and the file that `hessinit new` writes."""

from __future__ import annotations

import json
import pickle
import re
import shlex
import subprocess
import sys

import pytest
import torch
from torch import nn

from hessinit.cli.problem_file import PartOf, find_problem, load_rebuildable

# The file, and the message it must be answered with.
WRONG_FUNCTIONS = {
    "def probelm(): pass": r"bad.py has no 'problem'. Did you mean 'probelm'\?",
    "def build(): pass\ndef data(): pass": r"bad.py has no 'problem'. Its functions are build, data\.",
    "from textwrap import dedent\ndef build(): pass": r"bad.py has no 'problem'. Its functions are build\.",
    "def exitsmsg(): pass": r"bad.py has no 'problem'. Its functions are exitsmsg\.",
    "x = 1": r"bad.py has no 'problem'. It defines no function\.",
    "problem = 3": r"bad.py:problem is an int; it must be a function that returns model, loss, batch\.",
    "from torch import nn\nproblem = nn.Linear(1, 1)": r"bad.py:problem is a Linear; it must be a function",
    "def problem(width, *, depth): pass": r"problem\(width, \*, depth\) of bad.py needs arguments",
    "def problem(): pass": r"problem\(\) of bad.py returned None; it must return model, loss, batch",
    "def problem(): return 1, 2": r"returned 2 values \(int, int\); it must return model, loss, batch",
    "def problem(): return {'model': 1}": r"returned a dict; it must return",
    "def problem(): return 1, 2, 3, 4": r"returned an int as its fourth value; it must return",
    "def problem(): return 1, 2, 3, {'foward': 4}": r"'foward', which .*Did you mean 'forward'\?",
    "def problem(): return 1, 2, 3": r"model is a int; it must be a torch.nn.Module\.",
}
WRONG_PLACES = [
    ("net.py", "'net.py' names no function; write it after a colon, such as net.py:problem."),
    ("net", "'net' names no function; write it after a colon, such as net.py:problem."),
    (":problem", "':problem' is not of the form file.py:function"),
    ("..:problem", "'..:problem' is not of the form file.py:function"),
    ("net.py:", "'net.py:' is not of the form file.py:function"),
    ("no.py:problem", "no.py does not exist (looked in {folder}).\n"),
    ("/dev/null:problem", "/dev/null is not a Python file; its name must end in .py, as in net.py:problem."),
    ("nett.py:problem", "nett.py does not exist (looked in {folder}). Did you mean 'net.py'?"),
    ("no/net.py:problem", "no/net.py does not exist, nor does the folder no."),
    ("./inner:problem", "inner is a folder; give a file in it, such as inner/net.py:problem."),
    ("nosuch:problem", "there is no module 'nosuch', neither installed nor in {folder}."),
    ("inner.nosuch:problem", "there is no module 'inner.nosuch', neither installed nor in {folder}."),
    ("hidden.inner:problem", "For the file, write hidden/inner.py:function."),
]


@pytest.mark.parametrize("text", WRONG_FUNCTIONS)
def test_a_wrong_function_is_answered_in_one_paragraph(run, folder, text):
    (folder / "bad.py").write_text(text)
    result = run("measure", "bad.py:problem")
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(rf"Error: .*{WRONG_FUNCTIONS[text]}.*\n", result.stderr), result.stderr


@pytest.mark.parametrize(("place", "message"), WRONG_PLACES)
def test_a_wrong_place_is_answered_in_one_paragraph(run, folder, place, message):
    (folder / "inner").mkdir()
    (folder / "hidden").mkdir()
    (folder / "hidden" / "inner.py").write_text("")
    (folder / "hidden.py").write_text("")  # hides the folder, so that inner is no module
    result = run("measure", place)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message.format(folder=folder) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_module_is_found_from_the_working_folder(run, folder):
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").write_text("")
    (folder / "mine" / "nets.py").write_text((folder / "net.py").read_text())
    shown, truth = (run("measure", place, "--json") for place in ("mine.nets:problem", "net.py:problem"))
    norms = [[layer["top"]["value"] for layer in json.loads(one.stdout)["layers"]] for one in (shown, truth)]
    assert norms[0] == norms[1]


def test_a_file_may_import_its_neighbours_and_is_found_anew_each_time(run, folder):
    for name, width in (("one", 3), ("two", 5)):
        (folder / name).mkdir()
        (folder / name / f"width_{name}.py").write_text(f"WIDTH = {width}\n")
        (folder / name / "neighbourly.py").write_text(
            f"import torch\nfrom width_{name} import WIDTH\n"
            "def problem():\n"
            "    batch = torch.ones(4, 2), torch.ones(4, WIDTH)\n"
            "    return torch.nn.Linear(2, WIDTH), torch.nn.MSELoss(), batch\n"
        )
        result = run("measure", f"{name}/neighbourly.py:problem", "--json")
        assert json.loads(result.stdout)["layers"][0]["shape"] == [width, 2], result.output


def test_a_file_called_torch_does_not_take_torch_s_place(run, folder):
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "torch.py").write_text((folder / "net.py").read_text())
    assert run("measure", "elsewhere/torch.py:problem").exit_code == 0
    assert run("measure", "net.py:problem").exit_code == 0


# Rebuilt in worker processes


@pytest.mark.parametrize(
    ("function", "loss", "factor"),
    [
        ("drawn", nn.MSELoss, 1),
        ("with_lambdas", PartOf, 2),
        ("with_a_function_of_the_file", PartOf, 1),
    ],
)
@pytest.mark.usefixtures("run")
def test_every_part_of_a_problem_can_be_pickled(net, function, loss, factor):
    problem = load_rebuildable(find_problem(f"net.py:{function}"))
    assert isinstance(problem.loss, loss)
    build, sent_loss, keywords = pickle.loads(pickle.dumps((problem.model, problem.loss, problem.keywords)))
    model, (inputs, targets) = build(), problem.batch
    assert build() is not model
    forward = keywords.get("forward", lambda model, inputs: model(inputs))
    assert torch.equal(forward(model, inputs), factor * model(inputs))
    truth = getattr(net, function)()[1]
    assert torch.equal(sent_loss(model(inputs), targets), truth(model(inputs), targets))


@pytest.mark.usefixtures("run")
def test_running_the_file_changes_no_model(folder):
    (folder / "noisy.py").write_text((folder / "net.py").read_text() + "\nNOISE = torch.rand(3)\n")
    build = PartOf(find_problem("noisy.py:drawn"), "model")
    weights = []
    for _ in range(2):  # the first call runs the file, which draws
        torch.manual_seed(5)
        weights.append(build()[0].weight)
    assert torch.equal(*weights)


# hessinit new

SMALL = "--steps 10 --seeds 1 --workers 1"


@pytest.mark.parametrize(
    "command",
    [
        "measure my.py:problem --json",
        "initialize my.py:problem --lr 0.1 --json",
        "track my.py:problem --lr 0.1 --steps 10 --json",
        f"compare my.py:problem {SMALL} --schemes he --learning-rates 0.1 --json",
        f"sweep my.py:problem {SMALL} --stds 0.1 --json",
    ],
)
def test_the_new_file_runs_as_it_is_with_every_command(run, command):
    assert run("new", "my.py").exit_code == 0
    result = run(*command.split())
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["kind"].startswith("hessinit ")


def test_the_new_file_is_sound_python_of_our_own_style(run):
    run("new")
    rules = ["--isolated", "--line-length", "110", "--select", "E,F,B,I,N,PIE,SIM,UP,W"]
    command = [sys.executable, "-m", "ruff", "check", *rules, "problem.py"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.py", "net.py exists and was left as it is; choose another name, or pass --force."),
        ("net.txt", "net.txt must be a name that ends in .py, such as problem.py."),
        (".py", ".py must be a name that ends in .py, such as problem.py."),
        ("inner", "inner is a folder; give the name of a file in it, such as inner/problem.py."),
        ("no/net.py", "cannot write no/net.py: "),
        (
            "random.py",
            "random.py would hide the module 'random' from Python; choose another name, such as my_",
        ),
        ("torch.py", "torch.py would hide the module 'torch' from Python"),
    ],
)
def test_a_wrong_name_is_answered_in_one_paragraph_and_nothing_is_written(run, folder, name, message):
    (folder / "inner").mkdir()
    before = (folder / "net.py").read_bytes()
    result = run("new", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["inner", "net.py"]
    assert (folder / "net.py").read_bytes() == before
    assert run("new", "net.py", "--force").exit_code == 0
    assert (folder / "net.py").read_bytes() != before


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("-x.py", "./-x.py:problem"),
        ("my net.py", "'my net.py:problem'"),
        ("inner/a.py", "inner/a.py:problem"),
    ],
)
def test_the_command_that_is_advised_can_be_typed(run, folder, name, place):
    (folder / "inner").mkdir()
    result = run("new", "--", name)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"Next: hessinit measure {place}"
    assert run("measure", *shlex.split(place)).exit_code == 0
    advised = re.search(r"hessinit track (.*) --lr 0.1", (folder / name).read_text(encoding="utf-8"))
    assert shlex.split(advised[1]) == shlex.split(place)


def test_new_needs_no_torch(run_python):
    line = "import sys; from hessinit.cli.app import app; app(['new'], standalone_mode=False); "
    result = run_python(line + "print('torch' in sys.modules)")
    assert result.stdout.splitlines()[-1] == "False", result.stderr
