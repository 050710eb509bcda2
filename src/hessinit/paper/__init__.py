"""The paper's experiments: `reproduce("table-4")` makes a table again, beside the printed numbers.

Skorski, Theobald, Temperoni, "Revisiting Weight Initialization of Deep Neural Networks" (arXiv
2004.09506).
"""

from __future__ import annotations

from hessinit.paper.experiments import load_records, reproduce
from hessinit.results.reproduction import Reproduction

__all__ = ["Reproduction", "load_records", "reproduce"]
