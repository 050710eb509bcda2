"""The independent check refuses derivatives that are not those of the function, and nothing else."""

from __future__ import annotations

import itertools
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
from tiny import LOSS, Calling, batch, inputs, labels, network
from zoo.snapshot import differences, snapshot

NOT_THE_DERIVATIVE = "is not that of the function that is trained"


class Branch(nn.Module):
    """A skip connection, and a branch with a share of the output, as behind a LayerScale."""

    def __init__(self, function: Callable[[Tensor], Tensor], share: float = 1.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last, self.skip = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(4, 3)
        self.function, self.share = function, share

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.share * self.last(self.function(3 * self.first(x)))


SHARES = [1.0, 1e-3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    ("function", "curvature"),
    [
        (OnceSwish, "hessian"),
        (SavedSwish, "hessian"),
        (WrongSwish, "hessian"),
        (WrongSwish, "gauss-newton"),
    ],
)
def test_a_custom_function_with_another_derivative_is_refused_by_its_name(
    function: Any, curvature: str, share: float, dtype: torch.dtype
) -> None:
    with pytest.raises(
        hessinit.ProblemError, match=f"{NOT_THE_DERIVATIVE}.*the backward of {function.__name__}"
    ):
        hessinit.measure(Branch(function.apply, share), LOSS, batch(), curvature=curvature, dtype=dtype)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("function", "curvature"), [(Swish, "hessian"), (SavedSwish, "gauss-newton")])
def test_what_is_differentiated_often_enough_is_right(function: Any, curvature: str, share: float) -> None:
    truth = hessinit.measure(Branch(F.silu, share), LOSS, batch(), curvature=curvature, dtype=torch.float64)
    found = hessinit.measure(Branch(function.apply, share), LOSS, batch(), curvature=curvature)
    assert found["first"].norm == pytest.approx(truth["first"].norm, rel=1e-3)


class FusedCrossEntropy(torch.autograd.Function):
    """As in Liger, Apex and Unsloth: the gradient is computed in the forward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward((z.softmax(1) - F.one_hot(y, z.shape[1])) / len(z))
        return F.cross_entropy(z, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def fused_and_a_penalty(z: Tensor, y: Tensor) -> Tensor:
    fused: Tensor = FusedCrossEntropy.apply(z, y)
    return fused + 0.05 * z.square().mean()


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian", "both"])
@pytest.mark.parametrize("loss", [FusedCrossEntropy.apply, fused_and_a_penalty])
def test_a_fused_loss_is_refused_by_its_name(loss: Any, curvature: str) -> None:
    message = f"the derivative of the loss {NOT_THE_DERIVATIVE}.*FusedCrossEntropy.*F.cross_entropy"
    with pytest.raises(hessinit.ProblemError, match=message):
        hessinit.measure(network(), loss, batch(), curvature=curvature)


@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_a_loss_whose_gradient_is_wrong_by_5_percent_is_refused(factor: float) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return factor * gradient

    with pytest.raises(hessinit.ProblemError, match=f"the derivative of the loss {NOT_THE_DERIVATIVE}"):
        hessinit.measure(network(), lambda z, y: Wrong.apply(F.cross_entropy(z, y)), batch())


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


ON_PURPOSE: dict[str, Callable[[Tensor], Tensor]] = {
    "straight-through": lambda x: x + ((4 * x).round() / 4 - x).detach(),
    "gradient reversal": Reversal.apply,
    "stopped gradient": lambda x: x * x.detach(),
}


@pytest.mark.parametrize("kind", ON_PURPOSE)
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_a_backward_that_differs_on_purpose_is_refused_by_that_name_and_measured_on_request(
    kind: str, curvature: str
) -> None:
    model = Branch(ON_PURPOSE[kind])
    with pytest.raises(hessinit.ProblemError, match=f"on purpose.*{kind}.*check=False measures"):
        hessinit.measure(model, LOSS, batch(), curvature=curvature)
    report = hessinit.measure(model, LOSS, batch(), curvature=curvature, check=False)
    assert report.network.norm > 0
    assert any("not checked" in note for note in report.notes)


def test_a_loss_that_holds_a_weight_of_the_output_constant_is_refused() -> None:
    def focal(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return ((1 - torch.exp(-each)).detach() * each).mean()

    with pytest.raises(
        hessinit.ProblemError, match=f"the loss {NOT_THE_DERIVATIVE}.*detach.* inside the loss"
    ):
        hessinit.measure(network(), focal, batch())


def test_spectral_norm_in_train_mode_is_refused_by_name_and_measured_in_eval_mode() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)
    )
    with torch.no_grad():
        model[0].parametrizations.weight.original.add_(
            torch.randn(5, 4)
        )  # u and v are those of other weights
    with pytest.raises(hessinit.ProblemError, match="a spectral_norm in train mode.*measure it in eval mode"):
        hessinit.measure(model, LOSS, batch(), curvature="hessian")
    assert hessinit.measure(model.eval(), LOSS, batch(), curvature="hessian").network.norm > 0


VERBS: dict[str, Callable[..., Any]] = {
    "measure": hessinit.measure,
    "hessian": hessinit.hessian,
    "gauss_newton": hessinit.gauss_newton,
    "jacobian": hessinit.jacobian,
    "quadratic_form": hessinit.quadratic_form,
    "advise": hessinit.advise,
    "initialize_": lambda *given, **options: hessinit.initialize_(*given, lr=0.1, **options),
    "assert_sound": hessinit.assert_sound,
    "track": lambda *given, **options: hessinit.track(*given, path=None, **options),
}


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_checks_and_can_leave_it_out(verb: str) -> None:
    model = Branch(WrongSwish.apply)
    before = snapshot(model, LOSS, batch())
    with pytest.raises(hessinit.ProblemError, match=NOT_THE_DERIVATIVE):
        VERBS[verb](model, LOSS, batch())
    assert differences(before, snapshot(model, LOSS, batch())) == []
    assert VERBS[verb](Branch(WrongSwish.apply), LOSS, batch(), check=False) is not None


def at_a_kink() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    nn.init.zeros_(model[2].weight)  # every unit behind it is at the kink, whatever the step
    nn.init.zeros_(model[2].bias)
    return model


class Experts(nn.Module):
    """A gate that jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        best = weights.argmax(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        rows = torch.arange(len(x))
        return outputs[rows, best] * weights[rows, best, None]


def deep(width: int, depth: int) -> nn.Sequential:
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(4, width), *layers, nn.Linear(width, 3))


class SinglePrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return F.relu(self.inner(x))


class Kelvin(nn.Module):
    """Cancels three digits of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(300 + 0.1 * x))))


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "a network at a kink": at_a_kink,
    "a gate that jumps": Experts,
    "many layers with kinks": lambda: deep(8, 30),
    "a wide network with kinks": lambda: deep(300, 2),
    "a head of zeros": lambda: nn.Sequential(network(), nn.Tanh(), nn.Linear(3, 3).requires_grad_()),
    "a forward for float32 only": SinglePrecision,
    "inputs that cancel": Kelvin,
    "half precision inside": lambda: Calling(lambda net, x: net(x.to(torch.bfloat16).to(x.dtype))),
    "a constant output beside": lambda: Calling(lambda net, x: net(x) * 1e-7 + 1e3),
}


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
@pytest.mark.parametrize("kind", RIGHT)
def test_kinks_jumps_and_rounding_do_not_trip_it(kind: str, curvature: str) -> None:
    torch.manual_seed(0)
    data = inputs(16), labels(16)
    assert hessinit.measure(RIGHT[kind](), LOSS, data, curvature=curvature).network is not None


def test_a_row_of_padding_and_a_maximal_norm_do_not_trip_it() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(6, 4, padding_idx=0, max_norm=0.5), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.words(x).mean(1)))

    tokens = torch.arange(18).remainder(6).view(6, 3)
    assert hessinit.measure(Words(), LOSS, (tokens, labels())).network.norm > 0


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_a_layer_or_a_loss_wrong_by_5_percent_is_found_in_random_networks(
    curvature: str, precision: str
) -> None:
    """A sample; benchmarks/check_power.py counts 200 of them."""
    refused = 0
    for seed in range(300_000, 300_020):
        parts, chance = build(seed)
        spoil(parts, chance)
        parts = parts.double() if precision == "float64" else parts
        try:
            hessinit.measure(parts.model, parts.loss, parts.batch, curvature=curvature, reduction="mean")
        except hessinit.ProblemError as refusal:
            refused += NOT_THE_DERIVATIVE in str(refusal)
    assert refused >= 19


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
@pytest.mark.parametrize("layer", ["0", "2", "4"])
def test_one_large_layer_wrong_by_5_percent_is_found(layer: str, curvature: str) -> None:
    """Directions of large weights are outer products."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 256, 3), nn.GELU(), nn.Conv2d(256, 128, 3), nn.Flatten(), nn.Linear(1152, 300)
    )
    data = torch.randn(8, 2, 7, 7), torch.arange(8)
    hessinit.measure(model, LOSS, data, layers=layer, curvature=curvature, network=False)
    parametrize.register_parametrization(model.get_submodule(layer), "weight", WrongWeight())
    with pytest.raises(hessinit.ProblemError, match=NOT_THE_DERIVATIVE):
        hessinit.measure(model, LOSS, data, curvature=curvature, network=False)


def count_calls(measure: Callable[[nn.Module], Any], inner: nn.Module) -> int:
    """Forwards of the whole batch; the counter is where measuring does not put it back."""
    calls = itertools.count()

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        if len(x) == 16:
            next(calls)
        return net(x)

    measure(Calling(forward, inner))
    return next(calls)


@pytest.mark.parametrize(("inner", "most"), [(network(), 2), (deep(6, 2), 4)], ids=["smooth", "kinks"])
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_the_check_costs_two_evaluations_and_two_more_for_kinks(
    inner: nn.Module, most: int, curvature: str
) -> None:
    data = inputs(16), labels(16)

    def calls(check: bool) -> int:
        return count_calls(
            lambda model: hessinit.measure(model, LOSS, data, curvature=curvature, check=check), inner
        )

    assert 0 < calls(True) - calls(False) <= most


@pytest.mark.parametrize("verb", ["initialize_", "track"])
def test_searches_and_tracking_check_once(verb: str) -> None:
    data = inputs(16), labels(16)

    def run(check: bool, many: bool) -> Callable[[nn.Module], Any]:
        if verb == "initialize_":
            return lambda model: hessinit.initialize_(
                model, LOSS, data, lr=3.0 if many else 0.1, scheme="keep", check=check
            )

        def follow(model: nn.Module) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with hessinit.track(
                model, LOSS, data, every=1, max_overhead=1, path=None, optimizer=optimizer, check=check
            ) as tracker:
                for _ in range(8 if many else 1):
                    tracker.step()

        return follow

    extra = [
        count_calls(run(True, many), network()) - count_calls(run(False, many), network()) for many in (0, 1)
    ]
    assert 0 < extra[0] == extra[1] <= 4
