"""Several processes: the same bits on every rank, and no rank left waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from hessinit.integrations.callback import is_first_rank, on_first_rank, share_weights
from several_ranks import run_on_ranks

WORK = Path(__file__).with_name("rank_work.py")


def test_alone_the_work_is_done_and_nothing_is_sent() -> None:
    model = nn.Linear(2, 2)
    assert is_first_rank()
    assert on_first_rank(lambda: 42, doing="counting") == 42
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        on_first_rank(lambda: 1 / 0, doing="dividing")
    share_weights(model)


@pytest.mark.sweep
def test_two_ranks_share_every_kind_of_weight_and_every_failure(tmp_path: Path) -> None:
    said, told = run_on_ranks(WORK, "share", tmp_path, 2)
    assert "IndexError: list index out of range" in said
    assert "RankError: looking failed on rank 0, so that every rank stops: IndexError" in told[-1]


@pytest.mark.parametrize(
    ("work", "failure"),
    [
        ("fit_lightning", "ZeroDivisionError: division by zero"),
        ("train_transformer", "ProblemError: target=-1 must be a finite number above 0"),
    ],
)
def test_ranks_of_ddp_get_the_same_weights_and_failure(work: str, failure: str, tmp_path: Path) -> None:
    logs, starts = run_on_ranks(WORK, work, tmp_path, 2), ("weights ", "failed ")
    (first, failed), (second, told) = ([line for line in lines if line.startswith(starts)] for lines in logs)
    assert first == second
    assert failed.startswith(f"failed {failure}")
    assert told.startswith("failed RankError: initializing failed on rank 0, so that every rank stops: ")
    assert failure in told
    assert (tmp_path / "curvature.jsonl").exists()
