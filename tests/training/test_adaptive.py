"""Adam, AdamW and RMSprop: the edge against runs of torch's own, the numbers against dense fp64 truth."""

from __future__ import annotations

import math

import pytest
import torch
from stability import SPECTRUM, START, edge
from torch import Tensor, nn

from dense import dense_curvature, in_double
from hessinit import advise
from hessinit.curvature.preconditioner import Adaptive
from hessinit.training.optimizer_rules import build_optimizer
from tiny import LOSS, batch, inputs, labels, network
from zoo import PROBLEMS, Problem
from zoo.truth import true_matrices

PRECONDITIONER = torch.tensor([0.02, 1.5, 0.7, 0.4], dtype=torch.float64)
FROZEN = 1 - 1e-13  # β₂ that leaves v where it is

RULES = [
    Adaptive(kind="adam", momentum=0.9, memory=FROZEN, eps=1e-8),
    Adaptive(kind="adam", momentum=0.5, memory=FROZEN, eps=0.1),
    Adaptive(kind="adamw", momentum=0.9, memory=FROZEN, eps=1e-8, weight_decay=0.3),
    Adaptive(kind="rmsprop", momentum=0.0, memory=FROZEN, eps=1e-8),
    Adaptive(kind="rmsprop", momentum=0.9, memory=FROZEN, eps=1e-8),
]


def freeze(rule: Adaptive) -> object:
    """Give the optimizer a long past, so that its mean of squares is PRECONDITIONER² and stays so."""

    def prepare(optimizer: torch.optim.Optimizer, weights: Tensor) -> None:
        weights.grad = torch.zeros_like(weights)
        optimizer.step()  # makes the state
        with torch.no_grad():
            weights.fill_(START)
        state, past = optimizer.state[weights], 1e9
        state["step"] = torch.tensor(past, dtype=torch.float64)
        if rule.kind == "rmsprop":
            state["square_avg"].copy_(PRECONDITIONER.square())
        else:
            state["exp_avg_sq"].copy_(PRECONDITIONER.square() * (1 - rule.memory**past))

    return prepare


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_with_the_preconditioner_frozen_torch_leaves_stability_where_the_formula_says(rule: Adaptive) -> None:
    norm = float((SPECTRUM / (PRECONDITIONER + rule.eps)).max())
    found = edge(lambda weights, lr: build_optimizer(rule, weights, lr), freeze(rule))  # type: ignore[arg-type]
    assert found == pytest.approx(rule.edge(norm), rel=0.01)


@pytest.mark.parametrize("kind", ["adam", "adamw", "rmsprop"])
def test_the_best_rate_moves_by_one_over_the_norm_in_the_end(kind: str) -> None:
    rule = Adaptive(kind=kind, momentum=0.8, memory=0.9, eps=0.0)
    weights = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = build_optimizer(rule, [weights], rule.best(4.0))
    for _ in range(300):
        before = weights.item()
        weights.grad = torch.ones_like(weights)
        optimizer.step()
    assert before - weights.item() == pytest.approx(1 / 4, rel=1e-6)


def gradients(problem: Problem) -> list[tuple[float, Tensor, list[Tensor]]]:
    """For each batch: its share of the examples, its gradient, and those of its eight parts, in fp64."""
    model, loss, data = problem.build()
    pairs = [data] if isinstance(data, tuple) else list(data)
    total = sum(len(targets) for _, targets in pairs)

    def gradient(given: Tensor, targets: Tensor) -> Tensor:
        copy = in_double(model)
        weights = [p for p in copy.parameters() if p.ndim >= 2 and p.requires_grad]
        value = in_double(loss)(copy(in_double(given)), in_double(targets))
        found = torch.autograd.grad(value, weights, materialize_grads=True)
        return torch.cat([part.flatten() for part in found])

    rows = []
    for given, targets in pairs:
        count = min(8, len(targets))
        parts = [gradient(given[k::count], targets[k::count]) for k in range(count)]
        rows.append((len(targets) / total, gradient(given, targets), parts))
    return rows


NAMES = [
    "linear_regression",
    "mlp_without_biases",
    "mlp_one_example",
    "mlp_relu",
    "mlp_tanh",
    "mlp_gelu",
    "mlp_wide_output_few_examples",
]
CONVOLUTIONS = [p.name for p in PROBLEMS if p.name.startswith("conv")][:4]
CHOSEN = [p for p in PROBLEMS if p.name in (*NAMES, *CONVOLUTIONS) and p.forward is None and not p.options]


def test_the_chosen_problems_are_there() -> None:
    assert len(CHOSEN) >= 8


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
@pytest.mark.parametrize("second_moment", ["mini-batches", "first step"])
@pytest.mark.parametrize("problem", CHOSEN, ids=str)
def test_the_preconditioned_norm_and_the_first_step_are_the_dense_ones(
    problem: Problem, second_moment: str, curvature: str
) -> None:
    matrix = true_matrices(problem, curvature).network
    rows = gradients(problem)
    gradient = sum(share * g for share, g, _ in rows)
    square = sum(share * g.square() for share, g, _ in rows)
    if second_moment == "first step":
        square = gradient.square()
    elif all(len(parts) > 1 for _, _, parts in rows):
        noise = sum(share * torch.stack(parts).var(0) / len(parts) for share, _, parts in rows)
        square = torch.maximum(square, noise)
    moves, eps = square > 0, 1e-4
    root = torch.zeros_like(square)
    root[moves] = (square[moves].sqrt() + eps) ** -0.5
    truth = float(torch.linalg.eigvalsh(root[:, None] * matrix * root).abs().max())
    step = gradient / (gradient.abs() + eps)
    bend = float(step @ matrix @ step)
    first = float(gradient @ step) / bend if bend > 0 else math.inf

    model, loss, data = problem.build()
    advice = advise(
        model, loss, data, optimizer="adam", eps=eps, second_moment=second_moment, curvature=curvature,
        dtype=torch.float64, tolerance=1e-6,
    )  # fmt: skip
    assert advice.norm.value == pytest.approx(truth, rel=1e-5)
    assert advice.first_step == pytest.approx(first, rel=1e-6)
    assert advice.learning_rate == pytest.approx(min(1 / truth, first), rel=1e-5)
    assert advice.stable_learning_rate == pytest.approx(min(38 / truth, 2 * first), rel=1e-5)
    assert advice.frozen == int((~moves).sum())


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_the_first_step_of_torch_lowers_a_quadratic_most_at_the_rate_given(kind: str) -> None:
    torch.manual_seed(3)
    model, data = nn.Linear(5, 2, bias=False).double(), torch.randn(20, 5, dtype=torch.float64)
    target = torch.randn(20, 2, dtype=torch.float64)  # a linear model with a squared loss is a quadratic
    advice = advise(model, nn.MSELoss(), (data, target), optimizer=kind)
    start = model.weight.detach().clone()

    def loss_after(lr: float) -> float:
        with torch.no_grad():
            model.weight.copy_(start)
        word = torch.optim.Adam if kind == "adam" else torch.optim.RMSprop
        optimizer = word(model.parameters(), lr=lr)
        value = nn.functional.mse_loss(model(data), target)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return float(nn.functional.mse_loss(model(data), target).detach())

    assert advice.first_step is not None
    best = loss_after(advice.first_step)
    assert best < min(loss_after(0.98 * advice.first_step), loss_after(1.02 * advice.first_step))
    assert loss_after(2 * advice.first_step) == pytest.approx(advice.loss, rel=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batches_of_one_size_count_as_mini_batches(reduction: str) -> None:
    loss = nn.CrossEntropyLoss(reduction=reduction)
    pairs = [(inputs(12)[k::3], labels(12)[k::3]) for k in range(3)]
    found = advise(network(), loss, pairs, optimizer="adam", dtype=torch.float64, tolerance=1e-6)
    rows = []
    for given, targets in pairs:
        model = network(dtype=torch.float64)

        def gradient(some: Tensor, those: Tensor, model: nn.Module = model) -> Tensor:
            weights = [p for p in model.parameters() if p.ndim == 2]
            parts = torch.autograd.grad(loss(model(some.double()), those), weights)
            return torch.cat([part.flatten() for part in parts])

        # One of the three stands for all; one of its four parts for all of it.
        times = (3, 4) if reduction == "sum" else (1, 1)
        parts = torch.stack(
            [times[0] * times[1] * gradient(given[k : k + 1], targets[k : k + 1]) for k in range(4)]
        )
        rows.append((times[0] * gradient(given, targets), parts.var(0) / 4))
    square = torch.maximum(
        torch.stack([g.square() for g, _ in rows]).mean(0), torch.stack([noise for _, noise in rows]).mean(0)
    )
    matrix = dense_curvature(network(), nn.CrossEntropyLoss(), pairs, "gauss-newton").network
    root = (square.sqrt() + 1e-8) ** -0.5
    factor = 12 if reduction == "sum" else 1
    truth = factor * float(torch.linalg.eigvalsh(root[:, None] * matrix * root).max())
    assert found.norm.value == pytest.approx(truth, rel=1e-5)


def test_without_gradient_nothing_moves() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    advice = advise(model, nn.MSELoss(), (torch.eye(2), torch.zeros(2, 1)), optimizer="adam")
    assert (advice.frozen, advice.learning_rate, advice.stable_learning_rate) == (2, math.inf, math.inf)


def test_dead_units_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        model[0].bias[:2] = -100.0  # two units that no input wakes: 8 weights before them, 6 behind
    advice = advise(model, LOSS, batch(), optimizer="adam")
    assert advice.frozen == 8 + 6
    assert 0 < advice.learning_rate < math.inf


def test_a_batch_that_cannot_be_cut_is_taken_whole_and_noted() -> None:
    def whole(output: Tensor, target: Tensor) -> Tensor:
        if len(output) != 6:
            raise ValueError("only six at once")
        return LOSS(output, target)

    advice = advise(network(), whole, batch(), optimizer="adam")
    single = advise(network(), LOSS, batch(), optimizer="adam", second_moment="first step")
    assert advice.norm.value == pytest.approx(single.norm.value, rel=1e-3)
    assert "could not be cut" in " ".join(advice.notes)


def test_a_decay_within_the_gradient_is_left_out_and_said_so() -> None:
    plain, decayed = (advise(network(), LOSS, batch(), optimizer="adam", weight_decay=w) for w in (0.0, 0.1))
    assert decayed.learning_rate == plain.learning_rate
    assert "left out of the advice" in " ".join(decayed.notes)
    decoupled = advise(network(), LOSS, batch(), optimizer="adamw", weight_decay=0.1)
    assert decoupled.learning_rate == pytest.approx(1 / (plain.norm.value + 0.1))
    assert "left out of the advice" not in " ".join(decoupled.notes)


def test_flat_targets_of_a_text_are_cut_with_their_sequences() -> None:
    """Several targets in a row belong to one example: the same noise as with targets in rows."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    tokens, following = torch.randint(7, (8, 5)), torch.randint(7, (8, 5))

    def rows(output: Tensor, target: Tensor) -> Tensor:
        return LOSS(output.flatten(0, 1), target.flatten())

    def flat(output: Tensor, target: Tensor) -> Tensor:
        return LOSS(output.flatten(0, 1), target)

    in_rows = advise(model, rows, (tokens, following), optimizer="adam")
    in_one = advise(model, flat, (tokens, following.flatten()), optimizer="adam")
    assert in_one.learning_rate == pytest.approx(in_rows.learning_rate, rel=1e-5)
    assert "could not be cut" not in " ".join(in_one.notes)
