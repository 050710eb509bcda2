"""The exact Hessian through a layer's own output, and where it must not go that way; losses of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pieces import assert_right
from torch import Tensor, nn

import hessinit
from calls import measure
from dense import dense_curvature, ends
from tiny import LOSS, Net, labels

GENERATOR = torch.Generator().manual_seed(0)


def features(*shape: int) -> Tensor:
    return torch.randn(*(shape or (5, 12)), dtype=torch.float64, generator=GENERATOR)


def twofold(m: Any, x: Tensor) -> Tensor:
    """The first layer's output goes on in two ways, one of them around the second layer."""
    hidden = m.first(x)
    return m.last(torch.tanh(m.second(torch.sin(hidden))) * hidden + hidden.pow(2))


def partly_constant(m: Any, x: Tensor) -> Tensor:
    """One use of the weight is in the graph, another is under no_grad."""
    with torch.no_grad():
        gate = m.first(x).sigmoid()
    return m.last(torch.tanh(m.first(x)) * gate)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3))


def per_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def built(run: Any, **parts: tuple[int, int]) -> Callable[[], nn.Module]:
    return lambda: Net(run, **{name: nn.Linear(*shape) for name, shape in parts.items()})


def stored() -> nn.Module:
    """Weights kept as (in, out), wider in than there are rows, and not square."""
    first, last = (nn.Parameter(torch.randn(*shape)) for shape in ((12, 4), (4, 3)))
    return Net(lambda m, x: torch.tanh(x @ m.first) @ m.last, first=first, last=last)


PARTLY_USED = built(lambda m, x: m.used(x), used=(12, 3), unused=(12, 3))
ZEROS = torch.tensor([[0.0], [1], [1], [0], [1]])
PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "an output used twice": (built(twofold, first=(12, 4), second=(4, 4), last=(4, 3)), LOSS, None),
    "a use outside of the graph": (built(partly_constant, first=(12, 4), last=(4, 3)), LOSS, None),
    "stored as (in, out)": (stored, LOSS, None),
    "equal examples": (network, LOSS, (features(2, 12)[[0, 1, 0, 1, 1]], labels(5))),
    "an example of zeros": (network, LOSS, (features() * ZEROS, labels(5))),
    "one example": (network, LOSS, (features(1, 12), labels(1))),
    "as many rows as inputs": (network, LOSS, (features(12, 12), labels(12))),
    "positions folded into rows": (network, per_token, (features(2, 3, 12), labels().view(2, 3))),
    "inputs far from the origin": (network, LOSS, (features() * 1e-2 + 1.0, labels(5))),
    "several outputs, squares": (network, nn.MSELoss(), (features(), features(5, 3))),
    "an unused layer, and unseen weights": (PARTLY_USED, nn.MSELoss(), (features(), features(5, 3))),
    "concave": (network, lambda z, t: -z.pow(2).mean(), None),
    "linear": (network, lambda z, t: z.sum(), None),
    "several batches": (network, LOSS, [(features(), labels(5)), (features(3, 12), labels(3))]),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_both_ends_are_those_of_the_dense_hessian(name: str) -> None:
    build, loss, batch = PROBLEMS[name]
    # What is detached has no derivative, though the output depends on it: the check would refuse that.
    options = {"curvature": "hessian", "check": "outside" not in name}
    assert_right(build().double(), loss, batch or (features(), labels(5)), **options)


def test_the_search_is_as_small_as_what_the_inputs_see() -> None:
    """Two different inputs and four outputs: eight products exhaust a layer of 48 weights."""
    data = features(2, 12)[[0, 1, 0, 1, 1]], labels(5)
    options = {"curvature": "hessian", "layers": "0", "network": False, "tolerance": 1e-12}
    row = measure(network().double(), LOSS, data, **options)["0"]
    assert row.converged
    assert row.top.products <= 8


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_a_layer_whose_inputs_are_all_zero_is_flat(curvature: str) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    report = assert_right(model, LOSS, (features(5, 3), labels(5)), curvature=curvature)
    assert [row.norm for row in report.layers] == [0.0, 0.0]


def test_an_end_that_is_not_yet_known_is_not_claimed_to_be_zero() -> None:
    """One step cannot tell whether a Hessian has negative eigenvalues; the error has to say so."""
    options = {"curvature": "hessian", "max_iterations": 1, "layers": "0"}
    with pytest.warns(hessinit.ConvergenceWarning, match="max_iterations=1"):
        row = measure(network().double(), LOSS, (features(), labels(5)), **options)["0"]
    for end in (row.top, row.bottom):
        assert not end.converged
        assert end.error > 0


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_losses_and_weights_of_any_size_are_measured_as_well_as_ordinary_ones(curvature: str) -> None:
    layers = nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 2, stride=2), nn.Tanh(), nn.Flatten()
    model, batch = nn.Sequential(*layers, nn.Linear(16, 3)), (torch.randn(5, 1, 6, 6), labels(5))

    def true_norms() -> dict[str, float]:
        truth = dense_curvature(model, LOSS, batch, curvature)
        return {name: ends(one).norm for name, one in {**truth.layers, "network": truth.network}.items()}

    def norms(scale: float = 1.0, **options: Any) -> dict[str, float]:
        loss = lambda output, target: scale * LOSS(output, target)  # noqa: E731
        report = measure(model, loss, batch, curvature=curvature, **options)
        return {row.name: row.norm / scale for row in (*report.layers, report.network)}

    for scale in (1e-30, 1e-10, 1e-3, 1e10, 1e30):
        found = norms(scale, dtype=torch.float64, tolerance=1e-8)
        assert found == pytest.approx(true_norms(), rel=1e-6, abs=0)
    for scale in (1e-3, 1e4):  # times 10 in the end
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= scale
        assert norms() == pytest.approx(true_norms(), rel=5e-3, abs=0)
