"""A callback for the Trainer of Transformers: initialize and track a model while it trains."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hessinit.errors import ProblemError, choose
from hessinit.integrations import callback as shared
from hessinit.integrations.logits import TASKS, logits_problem, token_cross_entropy
from hessinit.problem.double_backward import in_mode
from hessinit.problem.preserve import Draws, untouched_random_state, untouched_sources

_Callback: Any = shared.import_base(("transformers",), "TrainerCallback", "Transformers")


class CurvatureTrainerCallback(shared.RunResults, _Callback):  # type: ignore[misc]
    """Track the curvature of the Trainer's model, and initialize it if asked: `Trainer(callbacks=[…])`.

    Loss and forward come from `hessinit.logits_problem`, which gets `task`. `batch` is what is
    measured, by default the first examples of the training set, as many as one device takes in a
    step, in the Trainer's own collator.

    `initialize=True` draws new weights before the first step, for the learning rate of the
    Trainer's optimizer; pretrained weights would be lost. A dict holds options of
    `hessinit.initialize_`, of which a model with frozen weights or adapters needs `layers` or
    `overwrite`. Mixed precision is off meanwhile. A run that resumes from a checkpoint is never
    initialized, and continues its file: `path`, by default `curvature.jsonl` in the Trainer's
    `output_dir`. Scalars go to TensorBoard where the Trainer reports there, and to the active W&B
    run. The other options are those of `hessinit.track`: every (10), max_overhead (0.1), and so on.

    Training is not changed by a bit, but for `initialize`. Under DDP the first rank works while the
    others wait, and its weights go to all. `tracking` and `initialization` hold the results, on the
    first rank.
    """

    def __init__(
        self, *, batch: Any = None, task: str = "auto", log_to: Any = "auto", **options: Any
    ) -> None:
        super().__init__()
        choose("task", task, ["auto", *TASKS])
        self._run = shared.TrackedRun(**options)
        self._batch = batch
        self._task = task
        self._log_to = log_to
        self._writer: Any = None
        self._finished_step: int | None = None  # of which the tracker does not know yet
        self._loss: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise ProblemError(
                "FSDP and DeepSpeed keep a part of the weights on each rank, so that no rank can measure "
                "them. Call hessinit.initialize_ before Trainer.train, and track a run with plain DDP."
            )
        self._finished_step = self._loss = None
        self._run.load_state(_stored(state).get(self._run.key))
        with in_mode(kwargs["model"], training=True):  # as the Trainer does before every step
            places = {
                "folder": args.output_dir,
                "log_to": self._sinks(args),
                "steps": state.global_step,
            }
            self._run.begin(kwargs["model"], lambda: self._problem(args, **kwargs), **places)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Passed on after the Trainer has logged the loss of this step, before it takes the next
        # one.
        self._finished_step = state.global_step
        if (stored := self._run.state) is not None:
            _stored(state)[self._run.key] = stored

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._finished_step is not None and "loss" in (logs or {}):
            self._loss = float((logs or {})["loss"])
            self._run.compare(self._loss, self._finished_step, 1.5)  # of other examples and masks

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pass_on(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pass_on(kwargs["model"])
        self._run.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _problem(
        self,
        args: Any,
        model: Any,
        train_dataloader: Any = None,
        optimizer: Any = None,
        **others: Any,
    ) -> dict[str, Any]:
        batch = self._batch
        if batch is None:
            batch = _first_examples(train_dataloader, args.train_batch_size)
        problem = logits_problem(model, batch, task=self._task)
        loss = problem.loss
        if getattr(args, "label_smoothing_factor", 0) and loss is token_cross_entropy:
            loss = partial(token_cross_entropy, smoothing=args.label_smoothing_factor)
        return {
            "model": model,
            "loss": loss,
            "batch": problem.batch,
            "forward": problem.forward,
            "optimizer": optimizer,
        }

    def _pass_on(self, model: nn.Module) -> None:
        if self._finished_step is not None:
            with in_mode(model, training=True):  # an evaluation may have come in between
                self._run.step(self._finished_step, self._loss)
            self._finished_step = self._loss = None

    def _sinks(self, args: Any) -> Any:
        if self._log_to != "auto":
            return self._log_to
        reports = (
            [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
        )
        if shared.is_first_rank() and {"tensorboard", "all"} & set(reports):
            self._writer = _summary_writer(args)
        return ["auto"] if self._writer is None else ["auto", self._writer]


def _summary_writer(args: Any) -> Any:
    """A writer below the Trainer's folder, whose own writer is not accessible; None without TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)
    return SummaryWriter(os.path.join(folder or os.path.join(args.output_dir, "runs"), "curvature"))


def _first_examples(loader: Any, count: int) -> Any:
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    if collate is None or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        why = "the first examples of an iterable dataset cannot be read without using them up"
        raise ProblemError(f"{why}; pass batch=, a dict of tensors as the collator returns it.")
    with untouched_random_state(), untouched_sources(dataset, collate):
        Draws(
            0, torch.device("cpu")
        )  # a collator that masks at random masks alike in a resumed run
        return collate([dataset[index] for index in range(min(count, len(dataset)))])


def _stored(state: Any) -> dict[str, Any]:
    """A place in the Trainer's state, which is written to every checkpoint."""
    return state.stateful_callbacks.setdefault(shared.KEY, {})
