"""What the word2vec experiment runs through: models, dimensions, standard deviations, rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MODEL_NAMES = {"softmax": "full softmax", "negative": "negative sampling"}
STDS = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
OURS = "hessinit"
BATCH = 100
WINDOW = 5
# Mikolov et al. (2013): 5 to 20 for small corpora, 2 to 5 for large ones; 5 is word2vec.c's default.
NEGATIVES = 5
CURVE_POINTS = 10  # of every run: the record of all of them is to stay small


@dataclass(frozen=True)
class Design:
    """The sizes for one text.

    `rates` are for one pair, as word2vec.c states them (its default for skip-gram is 0.025). It steps pair by
    pair; for the mean over a batch the step has to be `BATCH` times as long. Both models also train at 0.1
    and learn faster there; from 0.4 they diverge, whatever the start.
    """

    vocabulary: Mapping[str, int]
    dimensions: tuple[int, ...]
    rates: tuple[float, ...]
    steps: int

    @property
    def pairs(self) -> int:
        """As many as are trained on: each is seen once, so that a loss is always that of new pairs."""
        return self.steps * BATCH


DESIGNS = {
    "wikipedia": Design({"softmax": 1_000, "negative": 10_000}, (16, 64, 128), (0.025, 0.1), 4_000),
    "docstrings": Design({"softmax": 500, "negative": 2_000}, (16, 64), (0.1,), 1_000),
}
ROWS: tuple[str, ...] = (*(f"{std:g}" for std in STDS), OURS)


def key_of(model: str, dimension: int, row: str, seed: int) -> str:
    """The name of a job.

    >>> key_of("softmax", 64, "0.03", 2)
    'softmax-64-0.03-2'
    """
    return f"{model}-{dimension}-{row}-{seed}"


def step_length(rate: float) -> float:
    """The learning rate for a batch's mean loss."""
    return rate * BATCH
