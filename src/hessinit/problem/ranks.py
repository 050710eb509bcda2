"""The ranks of a distributed job that call a verb together: their messages, and which one is lost.

Every message goes between rank 0 and one other rank (`send_object_list`), not through
`all_gather_object` or `broadcast_object_list`: in the ring or tree of a collective, a lost rank
leaves the others waiting until the timeout, and none of them learns which rank it was.

For the same reason rank 0 alone decides in a measurement of shared examples, and asks the others
for products. If every rank ran Lanczos on the summed products, ranks that round differently would
stop at different steps.

The forward of a model that FSDP2 has sharded communicates itself, so there every rank runs the same
program in lockstep, and its inner products are sums over the ranks. A rank that fails writes the
reason to the store of the job. If others still wait for it in a collective, it closes its
connections, which ends their wait; they then do the same for those that wait for them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hessinit.errors import ProblemError, RankError, choose
from hessinit.problem.batches import Batch, join_batches, map_tensors, read_batches, tensors_in
from hessinit.problem.checks import check_finite_inputs, check_model, check_present, unwrap
from hessinit.problem.problem import Problem, as_problem
from hessinit.problem.shards import find_mesh, is_dtensor, is_sharded, reshard

P = ParamSpec("P")
T = TypeVar("T")

# A backend that cannot send from the CPU, such as NCCL, gets a gloo group for messages beside it.
_gloo_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_calling: ContextVar[Ranks | None] = ContextVar("calling_ranks", default=None)

# Options of these types are compared between the ranks by their repr; data and loggers are not.
_COMPARED_TYPES = (str, int, float, type(None), torch.dtype, list, tuple)
_NOT_COMPARED = {"batch", "data", "log_to"}
_ENDED = "ended, or its connection was lost. Its own output may say why; start the job again"
_CLOSED = "(The process group is closed.)"
_TIMED_OUT = (
    "did not answer in time. Make the same calls on every rank, or raise init_process_group's "
    "timeout"
)
_SAME_ON_ALL_RANKS = {
    "option": "all ranks must pass the same options; pass one value everywhere",
    "model": "all ranks must pass the same model, in the same mode; build it in the same way "
    "everywhere",
    "values": "all ranks must hold the same values; broadcast them first, as "
    "DistributedDataParallel does",
    "number": "the ranks of a sharded model run each batch together; pass the same number "
    "everywhere",
    "batch": 'with distributed="layers" all ranks must pass the same batch; for shares choose '
    '"batch"',
}
_TOGETHER = (
    'pass distributed="batch" on every rank (each with its share of the examples), or "layers" '
    "(all with the same batch)"
)


@dataclass(frozen=True)
class LockstepRules:
    """How long a rank that has failed waits; all that refuse the same do so nearly at once."""

    # For the others to fail, too. Then they must be waiting for it, and it closes its connections.
    patience: timedelta = timedelta(seconds=10)
    # Rank 0 holds the store of most jobs, and waits this long for the others to read the reason.
    farewell: timedelta = timedelta(seconds=20)
    tag: int = 20_230  # of messages that nobody sends


LOCKSTEP = LockstepRules()
_calls = itertools.count()  # of ranks in lockstep: the same number on all of them
# torch raises a plain RuntimeError where gloo lost a connection.
_DISCONNECTED = re.compile(r"gloo|nccl|Connection (closed|reset)", re.IGNORECASE)


class _Question(NamedTuple):
    """What rank 0 asks the others while it leads them."""

    arguments: tuple[Any, ...]


class Ranks:
    """The processes of a job that make one call together.

    An exception on one rank becomes a `RankError` on the others that names the rank. If the model
    is `sharded`, every rank runs the same program in lockstep, on its own shards and examples;
    `share` is this rank's fraction of the rows of all ranks.
    """

    def __init__(self, call: str, split: str = "batch", sharded: bool = False) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ProblemError(
                f'distributed="{split}" needs a process group, and none is initialized; start the '
                "program with torchrun and call torch.distributed.init_process_group() first, or "
                "leave distributed= out."
            )
        self.call = call
        self.split = split
        self.sharded = sharded
        self.share = 1.0
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._others = range(1, self.size)
        self._lost = dict[int, str]()
        self._leads = False  # the other ranks wait for questions
        self._is_over = False  # no other rank waits for this one
        world: Any = dist.group.WORLD
        if "cpu:gloo" not in dist.get_backend_config() and world not in _gloo_groups:
            _gloo_groups[world] = dist.new_group(backend="gloo")
        self._group = _gloo_groups.get(world, world)
        self._mesh_group = self._group
        self._model = nn.Module()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """End the block on every rank as soon as it raises on one of them."""
        self._is_over = False
        try:
            yield
        except BaseException as failure:
            with contextlib.suppress(RankError):
                if self._leads:
                    self._publish([self._describe(failure)])
                elif not self._is_over:
                    self.exchange(self._describe(failure))
            raise

    def exchange(self, value: Any, last: bool = False) -> list[Any]:
        """Return the values that all ranks passed; `last` says that no other exchange follows."""
        if self.rank:
            self._send(0, value)
            return self._answer_until_published(last=last)
        return self._publish([value, *map(self._receive, self._others)], last)

    def first(self, work: Callable[[], T], last: bool = False) -> T:
        """Return the result of rank 0 on every rank; the others wait, or work in lockstep."""
        result = None
        if self.sharded or not self.rank:
            with self.in_lockstep():
                result = work()
        return self.exchange(None if self.rank else result, last)[0]

    def lead(self, work: Callable[[], T], answer: Callable[..., Any]) -> T:
        """Return the result of rank 0 on every rank; the others answer its questions meanwhile."""
        if self.rank:
            return self._answer_until_published(answer)[0]
        self._leads = True
        return self._publish([work()])[0]

    def ask(self, *arguments: Any) -> Callable[[], list[Any]]:
        """Ask the other ranks; return a function that waits for their answers."""
        for rank in self._others:
            self._send(rank, _Question(arguments))
        return lambda: _refuse_failures([self._receive(rank) for rank in self._others])

    def divide(
        self, sizes: Mapping[str, int], work: Callable[[list[str]], dict[str, T]]
    ) -> dict[str, T]:
        """Divide the work by names, the largest first: each goes to the rank with least to do."""
        loads = [0.0] * self.size
        largest = max(sizes.values())
        names = list[str]()
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            owner = loads.index(min(loads))
            # A product costs something, however small the block is.
            loads[owner] += 1 + sizes[name] / largest
            if owner == self.rank:
                names.append(name)
        results = self.exchange(work(names))
        return {name: result for share in results for name, result in share.items()}

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks in float64, the same bits on every rank."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the largest of the tensors of all ranks, entry by entry, in float64."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        total = tensor.detach().to(torch.float64, copy=True)
        group = self._group if total.device.type == "cpu" else self._mesh_group
        dist.all_reduce(total, operation, group=group)
        return total

    @contextlib.contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Let a block that runs collectives of the user's model end alike on every rank."""
        if not self.sharded or lockstep_ranks() is self:
            yield
            return
        reshard(self._model)  # whatever the last forward has gathered
        self._key = f"hessinit/{next(_calls)}"  # in the store of the job
        self._settled = 0
        self._has_failed = False
        try:
            with _made_by(self):
                yield
            self.settle()
        except BaseException as failure:
            try:
                self.settle(failure)
            except RankError as lost:
                if _is_disconnection(failure):
                    raise lost from failure
            finally:
                self._is_over = True
            raise

    def settle(self, failure: BaseException | None = None) -> None:
        """Return once all ranks in lockstep are here, either all with a failure or all without.

        Otherwise raise a RankError that names the first rank that failed or was lost. A rank that
        fails while others wait for it in a collective closes its connections, which ends the wait.
        """
        if self._has_failed:
            return
        self._settled += 1
        store = _store()
        keys = [f"{self._key}/{self._settled}/{rank}" for rank in range(self.size)]
        reason = ""
        try:
            if failure is not None:
                if _is_disconnection(failure):
                    raise failure
                reason = str(self._describe(failure))
            store.set(keys[self.rank], reason)
            if reason:
                store.wait(keys, LOCKSTEP.patience)
            dist.barrier(self._group)
            reasons = [store.get(key).decode() for key in keys]
        except RuntimeError:
            self._has_failed = True
            raise RankError(f"{self._close(reason)} {_CLOSED}") from failure
        first = next(filter(None, reasons), "")
        if first and not all(reasons):
            self._has_failed = True
            raise RankError(first) from failure

    def _close(self, reason: str) -> str:
        """Close the connections of this rank, so that no other rank waits for it.

        Returns what ended the call first: the `reason` of this rank, or that of another.
        """
        store = _store()
        ranks = [rank for rank in range(self.size) if rank != self.rank]
        works = {rank: _receive_nothing(rank, self._group) for rank in ranks}
        lost = [rank for rank, work in works.items() if work is None]
        end = f"rank {lost[0]} {_ENDED}" if lost else f"some rank {_TIMED_OUT}"
        reason = reason or f"{self.call} stopped on every rank: {end}."
        with contextlib.suppress(RuntimeError):  # the store ended with rank 0
            reason = store.compare_set(self._key, "", reason).decode()
            store.set(f"{self._key}/read/{self.rank}", "")
        for work in (
            *works.values(),
            *(_receive_nothing(rank, self._mesh_group) for rank in ranks),
        ):
            # When a receive times out, gloo fails all other transfers of this rank, too.
            with contextlib.suppress(RuntimeError):
                if work is not None:
                    work.wait(timedelta(milliseconds=1))
        if not self.rank:
            keys = [f"{self._key}/read/{rank}" for rank in ranks if rank not in lost]
            with contextlib.suppress(RuntimeError):
                store.wait(keys, LOCKSTEP.farewell)
        return reason

    def _publish(self, values: list[Any], last: bool = False) -> list[Any]:
        """Send the values from rank 0 to every other rank, and return them."""
        self._leads = False
        for rank in self._others:
            self._send(rank, values)  # a lost rank is noticed in the next exchange
        return self._end(values, last)

    def _answer_until_published(
        self, answer: Callable[..., Any] = tuple, last: bool = False
    ) -> list[Any]:
        """Answer the questions of rank 0 until it publishes values, and return these.

        If there is no answer, `together` sends the reason.
        """
        while isinstance(message := self._receive(0), _Question):
            self._send(0, answer(*message.arguments))
        return self._end([message] if isinstance(message, RankError) else message, last)

    def _end(self, values: list[Any], last: bool) -> list[Any]:
        self._is_over = last or any(isinstance(value, RankError) for value in values)
        return _refuse_failures(values)

    def _describe(self, failure: BaseException) -> RankError:
        """Return what is sent to the other ranks in place of a value."""
        if isinstance(failure, RankError):
            return failure
        return RankError(
            f"{self.call} failed on rank {self.rank}, so that every rank stops: "
            f"{type(failure).__name__}: {failure}"
        )

    def _send(self, rank: int, value: Any) -> None:
        self._reach(rank, dist.send_object_list, [value])

    def _receive(self, rank: int) -> Any:
        values = [None]
        self._reach(rank, dist.recv_object_list, values)
        if rank in self._lost:
            return RankError(f"{self.call} stopped on every rank: rank {rank} {self._lost[rank]}.")
        return values[0]

    def _reach(self, rank: int, transfer: Callable[..., Any], values: list[Any]) -> None:
        if rank in self._lost:
            return
        try:
            transfer(values, rank, group=self._group)
        except RuntimeError as failure:
            self._lost[rank] = _TIMED_OUT if "timed out" in str(failure).lower() else _ENDED

    def agree(self, options: Mapping[str, Any], *, same_weights: bool) -> list[Batch]:
        """Return the batches; refuse options, models or batches that differ where they must not."""
        check_model(options["model"], options.get("forward"))
        model = unwrap(options["model"])
        check_present(model, sharded=self.sharded)
        if self.sharded:
            self._model = model
            reshard(model)
            self._mesh_group = find_mesh(model, self.size).get_group()
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm) and module.training:
                raise ProblemError(
                    "SyncBatchNorm in train mode communicates in its forward; call model.eval(), "
                    "or pass the model before convert_sync_batchnorm, with "
                    'distributed="layers".'
                )
        batches = [batch for _, batch in read_batches(options["batch"])]
        facts = {
            ("option", name): repr(option)
            for name, option in options.items()
            if isinstance(option, _COMPARED_TYPES) and name not in _NOT_COMPARED
        }
        facts |= _describe_model(model, same_weights)
        if self.sharded:
            facts["number", "the number of batches"] = str(len(batches))
        if self.split == "layers":
            pairs = [(batch.inputs, batch.targets) for batch in batches]
            facts["batch", "the batch"] = _digest(tensors_in(pairs))
        _refuse_differences(self.exchange(facts))
        if self.sharded:
            for batch in batches:
                check_finite_inputs(batch.inputs, "")  # before any rank waits for this one
            rows = self.exchange(sum(batch.rows for batch in batches))
            self.share = rows[self.rank] / sum(rows)
        return batches

    def join(self, batches: list[Batch]) -> list[Batch]:
        """Return the examples of all ranks, as one batch if possible; in lockstep, this rank's."""
        if self.split == "layers" or self.sharded:
            return batches
        shares = self.exchange(map_tensors(lambda tensor: tensor.detach().cpu(), batches))
        batches = [batch for share in shares for batch in share]
        can_be_joined = len(batches) == self.size and all(map(_counts_examples, batches))
        joined = join_batches(batches) if can_be_joined else None
        return batches if joined is None else [joined]


def is_one_of_several() -> bool:
    """Whether this process is a rank of a job of more than one."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def calling_ranks() -> Ranks | None:
    """Return the ranks that make the current call of a verb together, or None.

    `on_all_ranks` sets them for the time of the call.
    """
    return _calling.get()


def lockstep_ranks() -> Ranks | None:
    """Return the ranks that make the current call in lockstep, as the model is sharded, or None."""
    ranks = calling_ranks()
    return ranks if ranks is not None and ranks.sharded else None


def mean_over_ranks(loss: Tensor) -> Tensor:
    """Return the mean loss of the rows of all ranks in lockstep; else the loss itself."""
    ranks = lockstep_ranks()
    return loss if ranks is None else ranks.sum(ranks.share * loss)


def smallest_over_ranks(number: float) -> float:
    """Return the smallest of the numbers of all ranks in lockstep; else the number itself."""
    ranks = lockstep_ranks()
    return number if ranks is None else -float(ranks.max(torch.tensor(-float(number))))


def on_any_rank(condition: bool) -> bool:
    """Whether the condition holds on any of the ranks in lockstep, or here if there are none."""
    return not smallest_over_ranks(not condition)


def length_over_ranks(length: float) -> float:
    """Return the length of a vector from that of this rank's part, where ranks are in lockstep."""
    ranks = lockstep_ranks()
    return length if ranks is None else float(ranks.sum(torch.tensor(length).square()).sqrt())


def require_alike(failure: Exception) -> None:
    """Return if all ranks in lockstep have failed here, or none is in it; else end their call."""
    if isinstance(failure, RankError):
        raise failure
    if (ranks := lockstep_ranks()) is not None:
        ranks.settle(failure)


@contextlib.contextmanager
def tolerating(*failures: type[Exception]) -> Iterator[None]:
    """Suppress these exceptions; ranks in lockstep do so only if all of them raise one here."""
    try:
        yield
    except failures as failure:
        require_alike(failure)


def on_all_ranks(
    run: Callable[[Ranks, Any, Callable[[], Any]], Any] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let the ranks of a job call a verb together, as its argument `distributed` says.

    The verb gets the ranks from `calling_ranks`. With `run(ranks, model, work)`, `work` calls the
    verb for one process: on the examples of all ranks, and without `calling_ranks`.
    """

    def decorate(verb: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(verb)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            if lockstep_ranks() is not None:  # called by another verb
                return verb(*args, **kwargs)
            split: Any = kwargs.get("distributed")
            if split is not None or is_one_of_several():
                choose("distributed", split or "each", ["batch", "layers", "each"])
                bound = inspect.signature(verb).bind(*args, **kwargs)
                bound.apply_defaults()
                problem = bound.arguments["problem"]
                model = problem.model if isinstance(problem, Problem) else problem
                if split in ("batch", "layers"):
                    sharded = split == "batch" and is_sharded(model)
                    return _call_on_all(Ranks(verb.__name__, split, sharded), verb, bound, run)
                _refuse_one_rank_alone(verb.__name__, split, model, _TOGETHER)
            with _made_by(None):
                return verb(*args, **kwargs)

        return called

    return decorate


def _call_on_all(
    ranks: Ranks,
    verb: Callable[..., T],
    bound: inspect.BoundArguments,
    run: Callable[[Ranks, Any, Callable[[], Any]], Any] | None,
) -> T:
    """Call the verb on what all ranks pass, as `on_all_ranks` says."""
    with ranks.together():
        arguments = bound.arguments
        problem = as_problem(arguments["problem"], arguments["loss"], arguments["batch"])
        arguments.update(problem=problem, loss=None, batch=None)  # an iterator is read only once
        options = arguments | {
            field.name: getattr(problem, field.name) for field in fields(problem)
        }
        batches = ranks.agree(options, same_weights=not ranks.call.endswith("_"))
        if run is not None:
            batches = ranks.join(batches)
            arguments["distributed"] = None
        pairs = [(batch.inputs, batch.targets) for batch in batches]
        problem = replace(problem, batch=pairs)
        arguments["problem"] = problem
        work = functools.partial(verb, *bound.args, **bound.kwargs)
        caller = None if run and not ranks.sharded else ranks
        with ranks.in_lockstep(), _made_by(caller):
            return work() if run is None else run(ranks, problem.model, work)


@contextlib.contextmanager
def _made_by(ranks: Ranks | None) -> Iterator[None]:
    token = _calling.set(ranks)
    try:
        yield
    finally:
        _calling.reset(token)


def check_each(verb: str, distributed: Any, model: Any = None) -> None:
    """Refuse a verb that ranks cannot call together, unless the caller passes "each"."""
    if distributed is not None:
        choose("distributed", distributed, ["each"])
    if distributed is not None or is_one_of_several():
        _refuse_one_rank_alone(verb, distributed, model)


def _refuse_one_rank_alone(verb: str, split: Any, model: Any, together: str = "") -> None:
    """Refuse to work for one rank alone if nobody asked for it, or if replicas would differ."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if modules:
        check_present(unwrap(model))
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules):
        way_out = together or 'call it before the model is wrapped, with distributed="each"'
        reason = f"and the replicas of DistributedDataParallel must stay alike; {way_out}"
    elif split is None:
        way_out = f'{together}, or "each"' if together else 'pass distributed="each"'
        reason = f"which is one of several; {way_out} if every process is to work for itself"
    else:
        return
    passed = "without distributed=" if split is None else f'with distributed="{split}"'
    raise ProblemError(
        f"{verb} {passed} works on the data and the weights of this process alone, {reason}."
    )


def share_weights(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, bit for bit and in place."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    # NCCL sends nothing from the CPU, where a buffer may well be.
    device = next(model.parameters()).device
    for tensor in (*model.parameters(), *model.buffers()):
        target = tensor.detach()
        # As bytes: backends do not know every dtype, and no bit of a nan may change.
        sent = target.contiguous().reshape(-1).view(torch.uint8).to(device)
        dist.broadcast(sent, src=0)
        if sent.data_ptr() != target.data_ptr():
            target.copy_(sent.view(target.dtype).view_as(target))


def _receive_nothing(rank: int, group: Any) -> Any:
    """Start to receive what nobody sends; None if there is no connection."""
    with contextlib.suppress(RuntimeError):
        return dist.irecv(torch.empty(1), rank, group=group, tag=LOCKSTEP.tag)
    return None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _is_disconnection(failure: BaseException) -> bool:
    """Whether a lost connection is the failure or its cause."""
    cause = failure.__cause__
    return (
        isinstance(failure, RankError)
        or (isinstance(failure, RuntimeError) and _DISCONNECTED.search(str(failure)) is not None)
        or (cause is not None and _is_disconnection(cause))
    )


def _refuse_failures(values: list[Any]) -> list[Any]:
    for value in values:
        if isinstance(value, RankError):
            raise value
    return values


def _describe_model(model: nn.Module, same_weights: bool) -> dict[tuple[str, str], str]:
    """Shapes, modes and, if the weights must be the same, digests by name."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    facts = dict[tuple[str, str], str]()
    for path, module in model.named_modules():
        facts["model", path or "the model"] = f"training={module.training}"
        if not module.training:  # training writes to buffers
            for name, buffer in module.named_buffers(recurse=False):
                tensors[f"{path}.{name}"] = buffer
    for name, tensor in tensors.items():
        shape = f"{tuple(tensor.shape)}, {tensor.dtype}, trained={tensor.requires_grad}"
        facts["model", name] = shape
        if same_weights and not is_dtensor(tensor):
            facts["values", name] = _digest([tensor])
    return facts


def _refuse_differences(facts: list[dict[tuple[str, str], str]]) -> None:
    """Raise if the facts of any rank differ from those of rank 0."""
    first = facts[0]
    for rank, facts_there in enumerate(facts):
        for kind, name in {**first, **facts_there}:
            expected = first.get((kind, name), "missing")
            actual = facts_there.get((kind, name), "missing")
            if actual != expected:
                raise ProblemError(
                    f"{name} is {actual} on rank {rank}, and {expected} on rank 0: "
                    f"{_SAME_ON_ALL_RANKS[kind]}."
                )


def _counts_examples(batch: Batch) -> bool:
    """Whether the first dimension of every tensor is a multiple of the number of examples."""
    tensors = tensors_in([batch.inputs, batch.targets])
    return all(tensor.ndim and len(tensor) % batch.size == 0 for tensor in tensors)


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        dense = tensor.detach()
        if dense.layout is not torch.strided:
            dense = dense.to_dense()
        digest.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"one with the digest {digest.hexdigest()}"
