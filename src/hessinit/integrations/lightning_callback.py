"""A callback for Lightning (`lightning` or `pytorch_lightning`): initialize and track a module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hessinit import Problem, TrackSettings
from hessinit.errors import ProblemError, check_callable
from hessinit.integrations import callback as shared
from hessinit.problem.problem import Forward, Loss
from hessinit.training.track import USUAL_SETTINGS

_Callback: Any = shared.import_base(
    ("lightning.pytorch", "pytorch_lightning"), "Callback", "Lightning"
)


class CurvatureCallback(shared.RunResults, _Callback):  # type: ignore[misc]
    """Track the curvature of a LightningModule, and initialize it if asked.

    `loss(output, target)` is the loss of the training step, and the module is called as
    `module(inputs)`, unless `forward(module, inputs)` is given. `batch` is what is measured, by
    default the first training batch; a function is called with that batch and returns `(inputs,
    targets)`. A `hessinit.Problem` of the module in place of the loss says all of this, and layers,
    dropout and so on.

    `initialize=True` draws new weights before the first step, for the learning rate of the module's
    optimizer (the one that a schedule works towards). A function of the problem calls
    `hessinit.initialize_` with options of its own; a model with frozen weights or adapters needs a
    problem with `layers`, or `overwrite`. A run that resumes from a checkpoint is never
    initialized, and continues its file: `path`, by default `curvature.jsonl` in the folder of the
    logs. Scalars go to `log_to`, by default every logger of the trainer. `every`, `max_overhead`
    and `settings` are those of `hessinit.track`.

    Training is not changed by a bit, but for `initialize`. Under DDP the first rank works while the
    others wait, and its weights go to all. `tracking` and `initialization` hold the results, on the
    first rank.
    """

    def __init__(
        self,
        loss: Loss | Problem,
        *,
        batch: Any = None,
        forward: Forward | None = None,
        initialize: bool | shared.Initialize = False,
        every: int = 10,
        max_overhead: float = 0.1,
        path: str | os.PathLike[str] | None = None,
        log_to: Any = "loggers",
        settings: TrackSettings = USUAL_SETTINGS,
    ) -> None:
        super().__init__()
        if isinstance(loss, Problem):
            if batch is not None or forward is not None:
                raise ProblemError("the Problem already says batch and forward; pass it alone.")
            batch = loss.batch
        else:
            check_callable("loss", loss, "loss(output, target)")
        self._run = shared.TrackedRun(initialize, every, max_overhead, path, settings)
        self._loss = loss
        self._batch = batch
        self._forward = forward
        self._log_to = log_to
        self._begun = False
        self._steps = 0
        self._losses: list[Tensor] = []
        self._random: Tensor | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._begun = False
        self._losses = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._begun:
            return
        # The step of a checkpoint is known only now.
        self._begun = True
        self._steps = trainer.global_step
        count = len(trainer.optimizers)
        only = trainer.optimizers[0] if count == 1 else None

        def log(values: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)

        self._run.begin(
            trainer.model,  # with what a strategy has wrapped around the module
            lambda: self._problem(pl_module, batch),
            only,
            # Read on every rank, for it is broadcast.
            folder=trainer.log_dir or trainer.default_root_dir,
            log_to=log if self._log_to == "loggers" else self._log_to,
            steps=self._steps,
        )
        if only is None:
            self._run.add_note(
                f"There are {count} optimizers, so no single learning rate and no stability limit."
            )
        if self._steps and (self._batch is None or callable(self._batch)):
            self._run.add_note(
                f"Resumed at step {self._steps}: from there on the curvature is that of another "
                "batch, the first one after it. Pass batch= to measure the same examples."
            )
        self._random = _random_state(pl_module)

    def _problem(self, module: Any, first_batch: Any) -> Problem:
        """Return what is measured: the user's problem, or the module's on the chosen batch."""
        if isinstance(self._loss, Problem):
            return replace(self._loss, model=module)
        batch = first_batch if self._batch is None else self._batch
        if callable(self._batch):
            batch = self._batch(first_batch)
        return Problem(module, self._loss, batch, forward=self._forward)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Lightning has divided by the number of batches whose gradients it adds up.
            batches = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._losses.append(loss.detach() * batches)
            if self._random is not None and self._batch is None:
                # Losses of the same examples, up to the rounding of 16 bits, or with another
                # dropout mask.
                drew = not torch.equal(self._random, _random_state(pl_module))
                self._run.compare(float(self._losses[0]), self._steps + 1, 1.5 if drew else 1.05)
        self._random = None
        if trainer.global_step > self._steps:
            mean = torch.stack(self._losses).mean() if self._losses else None
            self._run.step(trainer.global_step, mean)
            self._losses = []
            self._steps = trainer.global_step

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        # Not in state_dict: Lightning refuses two callbacks of a class that has one.
        if self._run.state is not None:
            checkpoint.setdefault(shared.KEY, {})[self._run.key] = self._run.state

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._run.load_state(checkpoint.get(shared.KEY, {}).get(self._run.key))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._run.close()


def _random_state(module: Any) -> Tensor:
    """Return the state of the generators that a training step draws from."""
    states = [torch.get_rng_state()]
    if module.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(module.device))
    return torch.cat(states)
