"""Where a problem is found, what its function may return, and the file that `hessinit new` writes."""

from __future__ import annotations

import json
import pickle
import re
import sys

import pytest
import torch

from hessinit.cli.problem_file import Builder, find_problem

from .conftest import refused, without_seconds

# The file, and the message it must be answered with.
RETURNS = "it must return model, loss, batch, or a hessinit.Problem, and may add a dict"
WRONG_FUNCTIONS = {
    "def probelm(): pass": r"has no function 'problem'; its functions are probelm. Did you mean 'probelm'\?",
    "problem = 3": r"bad.py has no function 'problem'; its functions are none\.",
    "def problem(): pass": rf"problem\(\) of bad.py returned NoneType; {RETURNS}",
    "def problem(): return 1, 2": rf"returned int, int; {RETURNS}",
    "def problem(): return 1, 2, 3, 4": rf"returned int, int, int, int; {RETURNS}",
    "def problem(): return 1, 2, 3, {'foward': 4}": r"'foward' is unknown; .* Did you mean 'forward'\?",
    "def problem(): return 1, 2, 3": r"model is a int; it must be a torch.nn.Module\.",
}
FORM = "is not of the form file.py:function or package.module:function, such as net.py:problem."
WRONG_PLACES = [
    ("net.py", f"'net.py' {FORM}"),
    ("net", f"'net' {FORM}"),
    (":problem", f"':problem' {FORM}"),
    ("net.py:", f"'net.py:' {FORM}"),
    ("/dev/null:problem", "/dev/null must be an existing Python file"),
    ("nett.py:problem", "there is none of that name in {folder}. Did you mean 'net.py'?"),
    ("nosuch:problem", "there is no module 'nosuch', neither installed nor in {folder}."),
    ("inner.nosuch:problem", "there is no module 'inner.nosuch', neither installed nor in {folder}."),
    ("inner/torch.py:problem", "inner/torch.py has the name of another module, "),
]


@pytest.mark.parametrize("text", WRONG_FUNCTIONS)
def test_a_wrong_function_is_answered_in_one_paragraph(run, folder, text):
    (folder / "bad.py").write_text(text)
    told = refused(run("measure", "bad.py:problem"))
    assert re.fullmatch(rf"Error: .*{WRONG_FUNCTIONS[text]}.*\n", told), told


@pytest.mark.parametrize("command", ["measure", "advise", "initialize --target 2 --scheme keep"])
def test_a_problem_is_what_the_same_values_as_keywords_are(run, command):
    """Its options describe the problem to every command; none is named as unused."""
    verb, *options = command.split()
    shown = run(verb, "net.py:as_a_problem", "--json", *options)
    assert shown.exit_code == 0, shown.output
    assert "also returns" not in shown.stderr
    keywords = run(verb, "net.py:with_keywords", "--curvature", "gauss-newton", "--json", *options)
    assert without_seconds(json.loads(shown.stdout)) == without_seconds(json.loads(keywords.stdout))


def test_a_dict_may_follow_a_problem(run):
    shown = run("measure", "net.py:as_a_problem_with_options", "--json")
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert report["curvature"] == "both"
    assert [layer["name"] for layer in report["layers"]] == ["0", "2"]
    advised = run("advise", "net.py:as_a_problem_with_options")
    assert advised.exit_code == 0, advised.output
    assert "also returns curvature, which only hessinit measure uses." in advised.stderr


@pytest.mark.parametrize(("place", "message"), WRONG_PLACES)
def test_a_wrong_place_is_answered_in_one_paragraph(run, folder, place, message):
    (folder / "inner").mkdir()
    (folder / "inner" / "torch.py").write_text("def problem(): pass\n")
    told = refused(run("measure", place))
    assert message.format(folder=folder) in told
    assert len(told.splitlines()) == 1


def test_a_module_is_found_from_the_working_folder(run, folder):
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").write_text("")
    (folder / "mine" / "nets.py").write_text((folder / "net.py").read_text())
    shown, truth = (run("measure", place, "--json") for place in ("mine.nets:problem", "net.py:problem"))
    norms = [[layer["top"]["value"] for layer in json.loads(one.stdout)["layers"]] for one in (shown, truth)]
    assert norms[0] == norms[1]


def test_a_file_may_import_its_neighbours_and_needs_no_arguments(run, folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "width.py").write_text("WIDTH = 3\n")
    (folder / "inner" / "neighbourly.py").write_text(
        "import torch\nfrom width import WIDTH\n"
        "def problem():\n"
        "    batch = torch.ones(4, 2), torch.ones(4, WIDTH)\n"
        "    return torch.nn.Linear(2, WIDTH), torch.nn.MSELoss(), batch\n"
        "def sized(width): pass\n"
    )
    result = run("measure", "inner/neighbourly.py:problem", "--json")
    assert json.loads(result.stdout)["layers"][0]["shape"] == [3, 2], result.output
    told = refused(run("measure", "inner/neighbourly.py:sized"))
    assert "TypeError: sized() missing 1 required positional argument: 'width'\nError: sized() of" in told


@pytest.mark.usefixtures("run")
def test_a_builder_can_be_sent_and_draws_what_it_drew_here(folder, capsys):
    text = (folder / "net.py").read_text()
    (folder / "noisy.py").write_text(text + "\nNOISE = torch.rand(3)\nprint('the file is run')\n")
    build = Builder(find_problem("noisy.py:drawn"))
    noise = sys.modules["noisy"].NOISE
    packed = pickle.dumps(build)
    del sys.modules["noisy"]  # as in a worker process
    before = torch.get_rng_state()
    sent = pickle.loads(packed)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(sys.modules["noisy"].NOISE, noise)
    assert capsys.readouterr().out == "the file is run\n"
    weights = []
    for each in (build, sent, sent):
        torch.manual_seed(5)
        weights.append(each()[0].weight)
    assert torch.equal(weights[0], weights[1])
    assert weights[1] is not weights[2]
    assert torch.equal(weights[1], weights[2])


SMALL = "--steps 10 --seeds 1 --workers 1"


@pytest.mark.parametrize(
    "command",
    [
        "measure my.py:problem --json",
        "initialize my.py:problem --lr 0.1 --json",
        "track my.py:problem --lr 0.1 --steps 10 --json",
        f"compare my.py:problem {SMALL} --schemes he --learning-rates 0.1 --json",
        f"sweep my.py:problem {SMALL} --stds 0.1 --learning-rate 0.3 --json",
    ],
)
def test_the_new_file_runs_as_it_is_with_every_command(run, command):
    assert run("new", "my.py").exit_code == 0
    result = run(*command.split())
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["kind"].startswith("hessinit ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.py", "net.py exists and was left as it is; choose another name, or remove it first."),
        ("net.txt", "net.txt must be a name that ends in .py, such as problem.py."),
        ("no/net.py", "cannot write no/net.py: "),
    ],
)
def test_a_wrong_name_is_answered_in_one_paragraph_and_nothing_is_written(run, folder, name, message):
    before = (folder / "net.py").read_bytes()
    told = refused(run("new", name))
    assert told.startswith(f"Error: {message}")
    assert len(told.splitlines()) == 1
    assert [path.name for path in folder.iterdir()] == ["net.py"]
    assert (folder / "net.py").read_bytes() == before
