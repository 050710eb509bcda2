"""Several processes: the same bits on every rank, and no rank left waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hessinit
from hessinit.integrations.callback import check_unsharded, is_first_rank, on_first_rank, share_weights
from integrations.two_ranks import run_on_two_ranks


def test_alone_the_work_is_done_and_nothing_is_sent() -> None:
    model = nn.Linear(2, 2)
    assert is_first_rank()
    assert on_first_rank(lambda: 42, model, doing="counting") == 42
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        on_first_rank(lambda: 1 / 0, model, doing="dividing")
    share_weights(model)


@pytest.mark.sweep
def test_two_ranks_share_every_kind_of_weight_and_every_failure(tmp_path: Path) -> None:
    said, told = run_on_two_ranks("share", tmp_path)
    assert "IndexError: list index out of range" in said
    assert "RuntimeError: looking failed on rank 0, so that every rank stops: IndexError" in told[-1]


@pytest.mark.parametrize(
    ("work", "failure"),
    [
        ("fit_lightning", "ZeroDivisionError: division by zero"),
        ("train_transformer", "ProblemError: target=-1 must be a positive, finite number"),
    ],
)
def test_ranks_of_ddp_get_the_same_weights_and_the_same_failure(
    work: str, failure: str, tmp_path: Path
) -> None:
    said = [
        [line for line in lines if line.startswith(("weights ", "failed "))]
        for lines in run_on_two_ranks(work, tmp_path)
    ]
    (first, failed), (second, told) = said
    assert first == second
    assert failed.startswith(f"failed {failure}")
    assert told.startswith(
        f"failed RuntimeError: initializing failed on rank 0, so that every rank stops: {failure}"
    )
    assert (tmp_path / "curvature.jsonl").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sharded_weights_are_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(hessinit.ProblemError, match="sharded over the ranks.*before the model"):
            check_unsharded(model)
    finally:
        torch.distributed.destroy_process_group()
    check_unsharded(nn.Linear(4, 4))
