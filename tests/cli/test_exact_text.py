"""Every command's output, word for word: the files in `expected/` hold what is printed, and where.

After a change that is meant, write them anew and read the difference:

    HESSINIT_REFRESH=1 .venv/bin/pytest tests/cli/test_exact_text.py && git diff tests/cli/expected

Nothing is masked but seconds, which are 0, and gradients, which are left out: the clock stands still.
A number may differ by 2 %, as training does between processors; a figure more or less moves its column.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path

import pytest
import torch

from running_documents import NUMBER, differences

EXPECTED = Path(__file__).with_name("expected")
TRAINED = "--steps 20 --batch-size 4"
RUNS = f"{TRAINED} --seeds 2 --workers 1"

# name: the commands, one after the other in the same folder; the last one is shown.
MEASURE = "measure net.py:problem"
COMMANDS = {
    "measure": [MEASURE],
    "measure-dry-run": [f"{MEASURE} --dry-run"],
    "measure-both": [f"{MEASURE} --curvature both --layers 2"],
    "measure-stable": ["measure net.py:regression --lr 0.1"],
    "measure-adamw": ["measure net.py:problem --optimizer adamw --lr 0.1"],
    "advise": ["advise net.py:problem --optimizer momentum --lr 0.001"],
    "measure-unstable": ["measure net.py:regression --lr 0.5"],
    "measure-odd-names": ["measure net.py:odd_names"],
    "measure-unfinished": ["measure net.py:unfinished"],
    "measure-jacobians": [f"{MEASURE} --jacobians --diagnostics"],
    "initialize": ["initialize net.py:problem --lr 0.1 --scheme keep --scaling all --no-trials"],
    "initialize-data": ["initialize net.py:problem --lr 0.02 --batch-size 4 --trial-steps 6"],
    "initialize-auto": ["initialize net.py:problem --lr auto --scheme keep --batch-size 4 --trial-steps 6"],
    "initialize-adam": ["initialize net.py:problem --lr 0.01 --optimizer adam --scheme keep --no-trials"],
    "initialize-weights": [
        "initialize net.py:problem --target 40 --scheme keep --scaling last --weights w.safetensors"
    ],
    "initialize-not-met": ["initialize net.py:regression --target 2 --scheme keep"],
    "initialize-dry-run": ["initialize net.py:problem --target 1 --rule layers --scheme keep --dry-run"],
    "track": [f"track net.py:problem --lr 0.02 --every 5 {TRAINED}"],
    "track-initialize": [
        f"track net.py:problem --lr 0.1 --every 10 --initialize --log c.jsonl --seed 1 {TRAINED}"
    ],
    "track-each-layer": [f"track net.py:problem --lr 0.02 --every 10 --each-layer {TRAINED}"],
    "compare": [f"compare net.py:problem {RUNS} --schemes default,glorot --learning-rates 0.01,0.1"],
    "sweep": [f"sweep net.py:problem {RUNS} --stds 0.5,0.1 --learning-rate 0.05"],
    "reproduce": ["reproduce table-2 --data digits --seeds 3 --workers 1"],
    "new": ["new"],
    "show": ["initialize net.py:problem --target 2 --scheme keep --save i.json", "show i.json"],
}  # fmt: skip
NARROW = ("measure-odd-names", "advise", "initialize", "initialize-data", "track", "compare", "sweep")
CASES = [(name, 100) for name in COMMANDS] + [(name, 40) for name in NARROW]


@pytest.fixture(autouse=True)
def _still_clock(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)


@pytest.mark.parametrize(("name", "width"), CASES)
def test_a_command_prints_word_for_word_what_is_expected(run, name, width):
    *before, last = COMMANDS[name]
    for command in before:
        run(*shlex.split(command), columns=width)
    result = run(*shlex.split(last), columns=width)
    shown = f"$ hessinit {last}\n{result.stdout}--- stderr\n{result.stderr}"
    shown += f"--- exit status {result.exit_code}\n"
    file = EXPECTED / f"{name}-{width}.txt"
    if os.environ.get("HESSINIT_REFRESH"):
        file.write_text(shown, encoding="utf-8", newline="\n")
    expected = file.read_text(encoding="utf-8")
    assert differences(expected, shown) == []
    widths = [[len(number) for number in NUMBER.findall(text)] for text in (expected, shown)]
    layouts = [NUMBER.sub("#", text) for text in (expected, shown)]
    assert layouts[0] == layouts[1] or widths[0] != widths[1]
    assert "Traceback" not in shown
    assert "\x1b" not in shown
    # A command to be copied stays whole.
    lines = [line for line in result.stdout.splitlines() if not line.startswith("Next: ")]
    assert max(map(len, lines), default=0) <= width


def test_the_expected_norms_are_those_of_the_dense_hessian(net):
    """The numbers themselves, by another way: all second derivatives of the loss of `problem`."""
    model, loss, (inputs, targets) = net.problem()
    text = (EXPECTED / "measure-100.txt").read_text(encoding="utf-8")
    for name, parameter in model.named_parameters():

        def loss_of(weight: torch.Tensor, name: str = name) -> torch.Tensor:
            return loss(torch.func.functional_call(model, {name: weight}, inputs), targets)

        dense = torch.autograd.functional.hessian(loss_of, parameter.detach())
        dense = dense.reshape(parameter.numel(), parameter.numel())
        norm = torch.linalg.eigvalsh(dense)[-1].item()  # one layer of a linear network: Gauss-Newton is exact
        assert re.search(rf"^ {name.split('.')[0]} .* {norm:.1f}$", text, flags=re.MULTILINE)
    regression = (EXPECTED / "measure-stable-100.txt").read_text(encoding="utf-8")
    assert re.search(r"^ weight +\(1, 4\) +12\.5$", regression, flags=re.MULTILINE)  # the closed form
