"""`hessinit measure`, `advise` and `initialize`: curvature, learning rates, weights; and `show`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import hessinit
from hessinit.cli import options
from hessinit.cli.failures import NOT_MET, failures_explained, stop
from hessinit.cli.output import Output, progress
from hessinit.cli.problem_file import find_problem, load_problem
from hessinit.present.advice import describe_trial
from hessinit.present.words import format_number
from hessinit.progress import OnProgress, ProgressState, announce
from hessinit.results.initialization import DIVERGED

if TYPE_CHECKING:
    from hessinit.training.assert_sound import Judgement

# What a problem's keywords for `measure` mean for the other verbs, too.
FITTED = ("optimizer", "curvature")
ADVISED = (*FITTED, "tolerance")
PLANNED = ("curvature", "estimator", "tolerance", "details", "network")
BATCH_SIZE = 64  # of trials


@dataclass(frozen=True)
class MeasuringOptions:
    """What `measure` measures, and how accurately."""

    lr: Annotated[float | None, options.rate("Also say whether this learning rate is stable.")] = (
        None
    )
    optimizer: options.Optimizer = None
    clip_norm: options.ClipNorm = None
    curvature: Annotated[
        Literal["gauss-newton", "hessian", "both"] | None,
        typer.Option(help="Which second derivative.  [default: gauss-newton]"),
    ] = None
    estimator: Annotated[
        Literal["auto", "gram", "lanczos", "plain"] | None,
        typer.Option(
            help="Which engine; plain runs the model as it is trained, also compiled.  "
            "[default: auto]"
        ),
    ] = None
    layers: options.Layers = None
    tolerance: options.Tolerance = None
    precision: Annotated[
        Literal["auto", "full", "tf32", "bf16"] | None,
        typer.Option(
            help="On a GPU: auto is tf32 where its rounding is below the tolerance, else full."
        ),
    ] = None


@dataclass(frozen=True)
class DetailOptions:
    """What else `measure` measures, or whether it only plans."""

    jacobians: Annotated[
        bool,
        typer.Option("--jacobians", help="Also the Jacobian norms around each layer, and bounds."),
    ] = False
    diagnostics: Annotated[
        bool,
        typer.Option(
            "--diagnostics", help="Also activations, gradients, dead and saturated units."
        ),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only say what it would cost: engine, gradients and memory."
        ),
    ] = False


@options.with_groups
def measure(
    problem: options.Problem,
    *,
    measuring: MeasuringOptions,
    details: DetailOptions,
    computing: options.ComputeOptions,
    result: options.ResultOptions,
) -> None:
    """Measure the curvature of every layer of your network.

    \b
    Examples:
      hessinit measure net.py:problem
      hessinit measure net.py:problem --lr 0.1 --html report.html
      hessinit measure net.py:problem --optimizer adamw
      hessinit measure net.py:problem --curvature both --layers 'conv*'
      hessinit measure net.py:problem --jacobians --diagnostics
      hessinit measure net.py:problem --dry-run
      hessinit measure package.module:problem --json > report.json

    `hessinit new` writes a file with such a function.

    Exit status: 0 done, 1 not converged, 2 wrong usage, 130 interrupted.
    """
    source = find_problem(problem)
    output = Output(result, reads=source.file)
    lr = measuring.lr
    if details.dry_run and lr is not None:
        stop(
            f"--lr {lr:g} is judged by ‖H‖, which --dry-run does not measure; leave out one of "
            "them."
        )
    names = [name for name in ("jacobians", "diagnostics") if getattr(details, name)]
    chosen = options.given(
        curvature=measuring.curvature,
        estimator=measuring.estimator,
        layers=measuring.layers,
        tolerance=measuring.tolerance,
        precision=measuring.precision,
        seed=computing.seed,
        details=names or None,
    )
    with (
        failures_explained(
            measure,
            f"measuring {problem}",
            "the measurement was not finished, and nothing was written.",
        ),
        progress(f"Measuring {problem} …") as show,
    ):
        from hessinit.training.assert_sound import measure_and_judge

        loaded = load_problem(
            source, computing, measuring.optimizer, measuring.clip_norm
        ).with_options(chosen)
        measured = replace(loaded.problem, batch=loaded.batch)
        keywords = dict(loaded.keywords)
        optimizer = keywords.pop("optimizer", "sgd")
        if details.dry_run:
            planning = {name: value for name, value in keywords.items() if name in PLANNED}
            plan = hessinit.plan(measured, **planning)
        else:
            keywords["progress"] = announced(show, measured.model)
            with_rates = optimizer != "sgd"
            judged = measure_and_judge(
                measured, keywords, optimizer=optimizer, lr=lr, with_rates=with_rates
            )
    if details.dry_run:
        output.write(plan)
        return
    rate = lr if judged.advice is None else judged.advice.lr
    after = None if rate is None else tell_rate(rate, problem, judged)
    output.write(judged.report, after=after)
    if not judged.report.converged:
        stop(
            "Not converged: the report marks what did not reach tolerance "
            f"{judged.report.tolerance:g}.",
            NOT_MET,
        )


def announced(show: OnProgress, model: Any) -> OnProgress:
    """Return the progress of a measurement; it begins with the time that a long one will take."""
    modules = model.modules() if hasattr(model, "modules") else ()
    shorter = "Fewer examples, --layers NAMES or a larger --tolerance make it shorter"
    if any("BatchNorm" in type(module).__name__ and module.training for module in modules):
        shorter += (
            "; so does model.eval(), with which BatchNorm takes its running statistics and ‖H‖ is "
            "not that of training"
        )

    def tell(state: ProgressState) -> None:
        if not state.products:
            announce(state.seconds_left, shorter)
        show(state)

    return tell


def tell_rate(lr: float, problem: str, judged: Judgement) -> str:
    """Return lr·‖H‖ or what the advice says of this rate, how the trial ended, and what helps."""
    report = judged.report
    if judged.advice is not None:
        sentences = [judged.advice.warmup.reason]
    elif report.network_measured:
        product = format_number(lr * report.network.norm)
        sentences = [
            f"lr·‖H‖ = {product}; on a quadratic, plain gradient descent is stable up to 2."
        ]
    else:
        sentences = [
            f"lr = {lr:g}: the network's ‖H‖ was not measured, only bounded (network=False)."
        ]
    command = ""
    if judged.trial is not None:
        sentences.append(describe_trial(judged.trial, lr))
        if judged.trial.outcome == DIVERGED and judged.advice is None:
            command = f"\nNext: hessinit initialize {problem} --lr {lr:g}"
    return f"{' '.join(sentences)}{command}"


@dataclass(frozen=True)
class AdviceOptions:
    """What `advise` measures, and for which optimizer."""

    optimizer: options.Optimizer = None
    clip_norm: options.ClipNorm = None
    lr: Annotated[float | None, options.rate("Also say whether this learning rate is stable.")] = (
        None
    )
    steps: options.TrainingSteps = None
    batch_size: options.BatchSize = None
    layers: options.Layers = None
    curvature: options.OneCurvature = None
    tolerance: options.Tolerance = None


@options.with_groups
def advise(
    problem: options.TrainedProblem,
    *,
    advised: AdviceOptions,
    computing: options.ComputeOptions,
    result: options.ResultOptions,
) -> None:
    """Say which learning rate suits your optimizer.

    Short trainings on mini-batches of your data find it, near the rate that the curvature suggests.
    The first line is the learning rate; then come the largest stable one, whether to warm up, and
    why.

    \b
    Examples:
      hessinit advise net.py:problem --optimizer adamw --steps 3000
      hessinit advise net.py:problem --optimizer momentum --lr 0.1
      hessinit advise net.py:problem --optimizer train.py:make_optimizer --batch-size 64
      hessinit advise net.py:problem --optimizer lion_pytorch:Lion --clip-norm 1

    Exit status: 0 done, 1 not learned or not converged, 2 wrong usage, 130 interrupted.
    """
    source = find_problem(problem)
    output = Output(result, reads=source.file)
    chosen = options.given(
        lr=advised.lr,
        layers=advised.layers,
        curvature=advised.curvature,
        tolerance=advised.tolerance,
        seed=computing.seed,
    )
    with (
        failures_explained(
            advise,
            f"advising on {problem}",
            "the advice was not finished, and nothing was written.",
        ),
        progress(f"Measuring {problem} …"),
    ):
        loaded = load_problem(source, computing, advised.optimizer, advised.clip_norm)
        loaded = loaded.keep_shared(ADVISED, problem).with_options(chosen)
        seed = loaded.problem.seed
        batch, data = _cut(loaded.batch, advised.batch_size, advised.steps, seed)
        problem_of_batch = replace(loaded.problem, batch=batch)
        advice = hessinit.advise(
            problem_of_batch, data=data, steps=advised.steps, **loaded.keywords
        )
    output.write(advice)
    if not advice.learns:
        stop("No learning rate: the advice says more.", NOT_MET)
    if not advice.converged:
        stop("Not converged: the advice is marked ~.", NOT_MET)


def _read_rate(text: str | None) -> str | None:
    if text not in (None, "auto"):
        try:
            options.check_rate(float(text or ""))
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is no number; give a rate such as 0.1, or auto."
            ) from None
    return text


@dataclass(frozen=True)
class FitOptions:
    """What the weights are fitted to."""

    lr: Annotated[
        str | None,
        typer.Option(
            callback=_read_rate,
            metavar="X|auto",
            help="The learning rate that the weights shall suit; auto finds one.",
        ),
    ] = None
    target: Annotated[
        float | None, options.number("The ‖H‖ to aim at, in place of --lr.  [default: 1]")
    ] = None
    rule: Annotated[
        Literal["network", "layers"] | None,
        typer.Option(
            help="The target is for the whole network, or for every layer.  [default: network]"
        ),
    ] = None
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The initialization before scaling: a scheme such as he or lsuv, keep for the "
            "weights as they come, or auto.  [default: auto]",
        ),
    ] = None
    scaling: Annotated[
        Literal["auto", "all", "last", "small-output"] | None,
        typer.Option(help="Which weights are scaled to meet the target.  [default: auto]"),
    ] = None
    optimizer: options.Optimizer = None
    clip_norm: options.ClipNorm = None
    momentum: Annotated[
        float | None, options.number("Of momentum and nesterov.  [default: 0.9]")
    ] = None


@dataclass(frozen=True)
class TrialOptions:
    """How the new weights are compared with the user's own."""

    no_trials: Annotated[
        bool,
        typer.Option("--no-trials", help="Fit the curvature to --lr on all data; compare nothing."),
    ] = False
    steps: options.TrainingSteps = None
    trial_steps: Annotated[
        int | None, options.whole("Steps of each trial.  [default: what suits --steps]", 3)
    ] = None
    batch_size: options.BatchSize = None


@dataclass(frozen=True)
class DrawOptions:
    """Which weights are drawn, and how they are measured."""

    report: Annotated[
        bool,
        typer.Option("--report", help="Measure every layer before and after, whatever it costs."),
    ] = False
    layers: options.Layers = None
    overwrite: options.Overwrite = False
    curvature: options.OneCurvature = None
    tolerance: Annotated[
        float | None, options.number("Relative accuracy of the target.  [default: 0.05]")
    ] = None


@dataclass(frozen=True)
class WeightsOptions:
    """Where the new weights go."""

    weights: Annotated[Path | None, options.path("Write the new weights: a .safetensors file.")] = (
        None
    )
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only show what would be written; it needs no --weights."),
    ] = False


@options.with_groups
def initialize(
    problem: options.TrainedProblem,
    *,
    fit: FitOptions,
    trials: TrialOptions,
    drawn: DrawOptions,
    computing: options.ComputeOptions,
    written: WeightsOptions,
    result: options.ResultOptions,
) -> None:
    """Find weights whose curvature fits your learning rate.

    With --lr, the new weights and your own are trained for some steps on mini-batches of your data,
    and the initial weights of the better ones are the result; --lr auto also searches the rate.
    Your file stays as it is: with --weights they go into a file that your training loads.

    \b
    Examples:
      hessinit initialize net.py:problem --lr 0.1
      hessinit initialize net.py:problem --lr 0.1 --weights weights.safetensors
      hessinit initialize net.py:problem --lr auto --optimizer adamw --steps 3000
      hessinit initialize net.py:problem --lr 0.1 --no-trials --report
      hessinit initialize net.py:problem --target 1 --rule layers

    \b
    In your training, before the first step:
      import safetensors.torch
      safetensors.torch.load_model(model, "weights.safetensors")
    or, without any file:
      hessinit.initialize_(model, loss, batch, lr=0.1, data=loader, steps=3000)

    Exit status: 0 done, 1 target not met or nothing learned, 2 wrong usage, 130 interrupted.
    """
    source = find_problem(problem)
    output = Output(result, weights=written.weights, reads=source.file)
    _refuse_contradictions(fit, trials, written)
    is_compared = fit.lr is not None and not trials.no_trials
    chosen = options.given(layers=drawn.layers, seed=computing.seed)
    fitting = options.given(
        rule=fit.rule,
        scheme=fit.scheme,
        scaling=fit.scaling,
        momentum=fit.momentum,
        curvature=drawn.curvature,
        tolerance=drawn.tolerance,
        report=drawn.report,
        overwrite=drawn.overwrite,
        trial_steps=trials.trial_steps,
    )
    with (
        failures_explained(
            initialize,
            f"initializing {problem}",
            "the initialization was not finished, and nothing was written.",
        ),
        progress(f"Initializing {problem} …") as show,
    ):
        loaded = load_problem(source, computing, fit.optimizer, fit.clip_norm)
        loaded = loaded.keep_shared(FITTED, problem).with_options(chosen)
        if "curvature" in loaded.keywords:
            fitting.setdefault("curvature", loaded.keywords["curvature"])
        options_of_fit = hessinit.Fit(**fitting)
        batch = loaded.batch
        data = None
        if is_compared:
            batch, data = _cut(batch, trials.batch_size, trials.steps, loaded.problem.seed)
        initialization = hessinit.initialize_(
            replace(loaded.problem, batch=batch),
            lr=fit.lr if fit.lr in (None, "auto") else float(fit.lr or 0),
            target=fit.target,
            optimizer=loaded.keywords.get("optimizer", "sgd"),
            data=data,
            steps=trials.steps,
            fit=options_of_fit,
            dry_run=written.dry_run,
            progress=announced_trials(show) if is_compared else True,
        )
    _write_initialization(output, initialization, written)


def _write_initialization(
    output: Output, initialization: hessinit.Initialization, written: WeightsOptions
) -> None:
    """Print the result and write its files; end the command with 1 if it did not succeed."""
    if not initialization.learned:
        replace(output, weights=None).write(initialization)
        stop("Nothing learned, and nothing was written: the result says more.", NOT_MET)
    output.write(initialization)
    if written.weights is None:
        advice = "Leave out --dry-run and pass" if written.dry_run else "Pass"
        typer.echo(
            f"No weights were written. {advice} --weights FILE.safetensors to keep them.", err=True
        )
    if not initialization.converged and not initialization.flat_enough:
        fault = "Target not met"
        if initialization.target is None:
            fault = "No weights survived at this rate"
        stop(f"{fault}: the result says why.", NOT_MET)


def _refuse_contradictions(fit: FitOptions, trials: TrialOptions, written: WeightsOptions) -> None:
    """End the command if options contradict each other."""
    if fit.momentum is not None and fit.optimizer not in ("momentum", "nesterov"):
        stop(
            f"--momentum {fit.momentum:g} is only for --optimizer momentum and nesterov; pass one "
            "of them."
        )
    if written.weights is not None and written.dry_run:
        stop(
            "--weights and --dry-run contradict each other: a dry run writes no weights. Leave one "
            "out."
        )
    if written.weights is not None and written.weights.suffix != ".safetensors":
        stop(f"--weights {written.weights} must end in .safetensors.")
    of_trials = trials.steps or trials.trial_steps or trials.batch_size
    if (fit.lr is None or trials.no_trials) and of_trials:
        stop(
            "--steps, --trial-steps and --batch-size are for trials; pass --lr without "
            "--no-trials, or leave them out."
        )


def announced_trials(show: OnProgress) -> OnProgress:
    """Return the progress of trials, which tells after four steps how long long ones will take."""
    shorter = "A smaller --batch-size or --trial-steps makes it shorter; --no-trials leaves it out"

    def tell(state: ProgressState) -> None:
        if state.done == 4:
            announce(state.seconds_left, shorter)
        show(state)

    return tell


def _cut(given: Any, batch_size: int | None, steps: int | None, seed: int) -> tuple[Any, Any]:
    """Return a mini-batch to measure, and the data of trials: ready batches, or all examples."""
    from hessinit.training.loop import read_data
    from hessinit.training.trial import LENGTHS

    data = read_data(given, batch_size or 1, LENGTHS.for_training(steps))
    if not data.ready and batch_size is None:
        data = replace(data, batch_size=min(BATCH_SIZE, data.examples))
    batch = data.initial_batch(seed)
    # An iterator gives its batches only once: they were read.
    parts = [(part.inputs, part.targets) for part in data.parts]
    return (batch.inputs, batch.targets), parts if data.ready else parts[0]


def show(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="What --save, --json, --log or save() wrote.", show_default=False
        ),
    ],
    as_json: options.AsJson = False,
    html: options.AsHtml = None,
    picture: options.Picture = None,
) -> None:
    """Print what another command saved. It needs no torch, and no model.

    \b
    Examples:
      hessinit show report.json
      hessinit show report.json --html report.html
      hessinit show comparison.json --picture comparison.pdf
      hessinit show curvature.jsonl --json > curvature.json
      hessinit show reproduction/table-4-mnist.json

    Exit status: 0 done, 2 wrong usage.
    """
    result = options.ResultOptions(as_json, html, picture=picture)
    output = Output(result, reads=path)
    try:
        loaded = hessinit.load(path)
    except OSError as failure:
        stop(f"{path} cannot be read: {failure.strerror}.")
    except ValueError as refusal:
        stop(str(refusal))
    output.write(loaded)
