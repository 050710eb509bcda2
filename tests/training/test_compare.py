"""Runs of compare and sweep against a loop written by hand, and what they refuse."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import digit_problem as problem
import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hessinit import Comparison, RunSettings, apply_scheme_, measure, sweep
from hessinit.errors import ProblemError
from hessinit.measurement.loss_range import UNKNOWN, LossRange, constant_loss, find_loss_range
from hessinit.problem.batches import Batch
from hessinit.progress import Pace, announce
from hessinit.training.loop import derive, read_data
from hessinit.training.trial import judge

MODEL = problem.build()


def _losses(comparison: Comparison) -> list[tuple[float, ...]]:
    return [run.losses for run in comparison.runs]


def _train_by_hand(steps: int, rate: float, seed: int, warmup: int = 0) -> list[float]:
    """SGD from PyTorch's default weights: epochs are permutations, the remainder of each is dropped."""
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
    return losses[:steps]


@pytest.mark.parametrize(
    ("scheme", "asked", "steps", "warmup"),
    [("default", None, 120, 0), ("default+warmup", 7, 120, 7), ("default+warmup", None, 20, 4)],
)
def test_a_run_is_the_loop_written_by_hand(scheme: str, asked: int | None, steps: int, warmup: int) -> None:
    settings: dict[str, Any] = {"schemes": [scheme], "learning_rates": [0.3], "seeds": [5]}
    (run,) = problem.small(**settings, steps=steps, warmup=asked).runs
    losses = _train_by_hand(steps, 0.3, 5, warmup)
    length, last = math.ceil(steps / 50), max(10, steps // 10)
    chunks = [sum(losses[first : first + length]) / length for first in range(0, steps, length)]
    assert run.losses == pytest.approx(chunks, rel=5.1e-5)  # curves keep five digits
    assert run.first_loss == pytest.approx(losses[0], rel=1e-6)
    assert run.final_loss == pytest.approx(sum(losses[-last:]) / last, rel=1e-5)
    assert (run.steps_done, run.diverged, run.note) == (steps, False, "")


def test_initial_norms_are_those_of_the_seeds_weights_on_the_seeds_batch() -> None:
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
    assert second.norms is None  # measured once: these weights do not depend on the rate
    assert comparison.norm("he", 0.5) == comparison.norm("he", 0.1)


def test_neither_measuring_nor_what_a_scheme_draws_changes_the_masks_of_dropout() -> None:
    schemes = {"kept": problem.keep, "drawing": lambda *arguments: torch.rand(3)}
    settings: dict[str, Any] = {"build": problem.build_with_dropout, "schemes": schemes}
    with_norms, without = problem.small(**settings), problem.small(**settings, measure_curvature=False)
    assert math.isnan(without.norm("kept"))
    assert with_norms.norm("kept") > 0
    assert _losses(with_norms) == _losses(without)
    assert _losses(without)[:4] == _losses(without)[4:]


def test_a_sweep_writes_the_std_and_zero_biases_into_its_layers_only() -> None:
    models: list[Any] = []

    def build() -> nn.Module:
        models.append(nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10)))
        return models[-1]  # type: ignore[no-any-return]

    swept = sweep(
        build, problem.LOSS, problem.data(), stds=[0.05], layers="1", learning_rate=1e-12, seeds=1, steps=10,
        settings=RunSettings(workers=1),
    )  # fmt: skip
    assert (swept.kind, swept.stds, swept.schemes) == ("sweep", (0.05,), ("std 0.05",))
    untouched, _, trained = models
    assert trained[1].weight.std().item() == pytest.approx(0.05, rel=0.03)
    assert trained[1].bias.abs().max().item() < 1e-9
    assert torch.allclose(trained[3].weight, untouched[3].weight, atol=1e-9)
    with pytest.raises(ProblemError, match="names no weight of two or more dimensions"):
        sweep(build, problem.LOSS, problem.data(), stds=[0.05], layers="*.bias", steps=12)


LEARNED, IDLE, DIVERGED = "learned", "did not learn", "diverged"
DIGITS = LossRange(constant=2.3, free=0.0)  # 2 % of what can be gained below 2.3 are 2.254


@pytest.mark.parametrize(
    ("losses", "loss_range", "expected"),
    [
        ([2.0, 2.6, 2.3, 2.7, 2.4, 2.5, 2.2, 2.6, 2.3, 2.6, 2.4, 2.5], DIGITS, IDLE),  # an easy first batch
        ([2.0, 2.1, 2.1, 2.6, 2.6, 2.7, 2.9, 3.0, 3.0, 3.2, 3.3, 3.5], DIGITS, DIVERGED),
        ([2.0] * 5 + [2.12] * 15, DIGITS, DIVERGED),  # without noise, 5 % of what can be gained are enough
        ([2.0] * 5 + [2.11] * 15, DIGITS, IDLE),
        ([2.0] * 5 + [2.0001] * 15, UNKNOWN, DIVERGED),  # nor is there a part of an unknown range
        ([2.3] + [90.0, 110.0, 80.0, 120.0, 100.0] * 4, DIGITS, DIVERGED),  # jumps, and stays, noisily
        ([2.3] + [90.0, 30.0, 150.0, 60.0, 120.0] * 4, DIGITS, DIVERGED),  # with more noise than height
        ([2.3, 230.0] + [24.0, 22.0, 25.0] * 6, DIGITS, DIVERGED),  # jumps, and comes back in part
        ([2.3, 230.0] + [2.0, 1.9, 2.1] * 6, DIGITS, LEARNED),  # jumps, and recovers
        ([2.3, 230.0] + [2.28, 2.26, 2.29] * 6, DIGITS, IDLE),  # recovers, to less than 2 % below
        ([1.5**step for step in range(12)], DIGITS, DIVERGED),
        ([2.3 - 0.01 * step for step in range(12)], DIGITS, LEARNED),  # the median of the last four is 2.205
        ([2.3 - 0.004 * step for step in range(12)], DIGITS, IDLE),  # 2.262
        ([9.0] + [2.31, 2.29, 2.3, 2.28] * 5, DIGITS, IDLE),  # from a bad start to what a constant reaches
        ([0.5] * 4 + [0.49] * 8, DIGITS, IDLE),  # trained before: 2 % of 0.5 are to go
        ([0.5] * 4 + [0.48] * 8, DIGITS, LEARNED),
        ([-3.0] * 10 + [-2.0] * 10, UNKNOWN, DIVERGED),
        ([-3.0, -2.0, -4.0, -1.5, -3.5, -2.5] * 4, UNKNOWN, IDLE),
        ([2.0, 2.1, 1.9, 2.0, 1.5, 1.2, 1.0, 0.9, 0.8], UNKNOWN, LEARNED),
        ([1.0, math.inf], DIGITS, DIVERGED),
        ([math.nan], DIGITS, DIVERGED),
    ],
)
@pytest.mark.parametrize("constant", [0.0, 1000.0, -1000.0])
@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e3])
def test_one_verdict_that_no_constant_or_unit_of_the_loss_changes(
    losses: list[float], loss_range: LossRange, expected: str, constant: float, factor: float
) -> None:
    constant *= factor
    moved = LossRange(factor * loss_range.constant + constant, factor * loss_range.free + constant)
    assert judge([factor * loss + constant for loss in losses], moved) == expected


def test_runs_that_diverge_fail_or_cannot_be_measured_are_marked_and_stop_nothing() -> None:
    def refuse(model: nn.Module, images: Tensor) -> Tensor:
        output: Tensor = model(images)
        if not output.isfinite().all():
            raise ValueError("no such numbers here")
        return output

    rates = [0.1, 1e30]
    comparison = problem.small(schemes={"he": "he", "odd": problem.fail}, learning_rates=rates, seeds=1)
    (broken,) = comparison.runs_of("he", 1e30)
    assert (broken.diverged, math.isfinite(broken.final_loss)) == (True, False)
    assert 1 <= broken.steps_done < 12
    assert (comparison.loss("he", 1e30), comparison.diverged("he", 1e30)) == (math.inf, 1)
    assert comparison.best_rate("he") == 0.1
    assert not comparison.applies("odd")
    (odd,) = comparison.runs_of("odd", 0.1)
    assert (odd.steps_done, odd.diverged, odd.note) == (0, False, "this scheme refuses the model")
    (run,) = problem.small(forward=refuse, schemes=["default"], learning_rates=[1e38], seeds=1).runs
    assert (run.diverged, "no such numbers here" in run.note) == (True, True)
    settings: dict[str, Any] = {"schemes": ["default"], "learning_rates": [0.1], "seeds": 1}
    (run,) = problem.small(loss=lambda output, _: output.abs().mean(), **settings).runs
    assert (run.norms, run.steps_done) == (None, 12)
    assert run.note.startswith("The initial curvature was not measured: ")


def test_a_scheme_of_ones_own_gets_the_rate_a_seed_and_a_copy_of_the_same_batch() -> None:
    seen: list[tuple[float, int, float]] = []

    def look(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
        assert (batch[0].shape, batch[1].shape) == ((32, 1, 8, 8), (32,))
        seen.append((lr, seed, float(batch[0].sum())))
        batch[0].mul_(100.0)  # reaches neither the measurement nor another scheme

    comparison = problem.small(schemes={"one": look, "other": look, "kept": problem.keep})
    assert comparison.rate_dependent == ("one", "other", "kept")
    assert all(run.norms is not None for run in comparison.runs)  # they may depend on the rate
    assert comparison.norm("one") == comparison.norm("kept")
    assert {rate for rate, _, _ in seen} == {0.1, 0.5}
    assert len({(seed, total) for _, seed, total in seen}) == 2  # one batch and one number for each seed


def test_hessinit_is_initialized_for_each_rate_and_names_that_end_in_warmup_have_one() -> None:
    comparison = problem.small(schemes=["hessinit", "hessinit+warmup"], seeds=1)
    assert comparison.rate_dependent == ("hessinit", "hessinit+warmup")
    assert comparison.norm("hessinit", 0.1) > 1.5 * comparison.norm("hessinit", 0.5)
    kept = {"mine+warmup": problem.keep, "mine": problem.keep}
    schemes = {**kept, "named+warmup": "default", "word": "default+warmup"}
    comparison = problem.small(schemes=schemes, warmup=12, seeds=1)
    losses = {scheme: comparison.loss(scheme, 0.5) for scheme in schemes}
    assert losses["mine+warmup"] == losses["named+warmup"] == losses["word"] != losses["mine"]
    assert comparison.warmup == 12


def test_every_scheme_draws_the_rest_of_a_model_with_frozen_weights() -> None:
    options: Any = {"build": problem.build_partly_frozen, "learning_rates": [0.1], "seeds": 1}
    comparison = problem.small(schemes=["he", "hessinit"], **options)
    assert not any("trained before" in run.note for run in comparison.runs)
    assert all(run.steps_done for run in comparison.runs)


def test_the_callers_generators_and_threads_stay_and_frozen_weights_too() -> None:
    models: list[Any] = []

    def build() -> nn.Module:
        models.append(problem.build_partly_frozen())
        return models[-1]  # type: ignore[no-any-return]

    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)  # noqa: NPY002 - the global state is what this is about
    before = torch.get_num_threads()
    problem.small(schemes={"default": "default", "drawn": problem.draw}, build=build, learning_rates=[0.5])
    assert torch.get_num_threads() == before
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(1)))
    assert random.random() == random.Random(1).random()
    assert numpy.random.random_sample() == numpy.random.RandomState(1).random_sample()  # noqa: NPY002
    first, _, trained, *_ = models
    assert torch.equal(first[1].weight, trained[1].weight)
    assert not torch.equal(first[3].weight, trained[3].weight)


def test_epochs_are_permutations_of_examples_without_their_remainder_or_of_ready_batches() -> None:
    numbers = torch.arange(13)
    batches = read_data((numbers, numbers * 10), batch_size=3, steps=10).minibatches(seed=0)
    epochs = [list(itertools.islice(batches, 4)) for _ in range(2)]
    orders = [torch.cat([batch.inputs for batch in epoch]).tolist() for epoch in epochs]
    assert all(len(set(order)) == 12 for order in orders)
    assert orders[0] != orders[1]
    assert all(torch.equal(batch.targets, batch.inputs * 10) for epoch in epochs for batch in epoch)
    ready = read_data([(torch.full((2,), index), torch.zeros(2)) for index in range(5)], 64, 10)
    orders = [itertools.islice(ready.minibatches(seed), 10) for seed in (1, 1, 2)]
    first, again, other = ([int(batch.inputs[0]) for batch in order] for order in orders)
    assert first == again != other
    assert sorted(first[:5]) == sorted(first[5:]) == list(range(5))


def test_a_list_a_loader_and_an_endless_generator_give_the_same_runs_and_keep_their_data() -> None:
    cut = problem.ready_batches(40)

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from cut

    before, dataset = [images.clone() for images, _ in cut], TensorDataset(*problem.data())
    settings: dict[str, Any] = {"schemes": ["default"], "steps": 10, "seeds": 1}
    # The model writes into its inputs.
    settings["build"] = lambda: nn.Sequential(nn.Dropout(0.2, inplace=True), problem.build())
    by_list, by_loader = (problem.small(data=data, **settings) for data in (cut, DataLoader(dataset, 40)))
    assert by_list == by_loader == problem.small(data=endless(), **settings)
    assert all(map(torch.equal, before, [images for images, _ in cut]))
    assert (by_list.batch_size, by_list.examples) == (40, 400)
    assert problem.small(data=problem.ready_batches(200), **settings).batch_size == 200  # two are no pair
    shuffled: DataLoader[Any] = DataLoader(dataset, 40, shuffle=True)
    found = []
    for seed in (1, 2):  # whatever was drawn before
        torch.manual_seed(seed)
        found.append(problem.small(data=shuffled, **settings))
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(seed)))
    assert found[0] == found[1] != by_list


def test_optimizers_forwards_and_losses_without_targets() -> None:
    def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    images, labels = problem.data()
    halves = problem.small(
        data=((images[..., :4], images[..., 4:]), labels), optimizer=momentum, seeds=1,
        forward=lambda model, pair: model(torch.cat(pair, dim=-1)),
    )  # fmt: skip
    assert _losses(problem.small(optimizer="momentum", seeds=1)) == _losses(halves)
    assert halves.optimizer.endswith("<locals>.momentum")
    without = problem.small(
        build=lambda: nn.Linear(64, 64), data=(images.flatten(1), None), schemes=["default"], seeds=1,
        loss=lambda output, _: output.square().mean(),
    )  # fmt: skip
    assert without.runs[0].final_loss < without.runs[0].first_loss


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    for terminal, progress in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        problem.small(measure_curvature=False, progress=progress)
        out, err = capsys.readouterr()
        assert out == ""
        assert ("8 of 8 runs" in err) if terminal and progress else err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"build": MODEL}, "build is a Sequential; it must be a function that makes a new model for every"),
        ({"build": lambda: MODEL}, r"build\(\) returned the same model twice.*copy.deepcopy\(model\)"),
        ({"build": lambda: nn.Sequential(MODEL)}, "models that share their weights"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"a tensor of shape \(32,\) .*it must be one"),
        ({"loss": lambda output, target: torch.ones(())}, "does not depend on any trainable parameter"),
        ({"schemes": ["orthogonl"]}, "schemes='orthogonl' is unknown.*Did you mean 'orthogonal'?"),
        ({"schemes": [problem.draw]}, "schemes holds <function draw .* in a mapping a function"),
        ({"schemes": {"one": 3}}, "schemes holds 3; a scheme is a name, such as 'he', or in a mapping"),
        ({"optimizer": lambda parameters, lr: 3}, "optimizer returned int; it must be called as"),
        ({"device": "gpu7"}, "device='gpu7' cannot be used here.*Leave it out"),
        ({"folder": __file__}, "folder='.*' cannot be used: .*Not a directory"),
        ({"folder": Path(__file__).parent}, "holds other things .*; pass a folder of its own"),
        ({"data": (torch.ones(3), torch.ones(3), torch.ones(3))}, r"data\[0\] is a Tensor; every batch"),
        ({"data": (torch.ones(7, 50, 3), torch.ones(50))}, r"inputs of data have shape \(7, 50, 3\), and"),
    ],
)
def test_bad_arguments_of_compare_are_refused_before_any_run(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        problem.small(**arguments)


@pytest.mark.parametrize(
    ("loss", "output", "targets", "expected"),
    [
        (nn.CrossEntropyLoss(), (6, 3), torch.tensor([0, 0, 0, 1, 1, 2]), 1.0114),  # the entropy
        (nn.CrossEntropyLoss(), (2, 3, 4), torch.tensor([[0, 0, 0, 1], [0, 0, 1, 2]]), 0.9003),
        (nn.MSELoss(), (4, 2), torch.tensor([[1.0, 0.0], [3.0, 0.0], [1.0, 4.0], [3.0, 4.0]]), 2.5),
        (nn.MSELoss(reduction="sum"), (4,), torch.tensor([1.0, 1.0, 3.0, 3.0]), 4.0),
        (nn.BCEWithLogitsLoss(), (4, 1), torch.tensor([[1.0], [0.0], [0.0], [0.0]]), 0.5623),
    ],
)
def test_the_loss_of_a_constant_is_that_of_the_closed_form(loss, output, targets, expected) -> None:
    batch = Batch(None, targets, len(targets))
    loss_of = lambda output, batch: loss(output, batch.targets)  # noqa: E731
    assert constant_loss(loss_of, torch.ones(output), [batch]) == pytest.approx(expected, rel=1e-3)
    found = find_loss_range(loss_of, torch.full(output, 7.0), [batch])
    assert found.constant == pytest.approx(expected, rel=1e-3)
    assert found.free == pytest.approx(0.0, abs=2e-3)  # every target can be met


def test_a_sweep_does_not_crown_weights_that_do_not_learn() -> None:
    options = {"stds": [0.3, 1e-4], "seeds": 1, "steps": 40, "learning_rate": 0.2}
    settings = RunSettings(workers=1)
    found = sweep(problem.build, problem.LOSS, problem.data(), settings=settings, **options)
    counts = torch.bincount(problem.data()[1]) / 400
    entropy = -float((counts * counts.log()).sum())
    assert found.constant_loss == pytest.approx(entropy, rel=0.02)  # on the mini-batches of an epoch
    assert [found.learns(scheme, 0.2) for scheme in found.schemes] == [True, False]
    assert found.best == ("std 0.3", 0.2)
    assert found.verdict.endswith(
        f"std 0.0001 does not learn in 40 steps at lr 0.2: the loss ends no lower than that of a constant "
        f"output ({found.constant_loss:.3g})."
    )
    assert [run.outcome for run in found.runs] == ["learned", "did not learn"]


@pytest.mark.parametrize("kind", ["sweep", "compare"])
def test_where_nothing_learns_nothing_has_won_and_the_first_line_says_so(kind: str) -> None:
    options: dict[str, Any] = {"seeds": 2, "steps": 20}
    settings = RunSettings(workers=1, measure_curvature=False)
    if kind == "sweep":
        options |= {"stds": [1e-4, 1e-5], "learning_rate": 0.01}
        found = sweep(problem.build, problem.LOSS, problem.data(), settings=settings, **options)
    else:
        options |= {"schemes": ["he", "default"], "learning_rates": [1e-6, 1e-7]}
        found = problem.small(measure_curvature=False, **options)
    first = " ".join(str(found).partition("\n\n")[0].split())
    rates = "0.01" if kind == "sweep" else "1.0e-06 and 1.0e-07"
    said = f"No scheme learns at lr {rates}: every loss ends no lower than that of a constant output"
    assert first == found.verdict
    assert first.startswith(said)
    assert first.endswith("Try more steps or other learning rates.")
    assert not re.search(r"\d\*", str(found))  # no loss is marked as the lowest
    assert not any(found.learns(scheme, rate) for scheme in found.schemes for rate in found.learning_rates)
    with pytest.raises(ValueError, match="no scheme learns with every seed at any rate"):
        _ = found.best


def test_weights_that_begin_below_a_constant_output_are_not_said_to_end_above_it() -> None:
    trained = problem.build()
    optimizer, (images, labels) = torch.optim.Adam(trained.parameters(), 0.01), problem.data()
    for _ in range(100):
        optimizer.zero_grad()
        problem.LOSS(trained(images), labels).backward()
        optimizer.step()
    found = problem.small(
        build=lambda: copy.deepcopy(trained), schemes=["default"], learning_rates=[1e-9], seeds=1,
        measure_curvature=False,
    )  # fmt: skip
    assert found.runs[0].final_loss < 0.5 * found.constant_loss
    assert found.verdict.startswith(
        "No scheme learns at lr 1.0e-09: every loss ends no lower than the first one or that of a constant "
    )


def test_long_work_is_announced_with_what_makes_it_shorter(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("hessinit.progress.PACE", Pace(announced=0.0))
    problem.small(schemes=["he"], learning_rates=[0.1], seeds=1, progress=True)
    assert "Fewer steps, seeds, schemes or learning rates" in capsys.readouterr().err
    monkeypatch.setattr("hessinit.progress.PACE", Pace(announced=1e6))
    problem.small(schemes=["he"], learning_rates=[0.1], seeds=1, progress=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "told"), [(9.0, ""), (12.4, "about 12 seconds. S."), (200, "3 minutes"), (9000, "2 hours")]
)
def test_times_are_told_in_a_unit_that_fits(seconds: float, told: str, capsys: Any) -> None:
    announce(seconds, "S")
    assert told in capsys.readouterr().err
