"""The record of one forward: its steps in the order they ran, each with the steps that it consumes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hessinit.schemes.leaves import map_leaves
from hessinit.schemes.operations import RESIZING
from hessinit.schemes.site import Kind


@dataclass(frozen=True)
class Signal:
    """What a step gave: it stands for the tensor in the arguments of later calls."""

    index: int


@dataclass(frozen=True)
class Derived:
    """A parameter, or what was made of parameters alone, without data.

    `how` is "" for the parameter or its transpose, "slice" for a piece of it, "computed" for anything else.
    """

    parameters: frozenset[str]
    value: Tensor | None
    transposed: bool = False
    how: str = ""

    @property
    def name(self) -> str:
        """The one parameter's, as its module shows it; "" where several are mixed.

        >>> Derived(frozenset({"fc.parametrizations.weight.original0"}), None).name
        'fc.weight'
        """
        owners = {shown_name(parameter) for parameter in self.parameters}
        return owners.pop() if len(owners) == 1 else ""

    @property
    def is_vector(self) -> bool:
        """One number for each channel at most, as a bias or a gain has; (1, C, 1, 1) is one, too."""
        return self.value is not None and self.value.numel() <= max(self.value.shape, default=1)


def parametrized_name(parameter: str) -> str:
    """`fc.weight` for what `torch.nn.utils.parametrize` stores for it.

    >>> parametrized_name("fc.parametrizations.weight.original0"), parametrized_name("fc.weight")
    ('fc.weight', 'fc.weight')
    """
    owner, found, rest = f".{parameter}".partition(".parametrizations.")
    return f"{owner}.{rest.partition('.')[0]}".lstrip(".") if found else parameter


def shown_name(parameter: str) -> str:
    """The same, and `conv.weight` for what the older `weight_norm` stores for it.

    >>> shown_name("parametrizations.weight.original"), shown_name("conv.weight_g"), shown_name("fc.bias")
    ('weight', 'conv.weight', 'fc.bias')
    """
    name = parametrized_name(parameter)
    return name[:-2] if name.endswith(("weight_g", "weight_v")) else name


@dataclass(frozen=True)
class Noise:
    """A tensor of random numbers, or what was made of one without data: the mask of a stochastic depth.

    Of a mask, `keep` is the share that is not 0, and `scale` the number there. `uniform` numbers lie between
    0 and 1. `like` says that they were drawn in the shape of a signal, `shape` which shape, where known.
    """

    keep: float | None = None
    scale: float = 1.0
    uniform: bool = False
    like: bool = False
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Unknown:
    """A shape, or what was made of one, that is not known without a sample; `call`, named `name`, would tell.

    `fill` is the number that it holds everywhere, if it does, as of `zeros_like`.
    """

    call: Call
    name: str = ""
    fill: float | None = None


@dataclass(frozen=True)
class Call:
    """A call that can be run again on other values of the signals in its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, values: Callable[[Signal], Any]) -> Any:
        def put(leaf: Any) -> Any:
            if isinstance(leaf, Signal):
                value = values(leaf)
                return value.clone() if isinstance(value, Tensor) else value  # the call may write in place
            if isinstance(leaf, Unknown):
                return leaf.call.run(values)
            return leaf.value if isinstance(leaf, Derived) else leaf

        args = map_leaves(put, self.args)
        return self.function(*args, **map_leaves(put, dict(self.kwargs)))


def passed_on(source: int) -> Call:
    """The call of a step that gives what it got."""
    return Call(_pass_on, (Signal(source),))


def _pass_on(value: Any) -> Any:
    # A condition that was cast to numbers is calculated with.
    return value.double() if isinstance(value, Tensor) and value.dtype is torch.bool else value


@dataclass(frozen=True)
class Use:
    """How a step uses its weight; the fields are those of `Site`."""

    parameter: str
    kind: Kind
    shape: tuple[int, ...]
    outputs_last: bool = False
    groups: int = 1
    stride: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    inside: str = ""
    computed: bool = False


@dataclass(frozen=True)
class Step:
    """One call. `sources` are the steps whose results it consumes, `shape` that of its result where known.

    `kind` is its role: see `operations.kind_of`; also "input", "weight", "state", "gates", "sum", "product".
    """

    index: int
    name: str
    kind: str
    sources: tuple[int, ...] = ()
    call: Call | None = None
    use: Use | None = None
    keep: float = 1.0
    runs: bool = False
    shape: tuple[int, ...] | None = None

    @property
    def resizes(self) -> bool:
        """Whether it sums up, or the like: what it gives is not of the size of what it got."""
        return self.kind == "pool" and self.name in RESIZING


@dataclass
class Record:
    """All steps; those whose results the model returns, and those behind them (`live`).

    `other_uses` says how a parameter is used that is not the weight of a step.
    """

    steps: list[Step] = field(default_factory=list)
    outputs: set[int] = field(default_factory=set)
    live: set[int] = field(default_factory=set)
    other_uses: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, kind: str, sources: tuple[int, ...] = (), **details: Any) -> Signal:
        """Append a step."""
        self.steps.append(Step(len(self.steps), name, kind, sources, **details))
        return Signal(len(self.steps) - 1)

    def behind(self, indices: Iterable[int]) -> set[int]:
        """These steps and all whose results go into them."""
        found: set[int] = set()
        waiting = list(indices)
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                waiting.extend(self[index].sources)
        return found

    def __getitem__(self, index: int) -> Step:
        return self.steps[index]
