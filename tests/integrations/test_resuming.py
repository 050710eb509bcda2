"""Runs that go on from a checkpoint: in their own file, with their own examples, or with a word about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from hessinit.integrations.remembering import Memory, digest_examples, digest_start, small_copy
from torch import Tensor

import hessinit
from hessinit.integrations import remembering
from hessinit.integrations.lightning import CurvatureCallback
from hessinit.integrations.transformers import CurvatureCallback as TrainersCallback
from hessinit.results.track_record import Tracking
from hessinit.training.track import Budget
from integrations.lightning_digits import (
    LOSS,
    digits,
    digits_module,
    fit_from,
    loader,
    plain_network,
    trainer_of,
)
from integrations.test_trainer import Masking
from integrations.trainer_runs import trainer_of as trainer_of_transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "affords", lambda self: True)


def fit(
    folder: Path, *, seed: int, epochs: int = 1, checkpoint: Path | None = None, **options: Any
) -> tuple[Any, Tracking]:
    """Four steps an epoch of a network that the seed makes; leaves `seed.ckpt`."""
    torch.manual_seed(seed)
    module = digits_module(lightning, plain_network())
    callback = CurvatureCallback(LOSS, every=2, **options)
    trainer = trainer_of(lightning, folder, callback, max_epochs=epochs)
    torch.manual_seed(seed + epochs)  # the loader shuffles in another order when training goes on
    fit_from(checkpoint, trainer, module, loader(shuffle=True), weights_only=True)
    trainer.save_checkpoint(folder / f"{seed}.ckpt")
    return module, callback.tracking


def norms(tracking: Tracking) -> list[tuple[int, float]]:
    return [(point.step, point.norm) for point in tracking.points]


def test_lightning_goes_on_in_the_file_of_its_own_run(tmp_path: Path) -> None:
    _, first = fit(tmp_path, seed=1)
    _, second = fit(tmp_path, seed=2)
    untouched = (tmp_path / "curvature.jsonl").read_bytes()
    _, resumed = fit(tmp_path, seed=2, epochs=2, checkpoint=tmp_path / "2.ckpt")
    assert norms(first)[0] != norms(second)[0]
    assert norms(resumed)[:2] == norms(second)[:2]
    assert [point.step for point in resumed.points] == [0, 2, 4, 6, 8]
    assert (tmp_path / "curvature.jsonl").read_bytes() == untouched
    assert norms(Tracking.from_json((tmp_path / "curvature-2.jsonl").read_bytes())) == norms(resumed)


def test_an_earlier_run_is_gone_on_with_beside_a_later_one(tmp_path: Path) -> None:
    _, first = fit(tmp_path, seed=1)
    fit(tmp_path, seed=2)
    _, resumed = fit(tmp_path, seed=1, epochs=2, checkpoint=tmp_path / "1.ckpt")
    assert norms(resumed)[:2] == norms(first)[:2]
    assert norms(Tracking.from_json((tmp_path / "curvature.jsonl").read_bytes())) == norms(resumed)


def test_the_trainer_goes_on_in_the_file_of_its_own_run(tmp_path: Path) -> None:
    def train(rate: float, checkpoint: str | None = None) -> Tracking:
        callback = TrainersCallback(every=2, warn=False)
        trainer = trainer_of_transformers(
            tmp_path, callback, learning_rate=rate, save_strategy="steps", save_steps=2
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        return callback.tracking

    train(0.1)
    second = train(0.3)  # its checkpoints take the place of the first one's
    untouched = (tmp_path / "curvature.jsonl").read_bytes()
    resumed = train(0.3, str(tmp_path / "checkpoint-2"))
    assert norms(resumed)[0] == norms(second)[0]
    assert [point.norm for point in resumed.points] == pytest.approx(
        [point.norm for point in second.points], rel=1e-5
    )
    assert (tmp_path / "curvature.jsonl").read_bytes() == untouched
    assert not (tmp_path / "curvature-3.jsonl").exists()


def test_another_runs_file_of_the_same_name_is_not_gone_on_with(tmp_path: Path) -> None:
    fit(tmp_path, seed=1)
    (tmp_path / "curvature.jsonl").unlink()
    fit(tmp_path, seed=2)
    _, resumed = fit(tmp_path, seed=1, epochs=2, checkpoint=tmp_path / "1.ckpt")
    assert [point.step for point in resumed.points] == [4, 6, 8]
    assert any(
        "went on at step 4; the record of the steps before is not known" in one for one in resumed.notes
    )
    assert (tmp_path / "curvature-2.jsonl").exists()


def test_a_run_that_was_moved_finds_its_file_in_the_new_folder(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    fit(old, seed=1)
    old.rename(new)
    _, resumed = fit(new, seed=1, epochs=2, checkpoint=new / "1.ckpt")
    assert [point.step for point in resumed.points] == [0, 2, 4, 6, 8]
    assert not old.exists()


def test_another_curvature_starts_another_record(tmp_path: Path) -> None:
    fit(tmp_path, seed=1)
    _, resumed = fit(tmp_path, seed=1, epochs=2, checkpoint=tmp_path / "1.ckpt", curvature="hessian")
    assert (resumed.curvature, len(resumed.points)) == ("hessian", 3)


def test_two_callbacks_go_on_in_two_files(tmp_path: Path) -> None:
    def run(epochs: int, checkpoint: Path | None = None) -> list[Tracking]:
        both = [CurvatureCallback(LOSS, every=2), CurvatureCallback(LOSS, every=2, batch=digits(8))]
        trainer = trainer_of(lightning, tmp_path, *both, max_epochs=epochs)
        trainer.fit(digits_module(lightning, plain_network()), loader(), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "both.ckpt")
        return [one.tracking for one in both]

    run(1)
    resumed = run(2, tmp_path / "both.ckpt")
    stored = [
        norms(Tracking.from_json(path.read_bytes())) for path in sorted(tmp_path.glob("curvature*.jsonl"))
    ]
    assert all(norms(one) in stored for one in resumed)


def test_lightning_measures_the_same_examples_again(tmp_path: Path) -> None:
    caught: list[tuple[Tensor, Tensor]] = []

    def first(batch: Any) -> Any:
        caught.append((batch[0].clone(), batch[1].clone()))
        return batch

    fit(tmp_path, seed=1, batch=first)
    module, resumed = fit(tmp_path, seed=1, epochs=2, checkpoint=tmp_path / "1.ckpt", batch=first)
    before, after = caught
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    truth = hessinit.measure(module.network, LOSS, before, tolerance=1e-4)
    assert resumed.points[-1].norm == pytest.approx(truth.network.norm, rel=0.02)
    assert not any("other examples" in note for note in resumed.notes)


def test_other_examples_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembering, "_MOST_BYTES", 10)
    fit(tmp_path, seed=1)
    _, resumed = fit(tmp_path, seed=1, epochs=2, checkpoint=tmp_path / "1.ckpt")
    assert any("From step 4 on other examples are measured than before" in note for note in resumed.notes)


def test_a_collator_that_masks_at_random_masks_alike_again(tmp_path: Path) -> None:
    for seed, checkpoint in ((1, None), (2, str(tmp_path / "checkpoint-2"))):
        callback = TrainersCallback(every=2, warn=False)
        trainer = trainer_of_transformers(
            tmp_path, callback, model="masked BERT", collator=Masking(), save_strategy="steps", save_steps=2
        )
        torch.manual_seed(seed)
        trainer.train(resume_from_checkpoint=checkpoint)
    assert [point.step for point in callback.tracking.points] == [0, 2, 4]
    assert not any("other examples" in note for note in callback.tracking.notes)


def test_a_file_is_told_by_its_first_point(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    assert digest_start(file) == ""
    file.write_text('{"kind": "hessinit tracking"}\n{"norm": 1.0, "seconds"')  # a killed run
    assert digest_start(file) == ""
    file.write_text('{"kind": "hessinit tracking"}\n{"norm": 1.0, "seconds": 0.25}\n')
    found = digest_start(file)
    file.write_text('{"kind": "another header"}\n{"norm": 1.0, "seconds": 0.25}\n{"norm": 2.0}\n')
    assert digest_start(file) == found != ""
    file.write_text('{"kind": "hessinit tracking"}\n{"norm": 1.0, "seconds": 0.26}\n')
    assert digest_start(file) != found
    assert Memory.read({"file": 3}) is Memory.read(None) is None


def test_examples_are_told_by_every_bit() -> None:
    batch = {"x": torch.zeros(2, 3).bfloat16(), "y": [torch.tensor([1, 2]), torch.zeros(0)]}
    found = digest_examples(batch)
    assert found == digest_examples(
        {"x": torch.zeros(2, 3).bfloat16(), "y": (torch.tensor([1, 2]), torch.zeros(0))}
    )
    assert found != digest_examples({**batch, "x": torch.zeros(3, 2).bfloat16()})
    assert found != digest_examples({**batch, "x": -torch.zeros(2, 3).bfloat16()})
    assert digest_examples(iter([batch])) == ""  # looking would use it up


def test_only_a_small_and_plain_batch_goes_into_a_checkpoint() -> None:
    batch = (torch.ones(3), {"name": "kept", "rows": [torch.ones(2)]})
    copied = small_copy(batch)
    batch[0].zero_()
    assert copied[0].tolist() == [1, 1, 1]
    assert copied[1]["name"] == "kept"
    assert small_copy((torch.ones(3), object())) is None
    assert small_copy(torch.empty(2**24)) is None
