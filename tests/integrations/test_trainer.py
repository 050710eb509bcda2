"""The callback for the Trainer of Transformers, in real runs."""

from __future__ import annotations

import copy
import importlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset

import hessinit
from calls import call
from hessinit import TrackSettings
from hessinit.integrations.trainer_callback import CurvatureTrainerCallback
from hessinit.results.track_record import Tracking
from integrations.lightning_digits import same_weights
from integrations.tiny_transformers import model_and_batch, with_frozen_positions
from integrations.trainer_runs import Sentences, trainer_of

# With a width of four, the masks of dropout decide how gentle the start can be; each torch draws others.
may_end_elsewhere = pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")


def norm_of(model: nn.Module, batch: Any, training: bool = True) -> float:
    problem = hessinit.logits_problem(model, batch)
    model.train(training)
    return hessinit.measure(problem, tolerance=1e-4).network.norm


@pytest.mark.parametrize("kind", ["GPT-2", pytest.param("BERT classifier", marks=pytest.mark.sweep)])
def test_a_run_is_measured_at_the_start_followed_stored_and_logged(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sent: list[dict[str, float]] = []
    define = lambda *_, **__: None  # noqa: E731
    active = SimpleNamespace(step=0, log=lambda values, **_: sent.append(values), define_metric=define)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=active))
    callback, data = CurvatureTrainerCallback(every=2), Sentences(classes=kind != "GPT-2")
    trainer = trainer_of(
        tmp_path, callback, model=kind, data=data, kind=partial(transformers.Trainer, eval_dataset=data),
        report_to=["tensorboard"], eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    for module in trainer.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    before = copy.deepcopy(trainer.model)
    trainer.train()
    assert not trainer.model.training  # as the last evaluation left it; the points are those of train mode
    tracking = callback.tracking
    assert [point.step for point in tracking.points] == [0, 2, 4]
    for point, model in ((tracking.points[0], before), (tracking.points[-1], trainer.model)):
        assert point.norm == pytest.approx(norm_of(model, data.batch()), rel=0.02)
        assert point.norm != pytest.approx(norm_of(model, data.batch(), training=False), rel=0.05)
        assert point.lr == 0.1
    logged = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert list(tracking.losses) == logged
    assert tracking.points[-1].training_loss == logged[-1][1]
    norms = [point.norm for point in tracking.points]
    stored = Tracking.from_json((tmp_path / "curvature.jsonl").read_bytes())
    assert [point.norm for point in stored.points] == norms
    (folder,) = tmp_path.glob("runs/**/curvature")  # Transformers 4 puts a folder of the date between
    scalars = EventAccumulator(str(folder)).Reload().Scalars("hessinit/norm")
    assert [one.step for one in scalars] == [0, 2, 4]
    assert [one.value for one in scalars] == pytest.approx(norms, rel=1e-5)
    assert [values["hessinit/norm"] for values in sent] == norms
    assert callback.initialization is None


class Masking:
    """Draws from torch's generator and from one of its own, as collators for masked models do."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(6)

    def __call__(self, examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        tokens = torch.stack([one["input_ids"] for one in examples])
        hidden = torch.rand(tokens.shape, generator=self.generator) + torch.rand(tokens.shape) < 0.8
        hidden[:, 0] = True
        return {"input_ids": tokens.masked_fill(hidden, 1), "labels": tokens.masked_fill(~hidden, -100)}


@pytest.mark.parametrize(
    ("model", "collator", "accumulated"), [("masked BERT", Masking, 1), ("GPT-2", None, 2)]
)
def test_training_is_not_changed_by_a_bit(model: str, collator: Any, accumulated: int, tmp_path) -> None:
    """Nor with accumulated batches, which are one step."""
    trained = []
    for callbacks in ([], [CurvatureTrainerCallback(every=1, settings=TrackSettings(warn=False))]):
        trainer = trainer_of(
            tmp_path, *callbacks, model=model, collator=collator and collator(), optim="adamw_torch",
            gradient_accumulation_steps=accumulated,
        )  # fmt: skip
        trainer.train()
        trained.append((trainer.model, torch.get_rng_state()))
    (without, state), (followed, other_state) = trained
    assert same_weights(without, followed)
    assert torch.equal(state, other_state)
    tracking = callbacks[0].tracking
    assert [point.step for point in tracking.points] == [0, 1, 2, 3, 4]
    logged = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert list(tracking.losses) == logged
    assert not any("may not be what is trained" in note for note in tracking.notes)


class Scaled(transformers.Trainer):
    times = 1.0

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **settings: Any) -> Any:
        return self.times * super().compute_loss(model, inputs, *others, **settings)


@pytest.mark.parametrize(("times", "every"), [(1.0, 2), (100.0, 2), (0.01, 2), (100.0, 50)])
def test_a_trainer_with_another_loss_is_noted(times: float, every: int, tmp_path: Path) -> None:
    callback, kind = CurvatureTrainerCallback(every=every), type("Other", (Scaled,), {"times": times})
    trainer_of(tmp_path, callback, kind=kind, learning_rate=1e-4, logging_steps=2).train()
    noted = [note for note in callback.tracking.notes if "may not be what is trained" in note]
    assert len(noted) == (times != 1)


@may_end_elsewhere
def test_weights_are_initialized_for_the_optimizers_rate_before_the_first_step(tmp_path: Path) -> None:
    callback = CurvatureTrainerCallback(initialize=True)
    trainer = trainer_of(tmp_path, callback, max_steps=1, lr_scheduler_type="linear", warmup_steps=3)
    before = copy.deepcopy(trainer.model)
    trainer.train()
    result = callback.initialization
    assert (result.lr, result.kappa) == (0.1, 0.5)  # a normalized network; the rate beyond the warmup
    assert callback.tracking.points[0].lr == 0
    assert callback.tracking.points[0].norm == pytest.approx(result.after.network.norm, rel=0.02)
    assert not same_weights(before, trainer.model)


@may_end_elsewhere
def test_mixed_precision_gives_the_weights_and_the_curvature_of_full_precision(tmp_path: Path) -> None:
    runs = []
    for mixed in (False, True):
        callback = CurvatureTrainerCallback(initialize=True)
        trainer = trainer_of(
            tmp_path, callback, model="Llama", max_steps=1, bf16=mixed, optim="adamw_torch",
            learning_rate=1e-12,
        )  # fmt: skip
        trainer.train()
        runs.append((trainer.model, callback))
    (full, callback), (mixed_model, other) = runs
    assert "forward" in vars(mixed_model)  # what the Trainer put around it is there again
    assert other.initialization.symmetries == callback.initialization.symmetries != ()
    assert other.tracking.points[0].norm == pytest.approx(callback.tracking.points[0].norm, rel=0.01)
    for one, own in zip(mixed_model.parameters(), full.parameters(), strict=True):
        assert torch.allclose(one, own, rtol=0.01, atol=1e-6)


def test_a_model_with_frozen_weights_is_not_drawn_anew(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, CurvatureTrainerCallback(initialize=True), model="GPT-2")
    trainer.model.transformer.h.requires_grad_(False)  # Conv1D, a class of Transformers
    before = copy.deepcopy(trainer.model)
    with pytest.raises(hessinit.ProblemError, match=r"frozen weights \(transformer.h.0.attn.c_a.*layers="):
        trainer.train()
    assert same_weights(before, trainer.model)


def test_adapters_say_that_the_model_was_trained() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    settings = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    adapted = peft.get_peft_model(model_and_batch("GPT-2")[0], peft.LoraConfig(**settings))
    adapted.requires_grad_(True)  # adapters tell, frozen or not
    problem = hessinit.logits_problem(adapted, Sentences().batch(), task="causal-lm")
    parts = problem.model, problem.loss, problem.batch
    with pytest.raises(hessinit.ProblemError, match="holds adapters of peft, so it was trained before"):
        call(hessinit.initialize_, *parts, lr=0.1, forward=problem.forward)


@may_end_elsewhere
@pytest.mark.parametrize("kind", ["Whisper", "ViT-MAE"])
def test_position_tables_that_transformers_freezes_are_no_trained_weights(kind: str) -> None:
    model, loss, batch, forward = with_frozen_positions(kind)
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    assert frozen
    assert all("pos" in name for name in frozen)
    kept = [model.get_parameter(name).clone() for name in frozen]
    before = copy.deepcopy(model)
    options = {"forward": forward, "optimizer": "adamw", "report": False, "scheme": "lsuv"}
    call(hessinit.initialize_, model, loss, batch, lr=1e-3, **options)
    assert not same_weights(before, model)
    assert all(torch.equal(model.get_parameter(name), one) for name, one in zip(frozen, kept, strict=True))


@pytest.mark.sweep
def test_the_loss_is_the_one_that_the_trainer_smooths(tmp_path: Path) -> None:
    callback = CurvatureTrainerCallback()
    data = Sentences(4)
    # Not GPT-2: there the Trainer counts one token too many for each sentence, and its loss is 4/5 of this.
    smoothed = {"label_smoothing_factor": 0.2, "max_steps": 1}
    trainer = trainer_of(tmp_path, callback, model="Llama", data=data, **smoothed)
    trainer.train()
    assert callback.tracking.points[0].loss == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-3)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from Sentences()


def test_a_stream_is_refused_and_needs_a_batch(tmp_path: Path) -> None:
    with pytest.raises(hessinit.ProblemError, match="iterable dataset .*pass batch="):
        trainer_of(tmp_path, CurvatureTrainerCallback(), data=Stream()).train()
    callback = CurvatureTrainerCallback(batch=Sentences().batch(7), task="causal-lm")
    trainer_of(tmp_path, callback, data=Stream(), max_steps=1).train()
    assert callback.tracking.examples == 7


def test_a_wrong_option_and_sharded_training_are_refused() -> None:
    for options, message in [
        ({"task": "translation"}, "task='translation' is unknown; choose from 'auto', 'causal-lm'"),
        ({"resume": True}, "unexpected keyword argument 'resume'"),
    ]:
        with pytest.raises((hessinit.ProblemError, TypeError), match=message):
            CurvatureTrainerCallback(**options)
    for sharding in ({"fsdp": "full_shard"}, {"deepspeed": {"zero_optimization": {}}}):
        with pytest.raises(hessinit.ProblemError, match="FSDP and DeepSpeed keep a part.*before Trainer.tr"):
            CurvatureTrainerCallback().on_train_begin(SimpleNamespace(**sharding), None, None)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "hessinit.integrations.trainer_callback")
    with pytest.raises(ImportError, match=r"pip install 'hessinit\[transformers\]'"):
        importlib.import_module("hessinit.integrations.trainer_callback")
