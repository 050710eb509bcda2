"""What first-order users look at in a layer: its activations, its gradients, and how many units are idle."""

from __future__ import annotations

from dataclasses import dataclass

from hessinit.report.json_form import Plain, read_number


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """One layer's numbers over all examples, positions and uses; None where there is nothing to say.

    `activation_mean` and `_std` are of what the layer gives on: after its `activation` ("relu", "tanh", …) if
    an elementwise one follows, directly or behind a normalization, else ("") its own output.
    `preactivation_std` is of its own output, with its bias. `gradient_mean` and `_std` are of the loss
    gradient by what it gives on, and `weight_gradient_norm` is the Frobenius norm of the loss gradient by the
    weight.

    `dead` is the share of units (channels of convolutions) that give 0 for every example and position: of
    activations that are flat at 0 (relu, relu6, threshold). `saturated` is the share of entries where the
    slope of a bounded activation (tanh, sigmoid, hardtanh, hardsigmoid, erf) is below 5 % of its largest.

    `correlation` asks whether the loss gradient by an output depends on that output's gradient by a unit of
    the layer, over examples: the root mean square of Pearson's r over `pairs` pairs of an output and a unit.
    `correlated` is the share of pairs that are significant at 5 %, so 0.05 is what independence gives.
    `reason` says why something is None.
    """

    activation: str = ""
    activation_mean: float | None = None
    activation_std: float | None = None
    preactivation_std: float | None = None
    gradient_mean: float | None = None
    gradient_std: float | None = None
    weight_gradient_norm: float | None = None
    dead: float | None = None
    saturated: float | None = None
    correlation: float | None = None
    correlated: float | None = None
    pairs: int = 0
    reason: str = ""


_NUMBERS = (
    "activation_mean", "activation_std", "preactivation_std", "gradient_mean", "gradient_std",
    "weight_gradient_norm", "dead", "saturated", "correlation", "correlated",
)  # fmt: skip


def read_diagnostics(data: Plain) -> Diagnostics:
    """Rebuild diagnostics from what `to_plain` made of them.

    >>> from hessinit.report.json_form import to_plain
    >>> diagnostics = Diagnostics(activation="relu", dead=0.25, gradient_std=float("inf"))
    >>> read_diagnostics(to_plain(diagnostics)) == diagnostics
    True
    """
    return Diagnostics(
        activation=str(data["activation"]),
        pairs=int(data["pairs"]),
        reason=str(data["reason"]),
        **{name: None if data[name] is None else read_number(data[name]) for name in _NUMBERS},
    )
