"""What a scheme or `initialize_` did to the weights, as plain data, with the way back."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.result import LATER, TRANSIENT, ByName, NamedLayer, Result


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class _Applied(Result):
    """A result that may have written weights."""

    # The way back belongs to the model, not to the data: it is not compared, shown, stored or
    # pickled.
    _go_back: Callable[[], None] | None = field(default=None, compare=False, metadata=TRANSIENT)

    @property
    def applied(self) -> bool:
        """Whether the weights were written; False for a dry run and for a copy."""
        return self._go_back is not None

    def undo(self) -> None:
        """Put every weight and bias back, in place and bit for bit."""
        if self._go_back is None:
            raise ValueError(
                "there is nothing to undo: this is a dry run, or a copy of what was applied."
            )
        self._go_back()


@dataclass(frozen=True, kw_only=True)
class PlannedWeight(NamedLayer):
    """One weight: its true fans, what lies around it, and the std that the scheme gives it.

    `fan_in`, `fan_out` and `std` (of the drawn entries) have one entry for each block of outputs:
    three for a fused qkv, four for an LSTM's gates, one for most. `variance_correction` makes up
    for examples that become less alike in deep networks of GELU, SiLU and similar activations.
    `unchanged` says why a weight is not written; it has no fans and no std then.
    """

    kind: str = ""
    fan_in: tuple[float, ...] = ()
    fan_out: tuple[float, ...] = ()
    upstream: str = ""
    downstream: str = ""
    norm_follows: bool = False
    closes_residual: bool = False
    gain: float = 1.0
    dropout_factor: float = 1.0
    variance_correction: float = 1.0
    std: tuple[float, ...] = ()
    unchanged: str = ""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SchemePlan(ByName[PlannedWeight], _Applied):
    """What a scheme does to each weight, in the order in which they run; `undo()` takes it back.

    >>> fans = {"fan_in": (64.0,), "fan_out": (16.0,)}
    >>> weight = PlannedWeight(name="fc1", shape=(16, 64), std=(0.125,), **fans)
    >>> plan = SchemePlan(scheme="lecun", layers=(weight,))
    >>> plan["fc1"].std, plan.applied
    ((0.125,), False)
    """

    KIND: ClassVar[str] = "hessinit scheme plan"

    scheme: str
    layers: tuple[PlannedWeight, ...]
    distribution: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement of the search: the norm of `layer` there, and the loss.

    For rule="network", `t` is the logarithm of the gain and `layer` is "network"; for
    rule="layers", `t` is None and `layer` the one farthest from the target.
    """

    t: float | None
    norm: float
    loss: float
    layer: str = "network"


@dataclass(frozen=True, kw_only=True)
class Symmetry:
    """A scaling that left the function as it was, and the norm before and after it.

    The curvature is that of these weights together, as the optimizer sees it. Scale-free weights
    have a normalization behind them; others were scaled against the gains of the normalizations
    that they read. It is not `exact` where an activation such as GELU stands between: then the
    function did change.
    """

    weights: tuple[str, ...]
    scale_free: bool
    exact: bool = True
    factors: dict[str, float]
    norm_before: float
    norm: float


# The starts that `initialize_` compares.
OURS = "hessinit"
YOURS = "your weights"

# The verdict on a short training (`training/trial.py`).
LEARNED = "learned"
DID_NOT_LEARN = "did not learn"
DIVERGED = "diverged"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A short training from the initial weights `name`, for some steps at a rate.

    `losses` are those of its mini-batches, each before its step. `score` is the mean loss of the
    last third, on held-out batches where batches come more than once; nan where the training
    diverged. `survived` says that it did not. `outcome` is "learned", "did not learn" or
    "diverged"; "" if it was not judged. `reason` says how it ended: "diverged by step 7".
    """

    name: str
    lr: float
    steps: int
    score: float
    survived: bool
    losses: tuple[float, ...]
    reason: str = ""
    outcome: str = field(default="", metadata=LATER)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Initialization(_Applied):
    """What `initialize_` did, and the way back.

    `scales` holds the factor of each weight on top of the scheme. `before` is None where the
    weights, or the network's output, were not finite. Reports hold the network alone where layers
    are costly to measure.

    >>> result = Initialization(
    ...     before=None, after=None, scales={"fc3": 0.5}, target=40.0, rule="network",
    ...     scheme="keep", scaling="last", converged=True, reason="within 5 %")
    >>> Initialization.from_json(result.to_json()) == result, result.applied
    (True, False)
    """

    KIND: ClassVar[str] = "hessinit initialization"
    SCHEMA: ClassVar[int] = 3

    before: CurvatureReport | None
    after: CurvatureReport | None
    scales: dict[str, float]
    target: float | None
    rule: str
    scheme: str
    scaling: str | None = None
    lr: float | None = None
    chose_lr: bool = field(default=False, metadata=LATER)  # lr="auto" found it
    kappa: float | None = None
    optimizer: str = "sgd"
    tolerance: float = 0.05
    converged: bool
    reason: str
    measurements: tuple[Measurement, ...] = ()
    symmetries: tuple[Symmetry, ...] = ()
    survival: Trial | None = None  # of the weights, for a few steps on the batch
    # Trials at the rate itself in random orders, of weights that may be at the edge of stability.
    orders: tuple[Trial, ...] = field(default=(), metadata=LATER)
    # From the new weights and from the user's own, those that were written first; then those of a
    # search for a rate.
    trials: tuple[Trial, ...] = ()
    plan: SchemePlan | None = None
    notes: tuple[str, ...] = ()
    seed: int = 0
    seconds: float | None = None
    gradients: float | None = field(default=None, metadata=LATER)
    _save_weights: Callable[[str | os.PathLike[str]], None] | None = field(
        default=None, compare=False, metadata=TRANSIENT
    )

    @property
    def flat_enough(self) -> bool:
        """Whether a target was left unmet because sharper weights would not learn faster."""
        is_safe = all(trial.survived for trial in self.orders)
        return not self.converged and self.scaling == "none" and self.kappa is not None and is_safe

    @property
    def learned(self) -> bool:
        """Whether the better start learned, as far as is known; else nothing was written."""
        if not self.trials or not self.trials[0].survived:
            return True
        return self.trials[0].outcome in ("", LEARNED)

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Write the model as it is now as safetensors, whole or not at all.

        Tied weights are stored once; `safetensors.torch.load_model(model, path)` reads them back.
        """
        if self._save_weights is None:
            raise ValueError(
                "there are no weights to save: this is a dry run, or a copy of what was applied. "
                "Run initialize_ with dry_run=False, or save the model itself."
            )
        self._save_weights(path)
