"""Is the advice on the learning rate any good? Trains nine nets on digits at many rates beside it.

`python benchmarks/learning_rates.py` (2 minutes on one core) prints, for each net and batch size, the advised
and the stable rate for Adam, what other preconditioners would have advised, and the loss over rates. With
`warmup` it prints (4 minutes) the loss at multiples of the stable rate with warmups of several lengths. One
seed; what it printed is in results/learning_rates.txt.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

import hessinit
from hessinit import advise
from hessinit.curvature.lanczos import lanczos
from hessinit.curvature.preconditioner import ScaledCurvature
from hessinit.digits import load_digits

RATES = (3e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
LOSS = nn.CrossEntropyLoss()
OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
}


def perceptron(
    depth: int, activation: Callable[[], nn.Module], width: int = 64, scheme: str = ""
) -> nn.Module:
    sizes = [64, *[width] * (depth - 1)]
    parts = [m for a, b in zip(sizes, sizes[1:], strict=False) for m in (nn.Linear(a, b), activation())]
    model = nn.Sequential(*parts, nn.Linear(sizes[-1], 10))
    if scheme:
        hessinit.apply_scheme_(model, scheme)
    return model


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1, stride=2)
        parts = (
            nn.Unflatten(1, (1, 8, 8)),
            first,
            nn.ReLU(),
            second,
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )
        super().__init__(*parts)


class Transformer(nn.Module):
    """Post-LN, three layers; the rows of the image are its words."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True)
        self.embed, self.last = nn.Linear(8, 32), nn.Linear(32, 10)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.embed(x.view(-1, 8, 8))).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x.view(-1, 8, 8))[0][:, -1])


NETS: dict[str, Callable[[], nn.Module]] = {
    "relu-3": lambda: perceptron(3, nn.ReLU),
    "relu-3 wide": lambda: perceptron(3, nn.ReLU, 512),
    "gelu-3": lambda: perceptron(3, nn.GELU),
    "tanh-10": lambda: perceptron(10, nn.Tanh),
    "relu-10 he": lambda: perceptron(10, nn.ReLU, scheme="he"),
    "relu-20 he": lambda: perceptron(20, nn.ReLU, scheme="he"),
    "conv-3": Convolutional,
    "post-LN": Transformer,
    "lstm": Recurrent,
}


def draw(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(len(LABELS), (size,), generator=generator)
    return IMAGES[chosen], LABELS[chosen]


def train(name: str, optimizer: str, lr: float, size: int, steps: int, warmup: int = 0) -> float:
    """The mean loss of the last 20 steps, the rate raised linearly over the first ones."""
    torch.manual_seed(0)
    model, generator = NETS[name](), torch.Generator().manual_seed(1)
    stepper, losses = OPTIMIZERS[optimizer](model.parameters(), lr), []
    for step in range(steps):
        stepper.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / (warmup + 1))
        images, labels = draw(size, generator)
        stepper.zero_grad()
        loss = LOSS(model(images), labels)
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def fresh_batches_rate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """1/norm with P from 20 further mini-batches: what the advice estimates from one."""
    operator = hessinit.gauss_newton(model, LOSS, batch)
    weights = [dict(model.named_parameters())[name] for name in operator.names]
    generator, square = torch.Generator().manual_seed(5), torch.zeros(operator.shape[0])
    for _ in range(20):
        images, labels = draw(len(batch[1]), generator)
        gradient = torch.autograd.grad(LOSS(model(images), labels), weights)
        square += torch.cat([part.flatten() for part in gradient]).square() / 20
    divisor = torch.where(square > 0, square.sqrt() + 1e-8, torch.inf)
    return 1 / lanczos(ScaledCurvature(operator, divisor), which="top").norm.value


def compare_rates() -> None:
    heads = "".join(f"{rate:>8g}" for rate in RATES)
    print("Adam, 80 steps. advised: 1/norm; fresh: P from 20 batches.")
    print(f"{'net':12}{'batch':>6}{'advised':>9}{'stable':>9}{'fresh':>9} |{heads}")
    for name, build in NETS.items():
        for size in (64, 256):
            torch.manual_seed(0)
            model, batch = build(), (IMAGES[:size], LABELS[:size])
            advice = advise(model, LOSS, batch, optimizer="adam")
            rates = advice.learning_rate, advice.stable_learning_rate
            rates += (fresh_batches_rate(model, batch),)
            losses = "".join(f"{train(name, 'adam', rate, size, 80):8.2f}" for rate in RATES)
            print(f"{name:12}{size:6}{''.join(f'{rate:9.2g}' for rate in rates)} |{losses}", flush=True)


def compare_warmups() -> None:
    print("Batch 64, 140 steps, at multiples of the stable rate: loss without warmup / 10 / 40 / 100 steps.")
    for name in ("relu-3", "tanh-10", "relu-10 he", "conv-3", "relu-20 he", "post-LN"):
        for optimizer in OPTIMIZERS:
            torch.manual_seed(0)
            stable = advise(
                NETS[name](), LOSS, (IMAGES[:64], LABELS[:64]), optimizer=optimizer
            ).stable_learning_rate
            cells = []
            for times in (0.5, 2, 4, 8):
                losses = [
                    train(name, optimizer, times * stable, 64, 140, warmup) for warmup in (0, 10, 40, 100)
                ]
                cells.append(f"{times:g}× " + "/".join(f"{loss:.2f}" for loss in losses))
            print(f"{name:12}{optimizer:9}{stable:8.2g} | {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    IMAGES, LABELS = load_digits()
    IMAGES = IMAGES.flatten(1)
    IMAGES = (IMAGES - IMAGES.mean()) / IMAGES.std()
    print(f"hessinit {hessinit.__version__}, torch {torch.__version__}, {platform.machine()}")
    compare_warmups() if "warmup" in sys.argv[1:] else compare_rates()
