"""Are the answers true for everybody? Everyday cases × SGD, momentum, AdamW × seeds.

    python benchmarks/answers.py grid --workers 16          trainings at the rates of a grid, in steps of 2
    python benchmarks/answers.py advise --label name        what `advise` says, and a training at its rate
    python benchmarks/answers.py warmup                     `advice.warmup` against trainings with and without
    python benchmarks/answers.py invariances                what training does not depend on
    python benchmarks/answers.py verdicts                   `assert_sound(lr=...)` against the trainings
    python benchmarks/answers.py ranks                      `advise` and `initialize_` in DDP on two ranks
    python benchmarks/answers.py show                       the tables of all of them

Every part continues where it was stopped: a finished cell is appended to its record in `results/` at once,
and what is there is not made again. `--budget SECONDS` stops in time, `--record FILE` names another record.

A training makes 200 steps on mini-batches of the case's data. Its loss is the mean over the last 20 steps;
the first loss is that of the initial weights on the same 20 mini-batches. The grid widens until the two rates
at each end are worse than the best one by a tenth of the fall. `advise` gets one more mini-batch, nothing
else. A rate fails where its training diverges or falls by less than a tenth of what the best rate reaches.
A cell trains where some rate lowers the loss, and below that of the best constant output, by more than the
noise. The twenty cases that `answers_cases.py` holds out are left out of `advise`, `warmup`, `invariances`
and `verdicts` unless --held-out asks for them, alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import random
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, here and in the workers

import torch
from answers_cases import CASES
from record import run_facts
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import hessinit

RESULTS = Path(__file__).parent / "results"
GRIDS, ADVICE = RESULTS / "answers.jsonl", RESULTS / "answers-advice.jsonl"
INVARIANCES, VERDICTS = RESULTS / "answers-invariances.jsonl", RESULTS / "answers-verdicts.jsonl"
WARMUPS, ON_RANKS = RESULTS / "answers-warmup.jsonl", RESULTS / "answers-ranks.jsonl"
STEPS, LAST = 200, 20
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "momentum": functools.partial(SGD, momentum=0.9),
    "adamw": AdamW,
}
FIRST_EXPONENT = {"sgd": -3, "momentum": -6, "adamw": -8}
NARROW, WIDE = 10, 34  # how far from there the grid goes where nothing trains, and where something does
BESIDE = 2  # so many rates at each end are worse
TOLERATED = 0.1  # of the fall
NOISE = 3.0  # standard errors
Row = dict[str, Any]


# --- Training ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A case, an optimizer and a seed."""

    case: str
    optimizer: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.case, self.optimizer, self.seed


class Bench:
    """The trainings of a cell: all see the same initial weights and mini-batches."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.case = cell, CASES[cell.case]
        self.inputs, self.targets = self.case.data()
        source = torch.Generator().manual_seed(1000 + cell.seed)
        # One batch more than the training has: the one that `advise` is given.
        size = (STEPS + 1, self.case.batch_size)
        self.rows = torch.randint(len(self.targets), size, generator=source)

    def model(self) -> nn.Module:
        torch.manual_seed(self.cell.seed)
        return self.case.build().train()

    def batch(self, step: int = STEPS) -> tuple[Any, Any]:
        rows = self.rows[step]
        return take(self.inputs, rows), take(self.targets, rows)

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return OPTIMIZERS[self.cell.optimizer](trained, lr=lr)

    def losses(self, lr: float, warmup: int = 0) -> list[float]:
        """The loss of every step, up to the first one that is not finite."""
        model = self.model()
        optimizer = self.optimizer(model, lr)
        torch.manual_seed(2000 + self.cell.seed)
        losses: list[float] = []
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / (warmup + 1))
            inputs, targets = self.batch(step)
            value = self.case.loss(model(inputs), targets)
            losses.append(value.item())
            if not math.isfinite(losses[-1]):
                break
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        return losses

    def train(self, lr: float, warmup: int = 0) -> tuple[float | None, float]:
        """The final loss, None where it is not finite, and the standard error of its fall."""
        if not 0 < lr < math.inf:
            return None, 0.0
        losses = self.losses(lr, warmup)
        if not math.isfinite(losses[-1]):
            return None, 0.0
        last = losses[-LAST:]
        falls = [before - after for before, after in zip(self.first_losses, last, strict=True)]
        return statistics.fmean(last), statistics.stdev(falls) / math.sqrt(LAST)

    @functools.cached_property
    def first_losses(self) -> list[float]:
        """Those of the initial weights on the last mini-batches."""
        model = self.model()
        torch.manual_seed(2000 + self.cell.seed)
        batches = [self.batch(step) for step in range(STEPS - LAST, STEPS)]
        return [self.case.loss(model(inputs), targets).item() for inputs, targets in batches]

    def constant_loss(self) -> float | None:
        """That of the best constant output on the last mini-batches."""
        if not self.case.constant:
            return None
        rows = self.rows[STEPS - LAST : STEPS]
        targets = [take(self.targets, batch) for batch in rows]
        with torch.no_grad():
            shape = self.model()(self.batch()[0]).shape[1:]
        constant = torch.zeros(1, *shape, requires_grad=True)
        search = torch.optim.LBFGS([constant], max_iter=200, line_search_fn="strong_wolfe")

        def mean_loss() -> Tensor:
            search.zero_grad()
            total = torch.zeros(())
            for part in targets:
                total = total + self.case.loss(constant.expand(len(part), *shape), part) / len(targets)
            total.backward()
            return total.detach()

        search.step(mean_loss)
        value = float(mean_loss())
        return value if math.isfinite(value) else None


def take(part: Any, rows: Tensor) -> Any:
    return part[rows] if isinstance(part, Tensor) else tuple(take(one, rows) for one in part)


def rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


def make_grid(cell: Cell, deadline: float) -> Row | None:
    """The final losses at the rates of the grid, by the power of 2; None where the time is up."""
    bench, grid = Bench(cell), dict[int, tuple[float | None, float]]()
    first = statistics.fmean(bench.first_losses)
    row: Row = {"first": rounded(first), "constant": rounded(bench.constant_loss())}
    while (exponent := next_exponent(grid, first, FIRST_EXPONENT[cell.optimizer])) is not None:
        if time.time() > deadline:
            return None
        grid[exponent] = bench.train(2.0**exponent)
    shown = {str(exponent): [rounded(loss), rounded(error)] for exponent, (loss, error) in grid.items()}
    return {**row, "grid": dict(sorted(shown.items(), key=lambda item: int(item[0])))}


def next_exponent(grid: dict[int, tuple[float | None, float]], first: float, start: int) -> int | None:
    """The next rate of the grid; None where the best one is inside, or where nothing trains."""
    if not grid:
        return start
    falls = {k: -math.inf if loss is None else first - loss for k, (loss, _) in grid.items()}
    order = sorted(falls)
    best = max(order, key=falls.__getitem__)
    something = falls[best] > NOISE * grid[best][1] and falls[best] > 1e-6 * abs(first)
    everything_fails = falls[best] == -math.inf
    for end, step in ((order, -1), (order[::-1], 1)):
        enough = falls[best] * (1 - TOLERATED) if something else -math.inf
        done = len(order) > BESIDE and all(falls[k] < enough for k in end[:BESIDE])
        if everything_fails and step > 0:
            done = True
        far = WIDE if something or everything_fails else NARROW
        if not done and abs(end[0] + step - start) <= far:
            return end[0] + step
    return None


# --- Running ----------------------------------------------------------------------------------------------

Work = Callable[[Cell, float], "Row | None"]


def run_cell(work: Work, cell: Cell, deadline: float) -> tuple[Cell, Row | None, float]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    row = None if time.time() > deadline else work(cell, deadline)
    return cell, row, time.perf_counter() - started


def run_all(work: Work, cells: Iterable[Cell], record: Path, label: str | None, options: Any) -> None:
    """Do what is missing in the record, and append each cell to it as soon as it is finished."""
    finished = {(*key_of(row), row.get("label")) for row in read(record)}
    missing = [cell for cell in cells if (*cell.key, label) not in finished]
    deadline = time.time() + (options.budget or math.inf)
    print(f"{len(missing)} cells to do", flush=True)
    done = 0
    if missing:
        facts = run_facts(f"answers.py {options.part}", label=label, workers=options.workers)
        with record.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(facts) + "\n")
    for cell, row, seconds in results_of(work, missing, deadline, options.workers):
        if row is None:
            continue
        head = {"case": cell.case, "optimizer": cell.optimizer, "seed": cell.seed}
        with record.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({**head, **({"label": label} if label else {}), **row}) + "\n")
        done += 1
        print(
            f"{done}/{len(missing)} {cell.case}, {cell.optimizer}, {cell.seed}: {seconds:.1f} s", flush=True
        )
    print(f"{done} of {len(missing)} done; record {record}", flush=True)


def results_of(
    work: Work, cells: list[Cell], deadline: float, workers: int
) -> Iterator[tuple[Cell, Row | None, float]]:
    if workers == 1:
        yield from (run_cell(work, cell, deadline) for cell in cells)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        running = [pool.submit(run_cell, work, cell, deadline) for cell in cells]
        for future in as_completed(running):
            yield future.result()


def read(record: Path, key: str = "case") -> list[Row]:
    """The rows of a record with this key; a last line that was cut off is left out."""
    rows = []
    for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if key in row]


def key_of(row: Row) -> tuple[str, str, int]:
    return row["case"], row["optimizer"], row["seed"]


def cells_of(options: argparse.Namespace, everything: bool = False) -> list[Cell]:
    """In an order that spreads long cells over the workers; seed by seed."""
    names = [name for name, case in CASES.items() if everything or case.held_out == options.held_out]
    if options.only:
        names = [name for name in names if name in options.only]
    cells = []
    for seed in range(options.seeds):
        part = [Cell(name, optimizer, seed) for name in names for optimizer in OPTIMIZERS]
        random.Random(seed).shuffle(part)
        part.sort(key=lambda cell: CASES[cell.case].held_out)
        cells += part
    return cells


# --- What the grid says -----------------------------------------------------------------------------------


class Outcome:
    """What the grid of a cell says."""

    def __init__(self, row: Row) -> None:
        self.key, self.first, self.constant = key_of(row), row["first"], row["constant"]
        self.grid = {int(k): (math.inf if loss is None else loss) for k, (loss, _) in row["grid"].items()}
        self.best_exponent = min(self.grid, key=self.grid.__getitem__)
        self.best, self.error = self.grid[self.best_exponent], row["grid"][str(self.best_exponent)][1]

    @property
    def fall(self) -> float:
        return self.first - self.best

    @property
    def kind(self) -> str:
        """Whether it "trains", reaches "chance" (what a constant output does), or does "nothing"."""
        noise = max(NOISE * self.error, 1e-6 * abs(self.first))
        if not self.fall > noise:
            return "nothing"
        if self.constant is not None and self.best > self.constant - noise:
            return "chance"
        return "trains"

    @property
    def edge(self) -> list[int]:
        """The lowest rate above the best one at which training fails."""
        above = [k for k in sorted(self.grid) if k > self.best_exponent]
        return [k for k in above if self.kind == "trains" and self.fails(self.grid[k])][:1]

    def excess(self, loss: float | None) -> float:
        """By how much of the fall a loss is above the best one; inf where the training diverged."""
        return math.inf if loss is None else (loss - self.best) / self.fall

    def fails(self, loss: float | None) -> bool:
        return not self.excess(loss) <= 1 - TOLERATED


def outcomes(record: Path) -> dict[tuple[str, str, int], Outcome]:
    return {key_of(row): Outcome(row) for row in read(record)}


# --- The parts --------------------------------------------------------------------------------------------


def grid(options: argparse.Namespace) -> None:
    run_all(make_grid, cells_of(options, everything=not options.held_out), options.grids, None, options)


def advise(options: argparse.Namespace) -> None:
    cells = cells_of(options)
    run_all(take_advice, cells, options.record or ADVICE, options.label, options)


def take_advice(cell: Cell, _: float) -> Row | None:
    """What `advise` says to a user who has the model, the loss and a mini-batch, and what follows."""
    bench = Bench(cell)
    started = time.process_time()
    try:
        advice = hessinit.advise(bench.model(), bench.case.loss, bench.batch(), optimizer=cell.optimizer)
    except Exception as failure:
        return {"refused": f"{type(failure).__name__}: {failure}"[:400]}
    seconds = time.process_time() - started
    rate = advice.learning_rate
    loss, _error = bench.train(rate)
    return {
        "lr": rounded(rate), "loss": rounded(loss), "learns": learns(advice),
        "gradients": rounded(advice.gradients), "seconds": round(seconds, 3),
        "stable": rounded(advice.stable_learning_rate), "reason": advice.learning_rate_reason[:300],
        "trials": [trial_row(trial) for trial in advice.trials],
    }  # fmt: skip


def learns(advice: Any) -> bool:
    return bool(getattr(advice, "learns", True)) and 0 < advice.learning_rate < math.inf


def trial_row(trial: Any) -> list[Any]:
    """The rate, the first loss, the mean of the last third, and the number of steps."""
    losses = list(trial.losses)
    if not losses:
        return [rounded(trial.lr), None, None, 0]
    last = losses[-math.ceil(len(losses) / 3) :]
    return [rounded(trial.lr), rounded(losses[0]), rounded(statistics.fmean(last)), len(losses)]


# --- What training does not depend on ---------------------------------------------------------------------

INVARIANT = (
    "mlp", "cnn, BatchNorm", "vision transformer", "transformer, pre-LN", "lstm", "regression", "lora, mlp",
    "autoencoder, summed error", "vae, digits", "normalizing flow", "poisson nll", "matrix factorization",
)  # fmt: skip
CONSTANTS, UNITS = (-1000.0, -1.0, 1.0, 100.0, 1000.0), (1e-3, 1e3)
ALIKE = 0.2  # how far rates may differ
Variant = tuple[nn.Module, Any, Any, float]  # the model, the loss, the batch, and what becomes of the rate


class Wrapped(nn.Module):
    """A module that holds the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model

    def forward(self, inputs: Any) -> Any:
        return self.inside(inputs)


def variants(bench: Bench) -> Iterator[tuple[str, Variant]]:
    """The same training in other words."""
    loss, (inputs, targets) = bench.case.loss, bench.batch()
    batch, size, descends = (inputs, targets), len(targets), bench.cell.optimizer != "adamw"
    yield "as it is", (bench.model(), loss, batch, 1.0)
    for constant in CONSTANTS:
        yield f"loss {constant:+g}", (bench.model(), shifted(loss, constant), batch, 1.0)
    for unit in UNITS:
        yield f"loss × {unit:g}", (bench.model(), scaled(loss, unit), batch, 1 / unit if descends else 1.0)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    yield "another order", (bench.model(), loss, (take(inputs, order), take(targets, order)), 1.0)
    if not bench.case.sums:
        twice = torch.arange(2 * size) % size
        yield "batch twice", (bench.model(), loss, (take(inputs, twice), take(targets, twice)), 1.0)
    model = bench.model()
    heads = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer.out_features == 10]
    if heads and targets.dtype == torch.long and targets.ndim == 1 and len(heads) == 1:
        rows = torch.randperm(10, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            heads[0].weight.copy_(heads[0].weight[rows])
            heads[0].bias.copy_(heads[0].bias[rows])
        yield "targets renamed", (model, loss, (inputs, rows.argsort()[targets]), 1.0)
    yield "batch as a list", (bench.model(), loss, [inputs, targets], 1.0)
    yield "model wrapped", (Wrapped(bench.model()), loss, batch, 1.0)
    yield "float64", (bench.model().double(), loss, (in_float64(inputs), in_float64(targets)), 1.0)


def shifted(loss: Any, constant: float) -> Any:
    return lambda output, targets: loss(output, targets) + constant


def scaled(loss: Any, unit: float) -> Any:
    return lambda output, targets: unit * loss(output, targets)


def in_float64(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.double() if part.is_floating_point() else part
    return tuple(in_float64(one) for one in part)


def invariances(options: argparse.Namespace) -> None:
    if options.held_out:
        names = [name for name, case in CASES.items() if case.held_out]
    else:
        names = [name for name in INVARIANT if not options.only or name in options.only]
    cells = [Cell(name, optimizer, 0) for name in names for optimizer in OPTIMIZERS]
    run_all(compare_variants, cells, options.record or INVARIANCES, options.label, options)


def compare_variants(cell: Cell, _: float) -> Row | None:
    """By variant the advised rate, in the original unit, and whether the first one is sound."""
    answers: dict[str, list[Any]] = {}
    first = math.nan
    for name, (model, loss, batch, times) in variants(Bench(cell)):
        try:
            advice = hessinit.advise(model, loss, batch, optimizer=cell.optimizer)
            rate = advice.learning_rate / times if learns(advice) else None
            first = first if first == first or rate is None else rate
            answers[name] = [rounded(rate), sounds(cell, model, loss, batch, first * times)]
        except Exception as failure:
            answers[name] = [f"{type(failure).__name__}: {failure}"[:200], None]
    return {"answers": answers}


def sounds(cell: Cell, model: nn.Module, loss: Any, batch: Any, lr: float) -> bool | None:
    """Whether `assert_sound` passes; None where there is no rate."""
    if not 0 < lr < math.inf:
        return None
    try:
        hessinit.assert_sound(model, loss, batch, optimizer=cell.optimizer, lr=lr)
    except AssertionError:
        return False
    return True


def show_invariances(rows: list[Row]) -> None:
    checked = agreeing = 0
    for row in rows:
        (rate, verdict), *_ = row["answers"].values()
        for name, (other, its_verdict) in row["answers"].items():
            alike = other == rate or (
                isinstance(rate, float) and isinstance(other, float) and abs(other / rate - 1) <= ALIKE
            )
            checked += 1
            agreeing += alike and verdict == its_verdict
            if not (alike and verdict == its_verdict):
                print(
                    f"  {row['case']}, {row['optimizer']}, {name}: {rate} {verdict} → {other} {its_verdict}"
                )
    print(f"invariances: {agreeing} of {checked} answers agree")


# --- Verdicts ---------------------------------------------------------------------------------------------

MULTIPLES = (0, 2, 4, 6)  # powers of 2: at the best rate, and 4, 16 and 64 times that


def verdicts(options: argparse.Namespace) -> None:
    grids = outcomes(options.grids)
    cells = [cell for cell in cells_of(options) if cell.seed == 0 and cell.key in grids]
    work = functools.partial(take_verdicts, grids)
    run_all(work, cells, options.record or VERDICTS, options.label, options)


def take_verdicts(grids: dict[tuple[str, str, int], Outcome], cell: Cell, _: float) -> Row | None:
    """Of `measure`; of `assert_sound` at multiples of the best rate, and at the first one that fails."""
    bench, outcome = Bench(cell), grids[cell.key]
    row: Row = {"measure": [], "rates": {}}
    try:
        report = hessinit.measure(bench.model(), bench.case.loss, bench.batch())
        row["measure"] = [finding.kind for finding in report.findings or ()]
    except Exception as failure:
        row["measure"] = [f"refused: {type(failure).__name__}: {failure}"[:200]]
    multiples = [outcome.best_exponent + power for power in MULTIPLES]
    for exponent in sorted({*multiples, *outcome.edge}):
        arguments = (bench.model(), bench.case.loss, bench.batch())
        verdict, message = "sound", ""
        try:
            hessinit.assert_sound(
                hessinit.Problem(*arguments, dropout="freeze"), optimizer=cell.optimizer, lr=2.0**exponent
            )
        except AssertionError as failure:
            verdict, message = "not sound", str(failure).partition("\n\n")[0][:300]
        except Exception as failure:
            verdict, message = "refused", f"{type(failure).__name__}: {failure}"[:200]
        loss, _error = bench.train(2.0**exponent)
        row["rates"][str(exponent)] = [verdict, message, rounded(loss)]
    return row


def truth_of(outcome: Outcome, loss: float | None) -> str | None:
    """Whether a training ends near the best one, halfway ("learns"), fails, or is in between (None)."""
    excess = outcome.excess(loss) if outcome.kind == "trains" else math.inf
    if excess <= TOLERATED:
        return "near"
    return "learns" if excess <= 0.5 else "fails" if not excess <= 1 - TOLERATED else None


def show_verdicts(rows: list[Row], grids: dict[tuple[str, str, int], Outcome]) -> None:
    """By place: multiples of the best rate, the first rate that fails, and cells that only reach chance.

    Of the last ones the batch alone cannot tell: the network learns it by heart.
    """
    counts: dict[tuple[str, str, str], int] = {}
    wrong, found = [], dict[str, list[str]]()
    for row in rows:
        outcome = grids[key_of(row)]
        found[row["case"]] = row["measure"]
        for exponent, (verdict, message, loss) in row["rates"].items():
            truth = truth_of(outcome, loss)
            if truth is None:
                continue
            place = "edge" if int(exponent) in outcome.edge else "multiples"
            place = "chance" if outcome.kind == "chance" else place
            counts[place, truth, verdict] = counts.get((place, truth, verdict), 0) + 1
            if verdict != ("not sound" if truth == "fails" else "sound"):
                rate = f"lr {2.0 ** int(exponent):.3g} {truth} ({place}), {verdict}"
                wrong.append(f"  {row['case']}, {row['optimizer']}, {rate}: {message}")
    print("\n".join(sorted(wrong)))
    for case, kinds in found.items():
        if kinds:
            print(f"  measure: {case}: {kinds}")
    for place in ("multiples", "edge", "chance"):
        alarms, passed = (counts.get((place, "near", verdict), 0) for verdict in ("not sound", "sound"))
        more, others = (counts.get((place, "learns", verdict), 0) for verdict in ("not sound", "sound"))
        caught, missed = (counts.get((place, "fails", verdict), 0) for verdict in ("not sound", "sound"))
        refused = sum(counts.get((place, truth, "refused"), 0) for truth in ("near", "learns", "fails"))
        shares = f"false alarms {share(alarms, passed)}, caught {share(caught, missed)}"
        print(f"{place}: {shares}, refused {refused}")
        print(f"  alarms where it ends within half of the fall: {share(alarms + more, passed + others)}")


def share(some: int, others: int) -> str:
    return f"{some} of {some + others} ({some / max(some + others, 1):.1%})"


# --- Warmup -----------------------------------------------------------------------------------------------

WARMED = (
    ("transformer, pre-LN", "adamw"), ("transformer, post-LN", "adamw"), ("transformer, pre-LN", "momentum"),
    ("vision transformer", "adamw"), ("masked language model", "adamw"), ("mlp", "sgd"), ("mlp", "adamw"),
    ("cnn", "momentum"), ("resnet, BatchNorm", "momentum"), ("lstm", "adamw"), ("tanh, 10 layers", "sgd"),
    ("vae, digits", "adamw"), ("regression", "momentum"), ("siren", "adamw"),
)  # fmt: skip
FACTORS, WARMUP_STEPS, NO_WORSE = (1, 2, 4), 50, 0.01


def warmup(options: argparse.Namespace) -> None:
    cells = [Cell(name, optimizer, 0) for name, optimizer in WARMED]
    run_all(try_warmups, cells, options.record or WARMUPS, options.label, options)


def try_warmups(cell: Cell, _: float) -> Row | None:
    """What is said of warmup at the advised rate and above, and trainings with and without."""
    bench, tries = Bench(cell), []
    advice = hessinit.advise(bench.model(), bench.case.loss, bench.batch(), optimizer=cell.optimizer)
    for factor in FACTORS:
        lr = factor * advice.learning_rate
        arguments = (bench.model(), bench.case.loss, bench.batch())
        answer = hessinit.advise(*arguments, optimizer=cell.optimizer, lr=lr).warmup
        plain, _error = bench.train(lr)
        warmed, _error = bench.train(lr, min(answer.steps, STEPS) if answer.advised else WARMUP_STEPS)
        tries.append({
            "lr": rounded(lr), "factor": factor, "advised": answer.advised, "steps": answer.steps,
            "plain": rounded(plain), "warmed": rounded(warmed), "reason": answer.reason[:200],
        })  # fmt: skip
    return {"tries": tries}


def show_warmups(rows: list[Row], grids: dict[tuple[str, str, int], Outcome]) -> None:
    right = total = 0
    for row in rows:
        fall = grids[key_of(row)].fall
        for one in row["tries"]:
            plain, warmed = (math.inf if one[name] is None else one[name] for name in ("plain", "warmed"))
            chosen, other = (warmed, plain) if one["advised"] else (plain, warmed)
            good = chosen <= other + NO_WORSE * fall
            total += 1
            right += good
            if not good:
                said = f"warmup of {one['steps']}" if one["advised"] else "no warmup"
                ends = f"plain {plain:.4g}, warmed {warmed:.4g}"
                print(f"  {row['case']}, {row['optimizer']}, {one['factor']} × advice: {said}; {ends}")
    print(f"warmup: {right} of {total} right ({right / max(total, 1):.1%})")


# --- Two ranks --------------------------------------------------------------------------------------------

IN_DDP = ("mlp", "cnn", "vision transformer", "transformer, pre-LN", "regression", "vae, digits")
RANKS = 2


def ranks(options: argparse.Namespace) -> None:
    cells = [Cell(name, optimizer, 0) for name in IN_DDP for optimizer in OPTIMIZERS]
    options.workers = 1  # it starts processes of its own
    run_all(advise_in_ddp, cells, options.record or ON_RANKS, options.label, options)


def advise_in_ddp(cell: Cell, _: float) -> Row | None:
    """What each rank is told, with its half of every mini-batch, and a training in DDP at that rate."""
    context, (listener, port) = get_context("spawn"), free_port()
    listener.close()
    told: Any = context.SimpleQueue()
    processes = [context.Process(target=work_as_rank, args=(rank, port, cell, told)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    rows = sorted((told.get() for _ in processes), key=lambda row: row["rank"])
    for process in processes:
        process.join()
    return {"ranks": rows}


def free_port() -> tuple[socket.socket, int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def work_as_rank(rank: int, port: int, cell: Cell, told: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    bench = Bench(cell)
    model = nn.parallel.DistributedDataParallel(bench.model())
    row: Row = {"rank": rank, "refused": {}}
    for verb, extra in ((hessinit.advise, {}), (hessinit.initialize_, {"lr": 0.1})):
        try:
            verb(model, bench.case.loss, own_half(bench, STEPS, rank), optimizer=cell.optimizer, **extra)
        except hessinit.ProblemError as refusal:
            row["refused"][verb.__name__] = str(refusal)[:200]
    batch = own_half(bench, STEPS, rank)
    advice = hessinit.advise(model, bench.case.loss, batch, optimizer=cell.optimizer, distributed="batch")
    row["lr"] = rounded(advice.learning_rate)
    optimizer = bench.optimizer(model, advice.learning_rate)
    losses = []
    for step in range(STEPS):
        inputs, targets = own_half(bench, step, rank)
        value = bench.case.loss(model(inputs), targets)
        losses.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    row["loss"] = rounded(statistics.fmean(losses[-LAST:]))
    model = nn.parallel.DistributedDataParallel(bench.model())
    hessinit.initialize_(
        model,
        bench.case.loss,
        batch,
        lr=0.1,
        optimizer=cell.optimizer,
        distributed="batch",
        fit=hessinit.Fit(report=False),
    )
    row["weights"] = math.fsum(float(one.double().sum()) for one in model.parameters())
    told.put(row)
    torch.distributed.destroy_process_group()


def own_half(bench: Bench, step: int, rank: int) -> tuple[Any, Any]:
    rows = bench.rows[step].chunk(RANKS)[rank]
    return take(bench.inputs, rows), take(bench.targets, rows)


def show_ranks(rows: list[Row], grids: dict[tuple[str, str, int], Outcome]) -> None:
    near = alike = refused = 0
    for row in rows:
        first, second = row["ranks"]
        losses = [one["loss"] for one in row["ranks"]]
        excess = grids[key_of(row)].excess(None if None in losses else statistics.fmean(losses))
        near += excess <= TOLERATED
        alike += first["lr"] == second["lr"] and first["weights"] == second["weights"]
        refused += all(len(one["refused"]) == 2 for one in row["ranks"])
        if excess > TOLERATED:
            print(f"  {row['case']}, {row['optimizer']}: rate {first['lr']}, excess {excess:.1%}")
    print(f"two ranks: {near} of {len(rows)} within {TOLERATED:.0%} of the fall")
    print(f"  {alike} with the same rate and initial weights on both; {refused} refused without distributed=")


# --- The tables -------------------------------------------------------------------------------------------


def show(options: argparse.Namespace) -> None:
    grids = outcomes(options.grids)
    print_table = {
        ADVICE: lambda rows: show_advice(rows, grids),
        INVARIANCES: show_invariances,
        VERDICTS: lambda rows: show_verdicts(rows, grids),
        WARMUPS: lambda rows: show_warmups(rows, grids),
        ON_RANKS: lambda rows: show_ranks(rows, grids),
    }
    for facts in read(options.grids, "command"):
        print(json.dumps(facts))
    for default, table in print_table.items():
        record = options.record / default.name if options.record else default
        rows = [row for row in read(record) if CASES[row["case"]].held_out == options.held_out]
        rows = [row for row in rows if key_of(row) in grids]
        for facts in read(record, "command") if rows else ():
            print(json.dumps(facts))
        for label in dict.fromkeys(row["label"] for row in rows):
            if not options.label or label == options.label:
                print(f"== {default.stem}: {label}{', held out' * options.held_out}")
                table([row for row in rows if row["label"] == label])


def show_advice(rows: list[Row], grids: dict[tuple[str, str, int], Outcome]) -> None:
    by_kind: dict[str, list[Row]] = {"trains": [], "chance": [], "nothing": []}
    for row in rows:
        by_kind[grids[key_of(row)].kind].append(row)
    trains = by_kind["trains"]
    judged = [(row, judge(row, grids[key_of(row)])) for row in trains]
    excesses = [grids[key_of(row)].excess(row.get("loss")) for row in trains if "refused" not in row]
    near = sum(word == "near" for _, word in judged)
    print(f"{len(rows)} cells, {len({row['case'] for row in rows})} cases; {len(trains)} train")
    if trains:
        print(f"within {TOLERATED:.0%} of the fall: {near} of {len(trains)} ({near / len(trains):.1%})")
    for word in ("fails", "does not learn", "refused", "far"):
        print(f"{word}: {sum(answer == word for _, answer in judged)}")
    if excesses:
        print(f"excess: median {statistics.median(excesses):.1%}, worst {max(excesses):.1%}")
    costs = [row["gradients"] for row in rows if row.get("gradients")]
    if costs:
        print(f"gradients: median {statistics.median(costs):.0f}, worst {max(costs):.0f}")
    for optimizer in OPTIMIZERS:
        mine = [word for row, word in judged if row["optimizer"] == optimizer]
        print(f"  {optimizer}: {mine.count('near')} of {len(mine)} near, {mine.count('fails')} fail")
    for kind in ("chance", "nothing"):
        words = [judge(row, grids[key_of(row)]) for row in by_kind[kind]]
        counts = {word: words.count(word) for word in dict.fromkeys(words)}
        print(f"{kind}: {len(words)} cells: {counts}")
    for row in rows:
        outcome = grids[key_of(row)]
        word = judge(row, outcome)
        if word not in ("near", "right", "harmless"):
            print(describe(row, outcome, word))


def judge(row: Row, outcome: Outcome) -> str:
    """What an answer is worth in its cell."""
    if "refused" in row:
        return "refused"
    if outcome.kind != "trains":
        if not row["learns"]:
            return "right"
        rises = row["loss"] is None or row["loss"] > outcome.first + max(NOISE * outcome.error, 0)
        return "harmful" if rises else "harmless"
    if not row["learns"]:
        return "does not learn"
    if outcome.fails(row["loss"]):
        return "fails"
    return "near" if outcome.excess(row["loss"]) <= TOLERATED else "far"


def describe(row: Row, outcome: Outcome, word: str) -> str:
    head = f"{word.upper()} [{outcome.kind}] {row['case']} | {row['optimizer']} | seed {row['seed']}: "
    if "refused" in row:
        return head + row["refused"]
    best = f"best {outcome.best:.5g} at {2.0**outcome.best_exponent:.3g}"
    ends = f"first {outcome.first}, constant {outcome.constant}"
    answer = f"{head}advice {row['lr']} → {row['loss']}; {best}, {ends}"
    values = ", ".join(f"{2.0**k:.2g}: {loss:.4g}" for k, loss in outcome.grid.items())
    trials = ", ".join(f"{lr:.2g}: {first} → {last} ({n})" for lr, first, last, n in row["trials"])
    return "\n".join([answer, f"    grid   {values}", f"    trials {trials}", f"    {row['reason']}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {
        "grid": grid, "advise": advise, "warmup": warmup, "invariances": invariances, "verdicts": verdicts,
        "ranks": ranks, "show": show,
    }  # fmt: skip
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--budget", type=float, help="stop after so many seconds")
    parser.add_argument("--only", nargs="+", help="these cases")
    parser.add_argument("--held-out", action="store_true", help="the cases that were set aside, alone")
    parser.add_argument("--label", help="the version of the code that is scored")
    parser.add_argument(
        "--grids", type=Path, default=RESULTS / "answers.jsonl", help="the record of the grids"
    )
    parser.add_argument("--record", type=Path, help="the record of the part")
    options = parser.parse_args()
    if options.part not in ("grid", "show") and not options.label:
        parser.error(f"{options.part} needs --label: it names the version of the code that is scored")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parts[options.part](options)


if __name__ == "__main__":
    main()
