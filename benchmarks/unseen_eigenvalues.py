"""How often does Lanczos take a lesser eigenvalue for the largest, and state an error that does not cover it?

python benchmarks/unseen_eigenvalues.py         # three minutes
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "src")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import hessinit  # noqa: E402
from hessinit.curvature.lanczos import Which, lanczos  # noqa: E402

SEEDS = 3000
Spectrum = Callable[[int, torch.Generator], Tensor]


def below(gap: float) -> Spectrum:
    """The second eigenvalue so far below the first, the others spread over [0, 0.6]."""

    def draw(size: int, generator: torch.Generator) -> Tensor:
        rest = 0.6 * torch.rand(size - 2, generator=generator, dtype=torch.float64)
        return torch.cat([torch.tensor([1.0, 1 - gap], dtype=torch.float64), rest])

    return draw


def beside(bottom: float, gap: float) -> Spectrum:
    """Those of `below`, and a negative one of larger size: the largest does not make the norm."""

    def draw(size: int, generator: torch.Generator) -> Tensor:
        return torch.cat([below(gap)(size, generator), torch.tensor([bottom], dtype=torch.float64)])

    return draw


def crowded(size: int, generator: torch.Generator) -> Tensor:
    """A quarter of all eigenvalues within 1e-4 to 1e-1 of the largest."""
    width = 10 ** (-4 + 3 * torch.rand(1, generator=generator, dtype=torch.float64))
    crowd = 1 - width * torch.rand(max(2, size // 4), generator=generator, dtype=torch.float64)
    return torch.cat([crowd / crowd.max(), 0.5 * torch.rand(size, generator=generator, dtype=torch.float64)])


def categories(size: int, generator: torch.Generator) -> Tensor:
    """Those of a linear model on one-hot inputs: counts of random categories."""
    counts = torch.randint(size, (20 * size,), generator=generator).bincount(minlength=size).double()
    return counts / counts.max()


SPECTRA: dict[str, Spectrum] = {
    **{f"the second {gap:.0%} below the first": below(gap) for gap in (0.01, 0.02, 0.05, 0.1)},
    "a quarter crowded at the top": crowded,
    "counts of random categories": categories,
    **{f"second {gap:.0%} below, beside -{n}": beside(-n, gap) for gap in (0.01, 0.05) for n in (3, 7)},
}


def runs(spectrum: Spectrum, size: int) -> Iterator[tuple[float, float, int]]:
    """How far off and the stated error, both over the largest, and the steps, for every seed."""
    for seed in range(SEEDS):
        values = spectrum(size, torch.Generator().manual_seed(seed))
        which: Which = "both" if values.min() < 0 else "top"
        found = lanczos(torch.diag(values), which=which, seed=seed).top
        largest = float(values.max())
        yield abs(found.value - largest) / largest, found.error / largest, found.products


def main() -> None:
    print(f"hessinit {hessinit.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"tolerance 1e-3, {SEEDS} seeds each\n")
    print(f"{'spectrum':34}{'size':>6}{'beyond the stated error':>26}{'worst':>8}{'steps':>7}")
    for name, spectrum in SPECTRA.items():
        for size in (40, 150):
            found = list(runs(spectrum, size))
            missed = [off for off, error, _ in found if off > error]
            steps = sum(products for *_, products in found) / SEEDS
            share = f"{len(missed)} ({len(missed) / SEEDS:.2%})"
            print(f"{name:34}{size:6}{share:>26}{max(missed, default=0):8.1%}{steps:7.1f}", flush=True)


if __name__ == "__main__":
    main()
