"""What tracking costs a training: seconds with and without, points, products; and why no search starts warm.

    python benchmarks/tracking_overhead.py | tee benchmarks/results/tracking_overhead.txt     # two minutes

One thread. Every training is 2,000 steps on the digits in mini-batches of 64, alone and then tracked on 256
examples every ten steps within a tenth of the time. A measurement's cost is in steps of the training alone.
The first measurement is not held back, wakes torch up, and counts. Run it on an idle machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn

from hessinit.curvature.lanczos import lanczos
from hessinit.digits import load_digits
from hessinit.measurement.measure import hessian
from hessinit.results.track_record import Tracking
from hessinit.training.track import TrackSettings, track

STEPS, EVERY, EXAMPLES, MAX_OVERHEAD = 2000, 10, 256, 0.1
LOSS = nn.CrossEntropyLoss()
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    ),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
}
CASES = [
    ("dense", "sgd", "gauss-newton"),
    ("dense", "sgd", "hessian"),
    ("dense", "adam", "gauss-newton"),
    ("convolution", "sgd", "gauss-newton"),
    ("convolution", "adam", "gauss-newton"),
]


@dataclass(frozen=True)
class Trained:
    """One training: how long it took, what was tracked, and the seconds of measurements at the end."""

    seconds: float
    tracking: Tracking | None = None
    afterwards: tuple[float, ...] = ()


def main() -> None:
    torch.set_num_threads(1)
    images, labels = load_digits()
    images = (images - images.mean()) / images.std()
    _show_overhead(images, labels)
    _show_warm_starts(images, labels)
    print(f"torch {torch.__version__}, one thread")


def _show_overhead(images: Tensor, labels: Tensor) -> None:
    head = f"{'network':12s} {'optimizer':9s} {'curvature':13s} {'alone':>7s} {'tracked':>8s}"
    print(f"{head} {'overhead':>8s} {'points':>6s} {'products':>8s} {'steps each':>10s}")
    for network, optimizer, curvature in CASES:
        alone = _train(network, optimizer, curvature, images, labels, follow=False)
        tracked = _train(network, optimizer, curvature, images, labels, follow=True)
        assert tracked.tracking is not None
        points = tracked.tracking.points
        products = statistics.fmean(point.products for point in points)
        each = statistics.median(tracked.afterwards)
        print(
            f"{network:12s} {optimizer:9s} {curvature:13s} {alone.seconds:6.1f}s {tracked.seconds:7.1f}s "
            f"{100 * tracked.tracking.overhead:6.1f} % {len(points):6d} {products:8.1f} "
            f"{each / (alone.seconds / STEPS):10.0f}",
            flush=True,
        )


def _train(
    network: str, optimizer: str, curvature: str, images: Tensor, labels: Tensor, *, follow: bool
) -> Trained:
    torch.manual_seed(0)
    model = NETWORKS[network]()
    stepper = OPTIMIZERS[optimizer](model)
    begun = time.perf_counter()
    tracker = None
    if follow:
        tracker = track(
            model, LOSS, (images[:EXAMPLES], labels[:EXAMPLES]), optimizer=stepper, every=EVERY,
            max_overhead=MAX_OVERHEAD, path=None, settings=TrackSettings(curvature=curvature, warn=False),
        )  # fmt: skip
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (64,))
        stepper.zero_grad()
        value = LOSS(model(images[chosen]), labels[chosen])
        value.backward()
        stepper.step()
        if tracker is not None:
            tracker.step(value)
    seconds = time.perf_counter() - begun
    if tracker is None:
        return Trained(seconds)
    tracking = tracker.tracking
    return Trained(seconds, tracking, tuple(tracker.measure().measuring_seconds for _ in range(5)))


def _show_warm_starts(images: Tensor, labels: Tensor) -> None:
    """Starting from the last sharpest direction saves products, and misses a new one that is sharper."""
    print("\nexact Hessian of the dense network every ten steps: products from a random and a warm start")
    torch.manual_seed(0)
    model = NETWORKS["dense"]()
    stepper = OPTIMIZERS["sgd"](model)
    cold, warm, last = [], [], None
    for step in range(100):
        if step % 10 == 0:
            operator = hessian(model, LOSS, (images[:EXAMPLES], labels[:EXAMPLES]))
            found = lanczos(operator, tolerance=1e-2, vectors=True)
            cold.append(found.steps)
            if last is not None:
                warm.append(lanczos(operator, tolerance=1e-2, start=last).steps)
            assert found.top_vector is not None
            assert found.bottom_vector is not None
            last = found.top_vector + found.bottom_vector
        chosen = torch.randint(len(images), (64,))
        stepper.zero_grad()
        LOSS(model(images[chosen]), labels[chosen]).backward()
        stepper.step()
    print(f"random {statistics.fmean(cold):.1f}, warm {statistics.fmean(warm):.1f}")
    print(
        "a direction that became sharper than the last one, by …: how many of 200 searches missed it unawares"
    )
    for sharper in (1.05, 1.3, 2.0):
        values = torch.zeros(1000)
        values[:50] = 0.5 * torch.logspace(0, -3, 50)
        values[50], values[51] = 1.0, sharper
        old = torch.zeros(1000)
        old[50] = 1.0
        missed = {
            name: sum(_misses(values, sharper, start, seed) for seed in range(200))
            for name, start in (("random", None), ("warm", old))
        }
        print(f"{sharper:4.2f}: random {missed['random']:3d}, warm {missed['warm']:3d}")


def _misses(values: Tensor, sharper: float, start: Tensor | None, seed: int) -> bool:
    found = lanczos(torch.diag(values), which="top", tolerance=1e-2, seed=seed, start=start).top
    return found.converged and found.value < 0.98 * sharper


if __name__ == "__main__":
    main()
