"""The activation that follows a use of a weight, read off the autograd graph."""

from __future__ import annotations

from torch import Tensor

from hessinit.curvature.layer_uses import Node

# Elementwise nodes of one input, and what people call them.
ACTIVATIONS = {
    "CeluBackward0": "celu",
    "EluBackward0": "elu",
    "ErfBackward0": "erf",
    "GeluBackward0": "gelu",
    "HardshrinkBackward0": "hardshrink",
    "HardsigmoidBackward0": "hardsigmoid",
    "HardswishBackward0": "hardswish",
    "HardtanhBackward0": "hardtanh",
    "LeakyReluBackward0": "leaky_relu",
    "LogSigmoidBackward0": "logsigmoid",
    "MishBackward0": "mish",
    "PreluKernelBackward0": "prelu",
    "ReluBackward0": "relu",
    "RreluWithNoiseBackward0": "rrelu",
    "SigmoidBackward0": "sigmoid",
    "SiluBackward0": "silu",
    "SinBackward0": "sin",
    "SoftplusBackward0": "softplus",
    "SoftshrinkBackward0": "softshrink",
    "TanhBackward0": "tanh",
    "ThresholdBackward0": "threshold",
}

# Nodes that only rearrange what they get.
REARRANGING = {
    "AliasBackward0", "CloneBackward0", "ContiguousBackward0", "PermuteBackward0", "ReshapeAliasBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "TBackward0", "TransposeBackward0", "TransposeBackward1",
    "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip

NORMALIZING = {
    "CudnnBatchNormBackward0", "MiopenBatchNormBackward0", "NativeBatchNormBackward0",
    "NativeGroupNormBackward0", "NativeLayerNormBackward0",
}  # fmt: skip


def activation_kind(node: Node) -> str | None:
    """What people call an activation's node; None for any other node.

    Some in-place activations have nodes of their own: `LeakyReluBackward1` beside `LeakyReluBackward0`.
    """
    return ACTIVATIONS.get(type(node).__name__.rstrip("0123456789") + "0")


class Consumers:
    """Who consumes what each node gives, over all the nodes behind `output`."""

    def __init__(self, output: Tensor) -> None:
        self.of: dict[Node, list[Node]] = {}
        waiting: list[Node] = [output.grad_fn]
        seen = {output.grad_fn}
        while waiting:
            node = waiting.pop()
            for source, _ in node.next_functions:
                if source is None:
                    continue
                self.of.setdefault(source, []).append(node)
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)

    def activation_after(self, node: Node) -> Node | None:
        """The elementwise activation that alone consumes what `node` gives, or None.

        Rearranging and the addition of a bias are looked through; anything else in between ends the search.
        """
        while True:
            found = self.of.get(node, [])
            if len(found) != 1:
                return None
            if activation_kind(found[0]) is not None:
                # PReLU's slope, say, is not what it acts on.
                return found[0] if found[0].next_functions[0][0] is node else None
            kind = type(found[0]).__name__
            if kind not in REARRANGING and not (kind == "AddBackward0" and _adds_a_bias(found[0], node)):
                return None
            node = found[0]


def _adds_a_bias(addition: Node, node: Node) -> bool:
    """Whether the other summand is a constant or a weight, not something that the forward computed."""
    others = [source for source, _ in addition.next_functions if source is not node]
    if addition._saved_alpha != 1:
        return False
    return all(source is None or type(source).__name__ == "AccumulateGrad" for source in others)
