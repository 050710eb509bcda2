"""Finished runs are kept and never made again; a folder of another experiment is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import digit_problem as problem
import pytest
import torch
from torch import nn

from hessinit.comparing.store import RunStore, file_name
from hessinit.errors import ProblemError
from hessinit.results.comparison import Comparison, Run
from hessinit.results.result import write_text

TESTS = Path(__file__).parent
SOURCE = TESTS.parents[1] / "src"


def _stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in sorted((folder / "runs").glob("*.json"))}


def _refuse_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a run was made again")

    monkeypatch.setattr("hessinit.comparing.executing.train_one", refuse)


def test_a_second_call_reads_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = problem.small(folder=tmp_path / "new" / "folder")
    stamps = _stamps(tmp_path / "new" / "folder")
    assert len(stamps) == 8
    _refuse_to_run(monkeypatch)
    assert problem.small(folder=tmp_path / "new" / "folder") == first
    assert _stamps(tmp_path / "new" / "folder") == stamps


def test_more_starts_rates_and_seeds_reuse_what_is_there(tmp_path: Path) -> None:
    problem.small(folder=tmp_path)
    stamps = _stamps(tmp_path)
    more = {"schemes": ("he", "glorot", "default"), "learning_rates": (0.5, 0.02, 0.1), "seeds": 3}
    extended = problem.small(folder=tmp_path, **more)
    assert extended == problem.small(**more)
    after = _stamps(tmp_path)
    assert len(after) == 27
    assert {name: after[name] for name in stamps} == stamps


def test_fewer_rates_still_know_the_norms(tmp_path: Path) -> None:
    whole = problem.small(folder=tmp_path)
    assert problem.small(folder=tmp_path, learning_rates=[0.5]).norm("he") == whole.norm("he")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 13}, "steps was 12 there and is 13 here"),
        ({"batch_size": 16}, "batch_size was 32 there and is 16 here"),
        ({"optimizer": "adam"}, "optimizer was 'sgd' there and is 'adam' here"),
        ({"data": tuple(tensor.flip(0) for tensor in problem.data())}, "the data hold other values"),
        ({"build": problem.build_with_dropout}, "the model differs"),
        ({"build": problem.build_partly_frozen}, "the parameters differ"),
        ({"build": problem.build_larger}, "a new model's first loss and the length of its gradient were 2.3"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "so build, loss or forward has changed"),
        ({"loss": nn.MultiMarginLoss()}, r"loss was 'CrossEntropyLoss\(\)' there and is 'MultiMarginLoss"),
        ({"forward": lambda model, x: model(x)}, "forward was 'None' there and is '.*<lambda>' here"),
        ({"curvature_at_start": False}, "curvature_at_start was True there and is False here"),
        ({"schemes": {"he": "glorot"}}, "'he' that was he and is glorot here; give the new one another name"),
        ({"schemes": {"he": problem.draw}}, "a start 'he' that was he and is digit_problem.draw here"),
    ],
)  # fmt: skip
def test_another_experiment_is_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "one experiment"
    problem.small(folder=folder, seeds=1)
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    with pytest.raises(ProblemError, match=f"(?s)folder='.*' .*{message}.*another folder"):
        problem.small(folder=folder, seeds=1, **changes)
    assert {path: path.read_bytes() for path in folder.rglob("*.json")} == before


def test_another_length_of_warmup_is_another_start(tmp_path: Path) -> None:
    problem.small(folder=tmp_path, schemes=["he+warmup"], seeds=1, warmup=3)
    with pytest.raises(ProblemError, match="he with 3 steps of warmup and is he with 4 steps of warmup here"):
        problem.small(folder=tmp_path, schemes=["he+warmup"], seeds=1, warmup=4)
    assert problem.small(folder=tmp_path, schemes=["he"], seeds=1).warmup is None


def _scaled_by(factor: float) -> Any:
    def start(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)

    return start


def _descent(share: float = 1.0, **settings: float) -> Any:
    return lambda parameters, lr: torch.optim.SGD(parameters, share * lr, **settings)


def _smoothed(share: float) -> Any:
    return lambda output, target: problem.LOSS(output, target) + share * output.square().mean()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"optimizer": _descent()}, {"optimizer": _descent(momentum=0.99)}, "optimizer was SGD.* and is SGD"),
        ({"optimizer": _descent()}, {"optimizer": _descent(0.5)}, "optimizer was SGD.* and is SGD.* here"),
        ({"schemes": {"mine": _scaled_by(1)}}, {"schemes": {"mine": _scaled_by(0)}}, "'start mine' that did"),
        ({"schemes": {"mine": _scaled_by(1)}}, {"schemes": {"mine": _scaled_by(-1)}}, "its code has changed"),
        ({"schemes": {"mine": problem.fail}}, {"schemes": {"mine": problem.draw}}, "that was .*fail and is"),
        ({"loss": _smoothed(0)}, {"loss": _smoothed(1e-3)}, "so build, loss or forward has changed"),
    ],
)  # fmt: skip
def test_other_code_behind_the_same_name_is_another_experiment(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    settings: dict[str, Any] = {"schemes": ["default"], "seeds": 1, "folder": tmp_path}
    first = problem.small(**{**settings, **before})
    with pytest.raises(ProblemError, match=message):
        problem.small(**{**settings, **after})
    assert problem.small(**{**settings, **before}) == first


def test_more_rates_and_seeds_of_ones_own_functions_are_welcome(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "schemes": {"drawn": problem.draw},
        "optimizer": problem.adam_without_momentum,
    }
    problem.small(folder=tmp_path, learning_rates=[0.5], seeds=[1], **settings)
    assert problem.small(folder=tmp_path, **settings) == problem.small(**settings)


def test_norms_that_an_interrupted_run_would_have_measured_are_measured_later(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"schemes": ["he"], "seeds": 1, "folder": tmp_path}
    whole = problem.small(**settings, learning_rates=[0.1, 0.5])
    (tmp_path / "runs" / file_name(("he", 0.1, 0))).unlink()  # that which measured
    narrow = problem.small(**settings, learning_rates=[0.5])
    assert narrow.norm("he") == whole.norm("he")
    assert narrow.runs[0].losses == whole.runs[1].losses
    (tmp_path / "runs" / file_name(("he", 0.5, 0))).unlink()
    assert problem.small(**settings, learning_rates=[0.5, 0.7]).norm("he") == whole.norm("he")


def test_of_two_experiments_that_begin_at_once_one_is_refused(tmp_path: Path) -> None:
    for attempt in range(40):
        together, accepted = threading.Barrier(2), []

        def begin(
            steps: int, folder: Path, together: threading.Barrier = together, accepted: list[int] = accepted
        ) -> None:
            together.wait()
            try:
                RunStore(folder).open({"steps": steps}, (), {}, {})
            except ProblemError:
                return
            accepted.append(steps)

        threads = [
            threading.Thread(target=begin, args=(steps, tmp_path / str(attempt))) for steps in (20, 200)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(accepted) == 1
        assert json.loads((tmp_path / str(attempt) / "experiment.json").read_text())["experiment"] == {
            "steps": accepted[0]
        }


def test_a_run_of_another_experiment_in_the_folder_is_named(tmp_path: Path) -> None:
    problem.small(folder=tmp_path / "one", seeds=1)
    problem.small(folder=tmp_path / "two", seeds=1, steps=13)
    name = file_name(("he", 0.1, 0))
    (tmp_path / "two" / "runs" / name).replace(tmp_path / "one" / "runs" / name)
    with pytest.raises(ProblemError, match=f"{name} belongs to another experiment .*Delete it"):
        problem.small(folder=tmp_path / "one", seeds=1)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "file/inside"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProblemError, match=r"(?s)folder='.*' cannot be used: .*Pass a folder"):
        problem.small(folder=tmp_path / name)


def test_a_full_disk_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = iter(range(100))

    def full(path: Path, text: str) -> None:
        if next(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_text(path, text)

    monkeypatch.setattr("hessinit.comparing.store.write_text", full)
    create = "hessinit.comparing.store.create_text"
    monkeypatch.setattr(create, lambda path, text: write_text(path, text) or True)
    with pytest.raises(ProblemError, match="No space left on device. 2 runs are kept there; .*goes on from"):
        problem.small(folder=tmp_path)
    monkeypatch.undo()
    assert problem.small(folder=tmp_path) == problem.small()


def test_a_file_that_was_edited_is_named(tmp_path: Path) -> None:
    problem.small(folder=tmp_path, seeds=1)
    path = next((tmp_path / "runs").glob("he*.json"))
    whole = path.read_text()
    path.write_text(whole[:50])
    with pytest.raises(ProblemError, match=f"{path.name} is not JSON .*Delete it, and it is run again"):
        problem.small(folder=tmp_path, seeds=1)
    path.write_text(json.dumps({key: value for key, value in json.loads(whole).items() if key != "losses"}))
    with pytest.raises(ProblemError, match="is not a whole run: 'losses' is missing"):
        problem.small(folder=tmp_path, seeds=1)
    (tmp_path / "experiment.json").unlink()
    with pytest.raises(ProblemError, match="holds runs but no experiment.json"):
        problem.small(folder=tmp_path, seeds=1)


def test_other_versions_are_told(tmp_path: Path) -> None:
    problem.small(folder=tmp_path, seeds=1)
    record = tmp_path / "experiment.json"
    record.write_text(record.read_text().replace(str(torch.__version__), "1.0"))
    (note,) = problem.small(folder=tmp_path, seeds=1).notes
    assert f"begun with other versions: torch 1.0 then, {torch.__version__} now" in note


def test_runs_that_are_not_finite_come_back_from_the_folder(tmp_path: Path) -> None:
    settings = {"schemes": {"he": "he", "odd": problem.fail}, "learning_rates": [1e30], "seeds": 1}
    first = problem.small(folder=tmp_path, **settings)
    assert problem.small(folder=tmp_path, **settings) == first
    assert Comparison.from_json(first.to_json()) == first


def test_an_interrupt_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def interrupted(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        if next(calls) == 30:  # one forward to look, twelve steps for each run
            raise KeyboardInterrupt
        output: torch.Tensor = model(images)
        return output

    with pytest.raises(KeyboardInterrupt, match="2 of 8 runs are kept in .*The same call goes on from there"):
        problem.small(folder=tmp_path, forward=interrupted, curvature_at_start=False)
    calls = iter(range(1000, 2000))
    whole = problem.small(folder=tmp_path, forward=interrupted, curvature_at_start=False)
    assert [run.losses for run in whole.runs] == [run.losses for run in problem.small().runs]
    calls = iter(range(100))
    with pytest.raises(KeyboardInterrupt, match="stopped after 2 of 8 runs, and none is kept; pass folder="):
        problem.small(forward=interrupted, curvature_at_start=False)


# ── In processes of their own ──────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import sys
import digit_problem as problem

if __name__ == "__main__":
    problem.small(
        folder=sys.argv[1], workers=int(sys.argv[2]), forward=problem.call_slowly,
        learning_rates=(0.1, 0.2, 0.5),
    )
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def _start(script: Path, folder: Path, workers: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), str(workers)],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def _wait_for_runs(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while len(_stamps(folder)) < count and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert process.poll() is None, process.communicate()


def _undisturbed() -> tuple[Run, ...]:
    return problem.small(learning_rates=(0.1, 0.2, 0.5)).runs


def test_killed_at_any_moment_it_goes_on_and_gives_the_same_table(script: Path, tmp_path: Path) -> None:
    folder, kept = tmp_path / "kept", dict[str, int]()
    for more, moment in [(1, 0.0), (3, 0.15)]:
        process = _start(script, folder, workers=1)
        _wait_for_runs(process, folder, len(kept) + more)
        time.sleep(moment)
        process.kill()
        process.communicate()
        after = _stamps(folder)
        assert {name: after[name] for name in kept} == kept
        kept = after
    assert 4 <= len(kept) < 12
    whole = problem.small(folder=folder, forward=problem.call_slowly, learning_rates=(0.1, 0.2, 0.5))
    assert whole.runs == _undisturbed()
    after = _stamps(folder)
    assert len(after) == 12
    assert {name: after[name] for name in kept} == kept


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [
        each for child in children for each in _descendants(int(child))
    ]


def _wait_for_end_of(pids: list[int]) -> None:
    deadline = time.monotonic() + 300
    while alive := [pid for pid in pids if _is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_workers_end_with_their_parent_killed_or_interrupted(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    process = _start(script, folder, workers=2)
    _wait_for_runs(process, folder, 1)
    workers = _descendants(process.pid)
    assert len(workers) >= 2
    process.kill()
    _wait_for_end_of(workers)
    process.communicate()
    kept = _stamps(folder)

    process = _start(script, folder, workers=2)
    _wait_for_runs(process, folder, len(kept) + 1)
    workers = _descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, errors = process.communicate(timeout=300)
    _wait_for_end_of(workers)
    assert errors.count("Traceback") == 1, errors
    assert f"of 12 runs are kept in {folder}. The same call goes on from there." in errors
    after = _stamps(folder)
    assert len(kept) < len(after) < 12
    assert {name: after[name] for name in kept} == kept
    whole = problem.small(folder=folder, forward=problem.call_slowly, learning_rates=(0.1, 0.2, 0.5))
    assert whole.runs == _undisturbed()
