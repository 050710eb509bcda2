"""Do examples see each other? Asked of any linear map by a factor for each example."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# So few examples are told apart to the last bit, by two probes for each binary digit of their number.
FEW_EXAMPLES = 16


def probe_examples(
    pull: Callable[[Tensor], list[Tensor]], cotangent: Tensor, random: Tensor
) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor]]:
    """Two answers of a linear `pull`, the second to a cotangent with a factor for each example; the factors.

    Where examples do not see each other, whatever belongs to one grows by its own factor. For few examples
    the factors are 0 and 1 by each binary digit of their number in turn, so that the zeros are exact; for
    many they are random.
    """
    size = len(random)
    whole = pull(cotangent)
    if size > FEW_EXAMPLES:
        choices = [1 + random.abs()]
    else:
        numbers = torch.arange(size, device=random.device)
        digits = range((size - 1).bit_length())
        choices = [((numbers >> digit) % 2 == value).to(random) for digit in digits for value in (0, 1)]
    for factors in choices:
        yield whole, pull(cotangent * factors.view(-1, *[1] * (cotangent.ndim - 1))), factors


def in_proportion(whole: Tensor, shared: Tensor, factors: Tensor) -> bool:
    """Whether every row of `shared` is that of `whole` times its factor, but for rounding; 0 is exact."""
    difference = (shared - whole * factors.unsqueeze(1)).abs().amax(1)
    rounding = torch.finfo(whole.dtype).eps ** 0.5
    return bool((difference <= rounding * factors * whole.abs().amax(1)).all())
