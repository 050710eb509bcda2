"""The problem file: `hessinit new` writes one, and other commands load `file.py:function`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import hessinit
from hessinit.cli.failures import UserCodeError, stop
from hessinit.cli.options import ComputeOptions
from hessinit.errors import ProblemError, choose, did_you_mean, options_of
from hessinit.results.result import write_text

USUAL_NAME = Path("problem.py")

STARTER = '''\
"""A problem for hessinit: a model, its loss, and data. It runs as it is; put your own in.

    hessinit measure {name}:problem                how sharp is each layer?
    hessinit advise {name}:problem                 which learning rate? add --optimizer adamw
    hessinit initialize {name}:problem --lr 0.1    weights that fit a learning rate
    hessinit track {name}:problem --lr 0.1         sharpness while it trains
    hessinit compare {name}:problem                which initialization trains best?
    hessinit sweep {name}:problem                  how large should weights be?
"""

import torch
from hessinit.digits import load_digits
from torch import nn


class Net(nn.Module):
    """Your model. Layers are named in the tables as these attributes are."""

    def __init__(self):
        super().__init__()
        self.hidden1 = nn.Linear(64, 32)
        self.hidden2 = nn.Linear(32, 32)
        self.output = nn.Linear(32, 10)

    def forward(self, images):
        signal = torch.tanh(self.hidden1(images.flatten(1)))
        signal = torch.tanh(self.hidden2(signal))
        return self.output(signal)  # logits: the softmax belongs to the loss


def problem():
    """Called without arguments, and again for every training that is compared.

    So build the model in here: every training needs a new one. Random numbers may be drawn freely:
    hessinit seeds torch, numpy and random before the call.
    """
    model = Net()

    # Any function of (output, targets), or a loss of torch.nn. It should average over examples.
    loss = nn.CrossEntropyLoss()

    # (inputs, targets), the examples along the first dimension: tensors, or tuples and dicts of
    # them. A list of such pairs, or a DataLoader, is fine, too. A few hundred examples are enough
    # to measure.
    images, labels = load_digits()  # 1,797 real handwritten digits of 8×8 pixels
    data = images[:1000], labels[:1000]

    return model, loss, data

    # A hessinit.Problem (import hessinit) says more: how the model is called, if not as
    # model(inputs), or which layers are measured.
    #
    #     def forward(model, inputs):
    #         return model(inputs["tokens"], mask=inputs["mask"]).logits
    #
    #     return hessinit.Problem(model, loss, data, forward=forward)
    #
    # A dict as the last value may name the optimizer of your training, or hold a function that
    # builds it: lambda parameters: torch.optim.AdamW(parameters, lr=3e-4).
    #
    #     return model, loss, data, {{"optimizer": "adamw"}}
    #     return hessinit.Problem(model, loss, data), {{"optimizer": "adamw"}}
'''


def new(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Its name, which ends in .py.")
    ] = USUAL_NAME,
) -> None:
    """Write a commented file that runs, to put your network in.

    It holds a small network and real digits, and works with measure, advise, initialize, track,
    compare and sweep.

    \b
    Examples:
      hessinit new
      hessinit new experiments/net.py

    Exit status: 0 done, 2 wrong usage.
    """
    if path.suffix != ".py":
        stop(f"{path} must be a name that ends in .py, such as {path.parent / USUAL_NAME}.")
    if path.exists():
        stop(f"{path} exists and was left as it is; choose another name, or remove it first.")
    try:
        write_text(path, STARTER.format(name=path.as_posix()))
    except (OSError, ValueError) as failure:
        stop(f"cannot write {path}: {getattr(failure, 'strerror', None) or failure}.")
    typer.echo(f"Wrote {path}. It runs as it is; look into it to put your own network in.")
    typer.echo(f"Next: hessinit measure {path.as_posix()}:problem")


def problem_options() -> list[str]:
    """Return the options of a `hessinit.Problem`, whose import needs torch."""
    described = ("model", "loss", "batch")
    return [field.name for field in fields(hessinit.Problem) if field.name not in described]


class Place(NamedTuple):
    """Where a problem is defined; nothing of it has been run yet.

    A module's file need not exist.
    """

    source: str
    function: str
    module: str
    folder: Path
    file: Path
    is_file: bool


class LoadedProblem(NamedTuple):
    """What the function returned, with the options of the command line.

    The batch, or the data to train on, is not yet in the problem: an iterator is read only once.
    """

    problem: hessinit.Problem
    batch: Any
    keywords: dict[str, Any]

    def with_optimizer(self, text: str | None, clip_norm: float | None = None) -> LoadedProblem:
        """Return the same with an optimizer by its name, or the function of FILE.py:FUNCTION.

        None keeps the problem's own; gradients are clipped to `clip_norm`.
        """
        keywords = dict(self.keywords)
        if text is not None:
            keywords["optimizer"] = _load_function(find_problem(text)) if ":" in text else text
        if clip_norm is not None:
            training = hessinit.Training.of(keywords.get("optimizer", "sgd"))
            keywords["optimizer"] = replace(training, clip_norm=clip_norm)
        return self._replace(keywords=keywords)

    def with_options(self, chosen: Mapping[str, Any]) -> LoadedProblem:
        """Return the same with options: of the problem, or keywords of the verb."""
        described = options_of(hessinit.Problem, chosen)
        keywords = {name: value for name, value in chosen.items() if name not in described}
        problem = replace(self.problem, **described)
        return self._replace(problem=problem, keywords={**self.keywords, **keywords})

    def keep_shared(self, shared: Container[str], source: str) -> LoadedProblem:
        """Keep the keywords that mean the same to another verb; name the rest on stderr."""
        keywords = {name: value for name, value in self.keywords.items() if name in shared}
        if keywords.get("curvature") == "both":  # other verbs need one of them
            del keywords["curvature"]
        if unused := ", ".join(name for name in self.keywords if name not in keywords):
            typer.echo(
                f"{source} also returns {unused}, which only hessinit measure uses.", err=True
            )
        return self._replace(keywords=keywords)


def find_problem(text: str) -> Place:
    """Return the place `file.py:function`; a missing file ends the command before any import."""
    source, _, function = text.rpartition(":")
    is_file = source.endswith(".py") or "/" in source or os.sep in source
    if not function.isidentifier() or not (
        is_file or all(map(str.isidentifier, source.split(".")))
    ):
        example = f"{text}:problem" if text.endswith(".py") else "net.py:problem"
        stop(
            f"{text!r} is not of the form file.py:function or package.module:function, such as "
            f"{example}."
        )
    if not is_file:
        file = Path(*source.split(".")).with_suffix(".py")
        return Place(source, function, source, Path.cwd(), file, is_file)
    file = Path(source).resolve()
    if file.suffix != ".py" or not file.is_file():
        files = [path.name for path in file.parent.glob("*.py") if path.is_file()]
        hint = did_you_mean(file.name, files)
        if not hint and source.endswith(".py"):
            hint = f" `hessinit new {source}` writes one to begin with."
        stop(
            f"{source} must be an existing Python file; there is none of that name in "
            f"{file.parent}.{hint}"
        )
    return Place(source, function, file.stem, file.parent, file, is_file)


def load_problem(
    place: Place,
    computing: ComputeOptions,
    optimizer: str | None = None,
    clip_norm: float | None = None,
) -> LoadedProblem:
    """Seed what the file may draw from, call its function, and move the model.

    A batch follows the model. The `optimizer` that was asked for replaces the problem's own.
    """
    check_device(computing.device)
    _seed(computing.seed or 0)
    loaded = _call(_load_function(place), place)
    if computing.device is not None:
        loaded.problem.model.to(computing.device)
    return loaded.with_optimizer(optimizer, clip_norm)


def check_device(device: str | None) -> None:
    """Refuse a device that torch does not have here, before the user's file is run."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as failure:
        reason = str(failure).strip().splitlines()[0].rstrip(".")
        # Some twenty words follow, of which nobody has the hardware.
        if reason.startswith("Expected one of"):
            reason = "torch has no device of that name"
        devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        stop(f"--device {device} cannot be used: {reason}. This machine has {', '.join(devices)}.")


def _seed(seed: int) -> None:
    from hessinit.training.loop import seed_generators

    seed_generators(seed)


@contextlib.contextmanager
def _user_code(doing: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit, typer.Exit):
        raise
    except BaseException as failure:
        raise UserCodeError(f"{doing} failed") from failure


def _load_function(place: Place) -> Callable[[], Any]:
    """Import the file or module, with its folder on `sys.path`, as `python file.py` does."""
    if str(place.folder) not in sys.path:
        sys.path.insert(0, str(place.folder))
    importlib.invalidate_caches()
    with _user_code(f"importing {place.source}"):
        try:
            module = importlib.import_module(place.module)
        except ModuleNotFoundError as failure:
            # A missing import inside the module is the user's to see; a missing module is a wrong
            # name.
            if not f"{place.module}.".startswith(f"{failure.name}."):
                raise
            stop(f"there is no module {failure.name!r}, neither installed nor in {place.folder}.")
    imported = Path(getattr(module, "__file__", None) or "a built-in module")
    if place.is_file and imported.resolve() != place.file:
        stop(
            f"{place.source} has the name of another module, {imported}; choose another name, such "
            f"as my_{place.file.name}."
        )
    function: Any = getattr(module, place.function, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        near = did_you_mean(place.function, names)
        listed = ", ".join(names) or "none"
        stop(
            f"{place.source} has no function {place.function!r}; its functions are {listed}.{near}"
        )
    return function


def _call(function: Callable[[], Any], place: Place) -> LoadedProblem:
    who = f"{place.function}() of {place.source}"
    with _user_code(who):
        result = function()
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    keywords = {}
    if len(values) in (2, 4) and isinstance(values[-1], dict):
        keywords = values.pop()
    parameters = inspect.signature(hessinit.measure).parameters.values()
    options = [
        parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for name in keywords:
        choose(f"{who}: keyword", name, ["optimizer", *problem_options(), *options])
    if len(values) == 1 and isinstance(values[0], hessinit.Problem):
        (problem,) = values
        return LoadedProblem(problem, problem.batch, {}).with_options(keywords)
    if len(values) != 3:
        types = [type(value).__name__ for value in values]
        raise ProblemError(
            f"{who} returned {', '.join(types)}; it must return model, loss, batch, or a "
            "hessinit.Problem, and may add a dict: optimizer, and keyword arguments for "
            "hessinit.measure."
        )
    model, loss, batch = values
    return LoadedProblem(hessinit.Problem(model, loss, None), batch, {}).with_options(keywords)


class Builder:
    """Builds the problem's model anew, and imports its file with the same draws in any process."""

    def __init__(self, place: Place) -> None:
        from hessinit.problem.preserve import untouched_random_state

        self.place = place
        with untouched_random_state():
            _seed(0)
            self.function = _load_function(place)

    def load(self, device: str | None = None) -> LoadedProblem:
        check_device(device)
        _seed(0)
        return _call(self.function, self.place)

    def __call__(self) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return _call(self.function, self.place).problem.model

    def __reduce__(self) -> tuple[Any, ...]:
        # A process imports the file with the same draws before its function is looked up there.
        return _prepare_builder, (self.place,), vars(self)


def _prepare_builder(place: Place) -> Builder:
    """Return a builder without its function, after a silent import of the file, where there is one.

    A worker of a cluster may have no such file: it gets the function by value.
    """
    from hessinit.problem.preserve import untouched_random_state

    with (
        untouched_random_state(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(ModuleNotFoundError),
    ):
        _seed(0)
        importlib.import_module(place.module)
    return Builder.__new__(Builder)
