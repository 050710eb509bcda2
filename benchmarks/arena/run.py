"""The arena: starts × learning rates × seeds, in few processes that make many short trainings each.

    HESSINIT_DATA=folder python benchmarks/arena/run.py --set cpu          ours, beside the record of others
    HESSINIT_DATA=folder python benchmarks/arena/run.py --set normalized --device cuda --processes 14
    HESSINIT_DATA=folder python benchmarks/arena/run.py --set cpu --start "hessinit, auto rate"
    python benchmarks/arena/run.py --collect build/arena2/*.jsonl          finished runs into results/arena2
    python benchmarks/arena/run.py --show                                  the scores of the records
    python benchmarks/arena/run.py --draw benchmarks/results               their pictures

Every finished run is appended to a file in --folder, and a run that is there is not made again. Seeds are the
outermost loop, so that what is there when time is up is balanced. On a GPU start NVIDIA's MPS first
(`nvidia-cuda-mps-control -d`), so that the processes run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Before torch is loaded, here and in the workers: one thread for each run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[1])]

from arena import records  # noqa: E402
from arena.schemes import OTHERS, is_ours  # noqa: E402
from arena.tasks import AUTO, CPU, OURS, PICTURE, RACED, SETS, TITLES, Task  # noqa: E402

MOST_FAILURES = 12


def main() -> None:
    arguments = _read_arguments()
    if arguments.collect:
        records.collect(records.read_lines(arguments.collect), arguments.results)
    elif arguments.freeze:
        records.Arena.load(arguments.results).freeze(arguments.results)
    elif not (arguments.show or arguments.draw):
        run(list_jobs(arguments), arguments)
    if arguments.show:
        from arena import report

        report.show_records(arguments.results)
    if arguments.draw:
        draw(arguments)


def draw(arguments: argparse.Namespace) -> None:
    """Regret and ranks of the CPU tasks, and loss against learning rate, plain and normalized."""
    from arena import figures

    arena, folder = records.Arena.load(arguments.results), arguments.draw
    recorded = arena.outcomes(CPU, OURS)
    if len(recorded) == len(CPU):
        figures.draw(recorded, OURS, folder / "arena-cpu.png")
    if found := arena.outcomes(PICTURE, OURS):
        figures.draw_rates(found, OURS, folder / "learning-rates.png", TITLES)


def list_jobs(arguments: argparse.Namespace) -> list[tuple[str, str, float | str, int]]:
    """Seeds outermost, then rates, so that all tasks and starts get on together."""
    tasks = [task for name in arguments.set for task in SETS[name]]
    unknown = sorted(set(arguments.task or ()) - {task.name for task in tasks})
    if unknown:
        raise SystemExit(f"--task {unknown[0]} is not in --set {' '.join(arguments.set)}.")
    chosen = [task for task in dict.fromkeys(tasks) if not arguments.task or task.name in arguments.task]
    jobs = [
        (seed, place, task.name, start, rate)
        for task in chosen
        for seed in range(arguments.seeds or task.seeds)
        for start in arguments.start or task.starts
        for place, rate in enumerate(_rates(task, start, arguments.rates))
    ]
    jobs.sort(key=lambda job: (*job[:2], job[3] == OURS))  # after the race, which may tell it, too
    return [(name, start, rate, seed) for seed, _, name, start, rate in jobs]


def _rates(task: Task, start: str, asked: list[float] | None) -> tuple[float | str, ...]:
    if start.partition("[")[0] == AUTO:
        return ("auto",)
    return tuple(rate for rate in task.rates if not asked or rate in asked)


def run(jobs: list[tuple[str, str, float | str, int]], arguments: argparse.Namespace) -> None:
    """Make the runs that are missing in the folder, and append each to its file when it is finished."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    done = {records.key_of(each) for each in records.read_lines(sorted(arguments.folder.glob("*.jsonl")))}
    missing = [job for job in jobs if job not in done]
    print(f"{len(missing)} of {len(jobs)} runs to make", flush=True)
    begun, made, failures = time.perf_counter(), 0, 0
    left = iter(missing)
    file = arguments.folder / f"runs-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    with (
        ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool,
        open(file, "a", encoding="utf-8") as lines,
    ):
        running: dict[Any, Any] = {}
        while True:
            while len(running) < arguments.processes and time.perf_counter() - begun < arguments.seconds:
                job = next((job for job in left if job not in done), None)
                if job is None:
                    break
                running[pool.submit(_train, job, arguments.device)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                seconds = time.perf_counter() - begun
                if future.exception() is not None:
                    failures += 1
                    print(f"{_name(job)}: {future.exception()!r}", flush=True)
                    if failures == MOST_FAILURES:
                        raise SystemExit(f"{failures} runs failed; {made} are in {file}.")
                    continue
                found = future.result()
                made += 1
                done |= {records.key_of(each) for each in _without_race(found)}
                for each in (found, *_without_race(found)):
                    lines.write(json.dumps(each) + "\n")
                lines.flush()
                print(f"{made}/{len(missing)} {seconds:.0f} s  {_name(job)}: {_outcome(found)}", flush=True)
    print(f"{made} runs in {time.perf_counter() - begun:.0f} s, {len(missing) - made} left; in {file}")


def _train(job: tuple[str, str, float | str, int], device: str | None) -> dict[str, Any]:
    from arena.training import train

    return train(job, device)


def _without_race(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Where the fitted weights won, the run without a race is the same, step by step."""
    if run["start"] != RACED or run.get("winner") != OURS:
        return []
    return [run | {"start": OURS, "winner": None, "race_steps": 0, "start_seconds": None}]


def _name(job: tuple[str, str, float | str, int]) -> str:
    return f"{job[0]}, {job[1]}, lr {job[2]}, seed {job[3]}"


def _outcome(run: dict[str, Any]) -> str:
    if run["loss"] is None:
        return run["note"] or "not finite"
    accuracy = "" if run["accuracy"] is None else f", held out {100 * run['accuracy']:.1f} %"
    auto = f" at {run['rate']:.3g}" if run["lr"] == "auto" else ""
    return f"loss {run['loss']:.4g}{auto}{accuracy} in {run['start_seconds']:.1f} + {run['seconds']:.1f} s"


def _start(text: str) -> str:
    if not is_ours(text) and text not in OTHERS:
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; choose from {', '.join(OTHERS)} and ours.")
    return text


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=list(SETS), nargs="+", default=["cpu"])
    parser.add_argument("--task", nargs="+", help="only these tasks of the sets")
    parser.add_argument("--start", nargs="+", type=_start, help="instead of the starts of each task")
    parser.add_argument("--rates", nargs="+", type=float, help="only these of the rates of each task")
    parser.add_argument("--seeds", type=int, help="how many, instead of each task's own number")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", help="instead of each task's own")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after as many")
    parser.add_argument("--folder", type=Path, default=Path("build/arena2"), help="where runs are kept")
    parser.add_argument("--results", type=Path, default=records.COMPACT, help="where records are written")
    parser.add_argument("--collect", type=Path, nargs="+", help="put the runs of these files into --results")
    parser.add_argument("--freeze", action="store_true", help="keep the best of each new grid as reference")
    parser.add_argument("--show", action="store_true", help="train nothing; show the scores of the records")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="draw the records into a folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
