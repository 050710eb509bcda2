"""Rows that are found by name, alias or position: what reports, plans and forms have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Generic, Protocol, TypeVar


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
