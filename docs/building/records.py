"""Fill numbers and tables of the documents from the records: python docs/building/records.py

A number is followed by an HTML comment that names an entry of `NUMBERS`: `44<!--untuned-hessinit--> %`. Where
a record is incomplete, – stands in its place.
A table stands between `<!--table NAME-->` and `<!--end-->`, where NAME is an entry of `TABLES`. The tests
compare every document with its records; this command writes what they find stale. The records are those of
`benchmarks/results`, and the versions that `constraints-*.txt` pin.
"""

from __future__ import annotations

import functools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

NUMBER = re.compile(r"(?P<number>[+−]?\d[\d.,]*(?:e[-+]?\d+)?|–)<!--(?P<name>[^>]+?)-->")
TABLE = re.compile(r"(?<=<!--table )(?P<name>[^>]+?)-->\n.*?(?=<!--end-->)", re.S)
COMMENT = re.compile(r"<!--(?:table )?(?P<name>[^>]+?)-->")
FENCE = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.M | re.S)


# --- Reading the records ----------------------------------------------------------------------------------


@functools.cache
def text_of(record: str) -> str:
    return (ROOT / record if record.startswith("constraints") else RESULTS / record).read_text("utf-8")


@functools.cache
def json_of(record: str) -> Any:
    return json.loads(text_of(record))


def found_in(record: str, pattern: str, count: int = 0) -> str:
    """The first group of the first match of `pattern` in a record that is text, or of a later match."""
    return [match[1] for match in re.finditer(pattern, text_of(record), re.M | re.S)][count]


def section(title: str) -> str:
    """The part of the arena's scores below "Rate robustness, TITLE": its two tables and its failures."""
    parts = re.split(r"^Rate robustness, ", text_of("arena.txt"), flags=re.M)
    return next(part for part in parts if " ".join(part.split()).startswith(title))


ON_RECORD = "17 tasks. On record, hessinit start"
RACED = "15 tasks. On record, hessinit + race start"
NORMALIZED = "7 tasks. Normalized, new, hessinit start"
LARGE = "9 tasks. GPU set, hessinit + race start"


def untuned(title: str, start: str) -> str:
    """What a learning rate that nobody tuned costs from `start`, in per cent of the lowest loss on record."""
    return f"{100 * robustness(title, start):.0f}"


def robustness(title: str, start: str) -> float:
    """Loss over the lowest loss on record, less 1, on average over the rates of a section's tasks."""
    return float(re.search(rf"^{re.escape(start)} +(\d\.\d+) *$", section(title), re.M)[1])


def regret(title: str, start: str) -> str:
    """The cell in which `start` is furthest behind the best other start, in per cent."""
    worst = re.search(rf"^{re.escape(start)} .*? % +\S+ % +\+(\S+) %", section(title), re.M)
    return f"{float(worst[1]):.0f}"


def cells(title: str) -> str:
    return re.search(r"(\d+) cells", section(title))[1]


def failures(title: str) -> str:
    """How often hessinit fails in a cell in which another start trains."""
    return str(len(re.findall(r"^hessinit.* fails where another trains", section(title), re.M)))


def silent_errors(*keys: str) -> str:
    """The sum of these counts of the random problems that were compared with dense truth."""
    return f"{sum(json_of('silent_errors.json')['summary'][key] for key in keys):,}"


def refused(which: Callable[[list[int]], int], kind: str) -> str:
    """The lowest or highest number of random networks of a kind that the derivative check refuses."""
    summary = json_of("check_power.json")["summary"]
    return str(which([row.get("refused", 0) for name, row in summary.items() if name.endswith(kind)]))


def plain(curvature: str, key: str, record: str = "plain_engine.json") -> str:
    """An entry of the summary of benchmarks/plain_engine.py, for a curvature."""
    value = json_of(record)["summary"][curvature][key]
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}"


@functools.cache
def answers(*options: str) -> str:
    """What `python benchmarks/answers.py show` prints of its records."""
    command = [sys.executable, str(ROOT / "benchmarks" / "answers.py"), "show", *options]
    return subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout


def answered(pattern: str, *options: str) -> str:
    return re.search(pattern, answers(*options), re.M | re.S)[1]


# What nobody tuned: rows of its tables, by the contestants of benchmarks/untuned.py.
UNTUNED_ROWS = {
    "adamw": {
        "auto": ('`initialize_(lr="auto", data=…)`', "auto"),
        "advise-data": ("`advise(data=…)`", "advise+data"),
        "advise": ("`advise`, one batch", "advise"),
        "budget": ("best of a grid of the first row's cost", "budget of auto"),
        "adamw-1e-3": ("AdamW, 1e-3", "grid 0.001"),
        "adamw-3e-4": ("AdamW, 3e-4", "grid 0.0003"),
        "prodigy": ("Prodigy", "prodigy"),
        "dadapt": ("D-Adaptation", "dadapt"),
        "dog": ("L-DoG", "ldog"),
        "schedulefree": ("Schedule-Free AdamW", "schedulefree"),
        "finder": ("Lightning's finder", "finder"),
    },
    "momentum": {
        "auto": ('`initialize_(lr="auto", data=…)`', "auto"),
        "advise-data": ("`advise(data=…)`", "advise+data"),
        "advise": ("`advise`, one batch", "advise"),
        "budget": ("best of a grid of the first row's cost", "budget of auto"),
        "sgd-0.1": ("SGD with momentum, 0.1", "grid 0.1"),
        "sgd-0.01": ("SGD with momentum, 0.01", "grid 0.01"),
        "dadapt": ("D-Adaptation", "dadapt"),
        "dog": ("DoG", "dog"),
        "schedulefree": ("Schedule-Free SGD", "schedulefree"),
        "finder": ("Lightning's finder", "finder"),
    },
}
UNTUNED_COLUMNS = ("median", "mean", "worst", "fails", "search")
UNKNOWN = "–"


@functools.cache
def untuned_results(*first: str) -> tuple[Any, Any]:
    """The module `untuned_report`, and its results of the held-out tasks; cells of `first` win."""
    environment = dict(os.environ)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import untuned_report
        import untuned_tasks
    finally:
        sys.path.remove(str(BENCHMARKS))
        os.environ.clear()
        os.environ.update(environment)  # the benchmark asks for one thread
    cells = untuned_report.read_records([RESULTS / record for record in ("untuned.jsonl", *first)])
    return untuned_report, untuned_report.Results(cells, untuned_tasks.HELD_OUT, (0, 1))


@functools.cache
def untuned_row(optimizer: str, row: str, *first: str) -> dict[str, str]:
    """Held-out loss over the best of six rates, failed trainings, and the cost of the search in steps.

    The tasks are those whose grid is on record; unknown where one of them lacks this row.
    """
    report, results = untuned_results(*first)
    horizons = report.AVERAGED
    pairs = [pair for pair in results.pairs(horizons) if pair[1] == optimizer]
    label, contestant = UNTUNED_ROWS[optimizer][row]
    shown = report.Row(label, {optimizer: contestant})
    values = list(results.excesses(pairs, horizons, shown).values())
    if not pairs or len(values) < len(pairs):
        return dict.fromkeys(UNTUNED_COLUMNS, UNKNOWN)
    searching = report.Row(label, {optimizer: contestant.removeprefix(report.BUDGET)})
    cells = results.searched(pairs, horizons, shown)
    searches = [cell.get("search") or 0.0 for cell in results.searched(pairs, horizons, searching)]
    fails = str(sum(bool(cell["failed"]) for cell in cells)) if cells else UNKNOWN
    return {
        "median": signed(statistics.median(values)),
        "mean": signed(statistics.fmean(values)),
        "worst": signed(max(values)),
        "fails": fails,
        "search": f"{statistics.median(searches):.0f}",
    }


def signed(excess: float) -> str:
    """An excess in per cent, with two figures or more."""
    digits = 1 if abs(excess) < 0.0995 else 0
    return f"{100 * excess:+.{digits}f}".replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")


def untuned_number(optimizer: str, row: str, column: str, *first: str) -> str:
    return untuned_row(optimizer, row, *first)[column]


def untuned_table(optimizer: str) -> str:
    """A line for each way to a rate: excess in per cent, failures, cost."""
    lines = ["| | median | mean | worst | failed | search, in steps |", "|---" * 6 + "|"]
    for row, (label, _) in UNTUNED_ROWS[optimizer].items():
        found = untuned_row(optimizer, row)
        shown = [found[name] + (" %" if found[name] != UNKNOWN else "") for name in UNTUNED_COLUMNS[:3]]
        lines.append(f"| {label} | {' | '.join(shown)} | {found['fails']} | {found['search']} |")
    return "\n".join(lines)


def untuned_count(optimizer: str) -> str:
    """How many tasks the table is about."""
    report, results = untuned_results()
    return str(sum(pair[1] == optimizer for pair in results.pairs(report.AVERAGED)))


def untuned_trainings(optimizer: str) -> str:
    """How many trainings a row is about."""
    report, results = untuned_results()
    return str(int(untuned_count(optimizer)) * len(report.AVERAGED) * len(results.seeds))


PROBLEMS = {
    "mlp-n32": "MLP n=32",
    "mlp-n128": "MLP n=128",
    "lenet-n32": "LeNet n=32",
    "lenet-n128": "LeNet n=128",
    "vgg8-n32": "VGG-8 n=32",
}


def cost_table(rows: dict[str, tuple[str, str]]) -> str:
    """Gradients and errors: what a row shows → the curvature and the contestant of the record."""
    recorded = json_of("curvature_cost.json")["cells"]
    activations = {"gauss-newton": "relu", "hessian": "tanh"}
    lines = [f"| | {' | '.join(PROBLEMS.values())} |", "|---" * (1 + len(PROBLEMS)) + "|"]
    for shown, (curvature, contestant) in rows.items():
        keys = [f"{problem}-{activations[curvature]}/{curvature}/{contestant}" for problem in PROBLEMS]
        lines.append(f"| {shown} | {' | '.join(cost(recorded[key]) for key in keys)} |")
    return "\n".join(lines)


def cost(cell: dict[str, Any]) -> str:
    three_figures = f"{cell['gradients']:.3g}"
    gradients = f"{float(three_figures):.0f}"
    if cell["status"] == "capped":
        return f"> {gradients}"
    mantissa, exponent = f"{cell['max_error']:.0e}".split("e")
    return f"{gradients} · {mantissa}e{int(exponent)}"


# --- What the documents name ------------------------------------------------------------------------------

WRONG = r"^held out: (\d+) of (\d+) .*?\((\S+)%\); (\d+) of (\d+) .*?\((\S+)%\)"
OLD_FAILS = r"^fails: (\d+)"
TRAIN = r"(\d+) train$"
VERDICTS = r"== answers-verdicts: .*?^multiples: false alarms "
STARTS = {"hessinit": "» hessinit", "lsuv": "lsuv", "he": "he", "pytorch": "default"}


def soundness(group: int) -> Callable[[], str]:
    return lambda: re.search(WRONG, text_of("soundness.txt"), re.M)[group]


PLAIN = {
    "norms": "norms",
    "hold": "stated errors that hold",
    "gross": "gross",
    "lanczos": "time over that of estimator='lanczos', median",
    "auto": "time over that of estimator='auto', median",
}
NUMBERS: dict[str, Callable[[], str]] = {
    # The plain engine on the problems of the tests and on random ones, and under autocast
    **{
        f"plain-bf16-{name}": functools.partial(plain, "gauss-newton", key, "plain_bf16.json")
        for name, key in {**PLAIN, "within": "all norms: within 0.05"}.items()
    },
    **{
        f"plain-{curvature}-{name}": functools.partial(plain, curvature, key)
        for curvature in ("gauss-newton", "hessian")
        for name, key in PLAIN.items()
    },
    # Starts at learning rates that nobody tuned: the arena
    **{f"untuned-{name}": functools.partial(untuned, ON_RECORD, start) for name, start in STARTS.items()},
    **{f"normalized-{name}": functools.partial(untuned, NORMALIZED, start) for name, start in STARTS.items()},
    **{
        f"large-{name}": functools.partial(untuned, LARGE, start + " + race" * (name == "hessinit"))
        for name, start in STARTS.items()
    },
    "large-worst": lambda: regret(LARGE, "» hessinit + race"),
    "large-failures": lambda: failures(LARGE),
    "large-cells": lambda: cells(LARGE),
    "untuned-exactly": lambda: f"{robustness(ON_RECORD, '» hessinit'):.3f}",
    "untuned-picked": lambda: f"{robustness(ON_RECORD, 'best other, picked at every rate'):.3f}",
    "untuned-failures": lambda: failures(ON_RECORD),
    "untuned-cells": lambda: cells(ON_RECORD),
    "raced-failures": lambda: failures(RACED),
    "raced-cells": lambda: cells(RACED),
    # Whole trainings at a rate that nobody tuned: benchmarks/untuned.py, the held-out tasks
    **{
        f"nobody-{optimizer}-{row}-{column}": functools.partial(untuned_number, optimizer, row, column)
        for optimizer, rows in UNTUNED_ROWS.items()
        for row in rows
        for column in UNTUNED_COLUMNS
    },
    # The same before the repairs that the first scoring led to
    **{
        f"first-{optimizer}-{row}-{column}": functools.partial(
            untuned_number, optimizer, row, column, "untuned-first.jsonl"
        )
        for optimizer in UNTUNED_ROWS
        for row in ("auto", "advise", "advise-data")
        for column in UNTUNED_COLUMNS
    },
    **{
        f"nobody-{optimizer}-tasks": functools.partial(untuned_count, optimizer) for optimizer in UNTUNED_ROWS
    },
    **{
        f"nobody-{optimizer}-trainings": functools.partial(untuned_trainings, optimizer)
        for optimizer in UNTUNED_ROWS
    },
    # Norms against dense truth
    "random-problems": lambda: silent_errors("problems"),
    "random-norms": lambda: silent_errors("norms"),
    "random-gross-errors": lambda: silent_errors("norms with a gross error"),
    "random-float32": lambda: silent_errors("float32: norms"),
    "random-float32-held": lambda: silent_errors("float32: stated errors that hold"),
    "ordinary-problems": lambda: silent_errors("ordinary problems"),
    "ordinary-refused": lambda: silent_errors("ordinary problems refused"),
    # The check of the derivatives, of 200 wrong and 500 right networks
    "wrong-refused-at-least": lambda: refused(min, "5 % wrong"),
    "wrong-refused-at-most": lambda: refused(max, "5 % wrong"),
    "right-refused": lambda: refused(max, "right"),
    # Verdicts against trainings
    "unsound-alarms": soundness(1),
    "unsound-trains": soundness(2),
    "unsound-found": soundness(4),
    "unsound-fails": soundness(5),
    "verdict-alarms": lambda: answered(VERDICTS + r"(\d+)"),
    "verdict-trains": lambda: answered(VERDICTS + r"\d+ of (\d+)"),
    "verdict-found": lambda: answered(VERDICTS + r".*?caught (\d+)"),
    "verdict-fails": lambda: answered(VERDICTS + r".*?caught \d+ of (\d+)"),
    "verdict-edge-found": lambda: answered(r"^edge: .*?caught (\d+)"),
    "verdict-edge-fails": lambda: answered(r"^edge: .*?caught \d+ of (\d+)"),
    # The advice against grids: cases that were set aside, and the others
    "advice-near-share": lambda: answered(r"of the fall: .*?\((\d+)[.\d]*%\)", "--held-out"),
    "advice-cells": lambda: answered(TRAIN, "--held-out"),
    "advice-fails": lambda: answered(r"^fails: (\d+)", "--held-out"),
    "advice-misses": lambda: answered(r"^does not learn: (\d+)", "--held-out"),
    "advice-old-near-share": lambda: answered(r"of the fall: .*?\((\d+)[.\d]*%\)"),
    "advice-old-cells": lambda: answered(TRAIN),
    "advice-old-fails-share": lambda: f"{100 * int(answered(OLD_FAILS)) / int(answered(TRAIN)):.0f}",
    "advice-old-misses": lambda: answered(r"^does not learn: (\d+)"),
    "invariances": lambda: answered(r"^invariances: \d+ of (\d+)"),
    "invariances-broken": lambda: str(
        int(answered(r"^invariances: \d+ of (\d+)")) - int(answered(r"^invariances: (\d+)"))
    ),
    "warmup-right": lambda: answered(r"^warmup: (\d+)"),
    "warmup-cells": lambda: answered(r"^warmup: \d+ of (\d+)"),
    # Fine-tuning: the half that was set aside, and the best rates of both
    "finetuning-least": lambda: f"{min(best_rates()):.2g}",
    "finetuning-most": lambda: f"{max(best_rates()):.2g}",
    "finetuning-ratio-4": lambda: found_in("finetuning.txt", r"^mean +[+−-](\S+)%"),
    "finetuning-ratio-16": lambda: found_in("finetuning.txt", r"^mean +\S+ +[+−-](\S+)%"),
    # The cost of an initialization, and of the network's row of the exact Hessian, in gradients
    "initialize-median": lambda: f"{statistics.median(costs_of_initialize()):.0f}",
    "initialize-most": lambda: f"{max(costs_of_initialize()):,.0f}",
    "network-row-least": lambda: min(exact_costs(), key=float),
    "network-row-most": lambda: max(exact_costs(), key=float),
    # The cost of parts of a measurement, in plain measurements
    "jacobians-least": lambda: f"{min(parts_of('jacobians')):.0f}",
    "jacobians-most": lambda: f"{max(parts_of('jacobians')):.0f}",
    "diagnostics-least": lambda: f"{min(parts_of('diagnostics')):.1f}",
    "diagnostics-most": lambda: f"{max(parts_of('diagnostics')):.1f}",
    # Biases: the median of five seeds, with PyTorch's weights
    "biases-tanh": lambda: found_in("uncounted.txt", r"^10 tanh layers +(\S+)"),
    "biases-relu": lambda: found_in("uncounted.txt", r"^10 ReLU layers +(\S+)"),
    # Lanczos that misses the largest eigenvalue, in per cent of the seeds
    "missed-at-1-percent": lambda: missed("second 1% below the first"),
    "most-missed": lambda: missed("(?:first|top|categories)"),
    "most-missed-with-two-signs": lambda: missed("beside -[37]"),
    # Signals at random moments
    "signals": lambda: f"{sum(row['signals'] for row in interrupts()):,}",
    "signals-broken": lambda: str(sum(len(row["broken"]) for row in interrupts())),
    # The oldest versions
    **{
        f"oldest-{name}": functools.partial(found_in, "constraints-oldest.txt", rf"^{name}==(\S+)$")
        for name in re.findall(r"^([\w-]+)==", text_of("constraints-oldest.txt"), re.M)
    },
}

PEERS = ("hessinit", "PyHessian", "curvlinops + eigsh", "ViViT")
TABLES: dict[str, Callable[[], str]] = {
    "fine-tuning": lambda: fine_tuning_table(),
    "nobody tuned it": lambda: untuned_table("adamw"),
    "nobody tuned it, momentum": lambda: untuned_table("momentum"),
    "cost of peers": lambda: cost_table({peer: ("gauss-newton", peer) for peer in PEERS}),
    "cost of measuring": lambda: cost_table(
        {
            "Gauss-Newton, ReLU": ("gauss-newton", "hessinit"),
            "… `network=False`": ("gauss-newton", "hessinit, layers only"),
            "exact Hessian, tanh": ("hessian", "hessinit"),
            "… with `network=False`": ("hessian", "hessinit, layers only"),
        }
    ),
}


def best_rates() -> list[float]:
    """The best rate of each grid of fine-tunings."""
    rates = re.findall(r"^.{39} +\d +(\S+) +\S+ +\S+ \|", text_of("finetuning.txt"), re.M)
    return [float(rate) for rate in rates]


def fine_tuning_table() -> str:
    """The scores of advice and rules of thumb on both halves of the base models."""
    lines = ["| | within a factor 2.5 of the best rate | mean excess loss | fails |", "|---" * 4 + "|"]
    for title, shown in (("Set aside", "set aside"), ("Development", "development")):
        part = re.search(rf"^{title}: \d+ cells\n[^\n]*\n(.*?)\n\n", text_of("finetuning.txt"), re.M | re.S)
        for row in part[1].splitlines():
            name, near, _, mean, fails, cells = re.split(r"\s{2,}", row.strip())
            near, mean = near.replace("%", " %"), mean.replace("%", " %")
            lines.append(f"| {name}, {shown} | {near} of {cells} cells | {mean} | {fails} |")
    return "\n".join(lines)


def missed(kind: str) -> str:
    """The largest share of seeds for which Lanczos is further off than stated, in per cent."""
    shares = re.findall(rf"^[^\n]*{kind} +\d+ +\d+ \((\S+)%\)", text_of("unseen_eigenvalues.txt"), re.M)
    return max(shares, key=float)


def costs_of_initialize() -> list[float]:
    rows = re.findall(r"^\S+ +[\d.]+ +(\d+) +[\d.]+ ", text_of("initialize_cost.txt"), re.M)
    return [float(gradients) for gradients in rows]


def exact_costs() -> list[str]:
    """The cost of all layers and the network by the exact Hessian, problem by problem."""
    recorded = json_of("curvature_cost.json")["cells"]
    keys = [f"{problem}-tanh/hessian/hessinit" for problem in PROBLEMS]
    return [cost(recorded[key]).split(" ")[0] for key in keys]


def parts_of(kind: str) -> list[float]:
    return [float(factor) for factor in re.findall(rf"{kind} +(\S+)", text_of("products_cost.txt"))]


def interrupts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in text_of("interrupts.jsonl").splitlines() if line]


# --- Filling the documents --------------------------------------------------------------------------------


def filled(text: str) -> str:
    """`text` with the present number before each comment, and the present tables.

    >>> filled("Of 3<!--ordinary-problems--> problems")
    'Of 1,379<!--ordinary-problems--> problems'
    """
    text = NUMBER.sub(lambda mark: f"{NUMBERS[mark['name']]()}<!--{mark['name']}-->", text)
    return TABLE.sub(lambda mark: f"{mark['name']}-->\n\n{TABLES[mark['name']]()}\n\n", text)


def stale(text: str) -> list[str]:
    """What differs from the records, and comments that name nothing or follow no number."""
    text = FENCE.sub("", text)
    marks = [mark["name"] for mark in NUMBER.finditer(text)] + [mark["name"] for mark in TABLE.finditer(text)]
    wrong = [f"{name!r} is no entry" for name in marks if name not in NUMBERS | TABLES]
    lost = [mark["name"] for mark in COMMENT.finditer(text) if mark["name"] not in [*marks, "end"]]
    wrong += [f"{name!r} follows no number" for name in lost if not name.startswith("command ")]
    if wrong:
        return wrong
    pairs = zip_longest(text.splitlines(), filled(text).splitlines(), fillvalue="")
    return [f"{old!r} is now {new!r}" for old, new in pairs if old != new]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
