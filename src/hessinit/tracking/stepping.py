"""The optimizer as it stands in the middle of training: its rule, its rate, and what it divides by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.advising.adaptive import Adaptive
from hessinit.advising.groups import groups_by_weight, read_common_rule, slowness_of
from hessinit.advising.reading import Rule, read_word
from hessinit.advising.wrapped import unwrap_optimizer
from hessinit.curvature.operators import join
from hessinit.errors import ProblemError
from hessinit.problem.layers import find_layers
from hessinit.results.advice import Descent, check_rate

_NONE_GIVEN = dict.fromkeys(("momentum", "dampening", "betas", "alpha", "eps", "weight_decay"))
# One gradient is near 0 in some weights by mere chance, and these few would rule P^-½ H P^-½.
YOUNG = 5


class Stepping:
    """How the weights are stepped; asked anew at every measurement, since schedules change it.

    `rule` is None where the steps are not known, and `refusal` says why: there is a rate, and no edge.
    """

    def __init__(
        self, optimizer: Any, lr: float | None, model: nn.Module, layers: str | Iterable[str] | None
    ) -> None:
        self._optimizer = (
            unwrap_optimizer(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
        )
        self._model = model
        self._layers = list(layers) if layers is not None and not isinstance(layers, str) else layers
        self.given_lr = check_rate(lr)
        self.notes: tuple[str, ...] = ()
        self.refusal = ""
        self.rule: Rule | None = Descent()
        self.name = "" if self.given_lr is None else str(self.rule)
        if isinstance(optimizer, str):
            self.rule = read_word(optimizer, self.given_lr, _NONE_GIVEN).rule
            self.name = str(self.rule)
        elif self._optimizer is not None:
            self.weights()
            self._read(self._optimizer)
            self.name = type(self._optimizer).__name__ if self.refusal else str(self.rule)
            self.notes = (self.refusal,) if self.refusal else self.notes
        elif optimizer is not None:
            hint = " Pass an instance, not the class." if isinstance(optimizer, type) else ""
            raise ProblemError(
                f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer, a word such "
                f"as 'sgd', or None.{hint}"
            )

    def weights(self) -> list[str] | None:
        """The weights to measure now: those that the optimizer moves; None for all that `layers` says.

        They change when layers are frozen, unfrozen, or added to the optimizer.
        """
        if self._optimizer is None:
            return None
        moved = self.moved()
        held = [
            layer.parameter for layer in find_layers(self._model, self._layers) if layer.parameter in moved
        ]
        if not held:
            raise ProblemError(
                "the optimizer holds none of the measured weights of this model; build it from this model's "
                "parameters(), or measure what it holds with layers=."
            )
        return sorted(held)

    def moved(self) -> set[str]:
        """The parameters that training moves: those not frozen and, where there is one, in the optimizer."""
        trained = {name for name, one in self._model.named_parameters() if one.requires_grad}
        return trained if self._optimizer is None else trained & set(self._groups())

    def read(self) -> Rule | None:
        """The rule as it is now: a momentum may follow a schedule."""
        if self._optimizer is not None:
            self._read(self._optimizer)
        return self.rule

    @property
    def reads_rate(self) -> bool:
        """Whether the rate is the optimizer's, not one that was given."""
        return self._optimizer is not None and self.given_lr is None

    @property
    def lr(self) -> float | None:
        """The rate of the next step; the largest where groups differ."""
        return max(self._rates().values()) if self.reads_rate else self.given_lr

    def slowness(self, leaves: Mapping[str, Tensor]) -> Tensor | None:
        """The largest rate over that of each weight, flat; None where all are the same."""
        return slowness_of(self._rates(), leaves) if self.reads_rate else None

    def decay(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """The weight decay of each weight, flat; groups may have their own."""
        common = 0.0 if self.rule is None else self.rule.weight_decay
        own = {} if self._optimizer is None else self._groups()
        decays = {name: float(own[name]["weight_decay"]) if name in own else common for name in leaves}
        return join([torch.full_like(leaf, decays[name]).detach() for name, leaf in leaves.items()])

    def divisor(self, leaves: Mapping[str, Tensor]) -> Tensor | None:
        """`P = √v + eps` of the optimizer's own state, flat over `leaves`; None where it does not divide.

        inf where a weight does not move. Adam's `v` is corrected for its start at 0. Its mean gradient is
        not: that correction fades within some 1/(1 − β₁) steps, too few to diverge in.
        """
        if not isinstance(self.rule, Adaptive):
            return None
        return join([self._root_of_moment(name, leaf).detach() for name, leaf in leaves.items()])

    def age(self, leaves: Mapping[str, Tensor]) -> float:
        """How many gradients an adaptive optimizer has seen of the weight that it knows least; 0 for none."""
        states = [self._state(name) for name in leaves]
        ages = [float(state.get("step", YOUNG)) for state in states if self._moment(state) is not None]
        return min(ages, default=0.0)

    def _root_of_moment(self, name: str, leaf: Tensor) -> Tensor:
        assert isinstance(self.rule, Adaptive)
        moment = self._moment(self._state(name))
        if moment is None:  # no gradient has come yet
            return torch.full_like(leaf, math.inf)
        root = moment.detach().to(leaf).sqrt()
        return torch.where(root > 0, root + self.rule.eps, math.inf)

    def _state(self, name: str) -> Mapping[str, Any]:
        if self._optimizer is None:
            return {}
        return self._optimizer.state.get(self._model.get_parameter(name)) or {}

    def _moment(self, state: Mapping[str, Any]) -> Tensor | None:
        if "square_avg" in state:
            found: Tensor = state["square_avg"]
            return found
        # With amsgrad Adam divides by the largest so far.
        moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
        if moment is None or not isinstance(self.rule, Adaptive):
            return None
        corrected: Tensor = moment / (1 - self.rule.memory ** float(state["step"]))
        return corrected

    def _read(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            layers = find_layers(self._model, self._layers)
            trained = tuple(one for one in layers if self._is_trained(one.parameter))
            reading = read_common_rule(optimizer, self._model, trained)
            self.rule, self.refusal, self.notes = reading.rule, "", reading.notes
        except ProblemError as refusal:
            self.rule, self.refusal = None, f"No edge of stability: {refusal}"

    def _is_trained(self, name: str) -> bool:
        return self._model.get_parameter(name).requires_grad

    def _groups(self) -> dict[str, dict[str, Any]]:
        assert self._optimizer is not None
        return groups_by_weight(self._optimizer, self._model)

    def _rates(self) -> dict[str, float]:
        groups = self._groups()
        return {name: float(groups[name]["lr"]) for name in self.weights() or ()}
