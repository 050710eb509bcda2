"""Inputs in any container give the numbers of a tuple, in every function; all refuse what is no batch."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

import hessinit
from hessinit_paper import quadratic_form
from tiny import LOSS, SHORT_RUNS, Net, inputs, labels

FIRST, SECOND = inputs(6, 3), inputs(6, 2)


class Named(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    first: Any
    second: Any


def parts(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping):
        return (batch["first"], batch["second"]) if "first" in batch else parts(batch["inside"][1])
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch.first, batch.second)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.other, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, batch: Any) -> Tensor:
        first, second = parts(batch)
        return self.head(torch.tanh(self.one(first) + self.other(second)))


SHORT = {**SHORT_RUNS, "batch_size": 3}
# A number of each, on a model that is made anew.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "measure": lambda batch: hessinit.measure(TwoInputs(), LOSS, batch).network.norm,
    "hessian": lambda batch: hessinit.hessian(TwoInputs(), LOSS, batch).to_dense().sum().item(),
    "gauss_newton": lambda batch: hessinit.gauss_newton(TwoInputs(), LOSS, batch).to_dense().sum().item(),
    "jacobian": lambda batch: hessinit.jacobian(TwoInputs(), LOSS, batch).to_dense().sum().item(),
    "quadratic_form": lambda batch: quadratic_form(hessinit.Problem(TwoInputs(), LOSS, batch))[0].exact,
    "advise": lambda batch: hessinit.advise(TwoInputs(), LOSS, batch, optimizer="adamw").learning_rate,
    "initialize_": lambda batch: hessinit.initialize_(
        TwoInputs(), LOSS, batch, lr=0.1, data=batch, optimizer="adamw", progress=False
    ).trials[0].score,
    "assert_sound": lambda batch: hessinit.assert_sound(TwoInputs(), LOSS, batch).network.norm,
    "track": lambda batch: hessinit.track(TwoInputs(), LOSS, batch, path=None).measure().norm,
    "compare": lambda batch: hessinit.compare(
        TwoInputs, LOSS, batch, schemes=["lsuv"], learning_rates=[0.1], **SHORT
    ).runs[0].final_loss,
    "sweep": lambda batch: hessinit.sweep(TwoInputs, LOSS, batch, stds=[0.1], **SHORT).runs[0].final_loss,
}  # fmt: skip
INPUTS: dict[str, Any] = {
    "list": [FIRST, SECOND],
    "dict": {"first": FIRST, "second": SECOND},
    "OrderedDict": OrderedDict(first=FIRST, second=SECOND),
    "defaultdict": defaultdict(list, first=FIRST, second=SECOND),
    "UserDict": UserDict({"first": FIRST, "second": SECOND}),
    "BatchEncoding": BatchEncoding({"first": FIRST, "second": SECOND}),
    "named tuple": Named(FIRST, SECOND),
    "dataclass": Record(FIRST, SECOND),
    "nested": {"inside": ["a word", Record(FIRST, SECOND), None, 3]},
}
WRONG: dict[str, Any] = {
    "a dict": {"inputs": FIRST, "labels": labels()},
    "a BatchEncoding": BatchEncoding({"inputs": FIRST, "labels": labels()}),
    "a dataclass": Record(FIRST, labels()),
    "a tensor": FIRST,
    "a triple": (FIRST, SECOND, labels()),
    "arrays": (FIRST.numpy(), labels().numpy()),
    "dicts": [{"inputs": FIRST, "labels": labels()}] * 2,
    "dataclasses": [Record(FIRST, labels())] * 2,
    "a dataset": TensorDataset(FIRST, labels()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inputs_in_any_container_give_the_numbers_of_a_tuple(name: str) -> None:
    number = FUNCTIONS[name]
    expected = number(((FIRST, SECOND), labels()))
    for kind, container in INPUTS.items():
        assert number((container, labels())) == expected, kind


def test_a_pair_may_be_a_list_and_batches_may_differ_in_their_container() -> None:
    norm = FUNCTIONS["measure"]
    expected = norm(((FIRST, SECOND), labels()))
    halves = {"first": FIRST[:3], "second": SECOND[:3]}, Record(FIRST[3:], SECOND[3:])
    pairs = [Named(halves[0], labels()[:3]), [halves[1], labels()[3:]]]
    assert norm([Record(FIRST, SECOND), labels()]) == expected
    assert norm(pairs) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_batch_is_refused_by_every_function(name: str) -> None:
    for kind, batch in WRONG.items():
        with pytest.raises(hessinit.ProblemError, match=r"must (be|hold)|Convert arrays") as refusal:
            FUNCTIONS[name](batch)
        assert "inputs" in str(refusal.value), kind


@pytest.mark.parametrize("name", ["initialize_", "compare", "sweep"])
def test_inputs_that_cannot_be_cut_into_batches_are_refused(name: str) -> None:
    message = "without a tensor in it.* or pass a list of ready batches"
    arrays = {"first": FIRST.numpy(), "second": SECOND.numpy()}
    for container in (SimpleNamespace(first=FIRST, second=SECOND), arrays):
        with pytest.raises(hessinit.ProblemError, match=message):
            FUNCTIONS[name]((container, labels()))


def along_edges(net: Any, graph: Any) -> Tensor:
    nodes, (start, end) = graph
    return net.head(torch.zeros(6, 4).index_add(0, end, torch.tanh(net.body(nodes))[start]))


@pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")
@pytest.mark.parametrize("kind", ["time first", "graph"])
def test_a_batch_that_cannot_be_halved_is_initialized_on_the_whole(kind: str) -> None:
    torch.manual_seed(1)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]])
    x, run, body = (FIRST, edges), along_edges, nn.Linear
    if kind == "time first":
        x, run, body = inputs(5, 6, 3), lambda net, x: net.head(net.body(x)[0][-1]), nn.GRU
    model = Net(run, body=body(3, 4), head=nn.Linear(4, 3))
    result = hessinit.initialize_(model, LOSS, (x, labels()), lr=0.1, progress=False)
    assert result.survival is not None
    assert result.survival.survived


def test_a_loader_of_containers_is_read_as_batches() -> None:
    pairs = [{"first": first, "second": second} for first, second in zip(FIRST, SECOND, strict=True)]
    loader = DataLoader(list(zip(pairs, labels(), strict=True)), batch_size=3)
    report = hessinit.measure(TwoInputs(), LOSS, loader)
    assert report.network.norm == pytest.approx(FUNCTIONS["measure"](((FIRST, SECOND), labels())), rel=1e-3)
