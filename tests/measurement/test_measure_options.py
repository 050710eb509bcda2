"""What `measure` is asked for beside the norm, and how hard it tries, against dense truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hessinit
from dense import dense_curvature, ends
from tiny import LOSS, batch, inputs, labels, network

EXACT: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-8}
CURVATURES = ["gauss-newton", "hessian"]


def truth(curvature: str, layer: str | None = None) -> torch.Tensor:
    dense = dense_curvature(network(), LOSS, batch(), curvature)
    return dense.network if layer is None else dense.layers[layer]


def named() -> nn.Sequential:
    model = nn.Sequential()
    for name, (into, out) in {"encoder1": (4, 5), "encoder2": (5, 5), "head": (5, 3)}.items():
        model.add_module(name, nn.Linear(into, out))
    return model


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (None, ("encoder1", "encoder2", "head")),
        ("head", ("head",)),
        ("encoder*", ("encoder1", "encoder2")),
        (["head", "encoder1"], ("encoder1", "head")),
        (["encoder?", "encoder1"], ("encoder1", "encoder2")),
        ("encoder2.weight", ("encoder2",)),
        ("*", ("encoder1", "encoder2", "head")),
        ("*.bias", ("encoder1.bias", "encoder2.bias", "head.bias")),
        (("head", "head.bias"), ("head", "head.bias")),
        ((name for name in ["head"]), ("head",)),
        ("**", ("encoder1", "encoder1.bias", "encoder2", "encoder2.bias", "head", "head.bias")),
    ],
)
def test_layers_are_chosen_by_name_and_glob_and_come_in_running_order(
    layers: Any, names: tuple[str, ...]
) -> None:
    report = hessinit.measure(named(), LOSS, batch(), layers=layers)
    assert sorted(report.names) == sorted(names)
    weights = [name for name in report.names if not name.endswith("bias")]
    assert weights == [name for name in names if not name.endswith("bias")]


def test_a_frozen_weight_is_measured_when_named() -> None:
    model = network()
    model[0].requires_grad_(False)
    assert hessinit.measure(model, LOSS, batch()).names == ("2",)
    asked = hessinit.measure(model, LOSS, batch(), layers="0", **EXACT)
    assert asked["0"].norm == pytest.approx(ends(truth("gauss-newton", "0")).norm, rel=1e-6)
    assert model[0].weight.requires_grad is False


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_bias_is_measured_when_named_and_right(curvature: str) -> None:
    report = hessinit.measure(network(), LOSS, batch(), layers="2.bias", curvature=curvature, **EXACT)
    output = network().double()(inputs().double()).softmax(1)
    blocks = torch.diag_embed(output) - output.unsqueeze(2) * output.unsqueeze(1)
    assert report["2.bias"].norm == pytest.approx(ends(blocks.mean(0)).norm, rel=1e-6)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_two_stars_count_everything_that_is_trained_in_the_network(curvature: str) -> None:
    model = network(dtype=torch.float64)
    names, shapes = zip(*((name, one.shape) for name, one in model.named_parameters()), strict=True)

    def output(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        moved = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return torch.func.functional_call(model, moved, (inputs().double(),))

    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    if curvature == "hessian":
        matrix = torch.autograd.functional.hessian(lambda flat: LOSS(output(flat), batch()[1]), start)
    else:
        jacobian, chances = torch.func.jacrev(output)(start), output(start).softmax(1)
        inner = torch.diag_embed(chances) - chances.unsqueeze(2) * chances.unsqueeze(1)
        matrix = torch.einsum("nap,nab,nbq->pq", jacobian, inner, jacobian) / len(inner)
    report = hessinit.measure(network(), LOSS, batch(), layers="**", curvature=curvature, **EXACT)
    assert report.network.norm == pytest.approx(ends(matrix).norm, rel=1e-5)
    assert report.network.parameters == len(matrix)
    assert not report.notes
    frozen = network()
    frozen[0].bias.requires_grad_(False)
    assert "0.bias" not in hessinit.measure(frozen, LOSS, batch(), layers="**").names


def test_a_report_says_what_is_trained_and_not_counted() -> None:
    """With its biases this network is sharper than its verdict knows: the guarantee is for the weights."""
    report = hessinit.measure(network(), LOSS, batch(), **EXACT)
    everything = hessinit.measure(network(), LOSS, batch(), layers="**", **EXACT)
    assert everything.network.norm > 1.1 * report.network.norm
    assert report.verdict.endswith("gives the largest guaranteed decrease.")
    (note,) = report.notes
    assert note == (
        'Not counted in the network\'s ‖H‖: 2 trained parameters (0.bias, 2.bias); layers="**" counts them.'
    )
    frozen = network()
    frozen[0].bias.requires_grad_(False)
    (note,) = hessinit.measure(frozen, LOSS, batch(), layers="2").notes
    assert "2 trained parameters (0.weight, 2.bias);" in note


def test_both_curvatures_give_the_gap_between_them() -> None:
    report = hessinit.measure(network(), LOSS, batch(), curvature="both", **EXACT)
    for row in (*report.layers, report.network):
        layer = None if row is report.network else row.name
        exact, approximate = ends(truth("hessian", layer)).norm, ends(truth("gauss-newton", layer)).norm
        assert row.norm == pytest.approx(exact, rel=1e-6)
        assert row.approximation is not None
        assert row.approximation.value == pytest.approx(approximate, rel=1e-6)
        assert row.gap == pytest.approx(exact / approximate, rel=1e-6)
    assert report["0"].gap != pytest.approx(1, rel=1e-2)  # tanh bends
    assert report["2"].gap == pytest.approx(1, rel=1e-6)  # the last layer is linear in the output


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("estimator", ["auto", "lanczos"])
def test_the_largest_eigenvalues_are_those_of_the_dense_matrix(curvature: str, estimator: str) -> None:
    options: dict[str, Any] = {"curvature": curvature, "estimator": estimator, **EXACT}
    report = hessinit.measure(network(), LOSS, batch(), top=4, **options)
    for row in (*report.layers, report.network):
        values = torch.linalg.eigvalsh(truth(curvature, None if row is report.network else row.name))
        largest = values[values.abs().argsort(descending=True)][:4].tolist()
        assert [estimate.value for estimate in row.eigenvalues] == pytest.approx(
            largest, rel=1e-5, abs=1e-7 * row.norm
        )


@pytest.mark.parametrize("curvature", CURVATURES)
def test_trace_and_frobenius_norm_lie_within_their_errors(curvature: str) -> None:
    report = hessinit.measure(
        network(), LOSS, batch(), curvature=curvature, trace=True, frobenius=True, dtype=torch.float64
    )
    for row in (*report.layers, report.network):
        matrix = truth(curvature, None if row is report.network else row.name)
        for estimate, value in ((row.trace, matrix.trace()), (row.frobenius, matrix.norm())):
            assert estimate is not None
            assert abs(estimate.value - value.item()) <= 4 * estimate.error + 1e-6 * row.norm
            assert estimate.error <= 0.2 * matrix.norm().item()


@pytest.mark.parametrize("curvature", CURVATURES)
def test_the_density_is_that_of_the_eigenvalues(curvature: str) -> None:
    density = hessinit.measure(
        network(), LOSS, batch(), curvature=curvature, density=True, **EXACT
    ).network.density
    values = torch.linalg.eigvalsh(truth(curvature))
    assert density is not None
    assert sum(density.weights) == pytest.approx(1, abs=1e-6)
    mean = sum(node * weight for node, weight in zip(density.nodes, density.weights, strict=True))
    assert mean == pytest.approx(values.mean().item(), abs=0.3 * values.std().item())
    reach = values.abs().max().item() * (1 + 1e-6)
    assert all(-reach <= node <= reach for node in density.nodes)


def test_the_gram_engine_refuses_what_it_cannot_do() -> None:
    def concave(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -output.square().mean()

    with pytest.raises(hessinit.ProblemError, match="estimator='gram' cannot .*: .*Use estimator='auto'"):
        hessinit.measure(network(), concave, batch(), estimator="gram")
    report = hessinit.measure(network(), concave, batch(), **EXACT)
    expected = dense_curvature(network(), concave, batch(), "gauss-newton")
    assert report.network.bottom_eigenvalue == pytest.approx(ends(expected.network).bottom, rel=1e-6)
    assert report.engine == "lanczos"


@pytest.mark.parametrize("estimator", ["auto", "lanczos"])
def test_too_few_steps_warn_and_with_strict_raise(estimator: str) -> None:
    options: dict[str, Any] = {
        "tolerance": 1e-9,
        "max_iterations": 2,
        "estimator": estimator,
        "dtype": torch.float64,
    }
    with pytest.warns(hessinit.ConvergenceWarning, match="did not reach tolerance=1e-09.*max_iterations"):
        report = hessinit.measure(network(), LOSS, batch(), **options)
    assert not report.converged
    for row in (*report.layers, report.network):
        exact = ends(truth("gauss-newton", None if row is report.network else row.name)).norm
        assert abs(row.norm - exact) <= row.error
    with pytest.raises(hessinit.ConvergenceError, match="did not reach tolerance=1e-09"):
        hessinit.measure(network(), LOSS, batch(), strict=True, **options)


def test_a_tighter_tolerance_is_kept() -> None:
    loose = hessinit.measure(
        network(), LOSS, batch(), tolerance=0.1, estimator="lanczos", dtype=torch.float64
    )
    tight = hessinit.measure(
        network(), LOSS, batch(), tolerance=1e-9, estimator="lanczos", dtype=torch.float64
    )
    exact = ends(truth("gauss-newton")).norm
    assert abs(tight.network.norm - exact) <= 1e-9 * exact
    assert loose.network.products < tight.network.products


def test_the_learning_rates_follow_from_the_norm() -> None:
    report = hessinit.measure(network(), LOSS, batch(), **EXACT)
    exact = ends(truth("gauss-newton")).norm
    assert report.learning_rate == pytest.approx(1 / exact, rel=1e-6)
    assert report.stable_learning_rate == pytest.approx(2 / exact, rel=1e-6)
    assert report.loss == pytest.approx(LOSS(network()(inputs()), batch()[1]).item(), rel=1e-5)


def test_complex_inputs_follow_the_dtype() -> None:
    class FromComplex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.view_as_real(x).flatten(1))

    torch.manual_seed(0)
    model, real = FromComplex(), torch.randn(6, 4, 2)
    given = torch.view_as_complex(real)
    expected = hessinit.measure(model.inner, LOSS, (real.flatten(1), labels()), dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        found = hessinit.measure(model, LOSS, (given, labels()), dtype=dtype)
        assert found.network.norm == pytest.approx(expected.network.norm, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_module_without_weights_is_no_obstacle() -> None:
    scripted = nn.Sequential(nn.Linear(4, 5), torch.jit.script(nn.Tanh()), nn.Linear(5, 3))
    plain = nn.Sequential(scripted[0], nn.Tanh(), scripted[2])
    found, expected = (hessinit.measure(model, LOSS, batch()) for model in (scripted, plain))
    assert found.network.norm == pytest.approx(expected.network.norm, rel=1e-6)
