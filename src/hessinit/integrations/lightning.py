"""A callback for Lightning: measure, initialize and follow a LightningModule while it trains.

`lightning` and `pytorch_lightning` will do.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.integrations.following import Following, Subject
from hessinit.integrations.remembering import KEY, small_copy
from hessinit.integrations.trained_loss import ALIKE, SAME, is_another_loss
from hessinit.problem.problem import Forward, Loss
from hessinit.results.initialization import Initialization
from hessinit.results.track_record import Tracking

# Strategies that keep a part of the weights on each rank, by name: their libraries may not be installed.
_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


def _callback_class() -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(package).Callback
        except ModuleNotFoundError as missing:
            if missing.name not in (package, package.partition(".")[0]):
                raise
    raise ImportError(
        "hessinit.integrations.lightning needs Lightning; install it with "
        "`pip install 'hessinit[lightning]'`."
    )


_Callback: Any = _callback_class()


class CurvatureCallback(_Callback):  # type: ignore[misc]
    """Curvature at the start and on the way, written beside the logs; `Trainer(callbacks=[…])`.

    `loss(output, target)` is that of the training step, and the LightningModule is called as
    `module(inputs)`, unless `forward(module, inputs)` says otherwise. `batch` is what is measured; by default
    the first training batch, and a function is given that one and returns `(inputs, targets)`.

    `initialize=True` draws new weights before the first step, for the rate of the module's optimizer (the
    one that a schedule works towards); a dict holds options of `hessinit.initialize_`. A run that goes on
    from a checkpoint is never initialized: it goes on in the same file, with the same batch, which the
    checkpoint holds if it is below 16 MiB. Points go as lines of JSON to `path`, by default
    `curvature.jsonl` in the folder of the logs, and as scalars to every logger of the trainer. The other
    options are those of `hessinit.track`: `each_layer`, `curvature`, `layers`, `dropout`, `warn` and so on.

    Training is not changed by a bit, but for `initialize`. Under DDP the first rank works while the others
    wait, and its weights are given to all. `tracking` and `initialization` are there after the run, on the
    first rank.
    """

    def __init__(
        self,
        loss: Loss,
        *,
        every: int = 100,
        share: float = 0.1,
        batch: Any = None,
        forward: Forward | None = None,
        initialize: bool | Mapping[str, Any] = False,
        path: str | os.PathLike[str] | None = None,
        log_to: Any = "loggers",
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(loss, type) or not callable(loss):
            raise ProblemError(
                f"loss={loss!r} must be callable as loss(output, target), such as nn.MSELoss()."
            )
        self._following = Following(
            every=every, share=share, initialize=initialize, path=path, options=options
        )
        self._loss, self._batch, self._forward, self._log_to = loss, batch, forward, log_to
        self._begun, self._steps = False, 0
        self._losses: list[Tensor] = []
        self._caught: Any = None
        self._is_compared = True
        self._random: Tensor | None = None

    @property
    def tracking(self) -> Tracking | None:
        """The record of the run, so far."""
        return self._following.tracking

    @property
    def initialization(self) -> Initialization | None:
        """What was initialized, if anything was."""
        return self._following.initialization

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._caught = None  # until a checkpoint says otherwise

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        names = {kind.__name__ for kind in type(trainer.strategy).__mro__}
        sharded = [name for name in _SHARDED if name in names]
        if sharded:
            raise ProblemError(
                f"{sharded[0]} keeps a part of the weights on each rank, so that none can measure them. "
                "Initialize the module before Trainer.fit, with hessinit.initialize_, and track with "
                "strategy='ddp' or on one device."
            )
        self._begun = False
        self._losses = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._begun:
            return
        self._begun, self._steps = True, trainer.global_step  # that of a checkpoint is known only now
        is_kept = self._caught is not None
        caught = self._caught if is_kept else batch
        optimizers = trainer.optimizers
        self._following.begin(
            pl_module,
            lambda: Subject(pl_module, self._loss, self._measured(caught), self._forward, _only(optimizers)),
            folder=trainer.log_dir or trainer.default_root_dir,  # asked on every rank, for it is broadcast
            log_to=_to_loggers(trainer) if self._log_to == "loggers" else self._log_to,
            steps=trainer.global_step,
        )
        if len(optimizers) != 1:
            self._following.add_note(
                f"There are {len(optimizers)} optimizers, so no single rate and no edge of stability."
            )
        if not is_kept and (self._batch is None or callable(self._batch)):
            self._caught = small_copy(batch)  # now: a training step may write to it
        self._is_compared = is_kept or self._batch is not None
        self._random = _random_state(pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        automatic = pl_module.automatic_optimization
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())
            if not self._is_compared:
                times = trainer.accumulate_grad_batches if automatic else 1
                self._compare(float(loss) * times, drew=_drew(self._random, _random_state(pl_module)))
        self._is_compared = True
        if trainer.global_step > self._steps:
            mean = None
            if self._losses:
                # Lightning has divided each by the number of batches whose gradients it adds up.
                losses = torch.stack(self._losses)
                mean = losses.sum() if automatic else losses.mean()
            self._following.step(trainer.global_step, mean)
            self._losses = []
            self._steps = trainer.global_step

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        # Not in state_dict: Lightning refuses two callbacks of a class that has one.
        memory = self._following.memory
        if memory is not None:
            kept = checkpoint.setdefault(KEY, {})
            kept[self._following.key] = {**memory, "batch": self._caught}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint.get(KEY, {}).get(self._following.key, {})
        self._following.recall(kept)
        self._caught = kept.get("batch")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._following.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._following.close()

    def _compare(self, trained: float, *, drew: bool) -> None:
        """The first training step has the examples and the weights of the first point."""
        points = () if self.tracking is None else self.tracking.points
        if not points or points[-1].step != self._steps:
            return
        measured = points[-1].loss
        if is_another_loss(trained, measured, ALIKE if drew else SAME):
            self._following.add_note(
                f"The training step's loss is {trained:.3g} where loss(output, target) is {measured:.3g}, of "
                "the same examples and weights: what is measured is not what is trained."
            )

    def _measured(self, caught: Any) -> Any:
        if self._batch is None:
            return caught
        return self._batch(caught) if callable(self._batch) else self._batch


def _only(optimizers: list[Any]) -> Any:
    return optimizers[0] if len(optimizers) == 1 else None


def _random_state(module: Any) -> Tensor | None:
    """Of all generators that a training step may draw from; None where that is not known."""
    if module.device.type == "cuda":
        return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(module.device)])
    return torch.get_rng_state() if module.device.type == "cpu" else None


def _drew(before: Tensor | None, after: Tensor | None) -> bool:
    return before is None or after is None or not torch.equal(before, after)


def _to_loggers(trainer: Any) -> Callable[[dict[str, float], int], None]:
    def log(values: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    return log
