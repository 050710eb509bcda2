"""The correlation of loss and layer gradients, against scipy and dense derivatives."""

from __future__ import annotations

import pytest
import torch
from diagnosing import diagnosis
from scipy import stats
from torch import Tensor, nn

from hessinit.diagnostics.correlation import MOST_OUTPUTS, MOST_UNITS
from hessinit.diagnostics.examples import arrange
from hessinit.diagnostics.moments import Correlations
from hessinit.problem.layer_values import Place

LOSS = nn.CrossEntropyLoss()


def layer_gradients(rest: nn.Module, hidden: Tensor) -> Tensor:
    """∂z_ic/∂h_ij, example by example: (examples, outputs, entries)."""

    def one(h: Tensor) -> Tensor:
        return rest(h.unsqueeze(0)).flatten()

    return torch.stack([torch.func.jacrev(one)(h) for h in hidden]).flatten(2).detach()


def table(by_output: Tensor, by_layer: Tensor) -> tuple[float, float, int]:
    """Root mean square r, the share of p-values below 5 %, and the number of pairs: one by one, by scipy."""
    coefficients, significant = [], []
    for c in range(by_layer.shape[1]):
        for j in range(by_layer.shape[2]):
            if by_layer[:, c, j].std() > 1e-6 and by_output[:, c].std() > 1e-6:
                result = stats.pearsonr(by_output[:, c].numpy(), by_layer[:, c, j].numpy())
                coefficients.append(result.statistic)
                bounds = result.confidence_interval(0.95)  # by Fisher's z, as ours
                significant.append(bounds.low > 0 or bounds.high < 0)
    squares = torch.tensor(coefficients).square()
    return float(squares.mean().sqrt()), sum(significant) / len(significant), len(squares)


def truth(model: nn.Sequential, cut: int, batch: tuple[Tensor, Tensor]) -> tuple[float, float, int]:
    hidden = model[:cut](batch[0]).detach()
    output = model(batch[0]).detach().requires_grad_()
    (by_output,) = torch.autograd.grad(LOSS(output, batch[1]), output)
    return table(by_output, layer_gradients(model[cut:], hidden))


def small_network() -> nn.Sequential:
    layers = [nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 4)]
    return nn.Sequential(*layers).double()


def test_every_pair_of_a_small_network_is_scipys() -> None:
    model, batch = small_network(), (2 * torch.randn(90, 5).double(), torch.randint(4, (90,)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    found = diagnosis(model, LOSS, batch)
    strength, share, pairs = truth(model, 2, batch)
    assert found["0"].correlation == pytest.approx(strength, rel=1e-6)  # scipy got them in fp32
    assert found["0"].correlated == pytest.approx(share)
    assert found["0"].pairs == pairs == 24
    assert 0.05 < share < 1


def test_batches_are_pooled_over_their_examples() -> None:
    model, batch = small_network(), (torch.randn(30, 5).double(), torch.randint(4, (30,)))
    whole = diagnosis(model, LOSS, batch)
    parts = [tuple(part[start:end] for part in batch) for start, end in ((0, 1), (1, 12), (12, 30))]
    pooled = diagnosis(model, LOSS, parts)
    for name, layer in whole.items():
        for field in vars(layer):
            value, other = getattr(layer, field), getattr(pooled[name], field)
            expected = pytest.approx(value, rel=1e-9, abs=1e-15) if isinstance(value, float) else value
            assert other == expected, (name, field)


def test_after_the_last_activation_the_layer_gradient_is_a_constant() -> None:
    found = diagnosis(small_network(), LOSS, (torch.randn(30, 5), torch.randint(4, (30,))))
    for name in ("2", "4"):
        assert found[name].correlation is None
        assert found[name].correlated is None
        assert found[name].pairs == 0
        assert found[name].reason == "no correlation: its layer gradient is the same for every example"
    assert found["0"].reason == ""


def test_a_deep_linear_network_has_no_layer_gradient_that_varies_but_by_rounding() -> None:
    model = nn.Sequential(*[nn.Linear(33, 33) for _ in range(12)])
    found = diagnosis(model, LOSS, (torch.randn(50, 33), torch.randint(33, (50,))))
    assert [layer.correlation for layer in found.values()] == [None] * 12


def test_fewer_than_eight_examples_say_nothing() -> None:
    model, inputs, targets = small_network(), torch.randn(8, 5), torch.randint(4, (8,))
    assert diagnosis(model, LOSS, (inputs, targets))["0"].correlation is not None
    found = diagnosis(model, LOSS, (inputs[:7], targets[:7]))["0"]
    assert found.correlation is None
    assert found.reason == "no correlation: a correlation needs at least 8 examples"


def test_layers_after_which_examples_see_each_other_say_nothing() -> None:
    model = nn.Sequential(
        nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)
    )
    batch = torch.randn(20, 5), torch.randint(4, (20,))
    found = diagnosis(model, LOSS, batch)
    assert found["0"].reason == "no correlation: examples see each other after it"
    assert found["0"].correlation is None
    found = diagnosis(model.eval(), LOSS, batch)
    assert found["0"].correlation is not None


def test_of_many_pairs_a_seeded_sample_is_taken() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 50)
    )
    batch = torch.randn(60, 1, 8, 8), torch.randint(50, (60,))
    found = diagnosis(model, LOSS, batch)["0"]
    assert found.pairs == MOST_OUTPUTS * MOST_UNITS
    assert found == diagnosis(model, LOSS, batch)["0"]
    assert found.correlation != diagnosis(model, LOSS, batch, seed=1)["0"].correlation
    output = model(batch[0]).detach().requires_grad_()
    (by_output,) = torch.autograd.grad(LOSS(output, batch[1]), output)
    hidden = model[:2](batch[0]).detach()
    units = torch.arange(0, 8 * 36, 9)
    strength, share, _ = table(by_output[:, :10], layer_gradients(model[2:], hidden)[:, :10, units])
    # Another sample of the same population: a third off would be another population.
    assert found.correlation == pytest.approx(strength, rel=0.3)
    assert found.correlated == pytest.approx(share, abs=0.1)


def test_an_output_that_lies_transposed_in_memory_is_read_all_the_same() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.second(self.first(x).tanh()).tanh()).transpose(1, 2)

    model, batch = Turned(), (torch.randn(9, 3, 5), torch.randint(4, (9, 3)))
    found = diagnosis(model, LOSS, batch)["first"]
    copied = diagnosis(model, LOSS, batch, forward=lambda net, x: net(x).contiguous())["first"]
    assert found.correlation == pytest.approx(copied.correlation, rel=1e-5)
    assert found.pairs > 0


@pytest.mark.parametrize("time_first", [False, True])
def test_rows_are_given_back_to_their_examples(time_first: bool) -> None:
    examples, positions = 10, 5
    weight = torch.randn(3, 2, dtype=torch.float64)
    inputs = torch.randn(*((positions, examples) if time_first else (examples, positions)), 3).double()
    rows = (inputs.flatten(0, 1) @ weight).requires_grad_()
    hidden = rows + 0
    blocks = hidden.view(*inputs.shape[:2], 2)
    output = (blocks.transpose(0, 1) if time_first else blocks)[:, -1]  # only the last position is used
    (found,) = arrange(output, [Place(hidden.grad_fn, 0, hidden)], seed=0)
    expected = (blocks.transpose(0, 1) if time_first else blocks).flatten(1)
    assert torch.equal(found.by_example(hidden), expected)


def test_a_pair_of_examples_that_meets_is_noticed() -> None:
    hidden = torch.randn(10, 3, requires_grad=True) * 1
    output = hidden.tanh() @ torch.ones(3, 1)
    coupled = output + output.roll(1, dims=0)
    place = Place(hidden.grad_fn, 0, hidden)
    assert arrange(output, [place], seed=0)[0] is not None
    assert arrange(coupled, [place], seed=0) == [None]


def test_independent_pairs_are_significant_once_in_twenty() -> None:
    generator = torch.Generator().manual_seed(5)
    found = Correlations(1e-6)
    for _ in range(4):
        found.add(torch.randn(10, 40, generator=generator), torch.randn(10, 40, 100, generator=generator))
    coefficients = found.coefficients()
    share = float((torch.atanh(coefficients).abs() * (40 - 3) ** 0.5 > 1.96).double().mean())
    assert len(coefficients) == 4000
    assert share == pytest.approx(0.05, abs=0.012)
    assert float(coefficients.square().mean()) == pytest.approx(1 / 39, rel=0.1)


def test_correlations_are_not_spoiled_by_large_means() -> None:
    a, b = torch.randn(50, 1).double(), torch.randn(50, 1, 1).double()
    found = Correlations(1e-12)
    found.add(a[:20] + 1e6, b[:20] - 1e6)
    found.add(a[20:] + 1e6, b[20:] - 1e6)
    expected = stats.pearsonr(a.flatten().numpy(), b.flatten().numpy()).statistic
    assert found.coefficients().tolist() == pytest.approx([expected], rel=1e-6)
