"""What the ranks of a job do with a model that FSDP2 has sharded: each function returns the work of one."""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measuring_ranks import on_ranks, share, whole_batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import hessinit
from hessinit.problem import ranks as ranks_module
from hessinit.problem.ranks import calling_ranks, on_all_ranks, tolerating
from hessinit.problem.shards import local_part

LOSS = nn.CrossEntropyLoss()
DEVICE = "cpu"


class Middle(nn.Tanh):
    """Between two sharded layers: the others wait in a collective for the rank on which it raises."""

    happens: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.happens()
        return super().forward(inputs)


class Counting(nn.Linear):
    """Counts its calls in its class, which FSDP2 derives another from."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return super().forward(input)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), Middle(), Counting(5, 3)).to(DEVICE)


def normalized() -> nn.Module:
    """The first weight is free of scale, the others are neighbours in a chain."""
    torch.manual_seed(3)
    parts = (nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return nn.Sequential(*parts).to(DEVICE)


def sharded(model: nn.Module, **options: Any) -> Any:
    """Every layer on all ranks, and the rest of the model: 5 rows on 2 or 4 ranks are unequal shards."""
    options.setdefault("mesh", init_device_mesh(DEVICE, (dist.get_world_size(),)))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def shares(examples: int) -> tuple[Any, Any]:
    """The batch of all ranks, and the part of this one, of the same size on all."""
    inputs, targets = (part.to(DEVICE) for part in whole_batch(torch.float32, examples))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = slice(rank * examples // ranks, (rank + 1) * examples // ranks)
    return (inputs, targets), (inputs[part], targets[part])


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [local_part(tensor).clone() for tensor in (*model.parameters(), *model.buffers())]


class Untouched:
    """Everything that training may change of a sharded model is the same afterwards."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def _state(self) -> list[Any]:
        parameters = dict(self._model.named_parameters())
        return [(name, id(weight), id(weight.grad)) for name, weight in parameters.items()]

    def __enter__(self) -> None:
        self._before = self._state(), bits(self._model), torch.get_rng_state(), Counting.calls

    def __exit__(self, *failure: object) -> None:
        state, values, random, calls = self._before
        assert calls == Counting.calls
        assert state == self._state()
        assert all(map(torch.equal, values, bits(self._model)))
        assert torch.equal(random, torch.get_rng_state())


def assert_same_everywhere(value: Any) -> None:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    assert everywhere == everywhere[:1] * len(everywhere)


def answer(*, fully: bool) -> Callable[[int, int], None]:
    """Every verb, beside the same on the plain model with the examples of all ranks."""

    def work(rank: int, ranks: int) -> None:
        warnings.simplefilter("ignore")
        batch, own = shares(64)
        plain, model = network(), sharded(network())
        LOSS(model(own[0]), own[1]).backward()  # gradients of the user's, and their way of a step
        for name in ("sgd", "adamw") if fully else ("adamw",):
            training = hessinit.Training(name, clip_norm=0.1)
            options: Any = {"optimizer": training, "tolerance": 1e-3}
            truth = hessinit.advise(plain, LOSS, batch, trial_steps=0, distributed="each", **options)
            with Untouched(model):
                found = hessinit.advise(
                    model, LOSS, own, trial_steps=16 if fully else 2, distributed="batch", **options
                )
            assert "No trial" not in " ".join(found.notes)
            assert found.examples == 64
            assert found.loss == pytest.approx(truth.loss, rel=1e-5)
            assert found.norm.value == pytest.approx(truth.norm.value, rel=1e-3)
            assert found.stable_learning_rate == pytest.approx(truth.stable_learning_rate, rel=1e-3)
            assert_same_everywhere(found.to_json())
        named = hessinit.measure(model, LOSS, own, distributed="batch", estimator="plain")
        norm = hessinit.measure(plain, LOSS, batch, distributed="each").network.norm
        assert named.network.norm == pytest.approx(norm, rel=1e-3)
        summed: Any = nn.CrossEntropyLoss(reduction="sum")  # FSDP2 averages its gradients over ranks
        for name in ("sgd", "adamw") if fully else ("sgd",):
            options = {"optimizer": name, "tolerance": 1e-3, "trial_steps": 0}
            mean = hessinit.Problem(plain, lambda z, y: summed(z, y) / ranks, batch, reduction="sum")
            truth = hessinit.advise(mean, distributed="each", **options)
            found = hessinit.advise(model, summed, own, distributed="batch", **options)
            assert found.loss == pytest.approx(truth.loss, rel=1e-5)
            assert found.stable_learning_rate == pytest.approx(truth.stable_learning_rate, rel=1e-3)
        for rate in (0.5, 1e3):
            verdicts = []
            for judged, data, mode in ((plain, batch, "each"), (model, own, "batch")):
                try:
                    hessinit.assert_sound(judged, LOSS, data, lr=rate, distributed=mode)
                    verdicts.append("")
                except AssertionError as failure:
                    verdicts.append(str(failure).splitlines()[1].partition(", which is")[0])
            assert verdicts[0] == verdicts[1]
            assert bool(verdicts[0]) == (rate > 1)
        track(plain, model, batch, own)
        goals: list[tuple[Any, Any]] = [(network, {"lr": 0.5, "optimizer": "adamw"})]
        if fully:  # by LSUV and gains, and along symmetries
            scheme = hessinit.Fit(scheme="he")
            goals = [
                (network, {"lr": 0.5}),
                (normalized, {"lr": 0.5, "fit": scheme}),
                (normalized, {"lr": 0.5, "optimizer": "adamw"}),
            ]
        for build, goal in goals:
            initialize(build, goal, batch, own)

    return work


def track(plain: nn.Module, model: Any, batch: Any, own: Any) -> None:
    points = []
    for trained, data, mode in ((plain, batch, "each"), (model, own, "batch")):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
        options: Any = {"optimizer": optimizer, "path": None, "max_overhead": 1.0, "distributed": mode}
        with hessinit.track(trained, LOSS, data, every=2, log_to=None, **options) as tracker:
            for _ in range(2):
                optimizer.zero_grad()
                value = LOSS(trained(data[0]), data[1])
                value.backward()
                optimizer.step()
                tracker.step(value)
        points.append(tracker.tracking.points)
    assert [point.step for point in points[1]] == [0, 2]
    for truth, found in zip(*points, strict=True):
        assert not found.note
        assert found.loss == pytest.approx(truth.loss, rel=1e-5)
        assert found.norm == pytest.approx(truth.norm, rel=2e-3)
        assert found.stable_learning_rate == pytest.approx(truth.stable_learning_rate, rel=2e-3)
    assert_same_everywhere(points[1])


def initialize(build: Callable[[], nn.Module], goal: Any, batch: Any, own: Any) -> None:
    plain, model = build(), sharded(build())
    before = bits(model)
    truth = hessinit.initialize_(plain, LOSS, batch, distributed="each", **goal)
    if build is network:
        with Untouched(model):
            hessinit.initialize_(model, LOSS, own, distributed="batch", dry_run=True, **goal)
    found = hessinit.initialize_(model, LOSS, own, distributed="batch", **goal)
    assert (found.converged, found.scaling, found.plan is None) == (
        truth.converged, truth.scaling, truth.plan is None,
    )  # fmt: skip
    if truth.after is not None:
        assert found.after is not None
        assert found.after.network.norm == pytest.approx(truth.after.network.norm, rel=1e-3)
        assert found.after.examples == 64
    expected = dict(plain.named_parameters())
    for name, weight in model.named_parameters():
        whole = weight.full_tensor()
        assert float((whole - expected[name]).norm()) <= 1e-3 * float(expected[name].norm()), name
    assert_same_everywhere(found.to_json())
    found.undo()
    assert all(map(torch.equal, before, bits(model)))


@on_all_ranks()
def train(problem: Any, loss: Any = None, batch: Any = None, *, distributed: str | None = None) -> float:
    """A verb that trains for three steps, and does not mind a ValueError on all ranks."""
    ranks = calling_ranks()
    assert ranks is not None
    total = torch.zeros(())
    for _ in range(3):
        with tolerating(ValueError):
            inputs, targets = problem.batch[0]
            value = problem.loss(problem.model(inputs), targets)
            value.backward()
            total = ranks.sum(value)
    return float(total)


def attempt(verb: Any, model: Any, batch: Any, **options: Any) -> None:
    try:
        verb(model, LOSS, batch, **{"distributed": "batch", **options})
        print("nothing refused", flush=True)
    except Exception as failure:
        print(f"{type(failure).__name__}: {failure}", flush=True)


def refuse() -> Callable[[], None]:
    """What is refused on all ranks, and leaves them connected; then what one of them alone raises."""

    def work() -> None:
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        warnings.simplefilter("ignore")
        _, own = shares(64)
        measure = hessinit.measure
        model = sharded(network())
        for mode in (None, "each", "layers"):
            attempt(measure, model, own, distributed=mode)
        hybrid = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("copies", "shards"))
        attempt(measure, sharded(network(), mesh=hybrid), own)
        attempt(measure, sharded(network(), offload_policy=CPUOffloadPolicy(pin_memory=False)), own)
        divided = sharded(network())
        divided[0].set_gradient_divide_factor(1.0)
        attempt(measure, divided, own)
        alone = [DeviceMesh("cpu", [other]) for other in range(ranks)]
        attempt(measure, sharded(network(), mesh=alone[rank]), own)
        turned = network()
        fully_shard(turned[0], mesh=DeviceMesh("cpu", list(range(ranks))[::-1]))
        attempt(measure, fully_shard(turned, mesh=init_device_mesh("cpu", (ranks,))), own)
        partly = network()
        fully_shard(partly[0], mesh=init_device_mesh("cpu", (ranks,)))
        attempt(measure, partly, own)
        attempt(measure, parallelize_module(network(), alone[rank], {"0": ColwiseParallel()}), own)
        attempt(measure, model, [own] * (1 + (rank == 1)))
        attempt(measure, model, (own[0] / float(rank != 1), own[1]))
        attempt(hessinit.initialize_, model, own, lr=0.1, data=[own] * 4)
        halved = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))
        attempt(hessinit.initialize_, sharded(nn.Sequential(halved)), own, lr=0.1)

        def fail(kind: type[Exception]) -> None:
            raise kind("by itself")

        for kind in (TypeError, ValueError):  # of which a verb may tolerate the second
            model[1].happens = partial(fail, kind)
            attempt(train, model, own)
        if rank == 1:
            with torch.no_grad():
                local_part(model[0].weight)[0, 0] = torch.nan
        model[1].happens = lambda: None
        attempt(measure, model, own)
        with torch.no_grad():
            local_part(model[0].weight).fill_(0.1)
        attempt(measure, model, own)
        ranks_module.LOCKSTEP = replace(ranks_module.LOCKSTEP, patience=timedelta(seconds=1))
        model[1].happens = partial(fail, TypeError) if rank == 1 else lambda: None
        with Untouched(model):
            attempt(hessinit.advise, model, own)
        dist.destroy_process_group()
        attempt(measure, model, own)
        attempt(measure, model, own, distributed=None)

    return work


def lose_a_rank() -> Callable[[], None]:
    """Of two ranks the first dies, of four the third, in the forward of a trial."""

    def join() -> None:
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model, batch = sharded(network()), share(whole_batch(torch.float32), rank, ranks)
        calls = itertools.count().__next__  # what is put back does not reach it

        def die() -> None:
            if rank == {2: 0, 4: 2}[ranks] and calls() == 30:
                os.kill(os.getpid(), signal.SIGKILL)

        model[1].happens = die
        started = time.perf_counter()
        with Untouched(model):
            attempt(hessinit.advise, model, batch)
        print(f"after {time.perf_counter() - started:.1f} s", flush=True)
        os._exit(0)

    return join


def answer_fully() -> Callable[[], None]:
    return on_ranks(answer(fully=True))


def answer_briefly() -> Callable[[], None]:
    return on_ranks(answer(fully=False))


def answer_on_a_gpu() -> Callable[[], None]:
    def join() -> None:
        global DEVICE
        DEVICE = "cuda"
        dist.init_process_group("nccl")
        answer(fully=True)(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()

    return join
