"""Constructions that are easily measured wrong, and the draw of a random problem, ordinary or odd.

`draw(seed)` gives the same problem every time. A problem is built anew for every use, so that a measurement
cannot spoil the truth it is compared with.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from random_networks import ORDINARY, Parts
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ODD_SHARE = 0.3


@dataclass(frozen=True)
class Odd:
    """`build(chance, clean)`; `clean` asks for the equal problem that plain autograd differentiates right."""

    build: Callable[[random.Random, bool], Parts]
    has_no_curvature: bool = False


ODD: dict[str, Odd] = {}


def odd(*, has_no_curvature: bool = False) -> Callable[[Any], Any]:
    def register(build: Callable[[random.Random, bool], Parts]) -> Any:
        ODD[build.__name__.replace("_", " ")] = Odd(build, has_no_curvature)
        return build

    return register


def classified(
    chance: random.Random, model: nn.Module, inputs: int = 4, outputs: int = 3, **more: Any
) -> Parts:
    loss = chance.choice([nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), F.cross_entropy])
    batch = torch.randn(8, inputs), torch.randint(outputs, (8,))
    return Parts(model, loss, batch, **more)


class Hidden(nn.Module):
    """The last layer's weight is that of the first one, by a way that no registered name shows."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.mid = nn.Linear(5, 4, bias=False), nn.Linear(4, 4)
        weight = self.embed.weight
        holders: dict[str, Callable[[], Any]] = {
            "list": lambda: [weight],
            "dict in a tuple": lambda: ({"tied": weight},),
            "namespace": lambda: SimpleNamespace(tied=weight),
            "closure": lambda: lambda: weight,
            "bound method": lambda: self.own_weight,
        }
        self.way, self.tied = way, holders[way]()

    def own_weight(self) -> Tensor:
        return self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mid(torch.tanh(self.embed(x))))
        tied = self.tied
        found: dict[str, Callable[[], Tensor]] = {
            "list": lambda: tied[0],
            "dict in a tuple": lambda: tied[0]["tied"],
            "namespace": lambda: tied.tied,
            "closure": lambda: tied(),
            "bound method": lambda: tied(),
        }
        return h @ found[self.way]()


@odd()
def weight_reached_a_second_way(chance: random.Random, clean: bool) -> Parts:
    way = chance.choice(["list", "dict in a tuple", "namespace", "closure", "bound method"])
    return classified(chance, Hidden(way), 5, 5)


@odd()
def forward_argument_that_closes_over_a_weight(chance: random.Random, clean: bool) -> Parts:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    first = model[0]
    return classified(chance, model, forward=lambda m, x: m(x @ first.weight))


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * s * (1 + x * (1 - s))


class OnceSwish(Swish):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * s * (1 + x * (1 - s))


class SavedSwish(Swish):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        s = x.sigmoid()
        ctx.save_for_backward(s * (1 + x * (1 - s)))
        return x * s

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class WrongSwish(Swish):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return 1.05 * gradient * s * (1 + x * (1 - s))


class Functional(nn.Module):
    """A network whose activation is any function; `share` is that of the branch that uses it."""

    def __init__(self, function: Callable[[Tensor], Tensor], share: float = 1.0) -> None:
        super().__init__()
        self.function, self.share = function, share
        self.first, self.last, self.skip = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.share * self.last(self.function(3 * self.first(x)))


@odd()
def custom_function(chance: random.Random, clean: bool) -> Parts:
    kind = chance.choice([Swish, OnceSwish, SavedSwish, WrongSwish])
    function: Any = F.silu if clean else kind.apply
    return classified(chance, Functional(function, chance.choice([1.0, 0.1, 1e-3])))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


@odd(has_no_curvature=True)
def backward_that_differs_on_purpose(chance: random.Random, clean: bool) -> Parts:
    ways: list[Any] = [
        Straight.apply,
        Reversed.apply,
        lambda x: x + ((x * 4).round() / 4 - x).detach(),
        lambda x: x * x.detach(),
    ]
    return classified(chance, Functional(chance.choice(ways)))


class FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward((z.softmax(1) - F.one_hot(y, z.shape[1])) / len(z))
        return F.cross_entropy(z, y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


@odd()
def fused_loss(chance: random.Random, clean: bool) -> Parts:
    penalty = chance.choice([0.0, 0.05])
    core: Any = F.cross_entropy if clean else FusedCrossEntropy.apply
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return Parts(
        model,
        lambda z, y: core(z, y) + penalty * z.square().mean(),
        (torch.randn(8, 4), torch.randint(3, (8,))),
    )


@odd(has_no_curvature=True)
def loss_that_holds_its_weights_constant(chance: random.Random, clean: bool) -> Parts:
    def focal(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return ((1 - torch.exp(-each)).detach() ** 2 * each).mean()

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return Parts(model, focal, (torch.randn(8, 4), torch.randint(3, (8,))))


@odd()
def reduction_that_no_attribute_tells(chance: random.Random, clean: bool) -> Parts:
    """Several batches; the reference is the mean, or the sum, of the batches' losses."""

    class PerBatch(nn.Module):
        reduction = "sum"

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(z, y, reduction=self.reduction) / len(z)

    def summed(z: Tensor, y: Tensor) -> Tensor:
        return (F.cross_entropy(z, y, reduction="none") * 0.1).sum()

    weights = torch.linspace(0.5, 2, 6)

    def closed(z: Tensor, y: Tensor) -> Tensor:
        return (weights.to(z) * F.cross_entropy(z, y, reduction="none")).sum()

    def contrastive(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z @ z.roll(1, 0).T, torch.arange(len(z)))

    loss: Any = chance.choice([PerBatch(), summed, closed, contrastive])
    if clean and loss is summed:
        loss.reduction = "sum"
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    batches = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(2)]
    return Parts(model, loss, batches)


class Frequent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4, scale_grad_by_freq=True), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(tokens).mean(1)))


@odd(has_no_curvature=True)
def gradient_scaled_by_frequency(chance: random.Random, clean: bool) -> Parts:
    tokens = torch.randint(8, (5, 6))
    tokens[0, :2] = 0  # at least one word comes twice
    return Parts(Frequent(), nn.CrossEntropyLoss(), (tokens, torch.randint(3, (5,))))


class TiedHead(nn.Module):
    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(h @ self.layer.weight.T, y)


@odd()
def loss_that_holds_a_layer(chance: random.Random, clean: bool) -> Parts:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Tanh())
    head = TiedHead(model[0])
    loss: Any = head if chance.random() < 0.5 else lambda h, y: head(h, y)
    return Parts(model, loss, (torch.randint(6, (9,)), torch.randint(6, (9,))))


class Auxiliary(nn.Module):
    def __init__(self, keeps_graph: bool) -> None:
        super().__init__()
        self.a, self.b, self.aux, self.keeps_graph = nn.Linear(4, 5), nn.Linear(5, 3), None, keeps_graph

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        self.aux = h.square().mean() if self.keeps_graph else h.detach().square().mean()
        return self.b(h)


@odd()
def loss_that_reads_what_the_forward_kept(chance: random.Random, clean: bool) -> Parts:
    model = Auxiliary(keeps_graph=True)
    batch = torch.randn(8, 4), torch.randint(3, (8,))
    way = chance.choice(["never", "grad", "no_grad"])
    if way == "grad":
        model(batch[0])
    elif way == "no_grad":
        with torch.no_grad():
            model(batch[0])
    return Parts(model, lambda z, y: F.cross_entropy(z, y) + 10 * model.aux, batch)


class Remembering(nn.Module):
    """A running mean, kept where torch does not look for buffers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(4, 5), nn.Linear(5, 3), way
        self.state: Any = {
            "namespace": lambda: SimpleNamespace(mean=torch.zeros(5)),
            "list in a tuple": lambda: ([torch.zeros(5)],),
            "dict": lambda: {"mean": torch.zeros(5)},
        }[way]()

    def mean(self, new: Tensor) -> Tensor:
        if self.way == "namespace":
            self.state.mean = 0.5 * self.state.mean.to(new) + 0.5 * new
            return self.state.mean
        if self.way == "dict":
            self.state["mean"] = 0.5 * self.state["mean"].to(new) + 0.5 * new
            return self.state["mean"]
        self.state[0][0] = 0.5 * self.state[0][0].to(new) + 0.5 * new
        return self.state[0][0]

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.tanh(h - self.mean(h.mean(0))))


@odd()
def state_outside_of_buffers(chance: random.Random, clean: bool) -> Parts:
    return classified(chance, Remembering(chance.choice(["namespace", "list in a tuple", "dict"])))


@odd()
def loss_with_a_state(chance: random.Random, clean: bool) -> Parts:
    state = {"scale": 1.0}

    def loss(z: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(z, y)
        state["scale"] = 0.5 * state["scale"] + 2.0
        return value / state["scale"]

    def first(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) / 2.5

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return Parts(model, first if clean else loss, (torch.randn(8, 4), torch.randint(3, (8,))))


class OneStorage(nn.Sequential):
    """Two parameters whose numbers are the same, also in another precision."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False))
        self[2].weight.data = self[0].weight.data

    def _apply(self, *args: Any, **settings: Any) -> Any:
        super()._apply(*args, **settings)
        self[2].weight.data = self[0].weight.data
        return self


@odd()
def two_parameters_on_one_storage(chance: random.Random, clean: bool) -> Parts:
    model: nn.Sequential = OneStorage()
    if clean:
        model = nn.Sequential(model[0], nn.Tanh(), model[0])
    return classified(chance, model, 5, 5)


@odd()
def parameter_that_is_a_buffer_too(chance: random.Random, clean: bool) -> Parts:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    if not clean:
        model[0].register_buffer("alias", model[0].weight)
    return classified(chance, model)


class ReturnsFloat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).float()


@odd()
def output_cast_to_float(chance: random.Random, clean: bool) -> Parts:
    model: nn.Module = ReturnsFloat()
    if clean:
        model.forward = lambda x: model.b(torch.tanh(model.a(x)))  # type: ignore[method-assign, operator]
    return classified(chance, model)


class Physical(nn.Module):
    """A physics-informed network: its output holds its own derivative by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + slope.sum(1, keepdim=True)


class Meta(nn.Module):
    """One step of gradient descent inside the forward, as in MAML."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = [self.a.weight, self.b.weight]
        inner = F.linear(F.linear(x, weights[0]).tanh(), weights[1]).square().mean()
        steps = torch.autograd.grad(inner, weights, create_graph=True)
        return F.linear(F.linear(x, weights[0] - steps[0]).tanh(), weights[1] - steps[1])


@odd()
def forward_that_differentiates(chance: random.Random, clean: bool) -> Parts:
    model, inputs = chance.choice([(Physical, 2), (Meta, 4)])
    return Parts(model(), nn.MSELoss(), (torch.randn(8, inputs), torch.randn(8, 1)))


class Expert(nn.Module):
    """Each example goes to one of two experts, by a gate that jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        best = weights.argmax(1, keepdim=True)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        return (every.gather(1, best[:, :, None].expand(-1, 1, 3)) * weights.gather(1, best)[:, :, None])[
            :, 0
        ]


@odd()
def experts_with_a_hard_gate(chance: random.Random, clean: bool) -> Parts:
    return classified(chance, Expert())


class Logits(nn.Module):
    """Many logits, whose words may share a component, or which are the same ones twice."""

    def __init__(self, words: int, shift: float, shared: str) -> None:
        super().__init__()
        self.a, self.head, self.shared = nn.Linear(4, 4), nn.Linear(4, words, bias=False), shared
        self.head.weight.data.add_(shift)

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(torch.tanh(self.a(x)))
        if self.shared == "twice":
            return torch.cat([z, z], 1)
        return z + z.mean(1, keepdim=True).expand_as(z) if self.shared == "mean" else z


def nearly_cross_entropy(chance: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    """A cross-entropy and something else, in all rows or in one."""
    share = chance.choice([1e-6, 1e-4, 1e-3, 1e-2, 0.1])
    ce = F.cross_entropy

    def value_head(z: Tensor, y: Tensor) -> Tensor:
        return ce(z[:, 1:], (y - 1).clamp(min=0)) + share * (z[:, 0] - 1).square().mean()

    def one_row(z: Tensor, y: Tensor) -> Tensor:
        return ce(z[1:], y[1:], reduction="sum") / len(z) + share * z[0].square().mean()

    def alternating(z: Tensor, y: Tensor) -> Tensor:
        return ce(z[::2], y[::2]) + share * (z[1::2] - 1).square().mean()

    return chance.choice([
        lambda z, y: ce(z, y) + share * z.logsumexp(-1).square().mean(),
        lambda z, y: ce(z, y) + share * z.logsumexp(-1).square().mean(),
        lambda z, y: ce(z, y) + share * z.square().sum(-1).mean(),
        lambda z, y: ce(z, y) + share * z.mean(-1).square().mean(),
        lambda z, y: ce(z, y) + share * (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
        lambda z, y: ce(z, y) + share * (1 - z.softmax(-1).gather(1, y[:, None])).mean(),
        lambda z, y: ce(z, y) + share * z[0, 3].square(),
        lambda z, y: ce(30 * torch.tanh(z / 30), y, label_smoothing=0.1),
        value_head, one_row, alternating,
    ])  # fmt: skip


@odd()
def many_logits_that_are_nearly_a_cross_entropy(chance: random.Random, clean: bool) -> Parts:
    words, size = chance.choice([700, 1100, 1500]), chance.randint(12, 16)
    model = Logits(words, chance.choice([0.0, 0.0, 1.0, 6.0]), chance.choice(["no", "no", "twice", "mean"]))
    x = torch.randn(size, 4)
    x[0] *= chance.choice([1.0, 1.0, 30.0, 1000.0])
    return Parts(model, nearly_cross_entropy(chance), (x, torch.randint(words, (size,))), layers="a")


@odd()
def few_logits_that_are_shared_or_of_mixed_losses(chance: random.Random, clean: bool) -> Parts:
    model = Logits(5, chance.choice([0.0, 1.0, 6.0]), chance.choice(["no", "twice", "mean"]))
    x = torch.randn(8, 4)
    x[0] *= chance.choice([1.0, 1.0, 30.0, 1000.0])
    return Parts(model, nearly_cross_entropy(chance), (x, torch.randint(5, (8,))))


COMPLEX: list[Callable[[Tensor], Tensor]] = [
    torch.exp, torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.sqrt, torch.log, torch.sinh, torch.cosh,
    torch.rsqrt, torch.expm1, torch.log1p, torch.reciprocal, torch.sgn, torch.square, lambda z: z**1.5,
    lambda z: z / (1 + z * z), lambda z: z * z.conj() * z, lambda z: z.abs() * (1 + 1j),
    lambda z: z.angle() + 0j, lambda z: 1j / (2 + z),
    lambda z: F.relu(z.abs() - 0.1) * z / (z.abs() + 1e-3), lambda z: torch.cumprod(z, 1),
    lambda z: torch.where(z.real > 0, z, 0.1 * z), lambda z: z.masked_fill(z.imag > 0, 0),
    torch.fft.fft, lambda z: torch.fft.ifft(torch.fft.fft(z) * z), torch.fft.fftshift,
]  # fmt: skip


class Complex(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], share: float) -> None:
        super().__init__()
        self.a, self.b, self.function, self.share = nn.Linear(4, 5), nn.Linear(10, 3), function, share

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        z = self.function(torch.complex(h, h.roll(1, 1)))
        return self.b(torch.cat([h + self.share * z.real, h + self.share * z.imag], 1))


@odd()
def complex_functions(chance: random.Random, clean: bool) -> Parts:
    return classified(chance, Complex(chance.choice(COMPLEX), chance.choice([0.01, 0.1, 1.0])))


class Counting(nn.Module):
    """Each call sees another count, or another mean, that an object of the standard library holds."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(4, 5), nn.Linear(5, 3), way
        local = threading.local()
        local.step = 0
        self.state: Any = {
            "namespace": lambda: argparse.Namespace(step=0),
            "simple namespace": lambda: SimpleNamespace(step=0),
            "thread": lambda: local,
            "dict": lambda: collections.UserDict(step=0),
            "counter": lambda: collections.Counter(step=0),
            "list": lambda: collections.UserList([0]),
            "deque": lambda: collections.deque([0]),
            "weak dictionary": lambda: weakref.WeakKeyDictionary({self.a: 0}),
            "context": lambda: contextvars.ContextVar("step", default=0),
            "iterator": lambda: iter(range(10**9)),
            "count": itertools.count,
            "generator": lambda: (step for step in range(10**9)),
            "bytes": lambda: bytearray(1),
            "array": lambda: array.array("d", [0.0]),
        }[way]()

    def step(self) -> float:
        state = self.state
        if self.way in ("namespace", "simple namespace", "thread"):
            state.step += 1
            return float(state.step)
        if self.way in ("dict", "counter"):
            state["step"] += 1
            return float(state["step"])
        if self.way == "weak dictionary":
            state[self.a] += 1
            return float(state[self.a])
        if self.way == "context":
            state.set(state.get() + 1)
            return float(state.get())
        if self.way in ("iterator", "count", "generator"):
            return float(next(state)) + 1
        state.append(1)
        return float(len(state) - 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) / (1 + self.step())))


COUNTERS = (
    "namespace", "simple namespace", "thread", "dict", "counter", "list", "deque", "weak dictionary",
    "context", "iterator", "count", "generator", "bytes", "array",
)  # fmt: skip


@odd()
def state_in_standard_objects(chance: random.Random, clean: bool) -> Parts:
    return classified(chance, Counting(chance.choice(COUNTERS)))


class Steps(nn.Module):
    """A recurrent network that takes time first, or a pair, or words, and returns a row for each step."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.words = nn.Embedding(5, 3)
        self.cell, self.head = nn.RNN(3, 4, batch_first=layout == "batch first"), nn.Linear(4, 3)

    def forward(self, given: Any) -> Tensor:
        if self.layout == "pair":
            given = given[0] + given[1]
        if self.layout == "words":
            given = self.words(given)
        found = self.head(self.cell(given)[0])
        return found[-1] if self.layout in ("last step", "pair") else found.flatten(0, 1)


@odd()
def batches_of_odd_layouts(chance: random.Random, clean: bool) -> Parts:
    layout = chance.choice(["batch first", "time first", "last step", "pair", "words"])
    steps, sizes = chance.randint(2, 4), chance.sample([1, 2, 3, 5, 8], chance.choice([1, 2, 3]))

    def batch(size: int) -> Any:
        shape = (size, steps, 3) if layout == "batch first" else (steps, size, 3)
        if layout == "words":
            return torch.randint(5, shape[:2]), torch.randint(3, (size * steps,))
        given: Any = (torch.randn(shape), torch.randn(shape)) if layout == "pair" else torch.randn(shape)
        return given, torch.randint(3, (size if layout in ("last step", "pair") else size * steps,))

    reduction = chance.choice(["mean", "mean", "sum"])
    return Parts(Steps(layout), nn.CrossEntropyLoss(reduction=reduction), [batch(size) for size in sizes])


# A problem of these says itself which of its layers are measured.
FEW_LAYERS = ("vocabulary", "many logits that are nearly a cross entropy")


@dataclass(frozen=True)
class Drawn:
    """One random problem.

    `ordinary` ones must be measured; the others measured right, or refused. `reference` builds an equal
    problem that plain autograd differentiates right (the problem itself, unless it hides its derivatives);
    None where the problem has no curvature to speak of, so that it must be refused.
    """

    name: str
    ordinary: bool
    build: Callable[[], Parts]
    reference: Callable[[], Parts] | None
    seed: int = 0
    estimator: str = "auto"
    layers: str | None = None  # unless the parts name them


def draw(seed: int) -> Drawn:
    """The problem number `seed`."""
    chance = random.Random(seed)
    odd = chance.random() < ODD_SHARE
    make = chance.choice(list(ODD)) if odd else chance.choice(list(ORDINARY))
    number = chance.randrange(1000)
    estimator = "lanczos" if chance.random() < 0.2 else "auto"
    every_parameter = chance.random() < 0.15 and make not in FEW_LAYERS
    state = chance.getstate()

    def build(clean: bool = False) -> Parts:
        again = random.Random()
        again.setstate(state)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if not odd:
                return ORDINARY[make](again)
            return ODD[make].build(again, clean)

    refused = odd and ODD[make].has_no_curvature
    return Drawn(
        f"{'odd' if odd else 'ordinary'} {make}",
        not odd,
        build,
        None if refused else lambda: build(clean=True),
        number,
        estimator,
        "**" if every_parameter else None,
    )
