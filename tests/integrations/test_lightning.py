"""The Lightning callback in real runs of the real Trainer."""

from __future__ import annotations

import copy
import csv
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn

import hessinit
from adamw_truth import dense_adamw_limit
from calls import call
from hessinit import TrackSettings
from hessinit.integrations.lightning_callback import CurvatureCallback
from integrations.lightning_digits import (
    LOSS,
    digits,
    digits_module,
    loader,
    make_network,
    plain_network,
    same_weights,
    trainer_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
]


@pytest.mark.parametrize(
    "package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.sweep)]
)
def test_a_run_is_measured_at_the_start_followed_stored_and_logged(package: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    library, network = importlib.import_module(package), plain_network()
    before, own = copy.deepcopy(network), importlib.import_module(f"{package}.loggers")
    callback = CurvatureCallback(LOSS, every=2, settings=TrackSettings(each_layer=True))
    loggers = [own.CSVLogger(tmp_path / "text"), own.TensorBoardLogger(tmp_path / "board")]
    trainer = trainer_of(library, tmp_path, callback, max_steps=4, logger=loggers)
    trainer.fit(digits_module(library, network), loader())
    tracking = callback.tracking
    assert [point.step for point in tracking.points] == [0, 2, 4]
    for point, model in ((tracking.points[0], before), (tracking.points[-1], network)):
        truth = hessinit.measure(model, LOSS, digits(16), tolerance=1e-4)  # the first training batch
        assert point.norm == pytest.approx(truth.network.norm, rel=0.02)
        assert point.lr_times_norm == pytest.approx(0.1 * truth.network.norm, rel=0.02)
        assert set(point.layers) == {"network.0", "network.2"}
    assert callback.initialization is None
    folder, norms = Path(loggers[0].log_dir), [point.norm for point in tracking.points]
    stored = hessinit.Tracking.from_json((folder / "curvature.jsonl").read_bytes())
    assert [point.norm for point in stored.points] == norms
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    logged = [float(row["hessinit/norm"]) for row in rows if row["hessinit/norm"]]
    scalars = EventAccumulator(loggers[1].log_dir).Reload().Scalars("hessinit/norm")
    assert [one.step for one in scalars] == [0, 2, 4]
    assert logged == pytest.approx(norms, rel=1e-5)
    assert [one.value for one in scalars] == pytest.approx(norms, rel=1e-5)


def test_training_is_not_changed_by_a_bit(tmp_path: Path) -> None:
    trained = []
    for callbacks in ([], [CurvatureCallback(LOSS, every=1)]):
        torch.manual_seed(3)
        module = digits_module(lightning, make_network(), momentum=0.9)
        trainer_of(lightning, tmp_path, *callbacks, max_epochs=2).fit(module, loader(shuffle=True))
        trained.append((module, torch.get_rng_state()))
    (without, state), (followed, other_state) = trained
    assert len(callbacks[0].tracking.points) == 9
    assert same_weights(without, followed)
    assert torch.equal(state, other_state)


@pytest.mark.parametrize(
    ("make", "lr", "target", "rates"),
    [
        # Steps of momentum last 1/(1 − 0.8) = 5 times as long; for AdamW the scheme alone decides.
        (lambda weights: torch.optim.SGD(weights, lr=0.2, momentum=0.8), 0.2, 4 / (5 * 0.2), [0.2] * 3),
        (lambda weights: torch.optim.AdamW(weights, lr=1e-3), 1e-3, None, [1e-3] * 3),
        (lambda weights: torch.optim.SGD(weights, lr=0.4), 0.4, 4 / 0.4, [0, 0.04, 0.08]),
        (lambda weights: torch.optim.SGD(weights, lr=0.5), 0.5, 4 / 0.5, [0.5] * 3),
    ],
    ids=["momentum", "adamw", "warmup", "sgd"],
)
def test_the_initialization_is_for_the_optimizer_and_the_rate_that_a_schedule_works_towards(
    make: Any, lr: float, target: float | None, rates: list[float], tmp_path: Path
) -> None:
    module = digits_module(lightning, plain_network())

    def configure() -> Any:
        optimizer, warming = make(module.parameters()), rates[0] == 0
        factor = lambda step: min(1.0, step / 10) if warming else 1.0  # noqa: E731
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module.configure_optimizers, parameters = configure, list(module.parameters())
    options = {"every": 1, "path": tmp_path / "run.jsonl", "settings": TrackSettings(warn=False)}
    callback = CurvatureCallback(LOSS, initialize=True, **options)
    trainer_of(lightning, tmp_path, callback, max_steps=2).fit(module, loader())
    result, tracking = callback.initialization, callback.tracking
    assert result.lr == lr
    assert [point.lr for point in tracking.points] == pytest.approx(rates)
    assert tracking.initialization == result
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    assert (tmp_path / "run.jsonl").exists()
    if target is None:
        assert set(result.scales.values()) == {1.0}
    else:
        assert result.target == pytest.approx(target)
        assert tracking.points[0].norm == pytest.approx(target, rel=0.06)
    on_purpose = any("above the stability limit on purpose" in note for note in tracking.notes)
    assert on_purpose == (rates[0] == 0.5)


def test_groups_of_adamw_have_the_dense_limit(tmp_path: Path) -> None:
    module = digits_module(lightning, nn.Sequential(nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 10))).double()
    groups = [
        {"params": module.network[0].parameters(), "lr": 1e-3, "weight_decay": 40.0},
        {"params": module.network[2].parameters(), "lr": 4e-3, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    module.configure_optimizers = lambda: optimizer
    batch = digits(16)[0].double(), digits(16)[1]
    limit = dense_adamw_limit(module, LOSS, batch, optimizer)
    callback = CurvatureCallback(LOSS, batch=batch, settings=TrackSettings(tolerance=1e-8))
    trainer_of(lightning, tmp_path, callback, max_steps=1, precision="64-true").fit(module, loader())
    point = callback.tracking.points[0]
    assert (point.lr, point.stable_learning_rate) == (4e-3, pytest.approx(limit, rel=1e-6))


def test_accumulated_batches_count_as_one_step(tmp_path: Path) -> None:
    module, callback = digits_module(lightning, plain_network()), CurvatureCallback(LOSS, every=1)
    trainer_of(lightning, tmp_path, callback, max_epochs=1, accumulate_grad_batches=2).fit(module, loader())
    assert [point.step for point in callback.tracking.points] == [0, 1, 2]
    expected = [sum(module.seen[:2]) / 2, sum(module.seen[2:]) / 2]
    assert [loss for _, loss in callback.tracking.losses] == pytest.approx(expected, rel=1e-5)
    assert not any("may not be what is trained" in note for note in callback.tracking.notes)


def masked_network() -> nn.Module:
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10))
    nn.init.normal_(network[1].weight, std=0.3)  # so that a mask changes the loss by some 10 %
    return network


@pytest.mark.parametrize(
    ("times", "more", "make", "is_noted"),
    [
        (50, 0.0, plain_network, True),
        (0.02, 0.0, plain_network, True),
        (1, 0.5, plain_network, True),
        (50, 0.0, make_network, True),
        (1, 0.0, plain_network, False),
        (1, 0.0, masked_network, False),  # the training step has another mask
    ],
)
def test_a_training_step_with_another_loss_is_noted(times, more, make, is_noted, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = digits_module(lightning, make())
    module.training_step = lambda batch, batch_idx: times * LOSS(module(batch[0]), batch[1]) + more
    callback = CurvatureCallback(LOSS)
    trainer_of(lightning, tmp_path, callback, max_steps=2).fit(module, loader())
    noted = [note for note in callback.tracking.notes if "may not be what is trained" in note]
    assert len(noted) == is_noted
    measured = callback.tracking.points[0].loss
    assert all(f"where the measured loss is {measured:.3g}" in note for note in noted)


def test_several_optimizers_leave_the_sharpness_without_a_rate(tmp_path: Path) -> None:
    module = digits_module(lightning, plain_network())
    module.automatic_optimization = False
    layers = module.network[0], module.network[2]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    module.configure_optimizers = lambda: optimizers

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = LOSS(module(batch[0]), batch[1])
        module.seen.append(loss.item())
        module.manual_backward(loss / 2)
        for optimizer in module.optimizers() if batch_idx % 2 else ():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    module.training_step = training_step
    callback = CurvatureCallback(LOSS, every=2)
    trainer_of(lightning, tmp_path, callback, max_epochs=1).fit(module, loader())
    tracking, seen = callback.tracking, module.seen
    assert [point.step for point in tracking.points] == [0, 2, 4]
    assert {point.lr_over_limit for point in tracking.points} == {None}
    expected = [sum(seen[:2]) / 2, sum(seen[2:]) / 2]
    assert [loss for _, loss in tracking.losses] == pytest.approx(expected, rel=1e-5)
    assert any("There are 2 optimizers, so no single learning rate" in note for note in tracking.notes)
    refusing = CurvatureCallback(LOSS, initialize=True)
    with pytest.raises(hessinit.ProblemError, match="not one optimizer.*initialize=lambda problem"):
        trainer_of(lightning, tmp_path, refusing, max_epochs=1).fit(module, loader(32))


def test_the_batch_may_be_given_or_made_from_the_first_one_or_be_that_of_a_problem(tmp_path: Path) -> None:
    norms = []
    for batch in (digits(8), lambda caught: (caught[0][:8], caught[1][:8]), None):
        torch.manual_seed(0)
        module = digits_module(lightning, plain_network())
        problem = hessinit.Problem(module, LOSS, digits(8))
        callback = CurvatureCallback(problem if batch is None else LOSS, batch=batch)
        trainer_of(lightning, tmp_path, callback, max_steps=1).fit(module, loader())
        assert callback.tracking.examples == 8
        norms.append(callback.tracking.points[0].norm)
    assert norms[0] == norms[1] == norms[2]


def test_a_problem_chooses_the_layers_and_a_function_the_initialization(tmp_path: Path) -> None:
    def draw(problem: hessinit.Problem) -> hessinit.Initialization:
        assert problem.layers == ("network.2",)
        parts = problem.model, problem.loss, problem.batch
        return call(hessinit.initialize_, *parts, target=0.1, layers=problem.layers)

    torch.manual_seed(0)
    module = digits_module(lightning, plain_network())
    frozen = copy.deepcopy(module.network[0])
    problem = hessinit.Problem(module, LOSS, digits(8), layers=["network.2"])
    callback = CurvatureCallback(problem, initialize=draw, settings=TrackSettings(each_layer=True))
    trainer_of(lightning, tmp_path, callback, max_steps=1).fit(module, loader())
    assert callback.initialization.target == 0.1
    assert list(callback.initialization.scales) == ["network.2"]
    assert list(callback.tracking.points[0].layers) == ["network.2"]
    assert frozen.weight.shape == module.network[0].weight.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": nn.CrossEntropyLoss}, "callable as loss"),
        ({"initialize": "yes"}, "initialize='yes' must be True, False, or a function of the problem"),
        ({"lr": 0.1}, "unexpected keyword argument 'lr'"),
        ({"settings": {"each_layer": True}}, "settings is a dict; it must be a hessinit.TrackSettings"),
        ({"loss": hessinit.Problem(plain_network(), LOSS, digits(8)), "batch": digits(8)}, "pass it alone"),
        ({"every": 0}, "every=0 must be a whole number, 1 or more"),
        ({"batch": digits(8)[0]}, "batch is a Tensor"),
    ],
)
def test_a_wrong_option_is_refused_before_the_first_step(options: Any, message: str, tmp_path: Path) -> None:
    def fit() -> None:
        callback = CurvatureCallback(**{"loss": LOSS, **options})
        module = digits_module(lightning, plain_network())
        trainer_of(lightning, tmp_path, callback, max_steps=1).fit(module, loader())

    with pytest.raises((hessinit.ProblemError, TypeError), match=message):
        fit()


def test_the_optimizer_that_a_module_hands_out_is_read_by_every_verb() -> None:
    """`self.optimizers()` is a wrapper; that of Accelerate, too, has the one of torch inside."""
    network, batch = plain_network(), digits()
    groups = [{"params": network[0].parameters(), "lr": 1e9}, {"params": network[2].parameters()}]
    optimizer = LightningOptimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    advice = hessinit.advise(network, LOSS, batch, optimizer=optimizer)
    assert (advice.optimizer, advice.lr) == ("SGD(momentum=0.9)", 1e9)
    with pytest.raises(AssertionError, match=r"lr = 1e\+09 is .* times the stability limit"):
        hessinit.assert_sound(network, LOSS, batch, optimizer=optimizer)
    tracker = call(hessinit.track, network, LOSS, batch, optimizer=optimizer, path=None, warn=False)
    assert tracker.tracking.optimizer


def test_what_a_strategy_shards_is_refused() -> None:
    module = digits_module(lightning, plain_network())
    wrapped = type("FullyShardedDataParallel", (nn.Sequential,), {})(module)
    trainer = SimpleNamespace(global_step=0, optimizers=[], log_dir=".", loggers=[], model=wrapped)
    with pytest.raises(hessinit.ProblemError, match="the model is sharded.*before the model is sharded"):
        CurvatureCallback(LOSS).on_train_batch_start(trainer, module, digits(8), 0)


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "hessinit.integrations.lightning_callback")
    with pytest.raises(ImportError, match=r"pip install 'hessinit\[lightning\]'"):
        importlib.import_module("hessinit.integrations.lightning_callback")
