"""Which learning rate for a fine-tuning? Six base models × full, LoRA r = 4 and 16, DoRA × two seeds.

    export HESSINIT_DATA=folder
    python benchmarks/finetuning.py grid --workers 6            the rates of a grid, and those of the rules
    python benchmarks/finetuning.py advise                      what `advise` says, and a training at its rate
    python benchmarks/finetuning.py grid advise --set held-out  the half that was set aside
    python benchmarks/finetuning.py ratios                      LoRA with another rate for B than for A
    python benchmarks/finetuning.py show                        the tables (results/finetuning.txt)

The benchmark pretrains its base models (character GPT, CNN, ViT; 30 seconds each) and caches them in
`--bases FOLDER`. A cell is a base model, a way to adapt it, and a seed. It is fine-tuned with AdamW (torch's
settings) for 200 steps: linear warmup over 10 of them, then linear decay to 0. The loss is that on held-out
examples after the last step. The rates of a grid are a factor 2 apart, and the grid is widened until the two
rates at each end are worse than the best by 2 % of its fall.
Against it: the rate of `hessinit.advise`, which gets one mini-batch; a fixed 2e-4; and ten times the best
rate of full fine-tuning, which only a second grid can tell. A rate fails where its training diverges, or
falls by less than a tenth of what the best one does; a diverged training counts with the loss before it.

A finished training is appended to the record at once, and what is there is not made again. `--fresh` makes
the advice of the set again. Without `HESSINIT_DATA` digits and the project's documents stand in; name another
`--record` then.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, here and in the workers

import torch
from finetuning_problems import DEVELOPMENT, HELD_OUT, METHODS, TASKS
from record import run_facts
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import hessinit
from hessinit.training.loop import seed_everything

STEPS, WARMUP = 200, 10
SEEDS = (0, 1)
WORSE, BESIDE, FURTHEST = 0.02, 2, 12  # how the grid ends
NEAR, FAILING = 2.5, 0.1
FIXED, TIMES_FULL = 2e-4, 10
RATIOS = (4.0, 16.0)  # of the rate of B over that of A; 16 is that of LoRA+
RATED = ("LoRA r = 16",)  # the methods that `ratios` trains
RECORD = Path(__file__).parent / "results" / "finetuning.jsonl"
BASES = Path(tempfile.gettempdir()) / "hessinit-bases"
CHOICES = {"advise": "hessinit.advise", "fixed": "2e-4", "times full": "ten times full fine-tuning"}
Row = dict[str, Any]


# --- Training ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A base model, a way to adapt it, a seed; `ratio` is the rate of B over that of A."""

    task: str
    method: str
    seed: int
    ratio: float = 1.0

    @property
    def row(self) -> Row:
        return {"task": self.task, "method": self.method, "seed": self.seed, "ratio": self.ratio}

    @classmethod
    def of(cls, row: Row) -> Cell:
        return cls(row["task"], row["method"], row["seed"], row["ratio"])


class Bench:
    """The fine-tunings of a cell: all see the same weights and mini-batches."""

    def __init__(self, cell: Cell, bases: Path) -> None:
        self.cell, self.task, self.bases = cell, TASKS[cell.task], bases
        self.examples = self.task.after()
        # The batch that `advise` is given comes from another shuffling.
        self.batch = next(self.examples.minibatches(self.task.batch_size, 1000 + cell.seed))

    def model(self) -> nn.Module:
        base = self.task.base(self.cell.task, self.cell.seed, self.bases)
        seed_everything(self.cell.seed, "adapters")
        return METHODS[self.cell.method].apply(base, self.task).train()

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        if self.cell.ratio == 1:
            return AdamW(trained.values(), lr=lr)
        second = [weight for name, weight in trained.items() if "lora_B" in name]
        others = [weight for name, weight in trained.items() if "lora_B" not in name]
        return AdamW([{"params": others}, {"params": second, "lr": lr * self.cell.ratio}], lr=lr)

    def loss(self, model: nn.Module) -> float:
        """The loss on the held-out examples."""
        model.eval()
        with torch.no_grad():
            output = model(self.examples.held_out_inputs)
        return nn.functional.cross_entropy(output, self.examples.held_out_targets).item()

    def train(self, lr: float) -> float:
        """The held-out loss after the fine-tuning; nan where it diverges."""
        if not 0 < lr < math.inf:
            return math.nan
        model = self.model()
        optimizer = self.optimizer(model, lr)
        schedule = LambdaLR(optimizer, rate_at)
        seed_everything(self.cell.seed, "training")
        batches = self.examples.minibatches(self.task.batch_size, self.cell.seed)
        for _ in range(STEPS):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            if not math.isfinite(loss.item()):
                return math.nan
            loss.backward()
            optimizer.step()
            schedule.step()
        return self.loss(model)

    def advise(self) -> Row:
        model = self.model()
        optimizer: Any = "adamw" if self.cell.ratio == 1 else self.optimizer(model, 1e-3)
        started = time.perf_counter()
        advice = hessinit.advise(model, nn.functional.cross_entropy, self.batch, optimizer=optimizer)
        trials = [[rounded(trial.lr), rounded(trial.score), trial.outcome] for trial in advice.trials]
        return {
            "what": "advise",
            "lr": rounded(advice.learning_rate),
            "stable": rounded(advice.stable_learning_rate),
            "seconds": round(time.perf_counter() - started, 2),
            "trials": trials,
        }


def rate_at(step: int) -> float:
    """The part of the rate at which a step is made: linear warmup, then linear decay to 0."""
    return min((step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP))


def is_on_grid(rate: float) -> bool:
    """Whether a rate, as rounded in the record, is a power of 2."""
    return math.isclose(rate, 2.0 ** round(math.log2(rate)), rel_tol=1e-5)


def rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def next_exponent(losses: dict[int, float], first: float, start: int) -> int | None:
    """The power of 2 of the next rate of the grid; None where the grid is complete."""
    if not losses:
        return start
    order = sorted(losses)
    best = min(losses.values())
    limit = best + WORSE * (first - best)
    for end, step in ((order, -1), (order[::-1], 1)):
        is_worse = [losses[power] > limit for power in end[:BESIDE]]
        is_done = len(is_worse) == BESIDE and all(is_worse)
        if not is_done and abs(end[0] + step - start) <= FURTHEST:
            return end[0] + step
    return None


# --- Running ----------------------------------------------------------------------------------------------


MakeBench = Callable[[], Bench]


class Record:
    """The rows of a record, and a file to which new ones are appended at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # a last line that was cut off
                self.rows.append(json.loads(line))
        self.rows = [row for row in self.rows if "what" in row]

    def of(self, cell: Cell, what: str) -> list[Row]:
        return [row for row in self.rows if row["what"] == what and Cell.of(row) == cell]

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    def losses(self, cell: Cell) -> dict[float, float]:
        """The loss at every rate; inf where the training diverged."""
        rows = self.of(cell, "rate")
        return {row["lr"]: math.inf if row["loss"] is None else row["loss"] for row in rows}

    def loss_at(self, cell: Cell, lr: float | None, bench: MakeBench) -> float:
        """The loss at this rate, from the record or from a training."""
        rate = rounded(lr or math.nan)
        if rate is None:
            return math.inf
        if rate not in self.losses(cell):
            loss = bench().train(rate)
            self.add({**cell.row, "what": "rate", "lr": rate, "loss": rounded(loss)})
        return self.losses(cell)[rate]


def make_grid(cell: Cell, record: Record, bench: MakeBench, best_full: float | None) -> float:
    """Make what is missing of a cell's grid and of the rules; return the best rate of the grid."""
    if not record.of(cell, "first"):
        record.add({**cell.row, "what": "first", "loss": rounded(bench().loss(bench().model()))})
    first = record.of(cell, "first")[0]["loss"]
    start = -9 if cell.method == "full" else -6
    grid: dict[int, float] = {}
    while (power := next_exponent(grid, first, start)) is not None:
        grid[power] = record.loss_at(cell, 2.0**power, bench)
    if cell.ratio == 1:
        record.loss_at(cell, FIXED, bench)
        if best_full is not None:
            record.loss_at(cell, TIMES_FULL * best_full, bench)
    return 2.0 ** min(grid, key=grid.__getitem__)


def make_advice(cell: Cell, record: Record, bench: MakeBench) -> None:
    """Make what is missing of the advice for a cell, and of the training at its rate."""
    if not record.of(cell, "advise"):
        record.add({**cell.row, **bench().advise()})
    record.loss_at(cell, record.of(cell, "advise")[0]["lr"], bench)


def run_task(task: str, seed: int, parts: Sequence[str], path: Path, bases: Path) -> str:
    """Make what is missing of a task and a seed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    record = Record(path)
    cells = [Cell(task, method, seed) for method in METHODS]
    if "ratios" in parts:
        cells = [Cell(task, method, seed, ratio) for method in RATED for ratio in RATIOS]
    best_full = None
    for cell in cells:
        bench = functools.cache(functools.partial(Bench, cell, bases))
        if parts != ["advise"]:
            best = make_grid(cell, record, bench, best_full)
            best_full = best_full or best
        if "advise" in parts:
            make_advice(cell, record, bench)
    return f"{task}, seed {seed}: {time.perf_counter() - started:.0f} s"


def run(options: argparse.Namespace) -> None:
    tasks = HELD_OUT if options.set == "held-out" else DEVELOPMENT
    if options.fresh:
        rows = Record(options.record).rows
        rest = [row for row in rows if row["what"] != "advise" or row["task"] not in tasks]
        options.record.write_text("".join(json.dumps(row) + "\n" for row in rest), encoding="utf-8")
    facts = run_facts(f"finetuning.py {' '.join(options.parts)}", set=options.set, workers=options.workers)
    with options.record.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(facts) + "\n")
    jobs = [(task, seed, options.parts, options.record, options.bases) for task in tasks for seed in SEEDS]
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_task, *job) for job in jobs]):
            print(future.result(), flush=True)


# --- What the record says ---------------------------------------------------------------------------------


class Outcome:
    """What the record says of a cell."""

    def __init__(self, cell: Cell, record: Record, best_full: float | None) -> None:
        self.cell = cell
        self.losses = record.losses(cell)
        self.first = record.of(cell, "first")[0]["loss"]
        # The grid alone: a chosen rate is no part of its own standard.
        grid = {rate: loss for rate, loss in self.losses.items() if is_on_grid(rate)}
        self.best_rate = min(grid, key=grid.__getitem__)
        self.best = grid[self.best_rate]
        self.rates = {"advise": record.of(cell, "advise")[0]["lr"], "fixed": FIXED}
        if best_full is not None:
            self.rates["times full"] = rounded(TIMES_FULL * best_full)

    def times_best(self, choice: str) -> float:
        return (self.rates[choice] or math.nan) / self.best_rate

    def is_near(self, choice: str) -> bool:
        return 1 / NEAR <= self.times_best(choice) <= NEAR

    def loss(self, choice: str) -> float:
        loss = self.losses.get(self.rates[choice], math.inf)
        return loss if math.isfinite(loss) else self.first

    def excess(self, choice: str) -> float:
        return self.loss(choice) / self.best - 1

    def fails(self, choice: str) -> bool:
        return self.first - self.loss(choice) < FAILING * (self.first - self.best)


def outcomes_of(record: Record, tasks: Iterable[str]) -> list[Outcome]:
    """The finished cells of these tasks."""
    outcomes = []
    for task in tasks:
        for seed in SEEDS:
            best_full = None
            for method in METHODS:
                cell = Cell(task, method, seed)
                if not record.of(cell, "advise") or not record.of(cell, "rate"):
                    continue
                outcomes.append(Outcome(cell, record, best_full))
                best_full = best_full or outcomes[-1].best_rate
    return outcomes


def summarize(title: str, outcomes: list[Outcome]) -> None:
    print(f"\n{title}: {len(outcomes)} cells")
    print(f"{'':28}{'within ' + str(NEAR):>11}{'excess, median':>16}{'mean':>8}{'fails':>7}{'cells':>7}")
    for choice, name in CHOICES.items():
        chosen = [outcome for outcome in outcomes if choice in outcome.rates]
        if not chosen:
            continue
        excess = [outcome.excess(choice) for outcome in chosen]
        near = statistics.fmean(outcome.is_near(choice) for outcome in chosen)
        fails = sum(outcome.fails(choice) for outcome in chosen)
        print(
            f"{name:28}{near:>11.0%}{statistics.median(excess):>16.1%}{statistics.fmean(excess):>8.1%}"
            f"{fails:>7}{len(chosen):>7}"
        )


def show(record: Record) -> None:
    print("Rates as multiples of the best of the grid, and excess loss (loss / best of the grid − 1).")
    head = "".join(f"{name:>28}" for name in CHOICES.values())
    print(f"{'base model':26}{'method':13}{'seed':>4}{'best':>10}{'loss':>8}{'before':>8} |{head}")
    halves = {"Development": DEVELOPMENT, "Set aside": HELD_OUT}
    for outcome in outcomes_of(record, TASKS):
        cell = outcome.cell
        shown = "".join(
            f"{outcome.times_best(choice):>18.2f}×{outcome.excess(choice):>8.1%}" if choice in outcome.rates
            else f"{'-':>28}"
            for choice in CHOICES
        )  # fmt: skip
        print(
            f"{cell.task:26}{cell.method:13}{cell.seed:>4}{outcome.best_rate:>10.3g}"
            f"{outcome.best:>8.3f}{outcome.first:>8.3f} |{shown}"
        )
    for title, tasks in halves.items():
        outcomes = outcomes_of(record, tasks)
        if not outcomes:
            continue
        summarize(title, outcomes)
        summarize(f"{title}, adapters", [one for one in outcomes if one.cell.method != "full"])
        for method in METHODS:
            summarize(f"{title}, {method}", [one for one in outcomes if one.cell.method == method])
    show_ratios(record)


def show_ratios(record: Record) -> None:
    """The best loss of each ratio of rates, over that of one rate for A and B."""
    rows = [row for row in record.rows if row["ratio"] != 1]
    if not rows:
        return
    print("\nThe rate of B over that of A: best loss of a grid over that of one rate, less 1.")
    print(f"{'base model':26}{'method':13}{'seed':>4}" + "".join(f"{ratio:>10g}" for ratio in RATIOS))
    excess: dict[float, list[float]] = {}
    for cell in dict.fromkeys(Cell(row["task"], row["method"], row["seed"]) for row in rows):
        best = min(record.losses(cell).values())
        line = f"{cell.task:26}{cell.method:13}{cell.seed:>4}"
        for ratio in RATIOS:
            losses = record.losses(Cell(cell.task, cell.method, cell.seed, ratio))
            gain = min(losses.values(), default=math.nan) / best - 1
            excess.setdefault(ratio, []).append(gain)
            line += f"{gain:>+10.1%}"
        print(line)
    means = "".join(f"{statistics.fmean(values):>+10.1%}" for values in excess.values())
    print(f"{'mean':43}{means}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=["grid", "advise", "ratios", "show"])
    parser.add_argument("--set", choices=["development", "held-out"], default="development")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--bases", type=Path, default=BASES)
    parser.add_argument("--fresh", action="store_true", help="make the advice again")
    options = parser.parse_args()
    if options.parts != ["show"]:
        run(options)
    show(Record(options.record))


if __name__ == "__main__":
    main()
