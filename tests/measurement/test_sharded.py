"""Models that FSDP2 has sharded: every verb as on one process, every refusal, and a lost rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from several_ranks import run_on_ranks

WORK = Path(__file__).with_name("sharded_ranks.py")


def test_two_ranks_answer_as_one_process_does(tmp_path: Path) -> None:
    run_on_ranks(WORK, "answer_briefly", tmp_path, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_answer_and_fit_as_one_process_does(tmp_path: Path, ranks: int) -> None:
    run_on_ranks(WORK, "answer_fully", tmp_path, ranks)


SHARDED = "is sharded: a rank holds only a part of the weights"
REFUSALS = [
    f'{SHARDED}. With FSDP2, pass distributed="batch" on every rank',
    SHARDED,
    SHARDED,
    "0.weight is sharded over a mesh of 2 dimensions, (2, 1), as in HSDP",
    "0 keeps its weights on the CPU (CPUOffloadPolicy)",
    "0 divides its gradients by 1, and they must be means over the ranks here",
    "0.weight is sharded over 1 of the 2 ranks of this job",
    "2.weight is sharded over the ranks [0, 1], and the weights before it over [1, 0]",
    "2.weight is trained but not sharded, unlike other weights",
    "0.weight is a DTensor outside of fully_shard, as in tensor parallelism (parallelize_module)",
    "the number of batches is 2 on rank 1, and 1 on rank 0",
    "the inputs hold",
    "data= asks for trials on fresh mini-batches, and a sharded model is tried on its batch; leave it out.",
    "0 is parametrized, and a sharded weight is written as it is stored",
    "TypeError: by itself",
    "nothing refused",
    "holds NaN or inf",
    "nothing refused",
    "TypeError: by itself",
    'distributed="batch" needs a process group, and none is initialized',
    f'{SHARDED}. With FSDP2, pass distributed="batch" on every rank',
]
ON_RANK_1 = {11, 18}  # the other rank hears who failed
ALONE = 18  # while the other rank waits in a collective


def test_every_rank_of_a_sharded_model_refuses_what_one_must_refuse(tmp_path: Path) -> None:
    for rank, lines in enumerate(run_on_ranks(WORK, "refuse", tmp_path, 2)):
        lines = [line for line in lines if not line.startswith("[rank")]
        for number, (line, refusal) in enumerate(zip(lines, REFUSALS, strict=True)):
            assert refusal in line
            is_told = "failed on rank 1, so that every rank stops: " in line
            assert is_told == (number in ON_RANK_1 and rank != 1), line
            is_closed = "(The process group is closed.)" in line
            assert is_closed == (number == ALONE and rank != 1), line


def check_lost(logs: list[list[str]], victim: int) -> None:
    for rank, lines in enumerate(logs):
        told = [line for line in lines if line.startswith(("RankError", "after"))]
        assert len(told) == (0 if rank == victim else 2)
        if told:
            assert told[0].startswith(f"RankError: advise stopped on every rank: rank {victim} ended")
            assert float(told[1].split()[1]) < 60


def test_a_killed_rank_of_a_sharded_model_ends_the_other_with_its_name(tmp_path: Path) -> None:
    check_lost(run_on_ranks(WORK, "lose_a_rank", tmp_path, 2, killed=1), 0)


@pytest.mark.sweep
def test_a_killed_rank_ends_those_that_wait_for_each_other_in_a_ring(tmp_path: Path) -> None:
    check_lost(run_on_ranks(WORK, "lose_a_rank", tmp_path, 4, killed=1), 2)
