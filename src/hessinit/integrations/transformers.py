"""A callback for the Trainer of Transformers: measure, initialize and follow a model while it trains."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hessinit.errors import ProblemError, choose
from hessinit.integrations.following import Following, Subject
from hessinit.integrations.logits import logits_problem
from hessinit.integrations.ranks import is_first_rank
from hessinit.integrations.remembering import KEY
from hessinit.integrations.tasks import TASKS, token_cross_entropy
from hessinit.integrations.trained_loss import is_beyond
from hessinit.problem.double_backward import in_mode
from hessinit.problem.preserve import Draws, untouched_random_state, untouched_sources
from hessinit.results.initialization import Initialization
from hessinit.results.track_record import Tracking


def _callback_class() -> Any:
    try:
        return importlib.import_module("transformers").TrainerCallback
    except ModuleNotFoundError as missing:
        if missing.name != "transformers":
            raise
    raise ImportError(
        "hessinit.integrations.transformers needs Transformers; install it with "
        "`pip install 'hessinit[transformers]'`."
    )


_Callback: Any = _callback_class()


class CurvatureCallback(_Callback):  # type: ignore[misc]
    """Curvature at the start and on the way, written beside the checkpoints; `Trainer(callbacks=[…])`.

    Loss and call come from `hessinit.logits_problem`, which `task` goes to. `batch` is what is measured; by
    default the first examples of the training set, as many as a training step takes on one device, made
    into a batch by the Trainer's own collator. Neither the sampler nor anybody's random numbers notice.

    `initialize=True` draws new weights before the first step, for the rate of the Trainer's optimizer; a
    dict holds options of `hessinit.initialize_`. A run that goes on from a checkpoint is never initialized.
    Do not ask for it when the weights are pretrained: they would be lost. Points go as lines of JSON to
    `path`, by default `curvature.jsonl` in the Trainer's `output_dir`; as scalars to TensorBoard where the
    Trainer reports there, and to the active run of W&B. The other options are those of `hessinit.track`.

    Training is not changed by a bit, but for `initialize`. Under DDP the first rank works while the others
    wait, and its weights are given to all. `tracking` and `initialization` are there after the run, on the
    first rank.
    """

    def __init__(
        self,
        *,
        every: int = 100,
        share: float = 0.1,
        batch: Any = None,
        task: str = "auto",
        initialize: bool | Mapping[str, Any] = False,
        path: str | os.PathLike[str] | None = None,
        log_to: Any = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        choose("task", task, ["auto", *TASKS])
        self._following = Following(
            every=every, share=share, initialize=initialize, path=path, options=options
        )
        self._batch, self._task, self._log_to = batch, task, log_to
        self._writer: Any = None
        self._owed: int | None = None
        self._loss: float | None = None
        self._first_log: tuple[int, float] | None = None
        self._is_compared = False
        self._started = 0

    @property
    def tracking(self) -> Tracking | None:
        """The record of the run, so far."""
        return self._following.tracking

    @property
    def initialization(self) -> Initialization | None:
        """What was initialized, if anything was."""
        return self._following.initialization

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise ProblemError(
                "FSDP and DeepSpeed keep a part of the weights on each rank, so that none can measure them. "
                "Call hessinit.initialize_ before Trainer.train, and track a run with plain DDP."
            )
        self._owed = self._loss = self._first_log = None
        self._started = state.global_step
        self._following.recall(_kept(state).get(self._following.key))
        with in_mode(kwargs["model"], training=True):  # as the Trainer does before every step
            self._following.begin(
                kwargs["model"],
                lambda: self._subject(args, **kwargs),
                folder=args.output_dir,
                log_to=self._sinks(args),
                steps=state.global_step,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Told once the Trainer has logged the loss of this step, before it takes the next one.
        self._owed = state.global_step
        memory = self._following.memory
        if memory is not None:
            _kept(state)[self._following.key] = memory

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self._owed is not None and "loss" in (logs or {}):
            self._loss = float((logs or {})["loss"])
            if self._first_log is None:
                self._first_log, self._is_compared = (self._owed, self._loss), False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._settle(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._settle(kwargs["model"])
        self._compare(at_end=True)
        self._following.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _subject(
        self, args: Any, model: Any, train_dataloader: Any = None, optimizer: Any = None, **others: Any
    ) -> Subject:
        batch = self._batch
        if batch is None:
            batch = _first_examples(train_dataloader, args.train_batch_size)
        _, loss, pair, options = logits_problem(model, batch, task=self._task)
        if getattr(args, "label_smoothing_factor", 0) and loss is token_cross_entropy:
            loss = partial(token_cross_entropy, smoothing=args.label_smoothing_factor)
        return Subject(model, loss, pair, options["forward"], optimizer)

    def _settle(self, model: nn.Module) -> None:
        if self._owed is not None:
            with in_mode(model, training=True):  # an evaluation may have come in between
                self._following.step(self._owed, self._loss)
            self._owed = self._loss = None
            self._compare()

    def _compare(self, at_end: bool = False) -> None:
        """The first loss that is logged with those measured around its steps, of other examples."""
        if self._first_log is None or self._is_compared or self.tracking is None:
            return
        step, logged = self._first_log
        points = [point for point in self.tracking.points if point.step >= self._started]
        is_around = bool(points) and points[-1].step >= step
        if not (is_around or at_end):
            return
        self._is_compared = True
        measured = [point.loss for point in points]
        if is_beyond(logged, measured, also_below=is_around):  # before the last point it may have fallen
            self._following.add_note(
                f"The Trainer logged a loss of {logged:.3g} for the steps up to {step}, and the measured one "
                f"was {measured[0]:.3g} before them: what is measured may not be what is trained (an own "
                "compute_loss, or accumulated gradients)."
            )

    def _sinks(self, args: Any) -> Any:
        if self._log_to != "auto":
            return self._log_to
        reports = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
        if is_first_rank() and {"tensorboard", "all"} & set(reports):
            self._writer = _summary_writer(args)
        return ["auto"] if self._writer is None else ["auto", self._writer]


def _summary_writer(args: Any) -> Any:
    """A run of its own below the Trainer's, whose writer is not handed out; None without TensorBoard."""
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
        raise ProblemError(
            "the first examples of the training set cannot be looked at without using them up (it is an "
            "iterable dataset); pass batch=, a dict of tensors as the collator returns it."
        )
    with untouched_random_state(), untouched_sources(dataset, collate):
        # A collator that masks at random is to mask alike when training goes on.
        Draws(0, torch.device("cpu"))
        examples = [dataset[index] for index in range(min(count, len(dataset)))]
        return collate(examples)


def _kept(state: Any) -> dict[str, Any]:
    """A place in the Trainer's state, which is written to every checkpoint."""
    states = getattr(state, "stateful_callbacks", None)
    return states.setdefault(KEY, {}) if isinstance(states, dict) else {}
