"""The ranks of a distributed job that call a verb together: agreement, messages, and who is missing.

The ranks form a star: rank 0 hears from every other one, and every other one from rank 0. So whoever waits
knows for whom, and a connection that closes names the rank that is gone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm

from hessinit.errors import ProblemError, RankError, choose
from hessinit.problem.batches import Batch, map_tensors, read_batches, tensors_in
from hessinit.problem.validate import check_model, check_present, unwrap

P = ParamSpec("P")
T = TypeVar("T")

_PLAIN = (str, int, float, bool, type(None), torch.dtype)
# A group for messages beside one that knows no CPU, as NCCL's.
_BESIDE: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Failure:
    """Sent in place of a value: why there is none."""

    text: str


@dataclass(frozen=True)
class Outcome:
    """The last message of rank 0 to ranks that work for it."""

    value: Any


class Ranks:
    """The processes of a job. A failure on one of them becomes a `RankError` on the others that names it."""

    def __init__(self, doing: str, split: Any = "batch") -> None:
        choose("distributed", split, ["batch", "layers"])
        if not (dist.is_available() and dist.is_initialized()):
            raise ProblemError(
                f'distributed="{split}" needs a process group, and none is initialized. Start the program '
                "with torchrun and call torch.distributed.init_process_group() first; in one process, leave "
                "distributed= out."
            )
        self.doing, self.split = doing, split
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.others = range(1, self.size)
        self.leads = False  # others wait for products, not in an exchange
        self._over = False  # nobody waits for this rank any more
        self._lost: dict[int, str] = {}
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
            if not self._over:
                self._tell(failure)
            raise

    def _tell(self, failure: BaseException) -> None:
        text = f"{type(failure).__name__}: {failure}"
        text = f"{self.doing} failed on rank {self.rank}, so that every rank stops: {text}"
        told = Failure(str(failure) if isinstance(failure, RankError) else text)
        if self.leads:
            self.conclude(told)
            return
        with contextlib.suppress(RankError):
            self.exchange(told)

    def exchange(self, value: Any, last: bool = False) -> list[Any]:
        """What every rank gave, on every rank; `last` says that nothing follows."""
        if self.rank:
            self.send(0, value)
            found: list[Any] = self.receive(0)
        else:
            found = [value, *map(self._hear, self.others)]
            for rank in self.others:
                with contextlib.suppress(RankError):  # it will be missed in the next exchange
                    self.send(rank, found)
        failures = [one.text for one in found if isinstance(one, Failure)]
        self._over = last or bool(failures)
        if failures:
            raise RankError(failures[0])
        return found

    def first(self, work: Callable[[], T], last: bool = False) -> T:
        """What the work gives on rank 0, on every rank; the others wait."""
        found: T = self.exchange(None if self.rank else work(), last)[0]
        return found

    def conclude(self, value: Any) -> None:
        """On rank 0: release the ranks that work for it."""
        self.leads, self._over = False, True
        for rank in self.others:
            with contextlib.suppress(RankError):
                self.send(rank, Outcome(value))

    def accept(self, outcome: Outcome) -> Any:
        """The value of the last message, on the other ranks."""
        self._over = True
        if isinstance(outcome.value, Failure):
            raise RankError(outcome.value.text)
        return outcome.value

    def divide(self, costs: Mapping[str, float], work: Callable[[list[str]], dict[str, T]]) -> dict[str, T]:
        """Do the work by names, each on one rank; the most costly ones first, to the rank with least to do."""
        loads, mine = [0.0] * self.size, []
        for name in sorted(costs, key=lambda name: -costs[name]):
            owner = loads.index(min(loads))
            loads[owner] += costs[name]
            mine += [name] if owner == self.rank else []
        return {name: one for part in self.exchange(work(mine)) for name, one in part.items()}

    def send(self, to: int, value: Any) -> None:
        place = torch.device("cpu")
        self._reach(to, lambda: dist.send_object_list([value], to, group=self._group, device=place))

    def receive(self, source: int) -> Any:
        box, place = [None], torch.device("cpu")
        self._reach(source, lambda: dist.recv_object_list(box, source, group=self._group, device=place))
        return box[0]

    def send_tensor(self, to: int, tensor: Tensor) -> None:
        self._reach(to, lambda: dist.send(tensor.detach().cpu().contiguous(), to, group=self._group))

    def receive_tensor(self, source: int, like: Tensor) -> Tensor:
        found = torch.empty_like(like, device="cpu")
        self._reach(source, lambda: dist.recv(found, source, group=self._group))
        return found.to(like.device)

    def _hear(self, source: int) -> Any:
        try:
            return self.receive(source)
        except RankError as missing:
            return Failure(str(missing))

    def _reach(self, rank: int, transfer: Callable[[], Any]) -> None:
        if rank not in self._lost:
            try:
                transfer()
                return
            except RuntimeError as failure:
                self._lost[rank] = (
                    "did not answer in time: it is slow, or waits elsewhere. Every rank must make the same "
                    "calls; init_process_group(timeout=…) waits longer."
                    if "timed out" in str(failure).lower()
                    else "ended, or its connection was lost. Look for the reason in its own output, and "
                    "start the job again."
                )
        raise RankError(f"{self.doing} stopped on every rank: rank {rank} {self._lost[rank]}")

    # --- Agreement ---

    def agree(self, given: Mapping[str, Any], *, same_weights: bool) -> list[Batch]:
        """Refuse, on every rank, options or models that differ between the ranks; returns the batches."""
        check_model(given["model"], given.get("forward"))
        model = unwrap(given["model"])
        check_present(model)
        for name, module in model.named_modules():
            if isinstance(module, SyncBatchNorm) and module.training:
                raise ProblemError(
                    f"{name or 'the model'} is a SyncBatchNorm in train mode: its forward talks to the other "
                    "ranks, and its examples see each other. Call model.eval(), or pass the model before "
                    'convert_sync_batchnorm, with distributed="layers".'
                )
        batches = [one for _, one in read_batches(given["batch"])]
        options = {**given, **given.get("options", {}), "distributed": self.split}
        facts = {("option", name): shown for name, one in options.items() if (shown := _show(one))}
        for name, one in model.named_parameters():
            facts["model", name] = f"{tuple(one.shape)} {one.dtype}" + " frozen" * (not one.requires_grad)
        facts["model", "the mode"] = str([module.training for module in model.modules()])
        if same_weights:
            named = [*model.named_parameters(), *model.named_buffers()]
            facts |= {("values", name): _digest([one]) for name, one in named}
        if self.split == "layers":
            facts["batch", ""] = _digest(tensors_in([(one.inputs, one.targets) for one in batches]))
        every = self.exchange(facts)
        for rank, other in enumerate(every):
            for kind, name in {**every[0], **other}:
                pair = every[0].get((kind, name)), other.get((kind, name))
                if pair[0] != pair[1]:
                    raise ProblemError(_disagreement(kind, name, rank, *pair))
        return batches

    def join(self, batches: Sequence[Batch]) -> Any:
        """On rank 0, the examples of all ranks as one batch, or as a list where they do not fit together."""
        if self.split == "layers":
            found: list[Batch] = list(batches)
        else:
            shares = self.exchange([_moved(one, torch.device("cpu")) for one in batches])
            found = [one for share in shares for one in share] if not self.rank else list(batches)
        pairs = [(one.inputs, one.targets) for one in found]
        if len(found) != self.size or self.split == "layers" or self.rank:
            return pairs if len(pairs) > 1 else pairs[0]
        return _joined(found) or pairs


def on_all_ranks(verb: Callable[P, T]) -> Callable[P, T]:
    """Let the ranks of a job call a verb together; it finds the `Ranks` in place of `distributed`."""
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if kwargs.get("distributed") is None:
            return verb(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        ranks = Ranks(verb.__name__, given["distributed"])
        with ranks.together():
            batches = ranks.agree(given, same_weights=verb.__name__ != "initialize_")
            given["batch"] = [(one.inputs, one.targets) for one in batches]
            given["batch"] = given["batch"] if len(batches) > 1 else given["batch"][0]
            given["distributed"] = ranks
            return verb(*bound.args, **bound.kwargs)

    return called


def share_weights(model: nn.Module) -> None:
    """Give every rank the first one's parameters and buffers, bit for bit and in place."""
    device = next(model.parameters()).device  # NCCL sends nothing from the CPU, where a buffer may well be
    for tensor in (*model.parameters(), *model.buffers()):
        own = tensor.detach()
        # As bytes: backends do not know every dtype, and no bit of a nan may change.
        sent = own.contiguous().reshape(-1).view(torch.uint8).to(device)
        dist.broadcast(sent, src=0)
        if sent.data_ptr() != own.data_ptr():
            own.copy_(sent.view(own.dtype).view_as(own))


def _show(option: Any) -> str | None:
    plain = isinstance(option, _PLAIN) or (
        isinstance(option, (list, tuple)) and all(isinstance(one, _PLAIN) for one in option)
    )
    return repr(option) if plain else None


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for one in tensors:
        found.update(f"{tuple(one.shape)} {one.dtype}".encode())
        if one.layout is torch.strided:
            found.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _disagreement(kind: str, name: str, rank: int, first: str | None, other: str | None) -> str:
    if kind == "option":
        why = f"{name}={other} on rank {rank}, and {name}={first} on rank 0"
        return f"{why}: all ranks must pass the same options. Pass one value everywhere."
    if kind == "model":
        why = f"{name} is {other or 'missing'} on rank {rank}, and {first or 'missing'} on rank 0"
        return f"{why}: all ranks must pass the same model. Build it in the same way everywhere."
    if kind == "values":
        return (
            f"{name} has other values on rank {rank} than on rank 0; all ranks must hold the same weights. "
            "Broadcast them first, as DistributedDataParallel(model) does, or seed every rank alike."
        )
    return (
        f'the batch of rank {rank} is not that of rank 0; with distributed="layers" all ranks pass the same '
        'one. To pass each rank\'s own share of the examples, choose distributed="batch".'
    )


def _moved(batch: Batch, device: torch.device) -> Batch:
    inputs, targets = map_tensors(lambda one: one.detach().to(device), (batch.inputs, batch.targets))
    return Batch(inputs, targets, batch.size)


def _joined(batches: Sequence[Batch]) -> tuple[Any, Any] | None:
    """One batch of all examples; None where some tensor does not count them, or lengths differ."""
    columns = [list(tensors_in((one.inputs, one.targets))) for one in batches]
    counts = all(
        tensor.ndim and tensor.shape[0] % batch.size == 0
        for batch, tensors in zip(batches, columns, strict=True)
        for tensor in tensors
    )
    try:
        both = iter([torch.cat(column) for column in zip(*columns, strict=True)] if counts else [])
        inputs, targets = map_tensors(lambda _: next(both), (batches[0].inputs, batches[0].targets))
    except (RuntimeError, ValueError, StopIteration):
        return None
    return None if next(both, None) is not None else (inputs, targets)
