"""Small problems, one for each thing that people build; each is held against a dense fp64 truth."""

from __future__ import annotations

from zoo import (
    attention,
    convolutions,
    coupled,
    dense,
    embeddings,
    handwritten,
    losses,
    normalization,
    pooling,
    recurrent,
    structure,
)
from zoo.problem import Problem

FAMILIES = (
    dense,
    convolutions,
    pooling,
    embeddings,
    normalization,
    recurrent,
    attention,
    losses,
    structure,
    handwritten,
    coupled,
)
PROBLEMS: tuple[Problem, ...] = tuple(problem for module in FAMILIES for problem in module.family.problems)
