from __future__ import annotations

import importlib
import re

import pytest

# One function, the message it must be answered with.
WRONG_FUNCTIONS = {
    "def probelm(): pass": r"net.py has no 'problem'. Did you mean 'probelm'\?",
    "def build(): pass\ndef data(): pass": r"net.py has no 'problem'. Its functions are build, data\.",
    "from textwrap import dedent\ndef build(): pass": r"net.py has no 'problem'. Its functions are build\.",
    "def exitsmsg(): pass": r"net.py has no 'problem'. Its functions are exitsmsg\.",
    "x = 1": r"net.py has no 'problem'. It defines no function\.",
    "problem = 3": r"net.py:problem is an int; it must be a function that returns model, loss, batch\.",
    "from torch import nn\nproblem = nn.Linear(1, 1)": r"net.py:problem is a Linear; it must be a function",
    "def problem(width, *, depth): pass": r"problem\(width, \*, depth\) of .*net.py needs arguments",
    "def problem(): pass": r"problem\(\) of .*net.py returned nothing \(None\); it must return model",
    "def problem(): return 1, 2": r"returned 2 values \(int, int\); it must return model, loss, batch",
    "def problem(): return [1]": r"returned 1 value \(int\); it must return",
    "def problem(): return {'model': 1}": r"returned a dict; it must return",
    "def problem(): return 1, 2, 3, 4": r"returned an int as its fourth value; it must return",
    "def problem(): return 1, 2, 3, {'foward': 4}": r"'foward'.* does not know; .*Did you mean 'forward'\?",
    "def problem(): return 1, 2, 3": r"model is a int; it must be a torch.nn.Module\.",
}


@pytest.mark.parametrize("text", WRONG_FUNCTIONS)
def test_a_wrong_function_is_answered_in_one_paragraph(run, tmp_path, text):
    path = tmp_path / "net.py"
    path.write_text(text)
    result = run("measure", f"{path}:problem")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(rf"Error: .*{WRONG_FUNCTIONS[text]}.*\n", result.stderr), result.stderr


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("net.py", "'net.py' names no function; write it after a colon, such as net.py:problem."),
        ("net", "'net' names no function; write it after a colon, such as net.py:problem."),
        (":problem", "':problem' is not of the form file.py:function"),
        ("..:problem", "'..:problem' is not of the form file.py:function"),
        ("net.py:", "'net.py:' is not of the form file.py:function"),
        ("no.py:problem", "no.py does not exist (looked in {folder}).\n"),
        ("/dev/null:problem", "/dev/null is not a file; give a Python file, such as net.py:problem."),
        ("nett.py:problem", "nett.py does not exist (looked in {folder}). Did you mean 'net.py'?"),
        ("no/net.py:problem", "no/net.py does not exist, nor does the folder no."),
        ("./folder:problem", "folder is a folder; give a file in it, such as folder/net.py:problem."),
        ("./notes.txt:problem", "notes.txt is not a Python file; its name must end in .py."),
        ("nosuch:problem", "there is no module 'nosuch', neither installed nor in {folder}."),
        ("folder.nosuch:problem", "there is no module 'folder.nosuch', neither installed nor in {folder}."),
        ("folder.inner:problem", "For the file, write folder/inner.py:function."),
    ],
)
def test_a_wrong_place_is_answered_in_one_paragraph(run, net, tmp_path, monkeypatch, place, message):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "folder").mkdir()
    if place == "folder.inner:problem":
        (tmp_path / "folder" / "inner.py").write_text("")
        (tmp_path / "folder.py").write_text("")  # hides the folder, so that inner is no module
    monkeypatch.chdir(tmp_path)
    result = run("measure", place)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message.format(folder=tmp_path) in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--curvature", "hessain"], "'hessain' is not one of 'gauss-newton', 'hessian', 'both'"),
        (["--tolerance", "0"], "0.0 is not positive; give a relative accuracy such as 1e-3."),
        (["--tolerance", "nan"], "nan is not positive"),
        (["--threads", "0"], "Invalid value for '--threads'"),
        (["--device", "cuad"], "Error: --device cuad cannot be used here: "),
        (
            ["--layers", "haed"],
            "Error: --layers 'haed' fits no parameter of the model; its layers are conv, head. Did you",
        ),
        (["--colour"], "No such option"),
    ],
)
def test_a_wrong_option_is_answered_without_a_traceback(run, net, options, message):
    result = run("measure", f"{net}:problem", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


FAILING = """
import torch
from torch import nn

def helper():
    raise LookupError("no data here")

def fails():
    helper()

def fails_in_the_loss():
    def loss(output, target):
        return output.nosuch
    return nn.Linear(2, 1), loss, (torch.ones(3, 2), torch.ones(3, 1))

def wrong_width():
    return nn.Sequential(nn.Linear(3, 1)), nn.MSELoss(), (torch.ones(5, 2), torch.ones(5, 1))

def leaves():
    raise SystemExit("usage: net.py [--data]")

def interrupted():
    raise KeyboardInterrupt

class Odd(BaseException):
    pass

def odd():
    raise Odd("no exception at all")

def generator_exit():
    raise GeneratorExit

def with_loss(failure):
    def loss(output, target):
        raise failure
    return nn.Linear(2, 1), loss, (torch.ones(3, 2), torch.ones(3, 1))

def odd_loss():
    return with_loss(Odd("no exception at all"))

def generator_exit_loss():
    return with_loss(GeneratorExit())

def leaving_loss():
    return with_loss(SystemExit(3))
"""


@pytest.fixture
def failing(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    return path


def frames(text: str) -> list[str]:
    return re.findall(r'File "(?:.*/)?([^/"]+)", line \d+, in (\S+)', text)


def test_a_failing_function_shows_its_own_frames_only(run, failing):
    result = run("measure", f"{failing}:fails")
    assert (result.exit_code, result.stdout) == (2, "")
    assert frames(result.stderr) == [("failing.py", "fails"), ("failing.py", "helper")]
    assert "LookupError: no data here\n" in result.stderr
    assert result.stderr.endswith(f"Error: fails() of {failing} failed, as shown above.\n")


def test_a_failing_loss_shows_the_user_s_frames_only(run, failing):
    result = run("measure", f"{failing}:fails_in_the_loss")
    assert result.exit_code == 2
    assert frames(result.stderr) == [("failing.py", "loss")]
    assert "AttributeError: 'Tensor' object has no attribute 'nosuch'" in result.stderr
    assert result.stderr.endswith(f"Error: measuring {failing}:fails_in_the_loss failed, as shown above.\n")


def test_a_model_of_torch_s_modules_that_fails_shows_which_module(run, failing):
    result = run("measure", f"{failing}:wrong_width")
    assert result.exit_code == 2
    assert frames(result.stderr) == [("container.py", "forward"), ("linear.py", "forward")]
    assert "shapes cannot be multiplied (5x2 and 3x1)" in result.stderr


def test_a_failure_of_our_own_shows_everything_and_asks_for_a_report(run, net, monkeypatch):
    # By the module's name: the attribute of the package is the function.
    monkeypatch.setattr(
        importlib.import_module("hessinit.measurement.measure"), "evaluate", lambda problem: [][0]
    )
    monkeypatch.setattr(
        "hessinit.cli.failures._is_library", lambda frame: True
    )  # this test's lambda is no user
    result = run("measure", f"{net}:problem")
    assert result.exit_code == 2
    assert ("measure.py", "measure") in frames(result.stderr)
    assert "failed inside hessinit. Please report it" in result.stderr


def test_a_file_that_does_not_parse_shows_where(run, tmp_path):
    path = tmp_path / "net.py"
    path.write_text("def problem(:\n")
    result = run("measure", f"{path}:problem")
    assert result.exit_code == 2
    assert f'File "{path}", line 1' in result.stderr
    assert "SyntaxError" in result.stderr
    assert "hessinit/" not in result.stderr


def test_a_relative_import_is_told_how_to_give_the_module(run, tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "net.py").write_text("from . import other\n")
    monkeypatch.chdir(tmp_path)
    result = run("measure", "package/net.py:problem")
    assert result.exit_code == 2
    assert frames(result.stderr) == [("net.py", "<module>")]
    assert "A file of a package is given as package.module:function, from the folder that" in result.stderr


def test_a_missing_import_inside_the_module_is_the_user_s_to_see(run, tmp_path, monkeypatch):
    (tmp_path / "importing.py").write_text("import torch\nimport no_such_package\n")
    monkeypatch.chdir(tmp_path)
    for place in ("importing:problem", "importing.py:problem"):
        result = run("measure", place)
        assert result.exit_code == 2
        assert frames(result.stderr) == [("importing.py", "<module>")]
        assert "ModuleNotFoundError: No module named 'no_such_package'" in result.stderr


def test_a_function_that_exits_is_told_how_not_to(run, failing):
    result = run("measure", f"{failing}:leaves")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "it called sys.exit('usage: net.py [--data]')" in result.stderr
    assert "under `if __name__ == '__main__':`." in result.stderr








def test_active_dropout_is_answered_with_what_a_file_can_do(run, tmp_path):
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\ndef problem():\n"
        "    batch = torch.ones(3, 2), torch.ones(3, 1)\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.Linear(2, 1))\n"
        "    return model, torch.nn.MSELoss(), batch\n"
    )
    result = run("measure", f"{path}:problem")
    assert result.exit_code == 2
    assert 'or return {"dropout": "freeze"} as a fourth value to keep one mask.' in result.stderr
    assert "pass dropout" not in result.stderr


STRAIGHT_THROUGH = """
import torch

class Rounded(torch.nn.Module):
    def forward(self, x):
        return x + (x.round() - x).detach()

def problem():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), Rounded(), torch.nn.Linear(8, 2))
    return model, torch.nn.MSELoss(), (3 * torch.randn(64, 4), torch.zeros(64, 2))

def unchecked():
    return *problem(), {"check": False}
"""


@pytest.mark.parametrize("command", [["measure"], ["initialize", "--target", "3"], ["track", "--lr", "0.01"]])
def test_a_wrong_derivative_is_answered_with_what_a_file_can_do(run, tmp_path, command):
    path = tmp_path / "net.py"
    path.write_text(STRAIGHT_THROUGH)
    refused = run(command[0], f"{path}:problem", *command[1:])
    assert refused.exit_code == 2
    assert 'return {"check": False} as a fourth value' in " ".join(refused.stderr.split())
    assert "check=False" not in refused.stderr
    measured = run(command[0], f"{path}:unchecked", *command[1:])
    assert measured.exit_code in (0, 1), measured.stderr
    assert "not checked" in " ".join((measured.stdout + measured.stderr).split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["measure"], "the measurement was not finished, and nothing was written."),
        (["initialize"], "the initialization was not finished, and nothing was written."),
        (["track", "--lr", "0.1"], "stopped before the first step, and nothing was written."),
        (["compare"], "stopped before the first run."),
    ],
)
def test_an_interruption_ends_the_command_with_a_line(run_process, failing, command, message):
    result = run_process(command[0], "failing.py:interrupted", *command[1:])
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == f"Interrupted: {message}\n"




@pytest.mark.parametrize(
    ("command", "doing"),
    [
        (["initialize", "--lr", "0.1"], "initializing"),
        (["track", "--lr", "0.1", "--batch-size", "2"], "tracking"),
    ],
)
def test_initialize_and_track_show_the_user_s_frames_only(run, failing, command, doing):
    result = run(command[0], f"{failing}:fails", *command[1:])
    assert (result.exit_code, result.stdout) == (2, "")
    assert frames(result.stderr) == [("failing.py", "fails"), ("failing.py", "helper")]
    result = run(command[0], f"{failing}:fails_in_the_loss", *command[1:])
    assert (result.exit_code, result.stdout) == (2, "")
    assert frames(result.stderr) == [("failing.py", "loss")]
    assert result.stderr.endswith(f"Error: {doing} {failing}:fails_in_the_loss failed, as shown above.\n")
