"""One run against a loop written by hand, and what a run does when something is not as it should be."""

from __future__ import annotations

import math
import random
from typing import Any

import digit_problem as problem
import numpy
import pytest
import torch
from torch import nn

from hessinit.comparing.divergence import has_diverged
from hessinit.comparing.seeds import derive
from hessinit.measurement.measure import measure
from hessinit.schemes.applying import apply_scheme_


def _hand_written(steps: int, rate: float, seed: int, warmup: int = 0) -> tuple[nn.Module, list[float]]:
    """SGD from PyTorch's default start: epochs are permutations, the rest of each is dropped."""
    images, labels = problem.data()
    torch.manual_seed(derive(seed, "build"))
    model = problem.build()
    order_of = torch.Generator().manual_seed(derive(seed, "batches"))
    losses: list[float] = []
    while len(losses) < steps:
        order = torch.randperm(400, generator=order_of)
        for first in range(0, 384, 32):
            chosen = order[first : first + 32]
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            factor = min(1.0, (len(losses) + 1) / warmup) if warmup else 1.0
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= rate * factor * gradient
            losses.append(loss.item())
            if len(losses) == steps:
                break
    return model, losses


@pytest.mark.parametrize(("scheme", "warmup"), [("default", 0), ("default+warmup", 7)])
def test_a_run_is_the_hand_written_loop(scheme: str, warmup: int) -> None:
    steps = 120
    comparison = problem.small(
        schemes=[scheme], learning_rates=[0.3], seeds=[5], steps=steps, warmup=warmup or None
    )
    (run,) = comparison.runs
    _, losses = _hand_written(steps, 0.3, 5, warmup)
    chunks = [sum(losses[first : first + 3]) / 3 for first in range(0, steps, 3)]
    assert len(run.losses) == 40
    assert run.losses == pytest.approx(chunks, rel=5.1e-5)  # curves keep five digits
    assert run.first_loss == pytest.approx(losses[0], rel=1e-6)
    assert run.final_loss == pytest.approx(sum(losses[-12:]) / 12, rel=1e-5)
    assert (run.steps_done, run.diverged, run.note) == (steps, False, "")


def test_warmup_lasts_a_fifth_unless_said_otherwise() -> None:
    (run,) = problem.small(schemes=["default+warmup"], learning_rates=[0.3], seeds=[0], steps=20).runs
    _, losses = _hand_written(20, 0.3, 0, warmup=4)
    assert run.final_loss == pytest.approx(sum(losses[-10:]) / 10, rel=1e-5)


@pytest.mark.parametrize("steps", [10, 49, 50, 51, 99, 130])
def test_a_curve_has_at_most_fifty_points(steps: int) -> None:
    (run,) = problem.small(schemes=["default"], learning_rates=[0.1], seeds=1, steps=steps).runs
    assert len(run.losses) == math.ceil(steps / math.ceil(steps / 50)) <= 50


def test_norms_at_the_start_are_those_of_the_seeds_weights_on_the_seeds_batch() -> None:
    comparison = problem.small(schemes=["he"], seeds=[3])
    torch.manual_seed(derive(3, "build"))
    model = problem.build()
    images, labels = problem.data()
    chosen = torch.randperm(400, generator=torch.Generator().manual_seed(derive(3, "starting batch")))[:32]
    source = torch.Generator().manual_seed(derive(3, "start"))
    apply_scheme_(model, "he", sample=images[chosen], generator=source)
    report = measure(model, problem.LOSS, (images[chosen], labels[chosen]), tolerance=1e-4)
    assert comparison.layers == ("1", "3")
    for name, norm in [("1", report["1"].norm), ("3", report["3"].norm), ("network", report.network.norm)]:
        assert comparison.norm("he", layer=name) == pytest.approx(norm, rel=0.02)
    first, second = comparison.runs
    assert first.norms is not None
    assert second.norms is None  # measured once: the start does not depend on the rate
    assert comparison.norm("he", 0.5) == comparison.norm("he", 0.1)


def test_measuring_changes_no_run_even_with_dropout() -> None:
    with_norms = problem.small(build=problem.build_with_dropout)
    without = problem.small(build=problem.build_with_dropout, curvature_at_start=False)
    assert math.isnan(without.norm("he"))
    assert with_norms.norm("he") > 0
    assert [run.losses for run in with_norms.runs] == [run.losses for run in without.runs]


def test_a_run_that_meets_infinity_stops_and_is_marked() -> None:
    comparison = problem.small(schemes=["he"], learning_rates=[0.1, 1e30], seeds=1)
    broken = comparison.runs_of("he", 1e30)[0]
    assert broken.diverged
    assert not math.isfinite(broken.final_loss)
    assert 1 <= broken.steps_done < 12
    assert (comparison.loss("he", 1e30), comparison.diverged("he", 1e30)) == (math.inf, 1)
    assert comparison.best == ("he", 0.1)


def test_a_loss_that_grows_is_a_divergence() -> None:
    def grow(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.0)

    linear = problem.small(
        build=lambda: nn.Linear(2, 1),
        loss=nn.MSELoss(),
        data=(torch.eye(2).repeat(20, 1) + 1, torch.ones(40, 1)),
        schemes={"zero": grow},
        learning_rates=[1.0],
        seeds=1,
    )
    (run,) = linear.runs
    assert math.isfinite(run.final_loss)  # 2/‖H‖ is far below 1: each step multiplies the error
    assert run.diverged
    assert run.steps_done == 12


def test_a_run_that_does_not_move_has_not_diverged() -> None:
    """Single mini-batches of four differ by far more than 5 %; of 20 runs, half began below their mean."""
    source = torch.Generator().manual_seed(0)
    data = torch.randn(1000, 8, generator=source), torch.randn(1000, 1, generator=source)
    still = problem.small(
        build=lambda: nn.Linear(8, 1), loss=nn.MSELoss(), data=data, schemes=["default"],
        learning_rates=[1e-9], seeds=20, steps=60, batch_size=4, curvature_at_start=False,
    )  # fmt: skip
    assert sum(run.final_loss > 1.05 * run.first_loss for run in still.runs) > 5
    assert still.diverged("default", 1e-9) == 0


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.0] * 5 + [2.2] * 15, True),  # without noise, 5 % are enough
        ([2.0] * 5 + [2.09] * 15, False),
        ([2.3] + [90.0, 110.0, 80.0, 120.0, 100.0] * 4, True),  # jumps at once, and stays there, noisily
        ([2.3, 230.0] + [24.0, 22.0, 25.0] * 6, True),  # jumps, and comes back in part
        ([2.3, 230.0] + [2.0, 1.9, 2.1] * 6, False),  # jumps, and recovers
        ([1.5**step for step in range(12)], True),
        ([-3.0] * 10 + [-2.0] * 10, True),
        ([-3.0, -2.0, -4.0, -1.5, -3.5, -2.5] * 4, False),
        ([1.0, math.inf], True),
        ([math.nan], True),
    ],
)
def test_divergence_is_told_from_chance(losses: list[float], expected: bool) -> None:
    assert has_diverged(losses, 10) is expected


def test_a_function_whose_name_ends_in_warmup_has_one() -> None:
    def leave(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None: ...

    schemes = {"mine+warmup": leave, "mine": leave, "named+warmup": "default", "word": "default+warmup"}
    comparison = problem.small(schemes=schemes, warmup=12, seeds=1)
    losses = {start: comparison.loss(start, 0.5) for start in schemes}
    assert losses["mine+warmup"] == losses["named+warmup"] == losses["word"] != losses["mine"]
    assert comparison.warmup == 12


def test_a_forward_that_refuses_nan_is_a_divergence_too() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = problem.build()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            output = self.inner(images)
            if not output.isfinite().all():
                raise ValueError("no such numbers here")
            return output

    (run,) = problem.small(build=Careful, schemes=["default"], learning_rates=[1e38], seeds=1).runs
    assert run.diverged
    assert "no such numbers here" in run.note


def test_a_start_that_fails_stops_nothing_and_says_why() -> None:
    comparison = problem.small(schemes={"he": "he", "odd": problem.fail}, seeds=1)
    assert comparison.loss("he", 0.1) < 3
    assert not comparison.applies("odd")
    for run in comparison.runs_of("odd", 0.1):
        assert (run.steps_done, run.diverged, run.applies) == (0, False, False)
        assert math.isnan(run.final_loss)
        assert run.note == "this start dislikes the model"
    assert math.isnan(comparison.loss("odd", 0.1))
    assert math.isnan(comparison.best_rate("odd"))


def test_a_curvature_that_cannot_be_measured_is_a_note() -> None:
    def absolute(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.abs().mean()

    (run,) = problem.small(loss=absolute, schemes=["default"], learning_rates=[0.1], seeds=1).runs
    assert run.norms is None
    assert run.steps_done == 12
    assert run.note.startswith("The curvature at the start was not measured: ")


def test_a_start_of_ones_own_gets_the_rate_a_seed_and_the_same_batch() -> None:
    seen: list[tuple[float, int, float]] = []

    def look(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
        inputs, targets = batch
        assert inputs.shape == (32, 1, 8, 8)
        assert targets.shape == (32,)
        seen.append((lr, seed, float(inputs.sum())))

    comparison = problem.small(schemes={"one": look, "other": look})
    assert comparison.rate_dependent == ("one", "other")
    assert all(run.norms is not None for run in comparison.runs)  # they may depend on the rate
    assert len(seen) == 8
    assert {rate for rate, _, _ in seen} == {0.1, 0.5}
    assert len({(seed, total) for _, seed, total in seen}) == 2  # one batch and one number for each seed


def test_the_callers_generators_and_threads_stay() -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)  # noqa: NPY002 - the global state is what this is about
    expected_number = numpy.random.RandomState(1).random_sample()
    before = torch.get_num_threads()
    expected = torch.rand(1, generator=torch.Generator().manual_seed(1))
    problem.small(schemes={"drawn": problem.draw}, build=problem.build_with_dropout)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.rand(1), expected)
    assert random.random() == random.Random(1).random()
    assert numpy.random.random_sample() == expected_number  # noqa: NPY002


def test_optimizers_by_word_and_by_function() -> None:
    by_word = problem.small(optimizer="momentum", seeds=1)
    by_function = problem.small(
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9), seeds=1
    )
    assert [run.losses for run in by_word.runs] == [run.losses for run in by_function.runs]
    adam = problem.small(optimizer="adam", learning_rates=[0.01], seeds=1)
    other = problem.small(optimizer=problem.adam_without_momentum, learning_rates=[0.01], seeds=1)
    assert adam.runs[0].first_loss == other.runs[0].first_loss
    assert adam.runs[0].final_loss != other.runs[0].final_loss
    assert other.optimizer == "digit_problem.adam_without_momentum"


def test_frozen_weights_stay() -> None:
    models: list[nn.Module] = []

    def build() -> nn.Module:
        model = problem.build()
        model[1].weight.requires_grad_(False)
        models.append(model)
        return model

    problem.small(build=build, schemes=["default"], learning_rates=[0.5], seeds=[0])
    twin, _, trained = models
    assert torch.equal(twin[1].weight, trained[1].weight)
    assert not torch.equal(twin[3].weight, trained[3].weight)


def test_our_own_start_runs_for_each_rate() -> None:
    comparison = problem.small(schemes=["hessinit", "hessinit+warmup"], seeds=1)
    assert comparison.rate_dependent == ("hessinit", "hessinit+warmup")
    assert comparison.norm("hessinit", 0.1) > 1.5 * comparison.norm("hessinit", 0.5)
