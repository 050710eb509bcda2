"""All experiments of the paper, by name."""

from __future__ import annotations

from hessinit.errors import ProblemError, choose
from hessinit.paper import table_1, table_2, table_3, table_4, table_5, word2vec
from hessinit.paper.experiment import Experiment, Setting
from hessinit.paper.names import ALL, FIGURES, NAMES

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (table_1, table_2, table_3, table_4, table_5, word2vec)
}


def choose_experiments(names: tuple[str, ...]) -> list[Experiment]:
    """The experiments meant, each once, in the paper's order."""
    if not names:
        raise ProblemError(f"nothing to reproduce was named; name some of {', '.join(NAMES)}.")
    for name in names:
        choose("name", name, NAMES)
    wanted = {FIGURES.get(name, name) for name in names}
    return [each for name, each in EXPERIMENTS.items() if name in wanted or ALL in wanted]


def choose_data(experiments: list[Experiment], data: str) -> list[tuple[Experiment, str]]:
    """Each experiment with each set of data it is to run on."""
    known = dict.fromkeys(name for each in experiments for name in each.data[:-1])
    choose("data", data, ["paper", "digits", *known])
    return [(each, name) for each in experiments for name in _chosen(each, data)]


def _chosen(experiment: Experiment, data: str) -> tuple[str, ...]:
    *usual, embedded = experiment.data
    if data == "digits":
        return (embedded,)
    return tuple(name for name in usual if data in ("paper", name))


def choose_reading(experiment: Experiment, reading: str | None) -> str:
    """The reading asked for, or the default."""
    if reading is None:
        return next(iter(experiment.readings))
    choose("reading", reading, list(experiment.readings))
    return reading


def name_of(setting: Setting) -> str:
    """What the files of a setting are called.

    >>> name_of(Setting("table-4", "mnist", "one-hidden", (0,)))
    'table-4-mnist-one-hidden'
    """
    default = next(iter(EXPERIMENTS[setting.experiment].readings))
    parts = [setting.experiment, setting.data, *([] if setting.reading == default else [setting.reading])]
    return "-".join(parts)
