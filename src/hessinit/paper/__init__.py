"""The paper's experiments: `reproduce("table-4")` makes a table again, beside the printed numbers.

Skorski, Theobald, Temperoni, "Revisiting Weight Initialization of Deep Neural Networks" (arXiv 2004.09506).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hessinit.paper.experiments import load_records, reproduce
    from hessinit.results.reproduction import Reproduction

__all__ = ["Reproduction", "load_records", "reproduce"]

ALL = "all"
NAMES = ["table-1", "table-2", "table-3", "table-4", "table-5", "figure-1", "figure-2", "word2vec", ALL]
PAGE = "reproduce.html"


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line's help needs the names of the experiments and not torch.
    if name not in __all__:
        raise AttributeError(f"module 'hessinit.paper' has no attribute {name!r}")
    from hessinit.paper import experiments

    return getattr(experiments, name)
