"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` by `text` in one step: a reader, or a crash, finds the old file or the new one."""
    # "x" and not tempfile: the file gets the usual permissions, not those of a private one.
    with replacing(path) as temporary, open(temporary, "x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name to write to, which takes the place of `path` in the end; where that fails, `path` stays."""
    target = Path(os.path.realpath(path))  # a link stays a link, and its target is replaced
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write {path}: the folder {target.parent} does not exist. Create it first."
        )
    if target.exists() and not target.is_file():
        raise ValueError(f"cannot write {path}: it is there and is not a file. Give the name of a file.")
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


Plain = Any  # None, bool, int, float, str, and lists and dicts of them: what json.loads returns


def to_plain(value: object) -> Plain:
    """Turn dataclasses, tuples and mappings into what strict JSON can hold; a float keeps every bit.

    >>> from hessinit.results.estimates import Estimate
    >>> to_plain((Estimate(float("inf"), 0.0, False, "overflow"), "inf"))[0]["value"]
    'inf'
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    raise TypeError(
        f"a report cannot hold {value!r}, a {type(value).__name__}; "
        "it holds plain data, so convert it to a float, an int or a str first."
    )


def read_number(value: Plain) -> float:
    """Read a number back, whichever way it travelled.

    >>> read_number("-inf"), read_number(0.1)
    (-inf, 0.1)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} stands where a number belongs")
    return float(value)


def read_numbers(values: Plain) -> tuple[float, ...]:
    return tuple(read_number(value) for value in values)


class NamedRow(Protocol):
    """A row for one weight; a tied one has aliases."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


Row = TypeVar("Row", bound=NamedRow, covariant=True)


class ByName(Generic[Row]):
    """`rows["fc1"]`, `rows[0]`, `len(rows)`, iteration and `in`, for anything that has `layers`."""

    @property
    def _rows(self) -> Sequence[Row]:
        rows: Sequence[Row] = self.layers  # type: ignore[attr-defined]
        return rows

    def __getitem__(self, key: str | int) -> Row:
        """The layer of that name, alias or position."""
        if isinstance(key, int):
            return self._rows[key]
        for row in self._rows:
            if key == row.name or key in row.aliases:
                return row
        known = [name for row in self._rows for name in (row.name, *row.aliases)]
        parts = [name for name in known if name and (name in str(key) or str(key) in name)]
        near = (get_close_matches(str(key), known, n=3) or parts)[:3]
        offered = "Did you mean" if near else "The layers are"
        names = ", ".join(map(repr, near or known[:8])) + (", …" if not near and len(known) > 8 else "")
        raise KeyError(f"no layer is called {key!r}. {offered} {names}{'?' if near else '.'}")

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return any(key in (row, row.name, *row.aliases) for row in self._rows)

    @property
    def names(self) -> tuple[str, ...]:
        """The layers' names, in the order they run."""
        return tuple(row.name for row in self._rows)


def load(path: str | os.PathLike[str]) -> Any:
    """Read what `save` wrote, with this or an older version: an object equal to what was saved.

    The file says what it holds: a curvature report, an initialization, a comparison, a reproduction or a
    tracking, also the JSON lines of a tracker. What `hessinit reproduce --json` printed becomes a list.
    Only JSON is read, and nothing in it is run.
    """
    # Any, not a union: whoever loads a file knows what is in it, and goes on with it.
    from hessinit.results.curvature_report import KIND, CurvatureReport

    text = Path(path).read_bytes()
    source = str(path)
    kind = _kind(text)
    if kind is list:
        from hessinit.results.reproduction import read_reproduction

        return [read_reproduction(each, source) for each in json.loads(text)]
    if kind is None or kind == KIND:  # the reader of reports says what is wrong with a file of no kind
        return CurvatureReport.from_json(text, source=source)
    readers = _readers()
    if not isinstance(kind, str) or kind not in readers:
        known = ", ".join(name.removeprefix("hessinit ") for name in (KIND, *readers))
        raise ValueError(f"{source} holds {kind!r}, which cannot be read back; what can is a {known}.")
    return readers[kind](text, source=source)


def _readers() -> dict[str, Callable[..., Any]]:
    from hessinit.results import comparison, initialization, reproduction, track_record

    return {
        initialization.KIND: initialization.Initialization.from_json,
        comparison.KIND: comparison.Comparison.from_json,
        reproduction.KIND: reproduction.Reproduction.from_json,
        track_record.KIND: track_record.Tracking.from_json,
    }


def _kind(text: bytes) -> str | type[list[Any]] | None:
    """What the file says it is, in the whole of it or in its first line; None where it says nothing."""
    for part in (text, text.partition(b"\n")[0]):
        try:
            data = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(data, list)
            and data
            and all(isinstance(each, dict) and "kind" in each for each in data)
        ):
            return list
        kind = data.get("kind") if isinstance(data, dict) else None
        return kind if isinstance(kind, str) else None
    return None
