"""Which engine, and the reason that the report gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pieces import assert_right
from torch import Tensor, nn

import hessinit
from hessinit.curvature import engines as choose

LOSS = nn.CrossEntropyLoss()
LABELS = torch.tensor([0, 1, 2, 0])


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), LABELS


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features).mean()


REASONS: dict[str, tuple[nn.Module, Callable[..., Tensor], str]] = {
    "not convex": (network(), lambda z, t: -z.pow(2).mean(), "the loss is not convex in the output"),
    "coupled": (network(), lambda z, t: z.mean(0).pow(2).sum(), "the loss couples the examples"),
    "no examples": (Scalar(), lambda z, t: z.pow(2), "the output has no dimension that counts examples"),
}


@pytest.mark.parametrize("name", REASONS)
def test_auto_says_why_it_is_lanczos_and_gram_is_refused_for_the_same_reason(name: str) -> None:
    model, loss, reason = REASONS[name]
    report = hessinit.measure(model, loss, batch())
    assert (report.engine, report.engine_reason) == ("lanczos", reason)
    with pytest.raises(
        hessinit.ProblemError, match=f"estimator='gram' cannot measure this problem: {reason}"
    ):
        hessinit.measure(model, loss, batch(), estimator="gram")


def test_many_outputs_per_example_go_by_lanczos_unless_gram_is_asked_for() -> None:
    model, data = network(300), batch()
    chosen = hessinit.measure(model, LOSS, data)
    reason = "300 outputs per example are too many for one backward pass each"
    assert (chosen.engine, chosen.engine_reason) == ("lanczos", reason)
    insisted = hessinit.measure(model, LOSS, data, estimator="gram")
    assert insisted.engine == "gram"
    assert insisted.network.norm == pytest.approx(chosen.network.norm, rel=2e-3)


def test_many_examples_are_not_blamed_on_the_outputs_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_MOST_ROWS", 11)
    report = hessinit.measure(network(), LOSS, batch())
    assert report.engine == "lanczos"
    assert report.engine_reason.startswith("12 outputs in all are too many")


class Mixed(nn.Module):
    """The first layer's calls mix the examples; the head's do not."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(inputs, 3), nn.Linear(3, outputs)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        return self.head(torch.tanh(hidden - hidden.mean(dim=0)))


@pytest.mark.parametrize("examples", [3, 4, 6, 12])
@pytest.mark.parametrize("inputs", [2, 5])
def test_the_rank_is_bounded_by_the_outputs_even_where_examples_mix(examples: int, inputs: int) -> None:
    """Jᵀ S Sᵀ J has the rank of S at most, whatever J does; the bottom is 0 only when that is too few."""
    data = (torch.randn(examples, inputs).double(), torch.randn(examples, 2).double())
    report = assert_right(Mixed(inputs, 2).double(), nn.MSELoss(), data)
    assert report["first"].engine == "lanczos"
    assert report.engine_reason.endswith("1 of 2 layers by Lanczos")
    claimed = "rank at most" in report["first"].bottom.reason
    assert claimed == (2 * examples < 3 * inputs)


class Adapter(nn.Module):
    """Two products written out, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.Parameter(torch.randn(*shape).double()) for shape in ((2, 4), (3, 2)))

    def forward(self, features: Tensor) -> Tensor:
        return features @ self.down.T @ self.up.T


def test_where_no_layer_is_known_nothing_is_ascribed_to_gram() -> None:
    model, data = Adapter(), (torch.randn(4, 4).double(), LABELS)
    report = assert_right(model, LOSS, data)
    assert report.engine == "lanczos"
    assert report.engine_reason.startswith("no layer is known: their calls mix the examples, or are none of")
    with pytest.raises(hessinit.ProblemError, match="estimator='gram' cannot .* no layer is known"):
        hessinit.measure(model, LOSS, data, estimator="gram")
