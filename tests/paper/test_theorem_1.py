"""`quadratic_form` against dense fp64 truth, closed forms and itself; what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from dense import dense_curvature, ends
from hessinit import Problem, ProblemError
from hessinit_paper import quadratic_form
from tiny import LOSS, Calling, Net, batch, network
from zoo.snapshot import differences, snapshot

MEANINGS = {"exact": "hessian", "theorem1": "gauss-newton"}


def random_directions(draws: int, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    options: Any = {"generator": torch.Generator().manual_seed(11), "dtype": torch.float64}
    named = {"first": "0", "last": "2", "inner": "inner.0"}
    return {named[name]: torch.randn(draws, *shape, **options) for name, shape in shapes.items()}


def along(matrix: torch.Tensor, directions: torch.Tensor) -> list[float]:
    flat = directions.flatten(1).double()
    return torch.einsum("di,ij,dj->d", flat, matrix, flat).tolist()


def joined(pieces: list[Any]) -> Any:
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_uneven_batches_count_by_their_examples_and_those_of_a_sum_add_up(reduction: str) -> None:
    model, pieces = network(dtype=torch.float64), [batch(5), batch(1), batch(3)]
    given = random_directions(2, first=(5, 4), last=(3, 5))
    factor = 9 if reduction == "sum" else 1
    loss = nn.CrossEntropyLoss(reduction=reduction)
    forms = quadratic_form(Problem(model, loss, pieces), directions=given)
    for what, kind in MEANINGS.items():
        truth = dense_curvature(model, LOSS, joined(pieces), kind).layers
        for row in forms:
            expected = [factor * value for value in along(truth[row.name], given[row.name])]
            assert getattr(row, what) == pytest.approx(expected, rel=1e-10)
    assert (forms.batches, forms.examples) == (3, 9)


def test_the_gradient_direction_is_the_loss_gradient() -> None:
    model, pieces = network(dtype=torch.float64), [batch(5), batch(1)]
    x, y = joined(pieces)
    gradients = torch.autograd.grad(LOSS(model(x.double()), y), [model[0].weight, model[2].weight])
    truth = dense_curvature(model, LOSS, (x, y), "hessian").layers
    forms = quadratic_form(Problem(model, LOSS, pieces), directions="gradient")
    for row, gradient in zip(forms, gradients, strict=True):
        assert row.length == pytest.approx([gradient.norm().item()], rel=1e-12)
        assert row.exact == pytest.approx(along(truth[row.name], gradient[None]), rel=1e-10)


def test_the_mean_over_random_directions_is_the_trace_over_the_size() -> None:
    # So it is for signs, as it is for the unit sphere.
    model, size = network(dtype=torch.float64), 20
    form = quadratic_form(Problem(model, LOSS, batch(), layers="0"), draws=2000)["0"]
    for what, kind in MEANINGS.items():
        trace = dense_curvature(model, LOSS, batch(), kind).layers["0"].trace().item()
        values = numpy.array(getattr(form, what))
        error = values.std(ddof=1) / math.sqrt(len(values))
        assert error < 0.04 * abs(trace) / size
        assert abs(values.mean() - trace / size) < 4 * error
    top = ends(dense_curvature(model, LOSS, batch(), "hessian").layers["0"])
    assert form.length == (1.0,) * 2000
    assert top.bottom < min(form.rayleigh) < max(form.rayleigh) < top.top


def test_the_same_seed_gives_the_same_bits_and_layers_of_one_shape_different_directions() -> None:
    model = network()
    first, again = (quadratic_form(Problem(model, LOSS, batch(), seed=3), draws=5) for _ in range(2))
    assert [row.exact for row in first] == [row.exact for row in again]
    alone = quadratic_form(Problem(model, LOSS, batch(), seed=3, layers="2"), draws=3)
    assert alone["2"].theorem1 == pytest.approx(first["2"].theorem1[:3], rel=1e-5)
    other = quadratic_form(Problem(model, LOSS, batch(), seed=4), draws=5)
    assert not set(first["2"].exact) & set(other["2"].exact)
    twins = Net(lambda m, x: m.one(x) + m.two(x), one=nn.Linear(4, 3), two=nn.Linear(4, 3))
    twins.two.load_state_dict(twins.one.state_dict())
    one, two = quadratic_form(Problem(twins, LOSS, batch()))
    assert one.exact != pytest.approx(two.exact, rel=1e-2)


def test_a_loss_linear_in_the_output_leaves_the_exact_form() -> None:
    model, given = network(dtype=torch.float64), random_directions(2, first=(5, 4), last=(3, 5))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output[:, 0].mean()

    forms = quadratic_form(Problem(model, loss, batch()), directions=given)
    truth = dense_curvature(model, loss, batch(), "hessian").layers
    assert forms["0"].theorem1 == (0.0, 0.0)
    assert forms["0"].exact == pytest.approx(along(truth["0"], given["0"]), rel=1e-10)
    assert forms["2"].exact == (0.0, 0.0)
    assert (forms["0"].error_to_approximation, forms["2"].ratio) == ((math.inf, math.inf), 1.0)


@pytest.mark.parametrize("directions", ["random", "gradient", {"scale": torch.tensor([2.0, -3.0])}])
def test_a_scalar_weight_and_a_scalar_output_have_a_quadratic_form_too(directions: Any) -> None:
    model = Net(lambda m, x: (m.scale**2 * x).mean(), scale=nn.Parameter(torch.tensor(0.5)))
    data = (torch.full((6, 4), 3.0), torch.zeros(6))
    layers = None if isinstance(directions, dict) else "scale"
    problem = Problem(model, lambda z, _: z**2 / 2, [data, data], layers=layers, reduction="mean")
    forms = quadratic_form(problem, directions=directions)
    row = forms["scale"]
    # z = 3 s²: the output's change is 6 s, and s⁴ · 9/2 has the second derivative 54 s².
    assert row.rayleigh == pytest.approx([54 * 0.25] * row.draws, rel=1e-5)
    assert row.ratio == pytest.approx(54 / 36, rel=1e-5)


def test_what_has_no_curvature_gives_zeros() -> None:
    model = Calling(lambda net, x: net(x))
    model.spare = nn.Linear(4, 4)
    forms = quadratic_form(Problem(model, LOSS, batch()), draws=2)
    assert forms.names == ("inner.0", "inner.2", "spare")
    assert forms["spare"].exact == forms["spare"].theorem1 == (0.0, 0.0)
    assert forms.notes == ("Not used by the forward, so without curvature: spare.",)
    assert quadratic_form(Problem(model, LOSS, batch()), directions="gradient")["spare"].length == (0.0,)
    row = quadratic_form(Problem(network(), LOSS, batch()), directions={"0": torch.zeros(5, 4)})["0"]
    assert (row.exact, row.theorem1, row.length) == ((0.0,), (0.0,), (0.0,))
    assert (row.error_to_approximation, row.error_to_exact, row.ratio) == ((0.0,), (0.0,), 1.0)
    assert math.isnan(row.rayleigh[0])


def test_tiny_directions_do_not_vanish_in_single_precision() -> None:
    direction = torch.arange(20.0).view(5, 4) + 1
    problem, sizes = Problem(network(), LOSS, batch()), (1e-30, 1.0)
    small, usual = (quadratic_form(problem, directions={"0": direction * size})["0"] for size in sizes)
    assert small.rayleigh == pytest.approx(usual.rayleigh, rel=1e-5)
    assert small.exact[0] == pytest.approx(usual.exact[0] * 1e-60, rel=1e-5)


class Square(torch.autograd.Function):
    """Cannot be batched: its backward branches on values, which vmap refuses."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert bool(torch.isfinite(gradient).all())
        return 2 * context.saved_tensors[0] * gradient


def test_what_torch_cannot_batch_goes_one_by_one() -> None:
    model, given = network(dtype=torch.float64), random_directions(3, inner=(5, 4))
    custom = Calling(lambda net, x: net[2](Square.apply(net[0](x))), model)
    plain = Calling(lambda net, x: net[2](net[0](x).square()), model)
    problems = Problem(custom, LOSS, batch()), Problem(plain, LOSS, batch())
    one, other = (quadratic_form(problem, directions=given)["inner.0"] for problem in problems)
    assert one.exact == pytest.approx(other.exact, rel=1e-10)
    assert one.theorem1 == pytest.approx(other.theorem1, rel=1e-10)


def test_tied_weights_are_one_row_under_either_name() -> None:
    parts = {"first": nn.Linear(4, 4), "again": nn.Linear(4, 4)}
    model = Net(lambda m, x: m.again(m.first(x).tanh()), **parts).double()
    model.again.weight = model.first.weight
    direction = torch.randn(4, 4)
    truth = dense_curvature(model, LOSS, batch(), "hessian").layers["first"]
    forms = quadratic_form(Problem(model, LOSS, batch()), directions={"again": direction})
    assert (forms.names, forms["again"].aliases) == (("first",), ("again",))
    assert forms["first"].exact == pytest.approx(along(truth, direction[None]), rel=1e-10)
    with pytest.raises(ProblemError, match="'first' and 'again' are one tied weight"):
        quadratic_form(Problem(model, LOSS, batch()), directions={"first": direction, "again": direction})


def of_first(direction: Any, **options: Any) -> dict[str, Any]:
    return {"directions": {"inner.0": direction}, **options}


ONES = torch.ones(5, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": "radnom"}, "directions='radnom' is unknown.* Did you mean 'random'"),
        ({"directions": ONES}, "directions is a Tensor; it must be 'random', 'gradient', or a map"),
        ({"directions": {}}, "must name parameters of the model, got none; they are inner.0"),
        ({"directions": {"inner.00": ONES}}, "got .'inner.00'.; they are .* mean 'inner.0'"),
        (of_first([1.0]), "'inner.0'. is a list; it must be a dense, real, finite tensor of shape .5, 4."),
        (of_first(ONES.T), r"has shape \(4, 5\).* \(5, 4\), or \(draws, 5, 4\)"),
        (of_first(torch.ones(0, 5, 4)), r"has shape \(0, 5, 4\); it must be"),
        (of_first(ONES * math.nan), "holds 20 NaN or inf among 20 values"),
        (of_first(ONES.double() * 1e300), "in torch.float32.; it must be a dense, real, finite"),
        (of_first(ONES * 1j), "dtype torch.complex64; it must be a dense, real"),
        ({"directions": {"inner.0": torch.ones(2, 5, 4), "inner.2": torch.ones(3, 3, 5)}}, "as many"),
        (of_first(torch.ones(2, 5, 4), draws=3), "draws=3, but directions hold .2."),
        (of_first(ONES, layers="inner.2"), "leave layers out"),
        ({"directions": "gradient", "draws": 2}, "there is one loss gradient"),
        ({"draws": 0}, "draws=0 must be a whole number, 1 or more"),
        ({"draws": 1.5}, "draws=1.5 must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number, 0 or more"),
        ({"layers": "inner.9"}, "layers='inner.9' fits no parameter"),
    ],
)
def test_bad_input_is_refused_and_the_model_left_as_found(options: dict[str, Any], message: str) -> None:
    model = Calling(lambda net, x: net(x))
    before = snapshot(model, LOSS, batch())
    about = {name: value for name, value in options.items() if name in ("layers", "seed")}
    along = {name: value for name, value in options.items() if name not in about}
    with pytest.raises(ProblemError, match=message):
        quadratic_form(Problem(model, LOSS, batch(), **about), **along)
    assert differences(before, snapshot(model, LOSS, batch())) == []
