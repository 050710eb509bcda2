"""Is the advice on the learning rate any good? Twelve problems × ten optimizers × two seeds.

    python benchmarks/advice.py --workers 16                    everything that is missing in the record
    python benchmarks/advice.py --set development --workers 1   the problems on which constants were chosen
    python benchmarks/advice.py --show                          the tables (results/advice.txt)
    python benchmarks/advice.py --draw docs/pictures/advice.png the picture; needs matplotlib
    python benchmarks/advice.py --optimizers rmsprop --only grid   a part: here the trainings on the grid

For each problem, optimizer and seed: the network with its own weights is trained for 300 steps at the rates
of a grid in steps of 2, widened until the best rate lies inside; at the rate of `hessinit.advise`, given one
batch; at the rate of Lightning's learning-rate finder with its defaults; and with the rate and the weights
of `initialize_(lr="auto", data=...)`. All see the same mini-batches. The loss is the mean of the last 30
steps; a training that fails counts with its initial loss. For optimizers without a closed form the rivals are
the rules that people type: the rate of AdamW's advice, for Lion a third and a tenth of it. Losses of
Schedule-Free are those at its averaged weights. Constants for these were chosen on the six development
problems, too. Every finished training is appended to the record at once, and what is there is not made again
(--record FILE).

`--text FILE` gives the text of the language models (.txt or .xz); without it, the project's own documents.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, here and in the workers
os.environ.setdefault("TQDM_DISABLE", "1")  # the finder draws a bar

import torch
from advice_problems import DEVELOPMENT, PROBLEMS, Problem, read_text
from torch import nn

import hessinit
from hessinit.training import loop
from hessinit.training.loop import Data, copy_to, read_data, reproducible, seed_everything

STEPS, LAST = 300, 30
CLOSED_FORMS = {"sgd": -3, "momentum": -6, "adamw": -8}  # the power of 2 at which the grid begins
OPTIMIZERS = {
    **CLOSED_FORMS, "rmsprop": -9, "nadam": -8, "adafactor": -5, "lion": -11, "muon": -8, "schedulefree": -7,
    "clipped adamw": -8,
}  # fmt: skip
SEEDS = (0, 1)
WORSE, BESIDE = 1.02, 2  # the grid ends where so many rates in a row are so much worse than the best
FURTHEST = 17
RECORD = Path(__file__).parent / "results" / "advice.jsonl"
METHODS = {
    "advise": "hessinit.advise", "finder": "Lightning's finder", "auto": 'initialize_(lr="auto")',
    "as adamw": "AdamW's advice", "third": "AdamW's advice / 3", "tenth": "AdamW's advice / 10",
}  # fmt: skip
PARTS = {"as adamw": 1.0, "third": 1 / 3, "tenth": 1 / 10}  # of the rate that is advised for AdamW
Cell = dict[str, Any]
Job = tuple[str, str, int]


def muon(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices and AdamW for the rest, at one rate: updates have the size of AdamW's."""
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    others = [parameter for parameter in parameters if parameter.ndim != 2]
    built: list[torch.optim.Optimizer] = []
    if matrices:
        built.append(torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"))
    return [*built, torch.optim.AdamW(others, lr=lr)]


def training_of(optimizer: str) -> hessinit.Training:
    """What the name stands for, here; Lion and Schedule-Free are packages of their own."""
    if optimizer == "lion":
        from lion_pytorch import Lion

        return hessinit.Training(Lion)
    if optimizer == "schedulefree":
        from schedulefree import AdamWScheduleFree

        return hessinit.Training(AdamWScheduleFree)
    if optimizer == "muon":
        return hessinit.Training(muon)
    if optimizer == "clipped adamw":
        return hessinit.Training("adamw", clip_norm=1.0)
    return hessinit.Training(optimizer)


def methods_of(optimizer: str) -> tuple[str, ...]:
    if optimizer in CLOSED_FORMS:
        return "advise", "finder", "auto"
    return ("advise", *PARTS) if optimizer == "lion" else ("advise", "as adamw")


# --- Training ---------------------------------------------------------------------------------------------


class Bench:
    """One problem with one optimizer and one seed."""

    def __init__(self, name: str, optimizer: str, seed: int, text: Path | None) -> None:
        self.problem: Problem = PROBLEMS[name]
        self.optimizer, self.seed = optimizer, seed
        self.training = training_of(optimizer)
        examples = self.problem.data(read_text(text))
        self.data: Data = read_data(examples, self.problem.batch_size, STEPS)

    def model(self) -> nn.Module:
        seed_everything(self.seed, "build")
        return self.problem.build().train()

    def batches(self) -> Iterable[tuple[Any, Any]]:
        cpu = torch.device("cpu")
        minibatches = itertools.islice(self.data.minibatches(self.seed), STEPS)
        return (copy_to(batch, cpu) for batch in minibatches)

    def batch(self) -> tuple[Any, Any]:
        return copy_to(self.data.initial_batch(self.seed), torch.device("cpu"))

    def train(self, lr: float, model: nn.Module | None = None) -> Cell:
        """The final loss, None where training failed, and the first one."""
        model = model or self.model()
        seed_everything(self.seed, "training")
        optimizer = self.training.build(model, lr)
        losses, _ = loop.train(model, self.problem.loss, self.batches(), optimizer, build=self.problem.build)
        final = loop.final_loss(losses, LAST) if len(losses) == STEPS else math.nan
        return {"lr": lr, "loss": final if math.isfinite(final) else None, "first": losses[0]}

    def step_seconds(self) -> float:
        """The median time of a training step: gradient and update."""
        model, (inputs, targets), times = self.model(), self.batch(), []
        optimizer = self.training.build(model, 1e-6)
        for _ in range(22):
            started = time.process_time()
            model.zero_grad()
            self.problem.loss(model(inputs), targets).backward()
            optimizer.step()
            times.append(time.process_time() - started)
        return statistics.median(times[2:])

    # --- The methods: each returns a rate, a model (None: the network's own weights) and more to record

    def advise(self) -> tuple[float, nn.Module | None, Cell]:
        model, batch = self.model(), self.batch()
        advice = hessinit.advise(model, self.problem.loss, batch, optimizer=self.training)
        more = {"stable": advice.stable_learning_rate, "norm": advice.norm.value}
        more["half_steps"] = sum(trial.steps for trial in advice.trials)
        return advice.learning_rate, None, more

    def part_of_adamw(self, method: str) -> tuple[float, nn.Module | None, Cell]:
        advice = hessinit.advise(self.model(), self.problem.loss, self.batch(), optimizer="adamw")
        return PARTS[method] * advice.learning_rate, None, {}

    def auto(self) -> tuple[float, nn.Module | None, Cell]:
        model, batch = self.model(), self.batch()
        examples = self.data.parts[0]
        result = hessinit.initialize_(
            hessinit.Problem(model, self.problem.loss, batch, seed=self.seed),
            lr="auto",
            optimizer=self.training,
            data=(examples.inputs, examples.targets),
            progress=False,
        )  # fmt: skip
        steps = sum(trial.steps for trial in result.trials)
        return result.lr or math.nan, model, {"steps": steps, "winner": result.trials[0].name}

    def finder(self) -> tuple[float, nn.Module | None, Cell]:
        """Where the finder suggests nothing, the module keeps the rate that it had: torch's default."""
        try:
            import lightning.pytorch as pl
            from lightning.pytorch.tuner import Tuner
        except ImportError:
            import pytorch_lightning as pl  # type: ignore[no-redef]
            from pytorch_lightning.tuner import Tuner  # type: ignore[no-redef]
        for name in ("lightning.pytorch", "pytorch_lightning", "lightning"):
            logging.getLogger(name).setLevel(logging.ERROR)
        network, bench = self.model(), self

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.network, self.lr = network, 1e-3

            def training_step(self, batch: Any, _: int) -> Any:
                return bench.problem.loss(self.network(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return bench.training.build(self, self.lr).optimizers[0]

        batches = list(itertools.islice(self.batches(), STEPS))
        with tempfile.TemporaryDirectory() as folder:
            trainer = pl.Trainer(
                default_root_dir=folder, accelerator="cpu", max_epochs=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            loader = torch.utils.data.DataLoader(batches, batch_size=None)
            found = Tuner(trainer).lr_find(Module(), train_dataloaders=loader)
        suggested = found.suggestion() if found else None
        steps = len(found.results["lr"]) if found else 0
        return suggested or 1e-3, None, {"steps": steps, "suggested": suggested}


def run(job: Job, known: list[Cell], text: Path | None, record: Path, only: list[str] | None) -> str:
    """Make the missing trainings of a job, and append each to the record."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started, bench = time.perf_counter(), Bench(*job, text)
    mine = [cell for cell in known if key(cell) == (*job, name_of(text))]

    def keep(cell: Cell, what: str) -> None:
        cell = {"problem": job[0], "optimizer": job[1], "seed": job[2], "what": what, **cell}
        mine.append(cell | {"text": name_of(text)})
        with open(record, "a", encoding="utf-8") as lines:  # one short write: workers do not mix
            lines.write(json.dumps(mine[-1]) + "\n")

    with reproducible():
        for method in methods_of(job[1]):
            if not any(cell["what"] == method for cell in mine) and method in (only or METHODS):
                make = getattr(bench, method, functools.partial(bench.part_of_adamw, method))
                if method in ("advise", "finder"):  # others are too long for cold caches to matter
                    make()
                begun = time.process_time()
                lr, model, more = make()
                cost = (time.process_time() - begun) / bench.step_seconds()
                keep(bench.train(lr, model) | more | {"gradients": cost}, method)
        while "grid" in (only or ["grid"]):
            missing = next_rate(
                {cell["lr"]: counted(cell) for cell in mine if cell["what"] == "grid"}, job[1]
            )
            if missing is None:
                break
            keep(bench.train(missing), "grid")
    return f"{', '.join(map(str, job))}: {time.perf_counter() - started:.0f} s"


def next_rate(losses: dict[float, float], optimizer: str) -> float | None:
    """The next rate of the grid; None where the best one is inside and the loss rises on both sides."""
    if not losses:
        return 2.0 ** OPTIMIZERS[optimizer]
    best, rates = min(losses.values()), sorted(losses)
    for end, factor in ((rates, 0.5), (rates[::-1], 2.0)):
        is_worse = [losses[rate] > WORSE * best for rate in end[:BESIDE]]
        if not (len(is_worse) == BESIDE and all(is_worse)) and abs(math.log2(end[0])) < FURTHEST:
            return end[0] * factor
    return None


def counted(cell: Cell) -> float:
    """The loss; a training that failed, or ended above its first loss, counts with that one."""
    return cell["first"] if cell["loss"] is None else min(cell["loss"], cell["first"])


def name_of(text: Path | None) -> str:
    return "documents" if text is None else text.name


def key(cell: Cell) -> tuple[str, str, int, str]:
    return cell["problem"], cell["optimizer"], cell["seed"], cell["text"]


def read_record(path: Path) -> list[Cell]:
    """The cells of the record; a last line that was cut off is left out."""
    cells = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            cells.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return cells


# --- The tables -------------------------------------------------------------------------------------------


class Outcome:
    """What the grid says of one problem, optimizer and seed, and what each method reached."""

    def __init__(self, cells: list[Cell]) -> None:
        first = cells[0]
        self.problem, self.optimizer, self.seed = first["problem"], first["optimizer"], first["seed"]
        self.grid = {cell["lr"]: counted(cell) for cell in cells if cell["what"] == "grid"}
        self.methods = {cell["what"]: cell for cell in cells if cell["what"] in METHODS}
        self.best_rate = min(self.grid, key=self.grid.__getitem__)
        self.best = self.grid[self.best_rate]

    def times_best(self, method: str) -> float:
        return float(self.methods[method]["lr"] / self.best_rate)

    def is_near(self, method: str) -> bool:
        """Within a factor of 2 of the best rate of the grid."""
        return abs(math.log2(self.times_best(method))) <= 1

    def excess(self, method: str) -> float:
        return counted(self.methods[method]) / self.best - 1

    def fails(self, method: str) -> bool:
        """Whether training at that rate ends where it began."""
        return counted(self.methods[method]) >= 0.98 * self.methods[method]["first"]


def outcomes_of(cells: Iterable[Cell]) -> list[Outcome]:
    """Those that are complete, in the order of the problems."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    whole = [
        Outcome(group)
        for group in groups.values()
        if {*methods_of(group[0]["optimizer"]), "grid"} <= {cell["what"] for cell in group}
    ]
    places = {name: place for place, name in enumerate(PROBLEMS)}
    return sorted(
        whole, key=lambda one: (places[one.problem], list(OPTIMIZERS).index(one.optimizer), one.seed)
    )


def summarize(title: str, found: list[Outcome]) -> None:
    print(f"\n{title}: {len(found)} cells")
    print(
        f"{'':26}{'within 2':>10}{'excess, median':>16}{'mean':>8}{'fails':>7}"
        f"{'gradients, median':>19}{'most':>6}"
    )
    for method, name in METHODS.items():
        some = [one for one in found if method in one.methods]
        if not some:
            continue
        near = statistics.fmean(one.is_near(method) for one in some)
        excess = [one.excess(method) for one in some]
        cost = [one.methods[method]["gradients"] for one in some]
        fails = sum(one.fails(method) for one in some)
        shown = "-" if method == "auto" else f"{near:.0%}"  # its weights are others
        print(
            f"{name:26}{shown:>10}{statistics.median(excess):>16.1%}{statistics.fmean(excess):>8.0%}"
            f"{fails:>7}{statistics.median(cost):>19.0f}{max(cost):>6.0f}"
        )


def show(cells: list[Cell]) -> None:
    found = outcomes_of(cells)
    if not found:
        raise SystemExit("The record holds no complete cell.")
    print("Rates as multiples of the best of the grid, and excess loss (loss / best of the grid − 1).")
    for names in (tuple(CLOSED_FORMS), tuple(OPTIMIZERS)[3:]):
        methods = list(dict.fromkeys(method for name in names for method in methods_of(name)))
        print(f"\n{'problem':16}{'optimizer':14}{'seed':>4}{'best':>10}{'loss':>8} |" + "".join(
            f"{name:>22}" for name in methods
        ))  # fmt: skip
        for one in (one for one in found if one.optimizer in names):
            shown = "".join(
                f"{one.times_best(m):>12.2f}×{one.excess(m):>9.1%}" for m in methods if m in one.methods
            )
            best = f"{one.best_rate:>10.3g}{one.best:>8.3f}"
            print(f"{one.problem:16}{one.optimizer:14}{one.seed:>4}{best} |{shown}")
        some = [one for one in found if one.optimizer in names]
        for title, problems in (
            ("All", tuple(PROBLEMS)), ("Development", DEVELOPMENT), ("The others", tuple(PROBLEMS)[6:])
        ):  # fmt: skip
            if those := [one for one in some if one.problem in problems]:
                summarize(f"{title} ({', '.join(names)})", those)
    for optimizer in OPTIMIZERS:
        if some := [one for one in found if one.optimizer == optimizer]:
            summarize(optimizer, some)


def draw(cells: list[Cell], path: Path) -> None:
    """Rate over the best of the grid, and excess loss, of `advise` and the finder; a panel per optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = outcomes_of(cells)
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
    marks = {"advise": ("o", "C0"), "finder": ("x", "C1")}
    for axis, optimizer in zip(axes, CLOSED_FORMS, strict=True):
        axis.axvspan(0.5, 2, color="0.9", label="within a factor 2 of the best rate")
        for method, (mark, colour) in marks.items():
            some = [one for one in found if one.optimizer == optimizer]
            excess = [max(100 * one.excess(method), 0.1) for one in some]
            axis.plot(
                [one.times_best(method) for one in some], excess, mark, color=colour, label=METHODS[method]
            )
        axis.axhline(5, color="0.6", linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=optimizer, xlabel="learning rate / best of the grid")
    axes[0].set_ylabel("excess loss after 300 steps (%)")
    axes[-1].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=["all", "development"], default="all")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--text", type=Path, help="the text of the language models")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--optimizers", nargs="+", choices=[*OPTIMIZERS], default=[*OPTIMIZERS])
    parser.add_argument("--only", nargs="+", choices=[*METHODS, "grid"], help="make these only")
    parser.add_argument("--fresh", nargs="+", choices=[*METHODS, "grid"], help="make these again")
    parser.add_argument("--show", action="store_true", help="train nothing; print the tables")
    parser.add_argument("--draw", type=Path, metavar="PNG", help="train nothing; draw the picture")
    arguments = parser.parse_args()
    cells = read_record(arguments.record)
    if arguments.draw:
        draw(cells, arguments.draw)
    if arguments.show or arguments.draw:
        if arguments.show:
            show(cells)
        return
    names = DEVELOPMENT if arguments.set == "development" else tuple(PROBLEMS)

    def is_fresh(cell: Cell) -> bool:
        chosen = cell["problem"] in names and cell["optimizer"] in arguments.optimizers
        return chosen and cell["what"] in arguments.fresh

    if arguments.fresh:
        cells = [c for c in cells if not is_fresh(c)]
        arguments.record.write_text("".join(json.dumps(cell) + "\n" for cell in cells), encoding="utf-8")
    jobs = [(name, optimizer, seed) for seed in SEEDS for name in names for optimizer in arguments.optimizers]
    started, work = time.perf_counter(), (cells, arguments.text, arguments.record, arguments.only)
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        running = {pool.submit(run, job, *work): job for job in jobs}
        for future in as_completed(running):
            failure = future.exception()
            told = future.result() if failure is None else f"{running[future]}: {failure!r}"
            print(told, flush=True)
    print(f"{time.perf_counter() - started:.0f} s; record {arguments.record}")
    show(read_record(arguments.record))


if __name__ == "__main__":
    main()
