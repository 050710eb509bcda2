"""What happens to a run of `reproduce`: disks, workers, settings of the process, other people's files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hessinit.errors import ProblemError
from hessinit.paper import Reproduction, load_records, minibatches, reproduce, table_2
from hessinit.paper.experiments import EXPERIMENTS
from hessinit.paper.gathering import write_page
from hessinit.paper.store import ResultStore
from hessinit.paper.working import PaperWork
from result_examples import example_reproduction

SMALL: dict[str, Any] = {"data": "digits", "seeds": 2, "workers": 1, "progress": False}


def small(folder: Path | None, **changes: Any) -> Reproduction:
    (found,) = reproduce("table-2", **{**SMALL, "folder": folder, **changes})
    return found


@pytest.mark.parametrize(
    ("writer", "what"),
    [
        ("hessinit.results.reproduction.write_text", "the record"),
        ("hessinit.paper.gathering.write_text", "the page"),
    ],
)
def test_a_disk_that_fills_up_at_the_end_is_told(
    writer: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, full)
    with pytest.raises(
        ProblemError, match=f"{what} could not be written to .*: No space left on device. What was"
    ):
        small(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(PaperWork, "do", lambda self, job: pytest.fail(f"{job.key} was made again"))
    made = small(tmp_path)
    assert load_records(tmp_path) == [made]


def test_a_folder_removed_in_the_middle_is_not_said_to_keep_anything(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "results")
    store.open({})
    store.add("first", 1.0, 0.1)
    shutil.rmtree(tmp_path / "results")
    with pytest.raises(
        ProblemError, match=r"results is no longer there, nor what it held. The same call begins"
    ):
        store.add("second", 2.0, 0.1)


def test_a_record_that_was_cut_is_named_on_the_page_and_foreign_json_is_left_alone(tmp_path: Path) -> None:
    whole = example_reproduction()
    whole.save(tmp_path / "table-4-whole.json")
    text = (tmp_path / "table-4-whole.json").read_text()
    (tmp_path / "table-4-<cut>.json").write_text(text[: len(text) // 2])
    (tmp_path / "foreign.json").write_text('{"name": "another program"}')
    page = write_page(tmp_path).read_text()
    assert "table-4-&lt;cut&gt;.json" in page
    assert "<cut>" not in page
    assert "foreign" not in page
    assert [record.title for record in load_records(tmp_path)] == [whole.title]


def test_a_folder_where_a_file_should_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "reproduce.html").mkdir()
    with pytest.raises(
        ProblemError, match=r"the page could not be written to .*: it is there and is not a file"
    ):
        small(tmp_path)


def test_a_value_edited_into_nonsense_is_told_of_the_folder(tmp_path: Path) -> None:
    small(tmp_path)
    path = next(p for p in (tmp_path / "table-2-digits").glob("*.json") if p.name != "setting.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**data, "value": "nonsense"}), encoding="utf-8")
    with pytest.raises(ProblemError, match=r"nothing can be concluded from the results in .*table-2-digits"):
        small(tmp_path)


def test_a_result_nested_without_end_is_told(tmp_path: Path) -> None:
    small(tmp_path)
    path = next(p for p in (tmp_path / "table-2-digits").glob("*.json") if p.name != "setting.json")
    path.write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(ProblemError, match=rf"{path.name} is not JSON"):
        small(tmp_path)


def test_a_fault_of_our_own_is_not_blamed_on_an_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(setting: Any, values: Any) -> Any:
        raise TypeError("our own")

    experiment = EXPERIMENTS["table-2"]
    monkeypatch.setitem(EXPERIMENTS, "table-2", type(experiment)(**{**vars(experiment), "conclude": faulty}))
    with pytest.raises(TypeError, match="our own"):
        small(tmp_path)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the workers by /proc")
def test_a_killed_worker_ends_the_run_with_what_is_kept(tmp_path: Path) -> None:
    command = [
        "reproduce",
        "table-4",
        "--data",
        "digits",
        "--seeds",
        "2",
        "--workers",
        "2",
        "--folder",
        "kept",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "hessinit", *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    results = tmp_path / "kept" / "table-4-digits"
    deadline = time.monotonic() + 300
    while not (results.is_dir() and len(list(results.glob("[!.]*.json"))) >= 2):
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.05)
    os.kill(worker_of(process.pid), signal.SIGKILL)
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 2, messages
    assert "a worker process ended" in messages
    assert "pieces are kept in kept. The same command goes on from there." in messages
    assert "Traceback" not in messages


def worker_of(pid: int) -> int:
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return next(pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_the_callers_device_does_not_reach_the_data() -> None:
    here = small(None).results
    minibatches._read.cache_clear()  # as in a process that has read nothing yet
    torch.set_default_device("meta")
    try:
        assert small(None).results == here
    finally:
        torch.set_default_device(None)
        minibatches._read.cache_clear()


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once would put back each other's settings of the process."""
    at_work, seen = threading.Semaphore(1), []

    def run(job: Any) -> Any:
        assert at_work.acquire(blocking=False), "two at once"
        time.sleep(0.02)
        seen.append(torch.get_default_dtype())
        at_work.release()
        return table_2.EXPERIMENT.run(job)

    experiment = EXPERIMENTS["table-2"]
    monkeypatch.setitem(EXPERIMENTS, "table-2", type(experiment)(**{**vars(experiment), "run": run}))
    torch.set_default_dtype(torch.float64)
    try:
        with ThreadPoolExecutor(3) as executor:
            small(None, workers=None, executor=executor)
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(seen) == {torch.float32}


def test_an_executor_needs_no_guard_in_the_callers_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from hessinit.paper import reproduce\n"
        "with ThreadPoolExecutor(1) as executor:\n"
        "    reproduce('table-2', data='digits', seeds=1, folder=None, executor=executor)\n"
    )
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=300)


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        (("all",), {"variant": "one-hidden"}, "variant='one-hidden' is one of table-4, and not of table-1, "),
        (
            ("table-2",),
            {"variant": "one-hidden"},
            "one of table-4, and not of table-2, which has 'narrow-first'",
        ),
        (
            ("word2vec",),
            {"data": "mnist"},
            "data='mnist' is not what word2vec can be run on; choose from 'paper'",
        ),
        (("table-2",), {"seeds": 10**12}, "seeds=1000000000000 must be at most 100000"),
        (("table-2",), {"data_dir": 5}, "data_dir=5 must be the path of a folder"),
        (
            ("table-2",),
            {"folder": "~nobody-of-that-name/x"},
            "folder='~nobody-of-that-name/x' begins with a ~",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_written(
    names: tuple[str, ...],
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProblemError, match=message):
        reproduce(*names, **{**SMALL, "folder": "new", **changes})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["table-1", "table-4", "table-5", "word2vec"])
def test_a_package_that_is_needed_at_the_end_is_missed_at_the_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ProblemError, match=r"scipy is not installed.*pip install 'hessinit\[paper\]'"):
        reproduce(name, **SMALL, folder=tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_tables_that_need_no_scipy_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert [reproduce(name, **SMALL, folder=None) for name in ("table-2", "table-3")]


def test_other_files_of_the_folder_are_left_out_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "deep.json").write_text("[" * 200_000)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "link.json").symlink_to(tmp_path / "nothing")
    made = small(tmp_path)
    assert load_records(tmp_path) == [made]


def first_cell(data: Any) -> Any:
    return data["findings"]["tables"][0]["cells"][0]


def first_figure(data: Any) -> Any:
    return data["findings"]["figures"][0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: first_figure(data)["curves"][0].update(y=[1.0]), "lists of different lengths"),
        (lambda data: first_figure(data)["curves"][0].update(error=[1.0]), "lists of different lengths"),
        (lambda data: first_cell(data).update(ours=10**400), "too large"),
        (
            lambda data: first_figure(data).update(curves=first_figure(data)["curves"] * 5000),
            "curves, and 200 can",
        ),
    ],
)
def test_a_record_that_cannot_be_drawn_is_refused_when_it_is_read(
    edit: Any, message: str, tmp_path: Path
) -> None:
    data = json.loads(example_reproduction().to_json())
    edit(data)
    (tmp_path / "edited.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=f"edited.json is not a whole hessinit reproduction: .*{message}"):
        Reproduction.load(tmp_path / "edited.json")
    assert load_records(tmp_path) == []


def test_words_that_are_none_are_shown_as_they_are() -> None:
    data = json.loads(example_reproduction().to_json())
    first_figure(data)["title"] = first_cell(data)["unit"] = 5
    data["findings"]["tables"][0]["note"] = None
    found = Reproduction.from_json(json.dumps(data))
    assert "5" in str(found)
    assert found._repr_html_()
