"""The model, the data, every generator and every switch of torch come back as they were, come what may."""

from __future__ import annotations

import argparse
import array
import contextlib
import contextvars
import functools
import gc
import itertools
import random
import threading
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, Subset

import hessinit
import tiny
from calls import measure
from conftest import read_global_torch_state
from hessinit.problem.batches import read_batches
from hessinit.problem.preserve import untouched_sources
from hessinit.problem.substitutes import in_mode
from tiny import LOSS, SHORT_RUNS, Calling, Net, batch, inputs, labels, network, raise_from
from zoo.snapshot import differences, snapshot

each_curvature = pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])


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
        self.calls, self.latest, self.before_call = 0, None, None

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
    data = batch()
    before = state(busy, LOSS, data)
    options: dict[str, Any] = {"curvature": curvature, "dtype": dtype, "tolerance": 1e-2}
    # In train mode a spectral norm steps its power iteration, which the backward takes for constant.
    report = measure(busy, LOSS, data, check=not training, **options)
    assert report.network.norm > 0
    assert differences(before, state(busy, LOSS, data)) == []


@each_curvature
@pytest.mark.parametrize(
    ("where", "call"), [("forward", 1), ("forward", 3), ("loss", 1), ("loss", 2), ("grad", 2), ("grad", 7)]
)
def test_everything_comes_back_when_the_forward_the_loss_or_a_product_raises(
    busy: Busy, where: str, call: int, curvature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = KeyboardInterrupt if call % 2 else RuntimeError
    interrupt, differentiate = raise_from(call, error("in the middle")), torch.autograd.grad
    loss = lambda z, y: (interrupt() if where == "loss" else None) or LOSS(z, y)  # noqa: E731
    data = [batch(), batch(4)]
    before = state(busy, loss, data)
    if where == "forward":
        busy.before_call = interrupt  # a plain attribute
    elif where == "grad":
        monkeypatch.setattr(torch.autograd, "grad", lambda *a, **b: interrupt() or differentiate(*a, **b))
    with pytest.raises(error, match="in the middle"):
        measure(busy, loss, data, reduction="mean", curvature=curvature, tolerance=1e-6)
    monkeypatch.undo()
    busy.before_call = None
    assert differences(before, state(busy, loss, data)) == []


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "Python": random.random,
    "numpy": lambda: numpy.random.rand(3).tolist(),  # noqa: NPY002
}


@pytest.mark.parametrize("kind", DRAWS)
def test_generators_go_on_as_if_nothing_had_been_drawn(kind: str) -> None:
    model = Calling(lambda net, x: net(x) + 0 * torch.tensor(DRAWS[kind]()).sum())
    loader = DataLoader(list(zip(*batch(), strict=True)), batch_size=3, shuffle=True)
    seen = []
    for measures in (False, True):
        torch.manual_seed(11), random.seed(11), numpy.random.seed(11)  # noqa: NPY002
        first = DRAWS[kind]()
        if measures:
            measure(model, LOSS, loader, dropout="freeze", details=["trace", "density"])
        seen.append([first, DRAWS[kind]()])
    assert seen[0] == seen[1]


def test_every_module_gets_the_mode_back_that_it_had() -> None:
    model = nn.Sequential(network(), nn.Dropout().eval(), nn.Dropout())
    before = [module.training for module in model.modules()]
    for training in (True, False):
        with contextlib.suppress(KeyError), in_mode(model, training=training):
            assert {module.training for module in model.modules()} == {training}
            raise KeyError("inside")
        assert [module.training for module in model.modules()] == before


COUNTED = {"calls": 0}


class Plain:
    def __init__(self) -> None:
        self.inner = {"largest": torch.zeros(())}


class Remembering(nn.Module):
    """Keeps its state in all that Python has for it, where torch has no name, and in a global variable."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.statistics = SimpleNamespace(mean=torch.zeros(5), calls=0)
        self.log: tuple[list[int], ...] = ([],)
        self.history, self.count, self.buffer = Plain(), numpy.zeros(1), torch.zeros(5)
        self.heard: list[Any] = ["before"]
        self.inner.heard, self.inner.buffer = self.heard, self.buffer  # names more for the same ones
        self.counts: dict[str, Any] = {"calls": 0, "each": [], "gone": 1}
        self.shapes: set[Any] = set()
        self.ring: deque[int] = deque([1, 2], maxlen=2)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        self.statistics.calls += 1
        self.statistics.mean = 0.5 * self.statistics.mean + 0.5 * hidden.mean(0)
        self.log[0].append(1)
        self.history.inner["largest"].copy_(hidden.detach().max())
        self.count += 1
        self.buffer.add_(1)
        self.heard.append(x)
        self.counts["calls"] += 1
        self.counts["each"].append(x.shape)
        self.counts.pop("gone", None)
        self.shapes.add(x.shape)
        self.ring.append(9)
        COUNTED["calls"] += 1
        if self.fails:
            return self.last(hidden) * torch.nan
        return self.last(torch.tanh(hidden - self.statistics.mean) * self.inner.buffer)

    def state(self) -> tuple[list[int], list[Any]]:
        """Which objects it holds, and what is in them."""
        held = [
            self.statistics, self.statistics.mean, self.log, self.log[0], self.history,
            self.history.inner["largest"], self.count, self.buffer, self.inner.buffer, self.heard,
            self.inner.heard, self.counts, self.counts["each"], self.shapes, self.ring,
        ]  # fmt: skip
        values = [repr(one) for one in held if not isinstance(one, Plain)]
        return [id(one) for one in held], [*values, list(self.counts.items()), dict(COUNTED)]


@each_curvature
@pytest.mark.parametrize("fails", [False, True])
def test_state_in_objects_containers_tensors_and_globals_is_put_back(fails: bool, curvature: str) -> None:
    model, options = Remembering(), {"curvature": curvature, "tolerance": 1e-5}
    model.fails, before = fails, model.state()
    if fails:
        with pytest.raises(hessinit.ProblemError, match="holds NaN or inf"):
            measure(model, LOSS, batch(), **options)
    else:
        report = measure(model, LOSS, batch(), **options)
        # Every call starts from the state found: one step of the mean from zeros, and of the buffer to ones.
        same = Net(
            lambda m, x: m.last(torch.tanh(m.inner(x) - 0.5 * m.inner(x).mean(0))),
            inner=model.inner, last=model.last,
        )  # fmt: skip
        expected = measure(same, LOSS, batch(), **options)
        assert report.network.norm == pytest.approx(expected.network.norm, rel=3e-5)
    assert model.state() == before


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0.0


def local(**values: Any) -> threading.local:
    found = threading.local()
    vars(found).update(values)
    return found


KEY = Plain()
# What the standard library has for a state: how it is made, moved by a forward, and read.
KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "Namespace": (lambda: argparse.Namespace(a=0), lambda it: setattr(it, "a", it.a + 1), vars),
    "local": (lambda: local(a=0), lambda it: setattr(it, "a", it.a + 1), vars),
    "UserDict": (lambda: UserDict(a=0), lambda it: it.update(a=it["a"] + 1), dict),
    "UserList": (lambda: UserList([1]), lambda it: it.append(2), list),
    "WeakKeyDictionary": (lambda: weakref.WeakKeyDictionary({KEY: 0}), lambda it: it.update({KEY: 1}), dict),
    "WeakSet": (lambda: weakref.WeakSet([KEY]), lambda it: it.clear(), list),
    "ContextVar": (lambda: contextvars.ContextVar("a", default=0), lambda it: it.set(1), lambda it: it.get()),
    "bytearray": (lambda: bytearray(2), lambda it: it.append(1), bytes),
    "array": (lambda: array.array("d", [0.5]), lambda it: it.append(1.0), list),
}


@pytest.mark.parametrize("kind", KEPT)
def test_state_in_objects_of_the_standard_library_is_put_back(kind: str) -> None:
    make, move, read = KEPT[kind]
    kept = make()
    model = Calling(lambda net, x: (move(kept), net(x))[1])
    before = repr(read(kept))
    for verb in (hessinit.measure, functools.partial(hessinit.advise, trial_steps=2)):
        verb(model, LOSS, batch())
        assert repr(read(kept)) == before


def test_a_variable_without_a_value_is_refused_by_its_name() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("mode")
    model = Calling(lambda net, x: (variable.set(1), net(x))[1])
    with pytest.raises(hessinit.ProblemError, match="ContextVar 'mode' has no value.*give it a default"):
        hessinit.measure(model, LOSS, batch())
    with pytest.raises(LookupError):
        variable.get()


@pytest.mark.parametrize("make", [itertools.count, lambda: iter(range(9)), lambda: (one for one in range(9))])
def test_an_iterator_is_refused_where_it_is_read_and_not_used_up(make: Callable[[], Iterator[int]]) -> None:
    unread, kept = make(), make()
    model = Calling(lambda net, x: net(x) + 0 * (unread is None))
    assert hessinit.measure(model, LOSS, batch()).converged
    reading = Calling(lambda net, x: net(x) + 0 * next(kept))
    for verb in (hessinit.measure, hessinit.advise):
        with pytest.raises(hessinit.ProblemError, match=f"read a {type(kept).__name__}, and what it has"):
            verb(reading, LOSS, batch())
    assert next(kept) == 0


class Rotary(nn.Module):
    """Keeps tables by their length alone: one that is made in another precision would stay."""

    kept: dict[int, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033
    def angles(self, length: int) -> torch.Tensor:
        return table(length, self.inner.weight.dtype).cos()

    def scales(self, length: int) -> torch.Tensor:
        if length not in self.kept:
            self.kept[length] = torch.ones(length, 4).to(self.inner.weight)
        scales = self.kept[length] * SCALES.setdefault(length, torch.ones(4).to(self.inner.weight))
        return scales * tiny.ones(4, self.inner.weight.dtype)

    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033
    def unit(self) -> torch.Tensor:
        return F.normalize(self.inner.weight, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = self.angles(x.shape[1]) * self.scales(x.shape[1])
        return self.last(F.linear(x, self.unit()) * tables).mean(1)


SCALES: dict[int, torch.Tensor] = {}


@functools.lru_cache(maxsize=None)  # noqa: UP033
def table(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(length).to(dtype)[:, None].expand(length, 4)


@each_curvature
def test_what_is_cached_while_measuring_does_not_reach_training(curvature: str) -> None:
    model, data = Rotary().bfloat16(), (torch.randn(6, 5, 4).bfloat16(), labels())
    report = hessinit.measure(model, LOSS, data, curvature=curvature)
    assert (table.cache_info().currsize, tiny.ones.cache_info().currsize) == (0, 0)
    assert (Rotary.kept, SCALES) == ({}, {})
    LOSS(model(data[0]), data[1]).backward()  # in bfloat16, and the cached weight is the model's own
    assert model.inner.weight.grad is not None
    wide = Rotary().bfloat16().float()
    same = hessinit.measure(wide, LOSS, (data[0].float(), data[1]), curvature=curvature)
    assert report.network.norm == pytest.approx(same.network.norm, rel=1e-5)
    Rotary.kept.clear(), SCALES.clear(), table.cache_clear(), tiny.ones.cache_clear()


def test_a_loss_with_a_state_in_a_closure_or_a_class_is_one_function_and_elsewhere_it_is_refused() -> None:
    state = {"average": 1.0}

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        state["average"] = 0.5 * state["average"] + 2.0
        return F.cross_entropy(output, target) / state["average"]

    report, plain = (hessinit.measure(network(), one, batch(), curvature="both") for one in (loss, LOSS))
    assert state == {"average": 1.0}
    assert report["2"].gap == pytest.approx(1.0, rel=1e-5)  # exact: the last layer is linear
    assert report.network.norm == pytest.approx(plain.network.norm / 2.5, rel=1e-4)

    class Kept:
        calls = 0.0

    def growing(output: torch.Tensor, target: torch.Tensor, place: Any = Kept) -> torch.Tensor:
        place.calls += 1
        return F.cross_entropy(output, target) * place.calls

    report = hessinit.measure(network(), growing, batch(), curvature="both")
    assert Kept.calls == 0
    assert report.network.norm == pytest.approx(plain.network.norm, rel=1e-4)
    slots = Slots()
    hidden = lambda output, target: growing(output, target, slots)  # noqa: E731
    with pytest.raises(hessinit.ProblemError, match="loss changes from call to call.*in __slots__"):
        hessinit.measure(network(), hidden, batch())


def test_inputs_targets_and_the_state_of_a_loss_are_not_written_to() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))
            self.calls = 0

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.centre.mul_(0.9).add_(output.detach().mean(0))
            return F.cross_entropy(output - self.centre, target.remainder_(3))

    loss, data = Centred(), (inputs(), labels() + 3)
    measure(network(), loss, data, check=False)  # the centre is a stopped gradient
    assert torch.equal(data[1], labels() + 3)
    assert (loss.centre.tolist(), loss.calls) == ([0, 0, 0], 0)
    found = hessinit.measure(Calling(lambda net, x: net(x.mul_(2).relu_())), LOSS, (data[0], labels()))
    expected = hessinit.measure(network(), LOSS, (inputs().mul(2).relu(), labels()))
    assert found.network.norm == expected.network.norm
    assert torch.equal(data[0], inputs())


@each_curvature
@pytest.mark.parametrize("details", [(), "diagnostics"])
def test_nothing_is_kept_alive_afterwards(curvature: str, details: Any) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = net[0](x)
        seen.append(weakref.ref(hidden))
        return net[2](hidden.tanh())

    gc.collect()
    gc.disable()
    try:
        hessinit.measure(Calling(forward), LOSS, batch(), curvature=curvature, details=details)
        assert [hidden() for hidden in seen] == [None] * len(seen)
    finally:
        gc.enable()


class Holder:
    def __init__(self, it: Any) -> None:
        self.it = it

    def method(self) -> None: ...


PLACES: dict[str, Callable[[Any], Any]] = {
    "an attribute's attribute": lambda it: Holder(SimpleNamespace(deep=it)),
    "a list in a dict": lambda it: {"all": [0, it]},
    "a closure": lambda it: lambda: it,
    "a method's object": lambda it: Holder(it).method,
    "a partial": lambda it: functools.partial(print, it, end=""),
    "a default": lambda it: lambda again=it: again,
    "a loader's sampler": lambda it: DataLoader([0], sampler=RandomSampler([0], generator=it)),
    "the dataset of a subset": lambda it: DataLoader(Subset(Holder(it), range(2))),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("place", PLACES)
def test_a_generator_is_found_and_put_back(place: str) -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    with untouched_sources(PLACES[place](generator)):
        torch.rand(1, generator=generator)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # since Python 3.12
def test_a_loader_that_training_reads_with_persistent_workers_goes_on_where_it_was() -> None:
    data = [(float(number), 0.0) for number in range(6)]
    loader = DataLoader(data, num_workers=1, persistent_workers=True, timeout=20)
    reading = iter(loader)
    seen = [next(reading)[0].item()]
    assert [batch.inputs.item() for _, batch in read_batches(loader)] == [0, 1, 2, 3, 4, 5]
    assert [*seen, *(inputs.item() for inputs, _ in reading)] == [0, 1, 2, 3, 4, 5]


class Noisy(Dataset[Any], Sampler[int]):
    """Draws for each example, and counts its epochs."""

    def __init__(self, source: Any) -> None:
        self.source, self.epoch = source, 0

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(range(16))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draws = next(self.source) if isinstance(self.source, Iterator) else self.source.random()
        return torch.full((4,), float(draws) + index), index % 3


RUNS: dict[str, Callable[[DataLoader[Any]], object]] = {
    "measure": lambda data: hessinit.measure(network(), LOSS, data),
    "advise": lambda data: hessinit.advise(network(), LOSS, data, trial_steps=2),
    "initialize_": lambda data: hessinit.initialize_(
        network(), LOSS, batch(4), lr=0.1, data=data, progress=False, fit=hessinit.Fit(trial_steps=3)
    ),
    "compare": lambda data: hessinit.compare(
        network, LOSS, data, schemes=["default"], learning_rates=[0.1], **SHORT_RUNS
    ),
}


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
@pytest.mark.parametrize("verb", RUNS)
@pytest.mark.parametrize("make", [lambda: random.Random(0), lambda: numpy.random.default_rng(0)])
def test_generators_and_epochs_of_datasets_and_samplers_go_on_where_they_were(make: Any, verb: str) -> None:
    data = Noisy(make())
    RUNS[verb](DataLoader(data, batch_size=4, sampler=data))
    assert (data.epoch, data.source.random()) == (0, make().random())


@pytest.mark.parametrize("verb", RUNS)
def test_data_that_are_used_up_are_refused(verb: str) -> None:
    data = Noisy(itertools.count())
    with pytest.raises(hessinit.ProblemError, match="data read a count.*pass the batches as a list"):
        RUNS[verb](DataLoader(data, batch_size=4, sampler=data))
    assert next(data.source) == 0
