"""Records the calls of torch functions in one forward, on a sample or on zeros, as a trace."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hessinit.errors import ProblemError
from hessinit.init.call_steps import COMPOSITES, append_call_with_weight, derive, step_of
from hessinit.init.model_call import first_real_parameter, prepare_sample, preserved, run
from hessinit.init.trace import Derived, ReplayableCall, Shape, Signal, Step, Trace, map_leaves
from hessinit.problem.batches import tensors_in
from hessinit.problem.graph import name_of, operation_named
from hessinit.problem.problem import Forward


class Recorder(TorchFunctionMode):
    """Sees every call of a torch function, and appends what it does to `trace`.

    It knows what each tensor stands for: a `Signal`, a `Derived`, or None for a constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.draws = False
        # The tensors are held as well, so that no two of them ever have the same id.
        self._meanings: dict[int, tuple[Any, Tensor]] = {}
        self._norms: list[Signal | None] = []  # the inputs of the normalizations that run now

    def know(self, tensor: Tensor, meaning: Any) -> None:
        self._meanings[id(tensor)] = (meaning, tensor)

    def meaning(self, leaf: Any) -> Any:
        """What a tensor in the arguments of a call stands for; anything else stands for itself."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._meanings:
            # From a custom autograd.Function, a scripted function, a closure: no call was seen.
            step = Step("an unseen function", "unknown", shape=tuple(leaf.shape))
            self.know(leaf, self.trace.append(step))
        meaning = self._meanings[id(leaf)][0]
        return leaf if meaning is None else meaning

    def _is_signal(self, leaf: Any) -> bool:
        return not self._is_inside_norm and isinstance(self.meaning(leaf), Signal)

    def finish(self, output: Any) -> Trace:
        """The trace of a forward that returned `output`."""
        meanings = [self.meaning(tensor) for tensor in tensors_in(output)]
        outputs = {meaning.index for meaning in meanings if isinstance(meaning, Signal)}
        return replace(self.trace, outputs=frozenset(outputs), draws=self.draws)

    @contextlib.contextmanager
    def norms_as_one_step(self, model: nn.Module) -> Iterator[None]:
        """Inside, whatever a normalization of the model computes is one step of the trace."""
        with contextlib.ExitStack() as stack:
            for module in filter(_is_norm, model.modules()):
                enter = module.register_forward_pre_hook(self._enter_norm, with_kwargs=True)
                stack.callback(enter.remove)
                leave = module.register_forward_hook(self._leave_norm, always_call=True)
                stack.callback(leave.remove)
            yield

    @property
    def _is_inside_norm(self) -> bool:
        return any(source is not None for source in self._norms)

    def _enter_norm(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = next(iter([*args, *kwargs.values()]), None)
        source = None if self._is_inside_norm else self.meaning(inputs)
        self._norms.append(source if isinstance(source, Signal) else None)

    def _leave_norm(self, module: nn.Module, args: Any, result: Any) -> None:
        source = self._norms.pop()
        if source is not None and isinstance(result, Tensor):
            step = Step("norm", "norm", (source.index,), shape=tuple(result.shape))
            self.know(result, self.trace.append(step))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = functools.partial(func, *args, **(kwargs or {}))
        if self._is_inside_norm:
            return run()
        meanings = map_leaves(self.meaning, [run.args, run.keywords])
        call = ReplayableCall(func, *meanings)
        first: Any = args[0] if args else None
        version = first._version if isinstance(first, Tensor) else None
        result = run()
        name = name_of(func)
        self.draws |= operation_named(name).draws
        is_written = version is not None and first._version != version
        if name == "setitem":
            result = first
        elif is_written and call.args[0] is first:
            name = "a write into a constant"
        elif isinstance(result, Tensor) and result is first and not is_written:
            result = result.view_as(result)  # returned as it came: a step of its own
        self._assign(result, self._interpret(name, call, result))
        return None if name == "setitem" else result

    def _assign(self, result: Any, meaning: Any) -> None:
        if isinstance(result, Tensor):
            if isinstance(meaning, tuple):
                meaning = meaning[0]
            is_derived = isinstance(meaning, Derived)
            self.know(result, replace(meaning, value=result) if is_derived else meaning)
        elif isinstance(result, (tuple, list)):
            for position, entry in enumerate(result):
                part = meaning[position] if isinstance(meaning, tuple) else meaning
                if isinstance(meaning, Signal) and isinstance(entry, Tensor):
                    part = self._part(meaning, position, tuple(entry.shape))
                self._assign(entry, part)

    def _part(self, whole: Signal, position: int, shape: Shape) -> Signal:
        call = ReplayableCall(lambda parts, index: parts[index], (whole, position))
        return self.trace.append(Step("part", "rearrange", (whole.index,), call, shape=shape))

    def _interpret(self, name: str, call: ReplayableCall, result: Any) -> Any:
        """What the result of a call stands for; appends its steps."""
        operation = operation_named(name)
        if operation.role == "query" or not (call.sources or call.parameters):
            return None
        if name in COMPOSITES:
            return COMPOSITES[name](self.trace, name, call)
        shape = tuple(result.shape) if isinstance(result, Tensor) else None
        if operation.stores and call.parameters:
            if operation.stores != "factor":
                call = self._with_input_as_signal(call)
            signal = append_call_with_weight(self.trace, name, call, shape)
            if signal is not None:
                return signal
        if not call.sources:
            return derive(name, call.parameters, result)
        for parameter in call.parameters:
            self.trace.note_other_use(parameter.parameters, name)
        return self.trace.append(replace(step_of(name, call), shape=shape))

    def _with_input_as_signal(self, call: ReplayableCall) -> ReplayableCall:
        """The input of a layer is a signal, even a learned one, as the queries of a Perceiver."""
        if len(call.parameters) < 2 or not isinstance(call.args[0], Derived):
            return call
        learned = call.args[0]
        self.trace.note_other_use(learned.parameters, "a learned input, not a map of a signal")
        shape = tuple(learned.value.shape)
        signal = self.trace.append(Step("parameter", "input", shape=shape))
        return replace(call, args=(signal, *call.args[1:]))


_NORM = re.compile(r"Norm(\d?d)?$")


def _is_norm(module: nn.Module) -> bool:
    """Whether the class is called a norm, as `LlamaRMSNorm`; norms of weights do not count."""
    kind = type(module)
    if not _NORM.search(kind.__name__) or kind.__module__.startswith("torch.nn.utils"):
        return False
    parameters = module.parameters()
    return all(parameter.numel() == max(parameter.shape, default=1) for parameter in parameters)


def record_forward(model: nn.Module, sample: Any, forward: Forward | None) -> Trace:
    """Run the forward once on copies of the weights, the buffers and the sample, and record it.

    Without a sample it runs on zeros of a shape that the model takes; a forward that reads values
    of its input is refused then.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    copies = {name: tensor.detach().clone() for name, tensor in tensors}
    if sample is not None:
        return _record(model, copies, prepare_sample(model, sample), forward, Recorder())
    return _record_on_zeros(model, copies)


def _record(
    model: nn.Module,
    copies: Mapping[str, Tensor],
    inputs: Any,
    forward: Forward | None,
    recorder: Recorder,
) -> Trace:
    # A closure holds the model's own parameters, which no copy replaces.
    for name, parameter in model.named_parameters():
        for tensor in (copies[name], parameter):
            recorder.know(tensor, Derived(frozenset({name}), tensor))
    with preserved(model), recorder.norms_as_one_step(model):
        buffers = [copies[name] for name, _ in model.named_buffers()]
        attributes = [value for part in model.modules() for value in vars(part).values()]
        for constant in [*buffers, *attributes]:
            if isinstance(constant, Tensor):
                recorder.know(constant, None)
        for tensor in tensors_in(inputs):
            step = Step("input", "input", shape=tuple(tensor.shape))
            recorder.know(tensor, recorder.trace.append(step))
        output = run(model, inputs, forward, copies, recorder)
    return recorder.finish(output)


# --- An input that the model takes, where no sample is given


class NeedsSampleError(ProblemError):
    """The forward cannot be recorded on an input that was made up."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the model cannot be traced without data ({reason}); pass sample=, an input as the "
            "model gets it."
        )


_READS_A_VALUE = {
    *("__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy"),
    *("equal", "allclose", "is_nonzero"),
}


class RecorderOfZeros(Recorder):
    """Records a forward on zeros, which must not decide by the value of a signal.

    With `widens`, a dense layer gets as many features as it takes: how many there are behind a
    convolution depends on the size of the images, and says nothing of the weights.
    """

    def __init__(self, widens: bool) -> None:
        super().__init__()
        self._widens = widens
        self.met_other_width = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS_A_VALUE and any(map(self._is_signal, args)):
            raise NeedsSampleError(f"the forward decides by a value, read by {name}")
        if func is nn.functional.linear and self._is_signal(args[0]):
            *leading, width = args[0].shape
            self.met_other_width |= width != args[1].shape[1]
            if self._widens:
                widened = args[0].new_zeros(*leading, args[1].shape[1])
                self.know(widened, self.meaning(args[0]))
                args = (widened, *args[1:])
        return super().__torch_function__(func, types, args, kwargs)


def _record_on_zeros(model: nn.Module, copies: Mapping[str, Tensor]) -> Trace:
    """The trace on the first zeros that the model takes, in the shapes that its layers take."""
    like = first_real_parameter(model)
    taken = itertools.chain.from_iterable(map(_shapes_taken, model.modules()))
    shapes = [*itertools.islice(dict.fromkeys(taken), _ZEROS.inputs)]
    for widens in (False, True):
        too_narrow = []
        for is_token, shape in shapes:
            dtype = torch.long if is_token else like.dtype
            inputs = torch.zeros(shape, dtype=dtype, device=like.device)
            recorder = RecorderOfZeros(widens)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return _record(model, copies, inputs, _call_on_all, recorder)
            except NeedsSampleError:
                raise
            except Exception:  # not the input of this model: the next one may be
                if recorder.met_other_width:
                    too_narrow.append((is_token, shape))
        shapes = too_narrow
    raise NeedsSampleError("no zeros were found that it takes")


def _call_on_all(model: nn.Module, inputs: Any) -> Any:
    """The model's output with `inputs` for every argument that has no default."""
    parameters = [*inspect.signature(type(model).forward).parameters.values()][1:]
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return model(*[inputs] * max(1, len(required)))


@dataclass(frozen=True)
class _Zeros:
    """The shapes that are tried, usual ones first.

    Two examples, as BatchNorm needs them: `alone`, in sequences, in sequences of sequences; or one,
    for a model of a fixed number. Primes, so that a reshape that fits is meant. `lengths` of images
    and signals, as kernels and tables of positions take only some. At most `numbers` in an input,
    and so many `inputs` that a refusal takes seconds.
    """

    alone: tuple[tuple[int, ...], ...] = ((2,), (2, 7), (2, 5, 7), (1,))
    tokens: tuple[tuple[int, ...], ...] = ((2, 7), (2, 3), (2, 2), (2,))
    lengths: tuple[int, ...] = (8, 16, 28, 32, 64, 96, 128, 224, 256, *range(2, 28))
    numbers: int = 2**20
    inputs: int = 100


_ZEROS = _Zeros()


def _shapes_taken(module: nn.Module) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """Whether the module takes tokens, and a shape that it may take; usual shapes first."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        yield from ((True, shape) for shape in _ZEROS.tokens)
        return
    for weight in module.parameters(recurse=False):
        axes = weight.ndim - 2
        if axes < 0:
            continue
        width = getattr(module, "in_channels", weight.shape[1])
        images = [(2, width, *[length] * axes) for length in _ZEROS.lengths if axes]
        yield from ((False, shape) for shape in images if math.prod(shape) <= _ZEROS.numbers)
        for features in (width, weight.shape[0]):
            yield from ((False, (*leading, features)) for leading in _ZEROS.alone)
