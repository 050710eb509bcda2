"""The paper's experiments: `reproduce("table-4")` makes a table again, beside the printed numbers.

Skorski, Theobald, Temperoni, "Revisiting Weight Initialization of Deep Neural Networks" (arXiv 2004.09506).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hessinit.paper.gathering import load_records
    from hessinit.paper.reproducing import reproduce
    from hessinit.results.reproduction import Reproduction

# Loaded on first use: the command line's help needs the names of the experiments and not torch.
_HOMES = {
    "Reproduction": "hessinit.results.reproduction",
    "load_records": "hessinit.paper.gathering",
    "reproduce": "hessinit.paper.reproducing",
}

__all__ = ["Reproduction", "load_records", "reproduce"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hessinit.paper' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
