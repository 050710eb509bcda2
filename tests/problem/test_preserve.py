"""The model, the data, every generator and every switch of torch come back as they were, come what may."""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hessinit
from conftest import read_global_torch_state
from tiny import LOSS, Calling, inputs, labels, network, raise_from
from zoo.snapshot import differences, snapshot


class Busy(nn.Module):
    """Has everything that a forward may move: statistics, hooks, hidden state, tied and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))
        self.old_norm = nn.utils.weight_norm(nn.Linear(5, 5))
        self.quiet = nn.Sequential(nn.Identity(), nn.Dropout().eval())
        self.tied = nn.Linear(5, 5, bias=False)
        self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.tied.weight
        self.last = nn.Linear(5, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("hidden", torch.ones(5), persistent=False)
        self.shared = nn.Module()
        self.shared.register_buffer("seen", self.seen)
        self.calls, self.latest = 0, None
        self.before_call = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before_call is not None:
            self.before_call()
        self.calls += 1
        self.seen.add_(1)
        self.quiet[0].train(not self.quiet[0].training)
        x = self.spectral(self.norm(self.first(x.mul_(2)))).tanh()
        self.latest = x * self.hidden
        return self.last(self.again(self.tied(self.old_norm(self.quiet(self.latest)))))


@pytest.fixture
def busy() -> Busy:
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = Busy()
    model(inputs()).sum().backward()
    model.norm.register_forward_hook(lambda module, given, output: output + 0)
    model.first.register_full_backward_hook(lambda module, inward, outward: pytest.fail("not training"))
    model.tied.weight.register_hook(lambda gradient: gradient)
    return model


def state(model: Busy, loss: Any, data: Any) -> dict[str, Any]:
    attributes = {name: id(value) for name, value in vars(model).items()}
    gradients = [id(parameter.grad) for parameter in model.parameters()]
    old = (id(model.old_norm.weight), model.old_norm.weight.dtype)
    buffers = [(name, id(buffer), buffer.clone().tolist()) for name, buffer in model.named_buffers()]
    extra = {"attributes": attributes, "gradients": gradients, "old norm": old, "buffers": buffers}
    return {**snapshot(model, loss, data), **read_global_torch_state(), **extra}


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian", "both"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_comes_back(busy: Busy, curvature: str, training: bool, dtype: torch.dtype) -> None:
    busy.train(training)
    busy.quiet.eval()
    data = (inputs(), labels())
    before = state(busy, LOSS, data)
    options: dict[str, Any] = {"curvature": curvature, "dtype": dtype, "tolerance": 1e-2}
    # In train mode a spectral norm steps its power iteration, which the backward takes for constant.
    report = hessinit.measure(busy, LOSS, data, check=not training, **options)
    assert report.network.norm > 0
    assert differences(before, state(busy, LOSS, data)) == []


@pytest.mark.parametrize("error", [RuntimeError, ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_everything_comes_back_when_the_forward_raises(
    busy: Busy, call: int, error: type[BaseException]
) -> None:
    data = [(inputs(), labels()), (inputs(4), labels(4))]
    before = state(busy, LOSS, data)
    interrupt = raise_from(call, error("in the middle"))
    busy.before_call = interrupt  # a plain attribute
    with pytest.raises(error, match="in the middle"):
        hessinit.measure(busy, LOSS, data)
    busy.before_call = None
    assert differences(before, state(busy, LOSS, data)) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2])
def test_everything_comes_back_when_the_loss_raises(
    busy: Busy, call: int, error: type[BaseException]
) -> None:
    interrupt = raise_from(call, error("in the middle"))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        interrupt()
        return F.cross_entropy(output, target)

    data = (inputs(), labels())
    before = state(busy, loss, data)
    with pytest.raises(error, match="in the middle"):
        hessinit.measure(busy, loss, data)
    assert differences(before, state(busy, loss, data)) == []


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
@pytest.mark.parametrize("call", [1, 2, 4, 7])
def test_everything_comes_back_when_a_product_is_interrupted(
    busy: Busy, monkeypatch: pytest.MonkeyPatch, curvature: str, call: int
) -> None:
    data = (inputs(), labels())
    before = state(busy, LOSS, data)
    interrupt, differentiate = raise_from(call, KeyboardInterrupt("in the middle")), torch.autograd.grad

    def grad(*arguments: Any, **settings: Any) -> Any:
        interrupt()
        return differentiate(*arguments, **settings)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    with pytest.raises(KeyboardInterrupt, match="in the middle"):
        hessinit.measure(busy, LOSS, data, curvature=curvature, tolerance=1e-6)
    monkeypatch.undo()
    assert differences(before, state(busy, LOSS, data)) == []


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "Python": random.random,
    "numpy": lambda: numpy.random.rand(3).tolist(),  # noqa: NPY002
}


@pytest.mark.parametrize("kind", DRAWS)
def test_generators_go_on_as_if_nothing_had_been_drawn(kind: str) -> None:
    def seed() -> None:
        torch.manual_seed(11), random.seed(11), numpy.random.seed(11)  # noqa: NPY002

    model = Calling(lambda net, x: net(x) + 0 * torch.tensor(DRAWS[kind]()).sum())
    seed()
    undisturbed = [DRAWS[kind](), DRAWS[kind]()]
    seed()
    first = DRAWS[kind]()
    loader = torch.utils.data.DataLoader(
        list(zip(inputs(), labels(), strict=True)), batch_size=3, shuffle=True
    )
    hessinit.measure(model, LOSS, loader, dropout="freeze", trace=True, density=True)
    assert [first, DRAWS[kind]()] == undisturbed


def test_a_weight_that_the_forward_renormalizes_is_not_written_to() -> None:
    words = nn.Embedding(5, 4, max_norm=0.5)
    frozen = nn.Embedding(5, 4, max_norm=0.5).requires_grad_(False)
    model = Calling(lambda net, x: net(words(x) + frozen(x)))
    model.words, model.frozen = words, frozen
    before = words.weight.detach().clone(), frozen.weight.clone()
    hessinit.measure(model, LOSS, (labels(), labels()))
    assert torch.equal(words.weight, before[0])
    assert torch.equal(frozen.weight, before[1])


class Listening(nn.Linear):
    """Notes down what it hears, in all that Python has for it."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.heard: list[Any] = ["before"]
        self.counts: dict[str, Any] = {"calls": 0, "each": [], "gone": 1}
        self.shapes: set[Any] = set()
        self.last: deque[int] = deque([1, 2], maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.heard.append(x)
        self.counts["calls"] += 1
        self.counts["each"].append(x.shape)
        self.counts.pop("gone", None)
        self.shapes.add(x.shape)
        self.last.append(9)
        return super().forward(x)


def test_lists_dicts_and_sets_of_a_model_hold_what_they_held() -> None:
    model = Listening()
    model.myself = model.heard  # a name more for the same list
    own = (model.heard, model.counts, model.counts["each"], model.shapes, model.last)
    hessinit.measure(model, LOSS, (inputs(), labels()))
    assert model.heard == ["before"]
    assert list(model.counts.items()) == [("calls", 0), ("each", []), ("gone", 1)]
    assert model.shapes == set()
    assert list(model.last) == [1, 2]
    now = (model.heard, model.counts, model.counts["each"], model.shapes, model.last)
    assert all(one is other for one, other in zip(own, now, strict=True))


class Averaging(nn.Module):
    """Writes into tensors and arrays that are no buffers, one of them with a second name elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.mean, self.count = torch.zeros(5), numpy.zeros(1)
        self.inner.mean = self.mean
        self.kept = {"sum": torch.zeros(5), "all": [torch.zeros(())]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x).tanh()
        self.mean.mul_(0.5).add_(hidden.detach().mean(0))
        self.count += 1
        self.kept["sum"].add_(1)
        self.kept["all"][0].add_(1)
        return self.last(hidden - self.inner.mean)


def test_tensors_and_arrays_that_are_no_buffers_are_not_written_into() -> None:
    model = Averaging()
    own = (model.mean, model.count, model.kept["sum"], model.kept["all"][0])
    # The mean is detached, so that the backward is not the derivative: measured all the same.
    report = hessinit.measure(model, LOSS, (inputs(), labels()), curvature="hessian", check=False)
    now = (model.mean, model.count, model.kept["sum"], model.kept["all"][0])
    assert all(one is other for one, other in zip(own, now, strict=True))
    assert model.inner.mean is model.mean
    assert [float(one.sum()) for one in own] == [0, 0, 0, 0]
    mean = model.inner(inputs()).tanh().detach().mean(0)  # what one forward leaves there
    same = Calling(lambda net, x: model.last(model.inner(x).tanh() - mean))
    same.inner, same.last = model.inner, model.last
    expected = hessinit.measure(
        same, LOSS, (inputs(), labels()), curvature="hessian", layers=["inner", "last"]
    )
    assert report.network.norm == pytest.approx(expected.network.norm, rel=1e-5)


COUNTED = {"calls": 0}


class Remembering(nn.Module):
    """Keeps its state where torch has no name for it, and one part in a global variable."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.statistics = SimpleNamespace(mean=torch.zeros(5), calls=0)
        self.log: tuple[list[int], ...] = ([],)
        self.history = Plain()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        self.statistics.calls += 1
        self.statistics.mean = 0.5 * self.statistics.mean + 0.5 * hidden.mean(0)
        self.log[0].append(1)
        self.history.note(hidden)
        COUNTED["calls"] += 1
        if self.fails:
            return self.last(hidden) * torch.nan
        return self.last(torch.tanh(hidden - self.statistics.mean))


class Plain:
    def __init__(self) -> None:
        self.inner = {"largest": torch.zeros(())}

    def note(self, hidden: torch.Tensor) -> None:
        self.inner["largest"].copy_(hidden.detach().max())


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
@pytest.mark.parametrize("fails", [False, True])
def test_state_in_objects_namespaces_tuples_and_globals_is_put_back(fails: bool, curvature: str) -> None:
    model = Remembering()
    model.fails = fails
    own = (model.statistics, model.statistics.mean, model.log, model.history, model.history.inner["largest"])
    if fails:
        with pytest.raises(hessinit.ProblemError, match="holds NaN or inf"):
            hessinit.measure(model, LOSS, (inputs(), labels()), curvature=curvature)
    else:
        report = hessinit.measure(model, LOSS, (inputs(), labels()), curvature=curvature, tolerance=1e-5)
        # Every call starts from the state found: one step of the mean from zeros.
        same = Calling(lambda net, x: model.last(torch.tanh(model.inner(x) - 0.5 * model.inner(x).mean(0))))
        same.inner, same.last = model.inner, model.last
        expected = hessinit.measure(
            same, LOSS, (inputs(), labels()), curvature=curvature, tolerance=1e-5, layers=["inner", "last"]
        )
        assert report.network.norm == pytest.approx(expected.network.norm, rel=3e-5)
    now = (model.statistics, model.statistics.mean, model.log, model.history, model.history.inner["largest"])
    assert all(one is other for one, other in zip(own, now, strict=True))
    assert (model.statistics.calls, model.log, COUNTED) == (0, ([],), {"calls": 0})
    assert not model.statistics.mean.any()
    assert not model.history.inner["largest"].any()


def test_a_loss_with_a_state_in_a_closure_is_one_function_and_gets_its_state_back() -> None:
    state = {"average": 1.0}

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        state["average"] = 0.5 * state["average"] + 2.0
        return F.cross_entropy(output, target) / state["average"]

    report = hessinit.measure(network(), loss, (inputs(), labels()), curvature="both")
    plain = hessinit.measure(network(), LOSS, (inputs(), labels()), curvature="both")
    assert state == {"average": 1.0}
    assert report["2"].gap == pytest.approx(1.0, rel=1e-5)  # exact: the last layer is linear
    assert report.network.norm == pytest.approx(plain.network.norm / 2.5, rel=1e-4)


def test_a_loss_with_a_state_that_is_not_found_is_refused() -> None:
    class Hidden:
        calls = 0.0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        Hidden.calls += 1
        return F.cross_entropy(output, target) * Hidden.calls

    with pytest.raises(
        hessinit.ProblemError, match="the loss changes from call to call.*an attribute of a class"
    ):
        hessinit.measure(network(), loss, (inputs(), labels()))


def test_targets_and_the_state_of_a_loss_are_not_written_to() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))
            self.calls = 0

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.centre.mul_(0.9).add_(output.detach().mean(0))
            return F.cross_entropy(output - self.centre, target.remainder_(3))

    loss, target = Centred(), labels() + 3
    hessinit.measure(network(), loss, (inputs(), target), check=False)  # the centre is a stopped gradient
    assert torch.equal(target, labels() + 3)
    assert loss.centre.tolist() == [0, 0, 0]
    assert loss.calls == 0


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_nothing_is_kept_alive_afterwards(curvature: str) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = net[0](x)  # type: ignore[index]
        seen.append(weakref.ref(hidden))
        return net[2](hidden.tanh())  # type: ignore[index]

    gc.collect()
    gc.disable()
    try:
        hessinit.measure(Calling(forward), LOSS, (inputs(), labels()), curvature=curvature)
        assert [hidden() for hidden in seen] == [None] * len(seen)
    finally:
        gc.enable()
