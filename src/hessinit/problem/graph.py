"""What a network does: torch's operations in one table, and walks over autograd graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Role = Literal[
    "query",  # gives no signal: a shape, or a tensor that depends on a shape alone
    "rearrange",  # every value goes on as it is; some may be left out, repeated or masked to zero
    "split",  # a rearrangement that gives several tensors
    "pool",  # means, extremes and sums over positions
    "elementwise",
    "dropout",
    "norm",
    "normalizing",  # one unit depends on the others, as in a softmax: no gain follows from it
    "mix",  # sums of products
    "cat",
    "gate",
    "unknown",
]
# How a weight is stored: as (out, in), as a kernel, as a table, as (out, in1, in2), or as one of
# the two factors of a product.
Storage = Literal[
    "", "dense", "convolution", "transposed convolution", "embedding", "bilinear", "factor"
]


@dataclass(frozen=True)
class Operation:
    """What a function of torch does to a signal: its role, and traits that readers ask for."""

    role: Role = "unknown"
    casts: bool = False  # to another precision or device, which changes no value
    keeps_order: bool = False  # its node passes on the same numbers in the same order
    views: bool = False  # gives the same numbers in a shape that an argument says
    transposes: bool = False
    slices: bool = False
    reduces: bool = False  # one number for many
    resizes: bool = False  # the result's magnitude depends on how many numbers are added up
    adds: bool = False
    scales: bool = False
    by_channel: bool = False  # a vector of factors or slopes acts like one number
    is_activation: bool = False
    draws: bool = False  # random numbers
    keeps_moments: bool = False  # a dropout that keeps mean and variance
    stores: Storage = ""  # how its weight is stored
    parameters: str = ""  # the names of its arguments, in order
    gates: int = 0  # output blocks in the weights of a recurrent layer

    @property
    def maps(self) -> bool:
        """Whether it gives sums of products with a weight, or looks up rows of one."""
        return self.role == "mix" or bool(self.stores)

    def arguments(self, args: tuple[Any, ...], kwargs: Any) -> dict[str, Any]:
        """The arguments of a call by their names."""
        return {**dict(zip(self.parameters.split(), args, strict=False)), **kwargs}


_CONVOLUTION = "input weight bias stride padding dilation groups"
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"
_EMBEDDING_BAG = "input weight offsets max_norm norm_type scale_grad_by_freq mode"
_ATTENTION = (
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v "
    "add_zero_attn dropout_p out_proj_weight out_proj_bias training key_padding_mask need_weights "
    "attn_mask use_separate_proj_weight q_proj_weight k_proj_weight v_proj_weight"
)
_DROPOUT = "input p training"
_CELL = "input hx w_ih w_hh"

_ROWS: tuple[tuple[Operation, str], ...] = (
    (
        Operation("query"),
        """shape size dim ndim ndimension numel nelement zeros_like ones_like empty_like
        full_like new_zeros new_ones new_empty new_full new_tensor""",
    ),
    (Operation("query", draws=True), "rand_like randn_like"),
    (Operation(draws=True), "bernoulli rand randn uniform normal exponential"),
    (
        Operation("rearrange", casts=True),
        """to float half double bfloat16 type type_as cuda cpu detach data requires_grad
        nan_to_num real checkpoint""",
    ),
    (Operation("rearrange", casts=True, keeps_order=True), "clone contiguous"),
    (Operation("rearrange"), "int long bool"),
    (
        Operation("rearrange", transposes=True),
        "transpose permute swapaxes swapdims movedim moveaxis t T mT H mH adjoint",
    ),
    (Operation("rearrange", views=True, keeps_order=True), "view"),
    (
        Operation("rearrange", views=True),
        "reshape view_as reshape_as expand expand_as broadcast_to",
    ),
    (Operation("rearrange", keeps_order=True), "squeeze unsqueeze alias reshape_alias unsafe_view"),
    (Operation("rearrange", slices=True), "getitem narrow select"),
    (
        Operation("rearrange"),
        """flatten unflatten ravel repeat repeat_interleave tile roll flip index_select gather
        take_along_dim masked_fill masked_select pad pixel_shuffle pixel_unshuffle
        channel_shuffle unfold fold tril triu diagonal take sort""",
    ),
    (Operation("split", slices=True), "chunk split tensor_split unbind"),
    (Operation("pool", reduces=True), "mean std var amax amin max min median"),
    (Operation("pool", reduces=True, resizes=True), "sum norm vector_norm logsumexp prod"),
    (Operation("pool"), "interpolate grid_sample"),
    (
        Operation("pool", resizes=True),
        "cumsum cumprod scatter_add scatter_reduce index_add lp_pool1d lp_pool2d lp_pool3d",
    ),
    (
        Operation("norm"),
        "native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm",
    ),
    (
        Operation("dropout", keeps_moments=True, parameters=_DROPOUT),
        "alpha_dropout feature_alpha_dropout",
    ),
    (Operation("elementwise", scales=True, by_channel=True), "mul div"),
    (Operation("elementwise", scales=True), "neg rdiv"),
    (Operation("elementwise", adds=True), "add sub rsub lerp"),
    (Operation("elementwise", by_channel=True, is_activation=True), "prelu"),
    (
        Operation("elementwise", is_activation=True),
        """celu elu erf gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish
        relu rrelu sigmoid silu sin softplus softshrink tanh threshold""",
    ),
    (
        Operation("elementwise"),
        """relu6 selu softsign tanhshrink log_sigmoid cos tan asin acos atan sinh cosh asinh
        acosh atanh arctan arcsinh arctanh sinc exp exp2 expm1 log log2 log10 log1p sqrt rsqrt
        square pow rpow float_power abs absolute sign sgn erfc erfinv reciprocal clamp
        clamp_min clamp_max clip maximum minimum where gt ge lt le eq ne greater less
        logical_and logical_or logical_not heaviside floor ceil round trunc frac expit logit
        fmax fmin hypot floor_divide remainder positive xlogy logaddexp addcmul addcdiv""",
    ),
    (
        Operation("normalizing"),
        "softmax log_softmax softmin normalize gumbel_softmax softmax2d cosine_similarity renorm",
    ),
    (
        Operation("mix"),
        "dot outer einsum tensordot baddbmm addbmm addmv kron cdist scaled_dot_product_attention",
    ),
    (Operation("mix", stores="factor", parameters="input other"), "matmul mm bmm mv inner"),
    (Operation("mix", stores="factor", parameters="bias input other"), "addmm"),
    (Operation("mix", stores="dense", parameters="input weight bias"), "linear"),
    (Operation("mix", stores="bilinear", parameters="input1 input2 weight bias"), "bilinear"),
    (Operation("mix", stores="convolution", parameters=_CONVOLUTION), "conv1d conv2d conv3d"),
    (
        Operation("mix", stores="transposed convolution", parameters=_TRANSPOSED),
        "conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    (Operation(stores="embedding", parameters="input weight"), "embedding"),
    (Operation(stores="embedding", parameters=_EMBEDDING_BAG), "embedding_bag"),
    (Operation(parameters=_ATTENTION), "multi_head_attention_forward"),
    (Operation(gates=4), "lstm"),
    (Operation(gates=3), "gru"),
    (Operation(gates=1), "rnn_tanh rnn_relu"),
    (Operation(gates=4, parameters=_CELL), "lstm_cell"),
    (Operation(gates=3, parameters=_CELL), "gru_cell"),
    (Operation(gates=1, parameters=_CELL), "rnn_tanh_cell rnn_relu_cell"),
    (Operation("cat"), "cat stack hstack vstack dstack column_stack"),
    (Operation("gate"), "glu"),
)
OPERATIONS = {name: operation for operation, names in _ROWS for name in names.split()}
_UNKNOWN = Operation()
# Parts of names that tell the role of the many that are not listed, such as max_pool2d.
_FAMILIES = {
    "dropout": Operation("dropout", parameters=_DROPOUT),
    "pool": Operation("pool"),
    "_norm": Operation("norm"),
}
_SYNONYMS = {
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
_NODE_SYNONYMS = {"log_sigmoid": "logsigmoid", "prelu_kernel": "prelu", "rrelu_with_noise": "rrelu"}
_NODE = re.compile(r"Backward\d*$")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def name_of(function: Callable[..., Any] | str) -> str:
    """What a function is called in the table: operators and in-place forms by their plain name.

    >>> import torch
    >>> functions = torch.Tensor.add_, torch.Tensor.__rsub__, torch.Tensor.T.__get__, "relu_"
    >>> [name_of(function) for function in functions]
    ['add', 'rsub', 'T', 'relu']
    """
    name = function
    if not isinstance(name, str):
        name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    name = name.strip("_").removeprefix("linalg_")
    return _SYNONYMS.get(name, name)


def operation_named(name: str) -> Operation:
    """What a function of this name does to a signal; of unknown role where it is not known.

    >>> [operation_named(name).role for name in ("tanh", "max_pool2d", "softmax", "qr")]
    ['elementwise', 'pool', 'normalizing', 'unknown']
    """
    if name in OPERATIONS:
        return OPERATIONS[name]
    families = (operation for part, operation in _FAMILIES.items() if part in name)
    return next(families, _UNKNOWN)


def node_name(node: Any) -> str:
    """The name of the operation behind a node of an autograd graph.

    Some in-place forms have nodes of their own: LeakyReluBackward1 beside LeakyReluBackward0.

    >>> import torch
    >>> node_name(torch.ones(1, requires_grad=True).relu().grad_fn)
    'relu'
    """
    name = _WORD.sub("_", _NODE.sub("", type(node).__name__)).lower()
    return _NODE_SYNONYMS.get(name, name)


def operation_of(node: Any) -> Operation:
    """What the operation behind a node of an autograd graph does; unknown unless it is listed."""
    return OPERATIONS.get(node_name(node), _UNKNOWN)


Node = Any  # torch.autograd.graph.Node; its saved tensors are not typed
Consumers = dict[Node, list[Node]]


def nodes_behind(top: Node | None, stop: Node | None = None) -> Iterator[Node]:
    """Every node behind `top`, itself included, in no particular order; none behind `stop`."""
    reached = {top}
    waiting = [top]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        if node is stop:
            continue
        for source, _ in node.next_functions:
            if source not in reached:
                reached.add(source)
                waiting.append(source)


def nodes_in_order(top: Node) -> Iterator[Node]:
    """Every node behind `top`, itself included, each after those whose results it uses."""
    done: set[Node] = set()
    waiting = [(top, iter(top.next_functions))]
    while waiting:
        node, sources = waiting[-1]
        unvisited = (source for source, _ in sources if source is not None and source not in done)
        source = next(unvisited, None)
        if source is not None:
            waiting.append((source, iter(source.next_functions)))
            continue
        waiting.pop()
        if node not in done:
            done.add(node)
            yield node


def consumers_of(output: Tensor) -> Consumers:
    """The nodes that consume each node's result, for all the nodes behind `output`."""
    consumers: Consumers = {output.grad_fn: []}
    waiting: list[Node] = [output.grad_fn]
    for node in waiting:  # which grows
        for source, _ in node.next_functions:
            if source is None:
                continue
            if source not in consumers:
                waiting.append(source)
            consumers.setdefault(source, []).append(node)
    return consumers


def leaf_of(node: Node) -> Tensor | None:
    """The tensor whose gradient the node accumulates; None for a node inside the graph."""
    return getattr(node, "variable", None)


def first_leaf(nodes: Iterable[Node], leaves: Mapping[str, Tensor]) -> str | None:
    """The name of the first of `leaves` that is met among `nodes`."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    met = (names.get(id(leaf_of(node))) for node in nodes)
    return next((name for name in met if name is not None), None)


def custom_functions(output: Tensor, stop: Tensor | None = None) -> list[str]:
    """The names of the user's own `torch.autograd.Function`s between `stop` and `output`."""
    nodes = nodes_behind(output.grad_fn, None if stop is None else stop.grad_fn)
    classes = [getattr(node, "_forward_cls", None) for node in nodes]
    functions = [function for function in classes if function is not None]
    return sorted({f.__name__ for f in functions if not f.__module__.startswith("hessinit.")})


def activation_kind(node: Node) -> str | None:
    """The name of the real elementwise activation behind a node; None for any other node."""
    is_activation = operation_of(node).is_activation
    if not is_activation or node._input_metadata[0].dtype.is_complex:
        return None
    return node_name(node)


def keeps_all_numbers(node: Node) -> bool:
    """Whether a node passes on all numbers that it gets, in the same order or transposed."""
    operation = operation_of(node)
    return operation.keeps_order or operation.transposes
