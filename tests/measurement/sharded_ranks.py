"""What the ranks of a job do with a model that FSDP2 has sharded: each function returns the work of one."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measuring_ranks import on_ranks, share, whole_batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hessinit
from hessinit.problem.problem import Problem
from hessinit.problem.ranks import _made_by, calling_ranks, on_all_ranks, tolerating
from hessinit.problem.sharding import local_part
from hessinit.training.advise import search_rate
from hessinit.training.optimizer_rules import build_optimizer_rule
from hessinit.training.optimizers import Training
from hessinit.training.trial import TrainingSetup, prepare_trials


class Middle(nn.Tanh):
    """Between two sharded layers: the others wait in a collective for the rank on which it raises."""

    happens: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.happens()
        return super().forward(inputs)


def network(width: int = 5) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, width), Middle(), nn.Linear(width, 3))


def sharded(model: nn.Module, **options: Any) -> Any:
    """Every layer, and the model, on all ranks: 5 rows on 2 or 4 ranks are unequal shards."""
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


@on_all_ranks()
def train(problem: Any, loss: Any = None, batch: Any = None, *, distributed: str | None = None) -> float:
    """A verb that trains for three steps."""
    ranks = calling_ranks()
    assert ranks is not None
    assert ranks.sharded
    assert isinstance(problem, Problem)
    total = torch.zeros(())
    for _ in range(3):
        with tolerating(ValueError):
            value = problem.loss(problem.model(problem.batches[0].inputs), problem.batches[0].targets)
            value.backward()
            total = ranks.sum(value)
    return float(total)


def attempt(model: nn.Module, batch: Any, verb: Any = train, **options: Any) -> None:
    try:
        print(verb(model, nn.CrossEntropyLoss(), batch, **{"distributed": "batch", **options}), flush=True)
    except Exception as failure:
        print(f"{type(failure).__name__}: {failure}", flush=True)


def fail() -> Callable[[], None]:
    """Every rank raises; then one alone does so, while the others wait for it."""

    def work(rank: int, ranks: int) -> None:
        warnings.simplefilter("ignore")
        model, batch = sharded(network()), share(whole_batch(torch.float32), rank, ranks)
        attempt(model, batch)

        def refuse() -> None:
            raise TypeError("alike")

        model[1].happens = refuse
        attempt(model, batch)

        def be_tolerated() -> None:
            raise ValueError("tolerated")

        model[1].happens = be_tolerated
        attempt(model, batch)
        model[1].happens = lambda: None
        attempt(model, batch)
        model[1].happens = refuse if rank == 1 else lambda: None
        attempt(model, batch)

    def join() -> None:
        dist.init_process_group("gloo")
        work(dist.get_rank(), dist.get_world_size())

    return join


def lose_a_rank() -> Callable[[], None]:
    """Of two ranks the first dies, of four the third."""

    def join() -> None:
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model, batch = sharded(network()), share(whole_batch(torch.float32), rank, ranks)
        if rank == {2: 0, 4: 2}[ranks]:
            model[1].happens = lambda: os.kill(os.getpid(), signal.SIGKILL)
        started = time.perf_counter()
        attempt(model, batch)
        print(f"after {time.perf_counter() - started:.1f} s", flush=True)
        os._exit(0)

    return join


@on_all_ranks(lambda ranks, _, work: ranks.first(work, last=True))
def search(
    problem: Any, loss: Any = None, batch: Any = None, *, name: str, distributed: str | None = None
) -> Any:
    """The trials of `advise`, from a rate at which they go both ways."""
    model = problem.model
    training = Training.of(name)
    rule = build_optimizer_rule(training, model)
    setup = TrainingSetup.of(problem, training)
    with prepare_trials(setup, problem.batches) as setting:
        return search_rate(setting, rule, 0.2, 12), setting.setup.loss_range


def bits(model: nn.Module) -> list[Any]:
    tensors = [local_part(tensor) for tensor in (*model.parameters(), *model.buffers())]
    return [tensor.clone() for tensor in tensors]


def try_rates() -> Callable[[], None]:
    def work(rank: int, ranks: int) -> None:
        warnings.simplefilter("ignore")
        loss = nn.CrossEntropyLoss()
        for examples, size in ((12, 5), (48, 6)):
            inputs, targets = whole_batch(torch.float32, examples)
            part = slice(rank * examples // ranks, (rank + 1) * examples // ranks)
            own = inputs[part], targets[part]
            for name in ("sgd", "adamw"):
                plain, model = network(size), sharded(network(size))
                loss(model(own[0]), own[1]).backward()
                before, gradients = bits(model), [parameter.grad for parameter in model.parameters()]
                names = {name: id(parameter) for name, parameter in model.named_parameters()}
                found, height = search(Problem(model, loss, own), name=name, distributed="batch")
                assert names == {name: id(parameter) for name, parameter in model.named_parameters()}
                assert all(map(torch.equal, before, bits(model)))
                after = [parameter.grad for parameter in model.parameters()]
                assert all(one is other for one, other in zip(gradients, after, strict=True))
                with _made_by(None):
                    truth, true_height = search.__wrapped__(
                        Problem(plain, loss, (inputs, targets)), name=name
                    )
                assert abs(height.constant - true_height.constant) < 1e-6
                pairs = list(zip(found.trials, truth.trials, strict=False))
                for one, other in pairs:
                    assert one.losses[0] == pytest.approx(other.losses[0], rel=1e-5)
                if examples < 16:  # no halves: the same steps
                    for one, other in pairs:
                        assert one.outcome == other.outcome
                        assert one.losses == pytest.approx(other.losses, rel=1e-3)
                    assert found.rate == pytest.approx(truth.rate, rel=1e-3)
                print(name, examples, found.rate, truth.rate, len(found.trials), len(truth.trials))
                everywhere: list[Any] = [None] * ranks
                dist.all_gather_object(everywhere, found)
                assert everywhere == everywhere[:1] * ranks

    return on_ranks(work)


def ask() -> Callable[[], None]:
    def work(rank: int, ranks: int) -> None:
        warnings.simplefilter("ignore")
        loss = nn.CrossEntropyLoss()
        inputs, targets = whole_batch(torch.float32, 48)
        part = slice(rank * 48 // ranks, (rank + 1) * 48 // ranks)
        own = inputs[part], targets[part]
        plain, model = network(), sharded(network())
        before = bits(model)
        import traceback

        def go(what, *args, **kw):
            t = time.perf_counter()
            try:
                r = what(model, loss, own, distributed="batch", **kw)
                s = what(plain, loss, (inputs, targets), distributed="each", **kw)
                return r, s
            except BaseException:
                print(what.__name__, traceback.format_exc()[-1500:], flush=True)
            finally:
                print(what.__name__, f"{time.perf_counter() - t:.1f} s", flush=True)

        r = go(hessinit.measure)
        if r:
            for a, b in zip((*r[0].layers, r[0].network), (*r[1].layers, r[1].network)):
                print(a.name, a.norm, b.norm, a.norm / b.norm - 1)
            print(r[0].examples, r[0].loss, r[1].loss, r[0].findings, r[1].findings)
        for o in ("sgd", "adamw"):
            r = go(hessinit.advise, optimizer=o)
            if r:
                print(
                    o,
                    r[0].learning_rate,
                    r[1].learning_rate,
                    r[0].stable_learning_rate / r[1].stable_learning_rate - 1,
                    r[0].examples,
                    r[0].loss,
                    r[1].loss,
                    r[0].notes,
                )
        r = go(hessinit.assert_sound, lr=0.5)
        if r:
            print(r[0].findings, r[1].findings, r[0].loss, r[1].loss, r[0].examples)

        def tracked(m, l, b, **kw):
            opt = torch.optim.AdamW(m.parameters(), lr=0.1)
            with hessinit.track(m, l, b, optimizer=opt, path=None, max_overhead=1.0, every=2, **kw) as t:
                for _ in range(4):
                    v = l(m(b[0]), b[1])
                    m.zero_grad()
                    v.backward()
                    opt.step()
                    t.step(v)
                return t.tracking

        r = go(tracked)
        if r:
            for a, b in zip(r[0].points, r[1].points):
                print(
                    a.step,
                    a.norm,
                    b.norm,
                    a.stable_learning_rate,
                    b.stable_learning_rate,
                    a.note,
                    a.loss,
                    b.loss,
                )
        print(all(map(torch.equal, before, bits(model))))

    return on_ranks(work)


def draw() -> Callable[[], None]:
    import traceback

    def normal(width=5):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
        )

    def work(rank: int, ranks: int) -> None:
        warnings.simplefilter("ignore")
        loss = nn.CrossEntropyLoss()
        inputs, targets = whole_batch(torch.float32, 48)
        part = slice(rank * 48 // ranks, (rank + 1) * 48 // ranks)
        own = inputs[part], targets[part]
        for build in (network, normal):
            for options in (
                {},
                {"optimizer": "adamw"},
                {"fit": hessinit.Fit(scheme="he")},
                {"lr": None, "target": 2.0},
            ):
                options = {"lr": 0.5, **options}
                plain, model = build(), sharded(build())
                before = bits(model)
                t = time.perf_counter()
                truth = hessinit.initialize_(plain, loss, (inputs, targets), distributed="each", **options)
                t1 = time.perf_counter()
                try:
                    found = hessinit.initialize_(model, loss, own, distributed="batch", **options)
                except Exception:
                    print(traceback.format_exc()[-2500:], flush=True)
                    continue
                print(
                    build.__name__,
                    options,
                    f"{t1 - t:.1f} {time.perf_counter() - t1:.1f}",
                    found.reason,
                    "|",
                    truth.reason,
                    found.after and found.after.network.norm,
                    truth.after and truth.after.network.norm,
                    found.scales,
                    truth.scales,
                    found.survival and found.survival.outcome,
                    truth.survival and truth.survival.outcome,
                )
                names = dict(plain.named_parameters())
                print(
                    [
                        float((p.full_tensor() - names[n]).norm() / names[n].norm())
                        for n, p in model.named_parameters()
                        if p.ndim > 1
                    ],
                    flush=True,
                )
                found.undo()
                assert all(map(torch.equal, before, bits(model)))

    return on_ranks(work)
