"""Which weights are measured; checks of the arguments and of what the model returns."""

from __future__ import annotations

import fnmatch
import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from hessinit.errors import (
    ProblemError,
    WeightsError,
    check_callable,
    check_number,
    choose,
    did_you_mean,
    list_of,
)
from hessinit.problem.batches import tensors_in

LARGE_INPUT = (
    1e4  # pixels reach 255; above this the inputs, not the weights, are why numbers overflow
)
# Of the products in float32: as it is, with 10 bits of the mantissa on a GPU, and in mixed
# precision.
PRECISIONS = ["auto", "full", "tf32", "bf16"]
EVERYTHING = "**"  # all trained parameters: the weights, the biases and the norm gains


@dataclass(frozen=True)
class Layer:
    """One measured parameter: `fc1`, stored in the model as `fc1.weight`; tied weights have aliases."""

    name: str
    parameter: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def layer_name(parameter: str) -> str:
    """The parameter's name without a trailing `.weight`, and without what torch.compile puts in between.

    >>> layer_name("encoder.0.linear1.weight"), layer_name("lstm.weight_ih_l0"), layer_name("weight")
    ('encoder.0.linear1', 'lstm.weight_ih_l0', 'weight')
    """
    return parameter.replace("_orig_mod.", "").removesuffix(".weight")


def find_layers(
    model: nn.Module, selection: str | Iterable[str] | None = None
) -> tuple[Layer, ...]:
    """The trainable parameters of two or more dimensions, or those that `selection` names (names or globs).

    A pattern that fits no such weight is tried on the vectors (biases, norm gains), so these are
    measured only when asked for; `"**"` asks for all that is trained. A frozen weight is measured
    only when a pattern names it.
    """
    patterns = list_patterns(selection)
    everything = _all_layers(model)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if patterns is None:
        chosen = [
            layer for layer in everything if len(layer.shape) >= 2 and layer.parameter in trainable
        ]
        frozen = [
            one.name for one in everything if len(one.shape) >= 2 and one.parameter not in trainable
        ]
        if not chosen and frozen:
            why = f"the model has no trainable weight: all {len(frozen)} are frozen (requires_grad=False)"
            raise ProblemError(
                f"{why}. Unfreeze some, or name the ones to measure: layers={frozen[:3]!r}."
            )
        if not chosen and everything:
            named = f"layers={[layer.name for layer in everything[:3]]!r}"
            why = "the model has no parameter of two or more dimensions"
            raise ProblemError(f"{why}; its vectors are measured when named: {named}.")
        if not chosen:
            raise ProblemError("the model has no parameters, so there is no curvature to measure.")
        return tuple(chosen)
    selected: set[str] = set()
    for pattern in patterns:
        matches = _match(pattern, everything)
        if pattern == EVERYTHING:
            matches = [layer for layer in everything if layer.parameter in trainable]
        if not matches:
            weights = [layer for layer in everything if len(layer.shape) >= 2]
            names = [layer.name for layer in weights or everything]
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise ProblemError(
                f"layers={pattern!r} fits no parameter of the model; its layers are {shown}."
                + did_you_mean(pattern, names)
            )
        selected.update(layer.parameter for layer in matches)
    return tuple(layer for layer in everything if layer.parameter in selected)


def list_patterns(layers: str | Iterable[str] | None) -> list[str] | None:
    """The names and globs that `layers` holds, which may be an iterator; None for every weight."""
    patterns = [layers] if isinstance(layers, str) else list_of(layers)
    if layers is None:
        return None
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ProblemError(
            f'layers={layers!r} must be names or globs, such as layers=["fc1", "encoder.*"]; leave it out to '
            "measure every weight."
        )
    return patterns


def _all_layers(model: nn.Module) -> list[Layer]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)

    def layer(first: str, parameter: Tensor) -> Layer:
        aliases = tuple(layer_name(name) for name in names[id(parameter)] if name != first)
        return Layer(layer_name(first), first, aliases, tuple(parameter.shape))

    return [
        layer(first, parameter)
        for first, parameter in model.named_parameters()
        if parameter.numel()
    ]


def _match(pattern: str, layers: list[Layer]) -> list[Layer]:
    def fits(layer: Layer) -> bool:
        candidates = (layer.name, layer.parameter, *layer.aliases)
        return pattern in candidates or any(
            fnmatch.fnmatchcase(name, pattern) for name in candidates
        )

    matrices = [layer for layer in layers if len(layer.shape) >= 2 and fits(layer)]
    return matrices or [layer for layer in layers if fits(layer)]


def check_present(model: nn.Module) -> None:
    """Every weight has a shape and a value, whole, and on one device."""
    # By name: importing these classes would take seconds. DeepSpeed marks its parameters by
    # `ds_id`.
    pieces = [*model.named_modules(), *model.named_parameters()]
    kinds = ("FullyShardedDataParallel", "DTensor", "ShardedTensor")
    if sharded := [
        name for name, one in pieces if type(one).__name__ in kinds or hasattr(one, "ds_id")
    ]:
        raise ProblemError(
            f"{sharded[0] or 'the model'} is sharded: a rank holds only a part of the weights. Measure or "
            "initialize before the model is sharded, or copy the full weights into a plain model "
            "(get_model_state_dict of torch.distributed.checkpoint.state_dict, full_state_dict=True)."
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            why = (
                f"{name or 'the model'} is a TorchScript module, whose weights cannot be exchanged"
            )
            raise ProblemError(f"{why}; pass the module it was made from.")
    devices: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ProblemError(
                f"{name} is lazy and has no shape yet; run the model on a batch once first."
            )
        if parameter.device.type == "meta":
            way = "model.to_empty(device=...), then initialize or load it"
            raise ProblemError(
                f"{name} is on the meta device and has no values; give it some: {way}."
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        why = f"the parameters lie on different devices ({places})"
        raise ProblemError(f"{why}; move the model to one: model.to(device).")


def check_apart(model: nn.Module) -> None:
    """No two parameters hold the same numbers: an optimizer would move both with each of their gradients."""
    spans = []
    for name, one in model.named_parameters():
        if one.layout is torch.strided and one.numel():
            length = 1 + sum(
                (n - 1) * step for n, step in zip(one.shape, one.stride(), strict=True)
            )
            start = one.storage_offset() * one.element_size()
            memory = one.untyped_storage().data_ptr()
            spans.append((memory, start, start + length * one.element_size(), name))
    for (memory, _, end, name), (other_memory, start, _, other) in itertools.pairwise(
        sorted(spans)
    ):
        if memory == other_memory and start < end:
            raise ProblemError(
                f"{name} and {other} are two parameters on the same memory: each gradient step moves both, "
                f"so neither has a curvature of its own. Make them one parameter ({other} = {name})."
            )


def check_values(model: nn.Module, layers: tuple[Layer, ...]) -> None:
    for layer in layers:
        own = model.get_parameter(layer.parameter)
        if not own.is_floating_point() or own.layout is not torch.strided:
            raise ProblemError(
                f"{layer.name} has dtype {own.dtype} and layout {own.layout}; curvature needs dense, real, "
                "floating-point weights. Hold it as one (a complex weight as torch.view_as_real of it, a "
                "sparse one as a dense one times a mask), or leave it out with layers=."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not all_finite(parameter.detach()):
            why = f"{name} holds NaN or inf (it is the first parameter that does)"
            raise WeightsError(f"{why}; initialize it again before measuring.")


def all_finite(tensor: Tensor) -> bool:
    """No NaN and no inf.

    A sum is ten times faster than a look at each value, and overflows only rarely.
    """
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def check_model(model: Any, forward: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = " Pass an instance, not the class." if isinstance(model, type) else ""
        raise ProblemError(
            f"model is a {type(model).__name__}; it must be a torch.nn.Module.{hint}"
        )
    if forward is not None:
        # A module's own call takes anything.
        check_callable("forward", getattr(forward, "forward", forward), "forward(model, inputs)")


def check_arguments(
    model: Any,
    loss: Any,
    forward: Any = None,
    dtype: Any = None,
    dropout: str = "freeze",
    reduction: str = "auto",
    check: Any = True,
    precision: str = "auto",
) -> None:
    check_model(model, forward)
    check_callable("loss", loss, "loss(output, target)")
    if dtype not in (None, torch.float32, torch.float64):
        choices = "choose torch.float32, torch.float64, or None for the better of float32 and the model's own"
        raise ProblemError(f"dtype={dtype!r} is not supported; {choices}.")
    choose("dropout", dropout, ["refuse", "freeze"])
    choose("reduction", reduction, ["auto", "mean", "sum"])
    choose("precision", precision, PRECISIONS)
    check_switches(check=check)


def check_order(model: nn.Module, loss: Any) -> None:
    """Refuse a model and a loss that were exchanged."""
    weights = sum(one.numel() for one in loss.parameters()) if isinstance(loss, nn.Module) else 0
    if weights and not any(True for _ in model.parameters()):
        model_is = f"model is a {type(model).__name__} without parameters"
        loss_is = f"loss a {type(loss).__name__} with {weights:,} weights"
        raise ProblemError(
            f"{model_is}, and {loss_is}; the order is model, loss, batch. Exchange them."
        )


def check_whole(name: str, value: Any, at_least: int) -> int:
    """The value as an int; refuses anything but a whole number from `at_least` up."""
    try:
        number = at_least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = at_least - 1
    if not at_least <= number < 2**63:
        raise ProblemError(f"{name}={value!r} must be a whole number, {at_least} or more.")
    return number


def check_switches(**switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ProblemError(f"{name}={value!r} must be True or False.")


def check_tolerance(tolerance: Any) -> float:
    rule = "a relative error between 0 and 1, such as 1e-3"
    return check_number("tolerance", tolerance, lambda number: 0 < number < 1, rule)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel or torch.compile: these have one derivative."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod") and isinstance(model._orig_mod, nn.Module):
            model = model._orig_mod
        else:
            return model


def check_dropout(model: nn.Module, dropout: str) -> None:
    """Refuse active dropout: every product would see another mask."""
    if dropout == "freeze":
        return
    dropping = [
        (name or "the model", type(one)) for name, one in model.named_modules() if _drops(one)
    ]
    if active := [f"{name} ({kind.__name__})" for name, kind in dropping]:
        raise ProblemError(
            f"dropout is active (train mode) in {', '.join(active)}: every product would see another mask, "
            'so there is no single Hessian. Call model.eval(), or pass dropout="freeze" to keep one mask.'
        )


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def check_finite_inputs(inputs: Any, place: str) -> None:
    """Refuse inputs with NaN or inf before the forward; targets may hold NaN where a loss masks it."""
    for tensor in tensors_in(inputs):
        if tensor.is_floating_point() and not all_finite(tensor) and not _is_mask(tensor):
            bad = ~torch.isfinite(tensor)
            first = tuple(bad.nonzero()[0].tolist())
            way = "Leave these examples out, or replace the values (torch.nan_to_num)"
            if bool(tensor.isinf().any()):
                way = f"Scale them if they are beyond {tensor.dtype}, or measure at dtype=torch.float64"
            raise ProblemError(
                f"{place}the inputs hold {int(bad.sum())} NaN or inf among {tensor.numel()} values (the "
                f"first at {first}); all must be finite. {way}."
            )


def name_large_inputs(inputs: Any) -> str:
    """A sentence on inputs far above 1 in size; "" without any.

    Masks are large, too, but negative.
    """
    floats = [one for one in tensors_in(inputs) if one.is_floating_point() and one.numel()]
    largest = max((float(one.max()) for one in floats), default=0.0)
    if largest < LARGE_INPUT:
        return ""
    way = "Standardize them: (x - x.mean()) / x.std()"
    return f"The inputs are as large as {largest:.2g}; training needs about 1. {way}."


def _is_mask(tensor: Tensor) -> bool:
    """Zeros and -inf only, as added to attention scores."""
    return bool(((tensor == 0) | (tensor == -torch.inf)).all()) and bool((tensor == 0).any())


def check_output(output: Any, forward: Any) -> None:
    if not isinstance(output, Tensor):
        who = "forward=" if forward is not None else "the model"
        found = f"a {type(output).__name__}"
        way = "model(x).logits"
        if isinstance(output, Mapping):
            sizes = {key: one.ndim for key, one in output.items() if isinstance(one, Tensor)}
            key = (
                "logits"
                if "logits" in sizes
                else max(sizes, key=lambda one: sizes[one] > 0, default="key")
            )
            found = f"{found} with keys {list(output)}"
            way = f"model(x)[{key!r}]"
        elif isinstance(output, (tuple, list)):
            found = f"{found} of {len(output)}"
            way = "model(x)[0]"
            if len(output) > 1 and all(isinstance(one, Tensor) and one.ndim == 2 for one in output):
                way = f"torch.cat(model(x), dim=1), with a loss that adds those of the heads (for one: {way})"
        told = f"{who} returned {found}"
        raise ProblemError(
            f"{told}; curvature needs one tensor. Pass forward=lambda model, x: {way}."
        )
    if output.is_complex():
        raise ProblemError(
            f"the model's output has dtype {output.dtype}; curvature needs real numbers. Return "
            "torch.view_as_real of it, and take torch.view_as_complex(output) in the loss."
        )
    if output.dtype not in (torch.float32, torch.float64):
        raise ProblemError(
            f"the model's output has dtype {output.dtype}; it must be real and of float32 or better, as the "
            "weights are while measuring: rounding drowns second derivatives. Leave casts (autocast, or "
            ".to()) out."
        )


def check_loss_value(value: Any) -> None:
    if not (isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()):
        shown = f"{value!r:.60}"
        way = "Compute it from the output by functions of torch"
        if isinstance(value, Tensor):
            shown = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            if value.numel() != 1:
                way = "Average it with .mean(), or sum it"
            elif not value.is_complex():
                way = "A count, as of errors, has no derivative: use a loss such as cross-entropy"
        raise ProblemError(
            f"the loss returned {shown}; it must be one real number in a tensor. {way}."
        )
