from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hessinit.demo import problem, trying
from typer.testing import CliRunner

from hessinit import CurvatureReport, Initialization, Tracking, measure
from hessinit.cli import app

# Numbers differ between machines, and what training makes of them by more than the last digit; with them go
# the table's spaces, the bars and the wrapping.
EXPECTED = """
#. Ten dense layers with tanh, as PyTorch starts them, on # real handwritten digits. ‖H‖ is how sharply the \
loss bends with a layer's weights.

layer weight ‖H‖ verdict
─
fc1 (#, #) # vanishing
fc2 (#, #) # vanishing
fc3 (#, #) # vanishing
fc4 (#, #) # vanishing
fc5 (#, #) # vanishing
fc6 (#, #) # flat
fc7 (#, #) # flat
fc8 (#, #) # flat
fc9 (#, #) # flat
fc10 (#, #) # flat
─
network # # flat

fc10 is # times sharper than fc2. fc1, fc2, fc3 and # more vanish (‖H‖ is below #): they hardly move the \
loss. Gradient descent is unstable above lr = #/‖H‖ = #; # is best guaranteed for these weights. # \
layers in # s by the Gram engine: few outputs, # shared backward passes. Gauss-Newton on # examples; loss #. \
Note: Not counted in the network's ‖H‖: # trained parameters (fc1.bias, fc2.bias, fc3.bias …); \
layers="**" counts them.

#. New weights, scaled until the curvature fits lr = #.

layer scale ‖H‖ before after
─
fc1 × # # #
fc2 × # # #
fc3 × # # #
fc4 × # # #
fc5 × # # #
fc6 × # # #
fc7 × # # #
fc8 × # # #
fc9 × # # #
fc10 × # # #
─
network # #

Met: the network's ‖H‖ = # is within # % of #. Target: the network's ‖H‖ = κ/lr = #/# = #. Start by lsuv, \
one gain for all weights; # measurements in # s.

#. Both trained alike: # steps of plain SGD at lr = #, batches of # out of # digits; the other # are held \
out, and the last column says how many of them are read right.

training loss step # to # first last right
─
PyTorch's default BARS # # # %
hessinit BARS # # # %

hessinit's start is ahead: PyTorch's ends at # times its loss. After # steps at lr = # the loss is # from \
hessinit's start and # from PyTorch's; of # held-out digits # % and # % are read right.

#. Is it luck? The same with other seeds, and two well-known starts beside them.

start median loss lowest … highest right
─
PyTorch's default # # … # # %
He # # … # # %
LSUV # # … # # %
hessinit # # … # # %

Over # seeds the lowest median loss is that of LSUV, #; hessinit #, He #, PyTorch's default #. hessinit's \
loss is the lower one against PyTorch's default in #, He in #, LSUV in # of # seeds.

Look at DIR/demo.html (a page that opens in any browser) and at DIR/curves.png: file://DIR/demo.html

Another rate: hessinit demo --lr # Your own network: hessinit new problem.py hessinit measure \
problem.py:problem --html report.html

All of it in # s.
"""


def mask(text: str, folder: Path) -> str:
    """Numbers as #, bars as a word, spaces and rules as one; paragraphs that are no table on one line."""
    text = text.replace(str(folder), "DIR")
    text = re.sub(r"[▁▂▃▄▅▆▇█x]{6,}", "BARS", text)
    text = re.sub(r"(?<![\w.])-?\d+(,\d{3})*(\.\d+)?(e[-+]\d+)?(?!\w)", "#", text)
    text = re.sub(r"─+", "─", re.sub(r" +", " ", text))
    paragraphs = ["\n".join(line.strip() for line in part.splitlines()) for part in text.split("\n\n")]
    return "\n\n".join(part if "─" in part else part.replace("\n", " ") for part in paragraphs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The demo as it is, once."""
    folder = tmp_path_factory.mktemp("told") / "demo-output"
    result = CliRunner().invoke(app, ["demo", "--folder", str(folder)], env={"COLUMNS": "80"})
    return SimpleNamespace(result=result, folder=folder)


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, few seeds: what is printed and written is of the same kind."""
    monkeypatch.setattr(trying, "STEPS", 20)
    monkeypatch.setattr(trying, "SEEDS", 2)


def test_the_demo_tells_the_whole_story(whole):
    assert whole.result.exit_code == 0, whole.result.output
    assert mask(whole.result.stdout, whole.folder).strip() == EXPECTED.strip()
    assert whole.result.stderr == ""




def test_the_story_is_that_the_start_decides(whole):
    told = re.search(
        r"the loss is (\S+) from\s+hessinit's\s+start\s+and\s+(\S+)\s+from\s+PyTorch's", whole.result.stdout
    )
    assert told is not None
    ours, theirs = float(told[1]), float(told[2])
    assert ours < 0.5
    assert 0.5 < theirs < 2.3


def test_the_page_and_the_picture_are_there_and_nothing_else(whole):
    assert sorted(path.name for path in whole.folder.iterdir()) == ["curves.png", "demo.html"]
    page = (whole.folder / "demo.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    for words in ("Two starts for one network", "Is it luck?", "hessinit&#39;s start is ahead", "fc10"):
        assert words in page
    assert (whole.folder / "curves.png").read_bytes().startswith(b"\x89PNG")




@pytest.mark.usefixtures("shortened")
def test_json_is_all_that_is_printed_and_no_file_is_written(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("demo", "--json", "--seed", 3, "--lr", 0.1)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    shown = json.loads(result.stdout)
    assert list(tmp_path.iterdir()) == []
    assert (shown["kind"], shown["lr"], shown["seed"], shown["steps"]) == (
        "hessinit demonstration",
        0.1,
        3,
        20,
    )
    measured = measure(*problem(seed=3), seed=3).to_dict()
    assert {**shown["before"], "seconds": 0} == {**measured, "seconds": 0}
    made = Initialization.from_dict(shown["initialization"])
    assert made.lr == 0.1
    assert CurvatureReport.from_dict(shown["after"]) == made.after
    assert list(shown["trackings"]) == ["PyTorch's default", "hessinit"]
    for tracking in shown["trackings"].values():
        assert len(Tracking.from_dict(tracking).losses) == 20
    assert [(one["start"], one["seed"]) for one in shown["tries"]] == [
        ("default", 3), ("hessinit", 3), ("he", 3), ("lsuv", 3),
        ("default", 4), ("he", 4), ("lsuv", 4), ("hessinit", 4),
    ]  # fmt: skip
    again = json.loads(run("demo", "--json", "--seed", 3, "--lr", 0.1).stdout)
    assert again["tries"] == shown["tries"]






@pytest.mark.usefixtures("shortened")
def test_a_rate_far_too_high_is_told_as_plainly(run, tmp_path):
    result = run("demo", "--folder", tmp_path / "d", "--lr", 1e6)
    assert result.exit_code == 0, result.output
    assert "Neither start gets below guessing (2.3): take another --lr." in result.stdout
    assert (tmp_path / "d" / "demo.html").is_file()


@pytest.mark.usefixtures("shortened")
def test_ctrl_c_leaves_nothing_behind(run, tmp_path, monkeypatch):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trying, "try_others", interrupted)
    result = run("demo", "--folder", tmp_path / "d")
    assert result.exit_code == 130
    assert result.stderr == "Interrupted: the demo was not finished, and nothing was written.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("shortened")
def test_a_full_disk_leaves_no_half_file(run, tmp_path, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = run("demo", "--folder", tmp_path)
    assert result.exit_code == 2
    assert "Is it luck?" in result.stdout
    assert f"Error: cannot write to {tmp_path}: " in result.stderr
    assert list(tmp_path.iterdir()) == []




def test_a_folder_that_cannot_be_is_refused_before_any_work(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "demo.html").mkdir(parents=True)
    for folder, words in (
        ("file", "is there and is not a folder"),
        ("taken", "holds a folder called demo.html"),
        ("no/such", "does not exist. Create it first."),
    ):
        result = run("demo", "--folder", tmp_path / folder)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"Error: --folder {tmp_path / folder} ")
        assert words in result.stderr
    monkeypatch.setattr("os.access", lambda folder, mode: False)
    assert "is read-only for you" in run("demo", "--folder", tmp_path / "new").stderr


def test_the_demo_s_problem_can_be_measured_by_name(run):
    result = run("measure", "hessinit.demo:problem", "--json")
    assert result.exit_code == 0, result.output
    measured = measure(*problem(), seed=0).to_dict()
    assert {**json.loads(result.stdout), "seconds": 0} == {**measured, "seconds": 0}




@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "fast"])
def test_a_rate_that_is_none_is_wrong_usage(run, rate):
    result = run("demo", "--lr", rate)
    assert result.exit_code == 2
    assert "Invalid value for '--lr'" in result.stderr
