"""What all results share: strict JSON of the fields, files, text, notebook, page and plot."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import secrets
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from hessinit.errors import ProblemError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console, ConsoleOptions, RenderResult
    from typing_extensions import Self

Plain = Any  # None, bool, int, float, str, and lists and dicts of them: what json.loads returns
Row = TypeVar("Row", covariant=True)

# Metadata of a field that belongs to the live model and is not stored. {"key": …} names a field in
# JSON.
TRANSIENT = {"transient": True}
# Of a field that files of an earlier version do not have; it then has its default.
LATER = {"later": True}
# The modules that define the kinds of results, for `load`, which imports them until it knows the
# kind: those of the library, and of the paper's experiments, a package of its own that needs torch.
RESULT_MODULES = (
    "hessinit.results.curvature_report",
    "hessinit.results.initialization",
    "hessinit.results.comparison",
    "hessinit.results.track_record",
    "hessinit.results.advice",
    "hessinit_paper.quadratic_forms",
    "hessinit_paper.reproduction",
)


def to_plain(value: object, *, compared: bool = False) -> Plain:
    """Return dataclasses, tuples and mappings as strict JSON can hold them.

    A float keeps every bit; infinity and nan become "inf", "-inf" and "nan". With `compared`, only
    the fields that are compared count.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if is_dataclass(value) and not isinstance(value, type):
        plain = {"kind": value.KIND, "schema": value.SCHEMA} if isinstance(value, Result) else {}
        for key, field in _stored_fields(type(value)).items():
            if field.compare or not compared:
                plain[key] = to_plain(getattr(value, field.name), compared=compared)
        return plain
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, compared=compared) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item, compared=compared) for item in value]
    raise TypeError(
        f"a result cannot hold {value!r}, a {type(value).__name__}; convert it to a float, an int "
        "or a str first."
    )


def from_plain(kind: Any, data: Plain, where: str = "it") -> Any:
    """Return `data` as the type `kind`, such as a dataclass or `tuple[float, ...]`.

    A ValueError says what is of another type, and where.
    """
    origin = typing.get_origin(kind)
    pieces = typing.get_args(kind)
    if kind is float:
        return read_number(data, where)
    if kind is Any or type(data) is kind:
        return data
    if origin in (typing.Union, UnionType):  # with None
        return data if data is None else from_plain(pieces[0], data, where)
    if origin is tuple and isinstance(data, list):
        kinds = pieces[:1] * len(data) if pieces[-1] is Ellipsis else pieces
        if len(kinds) == len(data):
            names = [f"{where}[{index}]" for index in range(len(data))]
            return tuple(map(from_plain, kinds, data, names))
    if origin is dict and isinstance(data, dict):
        return {key: from_plain(pieces[1], item, f"{where}[{key!r}]") for key, item in data.items()}
    if is_dataclass(kind) and isinstance(data, dict):
        return _read_dataclass(kind, data, where)
    name = str(kind) if origin else getattr(kind, "__name__", str(kind))
    raise ValueError(f"{where} is {data!r:.60}, not {name}")


def read_number(data: Plain, where: str = "it") -> float:
    """Return a number that `to_plain` wrote."""
    if data in ("inf", "-inf", "nan") or type(data) in (int, float):
        return float(data)
    raise ValueError(f"{where} is {data!r:.60}, not a number")


def read_numbers(values: Plain) -> tuple[float, ...]:
    return tuple(map(read_number, values))


def _read_dataclass(kind: Any, data: dict[str, Plain], where: str) -> Any:
    if issubclass(kind, Result):
        kind.check_kind(data, where)
        data = {key: value for key, value in data.items() if key not in ("kind", "schema")}
    hints = _type_hints(kind)
    stored = {
        key: field
        for key, field in _stored_fields(kind).items()
        if key in data or not field.metadata.get("later")
    }
    for key in (*stored, *data):
        if key not in data or key not in stored:
            raise ValueError(f"{key!r} is {'missing' if key in stored else 'unknown'} in {where}")
    prefix = "" if where == "it" else f"{where}."
    values = {
        field.name: from_plain(hints[field.name], data[key], prefix + key)
        for key, field in stored.items()
    }
    return kind(**values)


@cache
def _stored_fields(kind: Any) -> dict[str, Field[Any]]:
    stored = [field for field in fields(kind) if not field.metadata.get("transient")]
    return {field.metadata.get("key", field.name): field for field in stored}


_type_hints = cache(typing.get_type_hints)


def _parse(text: str | bytes, source: str) -> Plain:
    from hessinit.results.track_record import are_lines, gather_lines

    if are_lines(text):
        return gather_lines(text, source)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        raise ValueError(
            f"{source} is not JSON ({problem}). Give a file that hessinit wrote."
        ) from problem


def _refuse_constant(name: str) -> Plain:
    raise ValueError(f"{name} is not a JSON number")


class PlainData:
    """Equality by the stored values, where nan equals nan.

    Data are equal to what is read back from their JSON.
    """

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return bool(to_plain(self, compared=True) == to_plain(other, compared=True))

    def __hash__(self) -> int:
        return hash(type(self))  # equal data hash equally: 2 and 2.0, nan and nan


class Result(PlainData):
    """A frozen dataclass that prints, plots, and reads and writes JSON.

    `KIND` and `SCHEMA` name its form.
    """

    KIND: ClassVar[str]
    SCHEMA: ClassVar[int] = 1
    KINDS: ClassVar[dict[str, type[Result]]] = {}

    def __init_subclass__(cls) -> None:
        if "KIND" in vars(cls):
            Result.KINDS[cls.KIND] = cls

    def to_dict(self) -> dict[str, Plain]:
        """Return the result as strict JSON can hold it, with its kind and schema."""
        return dict(to_plain(self))

    def to_json(self) -> str:
        """Return strict JSON, one field or one row of a field to a line; `from_json` reads it."""
        lines = [f"{json.dumps(key)}: {_lay_out(value)}" for key, value in self.to_dict().items()]
        return "{\n  " + ",\n  ".join(lines) + "\n}\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result as JSON, whole or not at all; `hessinit.load` reads it."""
        write_text(path, self.to_json())

    @classmethod
    def from_dict(cls, data: Plain, *, source: str = "the data") -> Self:
        """Return the result that `to_dict` described.

        A ValueError says what is missing, unknown or wrong.
        """
        cls.check_kind(data, source)
        try:
            return from_plain(cls, data)
        except (ValueError, RecursionError) as problem:
            raise ValueError(
                f"{source} cannot be read as {cls.KIND!r}: {str(problem).rstrip('.')}. Was the "
                "file edited or cut?"
            ) from problem

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the text") -> Self:
        """Return the result that `to_json` wrote; messages call the text `source`."""
        return cls.from_dict(_parse(text, source), source=source)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote. Only JSON is read, and nothing in it is run."""
        return cls.from_json(Path(path).read_bytes(), source=str(path))

    @classmethod
    def check_kind(cls, data: Plain, source: str) -> None:
        """Refuse data of another kind or schema."""
        if _kind_of(data) != cls.KIND:
            raise ValueError(f"{source} holds {_kind_of(data)!r}, not {cls.KIND!r}.")
        schema = data.get("schema")
        if type(schema) is not int or schema != cls.SCHEMA:
            raise ValueError(
                f"{source} has schema {schema!r:.60} of {cls.KIND!r}, and this hessinit reads "
                f"{cls.SCHEMA}. Upgrade hessinit, or make the result again."
            )

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the result as one web page that loads nothing else."""
        write_text(path, presenter().to_page(self))

    def plot(
        self, which: str | Sequence[str] | None = None, ax: Axes | Sequence[Axes] | None = None
    ) -> Axes:
        """Draw charts by name, by default the first, on `ax` or a new figure.

        Return the first one's axes.
        """
        return presenter().draw(self, which, ax)[0]

    @property
    def verdict(self) -> str:
        """What the numbers mean, in a few sentences."""
        document = presenter().describe(self)
        answer = [f"{document.answer.rstrip('.')}."] if document.answer else []
        return " ".join([*answer, *document.verdict])

    def __repr__(self) -> str:
        return f"<{self.KIND}: print() shows it>"

    def __str__(self) -> str:
        return presenter().to_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from presenter("terminal").renderables(presenter().describe(self), options.max_width)

    def _repr_html_(self) -> str:
        return presenter().to_notebook(self)

    def __getstate__(self) -> dict[str, Any]:
        all_fields = fields(self)  # type: ignore[arg-type]
        transient = [field.name for field in all_fields if field.metadata.get("transient")]
        return {**vars(self), **dict.fromkeys(transient)}


def load(path: str | os.PathLike[str]) -> Any:
    """Read any result that `save` wrote, or the JSON lines of a tracker.

    What `hessinit reproduce --json` printed becomes a list. Only JSON is read, and nothing in it is
    run.
    """
    if not isinstance(path, str | os.PathLike):
        raise ProblemError(f"path={path!r} must be the name of a file that hessinit wrote.")
    data = _parse(Path(path).read_bytes(), str(path))
    if isinstance(data, list) and data:
        return [_read_result(item, f"{path}[{index}]") for index, item in enumerate(data)]
    return _read_result(data, str(path))


def _read_result(data: Plain, source: str) -> Result:
    kind = _kind_of(data)
    for module in RESULT_MODULES:
        if kind not in Result.KINDS:
            import_module(module)
    if kind not in Result.KINDS:
        kinds = ", ".join(map(repr, Result.KINDS))
        raise ValueError(f"{source} holds {kind!r}; what can be read back is {kinds}.")
    return Result.KINDS[kind].from_dict(data, source=source)


def _kind_of(data: Plain) -> str:
    return str(data.get("kind")) if isinstance(data, dict) else f"a JSON {type(data).__name__}"


def _lay_out(value: Plain) -> str:
    write = partial(json.dumps, allow_nan=False)
    if isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
        rows = [f"{write(key)}: {write(item)}" for key, item in value.items()]
        return "{\n    " + ",\n    ".join(rows) + "\n  }"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n    " + ",\n    ".join(map(write, value)) + "\n  ]"
    return write(value)


def presenter(module: str = "") -> Any:
    """Return hessinit.present, or a module of it.

    It imports the results, so it is imported when used.
    """
    state = random.getstate()  # rich draws a number when it is imported
    try:
        return import_module(f"hessinit.present.{module}" if module else "hessinit.present")
    finally:
        random.setstate(state)


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedLayer:
    """What every row of a result about layers has; `aliases` are a tied weight's other names."""

    name: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]


class ByName(Generic[Row]):
    """`rows["fc1"]`, `rows[0]`, `len(rows)`, iteration and `in`, for a result that has `layers`."""

    layers: tuple[Any, ...]

    def __getitem__(self, key: str | int) -> Row:
        """Return the layer of that name, alias or position."""
        if isinstance(key, int):
            return self.layers[key]
        named = {name: row for row in reversed(self.layers) for name in (row.name, *row.aliases)}
        if key not in named:
            hint = did_you_mean(str(key), list(named))
            raise KeyError(f"no layer is called {key!r}; `names` lists them.{hint}")
        return named[key]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __contains__(self, key: object) -> bool:
        return any(key in (row, row.name, *row.aliases) for row in self.layers)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.layers)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` by `text` in one step: a reader finds the old file or the new one."""
    # "x" and not tempfile: the file gets the usual permissions, not those of a private one.
    with replacing(path) as temporary, open(temporary, "x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a name to write to, which replaces `path` in the end; where that fails, `path` stays."""
    target = Path(os.path.realpath(path))  # a link stays a link, and its target is replaced
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write {path}: the folder {target.parent} does not exist. Create it first."
        )
    if target.exists() and not target.is_file():  # a folder, or a device such as /dev/null
        raise ValueError(
            f"cannot write {path}: it is there and is not a file. Give the name of a file."
        )
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
