"""Pickled arrays read without running a pickle's code.

A pickle is a program that may name any function and have it called. Here the few names that a pickled array
uses stand for objects that only write down their arguments, and every other name is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any

import numpy
from numpy.typing import NDArray

from hessinit.errors import ProblemError
from hessinit.paper.images.contents import refuse

# numpy 2 moved numpy.core to numpy._core; a file may have been written by either.
HARMLESS = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",  # how Python 3 writes bytes for protocols that have none
    **{(f"numpy.{core}.multiarray", "_reconstruct"): "reconstruct" for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): "frombuffer" for core in ("core", "_core")},  # protocol 5
}

# A batch takes some 50,000: a label and the name of a picture for each of its 10,000 rows.
MOST_STEPS = 500_000


class Recorded:
    """A call that a pickle asked for, written down and not made."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class StandIn:
    """What a name of a pickle becomes. Without a `__dict__`, so that a pickle cannot write to it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Recorded:
        return Recorded(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"a state for {self.name} itself")


class InertUnpickler(pickle.Unpickler):
    def __init__(self, label: object, content: bytes) -> None:
        # Python 2's strings stay bytes: those of the pixels are no text.
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.label = label

    def find_class(self, module: str, name: str) -> StandIn:
        if (module, name) not in HARMLESS:
            raise refuse(
                self.label, f"asks for {module}.{name}; only arrays, lists, numbers and text are read"
            )
        return StandIn(HARMLESS[module, name])


def read_inert(label: object, content: bytes) -> dict[str, Any]:
    """The dictionary in a pickle, its keys as text; arrays are `Recorded` until `as_array` takes them."""
    try:
        check_steps(label, content)
        found = InertUnpickler(label, content).load()
        named = {as_text(key): value for key, value in found.items()}
    except ProblemError:
        raise
    except Exception as error:  # a corrupt pickle may fail in any way
        raise refuse(label, f"is no whole pickle of a batch ({type(error).__name__}: {error})") from error
    return named


def check_steps(label: object, content: bytes) -> None:
    """Refuse a pickle that would take much more memory than it has bytes.

    A step of one byte makes a list, and one of five asks for a table of any size, to fill its last place.
    """
    for number, (step, argument, _) in enumerate(pickletools.genops(content)):
        place = int(argument or 0) if step.name in ("PUT", "BINPUT", "LONG_BINPUT") else 0
        if max(number, place) > MOST_STEPS:
            raise refuse(label, f"is a pickle of over {MOST_STEPS:,} steps; a batch of CIFAR-10 has fewer")


def as_text(value: Any) -> Any:
    """Text from however a pickle holds it; anything else as it is."""
    if is_encoded(value):
        return value.arguments[0]
    return value.decode("latin-1") if isinstance(value, bytes) else value


def is_encoded(value: Any) -> bool:
    """Whether it is `_codecs.encode(text, "latin1")`: bytes, written as text."""
    return isinstance(value, Recorded) and value.name == "encode" and bool(value.arguments)


def as_array(value: Any) -> NDArray[numpy.uint8]:
    """The uint8 array that a pickle describes; a `ValueError` says what else it is."""
    if not isinstance(value, Recorded):
        raise ValueError(f"{type(value).__name__}, not an array")
    if value.name == "reconstruct" and isinstance(value.state, tuple) and len(value.state) == 5:
        _, shape, kind, by_columns, values = value.state
        order = "F" if by_columns else "C"
    elif value.name == "frombuffer" and len(value.arguments) == 4:
        values, kind, shape, order = value.arguments
    else:
        raise ValueError(f"numpy's {value.name}, not an array")
    if not is_uint8(kind):
        raise ValueError("an array of another type than uint8")
    flat = numpy.frombuffer(as_bytes(values), numpy.uint8)
    if not isinstance(shape, tuple) or math.prod(map(as_size, shape)) != len(flat):
        raise ValueError(f"an array of another shape than its {len(flat)} values have")
    return flat.reshape(shape, order="F" if as_text(order) == "F" else "C")


def as_size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("an array of which a size is no number")
    return value


def is_uint8(kind: Any) -> bool:
    if not isinstance(kind, Recorded) or kind.name != "dtype" or not kind.arguments:
        return False
    return as_text(kind.arguments[0]) in ("u1", "|u1")


def as_bytes(values: Any) -> bytes | bytearray:
    if isinstance(values, (bytes, bytearray)):
        return values
    if is_encoded(values) and isinstance(values.arguments[0], str):
        return values.arguments[0].encode("latin-1")  # numpy's own choice, whatever the pickle says
    raise ValueError("an array without its values")
