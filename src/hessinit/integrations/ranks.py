"""Work that one process of a training job does for all: its failure and its weights are shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed
from torch import Tensor, nn

from hessinit.errors import ProblemError

T = TypeVar("T")

# Told by name: an import of these would cost seconds, and not every torch has them.
_SHARDING = {"FullyShardedDataParallel", "FSDPModule"}


def is_first_rank() -> bool:
    """Whether this process does the work: the only one, or the first of the job."""
    return not _together() or torch.distributed.get_rank() == 0


def on_first_rank(work: Callable[[], T], model: nn.Module, *, doing: str) -> T | None:
    """Do the `work` on the first rank while the others wait; what it raises is raised on every rank.

    Every rank must call this. The others get None. How long they wait is bounded by the timeout of the
    process group.
    """
    if not _together():
        return work()
    outcome: T | None = None
    failure: BaseException | None = None
    if is_first_rank():
        try:
            outcome = work()
        except BaseException as caught:
            failure = caught
    message = _share_text("" if failure is None else f"{type(failure).__name__}: {failure}", _device(model))
    if failure is not None:
        raise failure
    if message:
        raise RuntimeError(f"{doing} failed on rank 0, so that every rank stops: {message}")
    return outcome


def share_weights(model: nn.Module) -> None:
    """Give every rank the first one's parameters and buffers, bit for bit and in place.

    Costs one broadcast for each tensor. Alone, does nothing.
    """
    if not _together():
        return
    device = _device(model)  # NCCL sends nothing from the CPU, where a buffer may well be
    for tensor in (*model.parameters(), *model.buffers()):
        own = tensor.detach()
        # As bytes: backends do not know every dtype, and no bit of a nan may change.
        sent = own.contiguous().reshape(-1).view(torch.uint8).to(device)
        torch.distributed.broadcast(sent, src=0)
        if sent.data_ptr() != own.data_ptr():
            own.copy_(sent.view(own.dtype).view_as(own))


def check_whole_weights(model: nn.Module) -> None:
    """Sharded weights are refused: no rank has them all."""
    sharded = [
        type(part).__name__
        for part in model.modules()
        if _SHARDING & {kind.__name__ for kind in type(part).__mro__}
    ]
    kinds = [type(one).__name__ for one in model.parameters() if type(one).__name__ == "DTensor"]
    kinds += ["DeepSpeed's parameter" for one in model.parameters() if hasattr(one, "ds_id")]
    if sharded or kinds:
        raise ProblemError(
            f"the weights are sharded over the ranks ({(sharded or kinds)[0]}), so that none can measure "
            "them. Call hessinit.initialize_ before the model is wrapped, and track a run without shards."
        )


def _together() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _share_text(text: str, device: torch.device) -> str:
    """The first rank's text, on every rank; as plain bytes, so that nothing is unpickled."""
    own = text.encode()
    length = torch.tensor([len(own)], device=device)
    torch.distributed.broadcast(length, src=0)
    letters: Tensor = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if is_first_rank() and own:
        letters.copy_(torch.tensor(list(own), dtype=torch.uint8))
    if int(length):
        torch.distributed.broadcast(letters, src=0)
    return bytes(letters.tolist()).decode()
