"""What a folder of records holds together: the page, and the pictures."""

from __future__ import annotations

import os
from pathlib import Path

from hessinit.results.reproduction import Figure, Reproduction
from hessinit.results.result import replacing, write_text

PAGE = "reproduce.html"


def load_records(folder: str | os.PathLike[str]) -> list[Reproduction]:
    """All records that lie in a folder, by name; other files are left alone."""
    return read_folder(folder)[0]


def read_folder(folder: str | os.PathLike[str]) -> tuple[list[Reproduction], list[str]]:
    """All records, and the names of files that began as one and cannot be read."""
    found, unreadable = [], []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            found.append(Reproduction.load(path))
        except (ValueError, OSError, RecursionError):
            if _is_meant_as_record(path):
                unreadable.append(path.name)
    return found, unreadable


def _is_meant_as_record(path: Path) -> bool:
    """By its first line, which a file that was cut short has, too."""
    try:
        with path.open("rb") as file:
            return Reproduction.KIND.encode() in file.read(200)
    except OSError:
        return False


def write_page(folder: Path) -> Path:
    """Write the page of all records there."""
    from hessinit.present.page import render_page
    from hessinit.present.reproduction import describe_reproductions

    path = folder / PAGE
    write_text(path, render_page(describe_reproductions(*read_folder(folder))))
    return path


def write_pictures(reproduction: Reproduction, folder: Path) -> list[Path]:
    """Draw every figure into a file of its own."""
    return [
        _draw(figure, folder / picture_name(reproduction, figure)) for figure in reproduction.findings.figures
    ]


def picture_name(reproduction: Reproduction, figure: Figure) -> str:
    """A figure's file: "figure-1-mnist.png"."""
    rest = reproduction.name.removeprefix(reproduction.experiment)
    return f"{figure.name}{rest}.png"


def _draw(figure: Figure, path: Path) -> Path:
    from hessinit.present.figures import draw_charts
    from hessinit.present.reproduction import figure_chart

    with replacing(path) as temporary:
        drawn = draw_charts([figure_chart(figure)])[0].figure
        drawn.savefig(temporary, format="png", dpi=200)  # type: ignore[union-attr]
    return path
