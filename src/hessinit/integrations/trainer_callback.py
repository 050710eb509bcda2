"""A callback for the Trainer of Transformers: initialize and track a model while it trains."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hessinit import Problem, TrackSettings
from hessinit.errors import ProblemError, choose
from hessinit.integrations import callback as shared
from hessinit.integrations.logits import TASKS, logits_problem, token_cross_entropy
from hessinit.problem.preserve import Draws, untouched_random_state, untouched_sources
from hessinit.problem.substitutes import in_mode
from hessinit.training.track import USUAL_SETTINGS

_Callback: Any = shared.import_base(("transformers",), "TrainerCallback", "Transformers")


class CurvatureTrainerCallback(shared.RunResults, _Callback):  # type: ignore[misc]
    """Track the curvature of the Trainer's model, and initialize it if asked.

    Loss and forward come from `hessinit.logits_problem`, which gets `task`. `batch` is what is
    measured, by default the first examples of the training set, as many as one device takes in a
    step, in the Trainer's own collator. A `hessinit.Problem` of the model says all of this, and
    layers, dropout and so on.

    `initialize=True` draws new weights before the first step, for the learning rate of the
    Trainer's optimizer; pretrained weights would be lost. A function of the problem calls
    `hessinit.initialize_` with options of its own; a model with frozen weights or adapters needs a
    problem with `layers`, or `overwrite`. Mixed precision is off meanwhile. A run that resumes from
    a checkpoint is never initialized, and continues its file: `path`, by default `curvature.jsonl`
    in the Trainer's `output_dir`. Scalars go to TensorBoard where the Trainer reports there, and to
    the active W&B run. `every`, `max_overhead` and `settings` are those of `hessinit.track`.

    Training is not changed by a bit, but for `initialize`. Under DDP the first rank works while the
    others wait, and its weights go to all. `tracking` and `initialization` hold the results, on the
    first rank.
    """

    def __init__(
        self,
        problem: Problem | None = None,
        *,
        batch: Any = None,
        task: str = "auto",
        initialize: bool | shared.Initialize = False,
        every: int = 10,
        max_overhead: float = 0.1,
        path: str | os.PathLike[str] | None = None,
        log_to: Any = "auto",
        settings: TrackSettings = USUAL_SETTINGS,
    ) -> None:
        super().__init__()
        choose("task", task, ["auto", *TASKS])
        if problem is not None and (batch is not None or task != "auto"):
            raise ProblemError("the Problem already says batch and loss; pass it alone.")
        self._run = shared.TrackedRun(initialize, every, max_overhead, path, settings)
        self._problem = problem
        self._batch = batch
        self._task = task
        self._log_to = log_to
        self._writer: Any = None
        self._finished_step: int | None = None  # of which the tracker does not know yet
        self._loss: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise ProblemError(
                "FSDP and DeepSpeed keep a part of the weights on each rank, so that no rank can "
                "measure them. Call hessinit.initialize_ before Trainer.train, and track a run "
                "with plain DDP."
            )
        self._finished_step = self._loss = None
        self._run.load_state(_stored(state).get(self._run.key))
        model = kwargs["model"]
        with in_mode(model, training=True):  # as the Trainer does before every step
            self._run.begin(
                model,
                lambda: self._make_problem(args, model, kwargs.get("train_dataloader")),
                kwargs.get("optimizer"),
                folder=args.output_dir,
                log_to=self._sinks(args),
                steps=state.global_step,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Passed on after the Trainer has logged the loss of this step, before the next one.
        self._finished_step = state.global_step
        if self._run.state is not None:
            _stored(state)[self._run.key] = self._run.state

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

    def _make_problem(self, args: Any, model: Any, loader: Any) -> Problem:
        """Return what is measured: the user's problem, or the model's on the chosen batch."""
        if self._problem is not None:
            return replace(self._problem, model=model)
        batch = self._batch
        if batch is None:
            batch = _first_examples(loader, args.train_batch_size)
        problem = logits_problem(model, batch, task=self._task)
        smoothing = getattr(args, "label_smoothing_factor", 0)
        if not smoothing or problem.loss is not token_cross_entropy:
            return problem
        return replace(problem, loss=partial(token_cross_entropy, smoothing=smoothing))

    def _pass_on(self, model: nn.Module) -> None:
        if self._finished_step is not None:
            with in_mode(model, training=True):  # an evaluation may have come in between
                self._run.step(self._finished_step, self._loss)
            self._finished_step = self._loss = None

    def _sinks(self, args: Any) -> Any:
        if self._log_to != "auto":
            return self._log_to
        reports = [args.report_to] if isinstance(args.report_to, str) else args.report_to or ()
        if shared.is_first_rank() and {"tensorboard", "all"} & set(reports):
            self._writer = _summary_writer(args)
        return ["auto"] if self._writer is None else ["auto", self._writer]


def _summary_writer(args: Any) -> Any:
    """Return a writer below the Trainer's folder, whose own cannot be reached, or None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)
    return SummaryWriter(os.path.join(folder or os.path.join(args.output_dir, "runs"), "curvature"))


def _first_examples(loader: Any, count: int) -> Any:
    """Return the first examples of the training set, collated as in training."""
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    if collate is None or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ProblemError(
            "the first examples of an iterable dataset cannot be read without using them up; pass "
            "batch=, a dict of tensors as the collator returns it."
        )
    with untouched_random_state(), untouched_sources(dataset, collate):
        # A collator that masks at random masks alike in a resumed run.
        Draws(0, torch.device("cpu"))
        return collate([dataset[index] for index in range(min(count, len(dataset)))])


def _stored(state: Any) -> dict[str, Any]:
    """Return the part of the Trainer's state that is written to every checkpoint."""
    return state.stateful_callbacks.setdefault(shared.KEY, {})
