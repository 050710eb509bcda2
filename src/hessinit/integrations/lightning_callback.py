"""A callback for Lightning (`lightning` or `pytorch_lightning`): initialize and track a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hessinit.errors import check_callable
from hessinit.integrations import callback as shared
from hessinit.problem.problem import Forward, Loss

_Callback: Any = shared.import_base(
    ("lightning.pytorch", "pytorch_lightning"), "Callback", "Lightning"
)


class CurvatureCallback(shared.RunResults, _Callback):  # type: ignore[misc]
    """Track the curvature of a LightningModule, and initialize it if asked: `Trainer(callbacks=[…])`.

    `loss(output, target)` is the loss of the training step, and the module is called as
    `module(inputs)`, unless `forward(module, inputs)` is given. `batch` is what is measured, by
    default the first training batch; a function is called with that batch and returns `(inputs,
    targets)`.

    `initialize=True` draws new weights before the first step, for the learning rate of the module's
    optimizer (the one that a schedule works towards); a dict holds options of
    `hessinit.initialize_`, of which a model with frozen weights or adapters needs `layers` or
    `overwrite`. A run that resumes from a checkpoint is never initialized, and continues its file:
    `path`, by default `curvature.jsonl` in the folder of the logs. Scalars go to `log_to`, by
    default every logger of the trainer. The other options are those of `hessinit.track`: every
    (10), max_overhead (0.1), and so on.

    Training is not changed by a bit, but for `initialize`. Under DDP the first rank works while the
    others wait, and its weights go to all. `tracking` and `initialization` hold the results, on the
    first rank.
    """

    def __init__(
        self,
        loss: Loss,
        *,
        batch: Any = None,
        forward: Forward | None = None,
        log_to: Any = "loggers",
        **options: Any,
    ) -> None:
        super().__init__()
        check_callable("loss", loss, "loss(output, target)")
        self._run = shared.TrackedRun(**options)
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
        # a checkpoint's step is known only now
        self._begun = True
        self._steps = trainer.global_step
        count = len(trainer.optimizers)
        only = trainer.optimizers[0] if count == 1 else None
        is_given = self._batch is not None and not callable(self._batch)

        def make_problem() -> dict[str, Any]:
            measured = (
                self._batch(batch) if callable(self._batch) else self._batch if is_given else batch
            )
            function = {"model": pl_module, "loss": self._loss, "forward": self._forward}
            return {**function, "batch": measured, "optimizer": only}

        def log(values: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)

        self._run.begin(
            trainer.model,  # with what a strategy has wrapped around the module
            make_problem,
            folder=trainer.log_dir
            or trainer.default_root_dir,  # read on every rank, for it is broadcast
            log_to=log if self._log_to == "loggers" else self._log_to,
            steps=self._steps,
        )
        if only is None:
            several = f"There are {count} optimizers"
            self._run.add_note(f"{several}, so no single learning rate and no stability limit.")
        if self._steps and not is_given:
            self._run.add_note(
                f"Resumed at step {self._steps}: from there on the curvature is that of another batch, the "
                "first one after it. Pass batch= to measure the same examples."
            )
        self._random = _random_state(pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Lightning has divided by the number of batches whose gradients it adds up.
            times = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._losses.append(loss.detach() * times)
            if self._random is not None and self._batch is None:
                # Losses of the same examples, up to the rounding of 16 bits, or with another
                # dropout mask.
                drew = not torch.equal(self._random, _random_state(pl_module))
                self._run.compare(float(self._losses[0]), self._steps + 1, 1.5 if drew else 1.05)
        self._random = None
        if trainer.global_step > self._steps:
            self._run.step(
                trainer.global_step, torch.stack(self._losses).mean() if self._losses else None
            )
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
    """The state of the generators that a training step draws from."""
    own = [torch.cuda.get_rng_state(module.device)] if module.device.type == "cuda" else []
    return torch.cat([torch.get_rng_state(), *own])
