"""The user's state while their code runs: stand-ins for everything it may change; generators restored."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

numpy_random: Any = numpy.random  # its stubs lack the two functions used below

_STAND_IN: Any = numpy.random.MT19937(0)
# Two threads at once would restore each other's stand-in: the user's generator would be lost.
_ONE_AT_A_TIME = threading.RLock()

# The global generators are at stake here, not ones of our own.
# ruff: noqa: NPY002


@contextlib.contextmanager
def untouched_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore every global generator on exit; reading a DataLoader draws, even without shuffling."""
    with _ONE_AT_A_TIME:
        generators = _torch_generators(device)
        states = [generator.get_state() for generator in generators]
        python = random.getstate()
        own = numpy_random.get_bit_generator()
        if device is None:  # reading data: numpy goes on from where it is
            _STAND_IN.state = own.state
        try:
            # Exchanging numpy's generator is much faster than saving and restoring its state.
            numpy_random.set_bit_generator(_STAND_IN)
            yield
        finally:
            numpy_random.set_bit_generator(own)
            random.setstate(python)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _torch_generators(device: torch.device | None) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    elif device is not None and device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


class Draws:
    """All generators that a forward on `device` may draw from, seeded; `happened()` says whether it did."""

    def __init__(self, seed: int, device: torch.device) -> None:
        # torch.manual_seed would reach every device, also those that nobody puts back.
        self._generators = _torch_generators(device)
        for generator in self._generators:
            generator.manual_seed(seed)
        self._states = [generator.get_state() for generator in self._generators]
        self._seed_others(seed)
        self._next = (random.random(), numpy.random.random_sample())
        self._seed_others(seed)

    @staticmethod
    def _seed_others(seed: int) -> None:
        random.seed(seed)
        numpy.random.seed(seed % 2**32)

    def happened(self) -> bool:
        """Whether anything was drawn since the seeding; ask once, for asking draws."""
        states = zip(self._generators, self._states, strict=True)
        if any(not torch.equal(generator.get_state(), state) for generator, state in states):
            return True
        return (random.random(), numpy.random.random_sample()) != self._next


Convert = Callable[[Tensor], Tensor]

# Larger containers hold data, not weights, and a walk over all of their entries would take long.
_MOST_IN_ONE = 1000
_MOST_OBJECTS = 20_000
_NUMBERS = frozenset({int, float, bool, str, type(None)})
_VALUES = (str, bytes, int, float, complex)
_ATOMS = (Tensor, numpy.ndarray, *_VALUES, type, types.ModuleType, torch.jit.ScriptModule)
_TABLES = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}
# What belongs to training, not to the function that is measured: data, moments, loggers.
_FOREIGN = (Dataset, DataLoader, torch.optim.Optimizer)
_FOREIGN_PACKAGES = {*sys.stdlib_module_names, "torch", "numpy", "lightning", "pytorch_lightning"}
_CONTAINERS = (list, dict, set, deque)
# Entries are exchanged in these only: some subclasses, such as the outputs of Transformers, refuse it.
_PLAIN = (list, dict, OrderedDict, defaultdict, deque)
_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState)
_all_modules = torch.nn.modules.module
_HOOKS_OF_ALL: list[Any] = [_all_modules._global_backward_hooks, _all_modules._global_backward_pre_hooks]


class UserState:
    """A snapshot of everything that code with access to `roots` can change.

    >>> model = nn.Linear(2, 2)
    >>> model.calls, model.mean = [0], torch.zeros(2)
    >>> with UserState(model).with_stand_ins():
    ...     model.calls.append(1)
    ...     _ = model.mean.add_(1)
    >>> model.calls, model.mean
    ([0], tensor([0., 0.]))
    """

    def __init__(self, *roots: Any, beside: UserState | None = None) -> None:
        """What `beside` has found is excluded; `meets_it` says whether `roots` reach any of it."""
        known: dict[int, Any] = {} if beside is None else beside._known
        found, self.meets_it = _reachable(roots, _belongs_to_the_function, known)
        self._known: dict[int, Any] = {**known, **found}
        self._holders = [_Holder(store) for one in found.values() for store in _stores(one)]
        # Backward hooks belong to training, and may change the derivatives that they see: they are off.
        modules = [one for one in found.values() if isinstance(one, nn.Module)]
        kinds = ("_backward_hooks", "_backward_pre_hooks")
        hooks = [vars(module)[kind] for module in modules for kind in kinds]
        self._resting = [_Holder(table) for table in [*hooks, *_HOOKS_OF_ALL] if table]
        self._to_replace = [
            (holder, place, value) for holder in self._holders for place, value in holder.replaceable()
        ]

    @contextlib.contextmanager
    def with_stand_ins(self, convert: Convert | None = None, seed: int = 0) -> Iterator[StandIns]:
        """Replace every tensor, array and generator by a stand-in; restore everything on exit.

        `convert` makes the stand-in of a tensor, by default a copy; a `nn.Parameter` stands for itself.
        """
        stand_ins = StandIns(convert or _copy, seed)
        try:
            for holder in self._resting:
                holder.store.clear()
            for holder, place, value in self._to_replace:
                holder.put(place, stand_ins.stand_in(value))
            yield stand_ins
        finally:
            for holder in [*self._holders, *self._resting]:
                holder.put_back()


class StandIns:
    """Stand-ins for tensors, arrays and generators; what is reached in two ways has one stand-in."""

    def __init__(self, convert: Convert, seed: int) -> None:
        self._convert, self._seed = convert, seed
        self._made: dict[int, Any] = {}
        self._twins: list[tuple[Any, Any]] = []

    def stand_in(self, value: Any) -> Any:
        if id(value) not in self._made:
            self._made[id(value)] = self._make(value)
        return self._made[id(value)]

    def drew(self) -> bool:
        return any(_draw(stand_in) != _draw(twin) for stand_in, twin in self._twins)

    def _make(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._convert(value)
        if isinstance(value, numpy.ndarray):
            return value.copy()
        if isinstance(value, tuple):
            entries = [self.stand_in(entry) if _needs_stand_in(entry) else entry for entry in value]
            return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
        stand_in, twin = _seeded(value, self._seed), _seeded(value, self._seed)
        self._twins.append((stand_in, twin))
        return stand_in


def _copy(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


@contextlib.contextmanager
def untouched_sources(*sources: Any) -> Iterator[None]:
    """Restore the generators and attributes of datasets, loaders and collators on exit.

    Not undone is what was written into a container, and how far an iterator or a file was read.

    >>> drawing = torch.utils.data.RandomSampler([0] * 9, generator=torch.Generator().manual_seed(0))
    >>> with untouched_sources(drawing):
    ...     first = list(drawing)
    >>> list(drawing) == first
    True
    """
    inside = list(_reachable(sources, lambda one: True, {})[0].values())
    holders = [_Holder(_attributes(one)) for one in inside if not isinstance(one, types.FunctionType)]
    restores = [restore for one in inside for restore in _generator_restores(one)]
    try:
        for loader in inside:
            if isinstance(loader, DataLoader) and loader._iterator is not None:
                # With persistent workers all loops share this one: ours would use up that of training.
                loader._iterator = None
        yield
    finally:
        for holder in holders:
            holder.put_back()
        for restore in restores:
            restore()


def _reachable(
    roots: tuple[Any, ...], enters: Callable[[Any], bool], known: Mapping[int, Any]
) -> tuple[dict[int, Any], bool]:
    """All objects reachable from `roots`, by id, without those in `known`; whether one of these was met."""
    found: dict[int, Any] = {}  # holds the objects, so that no other one gets their id
    meets_known, waiting, refused = False, list(roots), set[int]()
    while waiting and len(found) < _MOST_OBJECTS:
        one = waiting.pop()
        if type(one) in _NUMBERS or id(one) in found or id(one) in refused or isinstance(one, _ATOMS):
            continue
        if id(one) in known:
            meets_known = True
        elif enters(one):
            found[id(one)] = one
            waiting += _contents(one)
        else:
            refused.add(id(one))
    return found, meets_known


def _belongs_to_the_function(one: Any) -> bool:
    functions = (types.FunctionType, types.MethodType, types.CellType, functools.partial)
    if isinstance(one, (nn.Module, types.SimpleNamespace, *_CONTAINERS, tuple, frozenset, *functions)):
        return True
    package = type(one).__module__.partition(".")[0]
    return package not in _FOREIGN_PACKAGES and not isinstance(one, _FOREIGN)


def _contents(one: Any) -> list[Any]:
    if isinstance(one, nn.Module):
        # Torch gives every module a dozen tables, of hooks and the like, most of them empty.
        entries = [value for name, value in one.__dict__.items() if name not in _TABLES or value]
        return [*entries, type(one).forward]
    if isinstance(one, (list, tuple, dict, set, frozenset, deque, Mapping)):
        if len(one) > _MOST_IN_ONE:
            return []
        return list(one.values()) if isinstance(one, Mapping) else list(one)
    if isinstance(one, types.MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, functools.partial):
        return [one.func, *one.args, one.keywords]
    if isinstance(one, types.FunctionType):
        names = [one.__globals__[name] for name in _global_names(one)]
        return [*(one.__closure__ or ()), *(one.__defaults__ or ()), one.__kwdefaults__, one.__dict__, *names]
    if isinstance(one, types.CellType):
        return _cell_contents(one)
    # The queues and processes of a loader that is being read are not to be turned back.
    busy = "_iterator" if isinstance(one, DataLoader) else None
    return [value for name, value in _attributes(one).items() if name != busy]


def _global_names(function: types.FunctionType) -> list[str]:
    """The global names that the function, or a function inside it, uses; none for a library's function."""
    if (function.__module__ or "").partition(".")[0] in _FOREIGN_PACKAGES:
        return []
    codes, names = [function.__code__], dict[str, None]()
    for code in codes:
        names.update(dict.fromkeys(code.co_names))
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [name for name in names if name in function.__globals__]


def _attributes(one: Any) -> dict[str, Any]:
    found = getattr(one, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _cell_contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a name that is bound later
        return []


def _stores(one: Any) -> list[Any]:
    if isinstance(one, types.FunctionType):
        return [_Names(one.__globals__, _global_names(one)), *([one] if one.__defaults__ else [])]
    if isinstance(one, types.CellType):
        return [one] if _cell_contents(one) else []
    containers: list[Any] = [one] if isinstance(one, _CONTAINERS) else []
    attributes = _attributes(one)
    return [*containers, attributes] if attributes else containers


class _Names:
    """Some entries of a dictionary: the global names that a function uses."""

    def __init__(self, table: dict[str, Any], names: list[str]) -> None:
        self._table, self._names = table, names

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self._table.get(name)) for name in self._names]

    def __setitem__(self, name: str, value: Any) -> None:
        self._table[name] = value

    def update(self, pairs: Iterable[tuple[str, Any]]) -> None:
        self._table.update(pairs)


class _Holder:
    """A container (or a cell, or a function's defaults), and what it holds now."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._saved = self._entries()

    def _entries(self) -> list[Any]:
        one = self.store
        if isinstance(one, (dict, _Names)):
            return [entry for pair in one.items() for entry in pair]  # keys and values in turn
        if isinstance(one, types.CellType):
            return _cell_contents(one)
        if isinstance(one, types.FunctionType):
            return list(one.__defaults__ or ())
        return list(one)

    def replaceable(self) -> Iterator[tuple[Any, Any]]:
        one = self.store
        if isinstance(one, (dict, _Names)):
            pairs = list(one.items()) if type(one) in (*_PLAIN, _Names) else []
        elif isinstance(one, set) or (isinstance(one, _CONTAINERS) and type(one) not in _PLAIN):
            pairs = []
        else:
            pairs = list(enumerate(self._saved))
        return ((place, value) for place, value in pairs if _needs_stand_in(value))

    def put(self, place: Any, value: Any) -> None:
        one = self.store
        if isinstance(one, types.CellType):
            one.cell_contents = value
        elif isinstance(one, types.FunctionType):
            values = list(one.__defaults__ or ())
            values[place] = value
            one.__defaults__ = tuple(values)
        else:
            one[place] = value

    def put_back(self) -> None:
        one, saved, now = self.store, self._saved, self._entries()
        if _same(now, saved):
            return
        if isinstance(one, types.CellType):
            one.cell_contents = saved[0]
        elif isinstance(one, types.FunctionType):
            one.__defaults__ = tuple(saved)
        elif isinstance(one, (dict, _Names)):
            if isinstance(one, dict) and not _same(now[::2], saved[::2]):
                one.clear()
            one.update(zip(saved[::2], saved[1::2], strict=True))
        else:
            one.clear()
            (one.update if isinstance(one, set) else one.extend)(saved)


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _needs_stand_in(value: Any) -> bool:
    if isinstance(value, tuple) and type(value).__module__ != "torch":  # torch.Size and what torch returns
        return len(value) <= _MOST_IN_ONE and any(map(_needs_stand_in, value))
    # Not what is derived from Random: that of the system has no seed.
    return isinstance(value, (Tensor, numpy.ndarray, *_GENERATORS)) or type(value) is random.Random


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


def _generator_restores(one: Any) -> Iterator[Callable[[], Any]]:
    if isinstance(one, (torch.Generator, numpy.random.RandomState)):
        state: Any = one.get_state()
        yield functools.partial(one.set_state, state)
    elif isinstance(one, numpy.random.Generator):
        yield functools.partial(setattr, one.bit_generator, "state", one.bit_generator.state)
    elif isinstance(one, random.Random):
        with contextlib.suppress(NotImplementedError):  # that of the system has no state
            yield functools.partial(one.setstate, one.getstate())
