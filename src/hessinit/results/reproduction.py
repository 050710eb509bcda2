"""One of the paper's experiments, made again: tables beside the printed numbers, figures, and the record."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hessinit.results.result import Plain, read_number, read_numbers, to_plain, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console, ConsoleOptions, RenderResult


KIND = "hessinit reproduction"
SCHEMA = 1
MOST_CURVES = 200  # in a figure


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a table: ours over `n` seeds, the printed one, and whether the claim about it holds.

    `rule` is the tolerance claimed, in words; empty where nothing is claimed, and then `within` is None.
    """

    row: str
    column: str
    ours: float
    error: float | None = None  # standard error of the mean; None where there is none, as for one seed
    n: int
    paper: float | None = None
    rule: str = ""
    within: bool | None = None
    unit: str = ""  # "%" or nothing


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells by row and column; not every place need have one."""

    title: str
    corner: str  # what the row names are
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    note: str = ""

    def cell(self, row: str, column: str) -> Cell | None:
        """The cell there, or None."""
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)

    def __str__(self) -> str:
        from hessinit.present.reproduction_table import render_table

        return render_table(self)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line, or points, of a figure; `error` is a standard error for each point."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    error: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture as plain numbers."""

    name: str  # "figure-1"; of letters, digits and hyphens, for a file's name
    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    log_x: bool = False
    log_y: bool = False
    style: str = "lines"  # or "points"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What an experiment concludes from its results."""

    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    sentences: tuple[str, ...] = ()  # what was found, in words; each a whole sentence


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """An experiment on one set of data by one variant of the paper, with everything needed to doubt it.

    `results` are the raw values of every piece of work, by its key.
    """

    name: str  # "table-4-mnist"; of letters, digits and hyphens, for a file's name
    experiment: str  # "table-4"
    title: str
    data: str
    variant: str
    about_variant: str  # the variant in a sentence
    findings: Findings
    seeds: tuple[int, ...]
    configuration: dict[str, Plain]
    source: str  # of the data
    revision: str  # of hessinit
    versions: dict[str, str]
    hardware: dict[str, str]
    seconds: float  # of all pieces of work together, on one core each
    results: dict[str, Plain] = field(repr=False)

    @property
    def judged(self) -> tuple[Cell, ...]:
        """The cells about which something is claimed."""
        return tuple(
            cell for table in self.findings.tables for cell in table.cells if cell.within is not None
        )

    @property
    def within(self) -> int:
        """How many of them hold."""
        return sum(cell.within is True for cell in self.judged)

    def to_dict(self) -> Plain:
        """Plain data with `kind` and `schema`; numbers keep every bit."""
        return {"kind": KIND, "schema": SCHEMA, **to_plain(self)}

    def to_json(self) -> str:
        """Strict JSON, a line for each field and for each of the results."""

        def write(value: Plain) -> str:
            return json.dumps(value, allow_nan=False, ensure_ascii=False)

        *fields, (_, results) = self.to_dict().items()
        lines = [f"{write(key)}: {write(value)}" for key, value in results.items()]
        parts = [f"{write(key)}: {write(value)}" for key, value in fields]
        parts.append('"results": {\n' + ",\n".join(lines) + "\n}")
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as JSON, whole or not at all."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Reproduction:
        """Read a record that `save` wrote."""
        return cls.from_json(Path(path).read_bytes(), source=str(path))

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "this text") -> Reproduction:
        """Read a record; `source` is what messages call it."""
        try:
            data = json.loads(text)
        except ValueError as problem:
            raise ValueError(f"{source} is not JSON ({problem}). Give a file that reproduce wrote.") from None
        return read_reproduction(data, source)

    def __str__(self) -> str:
        from hessinit.present.reproduction_table import render_reproduction

        return render_reproduction(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from hessinit.present.reproduction_table import print_reproduction

        yield from print_reproduction(self, options.max_width)

    def _repr_html_(self) -> str:
        from hessinit.present.reproduction_html import render_reproduction_fragment

        return render_reproduction_fragment(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that loads nothing."""
        from hessinit.present.reproduction_html import render_reproductions_page

        write_text(path, render_reproductions_page([self]))

    def plot(self, figure: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw one of the figures, the first if none is named."""
        from hessinit.present.reproduction_figure import draw_figure

        return draw_figure(self._figure(figure), ax)

    def _figure(self, name: str | None) -> Figure:
        names = [figure.name for figure in self.findings.figures]
        if not names:
            raise ValueError(f"{self.name} has no figure.")
        if name is not None and name not in names:
            raise ValueError(f"figure={name!r} is none of {', '.join(names)}.")
        return self.findings.figures[names.index(name) if name else 0]


def read_reproduction(data: Plain, source: str = "this object") -> Reproduction:
    """What `to_dict` gave, as an object again."""
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ValueError(f"{source} is no {KIND}. Give a file that reproduce wrote.")
    if data.get("schema") != SCHEMA:
        raise ValueError(
            f"{source} has schema {data.get('schema')!r}, and this hessinit reads {SCHEMA}: it comes from "
            "another version. Run the experiment again."
        )
    try:
        return Reproduction(**_read_fields(data))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        what = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise ValueError(f"{source} is not a whole {KIND}: {what}. Was it edited?") from problem


def _read_fields(data: Plain) -> dict[str, Any]:
    words = ("name", "experiment", "title", "data", "variant", "about_variant", "source", "revision")
    findings = data["findings"]
    return {
        **{word: str(data[word]) for word in words},
        "findings": Findings(
            tables=tuple(map(_read_table, findings["tables"])),
            figures=tuple(map(_read_figure, findings["figures"])),
            sentences=tuple(map(str, findings["sentences"])),
        ),
        "seeds": tuple(map(int, data["seeds"])),
        "configuration": dict(data["configuration"]),
        "versions": dict(data["versions"]),
        "hardware": dict(data["hardware"]),
        "seconds": read_number(data["seconds"]),
        "results": dict(data["results"]),
    }


def _read_table(data: Plain) -> Table:
    lists: dict[str, Any] = {name: tuple(map(str, data[name])) for name in ("rows", "columns")}
    cells = tuple(map(_read_cell, data["cells"]))
    words: dict[str, Any] = {name: str(data[name]) for name in ("title", "corner", "note")}
    return Table(**words, **lists, cells=cells)


def _read_cell(data: Plain) -> Cell:
    numbers = {name: None if data[name] is None else read_number(data[name]) for name in ("error", "paper")}
    within, n = data["within"], data["n"]
    if within not in (None, True, False) or type(n) is not int:
        raise ValueError(f"the cell {data['row']!r}, {data['column']!r} has {within=}, {n=}")
    words = {name: str(data[name]) for name in ("row", "column", "rule", "unit")}
    return Cell(**{**data, **numbers, **words, "ours": read_number(data["ours"])})


def _read_figure(data: Plain) -> Figure:
    name, many = str(data["name"]), len(data["curves"])
    if many > MOST_CURVES:
        raise ValueError(f"the figure {name!r} has {many:,} curves, and {MOST_CURVES} can be drawn")
    words = {name: str(data[name]) for name in ("name", "title", "x_label", "y_label", "style")}
    return Figure(**{**data, **words, "curves": tuple(map(_read_curve, data["curves"]))})


def _read_curve(data: Plain) -> Curve:
    error = None if data["error"] is None else read_numbers(data["error"])
    curve = Curve(name=str(data["name"]), x=read_numbers(data["x"]), y=read_numbers(data["y"]), error=error)
    if len(curve.x) != len(curve.y) or (error is not None and len(error) != len(curve.y)):
        raise ValueError(f"the curve {curve.name!r} has lists of different lengths")
    return curve
