"""Several reproductions together: in which order they are shown, and how much of the paper holds in all."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hessinit.present.reproduction_sentences import count
from hessinit.results.reproduction import Reproduction

ORDER = ("table-1", "table-2", "table-3", "table-4", "table-5", "word2vec")
DATA_OF_THE_PAPER = ("mnist", "cifar-10", "wikipedia")


def in_order(reproductions: Sequence[Reproduction]) -> list[Reproduction]:
    """As in the paper, its own data before others; then by name: that of a further variant is longer."""

    def place(reproduction: Reproduction) -> tuple[int, bool, bool, str]:
        known = reproduction.experiment in ORDER
        return (
            ORDER.index(reproduction.experiment) if known else len(ORDER),
            not reproduction.judged,
            reproduction.data not in DATA_OF_THE_PAPER,
            reproduction.name,
        )

    return sorted(reproductions, key=place)


def summarize(reproductions: Sequence[Reproduction]) -> str:
    """How many of the claims hold; a number of the paper that several variants aim at is counted once."""
    first: dict[str, Reproduction] = {}
    judged = [reproduction for reproduction in in_order(reproductions) if reproduction.judged]
    for reproduction in judged:
        first.setdefault(reproduction.experiment, reproduction)
    if not first:
        return "None of these numbers has a tolerance that is claimed for it: the paper's are for other data."
    claimed = sum(len(reproduction.judged) for reproduction in first.values())
    within = sum(reproduction.within for reproduction in first.values())
    sentence = (
        f"Of {count(claimed, 'printed number')} for which a tolerance is claimed, "
        f"{within} {'is' if within == 1 else 'are'} within it."
    )
    if len(judged) > len(first):
        sentence += " Where the paper is read in several ways, the one listed first is counted."
    return sentence


def anchors(reproductions: Sequence[Reproduction]) -> list[str]:
    """A name for each that can stand in an address and in an id, and is no other's."""
    found: list[str] = []
    for reproduction in reproductions:
        base = re.sub(r"[^A-Za-z0-9]+", "-", reproduction.name).strip("-") or "reproduction"
        name, again = base, 2
        while name in found:
            name, again = f"{base}-{again}", again + 1
        found.append(name)
    return found
