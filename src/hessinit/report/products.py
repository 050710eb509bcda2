"""The Jacobian products of one layer and the bounds on its curvature that they give, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hessinit.estimate import Estimate
from hessinit.report.json_form import Plain, read_number


@dataclass(frozen=True)
class JacobianBounds:
    """‖J…J‖ before and after a layer, and what they say about its Gauss-Newton norm (Theorem 2).

    `forward` is the norm of the layer's input by the network's, `backward` of the network's output by what
    the layer gives behind its activation: means over the examples, with the largest beside them.
    `activation` is the largest |f'| at the layer's own outputs, 1 without an activation.

    `rigorous_bound` is never below the norm: ‖backward‖, ‖activation‖ and the actual input of the layer.
    `paper_bound` has ‖forward‖·‖x‖ for that input: no bound in the presence of biases, of activations with
    f(0) ≠ 0, or far from 0. `lipschitz_bound` is the naive product of the norms of all other layers and ‖x‖,
    with the same gaps. A number that is
    None has its `reason`, the last of them `lipschitz_reason`; `note` says what else to know.

    >>> one = Estimate(1.0, 0.0, True, "exact", 3)
    >>> layer = JacobianBounds(one, 1.0, one, 1.0, 1.0, 2.0, 2.0, 8.0)
    >>> layer == read_products({**vars(layer), "forward": vars(one), "backward": vars(one)})
    True
    """

    forward: Estimate | None
    forward_largest: float | None
    backward: Estimate | None
    backward_largest: float | None
    activation: float | None
    paper_bound: float | None
    rigorous_bound: float | None
    lipschitz_bound: float | None
    reason: str = ""
    lipschitz_reason: str = ""
    note: str = ""

    @property
    def converged(self) -> bool:
        """Whether both products reached the tolerance; those that are missing do not count."""
        return all(one.converged for one in (self.forward, self.backward) if one is not None)


def no_products(reason: str) -> JacobianBounds:
    """For a layer that has none."""
    return JacobianBounds(None, None, None, None, None, None, None, None, reason, reason)


def read_products(data: Plain) -> JacobianBounds:
    """Rebuild the products from plain data."""
    from hessinit.report.reading import read_estimate, read_if_there  # which imports this module

    return JacobianBounds(
        forward=read_if_there(read_estimate, data["forward"]),
        forward_largest=read_if_there(read_number, data["forward_largest"]),
        backward=read_if_there(read_estimate, data["backward"]),
        backward_largest=read_if_there(read_number, data["backward_largest"]),
        activation=read_if_there(read_number, data["activation"]),
        paper_bound=read_if_there(read_number, data["paper_bound"]),
        rigorous_bound=read_if_there(read_number, data["rigorous_bound"]),
        lipschitz_bound=read_if_there(read_number, data["lipschitz_bound"]),
        reason=str(data["reason"]),
        lipschitz_reason=str(data["lipschitz_reason"]),
        note=str(data["note"]),
    )
