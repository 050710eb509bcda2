"""The examples that are measured all along, as they were when tracking began."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hessinit.problem.batches import map_tensors, read_batches, tensors_in


def own_examples(batch: Any) -> Any:
    """The examples once and for all: an iterator gives them once, and a loader may use its tensors again."""
    found = [(_copied(one.inputs), _copied(one.targets)) for _, one in read_batches(batch)]
    return found[0] if len(found) == 1 else found


def _copied(structure: Any) -> Any:
    """Also inside objects of the user's own; where these cannot be copied, they are shared."""
    known = {id(tensor): tensor.clone() for tensor in tensors_in(structure)}
    try:
        # With those known beforehand: of a tensor that has a graph torch makes no deep copy.
        return copy.deepcopy(structure, known)
    except Exception:  # whatever a class of the user's raises
        return map_tensors(torch.clone, structure)
