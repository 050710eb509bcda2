"""What can be reproduced, by name; without torch, for the command line's help."""

from __future__ import annotations

ALL = "all"
# The figures are drawn from what the tables are made of.
FIGURES = {"figure-1": "table-4", "figure-2": "table-5"}
NAMES = [
    "table-1", "table-2", "table-3", "table-4", "table-5", "figure-1", "figure-2", "word2vec", ALL,
]  # fmt: skip
