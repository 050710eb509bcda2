"""`quadratic_form` against dense fp64 truth, closed forms and itself; what it refuses; what it prints."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dense import dense_curvature, ends
from hessinit.errors import ProblemError
from hessinit.measurement.quadratic_form import quadratic_form
from hessinit.results.quadratic_forms import QuadraticForm, QuadraticForms
from tiny import LOSS, Calling, batch, inputs, network
from zoo import ZOO, Problem
from zoo.snapshot import differences, snapshot
from zoo.truth import true_layers, true_matrices

MEANINGS = {"exact": "hessian", "theorem1": "gauss-newton"}


def random_directions(shapes: dict[str, tuple[int, ...]], draws: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        name: torch.randn(draws, *shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def along(matrix: torch.Tensor, directions: torch.Tensor) -> list[float]:
    flat = directions.flatten(1).double()
    return torch.einsum("di,ij,dj->d", flat, matrix, flat).tolist()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("draws", [1, 3])  # one by one, and batched where torch can
@pytest.mark.parametrize("problem", ZOO)
def test_the_whole_zoo_is_right_to_a_hundred_millionth_and_left_as_found(
    problem: Problem, draws: int
) -> None:
    model, loss, data = problem.build()
    parameters = dict(model.named_parameters())
    blocks = {kind: true_matrices(problem, kind).layers for kind in MEANINGS.values()}
    names = list(blocks["hessian"])
    shapes = {n: tuple(parameters[n if n in parameters else f"{n}.weight"].shape) for n in names}
    given = random_directions(shapes, draws)
    options = {key: value for key, value in problem.options.items() if key != "layers"}
    before = snapshot(model, loss, data)
    forms = quadratic_form(
        model, loss, data, directions=given, forward=problem.forward, dtype=torch.float64, **options
    )
    assert differences(before, snapshot(model, loss, data)) == []
    assert sorted(forms.names) == sorted(names)
    wrong = []
    for row in forms:
        lengths = given[row.name].flatten(1).norm(dim=1).tolist()
        assert row.length == pytest.approx(lengths, rel=1e-12)
        for what, kind in MEANINGS.items():
            norm = true_layers(problem, kind)[row.name].norm
            truth = along(blocks[kind][row.name], given[row.name])
            for got, true, length in zip(getattr(row, what), truth, lengths, strict=True):
                if not abs(got - true) <= 1e-8 * norm * length**2:
                    wrong.append(f"{row.name}: {what} is {got!r}, truth {true!r}, norm {norm:.1e}")
    assert wrong == []


def test_linear_regression_has_its_closed_form() -> None:
    features, direction = inputs(6).double(), torch.arange(12.0, dtype=torch.float64).view(3, 4) / 5 - 1
    model = nn.Linear(4, 3).double()
    forms = quadratic_form(
        model, nn.MSELoss(), (features, torch.zeros(6, 3)), directions={"weight": direction}
    )
    expected = 2 / 18 * float((features @ direction.T).square().sum())  # the mean is over 6 · 3 entries
    assert forms["weight"].exact == pytest.approx([expected], rel=1e-12)
    assert forms["weight"].theorem1 == pytest.approx([expected], rel=1e-12)


def test_uneven_batches_count_by_their_examples() -> None:
    model, pieces = network(dtype=torch.float64), [batch(5), batch(1), batch(3)]
    given = random_directions({"0": (5, 4), "2": (3, 5)}, 2)
    whole = tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))
    forms = quadratic_form(model, LOSS, pieces, directions=given)
    for kind, what in (("hessian", "exact"), ("gauss-newton", "theorem1")):
        truth = dense_curvature(model, LOSS, whole, kind).layers
        for row in forms:
            assert getattr(row, what) == pytest.approx(along(truth[row.name], given[row.name]), rel=1e-10)
    assert (forms.batches, forms.examples) == (3, 9)


def test_a_loss_that_sums_adds_its_batches_up() -> None:
    model, loss, pieces = (
        network(dtype=torch.float64),
        nn.CrossEntropyLoss(reduction="sum"),
        [batch(5), batch(2)],
    )
    whole = tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))
    apart, together = (quadratic_form(model, loss, data) for data in (pieces, whole))
    for one, other in zip(apart, together, strict=True):
        assert one.exact == pytest.approx(other.exact, rel=1e-10)


def test_the_gradient_direction_is_the_loss_gradient() -> None:
    model, pieces = network(dtype=torch.float64), [batch(5), batch(1)]
    whole = tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))
    gradients = torch.autograd.grad(
        LOSS(model(whole[0].double()), whole[1]), [model[0].weight, model[2].weight]
    )
    truth = dense_curvature(model, LOSS, whole, "hessian").layers
    forms = quadratic_form(model, LOSS, pieces, directions="gradient")
    for row, gradient in zip(forms, gradients, strict=True):
        assert row.length == pytest.approx([gradient.norm().item()], rel=1e-12)
        assert row.exact == pytest.approx(along(truth[row.name], gradient[None]), rel=1e-10)


def test_the_mean_over_random_directions_is_the_trace_over_the_size() -> None:
    # So it is for signs, as it is for the unit sphere.
    model, size = network(dtype=torch.float64), 20
    form = quadratic_form(model, LOSS, batch(), draws=4000, layers="0")["0"]
    for what, kind in MEANINGS.items():
        trace = dense_curvature(model, LOSS, batch(), kind).layers["0"].trace().item()
        values = numpy.array(getattr(form, what))
        error = values.std(ddof=1) / math.sqrt(len(values))
        assert error < 0.03 * abs(trace) / size
        assert abs(values.mean() - trace / size) < 4 * error
    top = ends(dense_curvature(model, LOSS, batch(), "hessian").layers["0"])
    assert form.length == (1.0,) * 4000
    assert top.bottom < min(form.rayleigh) < max(form.rayleigh) < top.top


def test_the_same_seed_gives_the_same_bits_whatever_else_is_asked() -> None:
    model = network()
    first, again = (quadratic_form(model, LOSS, batch(), draws=5, seed=3) for _ in range(2))
    assert [row.exact for row in first] == [row.exact for row in again]
    alone = quadratic_form(model, LOSS, batch(), draws=3, seed=3, layers="2")
    assert alone["2"].theorem1 == pytest.approx(first["2"].theorem1[:3], rel=1e-5)
    other = quadratic_form(model, LOSS, batch(), draws=5, seed=4)
    assert not set(first["2"].exact) & set(other["2"].exact)


def test_layers_of_the_same_shape_get_different_directions() -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)
            self.two.load_state_dict(self.one.state_dict())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.two(x)

    one, two = quadratic_form(Twins(), LOSS, batch())
    assert one.exact != pytest.approx(two.exact, rel=1e-2)


def test_relu_networks_make_theorem_1_exact() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 3)
    ).double()
    for row in quadratic_form(model, LOSS, batch(), draws=4):
        assert row.exact == pytest.approx(row.theorem1, rel=1e-12)
        assert min(row.theorem1) > 0
        assert row.within(1e-10) == 1


def test_a_loss_linear_in_the_output_leaves_the_exact_form() -> None:
    model, given = network(dtype=torch.float64), random_directions({"0": (5, 4), "2": (3, 5)}, 2)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output[:, 0].mean()

    forms = quadratic_form(model, loss, batch(), directions=given)
    truth = dense_curvature(model, loss, batch(), "hessian").layers
    assert forms["0"].theorem1 == (0.0, 0.0)
    assert forms["0"].exact == pytest.approx(along(truth["0"], given["0"]), rel=1e-10)
    assert forms["2"].exact == (0.0, 0.0)
    assert (forms["0"].error_to_approximation, forms["2"].ratio) == ((math.inf, math.inf), 1.0)
    assert "Theorem 1 gives 0 on layer 0, and the exact form does not." in str(forms)


@pytest.mark.parametrize("directions", ["random", "gradient", {"scale": torch.tensor([2.0, -3.0])}])
def test_a_scalar_weight_and_a_scalar_output_have_a_quadratic_form_too(directions: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.scale**2 * x).mean()

    layers = None if isinstance(directions, dict) else "scale"
    data = (torch.full((6, 4), 3.0), torch.zeros(6))
    row = quadratic_form(
        Scaled(),
        lambda z, target: z**2 / 2,
        [data, data],
        directions=directions,
        layers=layers,
        reduction="mean",
    )["scale"]
    # z = 3 s²: the output's change is 6 s, and s⁴ · 9/2 has the second derivative 54 s².
    assert row.rayleigh == pytest.approx([54 * 0.25] * row.draws, rel=1e-5)
    assert row.ratio == pytest.approx(54 / 36, rel=1e-5)


def test_a_layer_that_the_forward_does_not_use_has_no_curvature() -> None:
    model = Calling(lambda net, x: net(x))
    model.spare = nn.Linear(4, 4)
    forms = quadratic_form(model, LOSS, batch(), draws=2)
    assert forms.names == ("inner.0", "inner.2", "spare")
    assert forms["spare"].exact == forms["spare"].theorem1 == (0.0, 0.0)
    assert forms.notes == ("Not used by the forward, so without curvature: spare.",)
    assert quadratic_form(model, LOSS, batch(), directions="gradient")["spare"].length == (0.0,)


def test_a_direction_of_zeros_gives_zeros() -> None:
    row = quadratic_form(network(), LOSS, batch(), directions={"0": torch.zeros(5, 4)})["0"]
    assert (row.exact, row.theorem1, row.length) == ((0.0,), (0.0,), (0.0,))
    assert (row.error_to_approximation, row.error_to_exact, row.ratio) == ((0.0,), (0.0,), 1.0)
    assert math.isnan(row.rayleigh[0])


def test_tiny_directions_do_not_vanish_in_single_precision() -> None:
    direction = torch.arange(20.0).view(5, 4) + 1
    small, usual = (
        quadratic_form(network(), LOSS, batch(), directions={"0": direction * scale})["0"]
        for scale in (1e-30, 1.0)
    )
    assert small.rayleigh == pytest.approx(usual.rayleigh, rel=1e-5)
    assert small.exact[0] == pytest.approx(usual.exact[0] * 1e-60, rel=1e-5)


def test_frozen_dropout_keeps_one_mask() -> None:
    model = nn.Sequential(*network(), nn.Dropout(0.5))
    with pytest.raises(ProblemError, match=r"layer 3 \(Dropout\) is active"):
        quadratic_form(model, LOSS, batch())
    first, again = (quadratic_form(model, LOSS, batch(), dropout="freeze", seed=2) for _ in range(2))
    assert [row.exact for row in first] == [row.exact for row in again]
    silent = quadratic_form(model.eval(), LOSS, batch(), seed=2)
    assert silent["0"].exact != pytest.approx(first["0"].exact, rel=1e-3)
    assert first.notes == ("Random layers were frozen to one draw (seed 2).",)


def test_what_torch_cannot_batch_goes_one_by_one() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = context.saved_tensors
            assert bool(torch.isfinite(gradient).all())  # a branch on values: vmap refuses
            return 2 * x * gradient

    model, given = network(dtype=torch.float64), random_directions({"inner.0": (5, 4)}, 3)
    custom = Calling(lambda net, x: net[2](Square.apply(net[0](x))), model)
    plain = Calling(lambda net, x: net[2](net[0](x).square()), model)
    one, other = (quadratic_form(m, LOSS, batch(), directions=given)["inner.0"] for m in (custom, plain))
    assert one.exact == pytest.approx(other.exact, rel=1e-10)
    assert one.theorem1 == pytest.approx(other.theorem1, rel=1e-10)


def test_tied_weights_are_one_row_under_either_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
            self.again.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.first(x).tanh())

    torch.manual_seed(0)
    model, direction = Tied().double(), torch.randn(4, 4)
    truth = dense_curvature(model, LOSS, batch(), "hessian").layers["first"]
    forms = quadratic_form(model, LOSS, batch(), directions={"again": direction})
    assert (forms.names, forms["again"].aliases) == (("first",), ("again",))
    assert forms["first"].exact == pytest.approx(along(truth, direction[None]), rel=1e-10)
    with pytest.raises(ProblemError, match="'first' and 'again', which are one and the same weight"):
        quadratic_form(model, LOSS, batch(), directions={"first": direction, "again": direction})


def test_given_directions_choose_vectors_and_frozen_weights_too() -> None:
    model = network()
    model[2].requires_grad_(False)
    forms = quadratic_form(model, LOSS, batch(), directions={"2": torch.ones(3, 5), "0.bias": torch.ones(5)})
    assert forms.names == ("0.bias", "2")
    assert (forms.directions, forms.draws) == ("given", 1)


class MatrixProducts(TorchDispatchMode):
    """Counts the multiplications and additions of matrix products: a cost that no clock disturbs."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        result = function(*arguments, **(settings or {}))
        if (packet := function._overloadpacket) in flop_registry:
            self.operations += flop_registry[packet](*arguments, **(settings or {}), out_val=result)
        return result


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": "radnom"}, "directions='radnom' is unknown.* Did you mean 'random'"),
        (
            {"directions": torch.ones(5, 4)},
            "directions is a Tensor; it must be 'random', 'gradient', or a map",
        ),
        ({"directions": {}}, "names no layer; name at least one"),
        ({"directions": {"inner.00": torch.ones(5, 4)}}, "no parameter of the model.* mean 'inner.0'"),
        ({"directions": {"inner.0": [1.0]}}, "'inner.0'. is a list; it must be a tensor of shape .5, 4."),
        ({"directions": {"inner.0": torch.ones(4, 5)}}, r"has shape \(4, 5\).* \(5, 4\), or \(draws, 5, 4\)"),
        ({"directions": {"inner.0": torch.ones(0, 5, 4)}}, r"has shape \(0, 5, 4\); it must be"),
        ({"directions": {"inner.0": torch.ones(5, 4) * math.nan}}, "holds 20 NaN or inf among 20 values"),
        (
            {"directions": {"inner.0": torch.full((5, 4), 1e300, dtype=torch.float64)}},
            "in torch.float32.; it must be finite",
        ),
        ({"directions": {"inner.0": torch.ones(5, 4) * 1j}}, "dtype torch.complex64; it must be real"),
        ({"directions": {"inner.0": torch.ones(2, 5, 4), "inner.2": torch.ones(3, 3, 5)}}, "as many"),
        ({"directions": {"inner.0": torch.ones(2, 5, 4)}, "draws": 3}, "draws=3, but directions hold 2"),
        ({"directions": {"inner.0": torch.ones(5, 4)}, "layers": "inner.2"}, "leave layers out"),
        ({"directions": "gradient", "draws": 2}, "there is one loss gradient"),
        ({"draws": 0}, "draws=0 must be a whole number, 1 or more"),
        ({"draws": 1.5}, "draws=1.5 must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number, 0 or more"),
        ({"layers": "inner.9"}, "layers='inner.9' fits no parameter"),
    ],
)
def test_bad_input_is_refused_with_a_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        quadratic_form(Calling(lambda net, x: net(x)), LOSS, batch(), **options)


def test_the_model_comes_back_after_a_failure() -> None:
    model = nn.Sequential(network(), nn.BatchNorm1d(3))
    before = snapshot(model, LOSS, batch())
    with pytest.raises(ProblemError, match="NaN"):
        quadratic_form(model, LOSS, batch(), directions={"0.0": torch.full((5, 4), math.nan)})
    assert differences(before, snapshot(model, LOSS, batch())) == []


def make_forms(*rows: QuadraticForm, **settings: Any) -> QuadraticForms:
    draws = rows[0].draws
    usual = {
        "directions": "random",
        "draws": draws,
        "loss": 2.31,
        "examples": 32,
        "seed": 0,
        "seconds": 0.0061,
    }
    return QuadraticForms(layers=rows, **{**usual, **settings})


def make_row(name: str, exact: tuple[float, ...], theorem1: tuple[float, ...], **more: Any) -> QuadraticForm:
    length = (1.0,) * len(exact)
    return QuadraticForm(
        name=name, **{"shape": (512, 784), **more}, exact=exact, theorem1=theorem1, length=length
    )


def test_the_share_within_counts_directions() -> None:
    row = make_row("fc1", (1.0, 3.0, -1.0, 0.0), (1.0, 1.0, 1.0, 0.0))
    assert row.error_to_approximation == (0.0, 2.0, 2.0, 0.0)
    assert row.error_to_exact == (0.0, pytest.approx(2 / 3), 2.0, 0.0)
    assert (row.within(1), row.within(2), row.within(0)) == (0.5, 1.0, 0.5)
    assert row.within(1, relative_to="exact") == 0.75
    assert make_row("fc1", (math.nan,), (1.0,)).within(9) == 0
    with pytest.raises(
        ValueError, match="relative_to='truth' is unknown; choose from 'approximation', 'exact'"
    ):
        row.within(1, relative_to="truth")
    with pytest.raises(ValueError, match="rtol=-1 must be a relative error"):
        row.within(-1)
