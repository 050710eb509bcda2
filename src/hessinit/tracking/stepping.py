"""The optimizer as it stands in the middle of training: its rule, its rate, and what it divides by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.advising.adaptive import Adaptive
from hessinit.advising.reading import Reading, Rule, read_optimizer, read_word
from hessinit.errors import ProblemError
from hessinit.operators.base import join
from hessinit.problem.layers import find_layers
from hessinit.report.descent import Descent, check_rate

_NONE_GIVEN = dict.fromkeys(("momentum", "dampening", "betas", "alpha", "eps", "weight_decay"))


class Stepping:
    """How the weights are stepped; asked anew at every measurement, since schedules change it.

    `parameters` are the weights to measure (None: those that `layers` says). `rule` is None for an optimizer
    whose steps are not known: it has a rate, and no edge.
    """

    def __init__(
        self, optimizer: Any, lr: float | None, model: nn.Module, layers: str | Iterable[str] | None
    ) -> None:
        self._optimizer = _unwrap(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
        self._model = model
        self._layers = list(layers) if layers is not None and not isinstance(layers, str) else layers
        self.given_lr = check_rate(lr)
        self.notes: tuple[str, ...] = ()
        self.parameters: list[str] | None = None
        self.rule: Rule | None = Descent()
        self.name = "" if self.given_lr is None else str(self.rule)
        if isinstance(optimizer, str):
            self.rule = read_word(optimizer, self.given_lr, _NONE_GIVEN).rule
            self.name = str(self.rule)
        elif self._optimizer is not None:
            self._read_for_the_first_time(self._optimizer)
        elif optimizer is not None:
            hint = " Pass an instance, not the class." if isinstance(optimizer, type) else ""
            raise ProblemError(
                f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer, a word such "
                f"as 'sgd', or None.{hint}"
            )

    def _read_for_the_first_time(self, optimizer: torch.optim.Optimizer) -> None:
        measured = {layer.parameter for layer in find_layers(self._model, self._layers)}
        held = [name for _, names in self._groups(optimizer) for name in names if name in measured]
        if not held:
            raise ProblemError(
                "the optimizer holds none of the measured weights of this model; build it from this model's "
                "parameters(), or measure what it holds with layers=."
            )
        self.parameters = sorted(held)
        try:
            reading = self._reading(optimizer)
            self.rule, self.name, self.notes = reading.rule, str(reading.rule), reading.notes
        except ProblemError as refusal:
            self.rule, self.name = None, type(optimizer).__name__
            self.notes = (f"No edge of stability: {refusal}",)

    def read(self) -> Rule | None:
        """The rule as it is now: a momentum may follow a schedule."""
        if self._optimizer is not None and self.rule is not None:
            self.rule = self._reading(self._optimizer).rule
        return self.rule

    @property
    def lr(self) -> float | None:
        """The rate of the next step; the largest where groups differ."""
        if self.given_lr is not None or self._optimizer is None:
            return self.given_lr
        return max(self._rates(self._optimizer).values())

    def divisor(self, leaves: Mapping[str, Tensor]) -> Tensor | None:
        """What the steps along the flat `leaves` are divided by, in units of the rate; None for nothing.

        `P = √v + eps` of the optimizer's own state times what its rate is below the largest; inf where a
        weight does not move. Adam's `v` is corrected for its start at 0. Its mean gradient is not: that
        correction fades within some 1/(1 − β₁) steps, too few to diverge in.
        """
        if self._optimizer is None:
            return None
        rates = self._rates(self._optimizer)
        largest = max(rates.values())
        even = all(rate == largest for rate in rates.values())
        adaptive = isinstance(self.rule, Adaptive)
        if (even or self.given_lr is not None) and not adaptive:
            return None
        parts = []
        for name, leaf in leaves.items():
            part = self._root_of_moment(name, leaf) if adaptive else torch.ones_like(leaf)
            slower = 1.0 if even or self.given_lr is not None else _ratio(largest, rates[name])
            parts.append(part.detach() * slower)
        return join(parts)

    @property
    def has_state(self) -> bool:
        """Whether an adaptive optimizer has seen a gradient."""
        return self._optimizer is not None and any(
            self._moment(parameter) is not None
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        )

    def _root_of_moment(self, name: str, leaf: Tensor) -> Tensor:
        assert isinstance(self.rule, Adaptive)
        moment = self._moment(self._model.get_parameter(name))
        if moment is None:  # no gradient has come yet
            return torch.full_like(leaf, math.inf)
        root = moment.detach().to(leaf).sqrt()
        return torch.where(root > 0, root + self.rule.eps, math.inf)

    def _moment(self, parameter: Tensor) -> Tensor | None:
        assert self._optimizer is not None
        state: Mapping[str, Any] = self._optimizer.state.get(parameter) or {}
        if "square_avg" in state:
            return state["square_avg"]
        # With amsgrad Adam divides by the largest so far.
        moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
        if moment is None or not isinstance(self.rule, Adaptive):
            return None
        return moment / (1 - self.rule.memory ** float(state["step"]))

    def _reading(self, optimizer: torch.optim.Optimizer) -> Reading:
        """Read it as one that has not stepped, with a single rate: both are looked at here."""
        stand_in = object.__new__(type(optimizer))
        groups = [{**group, "lr": 1.0} for group in optimizer.param_groups]
        for group in groups:
            group.pop("initial_lr", None)
        stand_in.__dict__.update(param_groups=groups, state={})
        reading = read_optimizer(stand_in, self._model, find_layers(self._model, self._layers))
        return replace(reading, lr=None)

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], list[str]]]:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return [
            (group, [names[id(one)] for one in group["params"] if id(one) in names])
            for group in optimizer.param_groups
        ]

    def _rates(self, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        measured = set(self.parameters or ())
        return {
            name: float(group["lr"])
            for group, names in self._groups(optimizer)
            for name in names
            if name in measured
        }


def _ratio(largest: float, rate: float) -> float:
    return largest / rate if rate else math.inf


def _unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one inside: Lightning and accelerate hand out wrappers."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer
