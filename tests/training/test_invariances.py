"""No answer depends on what training does not depend on: a constant in the loss, its unit, the order, …"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hessinit
from calls import call
from hessinit.digits import load_digits
from tiny import Calling

pytestmark = pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")

EXAMPLES, HIDDEN, CLASSES = 64, 32, 10
CONSTANTS = (-1000.0, -1.0, 1.0, 100.0, 1000.0)
UNITS = (1e-3, 1e3)
ORDER = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(0))
NAMES = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(1))
ALIKE = 0.2  # rates
EQUAL = 1e-3  # weights


@dataclass(frozen=True)
class Case:
    """A problem as a verb is given it; `unit`: how many times as large the loss is."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    batch: Any
    unit: float = 1.0

    def rate(self, lr: float, optimizer: str = "sgd") -> float:
        """The rate that trains this problem as `lr` trains the one in a unit of 1."""
        return lr if optimizer == "adamw" else lr / self.unit

    def problem(self) -> tuple[nn.Module, Any, Any]:
        return self.build(), self.loss, self.batch


def network(*more: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES), *more)


def regressor() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def renamed() -> nn.Sequential:
    model = network()
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.copy_(parameter[NAMES])
    return model


def shifted(loss: Any, constant: float) -> Any:
    return lambda outputs, targets: loss(outputs, targets) + constant


def scaled(loss: Any, unit: float) -> Any:
    return lambda outputs, targets: unit * loss(outputs, targets)


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits()
    return images[:EXAMPLES].flatten(1), labels[:EXAMPLES]


def plain() -> Case:
    return Case(network, F.cross_entropy, digits())


def variants(case: Case) -> Iterator[tuple[str, Case]]:
    """The same problem, said in another way; the targets of a classifier are renamed besides."""
    build, loss, (inputs, targets) = case.build, case.loss, case.batch
    for constant in CONSTANTS:
        yield f"loss {constant:+g}", Case(build, shifted(loss, constant), case.batch)
    for unit in UNITS:
        yield f"loss × {unit:g}", Case(build, scaled(loss, unit), case.batch, unit)
    yield "another order", Case(build, loss, (inputs[ORDER], targets[ORDER]))
    yield "the batch twice", Case(build, loss, (torch.cat([inputs] * 2), torch.cat([targets] * 2)))
    yield "a list", Case(build, loss, [inputs, targets])
    yield "wrapped", Case(lambda: Calling(lambda net, x: net(x), build()), loss, case.batch)
    wide = inputs.double(), targets.double() if targets.is_floating_point() else targets
    yield "float64", Case(lambda: build().double(), loss, wide)


VARIANTS = [*dict(variants(plain())), "targets renamed"]
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@functools.cache
def of_plain(variant: str) -> Case:
    if variant == "targets renamed":
        inputs, targets = digits()
        return Case(renamed, F.cross_entropy, (inputs, NAMES.argsort()[targets]))
    return dict(variants(plain()))[variant]


def advised(case: Case, optimizer: str) -> tuple[float, float]:
    """The rate and the stability limit, in a unit of 1."""
    advice = hessinit.advise(*case.problem(), optimizer=optimizer)
    assert advice.learns
    unit = case.rate(1.0, optimizer)
    return advice.learning_rate / unit, advice.stable_learning_rate / unit


first_advice = functools.cache(lambda optimizer: advised(plain(), optimizer))


@each_variant
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_advised_rates_stay(optimizer: str, variant: str) -> None:
    rate, limit = advised(of_plain(variant), optimizer)
    assert rate == pytest.approx(first_advice(optimizer)[0], rel=ALIKE)
    assert limit == pytest.approx(first_advice(optimizer)[1], rel=ALIKE)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_the_examples_keeps_a_network_from_learning(optimizer: str, seed: int) -> None:
    """From 1/‖H‖, at which this network dies, the search goes down."""
    inputs, labels = digits()
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(seed))
    rate, _ = advised(Case(network, F.cross_entropy, (inputs[order], labels[order])), optimizer)
    assert rate == pytest.approx(first_advice(optimizer)[0], rel=ALIKE)


@pytest.mark.parametrize("seed", [6, 11, 14])
def test_a_search_that_starts_where_the_network_dies_goes_down(seed: int) -> None:
    """It ends just below its first loss there, and at twice the rate by chance a little lower."""
    advice = hessinit.advise(hessinit.Problem(*plain().problem(), seed=seed))
    assert advice.trials[-1].outcome != "learned"
    assert advice.learning_rate == pytest.approx(first_advice("sgd")[0], rel=0.5)


@pytest.mark.parametrize("variant", ["loss × 0.001", "loss × 1000", "another order", "the batch twice"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_a_flat_loss_is_advised_the_same_rate(optimizer: str, variant: str) -> None:
    """Small steps are not lost in the rounding of weights; a batch that is given twice has no less noise."""
    case = Case(lambda: network(nn.Softmax(1)), F.cross_entropy, digits())
    rate, _ = advised(dict(variants(case))[variant], optimizer)
    assert rate == pytest.approx(advised(case, optimizer)[0], rel=ALIKE)


def autoencoder() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 64))


def reconstruct() -> Case:
    """The mean over 4,096 outputs: each has a small gradient."""
    return Case(autoencoder, F.binary_cross_entropy_with_logits, (digits()[0],) * 2)


def judged(case: Case, optimizer: str, lr: float) -> str:
    """What `assert_sound` finds, without the numbers."""
    try:
        hessinit.assert_sound(*case.problem(), optimizer=optimizer, lr=case.rate(lr, optimizer))
    except AssertionError as failure:
        said = str(failure)
        kinds = "times the stability limit", "the loss rose", "the gradient is too small"
        return ", ".join(kind for kind in kinds if kind in said) or said
    return "sound"


@pytest.mark.parametrize(
    ("optimizer", "lr", "verdict"),
    [
        ("sgd", 0.2, "sound"), ("sgd", 200.0, "times the stability limit"),
        ("sgd", 1e-7, "the gradient is too small"), ("momentum", 0.02, "sound"), ("adamw", 3e-3, "sound"),
        ("adamw", 3.0, "the loss rose"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("variant", ["as it is", *VARIANTS])
def test_a_rate_is_sound_or_not_in_every_form(variant: str, optimizer: str, lr: float, verdict: str) -> None:
    case = plain() if variant == "as it is" else of_plain(variant)
    assert judged(case, optimizer, lr) == verdict


@pytest.mark.parametrize(
    ("lr", "verdict"), [(5.0, "sound"), (200.0, "the loss rose"), (1e-4, "the gradient is too small")]
)
def test_a_loss_with_small_gradients_is_judged_alike_in_every_form(lr: float, verdict: str) -> None:
    case = reconstruct()
    assert judged(case, "sgd", lr) == verdict
    for name, other in variants(case):
        assert judged(other, "sgd", lr) == verdict, name


def far_off() -> nn.Sequential:
    model = network()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.mul_(30)
    return model


def deep() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = [part for _ in range(6) for part in (nn.Linear(HIDDEN, HIDDEN), nn.Sigmoid())]
        return nn.Sequential(nn.Linear(64, HIDDEN), nn.Sigmoid(), *hidden, nn.Linear(HIDDEN, CLASSES))


def standardized() -> Tensor:
    brightness = digits()[0].mean(1, keepdim=True)
    return (brightness - brightness.mean()) / brightness.std()


FOUND: dict[str, tuple[Callable[[], Case], tuple[str, ...]]] = {
    "sound": (plain, ()),
    "a regression": (lambda: Case(regressor, F.mse_loss, (digits()[0], standardized())), ()),
    "shapes": (lambda: Case(regressor, F.mse_loss, (digits()[0], standardized()[:, 0])), ("shapes",)),
    "two softmaxes": (
        lambda: Case(lambda: network(nn.Softmax(1)), F.cross_entropy, digits()), ("softmax twice",),
    ),
    "a start far off": (lambda: Case(far_off, F.cross_entropy, digits()), ("loss too large",)),
    "a deep network": (lambda: Case(deep, F.cross_entropy, digits()), ("signal lost",)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", FOUND)
def test_the_verdict_of_measure_stays(name: str) -> None:
    make, kinds = FOUND[name]
    case = make()
    first = hessinit.measure(*case.problem())
    assert tuple(finding.kind for finding in first.findings) == kinds
    for variant, other in variants(case):
        report = hessinit.measure(*other.problem())
        assert tuple(finding.kind for finding in report.findings) == kinds, variant
        assert report.verdict.startswith("Not sound:" if kinds else "Sound:"), variant
        assert report.network.norm / other.unit == pytest.approx(first.network.norm, rel=1e-2), variant


def initialized(case: Case, lr: float | str, **options: Any) -> tuple[hessinit.Initialization, Tensor]:
    model = case.build()
    rate = lr if isinstance(lr, str) else case.rate(lr, options.get("optimizer", "sgd"))
    result = call(hessinit.initialize_, model, case.loss, case.batch, lr=rate, progress=False, **options)
    return result, torch.cat([one.detach().double().flatten() for one in model.parameters()])


first_weights = functools.cache(lambda make, lr: initialized(make(), lr))


def check_initialized(make: Callable[[], Case], case: Case, lr: float | str, variant: str) -> None:
    first, weights = first_weights(make, lr)
    result, others = initialized(case, lr)
    assert (result.learned, result.converged) == (first.learned, first.converged) == (True, True), variant
    assert float((others - weights).norm() / weights.norm()) < EQUAL, variant
    assert result.lr * case.unit == pytest.approx(first.lr, rel=ALIKE), variant


@each_variant
@pytest.mark.parametrize("lr", ["auto", 0.1])
def test_initial_weights_stay(lr: float | str, variant: str) -> None:
    check_initialized(plain, of_plain(variant), lr, variant)


@pytest.mark.parametrize("lr", ["auto", 0.1])
def test_initial_weights_of_a_loss_with_small_gradients_stay(lr: float | str) -> None:
    for variant, case in variants(reconstruct()):
        check_initialized(reconstruct, case, lr, variant)


def spread() -> nn.Sequential:
    """Of a mean and the logarithm of a variance."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2))


def gaussian() -> Case:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.gaussian_nll_loss(outputs[:, :1], targets, outputs[:, 1:].exp())

    return Case(spread, loss, (digits()[0], digits()[0].mean(1, keepdim=True) - 0.3))


def test_initial_weights_of_a_loss_that_goes_below_zero_stay() -> None:
    for variant, case in variants(gaussian()):
        check_initialized(gaussian, case, 0.02, variant)


def test_present_weights_are_scaled_alike_where_targets_are_renamed() -> None:
    _, weights = initialized(plain(), 0.1, scheme="keep")
    _, others = initialized(of_plain("targets renamed"), 0.1, scheme="keep")
    sizes = [HIDDEN * 64 + HIDDEN, CLASSES * HIDDEN, CLASSES]
    (hidden, head, biases), (same, rows, offsets) = weights.split(sizes), others.split(sizes)
    expected = torch.cat([hidden, head.view(CLASSES, HIDDEN)[NAMES].flatten(), biases[NAMES]])
    assert float((torch.cat([same, rows, offsets]) - expected).norm() / expected.norm()) < EQUAL


@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 3e-3), ("sgd", 0.1), ("sgd", "auto")])
def test_the_same_start_is_chosen_in_every_form(optimizer: str, lr: float | str) -> None:
    """On halves of the batch for AdamW, for which nothing is fitted; else on ready mini-batches."""
    images, labels = load_digits()
    fresh = list(zip(images[256:].flatten(1).split(64)[:16], labels[256:].split(64)[:16], strict=True))
    options: dict[str, Any] = {"optimizer": optimizer} if optimizer == "adamw" else {"data": fresh}
    first, weights = initialized(plain(), lr, **options)
    assert {trial.name for trial in first.trials} == {"hessinit", "your weights"}
    for variant, case in variants(plain()):
        result, others = initialized(case, lr, **options)
        assert result.trials[0].name == first.trials[0].name, variant
        assert result.trials[0].steps == first.trials[0].steps, variant
        assert float((others - weights).norm() / weights.norm()) < EQUAL, variant


def compared(case: Case) -> hessinit.Comparison:
    inputs, targets = case.batch
    halves = [(inputs[:32], targets[:32]), (inputs[32:], targets[32:])]
    return hessinit.compare(
        case.build, case.loss, halves if isinstance(case.batch, list) else case.batch,
        schemes=["default", "he", "lsuv"], learning_rates=[case.rate(lr) for lr in (0.1, 0.3, 100.0)],
        seeds=2, steps=20, batch_size=32,
        settings=hessinit.RunSettings(workers=1, progress=False, measure_curvature=False),
    )  # fmt: skip


@functools.cache
def first_comparison() -> tuple[Any, ...]:
    return outcome(plain())


def outcome(case: Case) -> tuple[Any, ...]:
    """The winner, who learns where, and whom the verdict calls robust."""
    comparison = compared(case)
    scheme, rate = comparison.best
    pairs = itertools.product(comparison.schemes, comparison.learning_rates)
    learns = [comparison.learns(*pair) for pair in pairs]
    (robust,) = [one for one in comparison.schemes if f"{one} trains wherever" in comparison.verdict]
    return scheme, round(rate * case.unit, 6), learns, robust


@each_variant
def test_the_winner_of_a_comparison_stays(variant: str) -> None:
    assert first_comparison()[:2] == ("lsuv", 0.3)
    assert outcome(of_plain(variant)) == first_comparison()


def tracked(case: Case, lr: float) -> tuple[list[float], tuple[int, ...], str]:
    """At every point the rate over the stability limit; the crossings; and what the verdict says of them."""
    model, (inputs, targets) = case.build(), case.batch
    optimizer = torch.optim.SGD(model.parameters(), case.rate(lr))
    options: dict[str, Any] = {"path": None, "every": 4, "max_overhead": 1}
    options["settings"] = hessinit.TrackSettings(warn=False)
    with hessinit.track(model, case.loss, case.batch, optimizer=optimizer, **options) as tracker:
        for _ in range(8):
            optimizer.zero_grad()
            loss = case.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            tracker.step(loss)
    stayed = "lr stayed below the stability limit" in tracker.tracking.verdict
    points = [point.lr_over_limit for point in tracker.tracking.points]
    return points, tracker.tracking.crossings, "below" if stayed else "above"


first_track = functools.cache(lambda lr: tracked(plain(), lr))


@each_variant
@pytest.mark.parametrize(("lr", "side"), [(0.3, "below"), (6.0, "above")])
def test_points_and_crossings_stay(lr: float, side: str, variant: str) -> None:
    points, crossings, verdict = tracked(of_plain(variant), lr)
    expected, first_crossings, _ = first_track(lr)
    assert (crossings, verdict) == (first_crossings, side)
    stays = 3 if side == "below" else 1  # above the limit, rounding grows
    assert points[:stays] == pytest.approx(expected[:stays], rel=0.05)
