"""The plain engine beside the exact ones: errors against dense fp64 truth, and costs in gradients.

python benchmarks/plain_engine.py                        # the zoo of the tests and 300 random problems
python benchmarks/plain_engine.py --count 40 --first 900 # some random problems alone
python benchmarks/plain_engine.py --bf16                 # twelve networks under autocast, two seeds
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "tests")]

import advice_problems  # noqa: E402
import torch  # noqa: E402
from dense_truth import true_norms  # noqa: E402
from odd_constructions import draw  # noqa: E402
from record import run_facts, write_record  # noqa: E402
from silent_errors import compare, parameter_names  # noqa: E402

import hessinit  # noqa: E402
from zoo import PROBLEMS  # noqa: E402
from zoo.truth import true_layers, true_network  # noqa: E402

CURVATURES = ("gauss-newton", "hessian")
KINKS = ("Relu", "Hardtanh", "MaxPool", "Hardswish", "Hardsigmoid", "Abs", "Threshold", "Prelu", "Clamp")


def in_bf16(problem: hessinit.Problem) -> hessinit.Problem:
    """The problem with its forward under autocast."""
    call = problem.forward or (lambda model, inputs: model(inputs))

    def forward(model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(model, inputs)

    return dataclasses.replace(problem, forward=forward)


def measure_random(seed: int) -> list[dict[str, Any]]:
    problem = draw(seed)

    def build() -> hessinit.Problem:
        parts = problem.build()
        layers = problem.layers or parts.layers or None
        return hessinit.Problem(
            parts.model, parts.loss, parts.batch, forward=parts.forward, layers=layers, seed=problem.seed
        )

    def truth(names: dict[str, str], rows: list[str], curvature: str) -> dict[str, float]:
        assert problem.reference is not None
        groups = {name: [names[name]] for name in rows} | {"network": [names[name] for name in rows]}
        return true_norms(problem.reference(), groups, curvature)

    known = truth if problem.reference is not None else None
    return [{"problem": f"{seed} {problem.name}"} | run(build, curvature, known) for curvature in CURVATURES]


def measure_zoo(number: int) -> list[dict[str, Any]]:
    problem = PROBLEMS[number]

    def build() -> hessinit.Problem:
        model, loss, batch = problem.build()
        return hessinit.Problem(model, loss, batch, forward=problem.forward, **problem.options)

    def truth(names: dict[str, str], rows: list[str], curvature: str) -> dict[str, float]:
        layers = {name: ends.norm for name, ends in true_layers(problem, curvature).items()}
        return layers | {"network": true_network(problem, curvature).norm}

    return [{"problem": problem.name} | run(build, curvature, truth) for curvature in CURVATURES]


def measure_bf16(number: int) -> list[dict[str, Any]]:
    """One of the twelve networks of advice.py under autocast, beside its exact norms in float32."""
    name, seed = list(advice_problems.PROBLEMS)[number % 12], number // 12
    problem = advice_problems.PROBLEMS[name]
    torch.manual_seed(seed)
    model = problem.build()
    inputs, targets = problem.data(advice_problems.read_text(None))
    chosen = torch.randperm(len(inputs))[: problem.batch_size]
    single = hessinit.Problem(model, problem.loss, (inputs[chosen], targets[chosen]))
    truths: dict[str, float] = {}

    def truth(names: dict[str, str], rows: list[str], curvature: str) -> dict[str, float]:
        return truths

    exact = hessinit.measure(single)
    truths |= {row.name: row.norm for row in (*exact.layers, exact.network)}
    return [{"problem": f"{name}, seed {seed}"} | run(lambda: in_bf16(single), "gauss-newton", truth, 0.05)]


def run(build: Any, curvature: str, truth: Any, tolerance: float = 1e-3) -> dict[str, Any]:
    """A record of one problem by the plain engine, with the costs of the others."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    record: dict[str, Any] = {"curvature": curvature, "kinks": has_kinks(build())}
    problem = build()
    before = {name: tensor.clone() for name, tensor in problem.model.state_dict().items()}
    try:
        report = hessinit.measure(problem, curvature=curvature, estimator="plain", tolerance=tolerance)
    except hessinit.ProblemError as refusal:
        return {**record, "outcome": "refused", "message": str(refusal)}
    except Exception as failure:
        return {**record, "outcome": "crashed", "message": f"{type(failure).__name__}: {failure}"}
    after = problem.model.state_dict()
    if not all(torch.equal(values, after[name]) or values.isnan().any() for name, values in before.items()):
        return {**record, "outcome": "crashed", "message": "the model was changed"}
    if truth is None:
        return {**record, "outcome": "not refused", "message": f"network {report.network.norm:.4g}"}
    truths = truth(parameter_names(problem.model), [row.name for row in report.layers], curvature)
    rows = [
        compare(row.name, row.norm, row.error, row.converged, truths[row.name], truths["network"])
        for row in (*report.layers, report.network)
    ]
    record |= {
        "outcome": "measured",
        "rows": rows,
        "seconds": {"plain": seconds_of(build, curvature, "plain")},
    }
    for estimator in ("auto", "lanczos"):
        record["seconds"][estimator] = seconds_of(build, curvature, estimator)
    return record


def has_kinks(problem: hessinit.Problem) -> bool:
    names = {type(module).__name__ for module in problem.model.modules()}
    batch = problem.batches[0]
    call = problem.forward or (lambda model, inputs: model(inputs))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            output = call(problem.model, batch.inputs)
        except Exception:
            return False
    from hessinit.problem.graph import nodes_behind

    names |= {type(node).__name__ for node in nodes_behind(output.grad_fn)}
    return any(kink in name for name in names for kink in (*KINKS, "ReLU"))


def seconds_of(build: Any, curvature: str, estimator: str) -> float | None:
    try:
        reports = [hessinit.measure(build(), curvature=curvature, estimator=estimator) for _ in range(2)]
    except hessinit.ProblemError:
        return None
    return min(report.seconds for report in reports)


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for curvature in sorted({record["curvature"] for record in records}):
        own = [record for record in records if record["curvature"] == curvature]
        rows = [(record, row) for record in own for row in record.get("rows", [])]
        converged = [(record, row) for record, row in rows if row["converged"] and row["norm"] > 0]
        part = summary[curvature] = {
            outcome: sum(record["outcome"] == outcome for record in own)
            for outcome in ("measured", "refused", "crashed", "not refused")
        }
        part |= {
            "norms": len(rows),
            "converged": sum(row["converged"] for _, row in rows),
            "gross": sum(row["gross"] for _, row in rows),
            "stated errors that hold": sum(row["holds"] for _, row in rows),
        }
        errors = [abs(row["norm"] / row["truth"] - 1) for _, row in rows if row["truth"] > 0]
        part["all norms: within 0.05"] = sum(error <= 0.05 for error in errors)
        part["all norms: median error"] = statistics.median(errors)
        part["all norms: largest error"] = max(errors)
        for kinks in (False, True):
            errors = [
                abs(row["truth"] / row["norm"] - 1) for record, row in converged if record["kinks"] == kinks
            ]
            if errors:
                name = "with kinks" if kinks else "smooth"
                within = 3e-3 if kinks else 1e-3
                part[f"{name}: norms"] = len(errors)
                part[f"{name}: within {within:g}"] = sum(error <= within for error in errors)
                part[f"{name}: within 0.05"] = sum(error <= 0.05 for error in errors)
                part[f"{name}: median error"] = statistics.median(errors)
                part[f"{name}: largest error"] = max(errors)
        for estimator in ("auto", "lanczos"):
            ratios = [
                record["seconds"]["plain"] / record["seconds"][estimator]
                for record in own
                if record["outcome"] == "measured" and record["seconds"][estimator]
            ]
            part[f"time over that of estimator={estimator!r}, median"] = statistics.median(ratios or [0.0])
    return summary


def failures(records: list[dict[str, Any]]) -> list[str]:
    lines = []
    for record in records:
        where = f"{record['problem']}, {record['curvature']}"
        if record["outcome"] in ("crashed", "not refused"):
            lines.append(f"{record['outcome']}: {where}: {record['message'][:160]}")
        for row in record.get("rows", []):
            if row["gross"] or not row["holds"]:
                off = row["norm"] / row["truth"] - 1 if row["truth"] else 0
                kind = "gross" if row["gross"] else "beyond"
                lines.append(
                    f"{kind}: {where}: {row['name']} is {row['norm']:.6g} ± {row['error']:.1e}, "
                    f"truth {row['truth']:.6g} ({off:+.2%}), converged {row['converged']}, "
                    f"kinks {record['kinks']}"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="random problems (default: 300)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (0: with the zoo)")
    parser.add_argument("--bf16", action="store_true", help="networks under autocast")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--results", type=Path, default=None, help="write the record to this file")
    arguments = parser.parse_args()
    zoo = range(len(PROBLEMS)) if arguments.first == 0 else range(0)
    seeds = range(arguments.first, arguments.first + arguments.count)
    work = [(measure_zoo, zoo), (measure_random, seeds)]
    if arguments.bf16:
        work = [(measure_bf16, range(24))]
    records: list[dict[str, Any]] = []
    with ProcessPoolExecutor(arguments.workers) as pool:
        for measure, numbers in work:
            for made in pool.map(measure, numbers, chunksize=4):
                records += made
    record = {
        **run_facts(
            "plain_engine.py" + " --bf16" * arguments.bf16, count=arguments.count, first=arguments.first
        ),
        "summary": summarize(records),
        "refusals": [
            f"{one['problem']}, {one['curvature']}: {one['message'][:110]}"
            for one in records
            if one["outcome"] == "refused"
        ],
        "failures": failures(records),
    }
    write_record(record, arguments.results)


if __name__ == "__main__":
    main()
