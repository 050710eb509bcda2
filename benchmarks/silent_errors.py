"""How often is a number wrong without a word? Random problems against dense fp64 truth.

python benchmarks/silent_errors.py                       # 2,000 problems, about 20 minutes on two cores
python benchmarks/silent_errors.py --count 200
timeout 580 python benchmarks/silent_errors.py --lines found.jsonl   # in pieces: call it until it is done
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import statistics
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
from dense_truth import true_norms  # noqa: E402
from odd_constructions import Drawn, draw  # noqa: E402
from record import run_facts, write_record  # noqa: E402

import hessinit  # noqa: E402

CURVATURES = ("gauss-newton", "hessian")
PRECISIONS = ("float32", "float64")
GROSS = 0.01
# The dense truth is rounded, too: a block is known to this share of the whole matrix.
ROUNDING_OF_TRUTH = 1e-12


def run_one(seed: int) -> list[dict[str, Any]]:
    """A record for every curvature and precision of one problem."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    problem = draw(seed)
    return [
        {"seed": seed, "name": problem.name, "curvature": curvature, "precision": precision}
        | measure(problem, curvature, precision)
        for curvature in CURVATURES
        for precision in PRECISIONS
    ]


def measure(problem: Drawn, curvature: str, precision: str) -> dict[str, Any]:
    parts = problem.build()
    if precision == "float64":
        parts = parts.double()
    try:
        measured = hessinit.Problem(
            parts.model,
            parts.loss,
            parts.batch,
            forward=parts.forward,
            layers=problem.layers or parts.layers or None,
            seed=problem.seed,
        )
        report = hessinit.measure(measured, curvature=curvature, estimator=problem.estimator)
    except hessinit.ProblemError as refusal:
        return {"outcome": "refused", "message": str(refusal)}
    except Exception as failure:  # what the library did not foresee
        return {"outcome": "crashed", "message": f"{type(failure).__name__}: {failure}"}
    if problem.reference is None:
        return {"outcome": "not refused", "message": f"network {report.network.norm:.4g}"}
    rows = {row.name: row for row in report.layers}
    names = parameter_names(parts.model)
    groups = {name: [names[name]] for name in rows} | {"network": [names[name] for name in rows]}
    truth = true_norms(problem.reference(), groups, curvature)
    compared = [
        compare(name, row.norm, row.error, row.converged, truth[name], truth["network"])
        for name, row in [*rows.items(), ("network", report.network)]
    ]
    return {"outcome": "measured", "rows": compared}


def compare(
    name: str, norm: float, error: float, converged: bool, truth: float, network: float
) -> dict[str, Any]:
    """One norm beside its truth."""
    row = {"name": name, "norm": norm, "truth": truth, "error": error, "converged": converged}
    if math.isnan(truth):  # not to be claimed
        return {**row, "holds": not converged, "gross": converged}
    floor = ROUNDING_OF_TRUTH * network
    off = max(0.0, abs(norm - truth) - floor)
    far = off > GROSS * max(truth, floor) and off > error * GROSS and not _is_zero(norm, truth, error)
    return {**row, "holds": off <= error * (1 + 1e-6) + 1e-9 * truth, "gross": converged and far}


def _is_zero(norm: float, truth: float, error: float) -> bool:
    """Zero, said with the error that rounding gives it, is no gross error."""
    return norm == 0 and truth <= error


def parameter_names(model: torch.nn.Module) -> dict[str, str]:
    return {name.removesuffix(".weight"): name for name, _ in model.named_parameters()}


def summarize(records: list[dict[str, Any]], ordinary: set[int]) -> dict[str, Any]:
    outcomes = collections.Counter(record["outcome"] for record in records)
    rows = [(record, row) for record in records for row in record.get("rows", [])]
    refused = {
        record["seed"] for record in records if record["outcome"] == "refused" and record["seed"] in ordinary
    }
    summary: dict[str, Any] = {
        "problems": len({record["seed"] for record in records}),
        "ordinary problems": len(ordinary),
        "ordinary problems refused": len(refused),
        "measurements": len(records),
        **{f"measurements {name}": count for name, count in sorted(outcomes.items())},
        "norms": len(rows),
        "norms with a gross error": sum(row["gross"] for _, row in rows),
    }
    for precision in PRECISIONS:
        own = [row for record, row in rows if record["precision"] == precision]
        relative = [row["error"] / row["norm"] for row in own if row["norm"] > 0 and row["converged"]]
        summary[f"{precision}: norms"] = len(own)
        summary[f"{precision}: converged"] = sum(row["converged"] for row in own)
        summary[f"{precision}: stated errors that hold"] = sum(row["holds"] for row in own)
        summary[f"{precision}: median relative error stated"] = statistics.median(relative)
    return summary


def failures(records: list[dict[str, Any]]) -> list[str]:
    """A line for each number that is wrong, and for each problem that crashed or had to be refused."""
    lines = []
    for record in records:
        where = f"{record['seed']} {record['name']}, {record['curvature']}, {record['precision']}"
        if record["outcome"] in ("crashed", "not refused"):
            lines.append(f"{record['outcome']}: {where}: {record['message'][:160]}")
        lines += [
            f"{'gross' if row['gross'] else 'beyond'}: {where}: {row['name']} is {row['norm']:.6g} ± "
            f"{row['error']:.1e}, truth {row['truth']:.6g} "
            f"({row['norm'] / row['truth'] - 1 if row['truth'] else 0:+.2%}), converged {row['converged']}"
            for row in record.get("rows", [])
            if row["gross"] or not row["holds"]
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="problems (default: 2000)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: 0)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--results", type=Path, default=None, help="write the record to this file")
    parser.add_argument(
        "--lines", type=Path, default=None, help="keep what is done in this file, and leave that out"
    )
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.count)
    started, records = time.perf_counter(), list[dict[str, Any]]()
    if arguments.lines and arguments.lines.exists():
        known = map(json.loads, arguments.lines.read_text(encoding="utf-8").splitlines())
        records = [record for found in known for record in found if record["seed"] in seeds]
    done = {record["seed"] for record in records}
    with ProcessPoolExecutor(arguments.workers) as pool:
        for found in pool.map(run_one, [seed for seed in seeds if seed not in done], chunksize=4):
            records += found
            done.add(found[0]["seed"])
            if arguments.lines:
                with arguments.lines.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(found) + "\n")
            if len(done) % 50 == 0:
                print(f"\r{len(done)} of {len(seeds)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    ordinary = {seed for seed in seeds if draw(seed).ordinary}
    record = {
        **run_facts("silent_errors.py", count=arguments.count, first=arguments.first),
        "seconds": round(time.perf_counter() - started),
        "summary": summarize(records, ordinary),
        "refusals": dict(
            collections.Counter(
                f"{one['name']}: {one['message'][:90]}" for one in records if one["outcome"] == "refused"
            ).most_common()
        ),
        "failures": failures(records),
    }
    write_record(record, arguments.results)


if __name__ == "__main__":
    main()
