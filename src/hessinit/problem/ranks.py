"""The ranks of a distributed job that call a verb together: agreement, messages, and who is missing.

They form a star around rank 0: whoever waits knows for whom, and a closed connection names who is
gone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hessinit.errors import ProblemError, RankError, choose
from hessinit.problem.batches import Batch, join_batches, map_tensors, read_batches, tensors_in
from hessinit.problem.problem import Problem, as_problem
from hessinit.problem.validate import check_model, check_present, unwrap

P = ParamSpec("P")
T = TypeVar("T")

_BEGINNING = 2**13  # bytes
# A group for messages beside one that knows no CPU, as NCCL's.
_BESIDE: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_PLAIN = (str, int, float, type(None), torch.dtype, list, tuple)
_GONE = "ended, or its connection was lost. Its own output says why; start the job again"
_SLOW = "did not answer in time. Make the same calls on every rank, or raise init_process_group's timeout"
_PRINTS = dict.fromkeys(("batch", "data", "log_to"))  # what these print says little
_RULES = {
    "option": "all ranks must pass the same options; pass one value everywhere",
    "model": "all ranks must pass the same model, in the same mode; build it in the same way everywhere",
    "values": "all ranks must hold the same values; broadcast them first, as DistributedDataParallel does",
    "batch": 'with distributed="layers" all ranks must pass the same batch; for shares choose "batch"',
}
_ALIKE = "and the replicas of DistributedDataParallel must stay alike"
_TOGETHER = 'pass distributed="batch" on every rank (its share of the examples), or "layers" (all one batch)'
# By whether the model is in DistributedDataParallel, and whether ranks can call the verb together.
_ALONE = {
    (
        False,
        True,
    ): f'which is one of several; {_TOGETHER}, or "each" where every process works for itself',
    (
        False,
        False,
    ): 'which is one of several; pass distributed="each" where every process works for itself',
    (True, True): f"{_ALIKE}; {_TOGETHER}",
    (True, False): f'{_ALIKE}; call it before the model is wrapped, with distributed="each"',
}


class Failure(str):
    """Sent in place of a value: why there is none."""


class Ranks:
    """The processes of a job.

    What one of them raises becomes a `RankError` on the others that names it.
    """

    def __init__(self, doing: str, split: Any = "batch") -> None:
        if not (dist.is_available() and dist.is_initialized()):
            why = f'distributed="{split}" needs a process group, and none is initialized'
            way = "start the program by torchrun and call torch.distributed.init_process_group() first"
            raise ProblemError(f"{why}; {way}, or leave distributed= out.")
        self.doing = doing
        self.split = split
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._others = range(1, self.size)
        self._lost = dict[int, str]()
        self._leads = self._over = (
            False  # the others wait for questions; nobody waits for this rank
        )
        world: Any = dist.group.WORLD
        if "cpu:gloo" not in dist.get_backend_config() and world not in _BESIDE:
            _BESIDE[world] = dist.new_group(backend="gloo")
        self._group = _BESIDE.get(world, world)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Whatever one rank raises inside ends the block on all of them."""
        self._over = False
        try:
            yield
        except BaseException as failure:
            with contextlib.suppress(RankError):
                if self._leads:
                    self._settle([self._describe(failure)])
                elif not self._over:
                    self.exchange(self._describe(failure))
            raise

    def exchange(self, value: Any, last: bool = False) -> list[Any]:
        """What every rank gave, on every rank; `last` says that nothing follows."""
        if self.rank:
            self._send(0, value)
        return self._settle([] if self.rank else [value, *map(self._receive, self._others)], last)

    def first(self, work: Callable[[], T], last: bool = False) -> T:
        """What the work gives on rank 0, on every rank; the others wait."""
        return self.exchange(None if self.rank else work(), last)[0]

    def lead(self, work: Callable[[], T], answer: Callable[..., Any]) -> T:
        """What the work gives on rank 0, on every rank; the others answer the questions that it asks."""
        self._leads = not self.rank
        return self._settle([] if self.rank else [work()], answer=answer)[0]

    def ask(self, *question: Any) -> Callable[[], list[Any]]:
        """Ask the other ranks; returns a function that waits for their answers."""
        for rank in self._others:
            self._send(rank, question)
        return lambda: _checked([self._receive(rank) for rank in self._others])

    def divide(
        self, sizes: Mapping[str, int], work: Callable[[list[str]], dict[str, T]]
    ) -> dict[str, T]:
        """Do the work by names, each on one rank: the largest first, on the rank with the least to do."""
        loads = [0.0] * self.size
        mine = []
        largest = max(sizes.values())
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            owner = loads.index(min(loads))
            loads[owner] += (
                1 + sizes[name] / largest
            )  # a product costs something, however small the block
            mine += [name] if owner == self.rank else []
        return {name: one for part in self.exchange(work(mine)) for name, one in part.items()}

    def _settle(self, found: Any, last: bool = False, answer: Callable[..., Any] = tuple) -> Any:
        """Rank 0 tells the others what was found; these answer its questions until then."""
        self._leads = False
        failure = None
        for rank in () if self.rank else self._others:
            self._send(rank, found)  # who is gone will be missed in the next exchange
        while self.rank and isinstance(found := self._receive(0), tuple):
            try:
                reply = answer(*found)
            except BaseException as caught:  # rank 0 hears of it, and ends all of them
                failure = caught
                reply = self._describe(caught)
            self._send(0, reply)
        found = [found] if isinstance(found, Failure) else found
        self._over = last or any(isinstance(one, Failure) for one in found)
        if failure is not None:
            raise failure
        return _checked(found)

    def _describe(self, failure: BaseException) -> Failure:
        text = f"failed on rank {self.rank}, so that every rank stops: {type(failure).__name__}: {failure}"
        return Failure(str(failure) if isinstance(failure, RankError) else f"{self.doing} {text}")

    def _send(self, to: int, value: Any) -> None:
        data = pickle.dumps(value)
        # The length and the beginning go together: a message costs more than its bytes.
        beginning = len(data).to_bytes(8, "little") + data[:_BEGINNING].ljust(_BEGINNING, b"\0")
        for part in filter(None, (beginning, data[_BEGINNING:])):
            self._reach(to, dist.send, torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def _receive(self, source: int) -> Any:
        data = b""
        left = 8 + _BEGINNING
        while left > 0:
            found = torch.empty(left, dtype=torch.uint8)
            self._reach(source, dist.recv, found)
            if source in self._lost:
                return Failure(
                    f"{self.doing} stopped on every rank: rank {source} {self._lost[source]}."
                )
            data += found.numpy().tobytes()
            left = 8 + int.from_bytes(data[:8], "little") - len(data)
        return pickle.loads(data[8:])

    def _reach(self, rank: int, transfer: Callable[..., Any], tensor: Tensor) -> None:
        try:
            if rank not in self._lost:
                transfer(tensor, rank, group=self._group)
        except RuntimeError as failure:
            self._lost[rank] = _SLOW if "timed out" in str(failure).lower() else _GONE

    def agree(self, given: Mapping[str, Any], *, same_weights: bool) -> list[Batch]:
        """Refuse, on every rank, options or models that differ between the ranks; returns the batches."""
        check_model(given["model"], given.get("forward"))
        model = unwrap(given["model"])
        check_present(model)
        if any(isinstance(one, nn.SyncBatchNorm) and one.training for one in model.modules()):
            way = 'call model.eval(), or pass it before convert_sync_batchnorm, with distributed="layers"'
            raise ProblemError(
                f"SyncBatchNorm in train mode talks to other ranks in its forward; {way}."
            )
        batches = [one for _, one in read_batches(given["batch"])]
        options = {**given, **given.get("options", {}), **_PRINTS, "distributed": self.split}
        named = [*model.named_parameters()]
        modules = dict(model.named_modules())
        for place, one in modules.items():
            kept = (
                () if one.training else one.named_buffers(recurse=False)
            )  # in training they are written to
            named += [(f"{place}.{name}", buffer) for name, buffer in kept]
        facts = {
            ("option", name): repr(one) for name, one in options.items() if isinstance(one, _PLAIN)
        }
        facts |= {
            ("model", name or "the model"): f"training={one.training}"
            for name, one in modules.items()
        }
        facts |= {
            ("model", n): f"{tuple(p.shape)}, {p.dtype}, trained={p.requires_grad}"
            for n, p in named
        }
        facts |= {("values", name): _digest([one]) for name, one in named if same_weights}
        if self.split == "layers":
            facts["batch", "the batch"] = _digest(
                tensors_in([(one.inputs, one.targets) for one in batches])
            )
        every = self.exchange(facts)
        for rank, other in enumerate(every):
            for kind, name in {**every[0], **other}:
                first, own = (one.get((kind, name), "missing") for one in (every[0], other))
                if first != own:
                    why = f"{name} is {own} on rank {rank}, and {first} on rank 0"
                    raise ProblemError(f"{why}: {_RULES[kind]}.")
        return batches

    def join(self, batches: list[Batch]) -> list[Batch]:
        """The examples of all ranks as one batch, or as several where they do not fit together."""
        if self.split == "layers":
            return batches
        found = list(
            itertools.chain(*self.exchange(map_tensors(lambda one: one.detach().cpu(), batches)))
        )
        tensors = [
            (one, batch.size)
            for batch in found
            for one in tensors_in([batch.inputs, batch.targets])
        ]
        counted = len(found) == self.size and all(
            one.ndim and len(one) % size == 0 for one, size in tensors
        )
        joined = join_batches(found) if counted else None
        return found if joined is None else [joined]


def is_one_of_several() -> bool:
    """Whether this process is a rank of a job of more than one."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def on_all_ranks(
    alone: Callable[[Ranks, Any, Callable[[], Any]], Any] | None = None,
    splits: Sequence[str] = ("batch", "layers", "each"),
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let the ranks of a job call a verb together, which finds the `Ranks` in place of `distributed`.

    Or `alone`, which gets ranks, model and verb, runs it on rank 0, on the examples of all ranks.
    `splits` is what `distributed` may be: with "each", a rank calls the verb for itself, and it
    must say so.
    """

    def decorate(verb: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(verb)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            split = kwargs.get("distributed")
            if split is None and not is_one_of_several():
                return verb(*args, **kwargs)
            bound = inspect.signature(verb).bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            choose("distributed", "each" if split is None else split, list(splits))
            if split is None or split == "each":
                model = given.get("model", given.get("problem"))
                model = model.model if isinstance(model, Problem) else model
                _check_each(verb.__name__, split, model, together="batch" in splits)
                given["distributed"] = None
                return verb(*bound.args, **bound.kwargs)
            ranks = Ranks(verb.__name__, split)
            with ranks.together():
                options = _flatten(given)
                batches = ranks.agree(options, same_weights=not verb.__name__.endswith("_"))
                batches = ranks.join(batches) if alone else batches
                pairs = [(batch.inputs, batch.targets) for batch in batches]
                if "problem" in given:
                    problem = as_problem(given["problem"], given["loss"], given["batch"])
                    given.update(problem=replace(problem, batch=pairs), loss=None, batch=None)
                else:
                    given["batch"] = pairs
                given["distributed"] = None if alone else ranks
                work = functools.partial(verb, *bound.args, **bound.kwargs)
                return alone(ranks, options["model"], work) if alone else work()

        return called

    return decorate


def _flatten(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a verb, with those of its problem under their own names."""
    options = dict(given)
    if "problem" in options:
        problem = as_problem(options.pop("problem"), options["loss"], options["batch"])
        options |= {field.name: getattr(problem, field.name) for field in fields(problem)}
    return options


def _check_each(verb: str, split: str | None, model: Any, *, together: bool) -> None:
    """Refuse to work for one rank alone where nobody asked for it, or where the ranks share one model."""
    modules = [*model.modules()] if isinstance(model, nn.Module) else []
    is_shared = any(isinstance(one, nn.parallel.DistributedDataParallel) for one in modules)
    if modules:
        check_present(unwrap(model))
    if split is None or is_shared:
        given = "without distributed=" if split is None else f'with distributed="{split}"'
        why = f"{verb} {given} works on the data and the weights of this process alone"
        raise ProblemError(f"{why}, {_ALONE[is_shared, together]}.")


def share_weights(model: nn.Module) -> None:
    """Give every rank the first one's parameters and buffers, bit for bit and in place."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    device = next(
        model.parameters()
    ).device  # NCCL sends nothing from the CPU, where a buffer may well be
    for tensor in (*model.parameters(), *model.buffers()):
        own = tensor.detach()
        # As bytes: backends do not know every dtype, and no bit of a nan may change.
        sent = own.contiguous().reshape(-1).view(torch.uint8).to(device)
        dist.broadcast(sent, src=0)
        if sent.data_ptr() != own.data_ptr():
            own.copy_(sent.view(own.dtype).view_as(own))


def _checked(found: list[Any]) -> list[Any]:
    for one in found:
        if isinstance(one, Failure):
            raise RankError(one)
    return found


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for one in tensors:
        plain = one.detach().to_dense() if one.layout is not torch.strided else one.detach()
        found.update(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"one with the digest {found.hexdigest()}"
