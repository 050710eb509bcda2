"""What the page of the demo holds: both starts by layer, both trainings, and how it goes with other seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hessinit.present.demonstration import (
    GUESSING,
    SMOOTHED,
    STARTS,
    Story,
    average_losses,
    conclude_pair,
    conclude_rates,
    conclude_seeds,
)
from hessinit.present.initialization_sentences import conclude_initialization, describe_target
from hessinit.present.initialization_table import initialization_columns, names_in_order
from hessinit.present.page.columns import make_table
from hessinit.present.page.content import (
    Block,
    KeyNumber,
    LineChart,
    LineSeries,
    Page,
    RateMark,
    Rule,
    Section,
    Table,
    TableColumn,
    Words,
)
from hessinit.present.page.curvature import describe_origin, rate_section
from hessinit.present.page.initialization import before_and_after_chart
from hessinit.present.sentences import conclude
from hessinit.present.words import format_number
from hessinit.results.initialization import Initialization
from hessinit.results.track_record import Tracking

Labelled = Sequence[tuple[str, Tracking]]
COLORS = ("vermilion", "blue")
EDGE = 2.0  # of plain gradient descent, which the demo trains with


def demonstration_page(initialization: Initialization, trackings: Labelled, story: Story) -> Page:
    """The verdict on the two starts, then what each step of the demo showed, in its order."""
    ours, theirs = story.shown("hessinit"), story.shown("default")
    return Page(
        title="Two starts for one network",
        verdict=[conclude_pair(story), conclude_seeds(story)],
        numbers=[
            KeyNumber(
                label="Learning rate", text=format_number(story.lr), note=f"{story.steps} steps of SGD"
            ),
            KeyNumber(
                label="PyTorch's default",
                text=f"{100 * theirs.accuracy:.0f} %",
                note=f"read right; loss {format_number(theirs.final_loss, 2)}",
            ),
            KeyNumber(
                label="hessinit",
                text=f"{100 * ours.accuracy:.0f} %",
                note=f"read right; loss {format_number(ours.final_loss, 2)}",
            ),
        ],
        tone=_tone(story),
        sections=[
            _starts_section(initialization),
            *_rate_sections(initialization),
            _training_section(trackings, story),
            _sharpness_section(trackings, story),
            _seeds_section(story),
        ],
        footer="" if initialization.after is None else describe_origin(initialization.after),
    )


def loss_chart(trackings: Labelled, story: Story) -> LineChart:
    """The training losses of both starts, in the colours of the other charts."""
    shown = [story.shown(start) for start in ("default", "hessinit")]
    ends = [f"{STARTS[one.start]} ends at {format_number(one.final_loss, 2)}" for one in shown]
    return LineChart(
        caption=f"Training loss, means of {SMOOTHED} steps",
        description=f"The training loss over the steps: {', '.join(ends)}.",
        series=[
            LineSeries(
                name=label,
                x=[step for step, _ in averaged],
                y=[loss for _, loss in averaged],
                color=color,
            )
            for label, averaged, color in (
                (label, average_losses(tracking), color)
                for (label, tracking), color in zip(trackings, COLORS, strict=True)
            )
        ],
        x_label="step",
        y_label="training loss",
        log_y=True,
        rules=[Rule(value=GUESSING, label="guessing")],
    )


def rate_chart(trackings: Labelled) -> LineChart:
    """lr·‖H‖ through training, with the edge of stability at 2."""
    known = [
        (label, [point for point in tracking.points if point.lr_times_norm is not None], color)
        for (label, tracking), color in zip(trackings, COLORS, strict=True)
    ]
    ends = [
        f"{label} from {format_number(points[0].lr_times_norm or 0.0)} to "
        f"{format_number(points[-1].lr_times_norm or 0.0)}"
        for label, points, _ in known
        if points
    ]
    return LineChart(
        caption="lr·‖H‖ through training",
        description=f"lr·‖H‖ over the steps: {', '.join(ends)}. {EDGE:g} is the edge of stability.",
        series=[
            LineSeries(
                name=label,
                x=[point.step for point in points],
                y=[point.lr_times_norm for point in points],
                color=color,
                details=[f"loss {format_number(point.loss)}" for point in points],
            )
            for label, points, color in known
        ],
        x_label="step",
        y_label="lr·‖H‖",
        log_y=True,
        rules=[Rule(value=EDGE, label="edge of stability: 2")],
    )


def _tone(story: Story) -> str:
    """Good where hessinit's start is not beaten by any, bad where it does not train."""
    if not story.shown("hessinit").learns:
        return "bad"
    return "good" if min(story.starts, key=story.median_loss) == "hessinit" else "fair"


def _starts_section(result: Initialization) -> Section:
    explained = (
        "Ten dense layers of 64 units with tanh between them read 8×8 images of digits. ‖H‖ says how sharply "
        "the loss bends with the weights of a layer: where it is tiny, the layer hardly matters to the loss "
        "yet; where it is large, a step soon is too long. Before: PyTorch's default weights; after: "
        "hessinit's."
    )
    before = [] if result.before is None else [Words(text=f"PyTorch's default: {conclude(result.before)}")]
    table = make_table(
        initialization_columns(result, names_in_order(result)),
        "Scale and norm of every layer before and after, and of the network.",
        fixed=1,
        show_caption=False,
    )
    after = Words(text=f"hessinit: {describe_target(result)} {conclude_initialization(result)}")
    blocks: list[Block] = [Words(text=explained), before_and_after_chart(result), *before, after, table]
    return Section(heading="How sharp each layer is", anchor="layers", blocks=blocks)


def _rate_sections(result: Initialization) -> list[Section]:
    """The rates that hessinit's start allows, beside the one asked for and where PyTorch's start ends."""
    if result.after is None:
        return []
    marks = [RateMark(value=result.lr, label="lr of the demo", color="blue")] if result.lr else []
    section = rate_section(result.after, tuple(marks))
    said = [Words(text=conclude_rates(result))] if result.lr else []
    return [replace(section, heading="Which learning rates that allows", blocks=[*section.blocks, *said])]


def _training_section(trackings: Labelled, story: Story) -> Section:
    how = (
        f"Both were trained alike: {story.steps} steps of plain SGD at lr = {format_number(story.lr)}, the "
        f"same mini-batches of {story.batch_size} out of {story.trained_on:,} digits, seed {story.seed}. "
        f"The other {story.held_out} digits were held out."
    )
    shown = [story.shown(start) for start in ("default", "hessinit")]
    table = Table(
        caption="Loss and accuracy of both",
        show_caption=False,
        columns=[
            TableColumn(heading="start", cells=[STARTS[one.start] for one in shown], is_number=False),
            TableColumn(heading="first loss", cells=[format_number(one.first_loss) for one in shown]),
            TableColumn(heading="last loss", cells=[format_number(one.final_loss) for one in shown]),
            TableColumn(heading="read right", cells=[f"{100 * one.accuracy:.1f} %" for one in shown]),
        ],
    )
    blocks: list[Block] = [Words(text=how), loss_chart(trackings, story), table]
    return Section(heading="What training makes of them", anchor="training", blocks=blocks)


def _sharpness_section(trackings: Labelled, story: Story) -> Section:
    why = (
        "Along the sharpest direction a step of gradient descent multiplies the distance to the bottom by "
        "1 − lr·‖H‖. Near 0 little happens; above 2 steps overshoot, and training survives only if the "
        "curvature falls. hessinit starts somewhat above 2, since it usually does."
    )
    verdicts = [Words(text=f"{label}: {tracking.verdict}") for label, tracking in trackings]
    blocks: list[Block] = [Words(text=why), rate_chart(trackings), *verdicts]
    return Section(heading="Why: the step against the curvature", anchor="sharpness", blocks=blocks)


def _seeds_section(story: Story) -> Section:
    starts = story.starts
    medians = [story.median_loss(start) for start in starts]
    best = min(medians)
    seeds = [one.seed for one in story.of("hessinit")]
    columns = [
        TableColumn(heading="start", cells=[STARTS[start] for start in starts], is_number=False),
        TableColumn(
            heading="median loss",
            cells=[format_number(median) for median in medians],
            keys=medians,
            marks=["best" if median == best else "" for median in medians],
        ),
        TableColumn(
            heading="read right, median",
            cells=[f"{100 * story.median_accuracy(start):.1f} %" for start in starts],
            keys=[story.median_accuracy(start) for start in starts],
        ),
    ]
    for place, seed in enumerate(seeds):
        tries = [story.of(start)[place] for start in starts]
        columns.append(
            TableColumn(
                heading=f"seed {seed}",
                group="loss",
                cells=[format_number(one.final_loss, 2) for one in tries],
                keys=[one.final_loss for one in tries],
                marks=["" if one.learns else "diverged" for one in tries],
            )
        )
    warning = (
        "One small network at one rate shows how it works, not that it always does: hessinit compare tries "
        "starts and rates on your own."
    )
    blocks: list[Block] = [
        Words(text="The same again with other seeds, and with two well-known starts beside them: He's closed "
                   "form, and LSUV, the unit-variance start that hessinit scales."),
        Table(caption="Losses by start and seed", columns=columns, show_caption=False),
        Words(text=conclude_seeds(story)),
        Words(text=warning, tone="note"),
    ]  # fmt: skip
    return Section(heading="Is it luck?", anchor="seeds", blocks=blocks)
