"""All experiments of the paper, by name."""

from __future__ import annotations

from hessinit.errors import ProblemError, choose
from hessinit.paper import table_1, table_2, table_3, table_4, table_5, word2vec
from hessinit.paper.experiment import Experiment, Setting
from hessinit.paper.names import ALL, FIGURES, NAMES
from hessinit.paper.scipy_extra import import_stats
from hessinit.present.words import join_names

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (table_1, table_2, table_3, table_4, table_5, word2vec)
}
# Without it they would fail after all the work, and with it the work would be another setting's.
NEED_SCIPY = ("table-1", "table-4", "table-5", "word2vec")


def check_means(experiments: list[Experiment]) -> None:
    """Refuse at once what lacks a package."""
    if any(each.name in NEED_SCIPY for each in experiments):
        import_stats()


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
    others = {name for each in EXPERIMENTS.values() for name in each.data[:-1]} - {*known}
    if data in others:
        names = join_names([each.name for each in experiments])
        raise ProblemError(
            f"data={data!r} is not what {names} can be run on; choose from "
            f"{', '.join(map(repr, ['paper', 'digits', *known]))}."
        )
    choose("data", data, ["paper", "digits", *known])
    return [(each, name) for each in experiments for name in _chosen(each, data)]


def _chosen(experiment: Experiment, data: str) -> tuple[str, ...]:
    *usual, embedded = experiment.data
    if data == "digits":
        return (embedded,)
    return tuple(name for name in usual if data in ("paper", name))


def choose_variant(experiment: Experiment, variant: str | None) -> str:
    """The variant asked for, or the default; `check_variant` has looked at it."""
    return next(iter(experiment.variants)) if variant is None else variant


def check_variant(experiments: list[Experiment], variant: str | None) -> None:
    """Refuse a variant that one of the experiments does not have, and say which have it."""
    if variant is None:
        return
    without = [each for each in experiments if variant not in each.variants]
    having = [each.name for each in EXPERIMENTS.values() if variant in each.variants]
    if having and without:
        only = f", which has {', '.join(map(repr, without[0].variants))}" if len(without) == 1 else ""
        raise ProblemError(
            f"variant={variant!r} is one of {join_names(having)}, and not of "
            f"{join_names([each.name for each in without])}{only}; name only experiments that have it."
        )
    choose("variant", variant, list(dict.fromkeys(name for each in experiments for name in each.variants)))


def name_of(setting: Setting) -> str:
    """What the files of a setting are called.

    >>> name_of(Setting("table-4", "mnist", "one-hidden", (0,)))
    'table-4-mnist-one-hidden'
    """
    default = next(iter(EXPERIMENTS[setting.experiment].variants))
    parts = [setting.experiment, setting.data, *([] if setting.variant == default else [setting.variant])]
    return "-".join(parts)
