"""The paper's experiments: `reproduce("table-4")` makes a table again, beside the printed numbers.

Skorski, Theobald, Temperoni, "Revisiting Weight Initialization of Deep Neural Networks" (arXiv
2004.09506). `quadratic_form` compares its Theorem 1 with the exact Hessian on any problem. Of
hessinit only public names are imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hessinit_paper.quadratic_forms import QuadraticForm, QuadraticForms
from hessinit_paper.reproduction import Reproduction

if TYPE_CHECKING:
    from hessinit_paper.experiments import load_records, reproduce
    from hessinit_paper.theorem_1 import quadratic_form

__all__ = [
    "QuadraticForm",
    "QuadraticForms",
    "Reproduction",
    "load_records",
    "quadratic_form",
    "reproduce",
]
# Imported on first use: a saved record is read and shown without torch.
_VERBS = {"load_records": "experiments", "quadratic_form": "theorem_1", "reproduce": "experiments"}


def __getattr__(name: str) -> Any:
    if name not in _VERBS:
        raise AttributeError(f"module 'hessinit_paper' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hessinit_paper.{_VERBS[name]}"), name)
