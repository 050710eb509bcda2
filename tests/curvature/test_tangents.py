"""Tangents through the recorded graph, against the derivative of the backward pass, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_truth import true_norms
from random_networks import Parts
from torch import Tensor, nn

import hessinit
from calls import measure
from hessinit.curvature import evaluation as evaluations
from hessinit.curvature import loss_hessian, tangents
from hessinit.curvature.engine_choice import evaluate
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.krylov import random_like
from hessinit.curvature.loss_hessian import SoftmaxHessian
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.problem import Problem
from tiny import Calling, Net

IMAGES = (3, 8, 8)


def flat(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), *layers, nn.Flatten(), nn.Linear(8, 3))


def images(*layers: nn.Module, channels: int = 4) -> Callable[[], nn.Module]:
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 3)]
    return lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers, *head)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{
        type(one).__name__: flat(one)
        for one in (
            nn.ReLU(), nn.Tanh(), nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.ELU(), nn.LeakyReLU(),
            nn.Softplus(), nn.Hardtanh(), nn.Mish(), nn.Softmax(dim=1), nn.LogSoftmax(dim=1), nn.LayerNorm(8),
            nn.BatchNorm1d(8), nn.PReLU(),
        )
    },
    "BatchNorm2d": images(nn.BatchNorm2d(4), nn.ReLU()),
    "BatchNorm2d in eval mode": lambda: images(nn.BatchNorm2d(4), nn.ReLU())().eval(),
    "GroupNorm": images(nn.GroupNorm(2, 4), nn.ReLU()),
    "MaxPool2d": images(nn.MaxPool2d(3, stride=2, padding=1)),
    "AvgPool2d": images(nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False)),
    "AdaptiveMaxPool2d": images(nn.AdaptiveMaxPool2d(4)),
    "ConvTranspose2d": images(nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1)),
    "grouped and dilated": images(nn.Conv2d(4, 4, 3, dilation=2, groups=2)),
    "Upsample": images(nn.Upsample(scale_factor=2, mode="bilinear")),  # by the node's own backward
    "pad and cat": images(Net(lambda _, x: torch.cat([F.pad(x, (1, 0)), torch.zeros(len(x), 4, 8, 9)]))),
    "split, stack, where": flat(
        Net(lambda _, x: torch.stack(x.split(4, dim=1), 1).transpose(1, 2).flatten(1)),
        Net(lambda _, x: torch.where(x > 0, x * x, x / (1 + x * x))),
    ),
    "reductions": flat(Net(lambda _, x: x - x.mean(1, keepdim=True) + x.sum() - x.mean())),
    "select, unbind, expand": flat(
        Net(lambda _, x: torch.stack([x.select(1, -1), *x.unbind(1)[:-1]], 1)),
        Net(lambda _, x: x + x[:1].expand(len(x), -1) - 2 * x.permute(1, 0).t()),
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.Linear(2, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        nn.Flatten(), nn.Linear(24, 3),
    ),
    "weight_norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 3)
    ),
}  # fmt: skip


def problem_of(model: nn.Module, **options: Any) -> FunctionalProblem:
    torch.manual_seed(1)
    first = next(model.parameters())
    shape = IMAGES if first.ndim == 4 else (6,)
    batch = torch.randn(5, *shape), torch.randint(3, (5,))
    loss = lambda output, target: F.cross_entropy(output[:5], target)  # noqa: E731
    return FunctionalProblem(Problem(model, loss, batch, dtype=torch.float64, **options))


def by_double_backward(one: Evaluation, names: list[str], along: list[Tensor]) -> Tensor:
    placeholder, adjoint = one.adjoint
    return evaluations._grad_along([adjoint[name] for name in names], [placeholder], along)[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_tangent_is_the_derivative_of_the_backward_pass(name: str) -> None:
    torch.manual_seed(0)
    problem = problem_of(NETWORKS[name](), layers="**")
    with problem.settings():
        (one,) = evaluate(problem)
        for names in [[leaf] for leaf in one.leaves] + [list(one.leaves)]:
            along = [random_like(one.leaves[leaf], number) for number, leaf in enumerate(names)]
            found, truth = one.push(names, along), by_double_backward(one, names, along)
            assert float((found - truth).abs().max()) <= 1e-12 * max(1.0, float(truth.abs().max())), names


def test_the_common_nodes_have_rules_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(node: Any, inputs: Any) -> Any:
        raise AssertionError(type(node).__name__)

    monkeypatch.setattr(tangents, "_by_itself", refuse)
    for name in ("BatchNorm2d", "GroupNorm", "MaxPool2d", "AvgPool2d", "attention", "grouped and dilated"):
        problem = problem_of(NETWORKS[name]())
        with problem.settings():
            (one,) = evaluate(problem)
            names, along = list(one.leaves), [torch.ones_like(leaf) for leaf in one.leaves.values()]
            assert torch.allclose(one.push(names, along), by_double_backward(one, names, along), rtol=1e-10)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


def test_a_function_written_in_python_goes_by_the_backward_pass() -> None:
    problem = problem_of(nn.Sequential(nn.Linear(6, 8), Net(lambda _, x: Cube.apply(x)), nn.Linear(8, 3)))
    with problem.settings():
        (one,) = evaluate(problem)
        with pytest.raises(tangents.NoTangentError, match="CubeBackward"):
            one._recorded.push([one.leaves["0.weight"]], [torch.ones(8, 6, dtype=torch.float64)])
        along = [torch.ones_like(one.leaves["0.weight"])]
        truth = by_double_backward(one, ["0.weight"], along)
        assert torch.allclose(one.push(["0.weight"], along), truth, rtol=1e-12)


@pytest.mark.parametrize(("shape", "flatten"), [((6, 5, 7), True), ((6, 7, 4, 4), False), ((6, 7), False)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_hessian_of_a_cross_entropy_is_found_in_closed_form(
    shape: tuple[int, ...], flatten: bool, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(loss_hessian.LIMITS, large_output=40, least_closed_form=40)  # several parts
    monkeypatch.setattr(loss_hessian, "LIMITS", limits)
    monkeypatch.setattr(evaluations, "LIMITS", limits)
    torch.manual_seed(0)
    places = shape[:-1] if flatten else (shape[0], *shape[2:])
    target = torch.randint(7, places)
    target.view(-1)[0] = -100  # ignored

    def loss(output: Tensor, target: Tensor) -> Tensor:
        flat = (output.flatten(0, -2), target.flatten()) if flatten else (output, target)
        return F.cross_entropy(*flat, label_smoothing=smoothing)

    weight = nn.Parameter(torch.randn(shape[1:] if len(shape) > 2 else (1, shape[1])))
    model = Net(lambda net, x: x + net.weight, weight=weight)
    problem = FunctionalProblem(Problem(model, loss, (torch.randn(shape), target), dtype=torch.float64))
    with problem.settings():
        (one,) = evaluate(problem)
        assert one.softmax is not None
        tangent = random_like(one.output, 3)
        truth = loss_hessian.OutputLoss(problem, one.output, one.batch).hessian(tangent)
        assert torch.allclose(one.output_hessian(tangent), truth, rtol=1e-6, atol=1e-12)
        # Samples have it as their covariance.
        noise = torch.randn(4_000, *shape, dtype=torch.float64)
        samples = torch.stack([one.softmax.sample(some.clone()) for some in noise])
        along = (samples * tangent).flatten(1).sum(1)
        expected = float((tangent * truth).sum())
        assert abs(float(along.square().mean()) / expected - 1) < 0.1


def test_another_loss_is_not_taken_for_a_cross_entropy() -> None:
    batch = torch.randn(5, 6), torch.randn(5, 7)
    problem = FunctionalProblem(Problem(nn.Linear(6, 7), nn.MSELoss(), batch))
    with problem.settings():
        (one,) = evaluate(problem)
        assert SoftmaxHessian.recognize(one.at_output) is None


COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sqrt": torch.sqrt, "log": torch.log,
    "power": lambda z: z**1.5, "magnitude": lambda z: z.abs() + 0j, "angle": lambda z: z.angle() + 0j,
    "filter": lambda z: torch.fft.ifft(torch.fft.fft(z) * (1 + 2j)),
    "masked": lambda z: z.masked_fill(z.real > 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_functions_are_measured_right_by_both_engines_and_curvatures(name: str) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        z = COMPLEX[name](torch.complex(h, h.roll(1, 1)))
        return net.b(torch.cat([h + z.real, h + z.imag], 1))

    torch.manual_seed(0)
    model = Net(run, a=nn.Linear(4, 5), b=nn.Linear(10, 3)).double()
    data = torch.randn(8, 4).double(), torch.randint(3, (8,))
    layers = {"a": ["a.weight"], "b": ["b.weight"]}
    for curvature, estimator in (("gauss-newton", "gram"), ("gauss-newton", "lanczos"), ("hessian", "auto")):
        truth = true_norms(Parts(model, F.cross_entropy, data), layers, curvature)
        for check in (True, False):
            options = {"check": check, "curvature": curvature, "estimator": estimator}
            found = measure(model, F.cross_entropy, data, **options)
            for layer, norm in truth.items():
                assert found[layer].norm == pytest.approx(norm, rel=1e-3)


def linear_recurrence(net: Any, x: Tensor) -> Tensor:
    """Diagonal, with complex weights of its own."""
    inputs, state = net.inner(x), torch.zeros(6, dtype=net.poles.dtype)
    for step in inputs.unbind(1):
        state = net.poles * state + step
    return net.last(torch.view_as_real(state).flatten(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_complex_activations_and_frozen_complex_weights_are_no_obstacle(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    data = torch.randn(8, 4, 2), torch.randint(3, (8,))
    poles = nn.Parameter(torch.randn(6, dtype=torch.complex64) / 3)
    model = Net(linear_recurrence, inner=nn.Linear(2, 6), last=nn.Linear(12, 3), poles=poles)
    found = measure(model, F.cross_entropy, data, dtype=dtype, details="diagnostics")
    assert found.converged
    assert found["inner"].diagnostics.activation_std > 0


def test_a_complex_output_is_refused_with_the_way_out() -> None:
    model = Calling(lambda net, x: torch.fft.rfft(net(x)))
    with pytest.raises(hessinit.ProblemError, match="complex64.*torch.view_as_real"):
        hessinit.measure(model, lambda z, y: z.abs().mean(), (torch.randn(8, 4), torch.zeros(8)))


WORDS = 1200
NEARLY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "itself": F.cross_entropy,
    "smoothed": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "z-loss": lambda z, y: F.cross_entropy(z, y) + 1e-2 * z.logsumexp(-1).square().mean(),
    "small z-loss": lambda z, y: F.cross_entropy(z, y) + 1e-4 * z.logsumexp(-1).square().mean(),
    "mean logit": lambda z, y: F.cross_entropy(z, y) + 1e-2 * z.mean(-1).square().mean(),
    "one row": lambda z, y: F.cross_entropy(z[1:], y[1:]) + 1e-5 * z[0].square().mean(),
}


@pytest.mark.parametrize("name", NEARLY)
def test_a_loss_that_is_nearly_a_cross_entropy_is_measured_right_for_many_logits(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, WORDS, bias=False)).double()
    with torch.no_grad():
        model[2].weight.add_(6)  # the words share a component
    data = torch.randn(8, 4).double(), torch.randint(WORDS, (8,))
    data[0][0] *= 300
    found = measure(model, NEARLY[name], data, layers="0")["0"]
    truth = true_norms(Parts(model, NEARLY[name], data), {"0": ["0.weight"]}, "gauss-newton")["0"]
    assert found.converged
    assert found.norm == pytest.approx(truth, abs=found.error + 1e-9 * truth)
