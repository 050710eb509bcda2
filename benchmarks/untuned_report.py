"""The tables and the picture of `untuned.py`, from its record."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from untuned_contestants import FREE, GRID, RATES
from untuned_tasks import TASKS

Cell = dict[str, Any]
Key = tuple[str, str, int, int, str]
Pair = tuple[str, str]  # a task and an optimizer
NEAR = 0.03
CLIPPED = 1.0  # excess at which the picture ends
AVERAGED = (300, 1000)
STARTS = {"grid": "own weights", "he": "He", "lsuv": "LSUV", "fit": "fit", "fit+data": "fit, data"}
OTHER_STARTS = ("grid", "he", "lsuv")
METHODS = ("advise", "advise+data", "auto", "finder")
OURS = ("advise", "advise+data", "auto")
BUDGET = "budget of "
MIDDLE = " | ".join(f"{rates[1]:g}" for rates in RATES.values())
FREE_ROWS = {
    "Prodigy": {"adamw": "prodigy"},
    "Prodigy, guarded": {"adamw": "prodigy guarded"},
    "D-Adaptation": {"adamw": "dadapt", "momentum": "dadapt"},
    "L-DoG | DoG": {"adamw": "ldog", "momentum": "dog"},
    "Schedule-Free": {"adamw": "schedulefree", "momentum": "schedulefree"},
}
COLOURS = {"adamw": "C0", "momentum": "C1"}
OURS_COLOUR, OTHERS_COLOUR = "#a5d6b7", "0.85"


def key_of(cell: Cell) -> Key:
    return cell["task"], cell["optimizer"], cell["horizon"], cell["seed"], cell["contestant"]


def read_records(paths: Iterable[Path]) -> dict[Key, Cell]:
    """The newest cell of every key; a last line that was cut off is left out."""
    cells = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                cell = json.loads(line)
                if "contestant" in cell:
                    cells[key_of(cell)] = cell
    return cells


# --- What the record says ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of a table: its name, and the contestant that it means under each optimizer."""

    label: str
    contestants: dict[str, str]

    def of(self, pair: Pair) -> str | None:
        return self.contestants.get(pair[1])


@dataclass(frozen=True)
class Results:
    """The cells of the chosen tasks and seeds."""

    cells: dict[Key, Cell]
    tasks: Sequence[str]
    seeds: Sequence[int]

    def pairs(self, horizons: Sequence[int]) -> list[Pair]:
        """The pairs whose grid is complete at these horizons."""
        every = [(task, optimizer) for task in self.tasks for optimizer in TASKS[task].optimizers]
        return [pair for pair in every if all(self.has_grid(pair, horizon) for horizon in horizons)]

    def has_grid(self, pair: Pair, horizon: int) -> bool:
        return all(self.of(pair, horizon, f"grid {rate:g}") for rate in GRID[pair[1]])

    def of(self, pair: Pair, horizon: int, contestant: str) -> list[Cell]:
        """The cells of all seeds; none where one is missing."""
        keys = [(*pair, horizon, seed, contestant) for seed in self.seeds]
        return [self.cells[key] for key in keys] if all(key in self.cells for key in keys) else []

    def loss(self, pair: Pair, horizon: int, contestant: str) -> float | None:
        """The mean held-out loss over the seeds."""
        if contestant.startswith(BUDGET):
            return self.budget_loss(pair, horizon, contestant.removeprefix(BUDGET))
        cells = self.of(pair, horizon, contestant)
        return statistics.fmean(map(counted, cells)) if cells else None

    def budget_loss(self, pair: Pair, horizon: int, contestant: str) -> float | None:
        """That of the best rate of a grid that costs what the contestant's search and training cost.

        Of each seed the rates are trained in the order in which people try them, and the best is taken.
        """
        losses = []
        for number, cell in enumerate(self.of(pair, horizon, contestant)):
            affordable = 1 + int((cell.get("search") or 0) // horizon)
            rates = GRID[pair[1]][:affordable]
            losses.append(min(counted(self.of(pair, horizon, f"grid {rate:g}")[number]) for rate in rates))
        return statistics.fmean(losses) if losses else None

    def best(self, pair: Pair, horizon: int) -> tuple[float, float]:
        """The best rate of the grid by the mean over the seeds, and its loss."""
        losses = {rate: self.loss(pair, horizon, f"grid {rate:g}") or 0.0 for rate in GRID[pair[1]]}
        rate = min(losses, key=losses.__getitem__)
        return rate, losses[rate]

    def excess(self, pair: Pair, horizons: Sequence[int], contestant: str | None) -> float | None:
        """Loss over the best of the grid − 1, averaged over the horizons."""
        if contestant is None:
            return None
        excesses = []
        for horizon in horizons:
            loss = self.loss(pair, horizon, contestant)
            if loss is None:
                return None
            excesses.append(loss / self.best(pair, horizon)[1] - 1)
        return statistics.fmean(excesses)

    def excesses(self, pairs: Iterable[Pair], horizons: Sequence[int], row: Row) -> dict[Pair, float]:
        """Those of all pairs that have this row."""
        found = {pair: self.excess(pair, horizons, row.of(pair)) for pair in pairs}
        return {pair: excess for pair, excess in found.items() if excess is not None}

    def searched(self, pairs: Iterable[Pair], horizons: Sequence[int], row: Row) -> list[Cell]:
        """All cells of a row."""
        return [
            cell
            for pair in pairs
            for horizon in horizons
            for cell in self.of(pair, horizon, row.of(pair) or "")
        ]


def counted(cell: Cell) -> float:
    """The held-out loss; a training that failed counts with the first one."""
    return cell["first"] if cell["loss"] is None else min(cell["loss"], cell["first"])


def all_rows() -> list[Row]:
    """Every contestant; rates of the two optimizers that correspond share a line."""
    rows = []
    for start, label in STARTS.items():
        for rates in zip(*RATES.values(), strict=True):
            shown = " | ".join(f"{rate:g}" for rate in rates)
            contestants = {
                optimizer: f"{start} {rate:g}" for optimizer, rate in zip(RATES, rates, strict=True)
            }
            rows.append(Row(f"{label}, {shown}", contestants))
    for method in METHODS:
        rows.append(Row(method, dict.fromkeys(RATES, method)))
    for name in OURS:
        rows.append(Row(f"grid in the {BUDGET}{name}", dict.fromkeys(RATES, f"{BUDGET}{name}")))
    return rows + [Row(label, contestants) for label, contestants in FREE_ROWS.items()]


def is_ours(row: Row) -> bool:
    names = {name.split()[0] for name in row.contestants.values()}
    return bool(names & {"fit", "fit+data", *OURS})


# --- Tables -----------------------------------------------------------------------------------------------


def show(cells: dict[Key, Cell], tasks: Sequence[str], seeds: Sequence[int]) -> None:
    results = Results(cells, tasks, seeds)
    horizons = sorted({key[2] for key in cells if key[0] in tasks})
    if not any(results.pairs([horizon]) for horizon in horizons):
        raise SystemExit("The record holds no complete grid of these tasks and seeds.")
    print(
        "Excess of the held-out loss: that after the training, over that at the best of six rates from\n"
        f"PyTorch's own weights, − 1. Mean over seeds {', '.join(map(str, seeds))}. Rates are those for "
        "AdamW | SGD with momentum.\nSearch: in training steps. Beats budget: not worse than the best rate "
        "of a grid that costs as much."
    )
    groups = [[horizon] for horizon in horizons if results.pairs([horizon])]
    if len(results.pairs(AVERAGED)) > 0:
        groups.append(list(AVERAGED))
    for group in groups:
        show_horizons(results, group)


def show_horizons(results: Results, horizons: list[int]) -> None:
    pairs = results.pairs(horizons)
    title = " and ".join(map(str, horizons))
    print(f"\n{'=' * 110}\n{title} steps: {len(pairs)} pairs of a task and an optimizer\n{'=' * 110}")
    summarize("All contestants", results, pairs, horizons, all_rows())
    show_pairs(results, pairs, horizons)
    show_starts(results, pairs, horizons)
    show_robustness(results, pairs, horizons)
    for optimizer, names in FREE.items():
        some = [pair for pair in pairs if pair[1] == optimizer]
        rates = [f"{start} {RATES[optimizer][1]:g}" for start in STARTS]
        rows = [Row(name, {optimizer: name}) for name in (*names, *METHODS, *rates)]
        if some:
            summarize(
                f"Learning-rate-free optimizers, on the tasks of {optimizer}", results, some, horizons, rows
            )


def summarize(
    title: str, results: Results, pairs: list[Pair], horizons: Sequence[int], rows: list[Row]
) -> None:
    """A line per contestant: the distribution of its excess over the pairs."""
    print(
        f"\n{title}\n{'':34}{'median':>8}{'mean':>8}{'w/o best':>9}{'≤ 3 %':>7}{'fails':>6}{'search':>8}"
        f"{'beats budget':>13}{'pairs':>6}   worst"
    )
    for row in rows:
        excesses = results.excesses(pairs, horizons, row)
        if not excesses:
            continue
        values = sorted(excesses.values())
        without_best = statistics.fmean(values[1:]) if len(values) > 1 else values[0]
        near = statistics.fmean(value <= NEAR for value in values)
        cells = results.searched(excesses, horizons, row)
        fails = sum(bool(cell["failed"]) for cell in cells)
        searches = [cell["search"] for cell in cells if cell.get("search") is not None]
        steps = f"{statistics.median(searches):.0f}" if any(searches) else ""
        failures = str(fails) if cells else ""
        beats = f"{share_beating_budget(results, excesses, horizons, row):.0%}" if is_ours(row) else ""
        worst = max(excesses, key=excesses.__getitem__)
        print(
            f"{row.label:34}{statistics.median(values):>8.1%}{statistics.fmean(values):>8.1%}"
            f"{without_best:>9.1%}{near:>7.0%}{failures:>6}{steps:>8}{beats:>13}{len(values):>6}"
            f"   {excesses[worst]:+.0%} {name_of(worst)}"
        )


def share_beating_budget(
    results: Results, excesses: dict[Pair, float], horizons: Sequence[int], row: Row
) -> float:
    """In which share of the pairs a row is not worse than a grid of the same budget."""
    wins = []
    for pair, excess in excesses.items():
        budget = results.excess(pair, horizons, f"{BUDGET}{row.of(pair)}")
        wins.append(budget is not None and excess <= budget)
    return statistics.fmean(wins)


def show_pairs(results: Results, pairs: list[Pair], horizons: Sequence[int]) -> None:
    """A line per task and optimizer: the excess of the main contestants."""
    columns = [
        *[Row(f"{STARTS[start]}", _middle(start)) for start in STARTS],
        *[Row(method, dict.fromkeys(RATES, method)) for method in METHODS],
        Row("in budget", dict.fromkeys(RATES, f"{BUDGET}auto")),
        Row("prodigy", {"adamw": "prodigy"}),
        Row("sched.-free", dict.fromkeys(RATES, "schedulefree")),
    ]
    print(f"\nExcess of each pair; starts at {MIDDLE}, in budget: the grid that costs what auto costs")
    print(f"{'':24}{'best rate and loss':>20}  " + "".join(f"{column.label:>12}" for column in columns))
    at_ends = 0
    for pair in pairs:
        rate, loss = results.best(pair, horizons[-1])
        is_at_end = rate in (min(GRID[pair[1]]), max(GRID[pair[1]]))
        at_ends += is_at_end
        shown = [results.excess(pair, horizons, column.of(pair)) for column in columns]
        values = "".join(f"{'' if value is None else format(value, '+.1%'):>12}" for value in shown)
        print(f"{name_of(pair):24}{rate:>10g}{'*' if is_at_end else ' '}{loss:>9.4f}  {values}")
    if at_ends:
        print(f"* The best rate is at an end of the grid ({at_ends} of {len(pairs)} pairs).")


def _middle(start: str) -> dict[str, str]:
    return {optimizer: f"{start} {rates[1]:g}" for optimizer, rates in RATES.items()}


def show_starts(results: Results, pairs: list[Pair], horizons: Sequence[int]) -> None:
    """Fitted weights against other starts at the same three rates."""
    means: dict[str, dict[Pair, float]] = {}
    for start in STARTS:
        by_pair = {pair: rates_mean(results, pair, horizons, start) for pair in pairs}
        means[start] = {pair: value for pair, value in by_pair.items() if value is not None}
    print("\nStarts at the same three rates: mean excess over the rates and the pairs")
    for start, label in STARTS.items():
        if means[start]:
            values = means[start].values()
            print(f"{label:34}{statistics.fmean(values):>8.1%}{len(values):>6} pairs")
    for start in ("fit", "fit+data"):
        common = [pair for pair in pairs if all(pair in means[name] for name in (start, *OTHER_STARTS))]
        if not common:
            continue
        best = min(OTHER_STARTS, key=lambda name: statistics.fmean(means[name][pair] for pair in common))
        against = [best] if best == "grid" else ["grid", best]
        for other in against:
            ratios = {
                (pair, rate): ratio_at(results, pair, horizons, (start, other), rate)
                for pair in common
                for rate in RATES[pair[1]]
            }
            worst = max(ratios, key=ratios.__getitem__)
            values = list(ratios.values())
            better = statistics.fmean(value < 0 for value in values)
            is_best = ", the best single other start" if other == best else ""
            print(
                f"{STARTS[start]} against {STARTS[other]}{is_best}: mean {statistics.fmean(values):+.1%}, "
                f"median {statistics.median(values):+.1%}, better in {better:.0%} of {len(values)} cells, "
                f"worst {ratios[worst]:+.0%} ({name_of(worst[0])}, {worst[1]:g})"
            )


def rates_mean(
    results: Results, pair: Pair, horizons: Sequence[int], start: str, rates: Sequence[float] = ()
) -> float | None:
    """The mean excess over rates, by default the three at which all starts are compared."""
    found = [results.excess(pair, horizons, f"{start} {rate:g}") for rate in rates or RATES[pair[1]]]
    known = [excess for excess in found if excess is not None]
    return statistics.fmean(known) if len(known) == len(found) else None


def ratio_at(
    results: Results, pair: Pair, horizons: Sequence[int], starts: tuple[str, str], rate: float
) -> float:
    """The loss from the first start over that from the second at the same rate, − 1."""
    ratios = []
    for horizon in horizons:
        losses = [results.loss(pair, horizon, f"{start} {rate:g}") or 0.0 for start in starts]
        ratios.append(losses[0] / losses[1] - 1)
    return statistics.fmean(ratios)


def show_robustness(results: Results, pairs: list[Pair], horizons: Sequence[int]) -> None:
    """How much a rate matters: the mean excess over rates, in normalized and plain networks."""
    kinds: dict[str, Callable[[Pair], bool]] = {
        "normalized": lambda pair: TASKS[pair[0]].normalized,
        "plain": lambda pair: not TASKS[pair[0]].normalized,
        "all": lambda pair: True,
    }
    print("\nMean excess over rates (0: the rate does not matter)\n" + " " * 34 + "".join(
        f"{kind:>12}" for kind in kinds
    ))  # fmt: skip
    lines = [(f"{label}, three rates", start, None) for start, label in STARTS.items()]
    for label, start, grid in [*lines, ("own weights, six rates", "grid", GRID)]:
        shown = []
        for belongs in kinds.values():
            some = [pair for pair in pairs if belongs(pair)]
            values = [
                rates_mean(results, pair, horizons, start, grid[pair[1]] if grid else ()) for pair in some
            ]
            known = [value for value in values if value is not None]
            shown.append(f"{statistics.fmean(known):>12.1%}" if known else f"{'':>12}")
        if any(map(str.strip, shown)):
            print(f"{label:34}{''.join(shown)}")


def name_of(pair: Pair) -> str:
    return f"{pair[0]}, {pair[1]}"


# --- The picture ------------------------------------------------------------------------------------------


def drawn_rows() -> list[Row]:
    """What the picture shows: own weights at three rates, other starts at the middle one, all methods."""
    middle = [Row(f"{label}, {MIDDLE}", _middle(start)) for start, label in STARTS.items()]
    others = [row for row in all_rows() if not any(row.label.startswith(label) for label in STARTS.values())]
    own = [row for row in all_rows() if row.label.startswith(STARTS["grid"])]
    return [*own, *middle[1:], *others]


def draw(cells: dict[Key, Cell], tasks: Sequence[str], seeds: Sequence[int], path: Path) -> None:
    """The excess of every pair as a dot, a line per contestant, and the mean as a bar and a number."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = Results(cells, tasks, seeds)
    horizons = list(AVERAGED) if results.pairs(AVERAGED) else sorted({key[2] for key in cells})[:1]
    pairs = results.pairs(horizons)
    drawn = [(row, results.excesses(pairs, horizons, row)) for row in drawn_rows()]
    drawn = [(row, excesses) for row, excesses in drawn if excesses]
    figure, axis = pyplot.subplots(figsize=(9, 1.6 + 0.3 * len(drawn)), layout="constrained")
    for place, (row, excesses) in enumerate(drawn):
        mean = statistics.fmean(excesses.values())
        colour = OURS_COLOUR if is_ours(row) else OTHERS_COLOUR
        axis.barh(place, 100 * min(mean, CLIPPED), height=0.66, color=colour, zorder=1)
        axis.text(1.02, place, f"{mean:+.0%}", transform=axis.get_yaxis_transform(), va="center")
        for pair, excess in excesses.items():
            # Optimizers side by side: dots of equal excess do not hide each other.
            height = place + (0.14 if pair[1] == "momentum" else -0.14)
            mark = ">" if excess > CLIPPED else "o"
            axis.plot(
                100 * min(excess, CLIPPED), height, mark, color=COLOURS[pair[1]],
                markersize=4.5, alpha=0.85, zorder=3, clip_on=False,
            )  # fmt: skip
    for optimizer, colour in COLOURS.items():
        axis.plot([], [], "o", color=colour, markersize=4.5, label=f"a task with {optimizer}")
    axis.plot([], [], ">", color="0.3", markersize=4.5, label=f"more than +{CLIPPED:.0%}")
    axis.barh([0], [0], color=OURS_COLOUR, label="mean, hessinit")
    axis.barh([0], [0], color=OTHERS_COLOUR, label="mean, others")
    axis.axvline(0, color="0.2", linewidth=0.9, zorder=2)
    lowest = min(min(excesses.values()) for _, excesses in drawn)
    axis.set_xlim(100 * min(lowest, 0) - 5, 100 * CLIPPED)
    axis.set_ylim(len(drawn) - 0.4, -0.6)
    axis.set_yticks(range(len(drawn)), [row.label for row, _ in drawn])
    axis.text(1.02, -0.8, "mean", transform=axis.get_yaxis_transform(), va="bottom")
    axis.grid(axis="x", color="0.9")
    axis.set_axisbelow(True)
    steps = " and ".join(map(str, horizons))
    axis.set_xlabel(
        f"held-out loss over that of the best of six rates from PyTorch's weights (%), {steps} steps"
    )
    figure.legend(loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)
