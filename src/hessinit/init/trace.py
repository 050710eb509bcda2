"""The trace of one forward pass: its steps in execution order, and what torch's functions do to a signal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["dense", "convolution", "transposed convolution", "embedding", "bilinear"]
Shape = tuple[int, ...] | None


# --- Functions of torch by name: one table for functions, methods and operators
# ---------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# They give no signal: shapes, or tensors that depend on a shape alone.
SHAPE_QUERIES = _names(
    "shape size dim ndim ndimension numel nelement zeros_like ones_like empty_like full_like rand_like "
    "randn_like new_zeros new_ones new_empty new_full new_tensor"
)
CASTS = _names(
    "to float half double bfloat16 type type_as cuda cpu int long bool detach data clone contiguous "
    "requires_grad nan_to_num real checkpoint"
)
TO_INTEGERS = _names("int long bool")
TRANSPOSING = _names("transpose permute swapaxes swapdims movedim moveaxis t T mT H mH adjoint")
# Every value goes on as it is, in another place; some may be left out, repeated, or masked to zero.
REARRANGING = (
    CASTS
    | TRANSPOSING
    | _names(
        "view reshape flatten unflatten ravel squeeze unsqueeze expand expand_as view_as reshape_as repeat "
        "repeat_interleave tile roll flip getitem narrow select index_select gather take_along_dim masked_fill "
        "masked_select pad pixel_shuffle pixel_unshuffle channel_shuffle unfold fold tril triu broadcast_to "
        "diagonal take sort"
    )
)
SPLITS = _names("chunk split tensor_split unbind")
# Means, extremes and sums over positions: passed through, and not counted, unless they are
# `RESIZING`.
REDUCTIONS = _names("mean sum std var norm vector_norm amax amin max min median logsumexp prod")
POOLING = REDUCTIONS | _names(
    "interpolate grid_sample cumsum scatter_add scatter_reduce index_add cumprod"
)
# What they give is not of the size of what they got, by a factor that depends on how much they add
# up.
RESIZING = _names(
    "sum norm vector_norm prod logsumexp cumsum cumprod scatter_add scatter_reduce index_add lp_pool1d "
    "lp_pool2d lp_pool3d"
)
# Alpha dropouts keep mean and variance: nothing is to be made up for.
ALPHA_DROPOUTS = _names("alpha_dropout feature_alpha_dropout")
DRAWING = _names("bernoulli rand randn rand_like randn_like uniform normal exponential")
SCALINGS = _names("mul div neg multiply divide true_divide rdiv")
SUMS = _names("add sub rsub subtract lerp")
ELEMENTWISE = (
    SCALINGS
    | SUMS
    | _names(
        "relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish softplus softsign softshrink "
        "hardshrink tanhshrink hardtanh hardsigmoid hardswish sigmoid logsigmoid log_sigmoid tanh threshold "
        "sin cos tan asin acos atan sinh cosh asinh acosh atanh arctan arcsinh arctanh sinc exp exp2 expm1 "
        "log log2 log10 log1p sqrt rsqrt square pow rpow float_power abs absolute sign sgn erf erfc erfinv "
        "reciprocal clamp clamp_min clamp_max clip maximum minimum where gt ge lt le eq ne greater less "
        "logical_and logical_or logical_not heaviside floor ceil round trunc frac expit logit fmax fmin hypot "
        "floor_divide remainder positive xlogy logaddexp addcmul addcdiv"
    )
)
MIXING = _names(
    "matmul mm bmm mv dot inner outer einsum tensordot addmm baddbmm addbmm addmv kron cdist bilinear "
    "linear scaled_dot_product_attention conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d"
)
_KINDS = {
    "pool": POOLING,
    "rearrange": REARRANGING,
    "split": SPLITS,
    "elementwise": ELEMENTWISE,
    # One unit depends on the others: no gain follows from them.
    "normalizing": _names(
        "softmax log_softmax softmin normalize gumbel_softmax softmax2d cosine_similarity renorm"
    ),
    "mix": MIXING,
    "cat": _names("cat concat concatenate stack hstack vstack dstack column_stack"),
    "gate": _names("glu"),
}
_KIND_BY_NAME = {name: kind for kind, names in _KINDS.items() for name in names}
_OPERATORS = {
    "radd": "add",
    "iadd": "add",
    "rmul": "mul",
    "imul": "mul",
    "isub": "sub",
    "truediv": "div",
    "itruediv": "div",
    "idiv": "div",
    "rmatmul": "matmul",
    "imatmul": "matmul",
    "ipow": "pow",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "concat": "cat",
    "concatenate": "cat",
}


def name_of(function: Callable[..., Any] | str) -> str:
    """What a function is called in the tables: properties, operators and in-place forms by their plain name.

    >>> import torch
    >>> [name_of(f) for f in (torch.Tensor.add_, torch.Tensor.__rsub__, torch.Tensor.T.__get__, "relu_")]
    ['add', 'rsub', 'T', 'relu']
    """
    name = (
        function
        if isinstance(function, str)
        else getattr(function, "__name__", type(function).__name__)
    )
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    name = name.strip("_").removeprefix("linalg_")
    return _OPERATORS.get(name, name)


def kind_of(name: str) -> str:
    """The role of a function that gets a signal and no weight.

    >>> [kind_of(name) for name in ("tanh", "max_pool2d", "softmax", "qr")]
    ['elementwise', 'pool', 'normalizing', 'unknown']
    """
    families = {"dropout": "dropout", "pool": "pool", "_norm": "norm"}
    found = (kind for part, kind in families.items() if part in name)
    return _KIND_BY_NAME.get(name) or next(found, "unknown")


@dataclass(frozen=True)
class Signal:
    """The result of a step; stands for the tensor in the arguments of later calls."""

    index: int


@dataclass(frozen=True)
class Derived:
    """A parameter, or a tensor computed from parameters alone.

    `how` is "" for the parameter or its transpose, "slice" for a piece of it, "computed" for
    anything else.
    """

    parameters: frozenset[str]
    value: Tensor
    transposed: bool = False
    how: str = ""

    @property
    def name(self) -> str:
        """The parameter's name as its module shows it; "" where several are mixed."""
        owners = {parametrized_name(parameter) for parameter in self.parameters}
        return owners.pop() if len(owners) == 1 else ""


@dataclass(frozen=True)
class Unknown:
    """A shape, or a tensor made from one, that is unknown without a sample; `call` would compute it."""

    call: ReplayableCall


@dataclass(frozen=True)
class ReplayableCall:
    """A call that can be run again with other values of the signals in its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, values: Callable[[Signal], Any]) -> Any:
        def put(leaf: Any) -> Any:
            if isinstance(leaf, Signal):
                value = values(leaf)
                return (
                    value.clone() if isinstance(value, Tensor) else value
                )  # the call may write in place
            if isinstance(leaf, Unknown):
                return leaf.call.run(values)
            return leaf.value if isinstance(leaf, Derived) else leaf

        return self.function(*map_leaves(put, self.args), **map_leaves(put, dict(self.kwargs)))


def parametrized_name(parameter: str) -> str:
    """`fc.weight` for what `torch.nn.utils.parametrize` stores for it.

    >>> parametrized_name("fc.parametrizations.weight.original0"), parametrized_name("fc.weight")
    ('fc.weight', 'fc.weight')
    """
    owner, found, rest = f".{parameter}".partition(".parametrizations.")
    return f"{owner}.{rest.partition('.')[0]}".lstrip(".") if found else parameter


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """`function` applied to everything in nested tuples, lists, dicts and slices."""
    if isinstance(structure, (tuple, list)):
        return (list if type(structure) is list else tuple)(
            map_leaves(function, one) for one in structure
        )
    if isinstance(structure, dict):
        return {key: map_leaves(function, entry) for key, entry in structure.items()}
    if isinstance(structure, slice):
        return slice(*map_leaves(function, [structure.start, structure.stop, structure.step]))
    return function(structure)


def leaves_of(structure: Any) -> list[Any]:
    """Everything that `map_leaves` visits, in order."""
    found: list[Any] = []
    map_leaves(found.append, structure)
    return found


@dataclass(frozen=True)
class Context:
    """What lies between a weight and its neighbour: elementwise functions and dropout.

    `moment` is E f(z)² upstream of a weight and E f'(z)² downstream, for z ~ N(0, 1), dropout left
    out: 1 without an activation. `keep` is the product of 1 − p over the dropouts; `dropout_active`
    says whether one of them is in train mode. A dropout whose 1/√(1 − p) does not pass through the
    function after it, as tanh, counts in `moment` and not in `keep`. `words` names what was met, as
    "relu, dropout 0.4"; `end` what ends the context: "input", "tokens", "weight", "norm", "sum",
    "product", "mix", "cat", "state", "output" …. `trouble` names a function that is not
    elementwise, as softmax: no moment follows from it. Where another weight feeds this one,
    `feeder` is the `step` of that use and `function` the elementwise function between the two (its
    root mean square over the masks of a dropout inside).
    """

    words: str = ""
    moment: float = 1.0
    keep: float = 1.0
    dropout_active: bool = False
    end: str = ""
    trouble: str = ""
    feeder: int = field(default=-1, compare=False)
    function: Callable[[Tensor], Tensor] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class WeightUse:
    """One use of the weight `parameter` in the forward pass.

    `blocks` are the sizes of the output blocks with separate roles: three for a fused qkv, four for
    the gates of an LSTM, () for most. `outputs_last` says that the weight is stored as (in, out).
    `stride` has one number for each dimension of a convolution. `inside` names the composite
    function that holds the use, as "lstm". `computed` says that the forward does not use the
    parameter as it is stored: it is parametrized, or standardized first. `order` counts the uses,
    `step` is the index in the trace.
    """

    parameter: str
    kind: Kind
    shape: tuple[int, ...]
    order: int = 0
    blocks: tuple[int, ...] = ()
    outputs_last: bool = False
    groups: int = 1
    stride: tuple[int, ...] = ()
    upstream: Context = Context()
    downstream: Context = Context()
    norm_follows: bool = False
    closes_residual: bool = False
    inside: str = ""
    computed: bool = False
    step: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class Step:
    """One call. `sources` are the steps whose results it consumes, `shape` that of its result where known.

    `call` is None where the elements of the first source are passed on, or where nobody runs it
    again. `kind` is its role: as by `kind_of`, or "input", "weight", "state", "gates", "sum",
    "product", "unknown".
    """

    index: int
    name: str
    kind: str
    sources: tuple[int, ...] = ()
    call: ReplayableCall | None = None
    use: WeightUse | None = None
    keep: float = 1.0
    active: bool = False
    shape: Shape = None

    @property
    def resizes(self) -> bool:
        """Whether it sums, or the like, so that its result is not of the size of its input."""
        return self.kind == "pool" and self.name in RESIZING


@dataclass
class Trace:
    """All steps; those whose results the model returns (`outputs`), and all that these depend on (`live`).

    `other_uses` says how a parameter is used that is not the weight of a step; `draws` whether the
    forward calls a generator of random numbers itself.
    """

    steps: list[Step] = field(default_factory=list)
    outputs: set[int] = field(default_factory=set)
    live: set[int] = field(default_factory=set)
    other_uses: dict[str, str] = field(default_factory=dict)
    draws: bool = False

    def add(self, name: str, kind: str, sources: tuple[int, ...] = (), **details: Any) -> Signal:
        self.steps.append(Step(len(self.steps), name, kind, sources, **details))
        return Signal(len(self.steps) - 1)

    def ancestors(self, indices: Iterable[int]) -> set[int]:
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


# --- Simplifying: functions of one signal become one step
# -------------------------------------------------

_UNCHANGED = CASTS - TO_INTEGERS | {"bias", "centre", "dropout"}  # a dropout of 0
VIEWS = ("view", "reshape", "view_as", "reshape_as", "expand", "expand_as", "broadcast_to")


def simplify(trace: Trace) -> None:
    """Rewrite, in place, every elementwise step of several signals.

    x·sigmoid(x) becomes one function of x; x / √mean(x²) a norm; the rest is a sum or a product of
    different signals, or unknown. Marks the steps that reach an output as live.
    """
    for step in list(trace.steps):
        if step.kind == "elementwise" and len(step.sources) > 1:
            trace.steps[step.index] = _rewritten(trace, step)
    trace.live = trace.ancestors(trace.outputs) if trace.outputs else set(range(len(trace.steps)))


def _rewritten(trace: Trace, step: Step) -> Step:
    root, between = _common_root(trace, step)
    sums = step.name in SUMS
    reductions = [inner for inner in between if inner.kind == "pool"]
    if root is None and step.name == "masked_fill":
        return replace(step, kind="rearrange", sources=(step.sources[0],), call=None)
    if root is None:
        return replace(step, kind="product" if step.name == "mul" else "sum" if sums else "unknown")
    if not reductions:
        steps = [*between, step]
        words = ", ".join(inner.name for inner in steps if inner.kind != "rearrange")
        call = ReplayableCall(_composite(steps, root), (Signal(root),))
        return replace(step, name=words, sources=(root,), call=call)
    if any(inner.resizes for inner in reductions) or not (sums or step.name in SCALINGS):
        return replace(step, kind="sum" if sums else "unknown")
    name, kind = ("centre", "rearrange") if sums else ("norm by hand", "norm")
    return replace(step, name=name, kind=kind, sources=(root,), call=None)


def _common_root(trace: Trace, step: Step) -> tuple[int | None, list[Step]]:
    """The nearest step that `step` is a function of, by elementwise steps and reductions alone.

    And the steps between, in order; those that only pass on their elements do so in any shape.
    """
    frontier = set(step.sources)
    between = []
    while len(frontier) > 1:
        latest = trace[max(frontier)]
        learnable = latest.name == "scale" and step.name in SCALINGS  # the slope of a Swish, at 1
        passes = learnable or keeps_elements(trace, latest)
        reduces = latest.kind == "pool" and latest.name in REDUCTIONS
        if not (passes or reduces or latest.kind == "elementwise") or not latest.sources:
            return None, []
        between.append(replace(latest, call=None) if passes else latest)
        frontier = frontier - {latest.index} | set(latest.sources)
    return frontier.pop(), between[::-1]


def keeps_elements(trace: Trace, step: Step) -> bool:
    """Whether a step returns its input, each element in its place: a cast, a view in the same shape."""
    if step.kind != "rearrange" or step.name in _UNCHANGED:
        return step.kind == "rearrange"
    return (
        step.name in VIEWS and step.shape is not None and step.shape == trace[step.sources[0]].shape
    )


def _composite(steps: list[Step], root: int) -> Callable[[Any], Any]:
    def evaluate(value: Any) -> Any:
        values = {root: value}
        for step in steps:
            passed = values[step.sources[0]]
            passed = (
                passed.double() if passed.dtype is torch.bool else passed
            )  # a condition becomes numbers
            run = step.call and step.call.run
            values[step.index] = run(lambda signal: values[signal.index]) if run else passed
        return values[steps[-1].index]

    return evaluate
