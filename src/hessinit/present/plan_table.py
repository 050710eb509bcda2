"""A scheme's plan in a terminal. `python -m hessinit.present.plan_table` shows one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from hessinit.present.grid import Column, build_grid, fit, name_left_out, render, terminal_width
from hessinit.present.words import format_number, printable
from hessinit.results.initialization import PlannedWeight, SchemePlan


def render_plan(plan: SchemePlan, width: int | None = None, color: bool = False) -> str:
    """Write the plan as text of at most `width` columns (None: the terminal's)."""
    columns = width or terminal_width()
    return render(plan_renderables(plan, columns), columns, color=color)


def plan_renderables(plan: SchemePlan, width: int) -> Iterator[RenderableType]:
    """Give the parts of the plan to a rich console of that width: the table, then what to know."""
    columns, left_out = fit(plan_columns(plan), width)
    yield build_grid(columns, width)
    yield Text()
    yield Text(_describe(plan))
    for note in plan.notes:
        yield Text(f"Note: {printable(note)}")
    yield from name_left_out(left_out, width)


def plan_columns(plan: SchemePlan) -> list[Column]:
    """What has something to say about this plan, a row for each weight."""

    def cells(write: Callable[[PlannedWeight], str]) -> tuple[str, ...]:
        return tuple("" if row.unchanged else write(row) for row in plan)

    names = tuple(" = ".join(printable(name) for name in (row.name, *row.aliases)) for row in plan)
    columns = [
        Column("layer", names, 9, is_number=False),
        Column("weight", tuple(str(row.shape) for row in plan), 4, is_number=False),
        Column("fans", cells(_write_fans), 8, is_number=False),
        Column("before", cells(lambda row: printable(row.upstream)), 5, is_number=False),
    ]
    if plan.scheme in ("backward", "compromise"):
        columns.append(Column("after", cells(lambda row: printable(row.downstream)), 5, is_number=False))
    columns.append(Column("gain", cells(lambda row: format_number(row.gain)), 8))
    if any(row.dropout_factor != 1 for row in plan):
        columns.append(Column("dropout", cells(lambda row: f"× {format_number(row.dropout_factor)}"), 8))
    if any(row.variance_correction != 1 for row in plan):
        columns.append(Column("drift", cells(lambda row: f"× {format_number(row.variance_correction)}"), 7))
    columns.append(Column("std", tuple(_write_std(row) for row in plan), 9))
    remarks = tuple(map(_remark, plan))
    if any(remarks):
        columns.append(Column("remark", remarks, 7, is_number=False))
    return columns


def _write_fans(row: PlannedWeight) -> str:
    """One pair of numbers, or how many parts there are of it: `64 → 3 × 64`."""
    inputs, outputs = _write_range(row.fan_in, _write_count), _write_range(row.fan_out, _write_count)
    return f"{inputs} → {outputs}" if len(row.fan_out) == 1 else f"{inputs} → {len(row.fan_out)} × {outputs}"


def _write_std(row: PlannedWeight) -> str:
    if row.unchanged:
        return ""
    return _write_range(row.std) if row.std else "by data"


def _write_range(numbers: Sequence[float], write: Callable[[float], str] = format_number) -> str:
    low, high = write(min(numbers)), write(max(numbers))
    return low if low == high else f"{low} … {high}"


def _write_count(number: float) -> str:
    return str(int(number)) if number.is_integer() else format_number(number)


def _remark(row: PlannedWeight) -> str:
    if row.unchanged:
        return printable(row.unchanged)
    remarks = ["ends a branch"] * row.closes_residual + ["norm next"] * row.norm_follows
    return ", ".join(remarks)


def _describe(plan: SchemePlan) -> str:
    written = sum(not row.unchanged for row in plan)
    drawn = f", {plan.distribution}" if plan.distribution else ""
    left = len(plan) - written
    rest = f"; {left} left alone" if left else ""
    return f"{plan.scheme}{drawn}: {written} weight{'' if written == 1 else 's'}{rest}."


if __name__ == "__main__":
    rows = [
        PlannedWeight(name="embed", aliases=("head",), shape=(65, 64), kind="embedding", fan_in=(1.0,),
                      fan_out=(64.0,), upstream="tokens", std=(0.125,)),
        PlannedWeight(name="qkv", shape=(192, 64), kind="dense", fan_in=(64.0,) * 3, fan_out=(64.0,) * 3,
                      upstream="layer_norm", std=(0.125,) * 3),
        PlannedWeight(name="proj", shape=(64, 256), kind="dense", fan_in=(256.0,), fan_out=(64.0,),
                      upstream="gelu, dropout 0.1", gain=1.5335, dropout_factor=0.9487, std=(0.0909,),
                      closes_residual=True),
        PlannedWeight(name="old", shape=(64, 64), unchanged="frozen"),
    ]  # fmt: skip
    Console().print(SchemePlan(scheme="he", distribution="normal", layers=tuple(rows)))
