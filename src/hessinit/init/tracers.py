"""Two ways to trace a model: run it once on a sample, or trace it symbolically (torch.fx) without data."""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.modules import transformer
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from hessinit.errors import ProblemError
from hessinit.init import trace
from hessinit.init.layer_functions import arguments
from hessinit.init.recorder import Recorder
from hessinit.problem.batches import cast, map_tensors, tensors_in
from hessinit.problem.double_backward import twice_differentiable
from hessinit.problem.preserve import UserState, untouched_random_state
from hessinit.problem.problem import Forward

_IN_PLACE = re.compile(r"^__i|[^_]_$")
_IN_PLACE_OPERATORS = ("iadd", "imul", "isub", "itruediv")
_NORM = re.compile(r"Norm(\d?d)?$")


def _is_norm(module: nn.Module) -> bool:
    """Whether the class is called a norm, as `LlamaRMSNorm`; norms of weights do not count."""
    kind = type(module)
    vectors = all(one.ndim < 2 or one.numel() == max(one.shape) for one in module.parameters())
    return bool(_NORM.search(kind.__name__)) and not kind.__module__.startswith("torch.nn.utils") and vectors


# --- Running the model with other weights -----------------------------------------------------------------


def prepare_sample(model: nn.Module, sample: Any) -> Any:
    """A copy of the sample in the precision and on the device of the model."""
    first = _first_real(model)
    return map_tensors(torch.clone, cast(sample, first.dtype, first.device))


def _first_real(model: nn.Module) -> nn.Parameter:
    everything = list(model.parameters())
    return next((parameter for parameter in everything if parameter.is_floating_point()), everything[0])


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Inside, the model may draw, write attributes, count steps and differentiate; all is restored."""
    with (
        untouched_random_state(_first_real(model).device),
        UserState(model).with_stand_ins(),
        twice_differentiable(model),  # with gradients, which the forward of a physics-informed network takes
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
        if "does not require grad" in str(failure):
            raise ProblemError(
                "the forward differentiates by its own weights, as that of MAML does, and a scheme runs it "
                'on copies without gradient. initialize_ with scheme="keep" scales the weights as they are.'
            ) from failure
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
        self.model, self.call = model, call

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs) if self.call is None else self.call(self.model, inputs)


@contextlib.contextmanager
def _plain_transformers() -> Iterator[None]:
    """No fused layers in eval mode; the length of a sequence, unknown in tracing, is not asked for."""
    fast, length = torch.backends.mha.get_fastpath_enabled(), transformer._get_seq_len
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._get_seq_len = lambda *_: None
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        transformer._get_seq_len = length


# --- On a sample ------------------------------------------------------------------------------------------


def trace_run(model: nn.Module, sample: Any, forward: Forward | None) -> trace.Trace:
    """Run the forward once on copies of the weights, the buffers and the sample, and record every call."""
    inputs = prepare_sample(model, sample)
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    # A closure holds the model's own parameters, which no copy replaces.
    known = [*parameters.items(), *model.named_parameters()]
    attributes = [value for part in model.modules() for value in vars(part).values()]
    constants = [*buffers.values(), *(value for value in attributes if isinstance(value, Tensor))]
    recorder = _FunctionRecorder(known, constants, inputs)
    with preserved(model):
        for module in model.modules():
            if _is_norm(module):  # an attribute of the module, which `preserved` takes away again
                module.__dict__["forward"] = recorder.as_norm(module.forward)
        output = run(model, inputs, forward, {**parameters, **buffers}, recorder)
    recorder.finish(output)
    return recorder.trace


class _FunctionRecorder(TorchFunctionMode):
    """Sees every call of a torch function, and knows for each tensor what it stands for."""

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], constants: list[Tensor], inputs: Any
    ) -> None:
        super().__init__()
        self._recorder, self._paused = Recorder(), False
        self.trace = self._recorder.trace
        # The tensors are held as well, so that no two of them ever have the same id.
        self._known: dict[int, tuple[Any, Tensor]] = {}
        for name, parameter in parameters:
            self._know(parameter, trace.Derived(frozenset({name}), parameter))
        for constant in constants:
            self._know(constant, None)
        for tensor in tensors_in(inputs):
            self._know(tensor, self.trace.add("input", "input", shape=tuple(tensor.shape)))

    def finish(self, output: Any) -> None:
        for tensor in tensors_in(output):
            stands_for = self._known.get(id(tensor), (None, tensor))[0]
            if isinstance(stands_for, trace.Signal):
                self.trace.outputs.add(stands_for.index)

    def as_norm(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The same forward as one step of the trace."""

        def normalize(*args: Any, **kwargs: Any) -> Any:
            symbols = [] if self._paused else [self._symbol(tensor) for tensor in tensors_in([args, kwargs])]
            signals = [symbol.index for symbol in symbols if isinstance(symbol, trace.Signal)]
            if not signals:
                return forward(*args, **kwargs)
            self._paused = True
            try:
                result = forward(*args, **kwargs)
            finally:
                self._paused = False
            if isinstance(result, Tensor):
                shape = tuple(result.shape)
                self._know(result, self.trace.add("norm", "norm", tuple(signals[:1]), shape=shape))
            return result

        return normalize

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        name = trace.name_of(func)
        symbols = trace.map_leaves(self._symbol, args), trace.map_leaves(self._symbol, kwargs)
        version = args[0]._version if args and isinstance(args[0], Tensor) else None
        in_place = version is not None and _IN_PLACE.search(getattr(func, "__name__", ""))
        if in_place and symbols[0][0] is args[0]:
            symbols = (args[0].clone(), *symbols[0][1:]), symbols[1]  # a constant, as it was before
        result = func(*args, **kwargs)
        if name in ("setitem", "copy"):
            self._write(name, args, symbols[0])
            return result
        if isinstance(result, Tensor) and args and result is args[0] and result._version == version:
            result = result.view_as(result)  # returned as it came, not written to: a step of its own
        shape = tuple(result.shape) if isinstance(result, Tensor) else None
        self._assign(result, self._recorder.call(func, *symbols, name=name, shape=shape, value=result))
        return result

    def _write(self, name: str, args: Any, symbols: Any) -> None:
        """Into a part of a tensor, or over all of it."""
        kept = symbols[1:2] if name == "copy" else (symbols[0], symbols[-1])
        sources = tuple(dict.fromkeys(one.index for one in kept if isinstance(one, trace.Signal)))
        masked = name == "setitem" and isinstance(symbols[1], trace.Signal)  # another function on each side
        if sources:
            kind = "unknown" if masked and args[1].dtype is torch.bool else "cat"
            self._know(args[0], self.trace.add(name, kind, sources, shape=tuple(args[0].shape)))

    def _symbol(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._known:
            # From a custom autograd.Function, a scripted function, a closure: no call was seen.
            self._know(leaf, self.trace.add("an unseen function", "unknown", shape=tuple(leaf.shape)))
        stands_for = self._known[id(leaf)][0]
        return leaf if stands_for is None else stands_for

    def _know(self, tensor: Tensor, stands_for: Any) -> None:
        self._known[id(tensor)] = (stands_for, tensor)

    def _assign(self, result: Any, found: Any) -> None:
        if isinstance(result, Tensor):
            entry = found[0] if isinstance(found, tuple) else found
            self._know(
                result, entry if isinstance(entry, (trace.Signal, trace.Derived, trace.Noise)) else None
            )
        elif isinstance(result, (tuple, list)):
            for place, entry in enumerate(result):
                if isinstance(found, trace.Signal) and isinstance(entry, Tensor):
                    self._assign(entry, self._recorder.part(found, place, tuple(entry.shape)))
                else:
                    self._assign(entry, found[place] if isinstance(found, tuple) else found)


# --- Without a sample -------------------------------------------------------------------------------------


def trace_symbolically(model: nn.Module) -> trace.Trace:
    """Trace the model with torch.fx. Arguments that have a default take it."""
    signature = inspect.signature(model.forward).parameters.values()
    defaults = {one.name: one.default for one in signature if one.default is not inspect.Parameter.empty}
    with (
        untouched_random_state(next(model.parameters()).device),
        UserState(model).with_stand_ins(),
        _plain_transformers(),
        torch.no_grad(),
    ):
        try:
            graph = _Tracer().trace(model, concrete_args=defaults)
            return _Translation(model, graph).trace
        except Exception as failure:
            reason = str(failure).strip().split(". ")[0].splitlines() or [type(failure).__name__]
            raise ProblemError(
                f"the model cannot be traced without data ({reason[0].rstrip('.')}); pass sample=, an input "
                "as the model gets it."
            ) from failure


class _Tracer(fx.Tracer):
    """Enters every module but those whose forward asks for shapes, norms, and parametrizations."""

    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:
        leaves = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, ParametrizationList)
        return _is_norm(module) or isinstance(module, leaves)


class _Translation:
    """The nodes of a graph as calls to a recorder."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self._model, self._recorder = model, Recorder()
        self.trace = self._recorder.trace
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        named = model.named_parameters(remove_duplicate=False)
        self._names = {name: first[id(parameter)] for name, parameter in named}
        self._found: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            self._found[node] = self._translate(node)

    def _translate(self, node: fx.Node) -> Any:
        args: Any = fx.map_arg(list(node.args), self._found.__getitem__)
        args = tuple(args)
        kwargs: Any = fx.map_arg(dict(node.kwargs), self._found.__getitem__)
        if node.op == "placeholder":
            return self.trace.add("input", "input")
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        if node.op == "output":
            self.trace.outputs = {
                leaf.index for leaf in trace.leaves_of(args) if isinstance(leaf, trace.Signal)
            }
            return None
        if node.op == "call_module":
            return self._module(str(node.target), args, kwargs)
        function: Any = node.target
        if not callable(function):
            function = lambda value, *args, **kwargs: getattr(value, str(node.target))(*args, **kwargs)  # noqa: E731
        name = trace.name_of(node.target)
        if name == "getattr" and isinstance(args[1], str):
            function, args, name = operator.attrgetter(args[1]), args[:1], args[1]
        if name == "getitem" and isinstance(args[0], tuple):
            return args[0][args[1]]
        if (
            name == "getitem"
            and isinstance(args[0], trace.Signal)
            and self.trace[args[0].index].kind == "split"
        ):
            return self._recorder.part(args[0], args[1])
        if name == "assert" or name.startswith("assert_"):
            return None
        value = _evaluated(function, args, kwargs, name)
        found = self._recorder.call(function, args, kwargs, name=name, value=value)
        found = value if found is None else found
        if _writes(node) and isinstance(node.args[0], fx.Node):
            self._found[node.args[0]] = found
        return found

    def _attribute(self, target: str) -> Any:
        if target in self._names:
            return self._parameter(target)
        value = operator.attrgetter(target)(self._model)
        return value.detach().clone() if isinstance(value, Tensor) else value

    def _parameter(self, name: str) -> trace.Derived:
        return trace.Derived(frozenset({self._names[name]}), self._model.get_parameter(name).detach())

    def _module(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._model.get_submodule(path)

        def weight(name: str) -> Any:
            value = getattr(module, name)
            return self._parameter(f"{path}.{name}".lstrip(".")) if isinstance(value, nn.Parameter) else value

        if isinstance(module, ParametrizationList):
            copies = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
            stored = (self._names[f"{path}.{name}".lstrip(".")] for name, _ in module.named_parameters())
            return trace.Derived(frozenset(stored), functional_call(module, copies, ()), how="computed")
        if isinstance(module, nn.MultiheadAttention):
            names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")
            given = arguments(args[:3], kwargs, "query key value") | {name: weight(name) for name in names}
            given["out_proj_weight"] = self._parameter(f"{path}.out_proj.weight".lstrip("."))
            given["use_separate_proj_weight"] = module.in_proj_weight is None
            return self._recorder.call(_stub, (), given, name="multi_head_attention_forward")
        if isinstance(module, nn.RNNBase):
            kind = module.mode.lower()
            flat = [weight(name) for name in module._flat_weights_names]
            settings = (module.bias, module.num_layers, module.dropout, module.training, module.bidirectional)
            found = self._recorder.call(_stub, (args[0], None, flat, *settings), {}, name=kind)
            return (found[0], found[1:]) if kind == "lstm" else found
        if isinstance(module, nn.RNNCellBase):
            kind = {nn.LSTMCell: "lstm", nn.GRUCell: "gru"}.get(type(module), "")
            kind = kind or f"rnn_{getattr(module, 'nonlinearity', 'tanh')}"
            weights = (weight("weight_ih"), weight("weight_hh"))
            return self._recorder.call(_stub, (args[0], args[1:], *weights), {}, name=f"{kind}_cell")
        signals = [leaf for leaf in trace.leaves_of([args, kwargs]) if isinstance(leaf, trace.Signal)]
        return self.trace.add("norm", "norm", tuple(signal.index for signal in signals[:1]))


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS
    return in_place or node.kwargs.get("inplace") is True


def _stub() -> None:
    """The function of a recorded call that is never run."""


def _evaluated(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The result of a call on parameters and constants; None with a signal or a shape, or if it fails."""
    leaves = trace.leaves_of([args, kwargs])
    if any(isinstance(leaf, (trace.Signal, trace.Unknown)) for leaf in leaves) or name in trace.SHAPE_QUERIES:
        return None

    def value(leaf: Any) -> Any:
        leaf = leaf.value if isinstance(leaf, trace.Derived) else leaf
        return leaf.clone() if isinstance(leaf, Tensor) else leaf  # a buffer may be written to

    try:
        return function(*trace.map_leaves(value, args), **trace.map_leaves(value, kwargs))
    except Exception:
        return None
