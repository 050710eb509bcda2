"""Runs that resume from a checkpoint: in their own file, with their own examples, or with a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch

import hessinit
from hessinit import ProblemError, Tracking, TrackSettings
from hessinit.integrations.lightning_callback import CurvatureCallback
from hessinit.integrations.trainer_callback import CurvatureTrainerCallback
from integrations.lightning_digits import (
    LOSS,
    digits,
    digits_module,
    fit_from,
    loader,
    plain_network,
    same_weights,
    trainer_of,
)
from integrations.test_trainer import Masking
from integrations.trainer_runs import trainer_of as trainer_of_transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
]


def fit(folder: Path, seed: int, epochs: int = 1, start: Any = None, **options: Any) -> tuple[Any, Tracking]:
    """Four steps an epoch of a network that the seed makes; leaves `seed.ckpt`."""
    shuffle = options.pop("shuffle", True)
    torch.manual_seed(seed)
    module = digits_module(lightning, plain_network())
    callback = CurvatureCallback(LOSS, every=2, **options)
    trainer = trainer_of(lightning, folder, callback, max_epochs=epochs)
    torch.manual_seed(seed + epochs)  # the loader shuffles in another order when training resumes
    fit_from(start, trainer, module, loader(shuffle=shuffle))
    trainer.save_checkpoint(folder / f"{seed}.ckpt")
    return module, callback.tracking


def norms(tracking: Tracking) -> list[tuple[int, float]]:
    return [(point.step, point.norm) for point in tracking.points]


def test_lightning_continues_its_file_also_in_a_folder_that_was_moved_and_its_weights(tmp_path: Path) -> None:
    old, new, options = tmp_path / "old", tmp_path / "new", {"initialize": True, "shuffle": False}
    old.mkdir()
    straight, _ = fit(tmp_path, 1, epochs=2, **options)
    _, first = fit(old, 1, **options)
    old.rename(new)
    module, resumed = fit(new, 1, epochs=2, start=new / "1.ckpt", **options)
    assert same_weights(straight, module)  # not initialized again
    assert norms(resumed)[:2] == norms(first)[:2]
    assert [point.step for point in resumed.points] == [0, 2, 4, 6, 8]
    assert norms(Tracking.load(new / "curvature.jsonl")) == norms(resumed)
    assert not old.exists()


def test_a_file_of_another_run_is_not_continued_but_kept(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    _, other = fit(tmp_path, 2)
    _, resumed = fit(tmp_path, 1, epochs=2, start=tmp_path / "1.ckpt")
    assert [point.step for point in resumed.points] == [4, 6, 8]
    assert any("resumed at step 4; the earlier record was not found" in note for note in resumed.notes)
    assert norms(Tracking.load(tmp_path / "curvature.jsonl.bak")) == norms(other)
    exact = TrackSettings(curvature="hessian")
    _, sharper = fit(tmp_path, 1, epochs=3, start=tmp_path / "1.ckpt", settings=exact)
    assert (sharper.curvature, len(sharper.points)) == ("hessian", 3)  # another curvature is another record


def test_two_callbacks_need_two_files(tmp_path: Path) -> None:
    def run(epochs: int, paths: list[Path | None], checkpoint: Path | None = None) -> list[Tracking]:
        both = [CurvatureCallback(LOSS, every=2, path=path, batch=digits(8)) for path in paths]
        trainer = trainer_of(lightning, tmp_path, *both, max_epochs=epochs)
        trainer.fit(digits_module(lightning, plain_network()), loader(), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "both.ckpt")
        return [one.tracking for one in both]

    with pytest.raises(ProblemError, match="another callback writes to .*curvature.jsonl; pass path="):
        run(1, [None, None])
    paths = [None, tmp_path / "other.jsonl"]
    run(1, paths)
    resumed = run(2, paths, tmp_path / "both.ckpt")
    assert [[point.step for point in one.points] for one in resumed] == [[0, 2, 4, 6, 8]] * 2
    assert norms(Tracking.load(tmp_path / "other.jsonl")) == norms(resumed[1])


def test_lightning_measures_the_next_batch_and_says_so_unless_one_is_given(tmp_path: Path) -> None:
    for name, batch in (("any", None), ("given", digits(8))):
        folder = tmp_path / name
        folder.mkdir()
        fit(folder, 1, batch=batch)
        module, resumed = fit(folder, 1, epochs=2, start=folder / "1.ckpt", batch=batch)
        noted = [note for note in resumed.notes if "Resumed at step 4: from there on the curvature" in note]
        assert len(noted) == (batch is None)
    truth = hessinit.measure(module.network, LOSS, digits(8), tolerance=1e-4)
    assert resumed.points[-1].norm == pytest.approx(truth.network.norm, rel=0.02)


def test_the_trainer_continues_its_file_and_a_collator_masks_alike_again(tmp_path: Path) -> None:
    found = []
    for seed, checkpoint in ((1, None), (2, str(tmp_path / "checkpoint-2"))):
        callback = CurvatureTrainerCallback(every=2, settings=TrackSettings(warn=False))
        options = {"model": "masked BERT", "save_strategy": "steps", "save_steps": 2}
        trainer = trainer_of_transformers(tmp_path, callback, collator=Masking(), **options)
        torch.manual_seed(seed)
        trainer.train(resume_from_checkpoint=checkpoint)
        found.append(callback.tracking)
    first, resumed = found
    assert [point.step for point in resumed.points] == [0, 2, 4]
    assert norms(resumed)[0] == norms(first)[0]
    assert norms(Tracking.load(tmp_path / "curvature.jsonl")) == norms(resumed)
