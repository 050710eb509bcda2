"""The closed-form rules: which variance a weight gets, given its fans and what lies around it.

Two families that are easily mixed up. By *norms* (the paper): `forward` keeps the length of the whole signal,
so it divides by the outputs. By *units* (LeCun, Glorot, He): the variance of each unit is kept, so the
forward rule divides by the inputs. Their compromise is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from hessinit.schemes.geometry import Fans

CLOSED_FORM = ["forward", "backward", "compromise", "lecun", "glorot", "he"]
SCHEMES = [*CLOSED_FORM, "orthogonal", "delta-orthogonal", "lsuv", "default"]
USES_GAIN = ["forward", "backward", "compromise", "he", "orthogonal", "delta-orthogonal"]
SYNONYMS = {"kaiming": "he", "xavier": "glorot", "msra": "he", "pytorch": "default", "torch": "default"}
BY_NORMS = ["forward", "backward", "compromise"]


@dataclass(frozen=True)
class Around:
    """What a rule needs to know of the surroundings: gains, and the kept shares of dropout.

    The gain before is 1/√E f(z)², that after 1/√E f'(z)². A dropout that keeps a share q of the units and
    scales them by 1/q multiplies the squared length of a signal by 1/q, in both passes; hence σ·√q.
    """

    gain_before: float = 1.0
    gain_after: float = 1.0
    keep_before: float = 1.0
    keep_after: float = 1.0


def variance(scheme: str, fans: Fans, around: Around) -> float:
    """The variance of the weight's entries under one of the closed forms.

    >>> variance("he", Fans(50, 20), Around(gain_before=2**0.5)), variance("forward", Fans(50, 20), Around())
    (0.04000000000000001, 0.05)
    """
    before, after = around.gain_before**2, around.gain_after**2
    if scheme == "forward":
        return before * around.keep_before / fans.outputs
    if scheme == "backward":
        return after * around.keep_after / fans.inputs
    if scheme == "compromise":
        # The harmonic mean of the two above: 2/(in + out) where there is neither gain nor dropout.
        return 2 / (fans.outputs / (before * around.keep_before) + fans.inputs / (after * around.keep_after))
    if scheme == "lecun":
        return around.keep_before / fans.inputs
    if scheme == "glorot":
        return 2 * around.keep_before / (fans.inputs + fans.outputs)
    assert scheme == "he", scheme
    return before * around.keep_before / fans.inputs


def gain_used(scheme: str, around: Around) -> float:
    """The gain that the scheme multiplies by, for the table; a mean where there are two, 1 for bare ones."""
    if scheme not in USES_GAIN:
        return 1.0
    if scheme == "backward":
        return around.gain_after
    if scheme == "compromise":
        plain, same = Fans(1, 1), Around(around.gain_before, around.gain_after)
        return variance(scheme, plain, same) ** 0.5
    return around.gain_before
