"""Checks of a problem: layers and arguments, what the model returns, how the forward repeats."""

from __future__ import annotations

import fnmatch
import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from hessinit.errors import (
    Argument,
    DerivativeError,
    ProblemError,
    WeightsError,
    argument,
    check_callable,
    check_number,
    did_you_mean,
    list_of,
)
from hessinit.problem.batches import Batch, tensors_in
from hessinit.problem.graph import first_leaf, nodes_behind
from hessinit.problem.shards import check_whole_weights, is_dtensor, local_part

if TYPE_CHECKING:
    from hessinit.problem.functional import FirstCall, FunctionalProblem


LARGE_INPUT = 1e4  # pixels reach 255; above this, overflow comes from the inputs
# Of the products in float32: as it is, with 10 bits of the mantissa on a GPU, in mixed precision.
PRECISIONS = ["auto", "full", "tf32", "bf16"]
EVERYTHING = "**"  # all trained parameters: the weights, the biases and the norm gains


@dataclass(frozen=True)
class Layer:
    """One measured parameter: `fc1`, in the model `fc1.weight`; tied weights have aliases."""

    name: str
    parameter: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_weight(self) -> bool:
        """Whether it has two or more dimensions, unlike a bias or a norm gain."""
        return len(self.shape) >= 2


def layer_name(parameter: str) -> str:
    """The parameter's name without a trailing `.weight`, and without what torch.compile adds.

    >>> layer_name("encoder.0.linear1.weight"), layer_name("lstm.weight_ih_l0"), layer_name("w")
    ('encoder.0.linear1', 'lstm.weight_ih_l0', 'w')
    """
    return parameter.replace("_orig_mod.", "").removesuffix(".weight")


def find_layers(
    model: nn.Module, selection: str | Iterable[str] | None = None
) -> tuple[Layer, ...]:
    """The trainable parameters of two or more dimensions, or those that `selection` names (names or
    globs).

    A pattern that fits no such weight is tried on the vectors (biases, norm gains), so these are
    measured only when asked for; `"**"` asks for all that is trained. A frozen weight is measured
    only when a pattern names it.
    """
    patterns = list_patterns(selection)
    layers = _all_layers(model)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if patterns is None:
        return _trainable_weights(layers, trainable)
    selected: set[str] = set()
    for pattern in patterns:
        matches = _match(pattern, layers)
        if pattern == EVERYTHING:
            matches = [layer for layer in layers if layer.parameter in trainable]
        if not matches:
            weights = [layer for layer in layers if layer.is_weight]
            names = [layer.name for layer in weights or layers]
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise ProblemError(
                argument("layers", pattern),
                f" fits no parameter of the model; its layers are {shown}.",
                did_you_mean(pattern, names),
            )
        selected.update(layer.parameter for layer in matches)
    return tuple(layer for layer in layers if layer.parameter in selected)


def _trainable_weights(layers: list[Layer], trainable: set[str]) -> tuple[Layer, ...]:
    weights = [layer for layer in layers if layer.is_weight]
    chosen = tuple(layer for layer in weights if layer.parameter in trainable)
    if chosen:
        return chosen
    if weights:
        names = [layer.name for layer in weights[:3]]
        raise ProblemError(
            f"the model has no trainable weight: all {len(weights)} are frozen "
            "(requires_grad=False). Unfreeze some, or name the ones to measure: ",
            argument("layers", names),
            ".",
        )
    if layers:
        names = [layer.name for layer in layers[:3]]
        raise ProblemError(
            "the model has no parameter of two or more dimensions; its vectors are measured when "
            "named: ",
            argument("layers", names),
            ".",
        )
    raise ProblemError("the model has no parameters, so there is no curvature to measure.")


def list_patterns(layers: str | Iterable[str] | None) -> list[str] | None:
    """The names and globs that `layers` holds, which may be an iterator; None for every weight."""
    patterns = [layers] if isinstance(layers, str) else list_of(layers)
    if layers is None:
        return None
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ProblemError(
            argument("layers", layers),
            " must be names or globs, such as ",
            argument("layers", ["fc1", "encoder.*"]),
            "; leave it out to measure every weight.",
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

    weights = [layer for layer in layers if layer.is_weight and fits(layer)]
    return weights or [layer for layer in layers if fits(layer)]


def check_present(model: nn.Module, *, sharded: bool = False) -> None:
    """Refuse weights without a shape or a value, in pieces unless `sharded`, on several devices."""
    if not sharded:
        check_whole_weights(model)
    _check_exchangeable(model)
    check_devices(model)


def check_devices(model: nn.Module) -> None:
    """Refuse weights without a shape or a value, or on several devices."""
    devices: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ProblemError(
                f"{name} is lazy and has no shape yet; run the model on a batch once first."
            )
        if parameter.device.type == "meta":
            raise ProblemError(
                f"{name} is on the meta device and has no values; give it some: "
                "model.to_empty(device=...), then initialize or load it."
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ProblemError(
            f"the parameters lie on different devices ({listed}); move the model to one: "
            "model.to(device)."
        )


def _check_exchangeable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise DerivativeError(
                f"{name or 'the model'} is a TorchScript module, whose weights cannot be "
                "exchanged; pass the module it was made from."
            )
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter and parameter.dtype in (torch.int8, torch.uint8):
            raise DerivativeError(
                f"{name} is quantized ({type(parameter).__name__}), with scales beside its "
                "numbers, and cannot be exchanged."
            )


def check_apart(model: nn.Module) -> None:
    """Refuse two parameters that hold the same numbers: both gradients would move both of them."""
    spans = []
    for name, parameter in model.named_parameters():
        if (
            type(parameter) is nn.Parameter
            and parameter.layout is torch.strided
            and parameter.numel()
        ):
            dimensions = zip(parameter.shape, parameter.stride(), strict=True)
            length = 1 + sum((count - 1) * stride for count, stride in dimensions)
            itemsize = parameter.element_size()
            start = parameter.storage_offset() * itemsize
            memory = parameter.untyped_storage().data_ptr()
            spans.append((memory, start, start + length * itemsize, name))
    for (memory, _, end, name), (next_memory, start, _, next_name) in itertools.pairwise(
        sorted(spans)
    ):
        if memory == next_memory and start < end:
            raise ProblemError(
                f"{name} and {next_name} are two parameters on the same memory: each gradient step "
                "moves both, so neither has a curvature of its own. Make them one parameter "
                f"({next_name} = {name})."
            )


def check_values(model: nn.Module, layers: tuple[Layer, ...]) -> None:
    """Refuse measured weights that are not dense, real floating-point numbers, and any that are not
    finite.
    """
    parameters = dict(model.named_parameters())
    for layer in layers:
        weight = parameters[layer.parameter]
        if is_stored_otherwise(weight):
            raise ProblemError(
                f"{layer.name} is held in another form ({type(weight).__name__}), as quantized "
                "weights are; curvature needs plain floating-point weights. Leave it out with "
                "layers= and measure what is trained beside it (an adapter), or measure the model "
                "before it is quantized."
            )
        if not weight.is_floating_point() or weight.layout is not torch.strided:
            raise ProblemError(
                f"{layer.name} has dtype {weight.dtype} and layout {weight.layout}; curvature "
                "needs dense, real, floating-point weights. Hold it as one (a complex weight as "
                "torch.view_as_real of it, a sparse one as a dense one times a mask), or leave it "
                "out with layers=."
            )
    for name, parameter in model.named_parameters():
        is_readable = type(parameter) is nn.Parameter or is_dtensor(parameter)
        if is_readable and parameter.is_floating_point() and not all_finite(local_part(parameter)):
            raise WeightsError(
                f"{name} holds NaN or inf (it is the first parameter that does); initialize it "
                "again before measuring."
            )


def is_stored_otherwise(weight: Tensor) -> bool:
    """Whether the numbers are not in the tensor's own memory, as in those of torchao."""
    by_itself: Any = type(weight).__torch_dispatch__
    return by_itself is not Tensor.__torch_dispatch__ and not is_dtensor(weight)


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


def check_kind(name: str, value: Any, kind: type, example: str) -> None:
    """Raise ProblemError unless an argument is one of hessinit's `kind`."""
    if not isinstance(value, kind):
        raise ProblemError(
            f"{name} is a {type(value).__name__}; it must be a hessinit.{kind.__name__}, such as "
            f"{kind.__name__}({example})."
        )


def check_order(model: nn.Module, loss: Any) -> None:
    """Refuse a model and a loss that were exchanged."""
    if not isinstance(loss, nn.Module) or any(True for _ in model.parameters()):
        return
    if weights := sum(parameter.numel() for parameter in loss.parameters()):
        raise ProblemError(
            f"model is a {type(model).__name__} without parameters, and loss a "
            f"{type(loss).__name__} with {weights:,} weights; the order is model, loss, batch. "
            "Exchange them."
        )


def check_whole(name: str, value: Any, at_least: int) -> int:
    """The value as an int; refuses anything but a whole number from `at_least` up."""
    try:
        number = at_least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = at_least - 1
    if not at_least <= number < 2**63:
        rule = f"a whole number, {at_least} or more"
        raise ProblemError(argument(name, value), f" must be {rule}.")
    return number


def check_switches(**switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ProblemError(argument(name, value), " must be True or False.")


def check_tolerance(tolerance: Any) -> float:
    rule = "a relative error between 0 and 1, such as 1e-3"
    return check_number("tolerance", tolerance, lambda number: 0 < number < 1, rule)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel or torch.compile."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod") and isinstance(model._orig_mod, nn.Module):
            model = model._orig_mod
        else:
            return model


def check_dropout(model: nn.Module, dropout: str) -> None:
    """With dropout="refuse", refuse active dropout: every product would see another mask."""
    if dropout == "freeze":
        return
    active = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _drops(module)
    ]
    if active:
        raise ProblemError(
            f"dropout is active (train mode) in {', '.join(active)}: every product would see "
            "another mask, so there is no single Hessian. Call model.eval(), or pass ",
            argument("dropout", "freeze"),
            " to keep one mask.",
        )


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def check_finite_inputs(inputs: Any, prefix: str) -> None:
    """Refuse inputs with NaN or inf before the forward.

    Targets may hold NaN where a loss masks it.
    """
    for tensor in tensors_in(inputs):
        if tensor.is_floating_point() and not all_finite(tensor) and not _is_mask(tensor):
            bad = ~torch.isfinite(tensor)
            first = tuple(bad.nonzero()[0].tolist())
            hint: list[str | Argument] = [
                "Leave these examples out, or replace the values (torch.nan_to_num)"
            ]
            if bool(tensor.isinf().any()):
                dtype = argument("dtype", torch.float64)
                hint = [f"Scale them if they are beyond {tensor.dtype}, or measure at ", dtype]
            raise ProblemError(
                f"{prefix}the inputs hold {int(bad.sum())} NaN or inf among {tensor.numel()} "
                f"values (the first at {first}); all must be finite. ",
                *hint,
                ".",
            )


def name_large_inputs(inputs: Any) -> str:
    """A sentence on inputs far above 1 in size.

    "" without any. Masks are large, too, but negative.
    """
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.is_floating_point()]
    largest = max((float(tensor.max()) for tensor in tensors if tensor.numel()), default=0.0)
    if largest < LARGE_INPUT:
        return ""
    return (
        f"The inputs are as large as {largest:.2g}; training needs about 1. Standardize them: "
        "(x - x.mean()) / x.std()."
    )


def _is_mask(tensor: Tensor) -> bool:
    """Zeros and -inf only, as added to attention scores."""
    return bool(((tensor == 0) | (tensor == -torch.inf)).all()) and bool((tensor == 0).any())


def check_output(output: Any, forward: Any) -> None:
    """Refuse what is not one tensor of real numbers in float32 or better."""
    if not isinstance(output, Tensor):
        caller = "the model" if forward is None else argument("forward")
        kind, expression = _describe_structure(output)
        raise ProblemError(
            caller,
            f" returned {kind}; curvature needs one tensor. Pass ",
            argument("forward"),
            f"lambda model, x: {expression}.",
        )
    if output.is_complex():
        raise ProblemError(
            f"the model's output has dtype {output.dtype}; curvature needs real numbers. Return "
            "torch.view_as_real of it, and take torch.view_as_complex(output) in the loss."
        )
    if output.dtype not in (torch.float32, torch.float64):
        raise DerivativeError(
            f"the model's output has dtype {output.dtype}; it must be real and of float32 or "
            "better, as the weights are while measuring: rounding drowns second derivatives. Leave "
            "casts (autocast, or .to()) out."
        )


def _describe_structure(output: Any) -> tuple[str, str]:
    """What the model returned instead of a tensor, and how to take one tensor of it."""
    kind = f"a {type(output).__name__}"
    if isinstance(output, Mapping):
        sizes = {key: part.ndim for key, part in output.items() if isinstance(part, Tensor)}
        key = max(sizes, key=lambda name: sizes[name] > 0, default="key")
        if "logits" in sizes:
            key = "logits"
        return f"{kind} with keys {list(output)}", f"model(x)[{key!r}]"
    if not isinstance(output, (tuple, list)):
        return kind, "model(x).logits"
    kind = f"{kind} of {len(output)}"
    several_heads = all(isinstance(part, Tensor) and part.ndim == 2 for part in output)
    if len(output) > 1 and several_heads:
        joined = "torch.cat(model(x), dim=1), with a loss that adds those of the heads"
        return kind, f"{joined} (for one: model(x)[0])"
    return kind, "model(x)[0]"


def check_loss_value(value: Any) -> None:
    """Refuse what is not one real number in a tensor."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
        return
    shown = f"{value!r:.60}"
    hint = "Compute it from the output by functions of torch"
    if isinstance(value, Tensor):
        shown = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
        if value.numel() != 1:
            hint = "Average it with .mean(), or sum it"
        elif not value.is_complex():
            hint = "A count, as of errors, has no derivative: use a loss such as cross-entropy"
    raise ProblemError(
        f"the loss returned {shown}; it must be one real number in a tensor. {hint}."
    )


def check_graph(problem: FunctionalProblem, output: Tensor, loss: Tensor) -> None:
    """Refuse a loss that sees weights not through the output, and hidden paths to weights."""
    if not output.requires_grad:
        raise ProblemError(
            "the model's output does not depend on any measured weight: it was detached, computed "
            "under torch.no_grad(), or the weights are not used. Remove the detach, or measure "
            "other layers."
        )
    parameters = {name: problem.model.get_parameter(name) for name in problem.leaves}
    for who, end in (("the forward", output), ("the loss", loss)):
        if (name := first_leaf(nodes_behind(end.grad_fn), parameters)) is not None:
            raise DerivativeError(
                f"{who} reaches {name} by a way that cannot be followed (an attribute in "
                "__slots__, an earlier view, TorchScript), so that its derivative would be "
                "missing. Keep the weight in an attribute of the model, and make views of it "
                "inside the forward."
            )
    if (name := find_added(problem, output, loss)) is not None:
        raise DerivativeError(
            f"the loss depends on {name} not only through the model's output: by a penalty, by an "
            "auxiliary loss that the forward keeps in an attribute, or by a layer that the loss "
            "uses, too. Leave a penalty out (c·‖w‖² adds 2c to every eigenvalue of the exact "
            "Hessian), or measure ",
            argument("curvature", "hessian"),
            ", which counts it, or return anything else as a further column of the output (",
            argument("forward"),
            ") and take it from there in the loss.",
        )
    check_no_reentrant_checkpoints(output)


def find_added(problem: FunctionalProblem, output: Tensor, loss: Tensor) -> str | None:
    """A weight on which the loss depends beside the output, on which it must depend."""
    after = list(nodes_behind(loss.grad_fn, stop=output.grad_fn))
    if output.grad_fn not in after:
        raise ProblemError(
            "the loss is not a function of the model's output (it was detached, or the loss "
            "ignores it); compute it from its first argument."
        )
    return first_leaf(after, problem.leaves)


def check_no_reentrant_checkpoints(output: Tensor) -> None:
    """They recompute the forward inside `backward()`, and refuse `autograd.grad`."""
    if any(
        type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_behind(output.grad_fn)
    ):
        raise DerivativeError(
            "the model recomputes activations by reentrant checkpoints, which have no second "
            "derivative. Turn them off while measuring, or pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint."
        )


# Dropping one layer in ten goes unnoticed in one repetition nine times out of ten, in nineteen once
# in seven.
_DRAWS = 20


def check_forward(problem: FunctionalProblem, batch: Batch) -> tuple[FirstCall, bool]:
    """The first call, and whether a part of the batch can be evaluated alone.

    Refuses a random forward.

    Evaluates once, and once more on an eighth of the examples under other random numbers. If these
    agree with the whole, the forward is deterministic. If not, the examples may just see each other
    (as in BatchNorm's train mode): then a second whole evaluation decides. A forward that draws,
    and whose draws are frozen, must give the same again for the same draws.
    """
    call = problem.output_and_loss(
        batch, lambda output: _check_finite_output(problem, batch, output)
    )
    output = call.output
    loss = call.loss
    if not all_finite(loss.detach()):
        bad = sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors_in(batch.targets))
        cause = "check the targets and the loss"
        error: type[ProblemError] = WeightsError
        if bad:
            cause = f"the targets hold {bad} NaN or inf; clean them"
            error = ProblemError
        raise error(f"the loss is {loss.item()} though the model's output is finite: {cause}.")
    check_graph(problem, output, loss)
    _check_loss_repeats(problem, batch, call)
    if call.drew and problem.dropout == "freeze":
        _check_draw_repeats(problem, batch, output)
        return call, False
    return call, _check_forward_repeats(problem, batch, call)


def _check_forward_repeats(problem: FunctionalProblem, batch: Batch, call: FirstCall) -> bool:
    output = call.output
    if not call.drew and _sample_agrees(problem, batch, output):
        return True
    # A forward that draws may still agree with itself by chance, as when it drops one layer in ten.
    for draw in range(1, _DRAWS if call.drew else 2):
        again = problem.output(batch, draw=draw).detach()
        if again.shape != output.shape or not agree(again, output):
            raise ProblemError(
                "the model's output changes from call to call on the same batch, so there is no "
                "single Hessian. Make the forward deterministic (model.eval()), or pass ",
                argument("dropout", "freeze"),
                " to keep one draw.",
            )
    return False


def _check_draw_repeats(problem: FunctionalProblem, batch: Batch, output: Tensor) -> None:
    again = problem.output(batch)
    if again.shape != output.shape or not agree(again.detach(), output.detach()):
        raise ProblemError(
            "the model's output changes from call to call under the same random numbers: it draws "
            "from a generator that is not known here. Keep that one in an attribute of the model, "
            "or make it deterministic."
        )


def _check_loss_repeats(problem: FunctionalProblem, batch: Batch, call: FirstCall) -> None:
    output = call.output.detach()
    loss = call.loss.detach()
    for draw in range(_DRAWS if call.drew and problem.dropout != "freeze" else 1):
        if not agree(problem.loss_of(output, batch, draw=draw).detach(), loss):
            raise DerivativeError(
                "the loss changes from call to call on the same output, so there is no single "
                "Hessian: it draws random numbers (",
                argument("dropout", "freeze"),
                " keeps one draw), keeps a state where none is looked for (in an attribute in "
                "__slots__, say), or reads what the forward leaves in an attribute of the model. "
                "Make it a function of its two arguments; with ",
                argument("forward"),
                " the model can give it more columns of output.",
            )


def _sample_agrees(problem: FunctionalProblem, batch: Batch, output: Tensor) -> bool:
    if output.ndim < 1 or output.shape[0] != batch.size or batch.size < 2:
        return False
    examples = batch.sample()
    try:
        with torch.no_grad():
            alone = problem.output(batch.take(examples), draw=1)
    except Exception:
        # The model needs the whole batch; a forward that fails on that has failed before.
        return False
    in_batch = output[examples.to(output.device)]
    return alone.shape == in_batch.shape and agree(alone, in_batch)


def agree(first: Tensor, second: Tensor) -> bool:
    """Equal but for the rounding of differently blocked sums."""
    with torch.no_grad():
        rounding = torch.finfo(first.dtype).eps ** 0.6  # 7e-5 in fp32, 4e-10 in fp64
        return bool((first - second).abs().max() <= rounding * second.abs().max())


def _check_finite_output(problem: FunctionalProblem, batch: Batch, output: Tensor) -> None:
    """Refuse NaN and inf; name the first module at fault, by one more call with hooks."""
    if all_finite(output.detach()):
        return
    at_fault: list[str] = []
    names = {module: name for name, module in problem.model.named_modules()}

    def watch(module: nn.Module, inputs: object, output: object) -> None:
        if not at_fault and any(
            not bool(torch.isfinite(tensor).all()) for tensor in tensors_in(output)
        ):
            at_fault.append(names[module] or f"the {type(module).__name__} itself")

    layers = [module for module in names if not any(module.children())]
    handles = [module.register_forward_hook(watch) for module in layers]
    try:
        problem.output(batch)
    finally:
        for handle in handles:
            handle.remove()
    source = f" ({at_fault[0]} is the first layer whose output does)" if at_fault else ""
    hint = name_large_inputs(batch.inputs) or (
        "If it overflows, scale its weights down or measure with dtype=torch.float64; if not, look "
        "for a division or a logarithm of zero there."
    )
    raise WeightsError(f"the model's output holds NaN or inf{source}. {hint}")


def find_bad_buffer(model: nn.Module) -> str | None:
    """The first that holds NaN or, as a statistic of a normalization, inf; a mask may hold inf."""
    for name, buffer in model.named_buffers():
        bad = buffer.isnan()
        if name.endswith(("running_mean", "running_var")):
            bad = ~buffer.isfinite()
        if bool(bad.any()):
            return name
    return None
