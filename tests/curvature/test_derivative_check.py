"""The independent check refuses derivatives that are not those of the function, and nothing else."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from check_power import WrongWeight, build, spoil
from odd_constructions import OnceSwish, SavedSwish, Swish, WrongSwish
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

import hessinit
import hessinit_paper
from calls import call, measure
from tiny import LOSS, Calling, Net, batch, inputs, labels, network
from zoo.snapshot import differences, snapshot

NOT_THE_DERIVATIVE = "is not that of the function that is trained"
MANY = inputs(16), labels(16)
each_curvature = pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
each_share = pytest.mark.parametrize("share", [1.0, 1e-3])


def branch(function: Callable[[Tensor], Tensor], share: float = 1.0) -> nn.Module:
    """A skip connection, and a branch with a share of the output, as behind a LayerScale."""
    torch.manual_seed(0)
    parts = {"first": nn.Linear(4, 5), "last": nn.Linear(5, 3), "skip": nn.Linear(4, 3)}
    return Net(lambda m, x: m.skip(x) + share * m.last(function(3 * m.first(x))), **parts)


def check_refused(message: str, model: nn.Module, loss: Any = LOSS, data: Any = None, **options: Any) -> None:
    with pytest.raises(hessinit.ProblemError, match=message):
        measure(model, loss, data or batch(), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_share
@pytest.mark.parametrize(
    ("function", "curvature"),
    [(OnceSwish, "hessian"), (SavedSwish, "hessian"), (WrongSwish, "hessian"), (WrongSwish, "gauss-newton")],
)
def test_a_custom_function_with_another_derivative_is_refused_by_its_name(
    function: Any, curvature: str, share: float, dtype: torch.dtype
) -> None:
    message = f"{NOT_THE_DERIVATIVE}.*the backward of {function.__name__}"
    options = {"curvature": curvature, "dtype": dtype, "estimator": "lanczos"}  # not the plain engine
    check_refused(message, branch(function.apply, share), **options)


@pytest.mark.parametrize(
    "verb",
    [
        lambda *problem: hessinit.measure(*problem, estimator="lanczos"),
        lambda *problem: hessinit.measure(*problem, details="jacobians"),
        lambda *problem: hessinit_paper.quadratic_form(hessinit.Problem(*problem)),
        lambda *problem: hessinit.gauss_newton(*problem).to_dense(),
    ],
)
def test_a_backward_that_cannot_be_differentiated_is_refused_by_name(verb: Callable[..., Any]) -> None:
    message = "the backward of OnceSwish is not the derivative of its forward, or cannot be differentiated"
    with pytest.raises(hessinit.ProblemError, match=message):
        verb(branch(OnceSwish.apply), LOSS, batch())
    assert verb(branch(Swish.apply), LOSS, batch()) is not None


@each_share
@pytest.mark.parametrize(
    ("function", "curvature"), [(OnceSwish, "gauss-newton"), (Swish, "hessian"), (SavedSwish, "gauss-newton")]
)
def test_what_is_differentiated_often_enough_is_right(function: Any, curvature: str, share: float) -> None:
    truth = measure(branch(F.silu, share), LOSS, batch(), dtype=torch.float64, curvature=curvature)
    found = hessinit.measure(branch(function.apply, share), LOSS, batch(), curvature=curvature)
    assert found["first"].norm == pytest.approx(truth["first"].norm, rel=1e-3)


class FusedCrossEntropy(torch.autograd.Function):
    """As in Liger, Apex and Unsloth: the gradient is computed in the forward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward((z.softmax(1) - F.one_hot(y, z.shape[1])) / len(z))
        return F.cross_entropy(z, y)

    backward = staticmethod(once_differentiable(lambda ctx, grad: (grad * ctx.saved_tensors[0], None)))


class Scaled(torch.autograd.Function):
    """The identity, whose backward multiplies by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradient, None


def focal(z: Tensor, y: Tensor) -> Tensor:
    """Holds a weight of the output constant."""
    each = F.cross_entropy(z, y, reduction="none")
    return ((1 - torch.exp(-each)).detach() * each).mean()


LOSSES: dict[str, tuple[Any, str]] = {
    "fused": (FusedCrossEntropy.apply, "FusedCrossEntropy.*F.cross_entropy"),
    "5 percent too large": (lambda z, y: Scaled.apply(F.cross_entropy(z, y), 1.05), ""),
    "a stopped gradient": (focal, "detach.* inside the loss"),
}


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian", "both"])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_with_another_derivative_is_refused(kind: str, curvature: str) -> None:
    loss, cause = LOSSES[kind]
    message = f"the derivative of the loss {NOT_THE_DERIVATIVE}.*{cause}"
    check_refused(message, network(), loss, curvature=curvature, estimator="lanczos")


ON_PURPOSE: dict[str, Callable[[Tensor], Tensor]] = {
    "straight-through": lambda x: x + ((4 * x).round() / 4 - x).detach(),
    "gradient reversal": lambda x: Scaled.apply(x, -1.0),
    "stopped gradient": lambda x: x * x.detach(),
}


@pytest.mark.parametrize("kind", ON_PURPOSE)
@each_curvature
def test_a_backward_that_differs_on_purpose_is_refused_and_measured_on_request(
    kind: str, curvature: str
) -> None:
    model = branch(ON_PURPOSE[kind])
    check_refused(f"on purpose.*{kind}.*check=False measures", model, curvature=curvature)
    report = measure(model, LOSS, batch(), check=False, curvature=curvature)
    assert report.network.norm > 0
    assert any("not checked" in note for note in report.notes)


def test_spectral_norm_is_refused_in_train_mode_and_measured_in_eval_mode() -> None:
    torch.manual_seed(3)
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    model = nn.Sequential(normed, nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():  # u and v are those of other weights
        normed.parametrizations.weight.original.add_(torch.randn(5, 4))
    check_refused("a spectral_norm in train mode.*measure it in eval mode", model, curvature="hessian")
    assert hessinit.measure(model.eval(), LOSS, batch(), curvature="hessian").network.norm > 0


VERBS = "measure", "hessian", "gauss_newton", "jacobian", "assert_sound"
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("advise", {"trial_steps": 0}), ("initialize_", {"lr": 0.1}), ("track", {"path": None}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in VERBS), *OPTIONS])
def test_every_verb_checks_and_can_leave_it_out(name: str, options: dict[str, Any]) -> None:
    verb, model = getattr(hessinit, name), branch(WrongSwish.apply)
    before = snapshot(model, LOSS, batch())
    with pytest.raises(hessinit.ProblemError, match=NOT_THE_DERIVATIVE):
        call(verb, model, LOSS, batch(), **options)
    assert differences(before, snapshot(model, LOSS, batch())) == []
    assert call(verb, branch(WrongSwish.apply), LOSS, batch(), check=False, **options) is not None


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_advise_needs_no_curvature_for_its_rate_and_says_why_it_has_no_limit(optimizer: str) -> None:
    model = branch(WrongSwish.apply)
    before = snapshot(model, LOSS, batch())
    advice = hessinit.advise(model, LOSS, batch(), optimizer=optimizer)
    assert differences(before, snapshot(model, LOSS, batch())) == []
    assert advice.learns
    tried = [trial.lr for trial in advice.trials]
    assert min(tried) <= advice.learning_rate <= max(tried)
    assert math.isnan(advice.stable_learning_rate)
    assert math.isnan(advice.norm.value)
    assert re.match(f"No rate follows from the curvature: .*{NOT_THE_DERIVATIVE}", advice.stable_reason)
    checked = hessinit.advise(
        hessinit.Problem(branch(WrongSwish.apply), LOSS, batch(), check=False), optimizer=optimizer
    )
    assert checked.stable_learning_rate > 0
    assert any("not checked" in note for note in checked.notes)


def at_a_kink() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    nn.init.zeros_(model[2].weight)  # every unit behind it is at the kink, whatever the step
    nn.init.zeros_(model[2].bias)
    return model


def choose_expert(m: Any, x: Tensor) -> Tensor:
    weights = m.gate(x).softmax(1)
    best, rows = weights.argmax(1), torch.arange(len(x))
    return torch.stack([expert(x) for expert in m.experts], 1)[rows, best] * weights[rows, best, None]


def deep(width: int, depth: int) -> nn.Sequential:
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(4, width), *layers, nn.Linear(width, 3))


def single_only(net: nn.Module, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return F.relu(net(x))


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "a network at a kink": at_a_kink,
    "a gate that jumps": lambda: Net(
        choose_expert, gate=nn.Linear(4, 2), experts=nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
    ),
    "many layers with kinks": lambda: deep(8, 30),
    "a wide network with kinks": lambda: deep(300, 2),
    "a forward for float32 only": lambda: Calling(single_only),
    "inputs that cancel three digits": lambda: Calling(
        lambda net, x: net(300 + 0.1 * x),
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
    ),
    "a constant output beside": lambda: Calling(lambda net, x: net(x) * 1e-7 + 1e3),
}


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
@each_curvature
@pytest.mark.parametrize("kind", RIGHT)
def test_kinks_jumps_and_rounding_do_not_trip_it(kind: str, curvature: str) -> None:
    torch.manual_seed(0)
    assert hessinit.measure(RIGHT[kind](), LOSS, MANY, curvature=curvature).network is not None


def test_a_row_of_padding_does_not_trip_it() -> None:
    words = nn.Embedding(6, 4, padding_idx=0)
    model = Net(lambda m, x: m.head(torch.tanh(m.words(x).mean(1))), words=words, head=nn.Linear(4, 3))
    tokens = torch.arange(18).remainder(6).view(6, 3)
    assert hessinit.measure(model, LOSS, (tokens, labels())).network.norm > 0


@pytest.mark.parametrize("precision", ["float32", "float64"])
@each_curvature
def test_layers_and_losses_wrong_by_5_percent_are_found_in_random_networks(
    curvature: str, precision: str
) -> None:
    """A sample; benchmarks/check_power.py counts 200 of them."""
    refused = 0
    for seed in range(300_000, 300_012):
        parts, chance = build(seed)
        spoil(parts, chance)
        parts = parts.double() if precision == "float64" else parts
        try:
            measure(parts.model, parts.loss, parts.batch, reduction="mean", curvature=curvature)
        except hessinit.ProblemError as refusal:
            refused += NOT_THE_DERIVATIVE in str(refusal)
    assert refused >= 11


@each_curvature
@pytest.mark.parametrize("layer", ["0", pytest.param("2", marks=pytest.mark.sweep), "4"])
def test_one_large_layer_wrong_by_5_percent_is_found(layer: str, curvature: str) -> None:
    """Directions of large weights are outer products."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 256, 3), nn.GELU(), nn.Conv2d(256, 128, 3), nn.Flatten(), nn.Linear(1152, 300)
    model, data = nn.Sequential(*layers), (torch.randn(8, 2, 7, 7), torch.arange(8))
    measure(model, LOSS, data, layers=layer, curvature=curvature, network=False)
    parametrize.register_parametrization(model.get_submodule(layer), "weight", WrongWeight())
    check_refused(NOT_THE_DERIVATIVE, model, data=data, curvature=curvature, network=False)


@pytest.mark.parametrize(("inner", "most"), [(network(), 3), (deep(6, 2), 5)], ids=["smooth", "kinks"])
@each_curvature
def test_the_check_costs_three_evaluations_and_two_for_kinks(
    inner: nn.Module, most: int, curvature: str
) -> None:
    def count_calls(check: bool) -> int:
        calls = itertools.count().__next__  # not put back by measuring

        def forward(net: nn.Module, x: Tensor) -> Tensor:
            if len(x) == 16:
                calls()
            return net(x)

        measure(Calling(forward, inner), LOSS, MANY, check=check, curvature=curvature)
        return calls()

    assert 0 < count_calls(True) - count_calls(False) <= most
