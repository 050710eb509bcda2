"""One run: build a model, write its start, measure the curvature there, train for some steps."""

from __future__ import annotations

import copy
import math
import statistics
import threading
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.comparing.batching import place
from hessinit.comparing.divergence import has_diverged
from hessinit.comparing.experiment import Experiment, Job
from hessinit.comparing.optimizers import Warmup, make_optimizer
from hessinit.comparing.seeds import as_if_alone, derive, seed_everything
from hessinit.comparing.starts import OURS
from hessinit.errors import ConvergenceWarning, ProblemError
from hessinit.measurement.measure import measure
from hessinit.problem.batches import Batch
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import check_loss_value, check_model
from hessinit.results.comparison import MOST_POINTS, NETWORK, Run, round_loss, window

# Accuracy of the norms at the start: a percent is enough to compare starts.
TOLERANCE = 1e-2
NOT_MEASURED = "The curvature at the start was not measured"

# A run borrows the global generators and the thread count, so threads of an executor take turns.
_ONE_AT_A_TIME = threading.RLock()


def train_one(experiment: Experiment, job: Job) -> Run:
    """Make one run; the same numbers whenever and wherever it is made on machines of one kind."""
    started = time.perf_counter()
    with _ONE_AT_A_TIME, as_if_alone(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the first model's warnings were shown when the arguments were checked
        model = build_model(experiment, job.seed)
        loss = own_loss(experiment, model)
        chosen, device = experiment.data.starting_batch(job.seed), device_of(model)
        start = experiment.start(job.start)
        try:
            remark = start.write_(
                model, loss, place(chosen, device), job.learning_rate, job.seed, experiment.forward,
                experiment.optimizer,
            )  # fmt: skip
        except Exception as failure:  # whatever a start does not like about this model
            return _not_applicable(job, failure, time.perf_counter() - started)
        model.train()
        norms, trouble = None, ""
        if job.measures:
            # What `initialize_` has measured, it has checked.
            check = start.how != OURS
            norms, trouble = _measure(model, loss, place(chosen, device), experiment.forward, job, check)
        training = _Training(experiment, job, model, loss)
        training.run()
    return Run(
        scheme=job.start,
        learning_rate=job.learning_rate,
        seed=job.seed,
        losses=training.curve(),
        first_loss=training.losses[0],
        final_loss=training.final_loss(),
        steps_done=training.steps_done,
        diverged=training.diverged(),
        norms=norms,
        seconds=time.perf_counter() - started,
        note=" ".join(filter(None, (remark, trouble, training.trouble))),
    )


def build_model(experiment: Experiment, seed: int) -> nn.Module:
    """A new model on the device asked for; the same weights for the same seed."""
    seed_everything(seed, "build")
    model: Any = experiment.build()
    check_model(model, experiment.forward)
    moved: nn.Module = model.to(experiment.device) if experiment.device is not None else model
    return moved.train()


def own_loss(experiment: Experiment, model: nn.Module) -> Loss:
    """A copy of a loss that may hold tensors or a state, on the model's device."""
    if isinstance(experiment.loss, nn.Module):
        return copy.deepcopy(experiment.loss).to(device_of(model))
    return experiment.loss


def device_of(model: nn.Module) -> torch.device:
    """Where the model lives: its first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def evaluate_loss(model: nn.Module, loss: Loss, batch: Batch, forward: Forward | None) -> Tensor:
    """The loss of a mini-batch, as training calls it."""
    output = model(batch.inputs) if forward is None else forward(model, batch.inputs)
    value: Tensor = loss(output, batch.targets)
    return value


def first_look(experiment: Experiment, model: nn.Module, seed: int) -> tuple[float, float]:
    """The loss of a model that `build_model` gave, on the seed's starting batch, and its gradient's length.

    Refuses what is no loss.
    """
    batch = place(experiment.data.starting_batch(seed), device_of(model))
    seed_everything(seed, "training")
    value = evaluate_loss(model, own_loss(experiment, model), batch, experiment.forward)
    check_loss_value(value)
    if not value.requires_grad:
        raise ProblemError(
            "the loss does not depend on any trainable parameter, so there is nothing to train; is the model "
            "frozen, or does its forward detach?"
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(value, trained, allow_unused=True, materialize_grads=True)
    lengths = [gradient.norm().item() for gradient in gradients]
    return value.item(), math.hypot(*lengths)


class _Training:
    """The loop of one run."""

    def __init__(self, experiment: Experiment, job: Job, model: nn.Module, loss: Loss) -> None:
        self.experiment, self.job, self.model, self.loss = experiment, job, model, loss
        self.losses: list[float] = []
        self.steps_done = 0
        self.trouble = ""

    def run(self) -> None:
        """Train until the last step, or until a loss is not finite."""
        seed_everything(self.job.seed, "training")  # after the measurement, so that it changes nothing
        optimizer = make_optimizer(self.experiment.optimizer, self.model, self.job.learning_rate)
        warmup = Warmup(optimizer, self.experiment.start(self.job.start).warmup)
        minibatches = self.experiment.data.minibatches(self.job.seed)
        for step in range(self.experiment.steps):
            batch = next(minibatches)
            warmup.set(step)
            optimizer.zero_grad(set_to_none=True)
            try:
                placed = place(batch, device_of(self.model))
                value = evaluate_loss(self.model, self.loss, placed, self.experiment.forward)
            except Exception as failure:
                if isinstance(failure, torch.OutOfMemoryError) or not self._weights_are_to_blame(batch):
                    raise
                # Some functions refuse nan and inf instead of passing them on.
                self.losses.append(math.nan)
                self.trouble = f"Step {step + 1} failed on the weights that training led to: {failure}"
                return
            self.losses.append(value.item())
            if not math.isfinite(self.losses[-1]):
                return
            value.backward()
            optimizer.step()
            self.steps_done += 1

    def curve(self) -> tuple[float, ...]:
        """The losses averaged over chunks of equal length."""
        length = math.ceil(self.experiment.steps / MOST_POINTS)
        chunks = [self.losses[first : first + length] for first in range(0, len(self.losses), length)]
        return tuple(round_loss(statistics.fmean(chunk)) for chunk in chunks)

    def final_loss(self) -> float:
        """The mean over the last tenth of the steps, at least ten; what broke the run off, where it did."""
        if not math.isfinite(self.losses[-1]):
            return self.losses[-1]
        return statistics.fmean(self.losses[-window(self.experiment.steps) :])

    def diverged(self) -> bool:
        return has_diverged(self.losses, window(self.experiment.steps))

    def _weights_are_to_blame(self, batch: Batch) -> bool:
        """Whether a new model takes the mini-batch on which this one failed."""
        try:
            model = build_model(self.experiment, self.job.seed)
            evaluate_loss(model, self.loss, place(batch, device_of(model)), self.experiment.forward)
        except Exception:
            return False
        return True


def _measure(
    model: nn.Module, loss: Loss, batch: Batch, forward: Forward | None, job: Job, check: bool
) -> tuple[dict[str, float] | None, str]:
    """The norms at the start, and what went wrong: no reason to stop a run."""
    data = (batch.inputs, batch.targets)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ConvergenceWarning)
        try:
            report = measure(
                model, loss, data, forward=forward, dropout="freeze", tolerance=TOLERANCE, check=check,
                seed=derive(job.seed, "measure"),
            )  # fmt: skip
        except Exception as failure:
            return None, f"{NOT_MEASURED}: {failure}"
    norms = {layer.name: layer.norm for layer in report.layers}
    if NETWORK in norms:  # a layer of that name keeps its own number, under its parameter's name
        norms = {f"{name}.weight" if name == NETWORK else name: norm for name, norm in norms.items()}
    norms[NETWORK] = report.network.norm
    return norms, " ".join(f"Curvature at the start: {warning.message}" for warning in caught)


def _not_applicable(job: Job, failure: Exception, seconds: float) -> Run:
    return Run(
        scheme=job.start, learning_rate=job.learning_rate, seed=job.seed, losses=(), first_loss=math.nan,
        final_loss=math.nan, steps_done=0, diverged=False, norms=None, seconds=seconds,
        note=str(failure) or type(failure).__name__,
    )  # fmt: skip
