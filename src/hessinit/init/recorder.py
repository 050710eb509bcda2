"""Records the calls of one forward, run on a sample or on symbols, as a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from hessinit.errors import ProblemError
from hessinit.init import trace
from hessinit.init.layer_functions import COMPOSITES, LAYERS, WEIGHT_FUNCTIONS, arguments
from hessinit.problem.batches import cast, map_tensors, tensors_in
from hessinit.problem.double_backward import twice_differentiable
from hessinit.problem.explained import explain_module
from hessinit.problem.preserve import UserState, untouched_random_state
from hessinit.problem.problem import Forward

Add = Callable[..., trace.Signal]  # `Trace.add` with a shape
_BY_CHANNEL = ("mul", "div", "prelu")
_SLICING = {"getitem", "narrow", "select", *trace.SPLITS}
_IN_PLACE = re.compile(r"[^_]_$")


class Symbol:
    """Takes the place of a tensor, or of a shape, in a forward that runs without data."""

    def __init__(self, recorder: Recorder, stands_for: Any) -> None:
        self._recorder = recorder
        self.stands_for = stands_for

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented  # the recorder comes first

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device"):
            return getattr(self._recorder.like, name)
        attribute = getattr(Tensor, name)
        if callable(attribute):
            return functools.partial(self._recorder.record, attribute, self)
        return self._recorder.record(attribute.__get__, self)

    def __iter__(self) -> Iterator[Any]:
        found = (
            isinstance(self.stands_for, trace.Signal)
            and self._recorder.trace[self.stands_for.index]
        )
        if not found or found.call is None or found.kind != "split":
            raise TypeError("the forward takes apart a shape or a tensor")
        pieces = arguments(found.call.args, found.call.kwargs, "input parts")["parts"]
        if found.name != "chunk" and isinstance(pieces, int):
            raise TypeError("the forward splits a tensor of unknown length")
        return iter(
            [self[place] for place in range(pieces if found.name == "chunk" else len(pieces))]
        )

    def __bool__(self) -> bool:
        raise TypeError("the forward decides by a shape or a value: control flow")

    def __getitem__(self, place: Any) -> Any:
        return self._recorder.record(operator.getitem, self, place)

    __hash__ = object.__hash__


_OPERATORS = (
    "add sub mul truediv floordiv mod pow matmul and or lt le gt ge eq ne neg abs invert setitem"
)
for _function in [getattr(operator, f"__{_name}__") for _name in _OPERATORS.split()]:
    _name = _function.__name__.strip("_")
    setattr(Symbol, f"__{_name}__", lambda a, *rest, f=_function: a._recorder.record(f, a, *rest))
    setattr(Symbol, f"__r{_name}__", lambda a, b, f=_function: a._recorder.record(f, b, a))


class Recorder(TorchFunctionMode):
    """Sees every call of a torch function, appends what it does to `trace`, and knows what tensors stand for.

    That is a `Signal`, a `Derived`, an `Unknown`, or None for a constant.
    """

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.trace = trace.Trace()
        self.like = like
        self._paused = False
        # The tensors are held as well, so that no two of them ever have the same id.
        self._known: dict[int, tuple[Any, Tensor]] = {}

    def know(self, tensor: Tensor, stands_for: Any) -> None:
        self._known[id(tensor)] = (stands_for, tensor)

    def symbol_of(self, leaf: Any) -> Any:
        if isinstance(leaf, Symbol):
            return leaf.stands_for
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._known:
            # From a custom autograd.Function, a scripted function, a closure: no call was seen.
            self.know(
                leaf, self.trace.add("an unseen function", "unknown", shape=tuple(leaf.shape))
            )
        stands_for = self._known[id(leaf)][0]
        return leaf if stands_for is None else stands_for

    def as_norm(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The same forward as one step of the trace."""

        def normalize(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()][0]
            source = None if self._paused else self.symbol_of(given)
            if not isinstance(source, trace.Signal):
                return forward(*args, **kwargs)
            if isinstance(given, Symbol):
                return Symbol(self, self.trace.add("norm", "norm", (source.index,)))
            self._paused = True
            try:
                result = forward(*args, **kwargs)
            finally:
                self._paused = False
            shape = tuple(getattr(result, "shape", ()))
            self.know(result, self.trace.add("norm", "norm", (source.index,), shape=shape))
            return result

        return normalize

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if any(isinstance(leaf, Symbol) for leaf in trace.leaves_of([args, kwargs])):
            return self.record(func, *args, **kwargs)
        symbols = trace.map_leaves(self.symbol_of, args), trace.map_leaves(self.symbol_of, kwargs)
        version = args[0]._version if args and isinstance(args[0], Tensor) else None
        result = func(*args, **kwargs)
        name = trace.name_of(func)
        self.trace.draws |= name in trace.DRAWING
        if name == "setitem":
            result = args[0]
        elif version is not None and symbols[0][0] is args[0] and args[0]._version != version:
            name = "a write into a constant"
        elif (
            isinstance(result, Tensor) and args and result is args[0] and result._version == version
        ):
            result = result.view_as(
                result
            )  # returned as it came, not written to: a step of its own
        self._assign(result, self._call(name, func, *symbols, result))
        return None if name == "setitem" else result

    def record(self, function: Any, *args: Any, name: str = "", **kwargs: Any) -> Any:
        """The symbol of the result of a call that gets symbols, and is not run."""
        name = name or trace.name_of(function)
        symbols = trace.map_leaves(self.symbol_of, args), trace.map_leaves(self.symbol_of, kwargs)
        whole = symbols[0][0] if name == "getitem" else None
        if isinstance(whole, trace.Signal) and self.trace[whole.index].kind == "split":
            return Symbol(self, self._part(whole, args[1]))
        found = self._call(name, function, *symbols, None)
        in_place = _IN_PLACE.search(getattr(function, "__name__", "")) or kwargs.get("inplace")
        if in_place or name == "setitem":
            args[0].stands_for = found
            return args[0]
        return trace.map_leaves(functools.partial(Symbol, self), found)

    def _assign(self, result: Any, found: Any) -> None:
        if isinstance(result, Tensor):
            found = found[0] if isinstance(found, tuple) else found
            derived = isinstance(found, trace.Derived)
            self.know(result, dataclasses.replace(found, value=result) if derived else found)
        elif isinstance(result, (tuple, list)):
            for place, entry in enumerate(result):
                part = found[place] if isinstance(found, tuple) else found
                if isinstance(found, trace.Signal) and isinstance(entry, Tensor):
                    part = self._part(found, place, tuple(entry.shape))
                self._assign(entry, part)

    def _part(self, whole: trace.Signal, place: int, shape: trace.Shape = None) -> trace.Signal:
        call = trace.ReplayableCall(operator.getitem, (whole, place))
        return self.trace.add("part", "rearrange", (whole.index,), call=call, shape=shape)

    def _call(self, name: str, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        leaves = trace.leaves_of([args, kwargs])
        signals = [leaf for leaf in leaves if isinstance(leaf, trace.Signal)]
        parameters = [leaf for leaf in leaves if isinstance(leaf, trace.Derived)]
        call = trace.ReplayableCall(function, args, kwargs)
        shape = tuple(result.shape) if isinstance(result, Tensor) else None
        if name in trace.SHAPE_QUERIES or not (signals or parameters):
            return trace.Unknown(call) if result is None else None
        if name in COMPOSITES:
            return COMPOSITES[name](self.trace, name, args, kwargs)
        if len(parameters) > 1 and name in LAYERS and isinstance(args[0], trace.Derived):
            # A learned input, as the queries of a Perceiver: what a layer is called on is a signal.
            for used in args[0].parameters:
                self.trace.other_uses.setdefault(used, "a learned input, not a map of a signal")
            learned = self.trace.add("parameter", "input", shape=tuple(args[0].value.shape))
            args = (learned, *args[1:])
            signals = [learned]
            parameters = parameters[1:]
        if parameters and name in WEIGHT_FUNCTIONS:
            found = WEIGHT_FUNCTIONS[name](self.trace, name, args, kwargs, shape)
            if found is not None:
                return found
        if not signals:
            return _derive(name, parameters, result)
        for parameter in parameters:
            for used in parameter.parameters:
                self.trace.other_uses.setdefault(used, name)
        others = (*args[1:2], *kwargs.values())
        tensors = trace.Signal, trace.Unknown, Tensor
        if name in ("max", "min") and any(isinstance(one, tensors) for one in others):
            name = f"{name}imum"  # of two tensors, not over a dimension
        add = functools.partial(self.trace.add, shape=shape)
        return _step(add, name, call, tuple(dict.fromkeys(one.index for one in signals)))


def _step(
    add: Add, name: str, call: trace.ReplayableCall, sources: tuple[int, ...]
) -> trace.Signal:
    kind = trace.kind_of(name)
    constants = any(isinstance(leaf, Tensor) for leaf in trace.leaves_of(call.args))
    if kind == "mix" and len(sources) == 1 and constants:
        kind = "unknown"  # a constant matrix, as of a graph: it may add up any number of entries
    if kind == "dropout":
        given = arguments(call.args, call.kwargs, "input p training")
        p = given.get("p", 0.5)
        active = bool(given.get("training", True))
        if p == 0:
            return add(name, "rearrange", sources[:1])
        keep = 1.0 if name in trace.ALPHA_DROPOUTS else 1.0 - p
        return add(f"{name.rstrip('123d')} {p:g}", kind, sources[:1], keep=keep, active=active)
    # A mask that is a signal may be made of the very signal that it multiplies, as in a handwritten
    # ReLU.
    if kind == "elementwise" or (name == "masked_fill" and len(sources) > 1):
        return _elementwise(add, name, call, sources)
    if kind in ("rearrange", "norm", "pool", "split"):
        # The further signals are indices, masks, statistics or gains.
        passed = name in trace.CASTS - trace.TO_INTEGERS or name in ("masked_fill", "sort")
        return add(name, kind, sources[:1], call=None if passed else call)
    return add(name, kind, sources, call=call)


def _elementwise(
    add: Add, name: str, call: trace.ReplayableCall, sources: tuple[int, ...]
) -> trace.Signal:
    leaves = trace.leaves_of([call.args, dict(call.kwargs)])
    learned = [leaf.value for leaf in leaves if isinstance(leaf, trace.Derived)]
    others = [*learned, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
    numbers = {id(other): _one_number(other, name) for other in others}
    several = [other for other in others if numbers[id(other)] is None]
    unknown = any(isinstance(leaf, trace.Unknown) for leaf in leaves)
    if unknown and name not in trace.SUMS:
        raise ValueError(f"{name} of a signal and a shape")
    if name in trace.SUMS and len(sources) == 1 and learned and all(map(_is_vector, others)):
        return add("bias", "rearrange", sources)
    if unknown or (name in trace.SUMS and len(sources) == 1 and (several or learned)):
        return add(name, "sum", sources)
    if name in ("mul", "div") and len(sources) == 1 and learned:
        # A learnable scale, as of a LayerScale or a branch that starts at 0, is not for a weight to
        # undo.
        return add("scale", "rearrange", sources)
    if any(_is_mask(other) for other in (others if name in trace.SCALINGS else several)):
        return add("mask", "rearrange", sources[:1])
    if several:
        return add(name, "unknown", sources)

    def plain(leaf: Any) -> Any:
        leaf = leaf.value if isinstance(leaf, trace.Derived) else leaf
        return numbers.get(id(leaf), leaf)

    args, kwargs = trace.map_leaves(plain, [call.args, dict(call.kwargs)])
    if name == "rrelu":  # its slope is drawn in train mode; the mean slope stands for it
        args = args[:3]
        kwargs = {key: kwargs[key] for key in ("lower", "upper") if key in kwargs}
    return add(name, "elementwise", sources, call=trace.ReplayableCall(call.function, args, kwargs))


def _derive(name: str, parameters: list[trace.Derived], result: Any) -> trace.Derived:
    first = parameters[0]
    names = frozenset().union(*(parameter.parameters for parameter in parameters))
    how = first.how
    transposed = first.transposed
    same_shape = isinstance(result, Tensor) and result.shape == first.value.shape
    if name in _SLICING:
        how = how or "slice"
    elif name in trace.TRANSPOSING and first.value.ndim == 2 and not how:
        transposed = not transposed
    elif name not in trace.CASTS and not (name in trace.REARRANGING and same_shape):
        how = "computed"
    return trace.Derived(names, first.value, transposed, how)


def _is_vector(value: Tensor) -> bool:
    """At most one number for each channel, as a bias or a gain; (1, C, 1, 1) counts."""
    return value.numel() <= max(value.shape, default=1)


def _is_mask(value: Tensor) -> bool:
    """A constant of zeros and one other number: what it lets through keeps its size."""
    rest = value[value != 0]
    return rest.numel() < value.numel() and bool((rest == rest[:1]).all())


def _one_number(value: Tensor, name: str) -> Tensor | None:
    """The number that a constant holds everywhere, or the root mean square of gains or slopes; else None."""
    value = value.detach().cpu()
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        value = value.flatten()[0].clone()
    if value.numel() > 1:
        if name not in _BY_CHANNEL:
            return None
        value = value.double()
        value = (
            value.reciprocal().square().mean().rsqrt()
            if name == "div"
            else value.square().mean().sqrt()
        )
    value = value.double() if value.is_floating_point() else value
    return value.reshape(1) if name == "prelu" else value.reshape(())


_NORM = re.compile(r"Norm(\d?d)?$")


def _is_norm(module: nn.Module) -> bool:
    """Whether the class is called a norm, as `LlamaRMSNorm`; norms of weights do not count."""
    kind = type(module)
    vectors = all(one.ndim < 2 or one.numel() == max(one.shape) for one in module.parameters())
    return (
        bool(_NORM.search(kind.__name__))
        and not kind.__module__.startswith("torch.nn.utils")
        and vectors
    )


def prepare_sample(model: nn.Module, sample: Any) -> Any:
    """A copy of the sample in the precision and on the device of the model."""
    first = _first_real(model)
    return map_tensors(torch.clone, cast(sample, first.dtype, first.device))


def _first_real(model: nn.Module) -> nn.Parameter:
    everything = list(model.parameters())
    return next(
        (parameter for parameter in everything if parameter.is_floating_point()), everything[0]
    )


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Inside, the model may draw, write attributes, count steps and differentiate; all is restored."""
    with (
        untouched_random_state(_first_real(model).device),
        UserState(model).with_stand_ins(),
        twice_differentiable(
            model
        ),  # with gradients, which the forward of a physics-informed network takes
        _plain_transformers(),
    ):
        yield


def run(
    model: nn.Module,
    inputs: Any,
    forward: Forward | None,
    tensors: Mapping[str, Tensor],
    mode: contextlib.AbstractContextManager[Any],
) -> Any:
    """The model's output under `mode`, with `tensors` in the place of its parameters and buffers."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    renamed = {f"model.{name}": tensor for name, tensor in {**own, **tensors}.items()}
    try:
        with mode:
            return functional_call(_Called(model, forward), renamed, (inputs,))
    except ProblemError:
        raise
    except Exception as failure:
        if forward is _call_on_symbols:
            reason = str(failure).strip().split(". ")[0].splitlines() or [type(failure).__name__]
            raise ProblemError(
                f"the model cannot be traced without data ({reason[0].rstrip('.')}); pass sample=, an "
                "input as the model gets it."
            ) from failure
        if "does not require grad" in str(failure):
            raise ProblemError(
                "the forward differentiates by its own weights, as that of MAML does, and a scheme runs it "
                'on copies without gradient. initialize_ with scheme="keep" scales the weights as they are.'
            ) from failure
        explain_module(failure, model, inputs)
        call = "forward(model, sample)" if forward is not None else "model(sample)"
        raise ProblemError(
            f"the forward fails on the sample ({type(failure).__name__}: {failure}). sample= is what the "
            f"model is called with, as {call}: the inputs without targets. For another call, pass "
            "forward=, as lambda model, x: model(*x)."
        ) from failure


class _Called(nn.Module):
    """Lets `functional_call` exchange the weights while the user's own `forward(model, inputs)` runs."""

    def __init__(self, model: nn.Module, call: Forward | None) -> None:
        super().__init__()
        self.training = model.training
        self.model = model
        self.call = call

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs) if self.call is None else self.call(self.model, inputs)


@contextlib.contextmanager
def _plain_transformers() -> Iterator[None]:
    """No fused layers in eval mode; the length of a sequence, unknown in tracing, is not asked for."""
    fast = torch.backends.mha.get_fastpath_enabled()
    length = transformer._get_seq_len
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._get_seq_len = lambda *_: None
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        transformer._get_seq_len = length


def trace_forward(model: nn.Module, sample: Any, forward: Forward | None) -> trace.Trace:
    """Run the forward once on copies of the weights, the buffers and the sample, and record every call.

    Without a sample it runs on symbols: arguments that have a default take it, and a forward that
    asks for values or takes a shape apart is refused.
    """
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    recorder = Recorder(_first_real(model))
    # A closure holds the model's own parameters, which no copy replaces.
    for name, parameter in [*parameters.items(), *model.named_parameters()]:
        recorder.know(parameter, trace.Derived(frozenset({name}), parameter))
    with preserved(model):
        attributes = [value for part in model.modules() for value in vars(part).values()]
        for constant in [
            *buffers.values(),
            *(value for value in attributes if isinstance(value, Tensor)),
        ]:
            recorder.know(constant, None)
        for (
            module
        ) in model.modules():  # attributes of the modules, which `preserved` takes away again
            if _is_norm(module):
                module.__dict__["forward"] = recorder.as_norm(module.forward)
            elif sample is None and isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
                module.__dict__["forward"] = functools.partial(_composite, module, recorder)
        inputs = recorder if sample is None else prepare_sample(model, sample)
        for tensor in tensors_in(inputs):
            recorder.know(tensor, recorder.trace.add("input", "input", shape=tuple(tensor.shape)))
        forward = _call_on_symbols if sample is None else forward
        output = run(model, inputs, forward, {**parameters, **buffers}, recorder)
    returned = [
        *tensors_in(output),
        *(leaf for leaf in trace.leaves_of(output) if isinstance(leaf, Symbol)),
    ]
    found = [recorder.symbol_of(one) for one in returned]
    recorder.trace.outputs = {one.index for one in found if isinstance(one, trace.Signal)}
    return recorder.trace


def _call_on_symbols(model: nn.Module, recorder: Recorder) -> Any:
    wanted = list(inspect.signature(type(model).forward).parameters.values())[1:]
    wanted = [
        one for one in wanted if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    return model(*[Symbol(recorder, recorder.trace.add("input", "input")) for _ in wanted])


def _composite(module: Any, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    if isinstance(module, nn.MultiheadAttention):
        names = (
            "in_proj_weight",
            "q_proj_weight",
            "k_proj_weight",
            "v_proj_weight",
            "bias_k",
            "bias_v",
        )
        given = {name: getattr(module, name) for name in names}
        given |= arguments(args[:3], kwargs, "query key value") | {
            "out_proj_weight": module.out_proj.weight
        }
        given |= {"use_separate_proj_weight": module.in_proj_weight is None}
        return recorder.record(None, **given, name="multi_head_attention_forward")
    flat = [getattr(module, name) for name in module._flat_weights_names]
    settings = (
        module.bias,
        module.num_layers,
        module.dropout,
        module.training,
        module.bidirectional,
    )
    found = recorder.record(None, args[0], None, flat, *settings, name=module.mode.lower())
    return (found[0], found[1:]) if module.mode == "LSTM" else found
