"""The user's state while their code runs: stand-ins for what it may change, and the way back."""

from __future__ import annotations

import array
import contextlib
import contextvars
import copy
import functools
import inspect
import operator
import random
import signal
import sys
import threading
import traceback
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from hessinit.errors import ProblemError
from hessinit.problem.shards import is_dtensor, is_sharded, local_part, reshard

Verb = TypeVar("Verb", bound=Callable[..., Any])

# Two threads at once would restore each other's state: the user's would be lost.
_ONE_AT_A_TIME = threading.RLock()

# The global generators are at stake here, not ones of our own.
# ruff: noqa: NPY002


# Signals whose handlers raise: Ctrl-C, a timeout, a request to end.
_SIGNALS = [number for number in signal.Signals if number.name in {"SIGINT", "SIGALRM", "SIGTERM"}]
# Our modules that call the user's code where it may take long, and where nothing is being put back.
_CALLERS = tuple(
    f"hessinit.{name}"
    for name in ("training.", "problem.functional", "problem.batches", "init.recorder")
)
_deferred: set[int] = set()  # whose handlers are replaced
_arrived: dict[int, Callable[[], Any]] = {}  # the calls of their handlers that wait


def uninterrupted(verb: Verb) -> Verb:
    """The verb, which no signal cuts in half; decorates every verb that runs the user's model.

    Ctrl-C raises between any two instructions of the main thread, in `finally` and `__exit__` too,
    and in those of torch. While the verb works, the handlers of signals are called only where an
    exception is as good as one of the user's: in their code, before the next call of it, and at the
    end. What the verb has written is undone if a handler raises at the end, as the caller gets no
    result.
    """

    @functools.wraps(verb)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = None
        in_main_thread = threading.current_thread() is threading.main_thread()
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(deliver_interrupts)
                # SIGINT, the first, is put back last: its handler cuts nothing short.
                for number in _SIGNALS if in_main_thread and not _deferred else ():
                    if callable(handler := signal.getsignal(number)):
                        stack.callback(signal.signal, number, handler)
                        stack.callback(_deferred.discard, number)
                        _deferred.add(number)
                        signal.signal(number, functools.partial(_receive, handler))
                result = verb(*args, **kwargs)
        except BaseException:
            if go_back := getattr(result, "_go_back", None):
                go_back()
            raise
        return result  # nothing is called from here on: the caller has it

    return called  # type: ignore[return-value]


def deliver_interrupts() -> None:
    """Call the handlers of the signals that have arrived; for where an exception does no harm."""
    while _arrived and threading.current_thread() is threading.main_thread():
        _arrived.popitem()[1]()


def _receive(handler: Callable[..., Any], number: int, frame: types.FrameType | None) -> None:
    """Call the handler at once in the user's code, which may take long; else let the signal wait.

    No context of torch or Python is cut, whoever has called it; what waits for data or processes
    is.
    """
    _arrived[number] = functools.partial(handler, number, frame)
    names = [str(caller.f_globals.get("__name__")) for caller, _ in traceback.walk_stack(frame)]
    library = sys.stdlib_module_names - {"concurrent", "contextlib"}
    inner = next((name for name in names if name.partition(".")[0] not in library), "")
    caller = next((name for name in names if name.startswith("hessinit.")), _CALLERS[0])
    if caller.startswith(_CALLERS) and (
        inner.startswith("torch.utils.data")
        or not inner.startswith(("torch", "hessinit", "contextlib"))
    ):
        deliver_interrupts()


@contextlib.contextmanager
def untouched_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore every global generator on exit.

    Reading a DataLoader draws, even without shuffling.
    """
    with _ONE_AT_A_TIME:
        rewind = remember_random_state(device)
        try:
            yield
        finally:
            rewind()


def remember_random_state(device: torch.device | None = None) -> Callable[[], None]:
    """Return a function that takes every global generator back to its present state."""
    generators = (random, numpy.random, *_torch_generators(device))
    rewinds = [_rewind(generator) for generator in generators]

    def rewind_all() -> None:
        for rewind in rewinds:
            rewind()

    return rewind_all


def _rewind(generator: Any) -> Callable[[], Any]:
    """A function that takes a generator, or those of a module, back to the present state."""
    if isinstance(generator, numpy.random.Generator):
        return functools.partial(setattr, (bits := generator.bit_generator), "state", bits.state)
    if hasattr(generator, "getstate"):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())


def _torch_generators(device: torch.device | None) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    elif device is not None and device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


class Draws:
    """All generators that a forward on `device` may draw from, seeded, and whether it drew."""

    def __init__(self, seed: int, device: torch.device) -> None:
        # torch.manual_seed would reach every device, also those that nobody puts back.
        self._generators = _torch_generators(device)
        for generator in self._generators:
            generator.manual_seed(seed)
        self._states = [generator.get_state() for generator in self._generators]
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        self._next = _first_numbers(seed)

    def happened(self) -> bool:
        """Whether anything was drawn since the seeding; ask once, for asking draws."""
        states = zip(self._generators, self._states, strict=True)
        if any(not torch.equal(generator.get_state(), state) for generator, state in states):
            return True
        return (random.random(), numpy.random.random_sample()) != self._next


@functools.lru_cache(maxsize=8)
def _first_numbers(seed: int) -> tuple[float, float]:
    """What the generators of Python and numpy give first after this seed."""
    return random.Random(seed).random(), numpy.random.RandomState(seed % 2**32).random_sample()


Convert = Callable[[Tensor], Tensor]

# Larger containers hold data, not weights, and a walk over all of their entries would take long.
_MOST_IN_ONE = 1000
_MOST_OBJECTS = 20_000
_VALUES = (str, bytes, int, float, complex, type(None))
_ATOMS = (*_VALUES, Tensor, numpy.ndarray, types.ModuleType, torch.jit.ScriptModule)
_TABLES = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}
# What belongs to training, not to the function that is measured: data, moments, loggers.
_FOREIGN = (Dataset, DataLoader, Sampler, torch.optim.Optimizer)
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "lightning", "pytorch_lightning"}
# Some objects of the standard library keep the user's data, such as UserDict, local and ContextVar.
_FOREIGN_PACKAGES = _LIBRARIES - {
    "argparse",
    "collections",
    "functools",
    "types",
    "weakref",
    "_weakrefset",
    "_thread",
    "_contextvars",
}
_CONTAINERS = (list, dict, set, deque)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.CellType, functools.partial)
_CELLS = (types.CellType, contextvars.ContextVar)
# Entries are exchanged in these only: some subclasses, such as the outputs of Transformers, refuse
# it.
_EXCHANGED = {list, dict, OrderedDict, defaultdict, deque, *_CELLS, types.FunctionType}
_ARRAYS = (numpy.ndarray, bytearray, array.array)
_CACHE = type(functools.lru_cache(len))
_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState)
_all_modules = torch.nn.modules.module
_HOOKS_OF_ALL: list[Any] = [
    _all_modules._global_backward_hooks,
    _all_modules._global_backward_pre_hooks,
]


class UserState:
    """A snapshot of everything that code with access to `roots` can change."""

    def __init__(self, *roots: Any, beside: UserState | None = None) -> None:
        """What `beside` has found is excluded; `meets_it` says whether `roots` reach any of it."""
        excluded: dict[int, Any] = {} if beside is None else beside._known
        self._sharded = list(filter(is_sharded, roots))
        reshard(*self._sharded)
        reached, self.meets_it = _reachable(roots, _belongs_to_the_function, excluded)
        self._known: dict[int, Any] = {**excluded, **reached}
        objects = list(reached.values())
        for variable in objects:
            if isinstance(variable, contextvars.ContextVar) and not _held(variable):
                raise ProblemError(
                    f"the ContextVar {variable.name!r} has no value, and one that is set cannot be "
                    "taken back. Set it before, or give it a default."
                )
        functions = [value for value in objects if isinstance(value, types.FunctionType)]
        stores = (*_CONTAINERS, *_CELLS, type, types.FunctionType)
        self._holders = [_Holder(value) for value in objects if isinstance(value, stores)]
        for function in functions:
            self._holders += [
                _Holder(namespace, names) for namespace, names in _namespaces(function)
            ]
        # A forward may move what quantized weights keep beside their numbers.
        modules = [value for value in objects if isinstance(value, nn.Module)]
        attributes = [vars(weight) for module in modules for weight in module.parameters(False)]
        self._holders += [_Holder(store, exchanges=False) for store in attributes if store]
        # Backward hooks belong to training, and may change the derivatives that they see: they are
        # off.
        tables = list(_HOOKS_OF_ALL)
        for module in modules:
            tables += [module._backward_hooks, module._backward_pre_hooks]
        self._resting = [_Holder(table) for table in tables if table]

    @contextlib.contextmanager
    def with_stand_ins(
        self, convert: Convert | None = None, seed: int = 0, *, hooks: bool = False
    ) -> Iterator[StandIns]:
        """Replace every tensor, array and generator by a stand-in; restore everything on exit.

        `convert` makes the stand-in of a tensor, by default a copy; a `nn.Parameter` stands for
        itself. With `hooks`, backward hooks stay on.
        """
        deliver_interrupts()  # before each call of the user's functions
        stand_ins = StandIns(convert or _copy, seed)
        try:
            for holder in () if hooks else self._resting:
                holder.store.clear()
            for holder in self._holders:
                holder.exchange(stand_ins)
            yield stand_ins
        finally:
            try:
                self.restore()
            except BaseException:  # from one of them: the others come back all the same
                self.restore()
                raise

    def restore(self) -> None:
        """Put back what every container, object and closure held, not the content of tensors."""
        reshard(*self._sharded)  # FSDP2 itself exchanges what it has gathered for its shards
        for holder in (*self._holders, *self._resting):
            holder.restore()


@dataclass(frozen=True)
class _ParameterState:
    """A parameter, or the shard of this rank, and what training changes of it."""

    parameter: nn.Parameter
    data: Tensor
    values: Tensor
    grad: Tensor | None
    requires_grad: bool

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _ParameterState:
        data = local_part(parameter) if is_dtensor(parameter) else parameter.data
        return cls(parameter, data, data.clone(), parameter.grad, parameter.requires_grad)

    def restore(self, values: Tensor | None = None) -> None:
        parameter = self.parameter
        if not is_dtensor(parameter):
            parameter.data = self.data
        # FSDP2 may move a shard at the first forward.
        local_part(parameter).copy_(self.values if values is None else local_part(values))
        parameter.grad = self.grad
        parameter.requires_grad_(self.requires_grad)


class ModelState:
    """All that training changes: weights, gradients and flags, and the state of functions."""

    def __init__(self, model: nn.Module, *functions: Any) -> None:
        self._state = UserState(model, *functions)
        self._parameters = [_ParameterState.of(parameter) for parameter in model.parameters()]
        self.chosen: Sequence[Tensor] | None = None

    def choose(self, weights: Sequence[Tensor] | None) -> None:
        """Let `untouched_model` leave these weights behind in place of the old ones."""
        self.chosen = weights

    def restore(self, weights: Sequence[Tensor] | None = None) -> None:
        """Restore everything, bit for bit, with other `weights` if they are given."""
        self._state.restore()
        for number, state in enumerate(self._parameters):
            state.restore(None if weights is None else weights[number])

    @contextlib.contextmanager
    def with_stand_ins(self, seed: int, weights: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Start from this state, or from `weights`.

        All but the parameters is a copy until the exit.

        The parameters are the user's own, without gradients, and are not restored on exit.
        """
        self.restore(weights)
        convert = copies_beside([state.parameter for state in self._parameters])
        with self._state.with_stand_ins(convert, seed, hooks=True):
            for state in self._parameters:
                state.parameter.grad = None
            yield


def memory_of(tensor: Tensor) -> int:
    """Where its numbers begin, those of all views alike; 0 if the tensor has no memory itself."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain else 0


def copies_beside(parameters: Iterable[nn.Parameter]) -> Convert:
    """Stand-ins for all tensors but these parameters and views of them, which stay."""
    own = {id(parameter): parameter for parameter in parameters}
    memory = {memory_of(parameter) for parameter in own.values()} - {0}

    def convert(tensor: Tensor) -> Tensor:
        # A view of a weight must follow it. Any other leaf would collect a gradient.
        if id(tensor) in own or memory_of(tensor) in memory:
            return tensor
        if tensor.grad_fn is not None:  # a weight behind it must not be lost
            return tensor.clone()
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return convert


@contextlib.contextmanager
def untouched_model(model: nn.Module, *functions: Any) -> Iterator[ModelState]:
    """Restore the model, the state of the functions and every global generator on exit.

    After success the model gets the weights that `choose` was told, if any.
    """
    state = ModelState(model, *functions)
    weights = None
    try:
        with untouched_random_state():
            yield state
        weights = state.chosen
    finally:
        state.restore(weights)


class StandIns:
    """Stand-ins for tensors, arrays and generators.

    What is reached in two ways has one stand-in.
    """

    def __init__(self, convert: Convert, seed: int) -> None:
        self._convert = convert
        self._seed = seed
        self._made: dict[int, Any] = {}
        self._twins: list[tuple[Any, Any]] = []

    def __call__(self, value: Any) -> Any:
        if id(value) not in self._made:
            self._made[id(value)] = self._make(value)
        return self._made[id(value)]

    def drew(self) -> bool:
        return any(_draw(stand_in) != _draw(twin) for stand_in, twin in self._twins)

    def _make(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._convert(value)
        if isinstance(value, _ARRAYS):
            return copy.copy(value)
        if isinstance(value, _CACHE):
            # What it keeps of these weights, in this precision, goes with it.
            return functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
        if _is_iterator(value):
            return map(_refuse_reading, [value])
        if isinstance(value, tuple):
            entries = [self(entry) if _needs_stand_in(entry) else entry for entry in value]
            return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
        stand_in = _seeded(value, self._seed)
        twin = _seeded(value, self._seed)
        self._twins.append((stand_in, twin))
        return stand_in


class _Holder:
    """What a container, an object's `__dict__`, a cell, a class or a function held."""

    def __init__(
        self, store: Any, names: list[str] | None = None, *, exchanges: bool = True
    ) -> None:
        self.store = store
        self._names = _state_names(store) if isinstance(store, type) else names
        self._keys, self._values = map(list, self._read())
        exchanges &= isinstance(store, type) or type(store) in _EXCHANGED
        values = self._values if exchanges else []
        self._positions = [n for n, value in enumerate(values) if _needs_stand_in(value)]

    def exchange(self, stand_in: Callable[[Any], Any]) -> None:
        if self._positions:
            values = list(self._values)
            for position in self._positions:
                values[position] = stand_in(values[position])
            self._write(values)

    def restore(self) -> None:
        keys, values = self._read()
        if not _same(values, self._values) or not _same(keys, self._keys):
            self._write(self._values)

    def _read(self) -> tuple[Collection[Any], Collection[Any]]:
        store = self.store
        if isinstance(store, type):
            store = vars(store)
        if isinstance(store, (dict, types.MappingProxyType)):
            if self._names is None:
                return store, store.values()
            return self._names, [store.get(name) for name in self._names]
        if isinstance(store, _CELLS):
            return [], _held(store)
        if isinstance(store, types.FunctionType):
            return [], list(store.__defaults__ or ())
        return [], list(store)

    def _write(self, values: list[Any]) -> None:
        store = self.store
        if isinstance(store, types.CellType):
            store.cell_contents = values[0]
        elif isinstance(store, contextvars.ContextVar):
            store.set(values[0])
        elif isinstance(store, type):
            for name, value in zip(self._keys, values, strict=True):
                setattr(store, name, value)
        elif isinstance(store, types.FunctionType):
            store.__defaults__ = tuple(values)
        elif isinstance(store, dict):
            if self._names is None and not _same(store, self._keys):
                store.clear()
            store.update(zip(self._keys, values, strict=True))
        else:
            store.clear()
            (store.update if isinstance(store, set) else store.extend)(values)


def _same(first: Collection[Any], second: Collection[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _copy(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


def _needs_stand_in(value: Any) -> bool:
    # Not torch.Size and what torch returns.
    if isinstance(value, tuple) and type(value).__module__ != "torch":
        return len(value) <= _MOST_IN_ONE and any(map(_needs_stand_in, value))
    # Not what is derived from Random: that of the system has no seed.
    return (
        isinstance(value, (Tensor, *_ARRAYS, *_GENERATORS, _CACHE))
        or type(value) is random.Random
        or _is_iterator(value)
    )


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools")


def _refuse_reading(iterator: Any) -> None:
    raise ProblemError(
        f"the forward, the loss or the data read a {type(iterator).__name__}, and what it has "
        "given cannot be put back: training would miss it. Keep a list or a number in its place, "
        "or pass the batches as a list."
    )


def _seeded(generator: Any, seed: int) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(seed)
    if isinstance(generator, numpy.random.Generator):
        return numpy.random.Generator(type(generator.bit_generator)(seed))
    if isinstance(generator, numpy.random.RandomState):
        return numpy.random.RandomState(seed % 2**32)
    return random.Random(seed)


def _draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator, device=generator.device).item()
    return float(generator.random())


@contextlib.contextmanager
def untouched_sources(*sources: Any) -> Iterator[None]:
    """Restore generators and attributes of datasets, loaders, samplers and collators on exit."""
    reached, _ = _reachable(sources, lambda value: not isinstance(value, type), {})
    objects = list(reached.values())
    rewinds = [
        _rewind(value)
        for value in objects
        if isinstance(value, _GENERATORS) or type(value) is random.Random
    ]
    holders = [
        _Holder(vars(value))
        for value in objects
        if hasattr(value, "__dict__")
        and (isinstance(value, _FOREIGN) or _belongs_to_the_function(value))
    ]

    def guard(value: Any) -> Any:
        return map(_refuse_reading, [value]) if _is_iterator(value) else value

    try:
        for holder in holders:
            holder.exchange(guard)
        for loader in objects:
            if isinstance(loader, DataLoader):
                # With persistent workers all loops share one iterator: ours would use up that of
                # training.
                loader._iterator = None
        yield
    finally:
        for restore in (*(holder.restore for holder in holders), *rewinds):
            restore()


def _reachable(
    roots: tuple[Any, ...], enters: Callable[[Any], bool], excluded: Mapping[int, Any]
) -> tuple[dict[int, Any], bool]:
    """All objects that `roots` reach, by id, but those in `excluded`; whether one of these was met.

    What functions reach by names comes last: there may be no end of it.
    """
    reached: dict[int, Any] = {}  # holds the objects, so that no other one gets their id
    meets_excluded = False
    waiting = list(roots)
    named = list[Any]()
    while (waiting or named) and len(reached) < _MOST_OBJECTS:
        value = (waiting or named).pop()
        if id(value) in reached or isinstance(value, _ATOMS):
            continue
        if id(value) in excluded:
            meets_excluded = True
        elif enters(value):
            reached[id(value)] = value
            waiting += _contents(value)
            if isinstance(value, types.FunctionType):
                for namespace, names in _namespaces(value):
                    named += [namespace[name] for name in names]
    return reached, meets_excluded


def _belongs_to_the_function(value: Any) -> bool:
    if isinstance(value, (nn.Module, *_CONTAINERS, tuple, frozenset, *_FUNCTIONS)):
        return True
    if isinstance(value, type):
        return _package_of(value) not in _LIBRARIES and not isinstance(value, _FOREIGN)
    return _package_of(type(value)) not in _FOREIGN_PACKAGES and not isinstance(value, _FOREIGN)


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _contents(value: Any) -> list[Any]:
    """What `value` refers to; for an object, its class and the dictionary of its attributes."""
    if isinstance(value, type):
        return [
            *value.__bases__,
            *(vars(value)[name] for name in _state_names(value)),
            *_methods(value),
        ]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if _held(cell)]
        return [*cells, *(value.__defaults__ or ()), value.__kwdefaults__, value.__dict__]
    if isinstance(value, _CELLS):
        return _held(value)
    # The class that FSDP2 puts before the user's own is torch's.
    around = [type(value), *type(value).__bases__, getattr(value, "__dict__", None)]
    if isinstance(value, (*_CONTAINERS, tuple, frozenset, Mapping)):
        if len(value) > _MOST_IN_ONE:
            return around
        if isinstance(value, dict) and "_backward_hooks" in value:
            # Torch gives every module a dozen tables, of hooks and the like, most of them empty.
            return [table for name, table in value.items() if name not in _TABLES or table]
        return [*around, *(value.values() if isinstance(value, Mapping) else value)]
    return around


def _state_names(kind: type) -> list[str]:
    """The attributes of a class that are no methods, and the cached ones."""
    return [
        name
        for name, value in vars(kind).items()
        if isinstance(value, _CACHE)
        or not (name.startswith("__") or hasattr(type(value), "__get__"))
    ]


def _methods(kind: type) -> Iterator[types.FunctionType]:
    """`forward` or `__call__`, and the methods that it calls, by the names in their code."""
    names = ["forward", "__call__"]
    for name in names:
        function = inspect.unwrap(cast(Any, getattr(kind, name, None)))
        if isinstance(function, types.FunctionType):
            yield function
            names += [name for name in _names(function) if name not in names]


def _namespaces(function: types.FunctionType) -> list[tuple[dict[str, Any], list[str]]]:
    """The globals, and those of the user's modules among them, with the names used there."""
    names = _names(function)
    namespaces = [function.__globals__]
    for name in names:
        module = function.__globals__.get(name)
        if not isinstance(module, types.ModuleType):
            continue
        if module.__name__.partition(".")[0] not in _LIBRARIES:
            namespaces.append(vars(module))
    return [(namespace, [name for name in names if name in namespace]) for namespace in namespaces]


def _names(function: types.FunctionType) -> list[str]:
    """The names, but local ones, that a function of the user, or one inside it, uses."""
    if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
        return []
    codes = [function.__code__]
    names = dict[str, None]()
    for code in codes:
        names.update(dict.fromkeys(code.co_names))
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(names)


def _held(cell: Any) -> list[Any]:
    """The content of a cell, or the value of a variable; nothing where it has none yet."""
    try:
        return [cell.cell_contents if isinstance(cell, types.CellType) else cell.get()]
    except (ValueError, LookupError):
        return []
