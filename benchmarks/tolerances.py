"""Do stated errors hold at rough tolerances? Random problems against dense fp64 truth, both estimators.

    python benchmarks/tolerances.py            # 200 problems, about a minute on one core

A problem is right if every layer's norm and the network's are within the error stated beside them. Seeds are
taken in order until so many problems were measured; those without curvature and those refused are skipped.
Gauss-Newton, float32. Prints the shares and the mean products, and writes them to `results/tolerances.txt`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
from dense_truth import true_norms  # noqa: E402
from odd_constructions import Drawn, draw  # noqa: E402
from record import run_facts  # noqa: E402
from silent_errors import compare, parameter_names  # noqa: E402

import hessinit  # noqa: E402

TOLERANCES = (0.1, 0.01, 0.001)
ESTIMATORS = ("auto", "lanczos")
REQUIRED = 0.98  # of the problems, at 0.1 and 0.01
# Most of these matrices are so small that Lanczos exhausts them at any tolerance: those say little here.
ROUGH = 0.1
CURVATURE = "gauss-newton"


def measure(problem: Drawn, estimator: str, tolerance: float) -> hessinit.CurvatureReport:
    parts = problem.build()  # anew: a measurement cannot spoil the next one
    measured = hessinit.Problem(
        parts.model, parts.loss, parts.batch, forward=parts.forward, layers=problem.layers, seed=problem.seed
    )
    return hessinit.measure(measured, estimator=estimator, tolerance=tolerance, curvature=CURVATURE)


def run_one(seed: int) -> list[dict[str, Any]]:
    """A record for every estimator and tolerance; none if the problem has no curvature or is refused."""
    problem = draw(seed)
    if problem.reference is None:
        return []
    try:
        reports = {pair: measure(problem, *pair) for pair in itertools.product(ESTIMATORS, TOLERANCES)}
    except hessinit.ProblemError:
        return []
    names = parameter_names(problem.build().model)
    layers = [row.name for row in reports["auto", TOLERANCES[0]].layers]
    groups = {name: [names[name]] for name in layers} | {"network": [names[name] for name in layers]}
    truth = true_norms(problem.reference(), groups, CURVATURE)
    return [
        {
            "seed": seed, "name": problem.name, "estimator": estimator, "tolerance": tolerance,
            "products": sum(row.products for row in (*report.layers, report.network)),
            "rows": [
                compare(row.name, row.norm, row.error, row.converged, truth[row.name], truth["network"])
                for row in (*report.layers, report.network)
            ],
        }
        for (estimator, tolerance), report in reports.items()
    ]  # fmt: skip


def run_all(count: int, first: int) -> tuple[list[dict[str, Any]], int]:
    """The records of so many measured problems, and how many seeds were skipped."""
    records: list[dict[str, Any]] = []
    measured = skipped = 0
    for seed in itertools.count(first):
        found = run_one(seed)
        records += found
        measured, skipped = measured + bool(found), skipped + (not found)
        if measured % 20 == 0:
            print(f"\r{measured} of {count}", end="", file=sys.stderr, flush=True)
        if measured == count:
            print(file=sys.stderr)
            return records, skipped
    raise AssertionError("itertools.count ends never")


def share(successes: int, count: int) -> str:
    return f"{100 * successes / count:5.1f} %"


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    yield "estimator   tolerance   problems right   norms right   rough ones right   converged   products"
    for estimator, tolerance in itertools.product(ESTIMATORS, TOLERANCES):
        own = [one for one in records if (one["estimator"], one["tolerance"]) == (estimator, tolerance)]
        rows = [row for one in own for row in one["rows"]]
        right = sum(all(row["holds"] for row in one["rows"]) for one in own)
        rough = [row["holds"] for row in rows if row["error"] > ROUGH * tolerance * row["norm"] > 0]
        late = right < REQUIRED * len(own)
        yield (
            f"{estimator:9}   {tolerance:9g}   {share(right, len(own)):>14}   "
            f"{share(sum(row['holds'] for row in rows), len(rows)):>11}   "
            f"{f'{sum(rough)} of {len(rough)}':>16}   "
            f"{share(sum(row['converged'] for row in rows), len(rows)):>9}   "
            f"{statistics.mean(one['products'] for one in own):8.1f}"
            f"{f'   below {REQUIRED:.0%}' if late else ''}"
        )


def misses(records: list[dict[str, Any]]) -> Iterator[str]:
    for one in records:
        where = f"{one['seed']} {one['name']}, {one['estimator']}, {one['tolerance']:g}"
        for row in one["rows"]:
            if not row["holds"]:
                off = f"{row['norm'] / row['truth'] - 1:+.2%}" if row["truth"] else ""
                stated = f"{row['norm']:.6g} ± {row['error']:.1e}"
                yield f"{where}: {row['name']} is {stated}, truth {row['truth']:.6g} ({off})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="problems measured (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: 0)")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "tolerances.txt")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    records, skipped = run_all(arguments.count, arguments.first)
    norms = sum(len(one["rows"]) for one in records) // (len(ESTIMATORS) * len(TOLERANCES))
    facts = run_facts("tolerances.py", count=arguments.count, first=arguments.first)
    where = f"{facts['hardware']['processor']}, torch {facts['versions']['torch']}"
    lines = [
        f"{facts['command']}: {time.perf_counter() - started:.0f} s on one core of {where}",
        f"{arguments.count} problems, {norms} norms; {skipped} seeds without curvature or refused.",
        f"rough: the stated error is above {ROUGH:g} times the tolerance. Products: mean of a problem.",
        "",
        *table(records),
        "",
        "Further off than stated:",
        *(list(misses(records)) or ["none"]),
    ]
    text = "\n".join(lines) + "\n"
    arguments.results.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
