"""What was done in a comparison and what its numbers are, in sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from hessinit.present.comparison_standing import Result
from hessinit.present.grid import Column
from hessinit.present.words import format_number, printable
from hessinit.results.comparison import Comparison, window

MOST_NOTES = 6


def describe_runs(comparison: Comparison) -> str:
    """Say how many runs there were, of what, and how long they took."""
    counts = [
        _count(len(comparison.schemes), "std" if comparison.kind == "sweep" else "start"),
        _count(len(comparison.learning_rates), "rate"),
        _count(len(comparison.seeds), "seed"),
    ]
    total = len(comparison.runs)
    spent = f" in {format_number(comparison.seconds, 2)} s" if comparison.seconds is not None else ""
    examples = f"{comparison.examples:,} example{'' if comparison.examples == 1 else 's'}"
    warmup = f", +warmup over {comparison.warmup} steps" if comparison.warmup else ""
    return (
        f"{' × '.join(counts)} = {_count(total, 'run')} of {_count(comparison.steps, 'step')}{spent}: "
        f"{_name_optimizer(comparison.optimizer)}{warmup}, batches of {comparison.batch_size} from "
        f"{examples}."
    )


def explain_comparison(comparison: Comparison, columns: Sequence[Column]) -> str:
    """Say what the numbers in these columns of the table are."""
    cells = [cell for column in columns for cell in column.cells]
    error = ", ± standard error over seeds" if any("±" in cell for cell in cells) else ""
    loss = f"mean training loss of the last {min(comparison.steps, window(comparison.steps))} steps{error}"
    is_sweep = comparison.kind == "sweep"
    marks = []
    if any(cell.endswith("*") for cell in cells):
        marks.append("* the lowest" if is_sweep else "* the lowest at that rate")
    if any(cell.startswith("✗") for cell in cells):
        marks.append("✗ diverged")
    headings = {column.heading for column in columns}
    if is_sweep and headings & {*comparison.layers, "network", "lr·‖H‖"}:
        return "; ".join([f"‖H‖ of each layer at the start, and the {loss}", *marks]) + "."
    curvature = " ‖H‖: the network at the start." if "‖H‖" in headings else ""
    return "; ".join([f"Final loss: the {loss}", *marks]) + f".{curvature}"


def collect_notes(comparison: Comparison) -> list[str]:
    """The notes of the comparison and of its runs; those that differ in their numbers only are shown once."""
    alike: dict[tuple[str, str], list[str]] = {}
    for run in comparison.runs:
        if run.note:
            alike.setdefault((run.scheme, re.sub(r"\d[\d.,e+-]*", "#", run.note)), []).append(run.note)
    notes = list(map(_stopped, comparison.notes))
    for (start, _), found in alike.items():
        runs = sum(run.scheme == start for run in comparison.runs)
        which = "" if len(set(found)) == 1 else ", for example"
        where = (
            "does not apply" if not comparison.applies(start) else f"in {len(found)} of {_count(runs, 'run')}"
        )
        notes.append(f"{start} {where}{which}: {_stopped(found[0])}")
    if len(notes) > MOST_NOTES:
        notes = [*notes[: MOST_NOTES - 1], f"{len(notes) - MOST_NOTES + 1} more are in the runs."]
    return [printable(note) for note in notes]


def format_result(result: Result) -> str:
    """A mean with three figures, and its standard error, where there is one, with as many decimals.

    An error that would show as 0.00 has two figures of its own.

    >>> format_result(Result(0.23456, 0.0123)), format_result(Result(0.2, float("nan"))), format_result(
    ...     Result(12345678.0, 230.0)), format_result(Result(1.1, 0.00123))
    ('0.235 ± 0.012', '0.200', '1.2e+07 ± 230', '1.10 ± 0.0012')
    """
    size = abs(float(f"{result.mean:.2e}")) if math.isfinite(result.mean) else math.inf
    if not 1e-4 <= size < 1e5:
        error = "" if math.isnan(result.error) else f" ± {format_number(result.error, 2)}"
        return format_number(result.mean) + error
    decimals = max(0, 2 - math.floor(math.log10(size)))
    mean = f"{result.mean:.{decimals}f}"
    if math.isnan(result.error):
        return mean
    error = f"{result.error:.{decimals}f}"
    return f"{mean} ± {error if float(error) else format_number(result.error, 2)}"


def _name_optimizer(described: str) -> str:
    """A function without a name of its own is called what it is to the reader."""
    return "your optimizer" if "<" in described else printable(described.removeprefix("__main__."))


def _count(many: int, what: str) -> str:
    return f"{many:,} {what}{'' if many == 1 else 's'}"


def _stopped(note: str) -> str:
    return note if note.endswith((".", "!", "?")) else f"{note}."
