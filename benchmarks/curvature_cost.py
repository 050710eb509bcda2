"""What each layer's curvature costs, in gradients, and how right it is: hessinit against its peers.

python benchmarks/curvature_cost.py            # everything; a second run takes up where the first stopped
python benchmarks/curvature_cost.py --quick    # the small problems, in about two minutes
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
from cell import Options, run_cell  # noqa: E402
from contestants import YARDSTICK, contestants_for  # noqa: E402
from problems import ACCURACY, BATCHES, DEPTHS, RACE, SEED, build_problem  # noqa: E402
from record import processor_name  # noqa: E402
from settings import TOLERANCE  # noqa: E402
from truth import TruthBook, check_references  # noqa: E402

PACKAGES = [
    "torch",
    "hessinit",
    "PyHessian",
    "curvlinops-for-pytorch",
    "hessian-eigenthings",
    "backpack-for-pytorch",
    "vivit-for-pytorch",
    "scipy",
    "numpy",
]


@dataclass(frozen=True)
class Cell:
    section: str
    problem: str
    curvature: str
    contestant: str

    @property
    def key(self) -> str:
        return f"{self.problem}/{self.curvature}/{self.contestant}"


def plan(quick: bool) -> list[Cell]:
    """All cells, in the order they run: the races, then accuracy, then growth with depth and batch."""
    cells = []
    for curvature, activation in [("gauss-newton", "relu"), ("hessian", "tanh")]:
        for problem in (name for name in RACE if not quick or name in ("mlp-n32", "lenet-n32")):
            names = [*contestants_for(curvature, piecewise_linear=activation == "relu"), YARDSTICK]
            cells += [Cell("race", f"{problem}-{activation}", curvature, name) for name in names]
    for curvature in ["gauss-newton", "hessian"]:
        for problem in ACCURACY:
            names = contestants_for(curvature, piecewise_linear=False)
            cells += [Cell("accuracy", problem, curvature, name) for name in names]
    growing = [f"depth-{depth}" for depth in DEPTHS] + [f"batch-{batch}" for batch in BATCHES]
    for curvature, activation in [("gauss-newton", "relu"), ("hessian", "tanh")]:
        for problem in growing if not quick else []:
            names = ["hessinit", "PyHessian"]
            cells += [Cell("growth", f"{problem}-{activation}", curvature, name) for name in names]
    return cells


def describe_run(options: Options) -> dict:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "from the source tree" if package == "hessinit" else "missing"
    return {
        "command": "python " + shlex.join(["benchmarks/curvature_cost.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), **versions},
        "hardware": {"processor": processor_name(), "cores": os.cpu_count(), "system": platform.system()},
        "threads": options.threads,
        "cap_seconds": options.cap,
        "tolerance": TOLERANCE,
        "seed": SEED,
        "seeds": 1,
        "reference_against_dense": check_references(),
    }


def run_plan(cells: list[Cell], results: dict, path: Path, truths: TruthBook, options: Options) -> None:
    """Runs what is not recorded yet; the file is written after every cell."""
    finished = {key for key, record in results["cells"].items() if record["status"] != "missing"}
    waiting = [cell for cell in cells if cell.key not in finished]
    for number, cell in enumerate(waiting, 1):
        print(f"[{number}/{len(waiting)}] {cell.key} ", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        truth = {}
        if cell.contestant != YARDSTICK and cell.section != "growth":
            truth = truths.find(build_problem(cell.problem), cell.curvature)
        its_options = replace(options, repeat=cell.section != "accuracy")
        record = run_cell(cell.problem, cell.curvature, cell.contestant, its_options)
        norms = record["norms"] if truth else {}
        errors = {layer: abs(norm - truth[layer]) / truth[layer] for layer, norm in norms.items()}
        record |= {"section": cell.section, "errors": errors, "threads": options.threads}
        if errors:
            record["max_error"] = max(errors.values())
        results["cells"][cell.key] = record
        write_results(results, path)
        print(f"{record['status']}, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def write_results(results: dict, path: Path) -> None:
    """One line a cell, so that a rerun's difference can be read."""
    lines = [f"{json.dumps(key)}: {json.dumps(results['cells'][key])}" for key in sorted(results["cells"])]
    head = json.dumps(results["run"], indent=1)
    path.write_text('{"run": ' + head + ',\n"cells": {\n' + ",\n".join(lines) + "\n}}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small problems only, no growth section")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results (not the truths)")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cells whose key contains TEXT")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    parser.add_argument("--cap", type=float, default=40.0, help="seconds allowed a call (default: 40)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for JSON and picture")
    arguments = parser.parse_args()
    options = Options(arguments.threads, arguments.cap)
    torch.set_num_threads(options.threads)
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "curvature_cost.json"
    cells = [cell for cell in plan(arguments.quick) if arguments.only in cell.key]
    results = json.loads(path.read_text()) if path.exists() else {"cells": {}}
    if arguments.fresh:
        for cell in cells:
            results["cells"].pop(cell.key, None)
    results["run"] = describe_run(options)
    run_plan(cells, results, path, TruthBook(arguments.results / "curvature_truth.json"), options)
    # Imported here: every cell's process imports this file again, and needs neither.
    from picture import draw
    from tables import show

    show(results)
    draw(results, arguments.results / "curvature_cost.png")


if __name__ == "__main__":
    main()
