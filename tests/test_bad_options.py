"""Options outside their range are refused before any work, with the nearest right value if there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hessinit
from tiny import LOSS, batch, inputs, labels, network


def check_refused(message: str, **options: Any) -> None:
    with pytest.raises(hessinit.ProblemError, match=message):
        hessinit.measure(network(), LOSS, batch(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curvature": "hessain"}, "curvature='hessain' is unknown; .*Did you mean 'hessian'?"),
        ({"curvature": None}, "curvature=None is unknown; choose from 'gauss-newton', 'hessian', 'both'"),
        ({"estimator": "lanzcos"}, "estimator='lanzcos' is unknown; .*Did you mean 'lanczos'?"),
        ({"dropout": "freez"}, "dropout='freez' is unknown; .*Did you mean 'freeze'?"),
        ({"dtype": torch.bfloat16}, "dtype=torch.bfloat16 is not supported; choose torch.float32"),
        ({"dtype": "float64"}, "dtype=float64 is not supported; choose torch.float32"),
        ({"curvature": "hessian", "estimator": "gram"}, "'gram' measures Gauss-Newton.*'auto' or 'lanczos'"),
    ],
)
def test_an_unknown_choice_is_answered_with_the_known_ones(options: dict[str, Any], message: str) -> None:
    check_refused(message, **options)


@pytest.mark.parametrize("tolerance", [0, -1e-3, 1, 5.0, float("nan"), float("inf"), "small", None])
def test_tolerance_is_a_fraction(tolerance: Any) -> None:
    check_refused("tolerance=.* must be a relative error between 0 and 1, such as 1e-3", tolerance=tolerance)


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        ("max_iterations", 0, 1),
        ("max_iterations", 0.5, 1),
        ("top", -1, 0),
        ("top", 2.5, 0),
        ("seed", -1, 0),
        ("seed", None, 0),
        ("seed", 2**70, 0),
    ],
)
def test_counts_and_seeds_are_whole(option: str, value: Any, least: int) -> None:
    check_refused(f"{option}={value} must be a whole number, {least} or more", **{option: value})


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "layers=\\[\\] names no layer; leave it out to measure every weight"),
        ("3", "layers='3' fits no parameter of the model; its layers are 0, 2\\."),
        (["0", "encoder.*"], "layers='encoder.\\*' fits no parameter"),
        (5, "layers=5 holds a int; pass names or globs"),
        (["0", None], "holds a NoneType; pass names or globs"),
    ],
)
def test_layers_are_names_or_globs_that_fit(layers: Any, message: str) -> None:
    check_refused(message, layers=layers)


def test_the_nearest_layer_is_offered() -> None:
    model = nn.Sequential()
    model.add_module("encoder", nn.Linear(4, 5))
    model.add_module("decoder", nn.Linear(5, 3))
    with pytest.raises(hessinit.ProblemError, match="layers are encoder, decoder. Did you mean 'encoder'?"):
        hessinit.measure(model, LOSS, batch(), layers="encodr")


@pytest.mark.parametrize("loss", [nn.NLLLoss(), nn.L1Loss()])
def test_a_loss_that_is_linear_in_the_output_is_refused_not_measured_as_zero(loss: nn.Module) -> None:
    model = nn.Sequential(network(), nn.LogSoftmax(1))
    target = labels() if isinstance(loss, nn.NLLLoss) else inputs(6, 3)
    with pytest.raises(
        hessinit.ProblemError, match="linear in the model's output.*move log_softmax into the loss"
    ):
        hessinit.measure(model, loss, (inputs(), target))
    with pytest.raises(hessinit.ProblemError, match='measure the exact Hessian: curvature="hessian"'):
        hessinit.measure(model, loss, (inputs(), target), curvature="both")


def test_the_exact_hessian_of_a_loss_that_is_linear_in_the_output_is_measured() -> None:
    within = hessinit.measure(network(), LOSS, batch(), curvature="hessian")
    outside = hessinit.measure(
        nn.Sequential(network(), nn.LogSoftmax(1)), nn.NLLLoss(), batch(), curvature="hessian"
    )
    assert outside.network.norm == pytest.approx(within.network.norm, rel=1e-3)


def test_more_eigenvalues_than_steps_are_refused() -> None:
    with pytest.raises(
        hessinit.ProblemError, match="top=3 with max_iterations=1.*pass max_iterations=3 or more"
    ):
        hessinit.measure(network(), LOSS, batch(), top=3, max_iterations=1)
