"""The verb: what is chosen, kept, resumed and written. Table 2 on the digits is the quick experiment here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hessinit.errors import ProblemError
from hessinit_paper import Reproduction, experiments, load_records, reproduce
from hessinit_paper.experiments import MODULES, choose_experiments
from hessinit_paper.images import load_images

SMALL: dict[str, Any] = {"data": "digits", "seeds": 2, "workers": 1, "progress": False}


def small(folder: Path | None, **changes: Any) -> Reproduction:
    (found,) = reproduce("table-2", **{**SMALL, "folder": folder, **changes})
    return found


def numbers(found: Reproduction) -> Any:
    data = found.to_dict()
    return data["results"], data["findings"]


def fail_on_work(job: Any) -> Any:
    pytest.fail(f"{job.key} was run")


def results_of(folder: Path) -> list[Path]:
    return sorted((folder / "table-2-digits" / "runs").glob("*.json"))


def test_all_on_the_digits_leaves_out_word2vec() -> None:
    on_digits = [one.name for one, data in choose_experiments(["all"], "digits", None) if data == "digits"]
    assert on_digits == [name for name in MODULES if name != "word2vec"]


def test_the_folder_has_the_record_the_page_and_the_results(tmp_path: Path) -> None:
    root = tmp_path / "new" / "folder"
    found = small(root)
    assert Reproduction.load(root / "table-2-digits.json") == found
    (root / "foreign.json").write_text('{"name": "another program"}')
    assert load_records(root) == [found]
    assert "Table 2" in (root / "reproduce.html").read_text(encoding="utf-8")
    assert len(results_of(root)) == len(found.results) > 0
    assert not list(root.rglob("*.tmp"))
    # The record says where its numbers come from.
    assert found.seeds == (0, 1)
    assert found.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert all([found.revision, found.source, found.configuration, found.seconds])


def test_what_is_kept_is_not_made_again_and_what_is_missing_has_the_same_bits(tmp_path, monkeypatch) -> None:
    before = small(tmp_path)
    results_of(tmp_path)[0].unlink()
    assert numbers(small(tmp_path)) == numbers(before)
    more = small(tmp_path, seeds=3)  # jobs of other seeds join
    assert more.seeds == (0, 1, 2)
    monkeypatch.setattr(experiments, "run_job", fail_on_work)
    assert numbers(small(tmp_path)) == numbers(before)


def test_processes_threads_and_the_callers_settings_give_the_same_numbers(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = numbers(small(None))
    assert list(tmp_path.iterdir()) == []
    assert numbers(small(None, workers=2)) == here
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load_images.cache_clear()  # as in a process that has read nothing yet
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with ThreadPoolExecutor(3) as executor:
            assert numbers(small(None, workers=None, executor=executor)) == here
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        ((), {}, "nothing to reproduce was named; name some of table-1"),
        (("table-6",), {}, "name='table-6' is unknown; choose from 'table-1'"),
        (("table-2",), {"data": "cifar-10"}, "'cifar-10' is unknown; choose from 'paper', 'digits', 'mnist'"),
        (("table-2",), {"variant": "broad"}, "variant='broad' is unknown; choose from 'narrow-first'"),
        (("all",), {"variant": "one-hidden"}, "table-1: variant='one-hidden' is unknown; .*'one-image'"),
        (("word2vec",), {}, "word2vec does not run on the embedded digits. Pass data='wikipedia'"),
        (("table-2",), {"seeds": 0}, "seeds=0 "),
        (("table-2",), {"data": "mnist", "data_dir": "."}, "train-images"),
        (("word2vec",), {"data": "paper"}, "data_dir=None holds no text; word2vec needs a Wiki"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(
    names: tuple[str, ...], changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "run_job", fail_on_work)
    with pytest.raises(ProblemError, match=message):
        reproduce(*names, **{**SMALL, "folder": None, **changes})


def test_an_interruption_says_what_is_kept_and_the_same_call_continues(tmp_path, monkeypatch) -> None:
    run_job, done = experiments.run_job, []

    def interrupted(job: Any) -> Any:
        if done:
            raise KeyboardInterrupt
        done.append(job)
        return run_job(job)

    monkeypatch.setattr(experiments, "run_job", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"1 of 5 runs are kept in .*The same call or command"):
        small(tmp_path)
    monkeypatch.undo()
    assert numbers(small(tmp_path)) == numbers(small(None))


def test_a_figure_is_drawn_from_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the raw values of a committed record: nothing is trained."""
    root = Path(__file__).parents[2] / "benchmarks" / "results" / "paper"
    record = Reproduction.load(root / "table-4-mnist.json")

    def recorded(job: Any) -> Any:
        return {"value": record.results[job.key], "seconds": 0.5, "revision": "recorded"}

    monkeypatch.setattr(experiments, "run_job", recorded)
    options = {"data": "digits", "folder": tmp_path, "workers": 1, "progress": False}
    (found,) = reproduce("figure-1", **options)
    assert (found.experiment, found.revision, found.seconds) == ("table-4", "recorded", 35.0)
    assert found.findings.figures == record.findings.figures
    assert (tmp_path / "figure-1-digits.png").read_bytes().startswith(b"\x89PNG")
