"""The exact Hessian through a layer's own output, and where it must not go that way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pieces import assert_right
from torch import Tensor, nn

import hessinit
from hessinit.curvature.engines import HessianEngine, LanczosSettings, SeenHessian
from hessinit.curvature.evaluation import evaluate
from hessinit.problem.problem import Problem

LOSS = nn.CrossEntropyLoss()
LABELS = torch.tensor([0, 1, 2, 0, 1])
GENERATOR = torch.Generator().manual_seed(0)


def features(*shape: int) -> Tensor:
    return torch.randn(*(shape or (5, 12)), dtype=torch.float64, generator=GENERATOR)


class Twofold(nn.Module):
    """The first layer's output goes on in two ways, one of them around the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.tanh(self.second(torch.sin(hidden))) * hidden + hidden.pow(2))


class PartlyConstant(nn.Module):
    """One use of the weight is in the graph, another is under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.first(x).sigmoid()
        return self.last(torch.tanh(self.first(x)) * gate)


class Stored(nn.Module):
    """Weights kept as (in, out), wider in than there are rows, and not square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.randn(*shape)) for shape in ((12, 4), (4, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.last


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3))


def per_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


EQUAL = features(2, 12)[[0, 1, 0, 1, 1]]
PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[Tensor, Tensor]]] = {
    "an output used twice": (Twofold, LOSS, (features(), LABELS)),
    "a use outside of the graph": (PartlyConstant, LOSS, (features(), LABELS)),
    "stored as (in, out)": (Stored, LOSS, (features(), LABELS)),
    "equal examples": (network, LOSS, (EQUAL, LABELS)),
    "an example of zeros": (network, LOSS, (features() * torch.tensor([[0.0], [1], [1], [0], [1]]), LABELS)),
    "one example": (network, LOSS, (features(1, 12), LABELS[:1])),
    "as many rows as inputs": (network, LOSS, (features(12, 12), torch.arange(12) % 3)),
    "positions folded into rows": (network, per_token, (features(2, 3, 12), torch.arange(6).view(2, 3) % 3)),
    "inputs far from the origin": (network, LOSS, (features() * 1e-2 + 1.0, LABELS)),
    "several outputs, squares": (network, nn.MSELoss(), (features(), features(5, 3))),
    "concave": (network, lambda z, t: -z.pow(2).mean(), (features(), LABELS)),
    "linear": (network, lambda z, t: z.sum(), (features(), LABELS)),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_both_ends_are_those_of_the_dense_hessian(name: str) -> None:
    build, loss, batch = PROBLEMS[name]
    # What is detached has no derivative, though the output depends on it: the check would refuse that.
    assert_right(build().double(), loss, batch, curvature="hessian", check="outside" not in name)


def test_several_batches_add_up() -> None:
    batches = [(features(), LABELS), (features(3, 12), LABELS[:3])]
    assert_right(network().double(), LOSS, batches, curvature="hessian")


def test_the_search_is_as_small_as_what_the_inputs_see() -> None:
    problem = Problem(network().double(), LOSS, (EQUAL, LABELS))
    engine = HessianEngine(evaluate(problem), LanczosSettings(1e-3, 200, 0))
    operator = engine._through_output("0.weight")
    assert isinstance(operator, SeenHessian)
    assert operator.shape == (8, 8)  # two different inputs, four outputs; the weight has 48


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_a_layer_whose_inputs_are_all_zero_is_flat(curvature: str) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    report = assert_right(model, LOSS, (features(5, 3), LABELS), curvature=curvature)
    assert [row.norm for row in report.layers] == [0.0, 0.0]


def test_an_end_that_is_not_yet_known_is_not_claimed_to_be_zero() -> None:
    """One step cannot tell whether a Hessian has negative eigenvalues; the error has to say so."""
    model, batch = network().double(), (features(), LABELS)
    with pytest.warns(hessinit.ConvergenceWarning, match="max_iterations=1"):
        row = hessinit.measure(model, LOSS, batch, curvature="hessian", max_iterations=1, layers="0")["0"]
    for end in (row.top, row.bottom):
        assert not end.converged
        assert end.error > 0


def test_a_layer_the_forward_does_not_use_is_flat_and_says_so() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(12, 3), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    report = assert_right(Unused().double(), LOSS, (features(), LABELS), curvature="hessian")
    assert report["unused"].norm == 0.0
    assert "does not use" in report["unused"].reason
