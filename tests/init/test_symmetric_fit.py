"""`initialize_` along symmetries: blocks against dense matrices in float64, and a function that stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from networks import LOSS, branch, state
from torch import Tensor, nn

from dense import dense_curvature, ends, layer_parameters
from hessinit import Fit
from hessinit.errors import ConvergenceWarning
from hessinit.init import symmetries
from hessinit.init.fit import fit_weights_
from hessinit.init.options import KAPPA, FitRequest
from hessinit.init.scales import ProblemFactory, ScaledModel
from hessinit.init.weights import find_targets, snapshot
from hessinit.problem.problem import Problem
from hessinit.training.initialize import initialize_
from tiny import inputs, labels, raise_from

BATCH = inputs(24, 6).double(), labels(24)
IMAGES = inputs(24, 1, 6, 6).double(), labels(24)


def mlp(norm: Callable[[int], nn.Module], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [nn.Linear(6, 8), norm(8), activation(), nn.Linear(8, 8), norm(8), activation(), nn.Linear(8, 3)]
    return prepared(nn.Sequential(*layers))


def prepared(model: nn.Sequential) -> nn.Sequential:
    """In float64, the same at every call, with gains and biases that are not 1 and 0."""
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.double().parameters():
            noise = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
            parameter.copy_(noise / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 1 + 0.3 * noise)
    return model


def group_normed() -> nn.Sequential:
    layers = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)]
    return prepared(nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)))


def residual() -> nn.Sequential:
    blocks = branch(8, norm=True), branch(8, norm=True)
    return prepared(nn.Sequential(nn.Linear(6, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 3)))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Any, set[str]]] = {
    "batch norm": (lambda: mlp(nn.BatchNorm1d), BATCH, {"0", "3"}),
    "layer norm": (lambda: mlp(nn.LayerNorm), BATCH, {"0", "3"}),
    "RMS norm": (lambda: mlp(lambda width: nn.RMSNorm(width, eps=1e-6), nn.GELU), BATCH, {"0", "3"}),
    "group norm": (group_normed, IMAGES, {"0", "3"}),
    "residual": (residual, BATCH, {"0", "1.second", "2.second"}),
}
EVERY = pytest.mark.parametrize("name", MODELS)


def block_norm(model: nn.Module, batch: Any, names: Sequence[str], root: Tensor | None = None) -> float:
    """‖H‖ of these weights together, or of root·H·root, from the dense matrix of all weights."""
    known = layer_parameters(model).values()
    chosen = torch.cat([torch.full((model.get_parameter(name).numel(),), name in names) for name in known])
    matrix = dense_curvature(model, LOSS, batch, "gauss-newton").network
    matrix = matrix if root is None else root[:, None] * matrix * root
    return ends(matrix[chosen][:, chosen]).norm


def adam_root(model: nn.Module, batch: Any) -> Tensor:
    """P^-½: the gradient's size, or its noise over eight parts of the batch where that is larger."""
    weights = [model.get_parameter(name) for name in layer_parameters(model).values()]

    def gradient(part: slice) -> Tensor:
        found = torch.autograd.grad(LOSS(model(batch[0][part]), batch[1][part]), weights)
        return torch.cat([one.flatten() for one in found])

    noise = torch.stack([gradient(slice(first, None, 8)) for first in range(8)]).var(0) / 8
    return (torch.maximum(gradient(slice(None)).square(), noise).sqrt() + 1e-8).rsqrt()


def output(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        return model(batch[0])


def change(now: Tensor, before: Tensor) -> float:
    return float((now - before).norm() / before.norm())


def copied(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, one.detach().clone()) for name, one in model.named_parameters()]


def check_blocks(model: nn.Module, batch: Any, result: Any, target: float, root: Any = None) -> None:
    """By the dense truth, the scale-free weights have the target, and nothing else is above it."""
    assert result.converged, result.reason
    assert (result.scaling, result.target) == ("symmetries", pytest.approx(target))
    (free,) = (one.weights for one in result.symmetries if one.scale_free)
    assert block_norm(model, batch, free, root) == pytest.approx(target, rel=0.05)
    assert result.symmetries[0].norm == pytest.approx(block_norm(model, batch, free, root), rel=0.02)
    others = [[name] for name in layer_parameters(model).values() if name not in free]
    for block in [*others, *(one.weights for one in result.symmetries[1:])]:
        assert block_norm(model, batch, block, root) <= 1.05 * target


@EVERY
@pytest.mark.parametrize("lr", [0.3, 0.05])
def test_scale_free_weights_meet_the_target_and_the_function_stays(name: str, lr: float) -> None:
    build, batch, free = MODELS[name]
    model = build()
    before, weights = output(model, batch), dict(copied(model))
    result = initialize_(model, LOSS, batch, lr=lr, fit=Fit(scheme="keep"))
    check_blocks(model, batch, result, KAPPA.plain / lr)
    assert {one.removesuffix(".weight") for one in result.symmetries[0].weights} == free
    assert "the function is unchanged" in result.reason
    assert change(output(model, batch), before) < 1e-2
    for parameter, value in copied(model):  # biases and gains among them
        factor = math.prod(one.factors.get(parameter, 1.0) for one in result.symmetries)
        torch.testing.assert_close(value, factor * weights[parameter])
    for symmetry in result.symmetries:  # the law, with the power 2
        (one, *_) = symmetry.weights
        assert symmetry.norm_before / symmetry.norm == pytest.approx(symmetry.factors[one] ** 2, rel=0.02)


@EVERY
def test_weights_that_are_scaled_along_symmetries_compute_the_same_at_every_rate(name: str) -> None:
    build, batch, _ = MODELS[name]
    models = [build() for _ in range(2)]
    for lr, model in zip((0.3, 0.05), models, strict=True):
        result = initialize_(model, LOSS, batch, lr=lr, fit=Fit(scheme="keep"))
        check_blocks(model, batch, result, KAPPA.plain / lr)
    assert change(*(output(model, batch) for model in models)) < 1e-2


def test_several_fits_measure_the_drawn_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the dense truth after each fit; the second one looks at the scaled weights only."""
    model, evaluate, looks = mlp(nn.LayerNorm), symmetries.evaluate_everywhere, []
    monkeypatch.setattr(
        symmetries, "evaluate_everywhere", lambda problem: looks.append(problem) or evaluate(problem)
    )
    targets = find_targets(model, None)
    restore = snapshot(targets, list(model.parameters()))
    factory = ProblemFactory(Problem(model, LOSS, BATCH), "gauss-newton")
    for lr in (0.3, 0.05):
        restore()
        result = fit_weights_(factory, targets, FitRequest(lr=lr), restore)
        check_blocks(model, BATCH, result, KAPPA.plain / lr)
        looks.append(None)
    first, second = "".join("." if one is None else "x" for one in looks).split(".")[:2]
    assert (len(first), len(second)) == (2, 1)


@pytest.mark.parametrize("name", ["layer norm", "residual"])
def test_for_adam_the_norm_is_the_one_that_it_sees_and_goes_as_one_over_the_scale(name: str) -> None:
    build, batch, _ = MODELS[name]
    for lr in (0.1, 0.03):
        model = build()
        before = output(model, batch)
        result = initialize_(model, LOSS, batch, lr=lr, optimizer="adamw", fit=Fit(scheme="keep"))
        check_blocks(model, batch, result, KAPPA.adam / lr, adam_root(model, batch))
        assert change(output(model, batch), before) < 1e-2
        factor = result.symmetries[0].factors["0.weight"]
        assert result.symmetries[0].norm_before / result.symmetries[0].norm == pytest.approx(factor, rel=0.02)
        assert (result.before, result.after) == (None, None)  # nobody reads the norm that Adam does not see


def test_momentum_makes_longer_steps_and_auto_takes_the_weights_as_they_are() -> None:
    model = mlp(nn.LayerNorm)
    fit = Fit(momentum=0.8, scheme="keep")
    result = initialize_(model, LOSS, BATCH, lr=0.1, optimizer="momentum", fit=fit)
    check_blocks(model, BATCH, result, KAPPA.plain * 0.2 / 0.1)
    for optimizer, kappa in (("sgd", KAPPA.plain), ("adam", KAPPA.adam)):
        model = residual()
        weights = dict(copied(model))
        result = initialize_(model, LOSS, BATCH, lr="auto", optimizer=optimizer, fit=Fit(scheme="keep"))
        root = adam_root(model, BATCH) if optimizer == "adam" else None
        check_blocks(model, BATCH, result, kappa / result.lr, root)
        assert torch.equal(model[0].weight, weights["0.weight"])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_eps_of_a_normalization_bounds_the_scale(optimizer: str) -> None:
    model = mlp(nn.LayerNorm)
    before, weights = output(model, BATCH), dict(copied(model))
    with pytest.warns(ConvergenceWarning, match="a normalization's eps bounds the scale; the function is un"):
        result = initialize_(model, LOSS, BATCH, lr=1e-6, optimizer=optimizer, fit=Fit(scheme="keep"))
    assert 1e-5 < change(output(model, BATCH), before) < 1e-2
    factor = result.symmetries[0].factors["3.weight"]
    torch.testing.assert_close(model[3].weight.detach(), factor * weights["3.weight"])
    assert result.scales["3"] == pytest.approx(factor)
    assert factor < 0.1  # it is used as far as it goes


def test_a_norm_in_eval_mode_and_frozen_gains_are_no_symmetries() -> None:
    result = initialize_(mlp(nn.BatchNorm1d).eval(), LOSS, BATCH, lr=0.003, fit=Fit(scheme="keep"))
    assert result.symmetries == ()
    assert any("BatchNorm in eval mode" in note for note in result.notes)
    model = mlp(nn.LayerNorm)
    model[4].requires_grad_(False)
    kept = state(model[4])
    with pytest.warns(ConvergenceWarning, match="6 has ‖H‖ = .*, above 5.71, and no symmetry lowers it"):
        result = initialize_(model, LOSS, BATCH, lr=0.7, fit=Fit(scheme="keep"))
    assert state(model[4]) == kept
    assert block_norm(model, BATCH, ["0.weight", "3.weight"]) == pytest.approx(KAPPA.plain / 0.7, rel=0.05)


def test_nothing_is_written_that_layers_leaves_out() -> None:
    model = mlp(nn.LayerNorm)
    before = state(model)
    with pytest.warns(ConvergenceWarning, match="no symmetry lowers it"):
        result = initialize_(Problem(model, LOSS, BATCH, layers=["0", "6"]), lr=1.0, fit=Fit(scheme="keep"))
    assert {name for name in before if state(model)[name] != before[name]} == {"0.weight", "0.bias"}
    result.undo()
    assert state(model) == before
    model = residual()
    before = state(model)
    part = Problem(model, LOSS, BATCH, layers=["0", "1.second"])  # not all of the stream
    initialize_(part, lr=0.05, fit=Fit(scheme="keep"))
    written = {name.rpartition(".")[0] for name in before if state(model)[name] != before[name]}
    assert written <= {"0", "1.second"}


def test_gains_and_biases_are_undone_bit_for_bit() -> None:
    model = mlp(nn.LayerNorm)
    before = state(model)
    planned = initialize_(model, LOSS, BATCH, lr=1.0, dry_run=True)
    assert state(model) == before
    result = initialize_(model, LOSS, BATCH, lr=1.0)
    assert {"4.weight", "4.bias"} <= {name for name in before if state(model)[name] != before[name]}
    assert planned.symmetries == result.symmetries
    result.undo()
    assert state(model) == before
    for moment in (3, 12, 20, 30, 40):
        count = raise_from(moment, KeyboardInterrupt("stopped"))

        def loss(output: Tensor, target: Tensor, count: Callable[[], None] = count) -> Tensor:
            count()
            return LOSS(output, target)

        with pytest.raises(KeyboardInterrupt, match="stopped"):
            initialize_(model, loss, BATCH, lr=1.0)
        assert state(model) == before


def test_a_factory_of_other_layers_measures_these_alone() -> None:
    def norm(factory: ProblemFactory) -> float:
        return ScaledModel(factory, [], 1e-3).network_norm()

    model = mlp(nn.LayerNorm)
    factory = ProblemFactory(Problem(model, LOSS, BATCH), "gauss-newton")
    assert norm(factory) > norm(factory.of_layers(["6.weight"]))
    alone = ProblemFactory(Problem(model, LOSS, BATCH, layers=["6.weight"]), "gauss-newton")
    assert norm(factory.of_layers(["6.weight"])) == norm(alone)
