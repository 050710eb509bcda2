"""The curvature of examples that are spread over ranks: products are added up, rank 0 decides the rest."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hessinit.curvature import engines, operators, probes
from hessinit.curvature.evaluation import Evaluation, find_reduction, unused_leaves
from hessinit.errors import ProblemError, RankError
from hessinit.problem.determinism import agree
from hessinit.problem.ranks import Failure, Outcome, Ranks

T = TypeVar("T")


def join_shares(ranks: Ranks, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Weight the evaluations by their share of all examples; returns loss, examples and batches of all.

    The same as several batches in one process. Refuses, on every rank, examples that see each other.
    """
    problem = evaluations[0].problem
    own = {
        "coupled": next(filter(None, map(_coupling, evaluations)), ""),
        "reduction": find_reduction(evaluations), "examples": problem.examples, "batches": len(evaluations),
        "loss": sum(one.loss_value * one.weight for one in evaluations),
        "moments": {name: evaluations[0].moments[name] for name in problem.leaves},
    }  # fmt: skip
    every = ranks.exchange(own)
    coupled = next((one["coupled"] for one in every if one["coupled"]), "")
    if coupled:
        way = 'Pass the whole batch on every rank, with distributed="layers"'
        raise ProblemError(f'{coupled}, so a share of them, as in distributed="batch", has another loss. {way}.')
    reductions = {one["reduction"] for one in every} - {None}
    if len(reductions) != 1:
        raise ProblemError(
            "whether the loss adds its examples up or averages them decides how the shares are joined, and "
            'its values do not tell. Pass reduction="mean" or reduction="sum", or the whole batch on every '
            'rank, with distributed="layers".'
        )
    examples, is_mean = sum(one["examples"] for one in every), reductions == {"mean"}
    for one in evaluations if is_mean else []:
        one.weight *= problem.examples / examples
    for name, moment in evaluations[0].moments.items():  # used by no example here, but by others
        used = [one["moments"][name] for one in every if one["moments"][name] is not None]
        evaluations[0].moments[name] = moment if moment is not None or not used else used[0]
    loss = sum(one["loss"] * (one["examples"] / examples if is_mean else 1) for one in every)
    return {"loss": loss, "examples": examples, "batches": sum(one["batches"] for one in every)}


class SharedEngine(engines.Engine):
    """The engine of all examples, on rank 0; each rank's own engine only makes products."""

    def __init__(self, ranks: Ranks, own: engines.Engine, number: int, evaluation: Evaluation) -> None:
        self._ranks, self._own, self._number, self._evaluation = ranks, own, number, evaluation
        self.name, self.reason, self._settings = own.name, own.reason, own._settings
        self._unused = unused_leaves([evaluation])
        # Bounds the rank of a semidefinite curvature; None if it may be indefinite, or is not known.
        bounds = ranks.exchange(getattr(getattr(own, "_general", own), "_rank", None))
        self._rank = None if None in bounds else sum(bounds)

    def operator(self, names: Sequence[str]) -> operators.LinearOperator:
        return SumOverRanks(self._ranks, self._own.operator(names), (self._number, tuple(names)))

    def extremes(self, names: Sequence[str]) -> engines.Extremes:
        if all(name in self._unused for name in names):
            return engines.Extremes(engines.UNUSED, engines.UNUSED, self.name, self.reason)
        return self._search(self.operator(names), self._rank)


class SumOverRanks(operators.LinearOperator):
    """The sum of the ranks' operators, on rank 0; `block` tells the others which one is meant."""

    def __init__(self, ranks: Ranks, own: operators.LinearOperator, block: tuple[int, tuple[str, ...]]) -> None:
        self._ranks, self._own, self._block = ranks, own, block
        self.shape, self.dtype, self.device = own.shape, own.dtype, own.device

    def _product(self, vector: Tensor) -> Tensor:
        ranks, collective = self._ranks, _is_collective(vector)
        for rank in ranks.others:
            ranks.send(rank, self._block)
            if not collective:
                ranks.send_tensor(rank, vector)
        if collective:
            dist.broadcast(vector := vector.contiguous().clone(), src=0)
        found, failures = self._own._product(vector).detach(), []
        for rank in ranks.others:
            failure = ranks.receive(rank)
            failures += [] if failure is None else [failure]
            if failure is None and not collective:
                found = found + ranks.receive_tensor(rank, vector)
        if failures:
            raise RankError(failures[0].text)
        if collective:
            for rank in ranks.others:
                ranks.send(rank, None)  # all are there: nobody waits on the device for one that is gone
            dist.reduce(found := found.contiguous().clone(), dst=0)
        return found


def lead(ranks: Ranks, shared: Sequence[SharedEngine], work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, on every rank; the others make the products that it asks for."""
    if ranks.rank:
        found: T = _serve(ranks, shared)
        return found
    ranks.leads = True
    found = work()
    ranks.conclude(found)
    return found


def _serve(ranks: Ranks, shared: Sequence[SharedEngine]) -> Any:
    leaves, failure = shared[0]._evaluation.problem.leaves, None
    operator_of = functools.cache(lambda number, names: shared[number]._own.operator(names))
    while not isinstance(message := ranks.receive(0), Outcome):
        number, names = message
        vector = torch.cat([leaves[name].detach().reshape(-1) for name in names])
        collective = _is_collective(vector)
        if collective:
            dist.broadcast(vector, src=0)
        else:
            vector = ranks.receive_tensor(0, vector)
        try:
            found = operator_of(number, names)._product(vector).detach()
        except BaseException as caught:  # rank 0 hears of it, and ends all of them
            failure = caught
            text = f"{type(caught).__name__}: {caught}"
            ranks.send(0, Failure(f"{ranks.doing} failed on rank {ranks.rank}, so that every rank stops: {text}"))
            continue
        ranks.send(0, None)
        if not collective:
            ranks.send_tensor(0, found)
        elif isinstance(message := ranks.receive(0), Outcome):
            break
        else:
            dist.reduce(found.contiguous(), dst=0)
    if failure is not None:
        with contextlib.suppress(RankError):
            ranks.accept(message)
        raise failure
    return ranks.accept(message)


def _is_collective(vector: Tensor) -> bool:
    """Vectors on a GPU go by NCCL, all others from rank to rank."""
    return vector.is_cuda and "cuda:nccl" in dist.get_backend_config()


# --- Examples that see each other ---


def _coupling(evaluation: Evaluation) -> str:
    """Which part makes the examples of a batch depend on each other; "" if none does."""
    problem = evaluation.problem
    alone = True if evaluation.separable else _is_alone(evaluation)
    if alone is None:
        # Normalization by the statistics of the batch: in train mode, or without statistics of its own.
        modules = [one for one in problem.model.named_modules() if isinstance(one[1], _BatchNorm)]
        named = [name for name, one in modules if one.training or one.running_mean is None]
        return f"{named[0]} normalizes by the statistics of the batch: its examples see each other" if named else ""
    if not alone:
        return "the model's output for an example changes with the others (as by BatchNorm in train mode)"
    return "" if _loss_is_apart(evaluation) else "the loss compares the examples of a batch"


def _owners(output: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """The ways to count `size` examples in an output: a dimension, and the example of each of its entries."""
    rows = output.shape[0] if output.ndim else 0
    if rows and rows % size == 0:
        yield 0, torch.arange(rows) // (rows // size)
        if rows > size:
            yield 0, torch.arange(rows) % size
    if output.ndim > 1 and output.shape[1] == size:
        yield 1, torch.arange(size)


def _is_alone(evaluation: Evaluation) -> bool | None:
    """Whether some examples have the same output without the others; None where it cannot be tried."""
    problem, batch, output = evaluation.problem, evaluation.batch, evaluation.output.detach()
    some = batch.sample()
    if batch.size < 2 or problem.dropout == "freeze":
        return None
    try:
        with torch.no_grad():
            sample = problem.output(batch.take(some))
    except Exception:  # the model needs the whole batch
        return None
    compared = []
    for dim, owners in _owners(output, batch.size):
        kept = output.index_select(dim, torch.isin(owners, some).nonzero()[:, 0].to(output.device))
        compared += [agree(sample, kept)] if sample.shape == kept.shape else []
    return any(compared) if compared else None


def _loss_is_apart(evaluation: Evaluation) -> bool:
    """Whether `H_z` leaves the outputs of the other examples alone where some move."""
    output, size = evaluation.output, evaluation.batch.size
    direction, found = probes.random_like(output, evaluation.problem.seed), []
    for dim, owners in _owners(output, size):
        view = owners.view([-1 if one == dim else 1 for one in range(output.ndim)]).to(output.device)
        apart = []
        for bit in range((size - 1).bit_length()):  # any two examples differ in some bit of their numbers
            moving = (view >> bit) % 2 == 0
            product = evaluation.output_hessian(direction * moving).abs()
            allowed = torch.finfo(output.dtype).eps ** 0.6 * product.max()
            apart.append(bool(((product * ~moving) <= allowed).all()))
        found.append(all(apart))
    return any(found) if found else True
