"""Wrong inputs, on the command line and in Python: each answer has the value, the rule and the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hessinit
from calls import measure

from .conftest import refused

WRONG = """
import torch
from torch import nn

def network(*more):
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), *more)

class Heads(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names, self.left, self.right = names, nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x):
        pair = self.left(x), self.right(x)
        return dict(zip(self.names, pair)) if self.names else pair

torch.manual_seed(0)
LOSS = nn.CrossEntropyLoss()
INPUTS, LABELS = torch.randn(20, 6), torch.arange(20) % 3

def problem(): return network(), LOSS, (INPUTS, LABELS)
def float_labels(): return network(), LOSS, (INPUTS, LABELS.float())
def wrong_class(): return network(), LOSS, (INPUTS, LABELS + 2)
def wrong_width(): return network(), LOSS, (INPUTS[:, :4], LABELS)
def wrong_count(): return network(), LOSS, (INPUTS, LABELS[:15])
def arrays(): return network(), LOSS, (INPUTS.numpy(), LABELS.numpy())
def array_inputs(): return network(), LOSS, (INPUTS.numpy(), LABELS)
def dict_output(): return Heads(("out", "extra")), LOSS, (INPUTS, LABELS)
def tuple_output(): return Heads(()), LOSS, (INPUTS, LABELS)
def nan_input(): return network(), LOSS, (INPUTS.index_fill(0, torch.tensor(7), float("nan")), LABELS)
def errors(output, targets): return (output.argmax(1) != targets).sum()
def count_loss(): return network(), errors, (INPUTS, LABELS)
def int_loss(): return network(), (lambda output, targets: 3), (INPUTS, LABELS)
def no_example(): return network(), LOSS, (INPUTS[:0], LABELS[:0])
def no_batch(): return network(), LOSS, []
def huge(): return nn.Linear(6, 3), LOSS, (1e10 * INPUTS, LABELS)
def exchanged(): return LOSS, network(), (INPUTS, LABELS)
def eval_mode(): return network(nn.BatchNorm1d(3)).eval(), LOSS, (INPUTS, LABELS)
def softmax_twice(): return network(nn.Softmax(1)), LOSS, (INPUTS, LABELS)
"""

# In the order of the words: the value, the rule, the way out.
BY_FUNCTION = {
    "float_labels": (r"targets of shape \(20,\) in float32", "to be Long|Long but", r"targets\.long\(\)"),
    "wrong_class": (r"targets from 2 to 4", "", "renumber them, or give the last layer more outputs"),
    "wrong_width": (
        r"inputs of shape \(20, 4\)",
        r"layer 0, Linear\(in_features=6",
        "Change the layer, or the",
    ),
    "wrong_count": (r"20 examples .*shape \(15,\)", "must count the same examples", "Cut one"),
    "arrays": ("inputs are of type ndarray", "a tensor whose first dimension counts", r"torch\.as_tensor"),
    "array_inputs": ("no ndarray", "must be Tensor", r"torch\.as_tensor"),
    "dict_output": (r"a dict with .*'out'", "needs one tensor", r"forward=|\[.out.\]"),
    "tuple_output": ("a tuple of 2", "needs one tensor", "forward="),
    "nan_input": (r"6 NaN or inf among 120 .*the first at \(7, 0\)\)", "all must be finite", "Leave these"),
    "count_loss": (r"shape \(\) and torch.int64", "one real number in a tensor", "A count.*use a loss such"),
    "int_loss": ("the loss returned 3;", "one real number in a tensor", "by functions of torch"),
    "no_example": (r"a tensor of shape \(0,\)", "", "pass at least one example"),
    "no_batch": ("empty iterable|data is empty", "must hold at least one", "pass the loader|least one batch"),
    "huge": (r"saturated.*inputs are as large as [\d.]+e\+10", "training needs about 1", "Standardize them"),
    "exchanged": ("model is a CrossEntropyLoss", "the order is model, loss, batch", "Exchange them"),
}
EVAL_MODE = r"BatchNorm is in eval mode \(3\)", "Training uses the batch's", r"model\.train\(\)"
SOFTMAX_TWICE = r"are probabilities \(they sum to 1\)", "applies a softmax itself", "Return the logits"


@pytest.fixture(autouse=True)
def wrong_file(folder: Path) -> dict[str, Any]:
    """The user's file, and its functions for the calls from Python."""
    (folder / "net.py").write_text(WRONG, encoding="utf-8")
    names: dict[str, Any] = {"__name__": "net"}
    exec(compile(WRONG, "net.py", "exec"), names)
    return names


def said(pieces: tuple[str, str, str], text: str) -> None:
    for piece in pieces:
        assert re.search(piece, re.sub(r"\s+", " ", text)), f"{piece!r} is missing in: {text}"


@pytest.mark.parametrize("name", BY_FUNCTION)
def test_a_wrong_problem_is_refused_on_the_command_line(run, name: str) -> None:
    said(BY_FUNCTION[name], refused(run("measure", f"net.py:{name}")))


@pytest.mark.parametrize("name", [name for name in BY_FUNCTION if name not in ("huge", "array_inputs")])
def test_a_wrong_problem_is_refused_in_python_before_any_training(name: str, wrong_file: Any) -> None:
    _, loss, data = wrong_file[name]()
    settings = hessinit.RunSettings(progress=False)
    with pytest.raises(hessinit.ProblemError, match=BY_FUNCTION[name][0]) as refusal:
        hessinit.compare(lambda: wrong_file[name]()[0], loss, data, batch_size=20, seeds=1, settings=settings)
    said(BY_FUNCTION[name], str(refusal.value))


def test_what_can_be_measured_but_is_not_meant_is_noted(run, wrong_file: dict[str, Any]) -> None:
    result = run("measure", "net.py:eval_mode")
    assert result.exit_code == 0
    said(EVAL_MODE, result.stdout)
    (note,) = (one for one in hessinit.measure(*wrong_file["eval_mode"]()).notes if "eval mode" in one)
    said(EVAL_MODE, note)
    assert "Note: " not in re.sub("Note: Not counted", "", run("measure", "net.py:problem").stdout)


def test_a_softmax_before_a_loss_that_applies_one_is_not_sound(run, wrong_file: dict[str, Any]) -> None:
    result = run("measure", "net.py:softmax_twice")
    assert result.exit_code == 0
    _, _, told = result.stdout.partition("Not sound:")
    said(SOFTMAX_TWICE, told)
    problem = wrong_file["softmax_twice"]()
    report = hessinit.measure(*problem)
    (finding,) = report.findings
    assert finding.kind == "softmax twice"
    said(SOFTMAX_TWICE, str(finding))
    assert report.verdict.startswith(f"Not sound: {finding}")
    with pytest.raises(AssertionError, match="not sound:\n.*applies a softmax itself"):
        hessinit.assert_sound(*problem, lr=0.1)  # which trains: what is lost shows later
    assert "Not sound" not in run("measure", "net.py:problem").stdout


def test_huge_inputs_are_named_where_the_loss_can_still_be_measured() -> None:
    model, inputs = nn.Linear(2, 1), 1e10 * torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    notes = hessinit.measure(model, nn.MSELoss(), (inputs, torch.zeros(2, 1))).notes
    assert "The inputs are as large as 3e+10; training needs about 1" in notes[0]


def test_probabilities_under_another_loss_and_masks_are_no_reason_for_a_note() -> None:
    model, inputs = nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)), torch.eye(3)
    assert measure(model, nn.MSELoss(), (inputs, torch.zeros(3, 2)), layers="**").notes == ()
    masked = (inputs, torch.full((3, 2), -1e9)), torch.zeros(3, 2)
    call = lambda model, x: model[0](x[0]) + 0 * x[1].clamp(min=-1)  # noqa: E731
    assert measure(model, nn.MSELoss(), masked, layers="**", forward=call).notes == ()
