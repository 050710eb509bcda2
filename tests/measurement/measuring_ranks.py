"""What the ranks of a job measure. Each function returns the work of one rank, which asserts or prints."""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hessinit

NUMBERS = ("norm", "top_eigenvalue")


def on_ranks(work: Callable[[int, int], None]) -> Callable[[], None]:
    def join() -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("error")
        dist.init_process_group("gloo")
        work(dist.get_rank(), dist.get_world_size())
        dist.barrier()
        dist.destroy_process_group()

    return join


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 3)).to(dtype)


def whole_batch(dtype: torch.dtype, examples: int = 22) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(examples, 6, generator=generator).to(dtype), torch.arange(examples) % 3


def share(batch: tuple[torch.Tensor, ...], rank: int, ranks: int) -> Any:
    """Uneven ones: 3 examples on rank 0, 5 on rank 1, …; the last rank takes the rest."""
    ends = [0, *itertools.accumulate(3 + 2 * one for one in range(ranks - 1)), len(batch[0])]
    return tuple(one[ends[rank] : ends[rank + 1]] for one in batch)


def assert_same(found: Any, truth: Any, tolerance: float) -> None:
    assert found.names == truth.names
    assert (found.examples, found.notes) == (truth.examples, truth.notes)
    assert abs(found.loss - truth.loss) <= tolerance * abs(truth.loss)
    for one, other in zip((*found.layers, found.network), (*truth.layers, truth.network), strict=True):
        assert (one.name, one.shape, one.converged) == (other.name, other.shape, other.converged)
        for number in NUMBERS:
            value, true = getattr(one, number), getattr(other, number)
            assert abs(value - true) <= tolerance * abs(true), (one.name, number, value, true)
        assert abs(one.bottom.value - other.bottom.value) <= tolerance * other.norm, one.name
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found.to_json())
    assert len(set(everywhere)) == 1


def equal_to_one_process() -> Callable[[], None]:
    def work(rank: int, ranks: int) -> None:
        for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-4)):
            model, batch = network(dtype), whole_batch(dtype)
            ddp = nn.parallel.DistributedDataParallel(model)
            for options in (
                {}, {"curvature": "both"}, {"estimator": "lanczos"}, {"layers": "**", "network": False},
            ):  # fmt: skip
                given: dict[str, Any] = {"tolerance": tolerance / 10, **options}
                for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")):
                    truth = hessinit.measure(model, loss, batch, **given)
                    own = share(batch, rank, ranks)
                    found = hessinit.measure(ddp, loss, own, distributed="batch", **given)
                    assert_same(found, truth, tolerance)
                    found = hessinit.measure(ddp, loss, batch, distributed="layers", **given)
                    assert_same(found, truth, tolerance)

    return on_ranks(work)
