from __future__ import annotations

import json
import re

import pytest
import torch
from torch.func import functional_call, jacrev

from hessinit import CurvatureReport, measure
from hessinit.demo import problem

# Numbers differ between machines in the last digit; with them go the table's spaces and the wrapping.
EXPECTED = """
A LeNet (sigmoids, PyTorch's default weights), measured on # real handwritten digits.
‖H‖ is how sharply the loss bends with a layer's weights; gap is exact over Gauss-Newton ‖H‖.

layer weight ‖H‖ λmin … λmax gap verdict
─
conv1 (#, #, #, #) # # … # # vanishing
conv2 (#, #, #, #) # # … # # gentle
fc1 (#, #) # # … # # gentle
fc2 (#, #) # # … # # ok
─
network # # # … # # ok

fc2 is # times sharper than conv1. conv1 vanishes (‖H‖ is below #): it hardly moves the loss. \
Gradient descent is unstable above lr = #/‖H‖ = #; # is best guaranteed. \
conv1's exact Hessian is # times its Gauss-Newton approximation. \
# layers in # s by the engine: why. \
Exact Hessian and Gauss-Newton on # examples; loss #.

Next, your own network. Write net.py:

def problem():
...
return model, loss, (inputs, targets)

and run: hessinit measure net.py:problem
"""


def mask(text: str) -> str:
    """Numbers as #, spaces and rules as one, the verdict on one line, the engine's reason as why."""
    text = re.sub(r"(?<![\w.])-?\d+(,\d{3})*(\.\d+)?(e[-+]\d+)?(?!\w)", "#", text)
    text = re.sub(r"─+", "─", re.sub(r" +", " ", text))
    paragraphs = ["\n".join(line.strip() for line in part.splitlines()) for part in text.split("\n\n")]
    paragraphs = [part.replace("\n", " ") if "sharper" in part else part for part in paragraphs]
    return re.sub(r"the \w+ engine: [^.]*", "the engine: why", "\n\n".join(paragraphs))


def test_the_demo_says_what_it_does_the_report_and_the_next_step(run):
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert mask(result.stdout).strip() == EXPECTED.strip()
    assert result.stderr == ""


def test_the_demo_fits_a_narrow_terminal(run):
    result = run("demo", columns=60)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 60
    assert "Left out of 60 columns: weight, λmin … λmax." in result.stdout
    assert "and run: hessinit measure net.py:problem\n" in result.stdout


def test_the_demo_s_json_is_what_measure_gives(run):
    result = run("demo", "--json", "--seed", 1)
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    measured = measure(*problem(seed=1), curvature="both", seed=1).to_dict()
    assert {**shown, "seconds": 0} == {**measured, "seconds": 0}
    assert shown["examples"] == 256
    assert shown["network"]["shape"] == [5960]


def test_the_demo_s_smallest_norm_is_right_though_it_is_measured_in_fp32(run):
    """conv1 has 5e-5 beside a network's 2: its dense Hessian in fp64 is the truth."""
    model, loss, (images, labels) = problem(seed=0)
    model = model.double()
    fixed = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def value(weight: torch.Tensor) -> torch.Tensor:
        return loss(functional_call(model, {**fixed, "conv1.weight": weight}, images.double()), labels)

    dense = jacrev(jacrev(value))(fixed["conv1.weight"]).reshape(72, 72)
    truth = torch.linalg.eigvalsh(dense).abs().max().item()
    report = CurvatureReport.from_json(run("demo", "--json").stdout)
    assert report["conv1"].norm == pytest.approx(truth, rel=1e-3)
    assert report["conv1"].verdict == "vanishing"


def test_another_seed_is_another_network_and_the_same_seed_the_same_one():
    weights = [problem(seed)[0].get_parameter("fc2.weight") for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_demo_s_problem_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    problem(seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_demo_writes_a_page(run, tmp_path):
    page = tmp_path / "demo.html"
    result = run("demo", "--html", page)
    assert result.exit_code == 0
    assert result.stderr == f"Wrote {page}.\n"
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    assert "conv1" in page.read_text()


def test_the_demo_s_problem_can_be_measured_by_name(run):
    result = run("measure", "hessinit.demo:problem", "--json", "--curvature", "both")
    assert result.exit_code == 0, result.output
    assert {**json.loads(result.stdout), "seconds": 0} == {
        **json.loads(run("demo", "--json").stdout),
        "seconds": 0,
    }


@pytest.mark.parametrize("seed", ["-1", "x", "4294967296"])
def test_a_seed_that_is_none_is_wrong_usage(run, seed):
    result = run("demo", "--seed", seed)
    assert result.exit_code == 2
    assert "Invalid value for '--seed'" in result.stderr
