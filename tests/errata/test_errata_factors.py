"""The factors for ReLU, dropout and spectral norms: right and as printed, 20 layers deep."""

from __future__ import annotations

import math

import pytest
import torch
from pushing import (
    DEPTH,
    EXAMPLES,
    WIDTH,
    Set,
    both_passes,
    deep,
    end_at,
    linear,
    mean_passes,
    stay_within_two,
    weights_of,
)
from torch import Tensor, nn

from hessinit.init.apply_scheme import apply_scheme_

# 1. ReLU: σ·√2, printed as σ/√2


@pytest.mark.parametrize("scheme", ["he", "forward"])
def test_root_two_keeps_both_passes_through_20_relu_layers(scheme: str) -> None:
    assert stay_within_two(
        mean_passes(lambda: deep(nn.ReLU, linear), lambda model: apply_scheme_(model, scheme))
    )


def test_the_backward_scheme_finds_root_two_in_the_relu_that_follows() -> None:
    assert stay_within_two(
        mean_passes(lambda: deep(linear, nn.ReLU), lambda model: apply_scheme_(model, "backward"))
    )


def test_one_over_root_two_vanishes_as_a_quarter_a_layer_in_both_passes() -> None:
    ratios = mean_passes(
        lambda: deep(nn.ReLU, linear), lambda model: apply_scheme_(model, "he", gains={"*": 1 / math.sqrt(2)})
    )
    assert end_at(ratios, 0.25**DEPTH)


# 2. Dropout: σ·√(1−p), printed as σ/√(1−p)


def dropped(keep: float) -> nn.Sequential:
    return deep(nn.ReLU, lambda: nn.Dropout(1 - keep), linear)


@pytest.mark.parametrize("keep", [0.6, 0.2])
def test_the_root_of_the_keep_rate_keeps_both_passes_through_20_dropouts(keep: float) -> None:
    assert stay_within_two(mean_passes(lambda: dropped(keep), lambda model: apply_scheme_(model, "he")))


@pytest.mark.parametrize("keep", [0.6, 0.2])
def test_dividing_by_the_root_of_the_keep_rate_explodes_in_both_passes(keep: float) -> None:
    printed = {"*": math.sqrt(2 / keep)}
    ratios = mean_passes(
        lambda: dropped(keep), lambda model: apply_scheme_(model, "he", gains=printed, dropout=False)
    )
    assert end_at(ratios, keep ** (-2 * DEPTH))


@pytest.mark.parametrize("keep", [0.6, 0.2])
def test_without_a_correction_both_passes_grow_by_one_over_the_keep_rate(keep: float) -> None:
    ratios = mean_passes(lambda: dropped(keep), lambda model: apply_scheme_(model, "he", dropout=False))
    assert end_at(ratios, keep**-DEPTH)


class UnscaledDropout(nn.Module):
    """Units switched off, the others left as they are: the masks of the first dropout papers."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.bernoulli(torch.full_like(inputs, self.keep))


@pytest.mark.parametrize("keep", [0.6, 0.2])
def test_for_unscaled_masks_the_printed_dropout_factor_is_the_right_one(keep: float) -> None:
    def set_to(factor: float) -> Set:
        return lambda model: [
            nn.init.normal_(layer.weight, std=math.sqrt(2 / WIDTH) * factor) for layer in weights_of(model)
        ]

    def unscaled() -> nn.Sequential:
        return deep(nn.ReLU, lambda: UnscaledDropout(keep), lambda: nn.Linear(WIDTH, WIDTH, bias=False))

    assert stay_within_two(mean_passes(unscaled, set_to(1 / math.sqrt(keep))))
    assert end_at(mean_passes(unscaled, set_to(math.sqrt(keep))), keep ** (2 * DEPTH))


# 3. The spectral norm of an m × n matrix of unit-variance entries: √m + √n, printed as its reciprocal


@pytest.mark.parametrize("shape", [(512, 512), (2048, 128), (128, 2048), (1000, 250), (300, 1)])
@pytest.mark.parametrize("kind", ["normal", "signs"])
def test_the_spectral_norm_is_the_sum_of_the_roots_and_not_its_reciprocal(
    shape: tuple[int, int], kind: str
) -> None:
    torch.manual_seed(0)
    draws = [torch.randn(shape) if kind == "normal" else torch.randint(2, shape) * 2.0 - 1 for _ in range(4)]
    norm = sum(torch.linalg.matrix_norm(draw, 2).item() for draw in draws) / len(draws)
    total = math.sqrt(shape[0]) + math.sqrt(shape[1])
    assert 0.93 < norm / total < 1.03
    assert norm / (1 / total) > 300


def test_20_layers_over_the_sum_of_the_roots_have_norms_whose_product_stays_and_none_is_amplified() -> None:
    torch.manual_seed(0)
    widths = [512, 256] * (DEPTH // 2) + [512]
    model = nn.Sequential(
        *[nn.Linear(m, n, bias=False) for m, n in zip(widths[:-1], widths[1:], strict=True)]
    )
    growth = {"right": 0.0, "printed": 0.0}
    for layer in weights_of(model):
        nn.init.normal_(layer.weight)
        norm = torch.linalg.matrix_norm(layer.weight.double(), 2).item()
        total = sum(math.sqrt(side) for side in layer.weight.shape)
        growth["right"] += math.log(norm / total)
        growth["printed"] += math.log(norm / (1 / total))
        with torch.no_grad():
            layer.weight /= total
    assert abs(growth["right"]) < math.log(2)
    assert growth["printed"] > math.log(1e60)
    # A bound, and for long products a poor one, as the paper says: typical data shrink far below it.
    forward, backward = both_passes(model, torch.randn(EXAMPLES, widths[0]))
    assert forward < 1e-3
    assert backward < 1e-3
