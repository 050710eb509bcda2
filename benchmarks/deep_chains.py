"""Deep chains of GELU and SiLU: final loss from orthogonal weights and from `initialize_`, whose
pre-activations have a standard deviation of 1 to 16.

    python benchmarks/deep_chains.py         10 minutes on one core; prints benchmarks/results/deep_chains.txt

The embedded digits, width 64, 300 steps of SGD with batches of 64; the mean loss of the last 30 steps, for
three seeds. "chosen" is what `initialize_` takes by itself.
"""

from __future__ import annotations

import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn

from hessinit import Problem, apply_scheme_, initialize_
from hessinit.digits import load_digits
from hessinit.init import mean_field

SIZES = (1.0, 2.0, 4.0, 8.0, 16.0)
LOSS = nn.CrossEntropyLoss()


def chain(activation: type[nn.Module], depth: int) -> nn.Sequential:
    hidden = [part for _ in range(depth - 1) for part in (nn.Linear(64, 64), activation())]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def train(model: nn.Module, images: Tensor, labels: Tensor, lr: float) -> float:
    optimizer, source, losses = torch.optim.SGD(model.parameters(), lr), torch.Generator().manual_seed(5), []
    for _ in range(300):
        some = torch.randint(0, 1500, (64,), generator=source)
        loss = LOSS(model(images[some]), labels[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    images, labels = load_digits()
    images = (images.flatten(1) - images.mean()) / images.std()
    chosen = mean_field.preactivation_stds
    starts = ("orthogonal", *SIZES, "chosen")
    print(f"{'':18s}" + "".join(f"{start!s:>18s}" for start in starts))
    for activation in (nn.GELU, nn.SiLU):
        for depth in (10, 14, 18, 24, 31):
            for lr in (0.003, 0.01, 0.03):
                texts = []
                for start in starts:
                    found = []
                    for seed in range(3):
                        torch.manual_seed(seed)
                        model, batch = chain(activation, depth), (images[:64], labels[:64])
                        if start == "orthogonal":
                            source = torch.Generator().manual_seed(seed)
                            apply_scheme_(model, start, sample=batch[0], generator=source)
                        else:
                            asked = lambda uses: {use.parameter: start for use in uses[:-1]}  # noqa: B023, E731
                            mean_field.preactivation_stds = chosen if start == "chosen" else asked
                            initialize_(Problem(model, LOSS, batch, seed=seed), lr=lr)
                        found.append(train(model, images, labels, lr))
                    texts.append(" ".join(f"{loss:.2f}" for loss in found))
                name = f"{activation.__name__} {depth} {lr:g}"
                print(f"{name:18s}" + "".join(f"{text:>18s}" for text in texts), flush=True)
    print(f"torch {torch.__version__}, one thread")


if __name__ == "__main__":
    main()
