"""A failure of the user's code shows the user's frames; one of our own asks for a report."""

from __future__ import annotations

import importlib
import pickle
import re
from pathlib import Path

import pytest

from hessinit.cli.failures import LIBRARY_FOLDERS, message_of, show_argument
from hessinit.errors import ProblemError, argument

from .conftest import refused


def frames(text: str) -> list[tuple[str, str]]:
    return re.findall(r'File "(?:.*/)?([^/"]+)", line \d+, in (\S+)', text)


@pytest.mark.parametrize(
    ("command", "doing"),
    [
        (["measure"], "measuring"),
        (["initialize", "--lr", "0.1"], "initializing"),
        (["track", "--lr", "0.1", "--batch-size", "2"], "tracking"),
        (["compare", "--batch-size", "2", "--workers", "1"], "comparing initializations of"),
    ],
)
def test_a_failure_shows_the_user_s_frames_only(run, command, doing):
    told = refused(run(command[0], "net.py:fails", *command[1:]))
    assert frames(told) == [("net.py", "fails"), ("net.py", "helper")]
    assert "LookupError: no data here\n" in told
    assert re.search(r"Error: fails\(\) of \S*net.py failed, as shown above\.\n$", told)
    told = refused(run(command[0], "net.py:fails_in_the_loss", *command[1:]))
    assert frames(told) == [("net.py", "loss")]
    assert "AttributeError: 'Tensor' object has no attribute 'nosuch'" in told
    assert told.endswith(f"Error: {doing} net.py:fails_in_the_loss failed, as shown above.\n")


def test_a_failure_in_a_worker_is_the_user_s_own(run):
    options = ["--batch-size", 4, "--steps", 10, "--workers", 2]
    told = refused(run("compare", "net.py:fails_in_a_worker", *options))
    assert "LookupError: no data here" in told
    assert "Please report it" not in told


def test_a_model_of_torch_s_modules_that_fails_shows_which_module(run):
    told = refused(run("measure", "net.py:wrong_width"))
    assert "Its layer 0, Linear(in_features=3, out_features=4, bias=False), got shape (8, 2)" in told
    assert "shapes cannot be multiplied (8x2 and 3x4)" in told


def test_a_failure_of_our_own_shows_everything_and_asks_for_a_report(run, monkeypatch):
    # By the module's name: the attribute of the package is the function.
    module = importlib.import_module("hessinit.measurement.measure")
    monkeypatch.setattr(module, "evaluate_everywhere", lambda *problem: [][0])
    here = Path(__file__).parent  # the lambda above is no user's
    monkeypatch.setattr("hessinit.cli.failures.LIBRARY_FOLDERS", (here, *LIBRARY_FOLDERS))
    result = run("measure", "net.py:problem")
    assert result.exit_code == 2
    assert ("measure.py", "measure") in frames(result.stderr)
    assert "failed inside hessinit. Please report it" in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def problem(:\n", "SyntaxError"),
        ("import torch\nimport no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_a_file_that_cannot_be_run_shows_where(run, folder, text, said):
    (folder / "broken.py").write_text(text)
    for place in ("broken.py:problem", "broken:problem"):
        told = refused(run("measure", place))
        assert said in told
        assert f'File "{folder}/broken.py", line' in told
        assert "hessinit/" not in told


def test_a_function_that_exits_is_told_how_not_to(run):
    told = refused(run("measure", "net.py:leaves"))
    assert "it called sys.exit('usage: net.py [--data]')" in told
    assert "under `if __name__ == '__main__':`." in told


def test_an_argument_that_no_option_has_is_said_to_belong_into_a_problem(run):
    told = refused(run("measure", "net.py:with_dropout"))
    assert "pass dropout='freeze' to keep one mask." in told
    assert told.endswith("the function returns such arguments in a hessinit.Problem.\n")


def test_arguments_are_shown_as_options_where_the_command_has_them():
    message = (argument("layers", ["0", "conv*"]), " and ", argument("dropout", "freeze"), "; name lr=1")
    error = ProblemError(*message)
    assert str(error) == "layers=['0', 'conv*'] and dropout='freeze'; name lr=1"
    assert message_of(error, ["layers", "lr"]) == "--layers '0,conv*' and dropout='freeze'; name lr=1"
    assert message_of(error, []) == str(error)
    shown = [show_argument(argument("overwrite", True)), show_argument(argument("batch_size"))]
    assert shown == ["--overwrite", "--batch-size"]


def test_an_error_can_be_sent_to_another_process_whatever_its_arguments_are():
    error = pickle.loads(pickle.dumps(ProblemError(argument("forward", lambda x: x), " must be a name.")))
    assert type(error) is ProblemError
    assert re.fullmatch(r"forward=<function .* must be a name\.", str(error))
    assert message_of(error, ["forward"]).startswith("--forward '<function ")
