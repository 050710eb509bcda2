"""What a measurement costs, from a first CNN to GPT-2-XL: gradients, memory, growth, and peers beside it.

    python benchmarks/scale.py                                     # the CPU cases, two threads: some minutes
    python benchmarks/scale.py --cases bn-cnn,vgg8 --peers         # with the race against the peers
    python benchmarks/scale.py --device cuda --peers --budget 560  # the GPU cases; stops in time, continues
    python benchmarks/scale.py --growth [--device cuda]            # the series alone; with --cases both
    python benchmarks/scale.py --merge FILE                        # take in a record of another machine
    python benchmarks/scale.py --show                              # tables of the record, beside the limits
    python benchmarks/scale.py --markdown                          # the tables of docs/concepts/cost.md
    python benchmarks/scale.py --draw                              # its picture, docs/pictures/scale.png

Every finished cell is a line of `results/scale.jsonl`, so that a second call continues; `--fresh` makes the
chosen cells again.

- *Cost*: seconds of `hessinit.measure` (Gauss-Newton, float32) over seconds of one gradient, forward and
  backward of the same batch to all parameters under torch's own settings. Medians; gradients are timed
  before, between and after.
- *Memory*: the most allocated above the start (on a CPU: resident), over that of one SGD training step.
- *Growth*: exponents of the cost in gradients by least squares in log-log, over sizes whose gradient takes
  about ten milliseconds or more: below that, the time is Python's.
- *Race*: hessinit and the peers on some layers to tolerance 1e-3; the truth is computed without hessinit.

Peers are looked for in the environment, then in `build/peers`, which can travel to a machine without network
(9 MB; nothing in it is compiled, and torchvision is not needed):

    pip install --no-deps --target build/peers hessian-eigenthings==1.0.0a5 curvlinops-for-pytorch==3.0.1 \\
        PyHessian==0.1 backpack-for-pytorch==1.7.1 einops==0.8.2 einconv==0.1.0 linear_operator==0.6.1 \\
        opt-einsum==3.4.0 unfoldNd==0.2.3 jaxtyping==0.3.11 wadler_lindig==0.1.8
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
sys.path.append(str(HERE.parent / "build" / "peers"))

import scale_report  # noqa: E402
import torch  # noqa: E402
from record import run_facts  # noqa: E402
from scale_cells import PEERS, Cell, hessinit_cell, peer_cell, short, truth_cell  # noqa: E402
from scale_problems import CASES, SERIES, Case, raced_layers  # noqa: E402
from settings import TOLERANCE  # noqa: E402

RECORD = HERE / "results" / "scale.jsonl"
PICTURE = HERE.parent / "docs" / "pictures" / "scale.png"
GROWING_PEER = "PyHessian"  # the quickest, and on ReLU networks its matrix is each layer's Gauss-Newton block
GROWTH_CAP = 20.0  # seconds a layer; beyond it, larger sizes are not tried
LEAST_SECONDS = 15.0  # no cell is begun with less of the budget left
PACKAGES = ["transformers", "scipy", "hessian-eigenthings", "curvlinops-for-pytorch", "PyHessian"]


class OutOfBudget(BaseException):  # not an Exception: nobody may catch it but `main`
    """The time given by --budget is over."""


@dataclass(frozen=True)
class Planned:
    """A cell that can be made; `facts` say which one it is, and together are its key in the record."""

    facts: dict[str, Any]
    make: Callable[[], Cell]

    @property
    def key(self) -> str:
        return "/".join(str(value) for value in self.facts.values())


def plan_case(case: Case, device: str) -> Iterator[Planned]:
    for tolerance, limit in case.limits.items():
        for network in (False, True) if limit.network < float("inf") or device == "cpu" else (False,):
            facts = {"kind": "case", "device": device, "case": case.name}
            facts |= {"contestant": "hessinit + network" if network else "hessinit", "tolerance": tolerance}

            def make(tolerance: float = tolerance, network: bool = network) -> Cell:
                return hessinit_cell(case.problem(device), device, tolerance, network, case.progress)

            yield Planned(facts, make)
        if device == "cuda" and case.name.startswith("resnet"):
            # With TF32 in convolutions, as torch computes by default.
            facts = {"kind": "case", "device": device, "case": case.name, "contestant": "hessinit, tf32"}

            def faster(tolerance: float = tolerance) -> Cell:
                return hessinit_cell(case.problem(device), device, tolerance, precision="tf32")

            yield Planned({**facts, "tolerance": tolerance}, faster)


def plan_race(case: Case, device: str, cap: float) -> Iterator[Planned]:
    def raced() -> Any:
        problem = case.problem(device)
        return replace(problem, only=raced_layers(problem, case.raced))

    facts = {"kind": "race", "device": device, "case": case.name}
    yield Planned({**facts, "contestant": "hessinit"}, lambda: hessinit_cell(raced(), device, TOLERANCE))
    for peer in PEERS:
        make = lambda peer=peer: peer_cell(raced(), device, peer, cap)  # noqa: E731
        yield Planned({**facts, "contestant": peer}, make)
    yield Planned({**facts, "contestant": "truth"}, lambda: truth_cell(raced(), case.rough_truth))


def plan_growth(device: str, peers: bool, record: dict[str, Cell]) -> Iterator[Planned]:
    for series in SERIES:
        for contestant in ("hessinit", *([GROWING_PEER] if peers and series.with_peer else [])):
            slow = False
            for size in sorted(series.sizes[device]):
                facts = {"kind": "growth", "device": device, "series": series.name}
                facts |= {"contestant": contestant, "size": size}

                def make(series: Any = series, size: int = size, contestant: str = contestant) -> Cell:
                    problem = series.problem(size, device)
                    if contestant == "hessinit":
                        return hessinit_cell(problem, device, TOLERANCE)
                    return peer_cell(problem, device, contestant, GROWTH_CAP / len(problem.weights))

                planned = Planned(facts, make)
                if not slow:
                    yield planned
                slow = slow or record.get(planned.key, {}).get("status") == "capped"


def run_plan(
    cells: Iterator[Planned], record: dict[str, Cell], path: Path, options: argparse.Namespace
) -> None:
    """Makes what is not recorded yet; the file is written after every cell."""
    fresh = set()
    deadline = time.perf_counter() + options.budget
    for planned in cells:
        wanted = options.fresh and planned.key not in fresh
        if record.get(planned.key, {"status": "missing"})["status"] != "missing" and not wanted:
            continue
        left = deadline - time.perf_counter()
        if left < min(LEAST_SECONDS, options.budget / 2):
            raise OutOfBudget
        print(f"{planned.key} ", end="", file=sys.stderr, flush=True)
        started = time.perf_counter()
        with alarm(left):
            try:
                cell = planned.make()
            except Exception as error:  # out of memory, or what was not foreseen: a result as well
                cell = {"status": "error", "message": short(error)}
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        fresh.add(planned.key)
        seconds = round(time.perf_counter() - started, 1)
        record[planned.key] = {**planned.facts, **cell, "cell_seconds": seconds, "run": describe_run(options)}
        write_record(record, path)
        print(f"{cell['status']}, {seconds} s {cell.get('message', '')}", file=sys.stderr, flush=True)


class alarm:  # noqa: N801  (reads as a verb: with alarm(seconds))
    """Raises OutOfBudget in the block when the seconds are over; not inside of a call of torch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = min(seconds, 1e6)

    def __enter__(self) -> None:
        def ring(number: int, frame: FrameType | None) -> None:
            raise OutOfBudget

        self.before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def describe_run(options: argparse.Namespace) -> dict[str, Any]:
    facts = run_facts("scale.py")
    facts["command"] = "python " + shlex.join(["benchmarks/scale.py", *sys.argv[1:]])
    for package in PACKAGES:
        try:
            facts["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    facts["hardware"]["threads"] = torch.get_num_threads()
    if options.device == "cuda":
        facts["hardware"]["gpu"] = torch.cuda.get_device_name()
    return {"date": time.strftime("%Y-%m-%d"), "load": round(os.getloadavg()[0], 2), **facts}


def read_record(path: Path) -> dict[str, Cell]:
    """The cells by key; of several with the same key the last one counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {cell["key"]: cell for cell in map(json.loads, lines)}


def write_record(record: dict[str, Cell], path: Path) -> None:
    lines = [
        json.dumps({"key": key} | cell | {"key": key}, ensure_ascii=False) for key, cell in record.items()
    ]
    beside = path.with_suffix(".part")
    beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
    beside.replace(path)  # a run that is stopped here loses nothing


def choose_cases(names: str | None, device: str) -> list[Case]:
    if names is None:
        return [case for case in CASES if case.device == device]
    known = {case.name: case for case in CASES}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"--cases {','.join(unknown)} is unknown; choose from {', '.join(known)}.")
    return [known[name] for name in names.split(",")]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help="their names, by commas (default: all of the device)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peers", action="store_true", help="race the peers on some layers, too")
    parser.add_argument("--growth", action="store_true", help="the series that grow in one respect")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="stop by then")
    parser.add_argument("--cap", type=float, default=30.0, help="seconds for a peer and layer (default: 30)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads on a CPU (default: 2)")
    parser.add_argument("--fresh", action="store_true", help="make the chosen cells again")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="take in the cells of another record")
    parser.add_argument("--show", action="store_true", help="print the tables of the record, and run nothing")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/concepts/cost.md")
    parser.add_argument("--draw", type=Path, nargs="?", const=PICTURE, metavar="FILE", help="draw the record")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    record = read_record(options.record)
    if options.merge:
        record |= read_record(options.merge)
        write_record(record, options.record)
    elif not (options.show or options.markdown or options.draw):
        warnings.simplefilter("ignore")
        torch.set_num_threads(options.threads)

        def cells() -> Iterator[Planned]:
            cases = (
                []
                if options.growth and options.cases is None
                else choose_cases(options.cases, options.device)
            )
            for case in cases:
                yield from plan_case(case, options.device)
                if options.peers:
                    yield from plan_race(case, options.device, options.cap)
            if options.growth:
                yield from plan_growth(options.device, options.peers, record)

        try:
            run_plan(cells(), record, options.record, options)
        except OutOfBudget:
            print("\nThe budget is spent; the same command continues.", file=sys.stderr)
    if options.draw:
        scale_report.draw(record, options.draw)
    elif options.markdown:
        scale_report.show_markdown(record)
    else:
        scale_report.show(record)


if __name__ == "__main__":
    main()
