"""One short training from one start, at one learning rate, with one seed: plain data."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hessinit.results.curvature_report import check_choice
from hessinit.results.result import Plain, read_number, read_numbers, to_plain, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console, ConsoleOptions, RenderResult


NETWORK = "network"  # the name under which `norms` holds the norm of all weights together
MOST_POINTS = 50  # points of a loss curve
DIGITS = 5  # significant digits of a loss curve; first and final loss keep every bit


def window(steps: int) -> int:
    """How many losses the final one is the mean of: a tenth of the steps, at least ten.

    >>> window(50), window(201)
    (10, 21)
    """
    return max(10, math.ceil(steps / 10))


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """How one training went.

    `losses` are training losses averaged over chunks of steps (at most 50 points of equal length, the last
    one may be shorter), `first_loss` that of the very first mini-batch, `final_loss` the mean over the last
    tenth of the steps, at least ten; inf or nan where the run broke off. `norms` are the curvature norms at
    the start: layer → ‖H‖ in the order the layers run, then "network"; None where they were not measured
    (starts that do not depend on the rate are measured once for each seed; `Comparison.norm` looks it up).
    `note` says why a start failed or what it could not reach.

    >>> run = Run(scheme="he", learning_rate=0.1, seed=0, losses=(2.0, 1.0), first_loss=2.3, final_loss=0.9,
    ...           steps_done=20, diverged=False, norms={"fc1": 3.0, "network": 4.0}, seconds=0.5)
    >>> run.applies, run.finite, run_from_dict(run.to_dict()) == run
    (True, True, True)
    """

    scheme: str
    learning_rate: float
    seed: int
    losses: tuple[float, ...]
    first_loss: float
    final_loss: float
    steps_done: int
    diverged: bool  # not finite, or final_loss above first_loss by more than 5 % and more than chance allows
    norms: dict[str, float] | None
    seconds: float
    note: str = ""

    @property
    def applies(self) -> bool:
        """False where the start itself failed on this model, so that nothing was trained; `note` says why."""
        return self.diverged or self.steps_done > 0

    @property
    def finite(self) -> bool:
        """Whether the run came to its end with a loss that is a number."""
        return math.isfinite(self.final_loss)

    # In plain form, where nan equals nan. The time that it took is no part of the answer.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Run):
            return NotImplemented
        return bool({**self.to_dict(), "seconds": 0} == {**other.to_dict(), "seconds": 0})

    def __hash__(self) -> int:
        return hash((self.scheme, self.learning_rate, self.seed))

    def to_dict(self) -> dict[str, Plain]:
        """The run as what strict JSON can hold."""
        return dict(to_plain(self))


def run_from_dict(data: Plain) -> Run:
    """Rebuild a run from what `to_dict` gave; unknown keys are ignored."""
    norms = data["norms"]
    return Run(
        scheme=str(data["scheme"]),
        learning_rate=read_number(data["learning_rate"]),
        seed=int(data["seed"]),
        losses=read_numbers(data["losses"]),
        first_loss=read_number(data["first_loss"]),
        final_loss=read_number(data["final_loss"]),
        steps_done=int(data["steps_done"]),
        diverged=bool(data["diverged"]),
        norms=None if norms is None else {str(name): read_number(norm) for name, norm in norms.items()},
        seconds=read_number(data["seconds"]),
        note=str(data["note"]),
    )


def round_loss(loss: float) -> float:
    """A loss as curves keep it, so that records stay small.

    >>> round_loss(2.3025851), round_loss(float("inf"))
    (2.3026, inf)
    """
    return float(f"{loss:.{DIGITS}g}")


KIND = "hessinit comparison"
SCHEMA = 1
EXPERIMENTS = ("compare", "sweep")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Comparison:
    """What `compare` or `sweep` found: every run, and what follows from them.

    `kind` is "compare" or "sweep"; a sweep has one learning rate, and `stds` holds the standard deviation of
    each of `starts`. `rate_dependent` names the starts that choose their weights by the learning rate.
    Two comparisons are equal when they hold the same numbers; the time they took does not count.

    >>> shared = {"learning_rate": 0.1, "losses": (2.0,), "first_loss": 2.3, "steps_done": 20, "seconds": 1}
    >>> runs = tuple(
    ...     Run(scheme=start, seed=seed, final_loss=loss, diverged=False, norms=None, **shared)
    ...     for start, seed, loss in [("he", 0, 1.0), ("he", 1, 1.4), ("lsuv", 0, 0.5), ("lsuv", 1, 0.7)])
    >>> comparison = Comparison(
    ...     kind="compare", schemes=("he", "lsuv"), learning_rates=(0.1,), seeds=(0, 1), runs=runs, steps=20,
    ...     batch_size=8, optimizer="sgd", examples=100)
    >>> comparison.loss("he", 0.1), round(comparison.error("he", 0.1), 3), comparison.best
    (1.2, 0.2, ('lsuv', 0.1))
    >>> Comparison.from_json(comparison.to_json()) == comparison
    True
    """

    kind: str
    schemes: tuple[str, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    steps: int
    batch_size: int
    optimizer: str
    examples: int
    warmup: int | None = None  # steps of the starts with "+warmup"; None where there is none of them
    stds: tuple[float, ...] = ()
    rate_dependent: tuple[str, ...] = ()
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)  # what else was asked for: plain data
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, EXPERIMENTS)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers whose norms were measured, in the order they run; without the network."""
        measured = next((run.norms for run in self.runs if run.norms), {})
        return tuple(name for name in measured if name != NETWORK)

    def runs_of(self, start: str, learning_rate: float) -> tuple[Run, ...]:
        """The runs of all seeds, in the order of the seeds."""
        if start not in self.schemes:
            raise ValueError(f"start={start!r} was not compared; choose from {_listed(self.schemes)}.")
        if learning_rate not in self.learning_rates:
            raise ValueError(
                f"learning_rate={learning_rate!r} was not tried; choose from {_listed(self.learning_rates)}."
            )
        return tuple(run for run in self.runs if (run.scheme, run.learning_rate) == (start, learning_rate))

    def applies(self, start: str) -> bool:
        """False where the start failed on this model at every rate and seed; the runs' `note` says why."""
        return any(run.applies for run in self.runs if run.scheme == start)

    def loss(self, start: str, learning_rate: float) -> float:
        """The mean final loss over seeds: inf where one is not finite, nan where the start does not apply."""
        losses = self._final_losses(start, learning_rate)
        if not losses:
            return math.nan
        return statistics.fmean(losses) if all(map(math.isfinite, losses)) else math.inf

    def error(self, start: str, learning_rate: float) -> float:
        """The standard error of `loss` over seeds; nan for one seed, or where a loss is not finite."""
        losses = self._final_losses(start, learning_rate)
        if len(losses) < 2 or not all(map(math.isfinite, losses)):
            return math.nan
        return statistics.stdev(losses) / math.sqrt(len(losses))

    def diverged(self, start: str, learning_rate: float) -> int:
        """How many seeds diverged: not finite, or above the first loss by 5 % and more than chance allows."""
        return sum(run.diverged for run in self.runs_of(start, learning_rate))

    def norm(self, start: str, learning_rate: float | None = None, layer: str = NETWORK) -> float:
        """‖H‖ of a layer, or of the network, at the start: the mean over seeds; nan where not measured.

        For a start that depends on the rate, no `learning_rate` means its best one.
        """
        if learning_rate is None:
            best = self.best_rate(start)
            learning_rate = self.learning_rates[0] if math.isnan(best) else best
        chosen = self.runs_of(start, learning_rate)
        if start not in self.rate_dependent:
            chosen = tuple(run for run in self.runs if run.scheme == start)
        norms = [run.norms[layer] for run in chosen if run.norms is not None and layer in run.norms]
        if not all(map(math.isfinite, norms)):
            return math.nan if any(map(math.isnan, norms)) else math.inf
        return statistics.fmean(norms) if norms else math.nan

    def trains(self, start: str, learning_rate: float) -> bool:
        """Whether every seed ended in a finite loss, and none diverged."""
        return math.isfinite(self.loss(start, learning_rate)) and not self.diverged(start, learning_rate)

    def best_rate(self, start: str) -> float:
        """The rate of the lowest loss among those at which the start trains; nan where there is none."""
        rates = [rate for rate in self.learning_rates if self.trains(start, rate)]
        return min(rates, key=lambda rate: self.loss(start, rate), default=math.nan)

    @property
    def best(self) -> tuple[str, float]:
        """The start and the rate of the lowest loss of all, where every seed trains."""
        rates = {start: self.best_rate(start) for start in self.schemes}
        trained = [start for start, rate in rates.items() if not math.isnan(rate)]
        if not trained:
            raise ValueError(
                "no start trains with every seed at any rate, so none is best; print(comparison) says more."
            )
        best = min(trained, key=lambda start: self.loss(start, rates[start]))
        return best, rates[best]

    def to_dict(self) -> dict[str, Plain]:
        """The comparison as what strict JSON can hold; `kind` becomes "experiment"."""
        data = to_plain(self)
        return {"kind": KIND, "schema": SCHEMA, "experiment": data.pop("kind"), **data}

    def to_json(self) -> str:
        """The comparison as strict JSON, inf and nan as strings; `from_json` gives an equal one back."""
        data = self.to_dict()
        runs = ",\n    ".join(json.dumps(run, allow_nan=False) for run in data.pop("runs"))
        head = json.dumps(data, indent=2, allow_nan=False).removesuffix("\n}")
        return f'{head},\n  "runs": [\n    {runs}\n  ]\n}}\n'  # one run, one line

    @classmethod
    def from_dict(cls, data: Plain, *, source: str = "the data") -> Comparison:
        """Rebuild a comparison; unknown keys are ignored."""
        if not isinstance(data, dict) or data.get("kind") != KIND or type(data.get("schema")) is not int:
            found = data.get("kind") if isinstance(data, dict) else None
            held = repr(found) if found else f"a {type(data).__name__} of another kind"
            raise ValueError(
                f"{source} is not a hessinit comparison: it holds {held}. "
                "Give a file that comparison.save() wrote."
            )
        if data["schema"] > SCHEMA:
            raise ValueError(
                f"{source} has comparison schema {data['schema']}, and this hessinit reads up to {SCHEMA}: "
                "it comes from a newer version. Upgrade with `pip install --upgrade hessinit`."
            )
        try:
            return cls(
                kind=str(data["experiment"]),
                schemes=tuple(map(str, data["schemes"])),
                learning_rates=read_numbers(data["learning_rates"]),
                seeds=tuple(map(int, data["seeds"])),
                runs=tuple(map(run_from_dict, data["runs"])),
                steps=int(data["steps"]),
                batch_size=int(data["batch_size"]),
                optimizer=str(data["optimizer"]),
                examples=int(data["examples"]),
                warmup=None if data["warmup"] is None else int(data["warmup"]),
                stds=read_numbers(data["stds"]),
                rate_dependent=tuple(map(str, data["rate_dependent"])),
                seconds=None if data["seconds"] is None else read_number(data["seconds"]),
                notes=tuple(map(str, data["notes"])),
                settings=dict(data["settings"]),
                versions={str(key): str(value) for key, value in data["versions"].items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            what = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
            raise ValueError(
                f"{source} is not a whole comparison: {what}. Was the file edited or cut? Compare again."
            ) from problem

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the text") -> Comparison:
        """Rebuild a comparison from what `to_json` gave."""
        try:
            data = json.loads(text)
        except ValueError as problem:
            raise ValueError(
                f"{source} is not JSON ({problem}). Give a file that comparison.save() wrote."
            ) from problem
        return cls.from_dict(data, source=source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the comparison as JSON, whole or not at all; `Comparison.load` reads it."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Comparison:
        """Read a comparison that `save` wrote; it equals what was saved."""
        return cls.from_json(Path(path).read_bytes(), source=str(path))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the comparison as one web page that needs nothing else."""
        from hessinit.present.comparison_html import render_comparison_page

        write_text(path, render_comparison_page(self))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw what there is to see: the map of starts and rates, or a sweep's final loss over lr·‖H‖."""
        from hessinit.present.comparison_figure import draw_heatmap, draw_sweep_losses

        return draw_sweep_losses(self, ax) if self.kind == "sweep" else draw_heatmap(self, ax)

    def plot_losses(
        self, learning_rate: float | None = None, axes: Sequence[Axes] | None = None
    ) -> tuple[Axes, ...]:
        """Draw the loss curves, one panel for each rate or for the one given; returns matplotlib axes."""
        from hessinit.present.comparison_figure import draw_losses

        return draw_losses(self, learning_rate, axes)

    def plot_heatmap(self, ax: Axes | None = None) -> Axes:
        """Draw the final losses, start × rate, divergences marked, on `ax` or a new figure."""
        from hessinit.present.comparison_figure import draw_heatmap

        return draw_heatmap(self, ax)

    # In plain form, where nan equals nan.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Comparison):
            return NotImplemented
        return bool(_without_times(self.to_dict()) == _without_times(other.to_dict()))

    def __hash__(self) -> int:
        return hash((self.kind, self.schemes, self.learning_rates, self.seeds, self.steps))

    def __repr__(self) -> str:
        counts = f"{len(self.schemes)} starts × {len(self.learning_rates)} rates × {len(self.seeds)} seeds"
        return f"<Comparison of {counts}: kind={self.kind!r}, steps={self.steps}>"

    def __str__(self) -> str:
        from hessinit.present.comparison_table import render_comparison

        return render_comparison(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from hessinit.present.comparison_table import comparison_renderables

        yield from comparison_renderables(self, options.max_width)

    def _repr_html_(self) -> str:
        from hessinit.present.comparison_html import render_comparison_fragment

        return render_comparison_fragment(self)

    def _final_losses(self, start: str, learning_rate: float) -> list[float]:
        return [run.final_loss for run in self.runs_of(start, learning_rate) if run.applies]


def _without_times(data: dict[str, Plain]) -> dict[str, Plain]:
    return {**data, "seconds": None, "runs": [{**run, "seconds": 0} for run in data["runs"]]}


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(repr, values))
