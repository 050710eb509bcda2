"""Does the learning rate of one size of a network suit another? Loss by rate × width, depth, batch size.

    export HESSINIT_DATA=folder
    python benchmarks/transfer.py --workers 8                       everything that is missing in the record
    python benchmarks/transfer.py --part width --networks mlp gpt   a part; --starts, --seeds 3, --device cuda
    python benchmarks/transfer.py --workers 2 --seconds 600         stop after ten minutes; run again to go on
    python benchmarks/transfer.py --show                            the tables (results/transfer.txt)
    python benchmarks/transfer.py --draw FILE --draw-depth FILE     the pictures; --networks chooses rows

A training takes 250 steps of SGD without momentum, or of AdamW (torch's settings), with cosine decay to 0.
The loss is that on held-out examples after the last step; null where the training diverged. All trainings of
a seed and batch size see the same mini-batches.

| network | data | widths | examples in a batch |
|---|---|---|---|
| MLP of six layers, without and with LayerNorm | Fashion-MNIST | 32 to 512 | 64 |
| CNN of six layers, without and with BatchNorm | CIFAR-10 | 8 to 64 channels | 32 |
| pre-LN transformer of two layers | Wikipedia's characters | 32 to 256 | 8 windows of 32 |

Both MLPs of width 128 are also trained with 3 to 24 layers (`--part depth`) and with batches of 16 to 256
examples (`--part batch`).

Starts: PyTorch's own weights; He's; `hessinit.initialize_` at the rate of the training, given one batch; and
for widths µP by the package `mup` 1.0 (`pip install --no-deps mup pyyaml`): its readout and optimizers, 1/d
in attention, base shapes of the smallest width. mup leaves open from which weights it starts, and whether
readout and queries begin at 0. Of these choices the ones are taken that trained best at two widths: no zeros,
He's weights in networks without normalization, and PyTorch's own in the others.

A finished training is appended to the record at once, and what is there is not made again. One seed takes
about 35 minutes on a CPU core: 29 for the widths, 3 for the depths and 2 for the batch sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, here and in the workers

import torch
from record import run_facts
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import hessinit
from arena import data
from arena.tasks import next_character
from hessinit.training import loop
from hessinit.training.loop import copy_to, derive, read_data, reproducible, seed_everything

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS = 250
DEPTH, MIDDLE_WIDTH = 6, 128
LENGTH, LAYERS, HEADS = 32, 2, 4  # of the transformer
HELD_OUT_WINDOWS = 512
STARTS = {"pytorch": "PyTorch's own", "he": "He", "mup": "µP", "hessinit": "hessinit"}
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}
RATES = {"sgd": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), "adamw": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
HIGHER_RATES = {**RATES, "sgd": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)}
WEIGHT_DECAY = 0.01  # that of torch's AdamW; mup's has none of its own
WIDTHS, CHANNELS, MODEL_WIDTHS = (32, 64, 128, 256, 512), (8, 16, 32, 64), (32, 64, 128, 256)
DEPTHS, BATCH_SIZES = (3, 6, 12, 24), (16, 64, 256)
RECORD = Path(__file__).parent / "results" / "transfer.jsonl"
Row = dict[str, Any]


# --- Networks ---------------------------------------------------------------------------------------------


def mlp(width: int, depth: int, *, normalized: bool, muP: bool = False) -> nn.Sequential:
    """`depth` weights: 784 → width → … → 10."""
    layers: list[nn.Module] = [nn.Flatten()]
    fan_in = 784
    for _ in range(depth - 1):
        norm = [nn.LayerNorm(width)] if normalized else []
        layers += [nn.Linear(fan_in, width), *norm, nn.ReLU()]
        fan_in = width
    return nn.Sequential(*layers, readout(muP)(fan_in, 10))


def cnn(width: int, depth: int, *, normalized: bool, muP: bool = False) -> nn.Sequential:
    """3 × 3 convolutions of `width` channels, down to 4 × 4 pixels, and a classifier."""
    layers: list[nn.Module] = []
    channels = 3
    for place in range(depth - 1):
        stride = 2 if place in (0, 1, 3) else 1
        norm = [nn.BatchNorm2d(width)] if normalized else []
        layers += [nn.Conv2d(channels, width, 3, stride, 1), *norm, nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), readout(muP)(16 * channels, 10))


class Block(nn.Module):
    """A causal pre-LN transformer layer; `scale` multiplies the products of queries and keys."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, state: Tensor) -> Tensor:
        normalized = self.norm1(state)
        joined = torch.cat([self.query(normalized), self.key_value(normalized)], -1)
        parts = joined.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=self.scale)
        state = state + self.projection(mixed.transpose(1, 2).flatten(2))
        return state + self.down(nn.functional.gelu(self.up(self.norm2(state))))


class GPT(nn.Module):
    """A language model of characters, with `depth` layers."""

    def __init__(self, width: int, depth: int, *, muP: bool = False) -> None:
        super().__init__()
        size = width // HEADS
        # µP scales by 1/d; at the base width that is the usual 1/√d.
        scale = math.sqrt(MODEL_WIDTHS[0] // HEADS) / size if muP else 1 / math.sqrt(size)
        self.embed = nn.Embedding(data.VOCABULARY, width)
        self.position = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, scale) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = readout(muP)(width, data.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.embed(tokens) + self.position.weight
        for block in self.blocks:
            state = block(state)
        return self.head(self.norm(state))


def readout(muP: bool) -> Callable[[int, int], nn.Module]:
    """The class of the last layer."""
    if not muP:
        return nn.Linear
    import mup

    return mup.MuReadout


@dataclass(frozen=True)
class Network:
    """A network, its data and sizes; `chance` is the loss of guessing.

    `positions` says how often an example uses a weight, times how slow that is.
    """

    title: str
    build: Callable[..., nn.Module]
    data: Callable[..., data.Examples]
    widths: tuple[int, ...]
    chance: float = math.log(10)
    rates: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: RATES)
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    depth: int = DEPTH
    batch_size: int = 64
    positions: int = 1

    def model(self, width: int, depth: int, start: str) -> nn.Module:
        """A new model; one in µP has its initial weights."""
        return self._build_mup(width, depth) if start == "mup" else self.build(width, depth)

    def _build_mup(self, width: int, depth: int) -> nn.Module:
        import mup

        model = self.build(width, depth, muP=True)
        base = self.build(self.widths[0], depth, muP=True)
        other = self.build(2 * self.widths[0], depth, muP=True)
        mup.set_base_shapes(model, base, delta=other)
        layers = list(model.modules())
        if any(isinstance(layer, nn.LayerNorm | nn.BatchNorm2d) for layer in layers):
            return model
        for layer in layers:
            if isinstance(layer, nn.Linear | nn.Conv2d) and not isinstance(layer, mup.MuReadout):
                mup.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        return model


def text(held_out: bool = False) -> data.Examples:
    windows, following = data.characters(LENGTH, held_out=held_out)
    most = HELD_OUT_WINDOWS if held_out else len(windows)
    return windows[:most], following[:most]


_CLOTHES = {"data": data.fashion, "widths": WIDTHS}
_COLOURS = {"data": data.cifar, "widths": CHANNELS, "batch_size": 32, "positions": 200}
NETWORKS = {
    "mlp": Network("MLP", functools.partial(mlp, normalized=False), **_CLOTHES),
    "mlp-ln": Network("MLP, LayerNorm", functools.partial(mlp, normalized=True), **_CLOTHES),
    "cnn": Network("CNN", functools.partial(cnn, normalized=False), **_COLOURS),
    "cnn-bn": Network("CNN, BatchNorm", functools.partial(cnn, normalized=True), **_COLOURS),
    "gpt": Network(
        "Transformer", GPT, text, MODEL_WIDTHS, math.log(data.VOCABULARY), HIGHER_RATES, next_character,
        depth=LAYERS, batch_size=8, positions=400,
    ),
}  # fmt: skip
MLPS = ("mlp", "mlp-ln")


def mup_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    import mup

    if name == "sgd":
        return lambda parameters, lr: mup.MuSGD(list(parameters), lr=lr)
    return lambda parameters, lr: mup.MuAdamW(list(parameters), lr=lr, weight_decay=WEIGHT_DECAY)


# --- Training ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One training."""

    network: str
    optimizer: str
    width: int
    depth: int
    batch_size: int
    start: str
    lr: float
    seed: int
    steps: int = STEPS

    @classmethod
    def of(cls, row: Row) -> Cell:
        return cls(**{part.name: row[part.name] for part in fields(cls)})

    @property
    def work(self) -> float:
        """About how long it takes, to begin with the longest."""
        examples = self.batch_size * NETWORKS[self.network].positions
        return examples * self.width * (100 + self.depth * self.width) * (1 + (self.start == "hessinit"))


def train(cell: Cell, device_name: str) -> Row:
    """The row of a training: its held-out loss, and what `initialize_` said of the weights."""
    started = time.perf_counter()
    network = NETWORKS[cell.network]
    device = torch.device(device_name)
    examples = read_data(load(cell.network, False, device_name), cell.batch_size, cell.steps)

    def build() -> nn.Module:
        return network.model(cell.width, cell.depth, cell.start).to(device)

    with reproducible(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_everything(cell.seed, "build")
        model = build().train()
        batch = copy_to(examples.initial_batch(cell.seed), device)
        problem = hessinit.Problem(model, network.loss, batch, seed=derive(cell.seed, "start"))
        row = asdict(cell) | write_start_(cell, problem)
        row["start_seconds"] = round(time.perf_counter() - started, 2)
        model.train()
        seed_everything(cell.seed, "training")
        how = mup_optimizer(cell.optimizer) if cell.start == "mup" else cell.optimizer
        stepper = hessinit.Training(how).build(model, cell.lr)
        schedule = CosineAnnealingLR(stepper.optimizers[0], cell.steps)
        minibatches = itertools.islice(examples.minibatches(cell.seed), cell.steps)
        losses, _ = loop.train(
            model, network.loss, (copy_to(batch, device) for batch in minibatches), stepper,
            build=build,
            on_step=lambda step, loss: schedule.step() if math.isfinite(loss) else None,
        )  # fmt: skip
        loss = look(model, network, load(cell.network, True, device_name))
    trained = math.isfinite(losses[-1]) and math.isfinite(loss)
    row["loss"] = float(f"{loss:.5g}") if trained else None
    row["seconds"] = round(time.perf_counter() - started, 2)
    return row


def write_start_(cell: Cell, problem: hessinit.Problem) -> Row:
    """Write the initial weights; return what is to be recorded of them."""
    if cell.start == "he":
        generator = torch.Generator().manual_seed(problem.seed)
        hessinit.apply_scheme_(problem, "he", generator=generator)
    if cell.start != "hessinit":
        return {}
    fitted = hessinit.initialize_(problem, lr=cell.lr, optimizer=cell.optimizer, progress=False)
    return {"scaling": fitted.scaling, "kappa": fitted.kappa, "converged": fitted.converged}


@torch.no_grad()
def look(model: nn.Module, network: Network, held_out: data.Examples) -> float:
    """The loss on the held-out examples."""
    model.eval()
    parts = zip(*(tensor.split(500) for tensor in held_out), strict=True)
    totals = [float(network.loss(model(inputs), targets)) * len(inputs) for inputs, targets in parts]
    return sum(totals) / len(held_out[0])


@functools.lru_cache(maxsize=8)
def load(network: str, held_out: bool, device: str) -> data.Examples:
    inputs, targets = NETWORKS[network].data(held_out=held_out)
    return inputs.to(device), targets.to(device)


# --- What is trained --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """One network and optimizer at several sizes: of `varied`, a field of `Cell`."""

    network: str
    optimizer: str
    varied: str
    sizes: tuple[int, ...]
    starts: tuple[str, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        return NETWORKS[self.network].rates[self.optimizer]

    @property
    def title(self) -> str:
        return f"{NETWORKS[self.network].title}, {OPTIMIZERS[self.optimizer]}"

    def cell(self, size: int, start: str, lr: float, seed: int, steps: int) -> Cell:
        network = NETWORKS[self.network]
        sizes = {"width": MIDDLE_WIDTH, "depth": network.depth, "batch_size": network.batch_size}
        sizes[self.varied] = size
        return Cell(self.network, self.optimizer, start=start, lr=lr, seed=seed, steps=steps, **sizes)

    def cells(self, seeds: int, steps: int) -> Iterator[Cell]:
        for size, start, lr, seed in itertools.product(self.sizes, self.starts, self.rates, range(seeds)):
            yield self.cell(size, start, lr, seed, steps)


WITHOUT_MUP = tuple(start for start in STARTS if start != "mup")
PARTS = {
    "width": [
        Series(name, optimizer, "width", network.widths, tuple(STARTS))
        for name, network in NETWORKS.items()
        for optimizer in OPTIMIZERS
    ],
    "depth": [
        Series(name, optimizer, "depth", DEPTHS, WITHOUT_MUP) for name in MLPS for optimizer in OPTIMIZERS
    ],
    "batch": [
        Series(name, optimizer, "batch_size", BATCH_SIZES, WITHOUT_MUP)
        for name in MLPS
        for optimizer in OPTIMIZERS
    ],
}
WORDS = {"width": "width", "depth": "layers", "batch_size": "batch"}


def chosen_series(options: argparse.Namespace, parts: Iterable[str]) -> list[Series]:
    return [
        replace(series, starts=tuple(start for start in series.starts if start in options.starts))
        for part in parts
        for series in PARTS[part]
        if series.network in options.networks
    ]


def read_record(path: Path) -> list[Row]:
    """The trainings of a record; a last line that was cut off is left out."""
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if "loss" in row]


def append(path: Path, row: Row) -> None:
    is_cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
    with path.open("a", encoding="utf-8") as lines:
        lines.write("\n" * bool(is_cut) + json.dumps(row) + "\n")


def prepare_worker() -> None:
    torch.set_num_threads(1)


def run(options: argparse.Namespace) -> None:
    """Make the trainings that are missing, the longest first."""
    started = time.perf_counter()
    known = {Cell.of(row) for row in read_record(options.record)}
    wanted = (
        cell
        for series in chosen_series(options, options.part)
        for cell in series.cells(options.seeds, options.steps)
    )
    missing = sorted(set(wanted) - known, key=lambda cell: (-cell.work, repr(cell)))
    print(f"{len(missing)} trainings are missing", flush=True)
    if not missing:
        return
    facts = run_facts(
        "transfer.py", part=" ".join(options.part), networks=" ".join(options.networks), device=options.device
    )
    append(options.record, facts)
    with ProcessPoolExecutor(options.workers, get_context("spawn"), prepare_worker) as pool:
        running = {pool.submit(train, cell, options.device): cell for cell in missing}
        for count, future in enumerate(as_completed(running), 1):
            if future.cancelled():
                continue
            if failure := future.exception():
                print(f"{running[future]}: {failure!r}", flush=True)
            else:
                append(options.record, future.result())
            passed = time.perf_counter() - started
            if count % 20 == 0:
                print(f"{count} of {len(missing)} after {passed:.0f} s", flush=True)
            if passed > options.seconds:
                for waiting in running:
                    waiting.cancel()
    print(f"{time.perf_counter() - started:.0f} s; record {options.record}")


# --- What the record says ---------------------------------------------------------------------------------


class Losses:
    """Mean losses over the seeds of a record, for one series: by size, start and rate."""

    def __init__(self, series: Series, rows: Sequence[Row], steps: int) -> None:
        self.series = series
        self.chance = NETWORKS[series.network].chance
        self.by_cell: dict[Cell, list[float]] = {}
        for row in rows:
            cell = Cell.of(row)
            loss = math.inf if row["loss"] is None else row["loss"]
            if cell.steps == steps:
                self.by_cell.setdefault(replace(cell, seed=0), []).append(loss)
        self.steps = steps

    def of_seeds(self, size: int, start: str, lr: float) -> list[float]:
        return self.by_cell.get(self.series.cell(size, start, lr, 0, self.steps), [])

    def at(self, size: int, start: str, lr: float) -> float:
        """The mean over seeds: inf where one of them diverged, nan where nothing is recorded."""
        losses = self.of_seeds(size, start, lr)
        return statistics.fmean(losses) if losses else math.nan

    def counted(self, size: int, start: str, lr: float) -> float:
        """The same, where a loss above that of guessing counts as that of guessing."""
        losses = [min(loss, self.chance) for loss in self.of_seeds(size, start, lr)]
        return statistics.fmean(losses) if losses else math.nan

    def row(self, size: int, start: str) -> list[float]:
        return [self.counted(size, start, lr) for lr in self.series.rates]

    def is_complete(self, size: int, start: str) -> bool:
        return not any(map(math.isnan, self.row(size, start)))

    @property
    def starts(self) -> list[str]:
        """Those that are complete at every size."""
        sizes = self.series.sizes
        return [start for start in self.series.starts if all(self.is_complete(size, start) for size in sizes)]

    def best(self, size: int, start: str | None = None) -> float:
        """The lowest loss of a size, by default of all starts."""
        starts = self.series.starts if start is None else (start,)
        losses = [loss for each in starts for loss in self.row(size, each) if not math.isnan(loss)]
        return min(losses, default=math.nan)

    def spread(self, size: int, start: str) -> float:
        """The mean over the rates of loss / lowest of all starts and rates − 1."""
        return statistics.fmean(self.row(size, start)) / self.best(size) - 1

    def regret(self, start: str) -> float:
        """What the best rate of the first size costs at the last, against the best of all starts there."""
        first = self.row(self.series.sizes[0], start)
        last = self.row(self.series.sizes[-1], start)
        return last[first.index(min(first))] / self.best(self.series.sizes[-1]) - 1

    def excess(self, start: str) -> float:
        """The best rate's loss against the best of all starts, less 1: the mean over sizes."""
        sizes = self.series.sizes
        return statistics.fmean(self.best(size, start) / self.best(size) - 1 for size in sizes)


def shown(loss: float) -> str:
    if math.isnan(loss):
        return "-"
    return f"{loss:.3f}" if loss < 100 else "diverged"


def show(options: argparse.Namespace) -> None:
    rows = read_record(options.record)
    series = chosen_series(options, options.part)
    every = [Losses(each, rows, options.steps) for each in series]
    every = [losses for losses in every if any(map(math.isfinite, map(losses.best, losses.series.sizes)))]
    for losses in every:
        of = losses.series
        print(f"\n{of.title}: held-out loss by rate")
        print(f"{WORDS[of.varied]:>6} {'start':14}" + "".join(f"{lr:>10g}" for lr in of.rates))
        for size, start in itertools.product(of.sizes, of.starts):
            cells = "".join(f"{shown(losses.at(size, start, lr)):>10}" for lr in of.rates)
            print(f"{size:>6} {STARTS[start]:14}{cells}")
    summarize(every)


LEGEND = """
spread: the loss at every rate over the best of all starts and rates of that size, less 1: mean over rates and
sizes. transfer: the loss at the largest size with the start's best rate of the smallest, over the best of all
starts and rates there, less 1. best: the loss at a start's best rate over the best of all starts, less 1:
mean over sizes. A loss above that of guessing, as of a training that diverged, counts as that of guessing.
"""


def summarize(every: Sequence[Losses]) -> None:
    print(LEGEND)
    print(f"{'':40}" + "".join(f"{STARTS[start]:>26}" for start in STARTS))
    print(f"{'':40}" + f"{'spread':>10}{'transfer':>9}{'best':>7}" * len(STARTS))
    scores: dict[str, list[tuple[float, ...]]] = {start: [] for start in STARTS}
    for losses in every:
        of = losses.series
        line = f"{of.title:30}{WORDS[of.varied]:10}"
        for start in STARTS:
            if start not in losses.starts:
                line += percents([math.nan] * 3)
                continue
            spread = statistics.fmean(losses.spread(size, start) for size in of.sizes)
            scores[start].append((spread, losses.regret(start), losses.excess(start)))
            line += percents(scores[start][-1])
        print(line)
    means = [
        map(statistics.fmean, zip(*scores[start], strict=True)) if scores[start] else [math.nan] * 3
        for start in STARTS
    ]
    print(f"{'mean of the series shown':40}" + "".join(map(percents, means)))


def percents(numbers: Iterable[float]) -> str:
    texts = ["-" if math.isnan(number) else f"{number:.0%}" for number in numbers]
    return "{:>10}{:>9}{:>7}".format(*texts)


# --- The pictures -----------------------------------------------------------------------------------------

BOUNDS = (0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the excess loss; above the last there is one more colour
PALETTE = ("#08306b", "#1f5fa8", "#4b97c9", "#93c4de", "#cfe1ee", "#f9d9a8", "#e8a15b")


def draw(every: Sequence[Losses], starts: Sequence[str], path: Path) -> None:
    """Heat maps of rate × size: a row for each series, a column for each start."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure

    colours = ListedColormap(PALETTE)
    norm = BoundaryNorm([*BOUNDS, math.inf], len(PALETTE))
    heights = [0.17 * len(losses.series.sizes) + 0.28 for losses in every]
    figure = Figure(figsize=(7.6, sum(heights) + 0.95), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.015, wspace=0.02, hspace=0.0)  # type: ignore[union-attr]
    panels = figure.subplots(len(every), len(starts), squeeze=False, height_ratios=heights)
    for losses, row in zip(every, panels, strict=True):
        for start, panel in zip(starts, row, strict=True):
            if start in losses.series.starts:
                draw_panel(panel, losses, start, colours, norm)
            else:
                panel.axis("off")
        label_row(row[0], losses)
    for start, panel in zip(starts, panels[0], strict=True):
        panel.set_title(STARTS[start], fontsize=10, weight="bold")
    figure.supxlabel("learning rate", fontsize=9)
    add_legend(figure, colours)
    figure.savefig(path, dpi=200)


def draw_panel(panel: Axes, losses: Losses, start: str, colours: Any, norm: Any) -> None:
    """One heat map; a cross marks a training that diverged."""
    of = losses.series
    excess = [
        [losses.counted(size, start, lr) / losses.best(size) - 1 for lr in of.rates] for size in of.sizes
    ]
    panel.pcolormesh(excess, cmap=colours, norm=norm, edgecolors="white", linewidth=0.6)
    for row, column in itertools.product(range(len(of.sizes)), range(len(of.rates))):
        loss = losses.at(of.sizes[row], start, of.rates[column])
        if loss == math.inf:
            panel.fill_between([column, column + 1], row, row + 1, color="#eeeeee", edgecolor="white")
            panel.plot(column + 0.5, row + 0.5, "x", color="#777777", markersize=4, markeredgewidth=0.9)
    ticks = [place for place, lr in enumerate(of.rates) if f"{lr:e}".startswith("1.0")]
    panel.set_xticks([place + 0.5 for place in ticks], [f"{of.rates[place]:g}" for place in ticks])
    panel.set_yticks([])
    panel.tick_params(length=0, labelsize=7, pad=1)
    panel.spines[:].set_visible(False)


def label_row(panel: Axes, losses: Losses) -> None:
    of = losses.series
    panel.set_yticks([place + 0.5 for place in range(len(of.sizes))], [str(size) for size in of.sizes])
    title = NETWORKS[of.network].title.replace(", ", "\n")
    panel.set_ylabel(
        f"{title}\n{OPTIMIZERS[of.optimizer]}\n\n{WORDS[of.varied]}", fontsize=8, linespacing=1.1
    )


def add_legend(figure: Any, colours: Any) -> None:
    from matplotlib.patches import Patch

    words = ["best … 2 %", *(f"… {bound:.0%}".replace("%", " %") for bound in BOUNDS[2:]), "more"]
    patches = [Patch(color=colour, label=word) for colour, word in zip(PALETTE, words, strict=True)]
    patches.append(Patch(color="#eeeeee", label="× diverged"))
    figure.legend(
        handles=patches, loc="outside upper center", ncols=len(patches), fontsize=7.5, frameon=False,
        title="held-out loss above the best of the same network, optimizer and size",
        title_fontsize=8.5, handlelength=1.2, columnspacing=1.1, handletextpad=0.5,
    )  # fmt: skip


def draw_pictures(options: argparse.Namespace) -> None:
    rows = read_record(options.record)
    for path, parts in ((options.draw, ["width"]), (options.draw_depth, ["depth", "batch"])):
        if path is None:
            continue
        every = [Losses(series, rows, options.steps) for series in chosen_series(options, parts)]
        every = [losses for losses in every if losses.starts]
        if not every:
            raise SystemExit(f"The record holds no complete series of {' or '.join(parts)}.")
        starts = [start for start in STARTS if any(start in losses.series.starts for losses in every)]
        draw(every, starts, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS])
    parser.add_argument("--starts", nargs="+", choices=[*STARTS], default=[*STARTS])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no training after so many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--show", action="store_true", help="train nothing; print the tables")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="train nothing; draw rate × width")
    parser.add_argument("--draw-depth", type=Path, metavar="FILE", help="the same for depth and batch size")
    options = parser.parse_args()
    if options.draw or options.draw_depth:
        draw_pictures(options)
    elif not options.show:
        run(options)
    if options.show or not (options.draw or options.draw_depth):
        show(options)


if __name__ == "__main__":
    main()
