"""The record of a forward that runs: every call of a torch function on the way, as it happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hessinit.problem.batches import tensors_in
from hessinit.problem.problem import Forward
from hessinit.schemes.leaves import map_leaves
from hessinit.schemes.operations import name_of
from hessinit.schemes.record import Derived, Noise, Record, Signal
from hessinit.schemes.recording import Recorder
from hessinit.schemes.running import left_alone, prepare_sample, run

_IN_PLACE = re.compile(r"^__i|[^_]_$")
_NORM = re.compile(r"Norm(\d?d)?$")


def is_norm(module: nn.Module) -> bool:
    """By the name of its class: `LlamaRMSNorm` is one, whatever it is made of; those of weights are none."""
    kind = type(module)
    return (
        bool(_NORM.search(kind.__name__))
        and not kind.__module__.startswith("torch.nn.utils")
        and all(
            parameter.ndim < 2 or parameter.numel() == max(parameter.shape)
            for parameter in module.parameters()
        )
    )


def record_run(model: nn.Module, sample: Any, forward: Forward | None) -> Record:
    """Run the forward once on copies of the weights, the buffers and the sample; nothing of them changes."""
    inputs = prepare_sample(model, sample)
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    # A closure holds the model's own parameters, which no copy replaces.
    known = [*parameters.items(), *model.named_parameters()]
    recorder = _Watching(known, [*buffers.values(), *_plain_tensors(model)], inputs)
    with left_alone(model):
        for module in model.modules():
            if is_norm(module):
                # An attribute of the module, which `left_alone` takes away again.
                module.__dict__["forward"] = recorder.as_norm(module.forward)
        output = run(model, inputs, forward, {**parameters, **buffers}, recorder)
    recorder.finish(output)
    return recorder.record


def _plain_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that modules hold as mere attributes: constants, like buffers."""
    return [
        value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)
    ]


class _Watching(TorchFunctionMode):
    """Sees each call, and knows for each tensor what it stands for."""

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], constants: list[Tensor], inputs: Any
    ) -> None:
        super().__init__()
        self._recorder, self._paused = Recorder(), False
        # The tensors are held as well, so that no two of them ever have the same id.
        self._known: dict[int, tuple[Any, Tensor]] = {}
        for name, parameter in parameters:
            self._know(parameter, Derived(frozenset({name}), parameter))
        for constant in constants:
            self._know(constant, None)
        for tensor in tensors_in(inputs):
            self._know(tensor, self.record.add("input", "input", shape=tuple(tensor.shape)))

    @property
    def record(self) -> Record:
        return self._recorder.record

    def finish(self, output: Any) -> None:
        for tensor in tensors_in(output):
            stands_for = self._known.get(id(tensor), (None, tensor))[0]
            if isinstance(stands_for, Signal):
                self.record.outputs.add(stands_for.index)

    def as_norm(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The same forward as one step of the record."""

        def normalize(*args: Any, **kwargs: Any) -> Any:
            symbols = [] if self._paused else [self._symbol(tensor) for tensor in tensors_in([args, kwargs])]
            signals = [symbol.index for symbol in symbols if isinstance(symbol, Signal)]
            if not signals:
                return forward(*args, **kwargs)
            self._paused = True
            try:
                result = forward(*args, **kwargs)
            finally:
                self._paused = False
            if isinstance(result, Tensor):
                self._know(
                    result, self.record.add("norm", "norm", tuple(signals[:1]), shape=tuple(result.shape))
                )
            return result

        return normalize

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        name = name_of(func)
        symbols = map_leaves(self._symbol, args), map_leaves(self._symbol, kwargs)
        version = args[0]._version if args and isinstance(args[0], Tensor) else None
        if (
            version is not None
            and symbols[0][0] is args[0]
            and _IN_PLACE.search(getattr(func, "__name__", ""))
        ):
            symbols = (args[0].clone(), *symbols[0][1:]), symbols[1]  # a constant, as it was before
        result = func(*args, **kwargs)
        if name in ("setitem", "copy"):
            self._write(name, args, symbols[0])
            return result
        if isinstance(result, Tensor) and args and result is args[0] and result._version == version:
            result = result.view_as(
                result
            )  # given back as it came, not written to: another step all the same
        shape = tuple(result.shape) if isinstance(result, Tensor) else None
        found = self._recorder.call(func, *symbols, name=name, shape=shape, value=result)
        self._assign(result, found)
        return result

    def _write(self, name: str, args: Any, symbols: Any) -> None:
        """Into a part of a tensor, or over all of it."""
        target, kind = args[0], "cat"
        if name == "setitem" and isinstance(symbols[1], Signal) and args[1].dtype is torch.bool:
            plain = isinstance(symbols[0], Signal) and not isinstance(symbols[2], (Signal, Derived, Noise))
            if args[1].shape == target.shape and plain:
                found = self._recorder.call(
                    torch.masked_fill, symbols, {}, name="masked_fill", shape=tuple(target.shape)
                )
                return self._know(target, found)
            kind = "unknown"  # as in a function by hand, of another form on each side
        sources = tuple(dict.fromkeys(s.index for s in (symbols[0], symbols[-1]) if isinstance(s, Signal)))
        if name == "copy":
            sources = tuple(s.index for s in symbols[1:2] if isinstance(s, Signal))
        if sources:
            self._know(target, self.record.add(name, kind, sources, shape=tuple(target.shape)))

    def _symbol(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._known:
            # Nobody saw it come: from a custom autograd.Function, a scripted function, a closure.
            self._know(leaf, self.record.add("a function out of sight", "unknown", shape=tuple(leaf.shape)))
        stands_for = self._known[id(leaf)][0]
        return leaf if stands_for is None else stands_for

    def _know(self, tensor: Tensor, stands_for: Any) -> None:
        self._known[id(tensor)] = (stands_for, tensor)

    def _assign(self, result: Any, found: Any) -> None:
        if isinstance(result, Tensor):
            entry = found[0] if isinstance(found, tuple) else found
            self._know(result, entry if isinstance(entry, (Signal, Derived, Noise)) else None)
        elif isinstance(result, (tuple, list)):
            for place, entry in enumerate(result):
                if isinstance(found, Signal) and isinstance(entry, Tensor):
                    self._assign(entry, self._recorder.part(found, place, tuple(entry.shape)))
                else:
                    self._assign(entry, found[place] if isinstance(found, tuple) else found)
