"""Whether a folder's record is that of the experiment at hand, and what differs where it is not."""

from __future__ import annotations

import math
from pathlib import Path

from hessinit.comparing.behaviour import OPTIMIZER
from hessinit.comparing.experiment import NUMBERS
from hessinit.errors import ProblemError
from hessinit.results.result import Plain

# How far the numbers of a record may differ: other versions and devices round otherwise.
SAME_NUMBER = 1e-5
SAME_NUMBER_ELSEWHERE = 1e-3


def check_same(folder: Path, found: Plain, wanted: Plain) -> None:
    """Refuse the folder of another experiment: `found` is the record there, `wanted` that of this call."""
    stored, here = found["experiment"], wanted["experiment"]
    tolerance = SAME_NUMBER if found["versions"] == wanted["versions"] else SAME_NUMBER_ELSEWHERE
    different = [key for key in here if not _same(key, stored.get(key), here[key], tolerance)]
    if different and set(different) <= set(NUMBERS):
        then, now = (", ".join(str(each.get(name)) for name in NUMBERS) for each in (stored, here))
        raise ProblemError(
            f"folder={str(folder)!r} belongs to another experiment: a new model's first loss and the length "
            f"of its gradient were {then} there and are {now} here, so build, loss or forward has changed. "
            "Pass another folder, or delete this one to begin anew."
        )
    if different:
        shown = "; ".join(_difference(key, stored.get(key), here[key]) for key in different[:3])
        raise ProblemError(
            f"folder={str(folder)!r} belongs to another experiment: {shown}. "
            "Pass another folder, or delete this one to begin anew."
        )
    for name, how in wanted["starts"].items():
        if found["starts"].get(name, how) != how:
            raise ProblemError(
                f"folder={str(folder)!r} has runs of a start {name!r} that was {found['starts'][name]} and "
                f"is {how} here; give the new one another name, or pass another folder."
            )
    _check_behaviour(folder, found.get("behaviour", {}), wanted["behaviour"], tolerance)


def _check_behaviour(folder: Path, found: Plain, wanted: Plain, tolerance: float) -> None:
    for name, here in wanted.items():
        there = found.get(name, here)
        if _does_the_same(there, here, tolerance):
            continue
        then, now = (", ".join(filter(None, each)) for each in (there, here))
        if name == OPTIMIZER:
            raise ProblemError(
                f"folder={str(folder)!r} belongs to another experiment: the optimizer was {then} there and "
                f"is {now} here (its settings; after three steps the length of the weights, the loss, the "
                "length of the gradient). Pass another folder, or delete this one to begin anew."
            )
        raise ProblemError(
            f"folder={str(folder)!r} has runs of a {name!r} that did something else: the length of the "
            f"weights, the loss and the length of the gradient were {then} there and are {now} here, so its "
            "code has changed, or it draws numbers that no seed determines. Give the new one another name, "
            "or pass another folder."
        )


def _does_the_same(there: Plain, here: Plain, tolerance: float) -> bool:
    if len(there) != len(here):
        return False
    # Other versions of torch have other settings.
    same_words = there[0] == here[0] or tolerance > SAME_NUMBER
    return same_words and all(map(_close, there[1:], here[1:], [tolerance] * len(here[1:])))


def _same(key: str, stored: Plain, wanted: Plain, tolerance: float) -> bool:
    if key not in NUMBERS or not isinstance(stored, str):
        return bool(stored == wanted)
    return _close(stored, wanted, tolerance)


def _close(stored: str, wanted: str, tolerance: float) -> bool:
    return stored == wanted or math.isclose(
        float(stored), float(wanted), rel_tol=tolerance, abs_tol=tolerance / 1000
    )


def _difference(key: str, stored: Plain, wanted: Plain) -> str:
    if key == "data":
        return "the data hold other values"
    if isinstance(stored, str) and max(len(stored), len(str(wanted))) > 60:
        return f"the {key} differ" if key.endswith("s") and key != "loss" else f"the {key} differs"
    return f"{key} was {stored!r} there and is {wanted!r} here"


def compare_versions(stored: dict[str, str], present: dict[str, str]) -> tuple[str, ...]:
    """A remark for the reader where the folder was begun with other versions."""
    changed = [
        f"{name} {stored[name]} then, {present[name]} now"
        for name in stored.keys() & present.keys()
        if stored[name] != present[name]
    ]
    if not changed:
        return ()
    shown = "; ".join(sorted(changed))
    return (f"Some runs were read from the folder, which was begun with other versions: {shown}.",)
