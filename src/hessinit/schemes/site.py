"""One use of a weight: what kind of map it is, and what lies before and after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Kind = Literal["dense", "convolution", "transposed convolution", "embedding", "bilinear"]

BY_SHAPE = "a scale by a shape"  # the trouble of a trace, which knows no shapes


@dataclass(frozen=True)
class Passage:
    """What lies between a weight and its neighbour: elementwise functions and dropout.

    `moment` is E f(z)² before a weight and E f'(z)² after it, for z ~ N(0, 1), dropout left out: 1 where no
    activation is. `keep` is the product of 1 − p over the dropouts, and `dropout_runs` whether one of them is
    active (train mode). A dropout whose 1/√(1 − p) does not pass through the function behind it, as a tanh,
    is a part of that function: it counts in `moment` and not in `keep`. `words` says what was met, as
    "relu, dropout 0.4"; `end` what ends the passage: "input", "tokens", "weight", "norm", "sum", "product",
    "mix", "cat", "state", "output" …. `trouble` names a function on the way that is not elementwise, as
    softmax, or is `BY_SHAPE`: no moment follows from it. Where a passage before a weight begins at another
    weight, `feeder` is the `step` of that site, and `function` the elementwise function between them, if
    there is one (its root mean square over the masks, where a dropout is a part of it).
    """

    words: str = ""
    moment: float = 1.0
    keep: float = 1.0
    dropout_runs: bool = False
    end: str = ""
    trouble: str = ""
    feeder: int = field(default=-1, compare=False)
    function: Callable[[Tensor], Tensor] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Site:
    """One use of the weight `parameter` in the forward.

    `parts` are the sizes of the blocks along the output dimension that lead separate lives: three for a fused
    qkv, four for the gates of an LSTM, one for most. `outputs_last` says that the weight is stored as
    (in, out). `stride` has one number for each dimension of a convolution. `inside` names the composite
    that holds the use ("lstm", "multi_head_attention_forward"). `computed` says that the forward does not use
    the parameter as it is stored: it is parametrized, or standardized first. `step` numbers it in the record.
    """

    parameter: str
    kind: Kind
    shape: tuple[int, ...]
    order: int
    parts: tuple[int, ...] = ()
    outputs_last: bool = False
    groups: int = 1
    stride: tuple[int, ...] = ()
    before: Passage = Passage()
    after: Passage = Passage()
    norm_follows: bool = False
    closes_residual: bool = False
    inside: str = ""
    computed: bool = False
    step: int = field(default=-1, compare=False)
