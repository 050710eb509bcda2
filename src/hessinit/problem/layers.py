"""Which parameters are measured, and what they are called."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hessinit.errors import ProblemError, WeightsError, did_you_mean

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


def find_layers(model: nn.Module, selection: str | Iterable[str] | None = None) -> tuple[Layer, ...]:
    """The trainable parameters of two or more dimensions, or those that `selection` names (names or globs).

    A pattern that fits no such weight is tried on the vectors (biases, norm gains), so these are measured
    only when asked for; `"**"` asks for all that is trained. A frozen weight is measured only when a pattern
    names it.
    """
    patterns = _patterns(selection)
    everything = _all_layers(model)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if patterns is None:
        chosen = [layer for layer in everything if len(layer.shape) >= 2 and layer.parameter in trainable]
        if not chosen:
            raise ProblemError(_nothing_to_measure(model, everything, trainable))
        return tuple(chosen)
    if not patterns:
        raise ProblemError(
            "layers=[] names no layer; leave it out to measure every weight, or name at least one."
        )
    selected: set[str] = set()
    for pattern in patterns:
        matches = _match(pattern, everything)
        if pattern == EVERYTHING:
            matches = [layer for layer in everything if layer.parameter in trainable]
        if not matches:
            names = [layer.name for layer in everything if len(layer.shape) >= 2]
            names = names or [layer.name for layer in everything]
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise ProblemError(
                f"layers={pattern!r} fits no parameter of the model; its layers are {shown or 'none at all'}."
                + did_you_mean(pattern, names)
            )
        selected.update(layer.parameter for layer in matches)
    return tuple(layer for layer in everything if layer.parameter in selected)


def _patterns(selection: Any) -> list[str] | None:
    if selection is None:
        return None
    several = isinstance(selection, Iterable) and not isinstance(selection, str)
    patterns = list(selection) if several else [selection]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ProblemError(
                f"layers={selection!r} holds a {type(pattern).__name__}; pass names or globs, such as "
                'layers=["fc1", "encoder.*"].'
            )
    return patterns


def _all_layers(model: nn.Module) -> list[Layer]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)

    def layer(first: str, parameter: Tensor) -> Layer:
        aliases = tuple(layer_name(name) for name in names[id(parameter)] if name != first)
        return Layer(layer_name(first), first, aliases, tuple(parameter.shape))

    return [layer(first, parameter) for first, parameter in model.named_parameters() if parameter.numel()]


def _match(pattern: str, layers: list[Layer]) -> list[Layer]:
    def fits(layer: Layer) -> bool:
        candidates = (layer.name, layer.parameter, *layer.aliases)
        return pattern in candidates or any(fnmatch.fnmatchcase(name, pattern) for name in candidates)

    matrices = [layer for layer in layers if len(layer.shape) >= 2 and fits(layer)]
    return matrices or [layer for layer in layers if fits(layer)]


def _nothing_to_measure(model: nn.Module, everything: list[Layer], trainable: set[str]) -> str:
    own = [model.get_parameter(layer.parameter) for layer in everything]
    if own and not any(parameter.is_floating_point() or parameter.is_complex() for parameter in own):
        return (
            f"{everything[0].name} has dtype {own[0].dtype}, and no weight of the model is real; curvature "
            "needs floating-point weights. Measure the model before it is quantized."
        )
    frozen = [
        layer.name for layer in everything if len(layer.shape) >= 2 and layer.parameter not in trainable
    ]
    if frozen:
        return (
            f"the model has no trainable weight: all {len(frozen)} are frozen (requires_grad=False). "
            f"Unfreeze some, or name the ones to measure: layers={frozen[:3]!r}."
        )
    if everything:
        return (
            "the model has no parameter of two or more dimensions; its vectors are measured when named: "
            f"layers={[layer.name for layer in everything[:3]]!r}."
        )
    return "the model has no parameters, so there is no curvature to measure."


def check_present(model: nn.Module) -> None:
    """Every weight has a shape and a value, whole, and on one device."""
    for path, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ProblemError(_sharded(path or "the model", "FSDP"))
    devices: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ProblemError(f"{name} is lazy and has no shape yet; run the model on a batch once first.")
        kind = type(parameter.data).__name__
        if kind in ("DTensor", "ShardedTensor"):
            raise ProblemError(_sharded(name, kind))
        if parameter.device.type == "meta":
            raise ProblemError(
                f"{name} is on the meta device and has no values; give it some: "
                "model.to_empty(device=...), then initialize or load it."
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ProblemError(
            f"the parameters lie on different devices ({places}); move the model to one: model.to(device)."
        )


def check_apart(model: nn.Module) -> None:
    """No two parameters hold the same numbers: an optimizer would move both with each of their gradients."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.layout is torch.strided and parameter.numel():
            owners = by_storage.setdefault(parameter.untyped_storage().data_ptr(), [])
            owners.append((name, parameter.detach()))
    for shared in by_storage.values():
        for (name, one), (other, another) in itertools.combinations(shared, 2):
            if one.dtype == another.dtype and _overlap(one, another):
                raise ProblemError(
                    f"{name} and {other} are two parameters on the same memory: each gradient step moves "
                    f"both, so neither has a curvature of its own. Make them one parameter ({other} = "
                    f"{name})."
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = sorted((one, other), key=lambda view: view.storage_offset())
    length = sum((n - 1) * step for n, step in zip(first.shape, first.stride(), strict=True))
    if first.storage_offset() + length < second.storage_offset():
        return False
    size = one.untyped_storage().nbytes() // one.element_size()
    touched = torch.zeros(size, dtype=torch.uint8)
    for view in (one, other):
        touched.as_strided(view.shape, view.stride(), view.storage_offset()).add_(1)
    return bool((touched > 1).any())


def _sharded(name: str, kind: str) -> str:
    return (
        f"{name} is sharded ({kind}): a rank may hold only a part of it. Measure before the model is "
        "sharded, or copy the full weights into a plain model (get_model_state_dict of "
        "torch.distributed.checkpoint.state_dict, with StateDictOptions(full_state_dict=True))."
    )


def check_values(model: nn.Module, layers: tuple[Layer, ...]) -> None:
    for layer in layers:
        parameter = model.get_parameter(layer.parameter)
        if not parameter.is_floating_point():
            # model.float() is no way out: it converts floating-point weights alone.
            raise ProblemError(
                f"{layer.name} has dtype {parameter.dtype}; curvature needs real floating-point weights. "
                "Hold it as one (a complex weight as torch.view_as_real of it), or leave this weight out "
                "with layers=."
            )
        if parameter.layout is not torch.strided:
            raise ProblemError(
                f"{layer.name} is a sparse tensor ({parameter.layout}): whether what it leaves out may move "
                "is up to each operation. Hold it as a dense weight, times a mask in the forward if need be, "
                "or leave this weight out with layers=."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not all_finite(parameter.detach()):
            raise WeightsError(
                f"{name} holds NaN or inf (it is the first parameter that does); "
                "initialize it again before measuring."
            )


def all_finite(tensor: Tensor) -> bool:
    """No NaN and no inf. A sum is ten times faster than a look at each value, and overflows only rarely."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())
