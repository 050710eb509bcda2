"""By norms (the paper) the forward rule is 1/outputs, by units (Glorot) it is 1/inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from pushing import DEPTH, end_at, mean_passes, stay_within_two
from torch import nn

from hessinit.init.apply_scheme import apply_scheme_

GROWING = [round(32 * 16 ** (layer / DEPTH)) for layer in range(DEPTH + 1)]


def mean_growth(widths: Sequence[int], scheme: str) -> tuple[float, float]:
    """Squared lengths, forward and backward, of small data: tanh is the identity, as in the corollary."""

    def growing() -> nn.Sequential:
        pairs = zip(widths[:-1], widths[1:], strict=True)
        return nn.Sequential(*[module for m, n in pairs for module in (nn.Tanh(), nn.Linear(m, n))])

    forward, backward = mean_passes(
        growing, lambda model: apply_scheme_(model, scheme, gains={"*": 1.0}), widths[0], scale=1e-3
    ).tolist()
    return forward, backward


@pytest.mark.parametrize("widths", [GROWING, GROWING[::-1]], ids=["growing", "shrinking"])
def test_each_rule_keeps_its_own_measure_and_misses_the_other_by_the_ratio_of_the_widths(
    widths: Sequence[int],
) -> None:
    ratio = widths[-1] / widths[0]
    by_outputs, by_inputs = mean_growth(widths, "forward"), mean_growth(widths, "backward")
    lengths = torch.tensor([by_outputs[0], by_inputs[1]])
    units = torch.tensor([by_inputs[0] / ratio, by_outputs[1] * ratio])
    assert stay_within_two(lengths)
    assert stay_within_two(units)
    # The same numbers, the other measure: off by 16 either way.
    assert not stay_within_two(torch.tensor([by_outputs[0] / ratio]))
    assert end_at(torch.tensor([by_inputs[0]]), ratio)
    assert end_at(torch.tensor([by_outputs[1]]), 1 / ratio)


def test_the_forward_rule_by_units_is_the_backward_rule_by_norms_and_the_compromise_is_the_same() -> None:
    model = nn.Sequential(nn.Linear(64, 16, bias=False), nn.Linear(16, 128, bias=False))

    def stds(scheme: str) -> list[float]:
        return [layer.std[0] for layer in apply_scheme_(model, scheme, dry_run=True)]

    assert stds("lecun") == pytest.approx(stds("backward"))
    assert stds("lecun") == pytest.approx([1 / 8, 1 / 4])
    assert stds("forward") == pytest.approx([1 / 4, math.sqrt(1 / 128)])
    assert stds("glorot") == pytest.approx(stds("compromise"))
