"""Random small measuring problems: ordinary networks, and constructions that are easily measured wrong.

`draw(seed)` gives the same problem every time. A problem is built anew for every use, so that a measurement
cannot spoil the truth it is compared with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

ODD_SHARE = 0.3


@dataclass
class Parts:
    """A model, a loss and a batch (or a list of batches)."""

    model: nn.Module
    loss: Callable[..., Tensor]
    batch: Any
    forward: Callable[[nn.Module, Any], Tensor] | None = None

    @property
    def batches(self) -> list[Any]:
        return self.batch if isinstance(self.batch, list) else [self.batch]

    def double(self) -> Parts:
        """The same numbers in fp64; the loss may hold a model's weight, so it is converted in place, too."""
        self.model.double()
        if isinstance(self.loss, nn.Module):
            self.loss.double()
        batch = _map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, self.batch)
        return Parts(self.model, self.loss, batch, self.forward)


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
    options: dict[str, Any] = field(default_factory=dict)


def draw(seed: int) -> Drawn:
    """The problem number `seed`."""
    chance = random.Random(seed)
    odd = chance.random() < ODD_SHARE
    make = chance.choice(list(ODD)) if odd else chance.choice(list(ORDINARY))
    options: dict[str, Any] = {"seed": chance.randrange(1000)}
    if chance.random() < 0.2:
        options["estimator"] = "lanczos"
    if chance.random() < 0.15:
        options["layers"] = "**"
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
        options,
    )


# The ordinary ones
# --------------------------------------------------------------------------------------------

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.Hardswish,
    nn.Mish, nn.SELU, nn.PReLU, nn.Identity, nn.Softsign, nn.ReLU6, nn.Hardtanh, nn.CELU,
]  # fmt: skip


def activation(chance: random.Random) -> nn.Module:
    return chance.choice(ACTIVATIONS)()


def norm(chance: random.Random, width: int) -> nn.Module:
    # Without an eps of its own, RMSNorm takes that of the dtype, so that fp64 would be another function.
    root_mean_square = partial(nn.RMSNorm, eps=1e-6)
    return chance.choice([nn.BatchNorm1d, nn.LayerNorm, root_mean_square, nn.Identity, nn.Identity])(width)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


def dense_stack(chance: random.Random, inputs: int, outputs: int) -> nn.Sequential:
    width = chance.randint(2, 14)
    layers: list[nn.Module] = [nn.Linear(inputs, width, bias=chance.random() < 0.7)]
    layers += [norm(chance, width), activation(chance)]
    for _ in range(chance.randint(0, 3)):
        inner = nn.Sequential(nn.Linear(width, width), norm(chance, width), activation(chance))
        small = chance.choice([1.0, 1.0, 0.1, 1e-3])
        layers.append(Residual(inner, small) if chance.random() < 0.3 else inner)
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def rescale(chance: random.Random, model: nn.Module) -> nn.Module:
    """Start from something else than PyTorch's default; one time in ten with a zero or a tiny head."""
    factor = chance.choice([0.2, 0.5, 1.0, 1.0, 1.5, 3.0])
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(factor)
        if chance.random() < 0.1:
            weights[-1].mul_(chance.choice([0.0, 1e-3, 1e-6]))
    return model


def features(chance: random.Random, *shape: int) -> Tensor:
    """Standardized as a rule; some large, some far from zero, some with equal or empty examples."""
    x = torch.randn(*shape)
    kind = chance.random()
    if kind < 0.05:
        x = 300 + chance.choice([0.1, 10.0]) * x
    elif kind < 0.1:
        x = x * chance.choice([1e-3, 30.0])
    elif kind < 0.15:
        x[-1] = x[0]
    elif kind < 0.2:
        x[0] = 0
    return x


def criterion(chance: random.Random, outputs: int) -> tuple[Callable[..., Tensor], Callable[[int], Tensor]]:
    """A loss of (N, outputs), and what draws N targets for it."""
    reduction = chance.choice(["mean", "mean", "sum"])
    labels = lambda count: torch.randint(outputs, (count,))  # noqa: E731
    numbers = lambda count: torch.randn(count, outputs)  # noqa: E731
    zeros_and_ones = lambda count: torch.rand(count, outputs).round()  # noqa: E731

    def focal(output: Tensor, target: Tensor) -> Tensor:
        probability = output.softmax(1).gather(1, target[:, None])
        return ((1 - probability) ** 2 * -probability.log()).mean()

    def hinge(output: Tensor, target: Tensor) -> Tensor:
        return torch.relu(1 - output.gather(1, target[:, None]) + output).pow(2).sum(1).mean()

    def contrastive(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.normalize(output) @ F.normalize(target).T / 0.3, torch.arange(len(output)))

    def gaussian(output: Tensor, target: Tensor) -> Tensor:
        spread = output[:, :1]
        return (0.5 * spread + 0.5 * (target - output) ** 2 * torch.exp(-spread)).mean()

    weights = torch.linspace(0.3, 2.0, outputs)
    found: list[tuple[Callable[..., Tensor], Callable[[int], Tensor]]] = [
        (nn.CrossEntropyLoss(reduction=reduction), labels),
        (nn.CrossEntropyLoss(reduction=reduction), labels),
        (nn.CrossEntropyLoss(weight=weights, reduction=reduction), labels),
        (nn.CrossEntropyLoss(label_smoothing=0.1), labels),
        (F.cross_entropy, labels),
        (nn.MSELoss(reduction=reduction), numbers),
        (F.mse_loss, numbers),
        (nn.HuberLoss(delta=0.8, reduction=reduction), numbers),
        (nn.BCEWithLogitsLoss(reduction=reduction), zeros_and_ones),
        (nn.PoissonNLLLoss(), zeros_and_ones),
        (lambda output, target: (1 - F.cosine_similarity(output, target, dim=1)).mean(), numbers),
        (lambda output, target: torch.log1p((output - target) ** 2).sum(1).mean(), numbers),
        (focal, labels),
        (hinge, labels),
        (contrastive, numbers),
        (gaussian, numbers),
    ]
    return chance.choice(found)


def batched(chance: random.Random, sample: Callable[[int], Tensor], target: Callable[[int], Tensor]) -> Any:
    """One batch, or two of different sizes."""
    sizes = (
        [chance.randint(3, 32)] if chance.random() < 0.8 else [chance.randint(3, 8), chance.randint(4, 16)]
    )
    batches = [(sample(size), target(size)) for size in sizes]
    return batches[0] if len(batches) == 1 else batches


def mlp(chance: random.Random) -> Parts:
    inputs, outputs = chance.randint(2, 20), chance.randint(2, 6)
    model = rescale(chance, dense_stack(chance, inputs, outputs))
    loss, target = criterion(chance, outputs)
    return Parts(model, loss, batched(chance, lambda count: features(chance, count, inputs), target))


def convolutional(chance: random.Random) -> Parts:
    channels, outputs = chance.choice([2, 4, 8]), chance.randint(2, 3)
    normalizer = chance.choice([nn.BatchNorm2d, lambda c: nn.GroupNorm(2, c), nn.InstanceNorm2d, nn.Identity])
    second = nn.Conv2d(channels, channels, 2, groups=chance.choice([1, 2]), padding=chance.choice([0, 1]))
    if chance.random() < 0.2:
        second = nn.ConvTranspose2d(channels, channels, 2, stride=2)  # type: ignore[assignment]
    pool = chance.choice([nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])(1)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, stride=chance.choice([1, 2])), normalizer(channels), activation(chance),
        second, activation(chance), pool, nn.Flatten(), nn.Linear(channels, outputs),
    )  # fmt: skip
    loss, target = criterion(chance, outputs)
    return Parts(
        rescale(chance, model), loss, batched(chance, lambda count: features(chance, count, 1, 6, 6), target)
    )


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.cell, self.head = kind(inputs, width, batch_first=True), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def recurrent(chance: random.Random) -> Parts:
    inputs, outputs = chance.randint(1, 3), chance.randint(2, 3)
    model = Recurrent(chance.choice([nn.RNN, nn.LSTM, nn.GRU]), inputs, chance.randint(2, 6), outputs)
    loss, target = criterion(chance, outputs)
    return Parts(
        rescale(chance, model),
        loss,
        batched(chance, lambda count: features(chance, count, 3, inputs), target),
    )


class Attentive(nn.Module):
    def __init__(self, width: int, outputs: int, norm_first: bool, act: str) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(
            width, 2, 4, dropout=0.0, activation=act, batch_first=True, norm_first=norm_first
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean(1))


def attentive(chance: random.Random) -> Parts:
    outputs = chance.randint(2, 3)
    width = chance.choice([4, 8])
    model = Attentive(width, outputs, chance.random() < 0.5, chance.choice(["relu", "gelu"]))
    loss, target = criterion(chance, outputs)
    return Parts(
        rescale(chance, model), loss, batched(chance, lambda count: features(chance, count, 3, width), target)
    )


class Words(nn.Module):
    def __init__(self, words: int, width: int, outputs: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, words if tied else outputs, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens).mean(1))))


def words(chance: random.Random) -> Parts:
    tied, count = chance.random() < 0.4, chance.randint(4, 20)
    outputs = count if tied else chance.randint(2, 3)
    model = Words(count, chance.randint(2, 8), outputs, tied)
    loss, target = criterion(chance, outputs)
    return Parts(
        rescale(chance, model), loss, batched(chance, lambda size: torch.randint(count, (size, 3)), target)
    )


class TwoHeads(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(inputs, width)
        self.first, self.second = nn.Linear(width, 2), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x))
        return torch.cat([self.first(h), self.second(h)], 1)


def two_heads(chance: random.Random) -> Parts:
    """A regression and a classification, the second with a share of the loss that may be tiny."""
    share, inputs = chance.choice([1.0, 0.1, 1e-3, 1e-6]), chance.randint(2, 12)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        first = F.mse_loss(output[:, :2], target[:, :2])
        return first + share * F.cross_entropy(output[:, 2:], target[:, 2].abs().long() % 3)

    batch = batched(chance, lambda n: features(chance, n, inputs), lambda n: 2 * torch.randn(n, 3))
    return Parts(rescale(chance, TwoHeads(inputs, chance.randint(2, 12))), loss, batch)


class Gated(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(inputs, width), nn.Linear(inputs, width)
        self.down = parametrizations.weight_norm(nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.value(x) * F.silu(self.gate(x)))


def gated(chance: random.Random) -> Parts:
    inputs, outputs = chance.randint(2, 10), chance.randint(2, 3)
    loss, target = criterion(chance, outputs)
    batch = batched(chance, lambda count: features(chance, count, inputs), target)
    return Parts(Gated(inputs, chance.randint(2, 10), outputs), loss, batch)


ORDINARY: dict[str, Callable[[random.Random], Parts]] = {
    "mlp": mlp,
    "convolutional": convolutional,
    "recurrent": recurrent,
    "attentive": attentive,
    "words": words,
    "two heads": two_heads,
    "gated": gated,
}


# The odd ones
# -------------------------------------------------------------------------------------------------


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


# Truth
# --------------------------------------------------------------------------------------------------------


def true_norms(parts: Parts, layers: dict[str, list[str]], curvature: str) -> dict[str, float]:
    """‖H‖ of each group of parameters, by plain autograd in fp64, a row at a time; without hessinit.

    Batches whose loss sums (by its `reduction`, which the generator sets right) are added up, others averaged
    over examples. nan where a matrix is not finite, as that of a cosine similarity at 0.
    """
    parts = parts.double()
    parameters = dict(parts.model.named_parameters(remove_duplicate=False))
    weights = list({parameters[name]: None for group in layers.values() for name in group})
    sizes = [len(targets) for _, targets in parts.batches]
    sums = getattr(parts.loss, "reduction", None) == "sum" and type(parts.loss).__name__ != "PerBatch"
    with sdpa_kernel(SDPBackend.MATH), mock.patch("torch._weight_norm", _weight_norm):
        total = sum(
            (1.0 if sums else size / sum(sizes)) * _matrix(parts, batch, weights, curvature)
            for size, batch in zip(sizes, parts.batches, strict=True)
        )
    spans = dict(zip(weights, _spans(weights), strict=True))
    found = {}
    for layer, group in layers.items():
        own = {parameters[name]: None for name in group}
        index = torch.cat([torch.arange(*spans[weight]) for weight in own])
        block = total[index][:, index]
        finite = bool(torch.isfinite(block).all())
        found[layer] = float(torch.linalg.eigvalsh((block + block.T) / 2).abs().max()) if finite else math.nan
    return found


def _weight_norm(direction: Tensor, length: Tensor, dim: int = 0) -> Tensor:
    """In place of torch's own, whose second derivative is wrong (seen in torch 2.13)."""
    assert dim == 0
    return direction * (length / direction.flatten(1).norm(dim=1).view(length.shape))


def _matrix(parts: Parts, batch: Any, weights: list[Tensor], curvature: str) -> Tensor:
    inputs, targets = batch
    call = parts.forward or (lambda model, x: model(x))
    output = call(parts.model, inputs)
    if curvature == "hessian":
        return _rows(_flat(torch.autograd.grad(parts.loss(output, targets), weights, create_graph=True,
                                               allow_unused=True), weights), weights)  # fmt: skip
    jacobian = _rows(output.reshape(-1), weights)
    cut = output.detach().requires_grad_()
    (slope,) = torch.autograd.grad(parts.loss(cut, targets), cut, create_graph=True)
    return jacobian.T @ _rows(slope.reshape(-1), [cut]) @ jacobian


def _rows(values: Tensor, by: list[Tensor]) -> Tensor:
    if not values.requires_grad:
        return values.new_zeros(len(values), sum(one.numel() for one in by))
    rows = [
        _flat(torch.autograd.grad(value, by, retain_graph=True, allow_unused=True), by)
        for value in values
    ]  # fmt: skip
    return torch.stack(rows).detach()


def _flat(gradients: tuple[Tensor | None, ...], by: list[Tensor]) -> Tensor:
    pairs = zip(gradients, by, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])


def _spans(weights: list[Tensor]) -> Iterator[tuple[int, int]]:
    first = 0
    for weight in weights:
        yield first, first + weight.numel()
        first += weight.numel()


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return type(value)(_map(function, one) for one in value)
