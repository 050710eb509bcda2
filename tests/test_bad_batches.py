"""Data that cannot be measured is refused before any work: the value, the rule, the way out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hessinit
from tiny import LOSS, batch, inputs, labels, network


@pytest.fixture(autouse=True)
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: pytest.fail("work was begun"))


def check_refused(message: str, data: Any, loss: Any = LOSS, **options: Any) -> None:
    with pytest.raises(hessinit.ProblemError, match=message):
        hessinit.measure(network(), loss, data, **options)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (None, "NoneType"),
        (3, "int"),
        ("digits", "str"),
        (inputs(), "Tensor"),
        ({"x": inputs()}, "dict"),
        (TensorDataset(inputs(), labels()), "TensorDataset"),
    ],
)
def test_a_batch_must_be_a_pair_or_an_iterable_of_pairs(data: Any, found: str) -> None:
    check_refused(f"batch is a {found}; it must be \\(inputs, targets\\), or an iterable of such pairs", data)


def test_three_tensors_are_told_to_be_grouped() -> None:
    check_refused("a tuple of 3 tensors; .*\\(\\(x1, x2\\), targets\\)", (inputs(), inputs(), labels()))
    several = [batch(), batch(), (inputs(), inputs(), labels())]
    check_refused("batch 2 is a tuple of 3; every batch must be a pair", several)


def test_a_loader_of_dicts_is_told_to_pick_the_targets_out() -> None:
    rows = [{"x": x, "labels": y} for x, y in zip(*batch(), strict=True)]
    check_refused(
        "batch 0 is a dict with keys \\['x', 'labels'\\]; .*b\\['labels'\\]", DataLoader(rows, batch_size=3)
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused_with_a_way_out() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    check_refused("a nested tensor.*a padded tensor with a mask, or a packed sequence", (nested, labels(2)))


def test_no_batches_and_too_many_are_refused() -> None:
    check_refused("batch is an empty iterable", [])
    check_refused("batch is an empty iterable", iter(()))
    check_refused("more than 1000 batches.*itertools.islice\\(batch, 8\\)", itertools.repeat(batch(1)))


def test_an_empty_batch_is_refused() -> None:
    check_refused(
        "the batch is empty .*shape \\(0,\\)\\); pass at least one example", (inputs()[:0], labels()[:0])
    )
    check_refused("batch 1: the batch is empty", [batch(), (inputs()[:0], labels()[:0])])
    check_refused("batch 0: the batch is empty", [(inputs()[:0], None)])


def test_arrays_are_told_to_become_tensors() -> None:
    check_refused(
        "no tensor that counts examples; convert arrays with torch.as_tensor", (numpy.ones((6, 4)), [0, 1])
    )


def test_inputs_and_targets_of_different_length_are_refused() -> None:
    check_refused(
        "inputs have 6 examples \\(shape \\(6, 4\\)\\) and targets 5 \\(shape \\(5,\\)\\)",
        (inputs(6), labels(5)),
    )
    check_refused("batch 1: inputs have 4 examples", [batch(), (inputs(4), labels(6))])
    check_refused(
        "inputs have 4 examples", ({"x": inputs(4)}, labels(6)), forward=lambda model, x: model(x["x"])
    )


def test_targets_that_only_the_loss_can_count_are_refused_with_both_shapes() -> None:
    # Twelve targets for six inputs might be two positions an example, but this output has none.
    check_refused(
        "output of shape \\(6, 3\\) and targets of shape \\(12,\\): .*same examples", (inputs(6), labels(12))
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_inputs_that_are_not_finite_are_refused_with_their_number(value: float) -> None:
    broken = inputs()
    broken[1, 2] = value
    check_refused("the inputs hold 1 NaN or inf among 24 values; clean them first", (broken, labels()))
    check_refused("batch 1: the inputs hold 1 NaN or inf", [batch(), (broken, labels())])


def test_inputs_too_large_for_the_models_precision_are_refused() -> None:
    check_refused(
        "beyond the range of torch.float32; .*dtype=torch.float64", (inputs().double() * 1e300, labels())
    )


def test_masks_of_minus_infinity_are_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    mask = torch.zeros(6, 4).index_fill(1, torch.tensor([2]), -torch.inf)
    data = ((inputs(), mask), labels())
    report = hessinit.measure(network(), LOSS, data, forward=lambda model, x: model(x[0] * x[1].exp()))
    expected = hessinit.measure(network(), LOSS, (inputs() * mask.exp(), labels()))
    assert report.network.norm == expected.network.norm


def test_nan_targets_that_a_loss_masks_are_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    target = torch.ones(6, 3)
    target[4:] = torch.nan

    def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        known = ~target.isnan()
        return (output[known] - target[known]).square().mean()

    report = hessinit.measure(network(), masked, (inputs(), target))
    expected = hessinit.measure(network(), nn.MSELoss(), (inputs()[:4], target[:4]))
    assert report.network.norm == pytest.approx(expected.network.norm, rel=1e-3)
