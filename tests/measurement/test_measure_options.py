"""What `measure` is asked for beside the norm, and how hard it tries, against dense truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hessinit
from calls import measure
from dense import dense_curvature, ends
from tiny import LOSS, Net, batch, inputs, labels, network

EXACT: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-8}
CURVATURES = ["gauss-newton", "hessian"]


def truth(curvature: str, layer: str | None = None) -> torch.Tensor:
    dense = dense_curvature(network(), LOSS, batch(), curvature)
    return dense.network if layer in (None, "network") else dense.layers[layer]


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (None, ("encoder1", "encoder2", "head")),
        ("encoder*", ("encoder1", "encoder2")),
        (["head", "encoder1"], ("encoder1", "head")),
        (["encoder?", "encoder1"], ("encoder1", "encoder2")),
        ("encoder2.weight", ("encoder2",)),
        ("*.bias", ("encoder1.bias", "encoder2.bias", "head.bias")),
        (("head", "head.bias"), ("head", "head.bias")),
        ((name for name in ["head"]), ("head",)),
        ("**", ("encoder1", "encoder1.bias", "encoder2", "encoder2.bias", "head", "head.bias")),
    ],
)
def test_layers_are_chosen_by_name_and_glob_and_come_in_running_order(
    layers: Any, names: tuple[str, ...]
) -> None:
    model = nn.Sequential()
    for name, (into, out) in {"encoder1": (4, 5), "encoder2": (5, 5), "head": (5, 3)}.items():
        model.add_module(name, nn.Linear(into, out))
    report = measure(model, LOSS, batch(), layers=layers)
    assert sorted(report.names) == sorted(names)
    weights = [name for name in report.names if not name.endswith("bias")]
    assert weights == [name for name in names if not name.endswith("bias")]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_two_stars_count_biases_and_all_that_is_trained_in_the_network(curvature: str, scaled: bool) -> None:
    model, scale = network().double(), nn.Parameter(torch.tensor(0.7).double())
    if scaled:
        model = Net(lambda net, x: net.body(x) * net.scale, body=model, scale=scale)
    names, shapes = zip(*((name, one.shape) for name, one in model.named_parameters()), strict=True)

    def output(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        moved = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return torch.func.functional_call(model, moved, (inputs().double(),))

    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    chances = output(start).softmax(1)
    inner = torch.diag_embed(chances) - chances.unsqueeze(2) * chances.unsqueeze(1)
    if curvature == "hessian":
        matrix = torch.autograd.functional.hessian(lambda flat: LOSS(output(flat), labels()), start)
    else:
        jacobian = torch.func.jacrev(output)(start)
        matrix = torch.einsum("nap,nab,nbq->pq", jacobian, inner, jacobian) / len(inner)
    report = measure(model, LOSS, batch(), layers="**", curvature=curvature, **EXACT)
    assert report.network.norm == pytest.approx(ends(matrix).norm, rel=1e-5)
    if not scaled:
        assert report["2.bias"].norm == pytest.approx(ends(inner.mean(0)).norm, rel=1e-6)
    else:
        place = names.index("scale")  # the first: a module's own parameters come before those of its parts
        assert report["scale"].norm == pytest.approx(float(matrix[place, place].abs()), rel=1e-6)
    assert report.network.parameters == len(matrix)
    assert not report.notes


def test_a_report_says_what_is_trained_and_not_counted() -> None:
    """With its biases this network is sharper than its verdict knows: the limit can only be lower."""
    report = measure(network(), LOSS, batch(), **EXACT)
    everything = measure(network(), LOSS, batch(), layers="**", **EXACT)
    assert everything.network.norm > 1.1 * report.network.norm
    highest = f"{2 / report.network.norm:.2g}"
    limit = f"On a quadratic of this curvature, plain gradient descent diverges above lr = 2/‖H‖ = {highest}."
    assert limit in report.verdict
    assert 2 / everything.network.norm < 2 / report.network.norm  # above the limit, both diverge
    assert "guaranteed" not in report.verdict
    (note,) = report.notes
    assert note.endswith("2 trained parameters (0.bias, 2.bias); the pattern '**' for layers counts them.")
    frozen = network()
    frozen[0].bias.requires_grad_(False)
    (note,) = measure(frozen, LOSS, batch(), layers="2").notes
    assert "2 trained parameters (0.weight, 2.bias);" in note
    assert "0.bias" not in measure(frozen, LOSS, batch(), layers="**").names
    frozen[0].requires_grad_(False)
    rest = hessinit.measure(frozen, LOSS, batch())
    assert rest.names == ("2",)
    assert any("1 frozen weight was left out" in note for note in rest.notes)


def test_both_curvatures_give_the_gap_between_them() -> None:
    report = measure(network(), LOSS, batch(), curvature="both", **EXACT)
    for row in (*report.layers, report.network):
        exact, approximate = (ends(truth(kind, row.name)).norm for kind in ("hessian", "gauss-newton"))
        assert row.norm == pytest.approx(exact, rel=1e-6)
        assert row.approximation.value == pytest.approx(approximate, rel=1e-6)
        assert row.gap == pytest.approx(exact / approximate, rel=1e-6)
    assert report["0"].gap != pytest.approx(1, rel=1e-2)  # tanh bends
    assert report["2"].gap == pytest.approx(1, rel=1e-6)  # the last layer is linear in the output


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("estimator", ["auto", "lanczos"])
def test_eigenvalues_trace_norm_and_density_are_those_of_the_dense_matrix(
    curvature: str, estimator: str
) -> None:
    options = {"curvature": curvature, "estimator": estimator, **EXACT}
    report = measure(network(), LOSS, batch(), details=["top-4", "trace", "frobenius", "density"], **options)
    for row in (*report.layers, report.network):
        matrix = truth(curvature, row.name)
        values = torch.linalg.eigvalsh(matrix)
        largest = values[values.abs().argsort(descending=True)][:4].tolist()
        found = [estimate.value for estimate in row.eigenvalues]
        assert found == pytest.approx(largest, rel=1e-5, abs=1e-7 * row.norm)
        for estimate, value in ((row.trace, matrix.trace()), (row.frobenius, matrix.norm())):
            assert abs(estimate.value - value.item()) <= 4 * estimate.error + 1e-6 * row.norm
            assert estimate.error <= 0.2 * matrix.norm().item()
        nodes, weights = torch.tensor(row.density.nodes), torch.tensor(row.density.weights)
        assert weights.sum().item() == pytest.approx(1, abs=1e-6)
        assert (nodes @ weights).item() == pytest.approx(values.mean().item(), abs=0.3 * values.std().item())
        assert nodes.abs().max() <= values.abs().max() * (1 + 1e-6)


@pytest.mark.parametrize("estimator", ["auto", "lanczos"])
def test_too_few_steps_warn_and_with_strict_raise(estimator: str) -> None:
    options = {"tolerance": 1e-9, "max_iterations": 2, "estimator": estimator, "dtype": torch.float64}
    with pytest.warns(hessinit.ConvergenceWarning, match="did not reach tolerance=1e-09.*max_iterations"):
        report = measure(network(), LOSS, batch(), **options)
    assert not report.converged
    for row in (*report.layers, report.network):
        assert abs(row.norm - ends(truth("gauss-newton", row.name)).norm) <= row.error
    with pytest.raises(hessinit.ConvergenceError, match="did not reach tolerance=1e-09"):
        measure(network(), LOSS, batch(), strict=True, **options)


def test_a_network_that_alone_does_not_converge_is_told() -> None:
    """Four steps exhaust a layer of four weights, not the network of twelve."""
    torch.manual_seed(0)
    first, second, last = (nn.Linear(2, 2, bias=False) for _ in range(3))
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)
    data = torch.randn(9, 2), torch.randn(9, 2)
    options = {"curvature": "hessian", "tolerance": 1e-9, "max_iterations": 4, "dtype": torch.float64}
    with pytest.warns(hessinit.ConvergenceWarning, match="^network did not reach tolerance=1e-09"):
        report = measure(model, nn.MSELoss(), data, **options)
    assert all(row.converged for row in report)
    assert not report.network.converged


def test_a_tighter_tolerance_is_kept_and_the_learning_rates_follow_from_the_norm() -> None:
    options = {"estimator": "lanczos", "dtype": torch.float64}
    loose, tight = (measure(network(), LOSS, batch(), tolerance=t, **options) for t in (0.1, 1e-9))
    exact = ends(truth("gauss-newton")).norm
    assert abs(tight.network.norm - exact) <= 1e-9 * exact
    assert loose.network.products < tight.network.products
    assert tight.learning_rate == pytest.approx(1 / exact, rel=1e-6)
    assert tight.stable_learning_rate == pytest.approx(2 / exact, rel=1e-6)
    assert tight.loss == pytest.approx(LOSS(network()(inputs()), labels()).item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_complex_inputs_follow_the_dtype_and_a_scripted_module_without_weights_is_no_obstacle() -> None:
    real = inputs(6, 4, 2)
    model = Net(lambda m, x: m.inner(torch.view_as_real(x).flatten(1)), inner=nn.Linear(8, 3))
    expected = measure(model.inner, LOSS, (real.flatten(1), labels()), dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        found = measure(model, LOSS, (torch.view_as_complex(real), labels()), dtype=dtype)
        assert found.network.norm == pytest.approx(expected.network.norm, rel=1e-3)
    first, tanh, last = network()
    scripted = nn.Sequential(first, torch.jit.script(tanh), last)
    found, expected = (hessinit.measure(model, LOSS, batch()) for model in (scripted, network()))
    assert found.network.norm == pytest.approx(expected.network.norm, rel=1e-6)


@pytest.mark.parametrize("estimator", ["auto", "lanczos"])
def test_a_lower_precision_is_within_its_stated_error_and_says_when_that_is_too_much(estimator: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 30), nn.GELU(), nn.Linear(30, 5))
    data = torch.randn(60, 20), torch.randint(5, (60,))
    exact = measure(model, LOSS, data, **EXACT)
    rough = measure(model, LOSS, data, precision="bf16", tolerance=0.1, estimator=estimator)
    assert rough.converged
    for row, true in zip((*rough.layers, rough.network), (*exact.layers, exact.network), strict=True):
        assert abs(row.norm - true.norm) <= row.error <= 0.11 * row.norm
    with pytest.warns(hessinit.ConvergenceWarning, match="rounding in bf16 leaves .* pass precision='full'"):
        fine = measure(model, LOSS, data, precision="bf16", tolerance=1e-5, estimator=estimator)
    for row, true in zip(fine.layers, exact.layers, strict=True):
        assert abs(row.norm - true.norm) <= row.error
    tf32 = measure(model, LOSS, data, precision="tf32", estimator=estimator)
    assert all(abs(a.norm - b.norm) <= a.error for a, b in zip(tf32.layers, exact.layers, strict=True))
