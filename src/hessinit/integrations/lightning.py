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
from hessinit.problem.problem import Forward, Loss
from hessinit.report.initialization import Initialization
from hessinit.report.tracking import Tracking

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
    from a checkpoint is never initialized. Points go as lines of JSON to `path`, by default
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

    @property
    def tracking(self) -> Tracking | None:
        """The record of the run, so far."""
        return self._following.tracking

    @property
    def initialization(self) -> Initialization | None:
        """What was initialized, if anything was."""
        return self._following.initialization

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
        self._following.begin(
            Subject(pl_module, self._loss, self._measured(batch), self._forward, _only(trainer.optimizers)),
            folder=trainer.log_dir or trainer.default_root_dir,  # asked on every rank, for it is broadcast
            log_to=_to_loggers(trainer) if self._log_to == "loggers" else self._log_to,
            steps=trainer.global_step,
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())
        if trainer.global_step > self._steps:
            # Lightning divides the loss by the number of batches whose gradients are added up.
            self._following.step(
                trainer.global_step, torch.stack(self._losses).sum() if self._losses else None
            )
            self._losses = []
            self._steps = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._following.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._following.close()

    def _measured(self, caught: Any) -> Any:
        if self._batch is None:
            return caught
        return self._batch(caught) if callable(self._batch) else self._batch


def _only(optimizers: list[Any]) -> Any:
    return optimizers[0] if len(optimizers) == 1 else None


def _to_loggers(trainer: Any) -> Callable[[dict[str, float], int], None]:
    def log(values: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    return log
