"""Several processes: equal to one, the same everywhere, and an error instead of a hang."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import hessinit
import tiny
from several_ranks import run_on_ranks

WORK = Path(__file__).with_name("measuring_ranks.py")


def test_ranks_with_uneven_shares_or_shared_layers_equal_one_process(tmp_path: Path) -> None:
    run_on_ranks(WORK, "equal_to_one_process", tmp_path, 2, 3, 4)


def test_the_spectrum_and_weights_that_one_rank_alone_uses_are_those_of_all_examples(tmp_path: Path) -> None:
    run_on_ranks(WORK, "report_more", tmp_path, 2)


def test_initialized_weights_advice_and_tracked_points_are_the_same_on_every_rank(tmp_path: Path) -> None:
    run_on_ranks(WORK, "work_on_the_first", tmp_path, 2)


COUPLED = 'so a share of them, as in distributed="batch", has another loss; pass the whole batch on every'
REFUSALS = [
    "tolerance is 0.01 on rank 1, and 0.001 on rank 0: all ranks must pass the same options",
    "layers is ('2',) on rank 1, and None on rank 0",
    "0.weight is (6, 6), torch.float32, trained=True on rank 1, and (5, 6), torch.float32",
    "2.weight is one with the digest",
    'with distributed="layers" all ranks must pass the same batch',
    "the batch is empty (it holds a tensor of shape (0,)); pass at least one example",
    "the inputs hold 30 NaN or inf among 30 values",
    "distributed='examples' is unknown; choose from 'batch', 'layers'",
    "details='diagnostics' with distributed=\"batch\" needs all examples at once",
    f"depends on others (as by BatchNorm in train mode), {COUPLED}",
    "measured 22 examples",  # in eval mode, and by layers
    "measured 22 examples",
    "SyncBatchNorm in train mode communicates in its forward; call model.eval()",
    f"the loss compares the examples of a batch, {COUPLED}",  # a root of the mean
    f"the loss compares the examples of a batch, {COUPLED}",  # contrastive
    "measured 22 examples",  # positions of sequences in the first dimension
    "measured 22 examples",
    "IndexError: list index out of range",  # in a product
    "measured 22 examples",  # after all that
]
ON_RANK_1 = {5, 6, 17}  # the other ranks hear who failed


def test_every_rank_refuses_what_one_rank_must_refuse(tmp_path: Path) -> None:
    for rank, lines in enumerate(run_on_ranks(WORK, "refuse", tmp_path, 3)):
        for number, (line, refusal) in enumerate(zip(lines, REFUSALS, strict=True)):
            assert refusal in line
            told = "RankError: measure failed on rank 1, so that every rank stops: "
            assert line.startswith(told) == (number in ON_RANK_1 and rank != 1), line


def test_one_rank_of_several_is_refused_until_it_says_that_it_works_for_itself(tmp_path: Path) -> None:
    several = "this process alone, which is one of several; pass distributed="
    alike = "and the replicas of DistributedDataParallel must stay alike; "
    whole = ["measure", "advise", "assert_sound", "track", "initialize_", "apply_scheme_"]
    expected: list[tuple[str, ...]] = []
    for verb in whole:
        way = "call it before the model is" if verb == "apply_scheme_" else 'pass distributed="batch" on'
        expected += [(f"{verb} without distributed= works on", several), (f"{alike}{way}",)]
        expected += [(f'{verb} with distributed="each" works on', alike)]
    expected += [("compare without distributed=", several)] * 2  # sweep calls it
    expected += [("nothing refused",)] * len(whole)
    expected += [("nothing refused",), ("distributed='batch' is unknown; choose from 'each'",)] * 2
    expected += [("assert_sound judged 22 examples",), ("3",)]
    first, second = run_on_ranks(WORK, "say_who_works", tmp_path, 2)
    for lines, wanted in ((first, expected), (second, expected[:-1])):
        for line, parts in zip(lines, wanted, strict=True):
            assert all(part in line for part in parts), (line, parts)


def test_a_group_that_knows_no_cpu_gets_one_for_messages_beside_it(tmp_path: Path) -> None:
    run_on_ranks(WORK, "talk_beside", tmp_path, 2)


def test_a_killed_rank_ends_the_others_with_its_name(tmp_path: Path) -> None:
    logs = run_on_ranks(WORK, "lose_a_rank", tmp_path, 2, 3, 4, killed=3)
    jobs = [(logs[:2], 0), (logs[2:5], 2), (logs[5:], 1)]
    for lines, victim in jobs:
        assert not lines[victim]
        for rank, (told, after) in enumerate(line for line in lines if line):
            assert told.startswith(f"RankError: measure stopped on every rank: rank {victim} ended"), rank
            assert float(after.split()[1]) < 60


def test_weights_initialized_before_sharding_are_kept_and_sharded_models_refused(tmp_path: Path) -> None:
    for lines in run_on_ranks(WORK, "shard_afterwards", tmp_path, 2):
        assert [line for line in lines if "is sharded: a rank holds only a part" in line] == lines[-7:]


def test_without_a_process_group_each_is_the_only_one() -> None:
    report = hessinit.measure(tiny.network(), nn.CrossEntropyLoss(), tiny.batch(), distributed="each")
    alone = hessinit.measure(tiny.network(), nn.CrossEntropyLoss(), tiny.batch())
    assert report.network.norm == alone.network.norm


def test_without_a_process_group_the_way_to_one_is_told() -> None:
    with pytest.raises(hessinit.ProblemError, match=r"none is initialized; start the program with torchrun"):
        hessinit.measure(tiny.network(), nn.CrossEntropyLoss(), tiny.batch(), distributed="batch")
