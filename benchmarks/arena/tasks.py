"""What the arena trains.

CPU and RECORDED_GPU are the tasks on record in results/arena, with eleven other starts. NORMALIZED, RESNET20
and GPU have their records in results/arena2, and so have the LONG trainings, whose held-out accuracy counts.

`development` marks the tasks on which constants of `initialize_` are chosen; the others are not looked at
before they are settled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from arena import data, networks

HALF_DECADES = (0.01, 0.03, 0.1, 0.3, 1.0)
OURS = "hessinit"
RACED = "hessinit + race"
AUTO = "hessinit, auto rate"
STARTS = ("default", "he", "orthogonal", "lsuv", OURS, RACED)
WITH_FIXUP = tuple("fixup" if start == "he" else start for start in STARTS)
OPTIMIZERS = {"sgd": SGD, "momentum": functools.partial(SGD, momentum=0.9), "adam": Adam, "adamw": AdamW}


def next_character(scores: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy of every position."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


@dataclass(frozen=True)
class Task:
    """A network, its data and how it is trained; `chance` is the loss of guessing.

    `data(held_out=True)` are examples that are never trained on. `starts` and `seeds` are those of its own
    record; `looks` says how often held-out data are looked at, the last time after training.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[..., Any]
    rates: tuple[float, ...]
    chance: float
    steps: int = 300
    batch_size: int = 64
    optimizer: str = "sgd"
    device: str = "cpu"
    development: bool = False
    quick: bool = False
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    cosine: bool = False
    weight_decay: float | None = None  # None: PyTorch's own
    starts: tuple[str, ...] = STARTS
    seeds: int = 3
    looks: int = 1

    def make_optimizer(self, parameters: list[nn.Parameter], lr: float) -> Optimizer:
        options = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        return OPTIMIZERS[self.optimizer](parameters, lr=lr, **options)


def times(rates: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(float(f"{rate * factor:.3g}") for rate in rates)


OWN = {"starts": (OURS, RACED)}  # the others are on record
DIGITS = {
    "data": functools.partial(data.mnist),
    "chance": math.log(10),
    "rates": times(HALF_DECADES, 0.3),
    **OWN,
}
COLOURS = {
    "data": functools.partial(data.cifar),
    "chance": math.log(10),
    "rates": times(HALF_DECADES, 0.3),
    **OWN,
}
LENGTH = 32
TEXT = {
    "data": functools.partial(data.characters, LENGTH),
    "chance": math.log(data.VOCABULARY),
    "loss": next_character,
    "steps": 200,
    "batch_size": 16,
    **OWN,
}


def _mlp(activation: type[nn.Module], depth: int, dropout: float = 0.0) -> Callable[[], nn.Module]:
    return functools.partial(networks.mlp, activation, depth, dropout=dropout)


def _transformer(norm_first: bool) -> Callable[[], nn.Module]:
    return functools.partial(networks.Transformer, data.VOCABULARY, LENGTH, norm_first=norm_first)


CPU = (
    Task("relu-3", _mlp(nn.ReLU, 3), development=True, quick=True, **DIGITS),
    Task("relu-10", _mlp(nn.ReLU, 10), development=True, quick=True, **DIGITS),
    Task("relu-30", _mlp(nn.ReLU, 30), **DIGITS),
    Task("tanh-3", _mlp(nn.Tanh, 3), **DIGITS),
    Task("tanh-10", _mlp(nn.Tanh, 10), development=True, **DIGITS),
    Task("tanh-30", _mlp(nn.Tanh, 30), development=True, **DIGITS),
    Task("gelu-10", _mlp(nn.GELU, 10), quick=True, **DIGITS),
    Task("sigmoid-3", _mlp(nn.Sigmoid, 3), **DIGITS),
    Task("dropout-5", _mlp(nn.ReLU, 5, 0.5), **DIGITS),
    Task("residual-20", networks.ResidualMLP, development=True, **DIGITS),
    Task("lenet", networks.lenet, development=True, quick=True, **COLOURS),
    Task("plain-cnn-9", networks.plain_cnn, steps=250, batch_size=32, **COLOURS),
    Task(
        "lstm",
        functools.partial(networks.CharacterLSTM, data.VOCABULARY),
        rates=times(HALF_DECADES, 10),
        **TEXT,
    ),
    Task("post-ln", _transformer(False), rates=HALF_DECADES, **TEXT),
    Task("pre-ln", _transformer(True), rates=HALF_DECADES, development=True, **TEXT),
)

FEW = {"batch_size": 128, "device": "cuda"}
PICTURES = {"data": functools.partial(data.cifar), "chance": math.log(10), **FEW}
RECORDED_GPU = (
    Task("vgg-16", networks.vgg16, rates=times(HALF_DECADES, 0.3), steps=120, **OWN, **PICTURES),
    Task("tanh-cnn-19", networks.tanh_cnn, rates=times(HALF_DECADES, 0.3), steps=120, **OWN, **PICTURES),
)

SGD_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
ADAM_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
CLOTHES = {"data": functools.partial(data.fashion), "chance": math.log(10)}
_BN_CNN = functools.partial(networks.cnn, nn.BatchNorm2d, nn.ReLU)
_GN_CNN = functools.partial(networks.cnn, networks.eight_groups, nn.SiLU)
_PLAIN_CNN = functools.partial(networks.cnn, nn.Identity, nn.ReLU)


def _with_adam(task: Task) -> tuple[Task, Task]:
    return task, replace(task, name=f"{task.name}-adam", optimizer="adam", rates=ADAM_RATES)


NORMALIZED = (
    *_with_adam(Task("bn-cnn", _BN_CNN, rates=SGD_RATES, development=True, **CLOTHES)),
    *_with_adam(Task("gn-cnn", _GN_CNN, rates=SGD_RATES, development=True, **CLOTHES)),
    *_with_adam(Task("ln-mlp", networks.layer_norm_mlp, rates=SGD_RATES, **CLOTHES)),
)
_RESNET20 = Task(
    "resnet-20", functools.partial(networks.normalized_resnet, 20), functools.partial(data.cifar_split),
    rates=(*SGD_RATES, 1.0), chance=math.log(10), steps=700, batch_size=128, device="cuda", cosine=True,
    development=True,
)  # fmt: skip
RESNET20 = (
    _RESNET20,
    replace(_RESNET20, name="resnet-20-adamw", optimizer="adamw", rates=(*ADAM_RATES, 0.03)),
)

TWO_DECADES = (0.01, 0.05, 0.2, 1.0)
ADAMW = {"optimizer": "adamw", "rates": times(TWO_DECADES, 0.01)}
SENTENCES = {
    "data": functools.partial(data.characters, 128),
    "chance": math.log(data.VOCABULARY),
    "loss": next_character,
    "seeds": 2,
    **FEW,
    "batch_size": 32,
}
PICTURES = {"seeds": 2, **PICTURES}
_GPT = functools.partial(
    networks.Transformer, data.VOCABULARY, 128, norm_first=True, width=256, layers=8, heads=8
)
_LOWER = {"rates": times(TWO_DECADES, 0.1), "starts": WITH_FIXUP}

GPU = (
    Task("vgg-16-300", networks.vgg16, rates=times(TWO_DECADES, 0.3), **PICTURES),
    Task("tanh-cnn-19-300", networks.tanh_cnn, rates=times(TWO_DECADES, 0.3), **PICTURES),
    Task("resnet-56", functools.partial(networks.ResNet, 56), **_LOWER, **PICTURES),
    Task("resnet-110", functools.partial(networks.ResNet, 110), **_LOWER, **PICTURES),
    Task("resnet-56-bn", functools.partial(networks.normalized_resnet, 56), rates=TWO_DECADES, **PICTURES),
    Task("vit-ti", networks.VisionTransformer, rates=TWO_DECADES, **PICTURES),
    Task("vit-ti-adamw", networks.VisionTransformer, **ADAMW, **PICTURES),
    Task("gpt", _GPT, rates=TWO_DECADES, **SENTENCES),
    Task("gpt-adamw", _GPT, **ADAMW, **SENTENCES),
)
TRANSFORMERS_ADAMW = tuple(task for task in GPU if task.name in ("vit-ti-adamw", "gpt-adamw"))


def _long(task: Task, name: str, decay: float, **changes: Any) -> tuple[Task, Task]:
    """Without and with weight decay, on at most 10,000 images."""
    shared = {
        "cosine": True,
        "device": "cuda",
        "looks": 10,
        "seeds": 1,
        "starts": (*STARTS[:2], "lsuv", OURS),
    }
    task = replace(task, name=name, weight_decay=0.0, **shared, **changes)
    return task, replace(task, name=f"{name}-decay", weight_decay=decay)


_FEWER_CLOTHES = {"data": functools.partial(data.fashion, 10_000), "steps": 2_340}  # 15 epochs
LONG = (
    *_long(NORMALIZED[0], "long-bn-cnn", 5e-4, **_FEWER_CLOTHES),
    *_long(NORMALIZED[5], "long-ln-mlp-adamw", 0.05, optimizer="adamw", **_FEWER_CLOTHES),
    *_long(_RESNET20, "long-resnet-20", 5e-4, steps=1_400, rates=(0.01, 0.03, 0.1, 0.3, 1.0)),  # 20 epochs
    *_long(Task("", _PLAIN_CNN, rates=SGD_RATES, **CLOTHES), "long-plain-cnn", 5e-4, **_FEWER_CLOTHES),
)

# The picture of the first page: networks and rates that were chosen before anything was trained. Those with
# normalizations share their records with the tasks of the same name.
_SHOWN = {"rates": (*SGD_RATES, 1.0), "starts": (*STARTS[:2], "lsuv", OURS), "seeds": 2}
_PLAIN_PICTURE = (
    Task("MLP, 10 layers, ReLU", _mlp(nn.ReLU, 10), **{**DIGITS, **_SHOWN}),
    Task("MLP, 10 layers, tanh", _mlp(nn.Tanh, 10), **{**DIGITS, **_SHOWN}),
    Task("CNN", _PLAIN_CNN, **CLOTHES, **_SHOWN),
)
PICTURE = (*_PLAIN_PICTURE, *(replace(task, **_SHOWN) for task in NORMALIZED if task.optimizer == "sgd"))
TITLES = {"bn-cnn": "CNN with BatchNorm", "gn-cnn": "CNN with GroupNorm", "ln-mlp": "MLP with LayerNorm"}
RECORDED = (*CPU, *RECORDED_GPU)
EVERY = (*RECORDED, *NORMALIZED, *RESNET20, *GPU, *LONG, *_PLAIN_PICTURE)
BY_NAME = {task.name: task for task in EVERY}
SETS = {
    "cpu": CPU,
    "recorded": RECORDED,
    "quick": tuple(task for task in CPU if task.quick),
    "normalized": NORMALIZED,
    "resnet20": RESNET20,
    "gpu": GPU,
    "long": LONG,
    "picture": PICTURE,
    "development": tuple(task for task in EVERY if task.development and task not in LONG),
}
