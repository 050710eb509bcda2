"""The verb: what is chosen, kept, resumed and written. Table 2 on the digits is the quick experiment here."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hessinit.errors import ProblemError
from hessinit.paper import Reproduction, load_records, reproduce
from hessinit.paper.experiments import EXPERIMENTS
from hessinit.paper.names import FIGURES, NAMES
from hessinit.paper.store import ResultStore
from hessinit.paper.working import PaperWork

SMALL: dict[str, Any] = {"data": "digits", "seeds": 3, "workers": 1, "progress": False}


def small(folder: Path | None, **changes: Any) -> Reproduction:
    (found,) = reproduce("table-2", **{**SMALL, "folder": folder, **changes})
    return found


def numbers(found: Reproduction) -> Any:
    data = found.to_dict()
    return data["results"], data["findings"]


def test_every_name_is_an_experiment_or_a_figure_of_one() -> None:
    assert {*EXPERIMENTS, *FIGURES, "all"} == set(NAMES)
    assert set(FIGURES.values()) <= set(EXPERIMENTS)


def test_every_experiment_ends_with_the_embedded_data() -> None:
    assert {each.data[-1] for each in EXPERIMENTS.values()} == {"digits", "docstrings"}


def test_the_folder_has_the_record_the_page_and_the_results(tmp_path: Path) -> None:
    found = small(tmp_path / "new" / "folder")
    root = tmp_path / "new" / "folder"
    assert Reproduction.load(root / "table-2-digits.json") == found
    assert load_records(root) == [found]
    assert "Table 2" in (root / "reproduce.html").read_text(encoding="utf-8")
    kept = {path.name for path in (root / "table-2-digits").glob("*.json")} - {"setting.json"}
    assert len(kept) == len(found.results) > 0
    assert not list(root.rglob("*.tmp"))


def test_the_record_says_where_its_numbers_come_from(tmp_path: Path) -> None:
    found = small(tmp_path)
    assert found.seeds == (0, 1, 2)
    assert (
        found.versions["torch"] == torch.__version__.split("+")[0]
        or found.versions["torch"] in torch.__version__
    )
    assert found.hardware["cores"].isdigit()
    assert found.revision
    assert found.source
    assert found.configuration
    assert found.seconds > 0


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert numbers(small(None)) == numbers(small(tmp_path / "kept"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = small(tmp_path)
    monkeypatch.setattr(PaperWork, "do", lambda self, job: pytest.fail(f"{job.key} was made again"))
    assert small(tmp_path) == before


def test_a_missing_result_is_made_again_to_the_same_bits(tmp_path: Path) -> None:
    before = small(tmp_path)
    results = [path for path in (tmp_path / "table-2-digits").glob("*.json") if path.name != "setting.json"]
    results[0].unlink()
    assert numbers(small(tmp_path)) == numbers(before)


def test_processes_threads_and_this_process_give_the_same_numbers() -> None:
    here = numbers(small(None))
    assert numbers(small(None, workers=2)) == here
    with ThreadPoolExecutor(1) as executor:
        assert numbers(small(None, workers=None, executor=executor)) == here


def test_the_callers_torch_settings_change_nothing_and_come_back() -> None:
    here = numbers(small(None))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        assert numbers(small(None)) == here
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_more_seeds_keep_those_there(tmp_path: Path) -> None:
    """Jobs of the first seeds are the same; only new ones are added."""
    fewer, more = small(tmp_path), small(tmp_path, seeds=5)
    assert more.seeds == (0, 1, 2, 3, 4)
    assert numbers(small(None, seeds=5)) == numbers(more)
    assert numbers(small(tmp_path)) == numbers(fewer)


def test_results_of_another_configuration_are_refused(tmp_path: Path) -> None:
    small(tmp_path)
    path = tmp_path / "table-2-digits" / "setting.json"
    setting = json.loads(path.read_text(encoding="utf-8"))
    setting["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(setting), encoding="utf-8")
    with pytest.raises(
        ProblemError, match=r"another setting: versions: torch was '1.0' there and is .* here"
    ):
        small(tmp_path)


def test_an_edited_result_is_named(tmp_path: Path) -> None:
    small(tmp_path)
    path = next(p for p in (tmp_path / "table-2-digits").glob("*.json") if p.name != "setting.json")
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ProblemError, match=rf"{path.name} is not a whole result .* Delete it"):
        small(tmp_path)
    path.write_text('{"kind": ', encoding="utf-8")
    with pytest.raises(ProblemError, match=rf"{path.name} is not JSON"):
        small(tmp_path)


def test_a_full_disk_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    store = ResultStore(tmp_path)
    store.open({"experiment": "x"})
    store.add("first", 1.0, 0.1)
    monkeypatch.setattr("hessinit.paper.store.write_text", full)
    with pytest.raises(ProblemError, match=r"No space left on device. What was written before is kept"):
        store.add("second", 2.0, 0.1)


def test_numbers_that_json_has_no_word_for_are_kept(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    store.open({})
    store.add("a key / of: any kind", {"loss": math.inf, "third": 1 / 3}, 0.5)
    again = ResultStore(tmp_path)
    again.open({})
    assert again.results == store.results
    assert again.results["a key / of: any kind"].value == {"loss": "inf", "third": 1 / 3}


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        ((), {}, "nothing to reproduce was named; name some of table-1"),
        (("table-6",), {}, "name='table-6' is unknown; choose from 'table-1'"),
        (("tabel-4",), {}, "Did you mean 'table-4'"),
        (
            ("table-2",),
            {"data": "imagenet"},
            "data='imagenet' is unknown; choose from 'paper', 'digits', 'mnist'",
        ),
        (
            ("table-2",),
            {"data": "cifar-10"},
            "data='cifar-10' is not what table-2 can be run on; choose from 'paper', 'digits', 'mnist'",
        ),
        (("table-2",), {"variant": "broad"}, "variant='broad' is unknown; choose from 'narrow-first'"),
        (("table-2",), {"seeds": 0}, "seeds=0 "),
        (("table-2",), {"seeds": 1.5}, "seeds=1.5 "),
        (("table-2",), {"workers": 0}, "workers=0 "),
        (("table-2",), {"folder": 5}, "folder=5 must be the path of a folder"),
        (("table-2",), {"progress": "no"}, "progress='no' "),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(
    names: tuple[str, ...],
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PaperWork, "do", lambda self, job: pytest.fail("work was done"))
    with pytest.raises(ProblemError, match=message.replace("(", r"\(")):
        reproduce(*names, **{**SMALL, **changes})


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProblemError, match="is a file; pass the name of a folder"):
        small(tmp_path / "file")


def test_missing_data_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="train-images"):
        reproduce("table-2", data="mnist", data_dir=tmp_path, folder=None)


def test_an_interrupt_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do, done = PaperWork.do, []

    def interrupted(self: PaperWork, job: Any) -> Any:
        if done:
            raise KeyboardInterrupt
        done.append(job)
        return do(self, job)

    monkeypatch.setattr(PaperWork, "do", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"1 of \d+ pieces are kept in .*The same call goes on"):
        small(tmp_path)
    monkeypatch.undo()
    assert numbers(small(tmp_path)) == numbers(small(None))


def test_a_figure_is_drawn_from_its_table(tmp_path: Path) -> None:
    """The cheapest training: one seed, and only what the figure needs is checked."""
    (found,) = reproduce("figure-1", data="digits", seeds=1, folder=tmp_path, progress=False)
    assert found.experiment == "table-4"
    assert (tmp_path / "figure-1-digits.png").read_bytes().startswith(b"\x89PNG")
    assert found.plot("figure-1").get_lines()
    with pytest.raises(ValueError, match="figure='figure-9' is none of figure-1"):
        found.plot("figure-9")
