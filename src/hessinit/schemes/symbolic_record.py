"""The record of a forward that does not run: traced symbolically, without a sample."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.modules import transformer
from torch.nn.utils.parametrize import ParametrizationList

from hessinit.errors import ProblemError
from hessinit.problem.preserve import UserState, untouched_random_state
from hessinit.schemes.function_record import is_norm
from hessinit.schemes.leaves import leaves_of, map_leaves
from hessinit.schemes.operations import SHAPE_QUERIES, name_of
from hessinit.schemes.record import Derived, Record, Signal, Unknown
from hessinit.schemes.recording import Recorder
from hessinit.schemes.running import without_fast_path


def record_trace(model: nn.Module) -> Record:
    """Trace the model with torch.fx. Arguments that have a default take it."""
    signature = inspect.signature(model.forward).parameters.values()
    defaults = {
        argument.name: argument.default
        for argument in signature
        if argument.default is not inspect.Parameter.empty
    }
    with (
        untouched_random_state(next(model.parameters()).device),
        UserState(model).lent(),
        without_fast_path(),
        _lengths_unknown(),
        torch.no_grad(),
    ):
        try:
            graph = _Tracer().trace(model, concrete_args=defaults)
            return _Translation(model, graph).record
        except Exception as failure:
            reason = str(failure).strip().split(". ")[0].splitlines() or [type(failure).__name__]
            raise ProblemError(
                f"the model cannot be traced without data ({reason[0].rstrip('.')}); pass sample=, an input "
                "as the model gets it."
            ) from failure


@contextlib.contextmanager
def _lengths_unknown() -> Iterator[None]:
    """`nn.TransformerEncoder` asks for the length of a sequence, to find out whether a mask is causal."""
    before = transformer._get_seq_len
    transformer._get_seq_len = lambda *_: None
    try:
        yield
    finally:
        transformer._get_seq_len = before


class _Tracer(fx.Tracer):
    """Goes into every module but those whose forward asks for shapes, norms, and what makes a weight."""

    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:
        leaves = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, ParametrizationList)
        return is_norm(module) or isinstance(module, leaves)


class _Translation:
    """The nodes of a graph as calls to a recorder."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self._model, self._recorder = model, Recorder()
        self.record = self._recorder.record
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = {
            name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self._found: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            self._found[node] = self._translate(node)

    def _translate(self, node: fx.Node) -> Any:
        args: Any = fx.map_arg(list(node.args), self._found.__getitem__)
        args = tuple(args)
        kwargs: Any = fx.map_arg(dict(node.kwargs), self._found.__getitem__)
        if node.op == "placeholder":
            return self.record.add("input", "input")
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        if node.op == "output":
            leaves = leaves_of(args)
            self.record.outputs = {leaf.index for leaf in leaves if isinstance(leaf, Signal)}
            return None
        if node.op == "call_module":
            return self._module(str(node.target), args, kwargs)
        function: Any = node.target if callable(node.target) else _method(str(node.target))
        name = name_of(node.target)
        if name == "getattr" and isinstance(args[1], str):
            function, args, name = operator.attrgetter(args[1]), args[:1], args[1]
        if name == "getitem" and isinstance(args[0], tuple):
            return args[0][args[1]]
        if name == "getitem" and isinstance(args[0], Signal) and self.record[args[0].index].kind == "split":
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
        value: Any = self._model
        for part in target.split("."):
            value = getattr(value, part)
        if target in self._names:
            return self._parameter(target)
        return value.detach().clone() if isinstance(value, Tensor) else value

    def _parameter(self, name: str) -> Derived:
        return Derived(frozenset({self._names[name]}), self._model.get_parameter(name).detach())

    def _module(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._model.get_submodule(path)

        def weight(name: str) -> Any:
            value = getattr(module, name)
            return self._parameter(f"{path}.{name}".lstrip(".")) if isinstance(value, nn.Parameter) else value

        if isinstance(module, ParametrizationList):
            copies = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
            stored = (self._names[f"{path}.{name}".lstrip(".")] for name, _ in module.named_parameters())
            return Derived(frozenset(stored), functional_call(module, copies, ()), how="computed")
        if isinstance(module, nn.MultiheadAttention):
            names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")
            query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))[
                :3
            ]
            given = {"query": query, "key": key, "value": value, **{name: weight(name) for name in names}}
            given["out_proj_weight"] = self._parameter(f"{path}.out_proj.weight".lstrip("."))
            given["use_separate_proj_weight"] = module.in_proj_weight is None
            return self._recorder.call(_named("multi_head_attention_forward"), (), given)
        if isinstance(module, nn.RNNBase):
            kind = module.mode.lower()
            flat = [weight(name) for name in module._flat_weights_names]
            settings = (module.bias, module.num_layers, module.dropout, module.training, module.bidirectional)
            found = self._recorder.call(_named(kind), (args[0], None, flat, *settings), {})
            return (found[0], found[1:]) if kind == "lstm" else found
        if isinstance(module, nn.RNNCellBase):
            kind = {nn.LSTMCell: "lstm", nn.GRUCell: "gru"}.get(type(module), "")
            kind = kind or f"rnn_{getattr(module, 'nonlinearity', 'tanh')}"
            weights = (weight("weight_ih"), weight("weight_hh"))
            return self._recorder.call(_named(f"{kind}_cell"), (args[0], args[1:], *weights), {})
        signals = [leaf for leaf in leaves_of([args, kwargs]) if isinstance(leaf, Signal)]
        return self.record.add("norm", "norm", tuple(signal.index for signal in signals[:1]))


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in (
        "iadd",
        "imul",
        "isub",
        "itruediv",
    )
    return in_place or node.kwargs.get("inplace") is True


def _method(name: str) -> Callable[..., Any]:
    return lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs)


def _named(name: str) -> Callable[..., Any]:
    def function() -> None:
        """Never called: it lends its name."""

    function.__name__ = name
    return function


def _evaluated(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """What a call on parameters and constants gives; None where a signal or a shape comes in, or it fails."""
    leaves = list(leaves_of([args, kwargs]))
    if any(isinstance(leaf, (Signal, Unknown)) for leaf in leaves) or name in SHAPE_QUERIES:
        return None

    def value(leaf: Any) -> Any:
        leaf = leaf.value if isinstance(leaf, Derived) else leaf
        return leaf.clone() if isinstance(leaf, Tensor) else leaf  # a buffer may be written to

    try:
        return function(*map_leaves(value, args), **map_leaves(value, kwargs))
    except Exception:
        return None
