"""One run of a model's forward with other weights, under a mode that records or changes what torch does."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules import transformer

from hessinit.errors import ProblemError
from hessinit.init.layer_functions import arguments
from hessinit.init.recorder import Recorder, Symbol
from hessinit.init.trace import Derived, Signal, Trace, leaves_of
from hessinit.problem.batches import cast, map_tensors, tensors_in
from hessinit.problem.double_backward import twice_differentiable
from hessinit.problem.preserve import UserState, untouched_random_state
from hessinit.problem.problem import Forward

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
        if forward is _call_on_symbols:
            reason = str(failure).strip().split(". ")[0].splitlines() or [type(failure).__name__]
            raise ProblemError(
                f"the model cannot be traced without data ({reason[0].rstrip('.')}); pass sample=, an input "
                "as the model gets it."
            ) from failure
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


# --- Tracing ----------------------------------------------------------------------------------------------


def trace_forward(model: nn.Module, sample: Any, forward: Forward | None) -> Trace:
    """Run the forward once on copies of the weights, the buffers and the sample, and record every call.

    Without a sample it runs on symbols: arguments that have a default take it, and a forward that asks for
    values or takes a shape apart is refused.
    """
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    recorder = Recorder(_first_real(model))
    # A closure holds the model's own parameters, which no copy replaces.
    for name, parameter in [*parameters.items(), *model.named_parameters()]:
        recorder.know(parameter, Derived(frozenset({name}), parameter))
    with preserved(model):
        attributes = [value for part in model.modules() for value in vars(part).values()]
        for constant in [*buffers.values(), *(value for value in attributes if isinstance(value, Tensor))]:
            recorder.know(constant, None)
        for module in model.modules():  # attributes of the modules, which `preserved` takes away again
            if _is_norm(module):
                module.__dict__["forward"] = recorder.as_norm(module.forward)
            elif sample is None and isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
                module.__dict__["forward"] = functools.partial(_composite, module, recorder)
        inputs = recorder if sample is None else prepare_sample(model, sample)
        for tensor in tensors_in(inputs):
            recorder.know(tensor, recorder.trace.add("input", "input", shape=tuple(tensor.shape)))
        forward = _call_on_symbols if sample is None else forward
        output = run(model, inputs, forward, {**parameters, **buffers}, recorder)
    returned = [*tensors_in(output), *(leaf for leaf in leaves_of(output) if isinstance(leaf, Symbol))]
    found = [recorder.symbol_of(one) for one in returned]
    recorder.trace.outputs = {one.index for one in found if isinstance(one, Signal)}
    return recorder.trace


def _call_on_symbols(model: nn.Module, recorder: Recorder) -> Any:
    wanted = list(inspect.signature(type(model).forward).parameters.values())[1:]
    wanted = [one for one in wanted if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return model(*[Symbol(recorder, recorder.trace.add("input", "input")) for _ in wanted])


def _composite(module: Any, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that asks for shapes, on symbols."""
    if isinstance(module, nn.MultiheadAttention):
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")
        given = {name: getattr(module, name) for name in names}
        given |= arguments(args[:3], kwargs, "query key value") | {"out_proj_weight": module.out_proj.weight}
        given |= {"use_separate_proj_weight": module.in_proj_weight is None}
        return recorder.record(None, **given, name="multi_head_attention_forward")
    flat = [getattr(module, name) for name in module._flat_weights_names]
    settings = (module.bias, module.num_layers, module.dropout, module.training, module.bidirectional)
    found = recorder.record(None, args[0], None, flat, *settings, name=module.mode.lower())
    return (found[0], found[1:]) if module.mode == "LSTM" else found
