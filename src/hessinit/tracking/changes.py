"""What is not as it was before: other weights, or parts of the model in another mode."""

from __future__ import annotations

from torch import nn

_MOST = 3


class Changes:
    """Remembers, and remarks on what would make two points differ for another reason than the training."""

    def __init__(self) -> None:
        self._weights: frozenset[str] | None = None
        self._modes: dict[str, bool] | None = None

    def remark(self, model: nn.Module, weights: tuple[str, ...]) -> list[str]:
        """Weights are compared with the last point, modes with the first."""
        said = [*self._remark_on_weights(frozenset(weights)), *self._remark_on_modes(model)]
        self._weights = frozenset(weights)
        return said

    def _remark_on_weights(self, now: frozenset[str]) -> list[str]:
        before = now if self._weights is None else self._weights
        changes = [
            f"{word} {_shown(sorted(names))}"
            for word, names in (("with", now - before), ("without", before - now))
            if names
        ]
        return [f"Other weights are measured from here on: {', '.join(changes)}."] if changes else []

    def _remark_on_modes(self, model: nn.Module) -> list[str]:
        modes = {name: module.training for name, module in model.named_modules()}
        first = self._modes = self._modes or modes
        other = [name for name, mode in modes.items() if first.get(name, mode) != mode]
        if not other:
            return []
        which = "the model" if "" in other else _shown(other)
        now, then = ("train", "eval") if modes[other[0]] else ("eval", "train")
        verb = "was" if "" in other or len(other) == 1 else "were"
        where = f"{verb} in {now} mode, and in {then} mode at the first point"
        return [f"{which[0].upper()}{which[1:]} {where}: dropout and normalization may differ."]


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
