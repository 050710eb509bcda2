"""The contestants of `untuned.py`: ways to weights and a learning rate, and optimizers that need none."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, here and in the workers
os.environ.setdefault("TQDM_DISABLE", "1")  # the finder draws a bar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from untuned_tasks import Task

import hessinit
from hessinit.training.loop import Data, copy_to, read_data, seed_everything

GRID = {  # in the order in which people try them
    "adamw": (1e-3, 3e-3, 3e-4, 1e-2, 1e-4, 3e-2),
    "momentum": (0.1, 0.03, 0.01, 0.3, 0.003, 0.001),
}
RATES = {"adamw": (3e-4, 1e-3, 3e-3), "momentum": (0.01, 0.03, 0.1)}  # at which starts are compared
FREE = {  # optimizers without a learning rate to choose
    "adamw": ("prodigy", "prodigy guarded", "dadapt", "ldog", "schedulefree"),
    "momentum": ("dadapt", "dog", "schedulefree"),
}
LAST = 30  # steps whose mean loss is the final training loss
RECALIBRATION = 50  # mini-batches, as the README of Schedule-Free says
TRAINING_BATCHES = 1000  # added to the seed: no search sees the order of the training's mini-batches
Counts = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """Initial weights and a learning rate, None where the optimizer has its own; what the search counted."""

    model: nn.Module
    lr: float | None
    counts: Counts = field(default_factory=dict)


# --- Training ---------------------------------------------------------------------------------------------


class Bench:
    """The trainings of a task with one optimizer and one seed: all see the same mini-batches."""

    def __init__(self, task: Task, optimizer: str, seed: int, device: torch.device) -> None:
        self.task = task
        self.optimizer = optimizer
        self.seed = seed
        self.device = device
        self.examples = task.data()
        self.data: Data = read_data(self.examples, task.batch_size, 1)

    def model(self) -> nn.Module:
        """A new model with PyTorch's own weights."""
        seed_everything(self.seed, "build")
        return self.task.build().to(self.device).train()

    def batch(self) -> tuple[Tensor, Tensor]:
        """The mini-batch that a search without data sees."""
        return copy_to(self.data.initial_batch(self.seed), self.device)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (copy_to(batch, self.device) for batch in self.data.minibatches(seed))

    def problem(self) -> hessinit.Problem:
        return hessinit.Problem(self.model(), self.task.loss, self.batch(), seed=self.seed)

    def step(self, model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> float:
        """Make a step; return the loss before it. With one that is not finite, none is made."""
        optimizer.zero_grad()
        loss = self.task.loss(model(batch[0]), batch[1])
        value = loss.item()
        if math.isfinite(value):
            loss.backward()
            optimizer.step()
        return value

    def train(self, start: Start, contestant: str, steps: int) -> Counts:
        """Train a copy of the start; returns what came out, with loss None where training failed."""
        model = copy.deepcopy(start.model).train()
        seed_everything(self.seed, "training")
        name = contestant if contestant in FREE[self.optimizer] else self.optimizer
        optimizer = build_optimizer(name, self.optimizer, model, start.lr, steps)
        schedule = None if name in ("dog", "ldog", "schedulefree") else CosineAnnealingLR(optimizer, steps)
        averager = average_weights(model) if name in ("dog", "ldog") else None
        losses = []
        for batch in itertools.islice(self.batches(TRAINING_BATCHES + self.seed), steps):
            losses.append(self.step(model, optimizer, batch))
            if not math.isfinite(losses[-1]):
                return {"loss": None, "training": None, "message": f"diverged at step {len(losses)}"}
            if schedule is not None:
                schedule.step()
            if averager is not None:
                averager.step()
        if name == "schedulefree":
            self.recalibrate(model, optimizer)
        loss, accuracy = self.task.evaluate(model if averager is None else averager.averaged_model)
        return {
            "loss": loss if math.isfinite(loss) else None,
            "accuracy": accuracy,
            "training": statistics.fmean(losses[-LAST:]),
            **({"d": optimizer.param_groups[0]["d"]} if "d" in optimizer.param_groups[0] else {}),
        }

    def recalibrate(self, model: nn.Module, optimizer: Any) -> None:
        """Switch to the averaged weights, and set the statistics of BatchNorm for them."""
        optimizer.eval()
        if has_batch_norm(model):
            with torch.no_grad():
                for inputs, _ in itertools.islice(self.batches(self.seed), RECALIBRATION):
                    model(inputs)

    # --- What a search costs

    def time_search(self, search: Callable[[], Start]) -> tuple[Start, float]:
        """What a search returns, and its time in units of a training step, measured before and after."""
        times = self.step_times()
        started = self.clock()
        start = search()
        seconds = self.clock() - started
        return start, seconds / statistics.median(times + self.step_times())

    def step_times(self) -> list[float]:
        model = self.model()
        optimizer = build_optimizer(self.optimizer, self.optimizer, model, 1e-6, 1)
        times = []
        for batch in itertools.islice(self.batches(self.seed), 12):
            started = self.clock()
            self.step(model, optimizer, batch)
            times.append(self.clock() - started)
        return times[2:]

    def clock(self) -> float:
        """Processor seconds; on a GPU seconds."""
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()


def build_optimizer(name: str, kind: str, model: nn.Module, lr: float | None, steps: int) -> Optimizer:
    """The optimizer over the model's weights, with the settings that its authors recommend.

    `kind` is what an optimizer without a learning rate stands in for: "adamw" or "momentum".
    """
    weights = model.parameters()
    built: Any
    if name == "adamw":
        built = torch.optim.AdamW(weights, lr=lr)
    elif name == "momentum":
        built = torch.optim.SGD(weights, lr=lr, momentum=0.9)
    elif name in ("prodigy", "prodigy guarded"):
        from prodigyopt import Prodigy

        # The README advises the two switches for diffusion models, and for schedules with a warmup.
        is_guarded = name == "prodigy guarded"
        built = Prodigy(
            weights, weight_decay=0.01, safeguard_warmup=is_guarded, use_bias_correction=is_guarded
        )
    elif name == "dadapt":
        from dadaptation import DAdaptAdam, DAdaptSGD

        if kind == "adamw":
            built = DAdaptAdam(weights, lr=1.0, decouple=True, weight_decay=0.01)
        else:
            built = DAdaptSGD(weights, lr=1.0, momentum=0.9)
    elif name in ("dog", "ldog"):
        from dog import DoG, LDoG

        # "Suggested value is 1e-6, unless the model uses batch-normalization": 1e-4.
        first_step = 1e-4 if has_batch_norm(model) else 1e-6
        built = (DoG if name == "dog" else LDoG)(weights, reps_rel=first_step)
    elif name == "schedulefree":
        from schedulefree import AdamWScheduleFree, SGDScheduleFree

        schedule_free = AdamWScheduleFree if kind == "adamw" else SGDScheduleFree
        built = schedule_free(weights, warmup_steps=max(1, steps // 20))
        built.train()
    else:
        raise ValueError(f"optimizer {name!r} is unknown.")
    return built


def average_weights(model: nn.Module) -> Any:
    from dog import PolynomialDecayAverager

    return PolynomialDecayAverager(model)


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


# --- Searches ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contestant:
    """A name, and how the weights and the rate are found: `search(bench, steps of the training)`."""

    name: str
    search: Callable[[Bench, int], Start]
    is_timed: bool = True
    sees_horizon: bool = False  # else one search serves all horizons
    guess: int = 0  # how many steps the search may take: for the order of the jobs only


def contestants_of(optimizer: str) -> list[Contestant]:
    contestants = [Contestant(f"grid {rate:g}", _own(rate), False) for rate in sorted(GRID[optimizer])]
    for rate in RATES[optimizer]:
        for scheme in ("he", "lsuv"):
            contestants.append(Contestant(f"{scheme} {rate:g}", _drawn(scheme, rate)))
        contestants.append(Contestant(f"fit {rate:g}", _fitted(rate), guess=150))
        contestants.append(Contestant(f"fit+data {rate:g}", _raced(rate), sees_horizon=True, guess=300))
    contestants += [
        Contestant("advise", _advise, guess=200),
        Contestant("advise+data", _advise_with_data, sees_horizon=True, guess=300),
        Contestant("auto", _raced("auto"), sees_horizon=True, guess=400),
        Contestant("finder", _find, guess=100),
    ]
    return contestants + [Contestant(name, _own(None), False) for name in FREE[optimizer]]


def _own(rate: float | None) -> Callable[[Bench, int], Start]:
    return lambda bench, _: Start(bench.model(), rate)


def _drawn(scheme: str, rate: float) -> Callable[[Bench, int], Start]:
    def search(bench: Bench, _: int) -> Start:
        model = bench.model()
        seed_everything(bench.seed, "scheme")
        hessinit.apply_scheme_(model, scheme, sample=bench.batch()[0])
        return Start(model, rate)

    return search


def _fitted(rate: float) -> Callable[[Bench, int], Start]:
    def search(bench: Bench, _: int) -> Start:
        problem = bench.problem()
        result = hessinit.initialize_(problem, lr=rate, optimizer=bench.optimizer, progress=False)
        return Start(problem.model, rate, _counts_of(result))

    return search


def _raced(rate: float | str) -> Callable[[Bench, int], Start]:
    def search(bench: Bench, steps: int) -> Start:
        problem = bench.problem()
        result = hessinit.initialize_(
            problem, lr=rate, optimizer=bench.optimizer, data=bench.examples, steps=steps, progress=False
        )
        return Start(problem.model, result.lr, _counts_of(result))

    return search


def _advise(bench: Bench, _: int) -> Start:
    problem = bench.problem()
    advice = hessinit.advise(problem, optimizer=bench.optimizer)
    return Start(problem.model, advice.learning_rate, _counts_of(advice))


def _advise_with_data(bench: Bench, steps: int) -> Start:
    problem = bench.problem()
    advice = hessinit.advise(problem, optimizer=bench.optimizer, data=bench.examples, steps=steps)
    return Start(problem.model, advice.learning_rate, _counts_of(advice))


def _counts_of(result: Any) -> Counts:
    """What a result of hessinit says of its search."""
    counts: Counts = {"gradients": result.gradients, "trials": len(result.trials)}
    counts["trial_steps"] = sum(trial.steps for trial in result.trials)
    if isinstance(result, hessinit.Initialization):
        counts["scheme"] = result.scheme
        counts["winner"] = result.trials[0].name if result.trials else None
    return counts


def _find(bench: Bench, _: int) -> Start:
    """Lightning's finder with its defaults; where it suggests nothing, the module keeps its rate, 1e-3."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    for name in ("lightning.pytorch", "pytorch_lightning", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    model = bench.model()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = model
            self.lr = 1e-3

        def training_step(self, batch: Any, _: int) -> Any:
            return bench.task.loss(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return build_optimizer(bench.optimizer, bench.optimizer, self, self.lr, 1)

    batches = list(itertools.islice(bench.batches(bench.seed), 150))  # it makes 100 steps
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            default_root_dir=folder,
            accelerator="cpu" if bench.device.type == "cpu" else "gpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(batches, batch_size=None)
        found = Tuner(trainer).lr_find(Module(), train_dataloaders=loader)
    suggested = found.suggestion() if found else None
    tried = len(found.results["lr"]) if found else 0
    return Start(bench.model(), suggested or 1e-3, {"suggested": suggested, "trial_steps": tried})
