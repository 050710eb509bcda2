"""The optimizer of torch inside those that trainers hand out."""

from __future__ import annotations

import torch

# Of Lightning, Fabric and accelerate: they pass a step on. Others, as Lookahead, step in their own way.
_WRAPPERS = {"LightningOptimizer", "_FabricOptimizer", "AcceleratedOptimizer"}


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one that steps; a wrapper that is not known is left, for its steps are not known either."""
    inner = getattr(optimizer, "optimizer", None)
    passes_on = _WRAPPERS & {kind.__name__ for kind in type(optimizer).__mro__}
    return unwrap_optimizer(inner) if passes_on and isinstance(inner, torch.optim.Optimizer) else optimizer
