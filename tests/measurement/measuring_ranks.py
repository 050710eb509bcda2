"""What the ranks of a job measure. Each function returns the work of one rank, which asserts or prints."""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hessinit
from calls import call, measure
from hessinit.curvature.operators import GaussNewtonOperator
from hessinit.problem.ranks import _gloo_groups

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
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


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
    options = ({}, {"curvature": "both"}, {"estimator": "lanczos", "network": False})
    losses = (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss())

    def work(rank: int, ranks: int) -> None:
        for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-4)):
            model, batch = network(dtype), whole_batch(dtype)
            ddp = nn.parallel.DistributedDataParallel(model)
            for loss, given in zip(losses, options, strict=True):
                accurate: dict[str, Any] = {"tolerance": tolerance / 10, **given}
                truth = measure(model, loss, batch, distributed="each", **accurate)
                for mode, own in (("batch", share(batch, rank, ranks)), ("layers", batch)):
                    found = measure(ddp, loss, own, distributed=mode, **accurate)
                    assert_same(found, truth, tolerance)

    return on_ranks(work)


def report_more() -> Callable[[], None]:
    def work(rank: int, ranks: int) -> None:
        model, batch, loss = network(torch.float64), whole_batch(torch.float64), nn.CrossEntropyLoss()
        problem = hessinit.Problem(model, loss, batch)
        spectrum = ["top-3", "trace", "frobenius", "density"]
        details = [*spectrum, "jacobians", "diagnostics"]
        truth = hessinit.measure(problem, details=details, tolerance=1e-8, distributed="each")
        found = hessinit.measure(problem, details=details, tolerance=1e-8, distributed="layers")
        assert_same(found, truth, 1e-6)
        assert found.layers == truth.layers
        # Each rank may pass several batches.
        shares = replace(problem, batch=[share(batch, rank, ranks)] * 2)
        found = hessinit.measure(shares, details=spectrum, tolerance=1e-8, distributed="batch")
        assert found.batches == 2 * ranks
        assert abs(found.loss - truth.loss) < 1e-9
        for one, other in zip(found.layers, truth.layers, strict=True):
            pair = (torch.tensor([each.value for each in row.eigenvalues]) for row in (one, other))
            assert torch.allclose(*pair, rtol=1e-6)
            assert abs(one.trace.value - other.trace.value) < one.trace.error + other.trace.error + 1e-6
        # A layer that the examples of one rank alone use, and one that none uses.
        partly = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3), "c": nn.Linear(6, 3)}).double()

        def forward(parts: Any, x: torch.Tensor) -> torch.Tensor:
            return parts["a" if float(x.sum()) > 0 else "b"](x)

        given: dict[str, Any] = {"forward": forward, "tolerance": 1e-8}
        signs = [(batch[0].abs() * sign, batch[1]) for sign in [1.0] + [-1.0] * (ranks - 1)]
        truth = measure(partly, loss, signs, distributed="each", **given)
        found = measure(partly, loss, signs[rank], distributed="batch", **given)
        assert_same(found, truth, 1e-6)
        assert found.notes[0] == "Not used by the forward, so without curvature: c."

    return on_ranks(work)


def work_on_the_first() -> Callable[[], None]:
    def work(rank: int, ranks: int) -> None:
        warnings.simplefilter("ignore")
        loss, batch = nn.CrossEntropyLoss(), whole_batch(torch.float32, 40)
        data = [(batch[0] + 0.1 * one, batch[1]) for one in range(6)]
        fresh: dict[str, Any] = {"data": data, "trial_steps": 3, "progress": False}
        for mode, options in (("batch", {}), ("layers", {"optimizer": "adamw"}), ("batch", fresh)):
            given: dict[str, Any] = {"lr": 0.5, **options}
            alone, model = network(torch.float32), network(torch.float32)
            with torch.no_grad():  # other weights on the others, which get those of rank 0
                model[0].weight += rank
            old = [one.detach().clone() for one in model.parameters()]
            truth = call(hessinit.initialize_, alone, loss, batch, distributed="each", **given)
            own = batch if mode == "layers" else share(batch, rank, ranks)
            ddp = nn.parallel.DistributedDataParallel(model)
            with torch.no_grad():
                for one, value in zip(model.parameters(), old, strict=True):
                    one.copy_(value)
            found = call(hessinit.initialize_, ddp, loss, own, distributed=mode, **given)
            timed = {"seconds": 0, "gradients": 0}
            alike = found.to_dict() | timed == truth.to_dict() | timed
            assert alike or abs(found.after.network.norm / truth.after.network.norm - 1) < 1e-4
            for one, other in zip(model.parameters(), alone.parameters(), strict=True):
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
            everywhere: list[Any] = [None] * ranks
            dist.all_gather_object(everywhere, [one.tolist() for one in model.parameters()])
            assert everywhere == everywhere[:1] * ranks
            found.undo()
            assert all(torch.equal(one, value) for one, value in zip(model.parameters(), old, strict=True))
        model = network(torch.float32)
        for optimizer in ("sgd", "adam"):
            truth = hessinit.advise(model, loss, batch, optimizer=optimizer, distributed="each")
            own = share(batch, rank, ranks)
            found = hessinit.advise(model, loss, own, optimizer=optimizer, distributed="batch")
            assert found.examples == 40
            assert abs(found.learning_rate / truth.learning_rate - 1) < 1e-4
        ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        options = {"optimizer": optimizer, "every": 2, "max_overhead": 1.0, "distributed": "batch"}
        with hessinit.track(ddp, loss, share(batch, rank, ranks), **options) as tracker:
            for _ in range(4):
                value = loss(ddp(share(batch, rank, ranks)[0]), share(batch, rank, ranks)[1])
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                tracker.step(value)
        points = [(point.step, point.norm) for point in tracker.tracking.points]
        assert [step for step, _ in points] == [0, 2, 4]
        assert tracker.tracking.examples == 40
        assert (tracker.path is not None) == (rank == 0)
        dist.all_gather_object(everywhere, points)
        assert everywhere == everywhere[:1] * ranks

    return on_ranks(work)


class Positions(nn.Module):
    """Logits by position, one row for each, as of a language model; time first if asked for."""

    def __init__(self, time_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time_first = time_first
        self.embed, self.mix, self.head = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(self.mix(self.embed(tokens))).cumsum(1)
        found = self.head(found.transpose(0, 1) if self.time_first else found)
        return found.flatten(0, 1)


def tell(call: Callable[[], Any]) -> None:
    try:
        print(f"measured {call().examples} examples", flush=True)
    except Exception as failure:
        print(f"{type(failure).__name__}: {failure}", flush=True)


def say_who_works() -> Callable[[], None]:
    """Each line is the refusal of a verb that was not told, or what every rank got that was."""

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except hessinit.ProblemError as refusal:
            print(refusal, flush=True)
        else:
            print("nothing refused", flush=True)

    def work(rank: int, ranks: int) -> None:
        warnings.simplefilter("ignore")
        loss, own = nn.CrossEntropyLoss(), share(whole_batch(torch.float32), rank, ranks)
        model, inside = network(torch.float32), network(torch.float32)
        ddp = nn.parallel.DistributedDataParallel(inside)
        before = [one.detach().clone() for one in (*model.parameters(), *inside.parameters())]
        few: dict[str, Any] = {"steps": 10, "seeds": 1, "batch_size": 3}

        def settings(distributed: str | None = None) -> hessinit.RunSettings:
            return hessinit.RunSettings(
                workers=1, progress=False, measure_curvature=False, distributed=distributed
            )

        verbs: dict[str, Callable[..., Any]] = {
            "measure": partial(hessinit.measure, loss=loss, batch=own),
            "advise": partial(hessinit.advise, loss=loss, batch=own, trial_steps=2),
            "assert_sound": partial(hessinit.assert_sound, loss=loss, batch=own),
            "track": partial(hessinit.track, loss=loss, batch=own, path=None, log_to=None),
            "initialize_": partial(hessinit.initialize_, loss=loss, batch=own, lr=0.1, dry_run=True),
            "apply_scheme_": partial(hessinit.apply_scheme_, scheme="he", dry_run=True),
        }
        alike = {
            "compare": partial(
                hessinit.compare, lambda: network(torch.float32), loss, own, schemes=["he", "hessinit"],
                learning_rates=[0.1], **few,
            ),
            "sweep": partial(
                hessinit.sweep, lambda: network(torch.float32), loss, own, stds=[0.1], **few
            ),
        }  # fmt: skip
        for verb in verbs.values():
            attempt(lambda verb=verb: verb(model))
            attempt(lambda verb=verb: verb(ddp))
            attempt(lambda verb=verb: verb(ddp, distributed="each"))
        for verb in alike.values():
            attempt(lambda verb=verb: verb(settings=settings()))
        after = [one.detach() for one in (*model.parameters(), *inside.parameters())]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        for verb in verbs.values():
            attempt(lambda verb=verb: verb(model, distributed="each"))
        for verb in alike.values():
            attempt(lambda verb=verb: verb(settings=settings("each")))
            attempt(lambda verb=verb: verb(settings=settings("batch")))
        report = hessinit.assert_sound(ddp, loss, own, lr=0.1, distributed="batch")
        print(f"assert_sound judged {report.examples} examples", flush=True)
        if rank == 0:  # alone, while the others do something else
            print(hessinit.measure(inside, loss, own, distributed="each").examples, flush=True)

    return on_ranks(work)


def refuse() -> Callable[[], None]:
    def work(rank: int, ranks: int) -> None:
        warnings.simplefilter("ignore")
        second, loss, batch = rank == 1, nn.CrossEntropyLoss(), whole_batch(torch.float32)
        own = share(batch, rank, ranks)

        def attempt(data: Any = own, model: Any = None, loss: Any = loss, **options: Any) -> None:
            model = model or network(torch.float32)
            tell(lambda: measure(model, loss, data, **{"distributed": "batch", **options}))

        other, wider = network(torch.float32), nn.Sequential(nn.Linear(6, 5 + rank), nn.Linear(5 + rank, 3))
        with torch.no_grad():
            other[2].weight[0, 0] += float(rank == 1)
        attempt(tolerance=0.01 if second else 0.001)
        attempt(layers="2" if second else None)
        attempt(model=wider)
        attempt(model=other)
        attempt(own, distributed="layers")
        attempt(tuple(one[: 0 if second else 3] for one in own))
        attempt((own[0] / float(not second), own[1]))
        attempt(distributed="examples")
        attempt(details="diagnostics")
        normalized = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        ones = {name: torch.ones_like(one) for name, one in normalized.state_dict().items()}
        normalized.load_state_dict(ones)
        attempt(model=normalized)
        attempt(model=normalized.eval())
        attempt(model=normalized.train(), data=batch, distributed="layers")
        attempt(model=nn.SyncBatchNorm.convert_sync_batchnorm(normalized))
        squares = nn.MSELoss()
        attempt((own[0], own[0][:, :3]), loss=lambda z, y: squares(z, y).sqrt())
        attempt(loss=lambda z, _: (z @ z.T).logsumexp(1).mean())
        tokens = torch.arange(own[0][:, :4].numel()).view(-1, 4) % 5
        for model in (Positions(False), Positions(True)):
            attempt((tokens, tokens.flatten()), model)
        with pytest.MonkeyPatch.context() as patch:
            if second:
                patch.setattr(GaussNewtonOperator, "_product", lambda *_: [][3])
            attempt(estimator="lanczos")
        attempt()

    return on_ranks(work)


def talk_beside() -> Callable[[], None]:
    """A group that knows no CPU, as NCCL's, gets one for messages beside it, once."""

    def work() -> None:
        dist.init_process_group("cuda:gloo")
        model, batch, loss = network(torch.float64), whole_batch(torch.float64), nn.CrossEntropyLoss()
        truth = hessinit.measure(model, loss, batch, tolerance=1e-7, distributed="each")
        own = share(batch, dist.get_rank(), dist.get_world_size())
        for _ in range(2):
            found = hessinit.measure(model, loss, own, distributed="batch", tolerance=1e-7)
            assert abs(found.network.norm / truth.network.norm - 1) < 1e-6
        assert len(_gloo_groups) == 1
        dist.destroy_process_group()

    return work


def lose_a_rank() -> Callable[[], None]:
    """Of two ranks the first dies, of three the last, of four the second while it measures its layers."""

    def work(rank: int, ranks: int) -> None:
        victim, calls, started = {2: 0, 3: 2, 4: 1}[ranks], itertools.count().__next__, time.perf_counter()
        model, batch, loss = network(torch.float32), whole_batch(torch.float32), nn.CrossEntropyLoss()
        plain = GaussNewtonOperator._product

        def product(operator: GaussNewtonOperator, vector: torch.Tensor) -> torch.Tensor:
            if rank == victim and calls() == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(operator, vector)

        GaussNewtonOperator._product = product  # type: ignore[method-assign]
        mode = "layers" if ranks == 4 else "batch"
        own = batch if mode == "layers" else share(batch, rank, ranks)
        tell(lambda: hessinit.measure(model, loss, own, distributed=mode, estimator="lanczos"))
        print(f"after {time.perf_counter() - started:.1f} s", flush=True)
        os._exit(0)

    def join() -> None:
        dist.init_process_group("gloo")
        work(dist.get_rank(), dist.get_world_size())

    return join


def shard_afterwards() -> Callable[[], None]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    def work(rank: int, ranks: int) -> None:
        warnings.simplefilter("ignore")
        loss, batch = nn.CrossEntropyLoss(), whole_batch(torch.float32, 32)
        mesh = init_device_mesh("cpu", (ranks,))

        def is_kept(model: nn.Module, truth: dict[str, torch.Tensor]) -> bool:
            found = {name: one.full_tensor() for name, one in model.named_parameters()}
            return all(torch.equal(one, truth[name]) for name, one in found.items())

        model = network(torch.float32)
        hessinit.initialize_(model, loss, share(batch, rank, ranks), lr=0.5, distributed="batch")
        truth = {name: one.detach().clone() for name, one in model.named_parameters()}
        sharded = fully_shard(model, mesh=mesh)
        assert is_kept(sharded, truth)
        for verb in (hessinit.measure, hessinit.initialize_):
            tell(lambda verb=verb: verb(sharded, loss, batch))
            tell(lambda verb=verb: verb(sharded, loss, batch, distributed="each"))
            tell(lambda verb=verb: verb(sharded, loss, batch, distributed="layers"))
        # The whole model on rank 0 alone: the others build theirs without memory, and get their shards.
        state = {name: one.clone() for name, one in truth.items()} if rank == 0 else {}
        with torch.device("meta"):
            empty = network(torch.float32)
        empty = fully_shard(empty, mesh=mesh).to_empty(device="cpu")
        from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(empty, state, options=from_first)
        assert is_kept(empty, truth)
        whole = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        hessinit.initialize_(whole, loss, batch, lr=0.5, distributed="layers")
        truth = {name: one.detach().clone() for name, one in whole.named_parameters()}
        parallel = parallelize_module(whole, mesh, {"0": ColwiseParallel(), "2": ColwiseParallel()})
        assert is_kept(parallel, truth)
        tell(lambda: hessinit.measure(parallel, loss, batch))

    return on_ranks(work)
