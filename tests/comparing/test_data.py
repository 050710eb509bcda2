"""Mini-batches: which examples they hold, and in which forms data may come."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import digit_problem as problem
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hessinit.comparing.batching import read_data


def test_every_epoch_holds_every_example_once() -> None:
    numbers = torch.arange(12)
    batches = read_data((numbers, numbers * 10), batch_size=3, steps=10).minibatches(seed=0)
    epochs = [list(itertools.islice(batches, 4)) for _ in range(2)]
    orders = [torch.cat([batch.inputs for batch in epoch]) for epoch in epochs]
    for order in orders:
        assert sorted(order.tolist()) == list(range(12))
    assert not torch.equal(*orders)
    assert all(torch.equal(batch.targets, batch.inputs * 10) for epoch in epochs for batch in epoch)


def test_what_is_left_over_is_dropped() -> None:
    numbers = torch.arange(11)
    batches = itertools.islice(read_data((numbers, numbers), 3, 10).minibatches(0), 9)
    assert [len(batch.inputs) for batch in batches] == [3] * 9


def test_structures_are_cut_along_the_first_dimension() -> None:
    inputs = {"x": torch.arange(8), "pair": (torch.arange(8) * 2, "kept")}
    batch = read_data((inputs, torch.arange(8)), 4, 10).starting_batch(0)
    assert torch.equal(batch.inputs["pair"][0], batch.inputs["x"] * 2)
    assert torch.equal(batch.inputs["x"], batch.targets)
    assert len(batch.targets) == 4


def _cut(size: int) -> list[tuple[Tensor, Tensor]]:
    images, labels = problem.data()
    return list(zip(images.split(size), labels.split(size), strict=True))


def test_ready_batches_are_cycled_in_an_order_of_the_seed() -> None:
    ready = read_data([(torch.full((2,), index), torch.zeros(2)) for index in range(5)], 64, 10)
    first = [int(batch.inputs[0]) for batch in itertools.islice(ready.minibatches(1), 10)]
    again = [int(batch.inputs[0]) for batch in itertools.islice(ready.minibatches(1), 10)]
    other = [int(batch.inputs[0]) for batch in itertools.islice(ready.minibatches(2), 10)]
    assert first == again != other
    assert sorted(first[:5]) == sorted(first[5:]) == list(range(5))


def test_a_list_a_loader_and_an_endless_generator_give_the_same_runs() -> None:
    cut = _cut(40)

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from cut

    loader: DataLoader[Any] = DataLoader(TensorDataset(*problem.data()), batch_size=40)
    settings = {"schemes": ["default"], "steps": 10, "seeds": 1}
    by_list, by_loader = problem.small(data=cut, **settings), problem.small(data=loader, **settings)
    assert by_list == by_loader == problem.small(data=endless(), **settings)
    assert (by_list.batch_size, by_list.examples) == (40, 400)


@pytest.mark.parametrize("own", [False, True])
def test_a_loader_that_shuffles_gives_the_same_runs_whatever_was_drawn_before(own: bool) -> None:
    generator = torch.Generator().manual_seed(3) if own else None
    loader: DataLoader[Any] = DataLoader(
        TensorDataset(*problem.data()), batch_size=40, shuffle=True, generator=generator
    )
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(problem.small(data=loader, schemes=["default"], seeds=1))
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(seed)))
    assert found[0] == found[1]


def _build_writing() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.2, inplace=True), problem.build())


@pytest.mark.parametrize("ready", [False, True])
def test_a_model_that_writes_into_its_inputs_changes_no_data(ready: bool) -> None:
    images, labels = problem.data()
    data = _cut(40) if ready else (images.clone(), labels)
    before = [images.clone() for images, _ in (data if ready else [data])]
    settings: dict[str, Any] = {"build": _build_writing, "data": data, "seeds": 1}
    first = problem.small(**settings)
    assert all(map(torch.equal, before, [images for images, _ in (data if ready else [data])]))
    for run in problem.small(**settings, schemes=("he", "default")).runs:
        assert run in first.runs


def test_what_a_start_does_to_its_batch_is_not_measured() -> None:
    def leave(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None: ...

    def overwrite(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
        batch[0].mul_(100.0)

    comparison = problem.small(schemes={"one": leave, "other": overwrite}, seeds=1)
    assert comparison.norm("one") == comparison.norm("other")


def test_two_batches_in_a_list_are_two_batches() -> None:
    assert problem.small(data=_cut(200), schemes=["default"], seeds=1).batch_size == 200


def test_inputs_that_are_not_one_tensor_go_through_forward() -> None:
    images, labels = problem.data()
    plain = problem.small(seeds=1)
    halves = problem.small(
        data=((images[..., :4], images[..., 4:]), labels),
        forward=lambda model, pair: model(torch.cat(pair, dim=-1)),
        seeds=1,
    )
    assert [run.losses for run in plain.runs] == [run.losses for run in halves.runs]


def test_a_loss_without_targets() -> None:
    images, _ = problem.data()
    auto = problem.small(
        build=lambda: nn.Linear(64, 64),
        data=(images.flatten(1), None),
        loss=lambda output, _: output.square().mean(),
        schemes=["default"],
        seeds=1,
    )
    assert auto.runs[0].final_loss < auto.runs[0].first_loss


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.ones(3, 2), r"data is a Tensor; it must be \(inputs, targets\) with all examples"),
        (7, r"data is a int; it must be \(inputs, targets\)"),
        ([], "data is empty; it must hold at least one batch"),
        ((torch.ones(5, 2), torch.ones(5)), "the data hold 5 examples, fewer than batch_size=32"),
        ((torch.ones(1, 2), torch.ones(1)), r"the data hold 1 example, fewer .*=32; pass batch_size=1\.$"),
        ((torch.ones(5, 2), torch.ones(4)), "inputs have 5 examples .* and targets 4"),
        ((torch.ones(3), torch.ones(3), torch.ones(3)), "is a tuple of 3 tensors"),
        ([(torch.ones(3), torch.ones(3)), torch.ones(2)] * 2, r"data\[1\] is a Tensor; every batch must be"),
        ([(torch.ones(3), torch.ones(2))] * 3, r"data\[0\]: inputs have 3 examples"),
        (
            (torch.ones(7, 50, 3), torch.ones(50)),
            r"the inputs of data have shape \(7, 50, 3\), and the first",
        ),
    ],
)
def test_data_of_another_form_are_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem.small(data=data)
