"""Every public function with each of its options: right values work, wrong ones are refused before any work.

The options are those of the signatures, of `Problem` for every verb that takes one, and of `Fit` and other
settings: a new function or a new option needs examples here.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import hessinit
from calls import call
from tiny import LOSS, batch, inputs, labels, network

Given = dict[str, Any]
# The function whose examples serve for another one, too.
LIKE = {"sweep": "compare"}
SHORT: Given = {"steps": 10, "seeds": 1, "workers": 1, "progress": False, "batch_size": 3}
PROBLEM: Given = {"loss": LOSS, "batch": batch()}
TRIALS: Given = {"lr": 0.1, "data": batch(), "optimizer": "adamw", "trial_steps": 3, "progress": False}
# What a verb takes in one argument: the options of that argument stand for it.
SETTINGS = {"compare": hessinit.RunSettings, "sweep": hessinit.RunSettings, "track": hessinit.TrackSettings}
# What every call of a function passes, unless the example says otherwise; `model` is made anew each time.
CALLS: dict[str, Given] = {
    "advise": PROBLEM,
    "apply_scheme_": {"scheme": "he"},
    "apply_scheme_, lsuv": {"scheme": "lsuv", "sample": inputs()},
    "apply_scheme_, problem": {**PROBLEM, "scheme": "lsuv"},
    "assert_sound": PROBLEM,
    "assert_sound, adamw": {**PROBLEM, "optimizer": "adamw", "lr": 1e-3},
    "compare": {"loss": LOSS, "data": batch(), "schemes": ["he"], "learning_rates": [0.1], **SHORT},
    "gain": {"activation": "relu"},
    "gauss_newton": PROBLEM,
    "hessian": PROBLEM,
    "initialize_": {**PROBLEM, "lr": 0.1, "progress": False},
    "initialize_, data": {**PROBLEM, **TRIALS},
    "jacobian": PROBLEM,
    "load": {},
    "logits_problem": {"batch": batch()},
    "measure": PROBLEM,
    "plan": PROBLEM,
    "sweep": {"loss": LOSS, "data": batch(), "stds": [0.1], **SHORT},
    "track": {**PROBLEM, "path": None},
}


class Strange:
    """Right for no option."""


class Untouched(nn.Sequential):
    """The network with a forward that must not be called: what is wrong is refused before."""

    def forward(self, x: Any) -> torch.Tensor:
        raise AssertionError("the forward was called")


NETWORK = network()


def made() -> nn.Module:
    return copy.deepcopy(NETWORK)


def untouched() -> nn.Module:
    return Untouched(*made())


def takes_nothing() -> None:
    return None


def write_ones(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
    for parameter in model.parameters():
        nn.init.ones_(parameter)


def run(*arguments: Any) -> Any:
    model, *given = arguments
    return model(*given)


def save_report() -> str:
    call(hessinit.measure, network(), **PROBLEM).save("report.json")
    return "report.json"


SWITCH: list[Any] = [True, False]
SWITCHES = (
    "apply_scheme_.dropout", "at_start", "backward", "check", "dry_run", "each_layer", "measure_curvature",
    "network", "overwrite", "strict", "warn",
)  # fmt: skip
SELF_SUPERVISED = {"batch": (inputs(), None), "loss": lambda output, _: output.square().mean()}
# By "option" or "function.option": what works. A dict brings more options along; a lambda makes a new value.
RIGHT: dict[str, list[Any]] = {
    **dict.fromkeys(SWITCHES, SWITCH),
    "activation": ["tanh", nn.GELU(), torch.relu, nn.ReLU],
    "batch": [batch(), [batch(), batch(4)], lambda: iter([batch()]), SELF_SUPERVISED],
    "batch_size": [1, 6],
    "biases": ["auto", "zero", "keep"],
    "build": [made],
    "compare.optimizer": ["adam", "nesterov", SGD, lambda: lambda parameters: SGD(parameters, lr=0.1)],
    "sweep.warmup": [3, None],
    "compare.warmup": [{"warmup": 3, "schemes": ["he+warmup"]}, None],
    "curvature": ["gauss-newton", "hessian"],
    "details": ["trace", ["jacobians", "diagnostics"], ("frobenius", "density", "top-2"), []],
    "data": [batch(), [batch(3), batch(3)], lambda: iter([batch(3)] * 20)],
    "device": [None, "cpu", torch.device("cpu")],
    "distributed": ["batch", "layers", "each", None],
    "apply_scheme_.distributed": ["each", None],
    "compare.distributed": ["each", None],
    "sweep.distributed": ["each", None],
    "distribution": [{"distribution": "uniform", "scheme": "he"}, None],
    "logits_problem.batch": [batch(), {"x": inputs(), "labels": labels()}, lambda: iter([batch()])],
    "dropout": ["freeze", "refuse"],
    "apply_scheme_, problem.dropout": ["freeze", "refuse"],
    "dtype": [torch.float64, torch.float32, None],
    "estimator": ["auto", "gram", "lanczos"],
    "every": [1, 7],
    "executor": [lambda: {"executor": ThreadPoolExecutor(1), "workers": None}, None],
    "folder": ["runs", Path("more", "runs"), None],
    "forward": [lambda: run, None],
    "apply_scheme_.forward": [lambda: {"forward": run, "sample": inputs()}, None],
    "gains": [{"gains": {"0": 1.5}}, {"gains": {}}, None],
    "generator": [lambda: torch.Generator().manual_seed(3), None],
    **{
        f"{verb}.data": [*({"data": data, "trial_steps": 3} for data in (batch(), [batch(3)] * 3)), None]
        for verb in ("advise", "initialize_")
    },
    **{
        f"{verb}.steps": [{"steps": 12, "data": [batch(3)] * 3}, 1, None]
        for verb in ("advise", "initialize_")
    },
    "assert_sound, adamw.lr": [0.1, 0.01, None],
    "initialize_.lr": [0.1, {"lr": "auto", "trial_steps": 3}, {"lr": None, "data": None}],
    "initialize_.momentum": [0.5, 0],
    "initialize_.optimizer": ["sgd", "adamw", lambda: SGD],
    "initialize_.progress": [True, False, lambda: lambda state: None],
    "initialize_.trial_steps": [3, 5, None],
    "layers": [None, "0", "*", ["0", "2.weight"], ("2",), {"0"}, lambda: (name for name in ("0", "2"))],
    "learning_rate": [0.1, 3],
    "learning_rates": [[0.1, 0.2], (1,), lambda: iter([0.1])],
    "log_to": ["auto", None, lambda: lambda values, step: None, []],
    "loss": [LOSS, lambda: lambda output, targets: nn.functional.cross_entropy(output, targets)],
    "lr": [0.1, 1, None],
    "max_iterations": [50, 100],
    "max_measurements": [3, None],
    "max_overhead": [0.5, 1],
    "max_sharpening": [1, math.inf],
    "measure.curvature": ["gauss-newton", "hessian", "both"],
    "plan.curvature": ["gauss-newton", "hessian", "both"],
    "measure.progress": [lambda: lambda state: None, None],
    "model": [lambda: made()],  # anew for each call
    "assert_sound.network": [{"network": False, "lr": None}, True],
    "optimizer": [
        *("sgd", "adamw", lambda: SGD, lambda: lambda parameters: SGD(parameters, lr=0.1)),
        hessinit.Training("momentum", settings={"momentum": 0.5, "weight_decay": 0}),
        hessinit.Training("adam", clip_norm=1.0, settings={"betas": (0.8, 0.9), "eps": 1e-6}),
    ],
    "path": [{"path": "curve.jsonl"}, Path("curve.jsonl"), None],
    "load.path": [save_report],
    "precision": ["auto", "full", "tf32", "bf16"],
    "assert_sound.precision": ["auto", "full", "tf32", {"precision": "bf16", "tolerance": 0.2}],
    "progress": SWITCH,
    "reduction": ["auto", "mean"],
    "report": [True, False, None],
    "residual": ["plain", "scaled", "small"],
    "resume": [{"resume": True, "path": "curve.jsonl"}, False],
    "rule": [{"rule": "layers", "optimizer": "sgd"}, "network"],
    "sample": [inputs(), None],
    "apply_scheme_, lsuv.sample": [inputs()],
    "scaling": ["auto", "all", "last", "small-output"],
    "scheme": ["he", "orthogonal", "forward"],
    "schemes": ["he", ["default", "lsuv+warmup"], {"mine": write_ones}, lambda: iter(["he"])],
    "seed": [0, 7],
    "seeds": [1, [3], range(1)],
    "stds": [[0.1, 0.2], lambda: iter([0.1])],
    "steps": [10, 12],
    "target": [{"target": 1.0, "lr": None, "data": None}, None],
    "task": ["auto", "classification"],
    "times_stable": [1000, 4.0],
    "tolerance": [1e-2, 0.05],
    "advise.trial_steps": [0, 5, None],
    "trial_steps": [0, 5],
    "workers": [1, None],
}
UNKNOWN, NUMBER = "nonsense", [-1.0, math.nan, math.inf, "0.1"]
PAIRS = [3, None, inputs(), {"x": inputs()}, []]
WHOLE, BOOL = [-1, 1.5, "2", True], [1, "yes", None, torch.ones(2)]
OPTIMIZERS: list[Any] = [UNKNOWN, 0.1, nn.Linear(2, 2), takes_nothing, [SGD]]
WORDS = ("assert_sound.estimator", "measure.curvature", "plan.curvature", "residual", "rule", "scaling")
# What is refused, beside a `Strange()`, by every option.
WRONG: dict[str, list[Any]] = {
    **dict.fromkeys(SWITCHES, BOOL),
    **{key: [UNKNOWN, None] for key in (*WORDS, "task")},
    "activation": [UNKNOWN, 3, None],
    "batch": [*PAIRS, (inputs(), labels(5)), (inputs() / 0, labels()), (inputs(),) * 3],
    "logits_problem.batch": PAIRS,
    "batch_size": [*WHOLE, 0, 7],
    "biases": [UNKNOWN, None, True],
    "build": [network(), 3, None, write_ones],
    "compare.optimizer": [*OPTIMIZERS, lambda: SGD(network().parameters(), lr=0.1)],
    "sweep.warmup": [*WHOLE, 0, 11],
    "compare.warmup": [{"warmup": 3}, {"warmup": 11, "schemes": ["he+warmup"]}, -1],
    "curvature": [UNKNOWN, "gauss_newton", None, "both"],
    "details": [UNKNOWN, 3, None, ["trace", 3], "top-0", "top-x"],
    "data": [3, inputs(), [], [3], (inputs(), labels(5)), "data"],
    "device": [UNKNOWN, -7, 2**70, "cuda:99"],
    "distributed": [UNKNOWN, True, 2],
    "distribution": [UNKNOWN, 3, {"distribution": "uniform", "scheme": "orthogonal"}],
    "dropout": [UNKNOWN, None, True],
    "apply_scheme_, problem.dropout": [UNKNOWN, None, True],
    "dtype": [torch.float16, "float64", float],
    "estimator": [UNKNOWN, None, {"estimator": "gram", "curvature": "hessian"}],
    "every": [*WHOLE, 0],
    "executor": [{"executor": 3, "workers": None}, {"executor": ThreadPoolExecutor(1), "workers": 1}],
    "folder": [3, b"folder"],
    "forward": [3, takes_nothing, network(), lambda: lambda x: x],
    "gains": [3, torch.ones(2), {"gains": {"0": 1.0}, "scheme": "lecun"}],
    "generator": [3, "cpu"],
    "initialize_.data": [3, inputs(), [], [3], {"data": batch(), "lr": None}],
    "initialize_.lr": [*NUMBER[:3], "best", 0],
    "initialize_.momentum": [1.0, -0.1, "0.9", None],
    "initialize_.optimizer": [*OPTIMIZERS, lambda: SGD(network().parameters(), lr=0.1)],
    "initialize_.progress": [3, "yes", takes_nothing],
    "initialize_.trial_steps": [*WHOLE, 2],
    **{f"{verb}.steps": [*WHOLE, 0] for verb in ("advise", "initialize_")},
    "layers": ["5", [], [3], ["0", None], 3, True, torch.tensor(0.5), ""],
    "learning_rate": [*NUMBER, 0, [0.1]],
    "learning_rates": [0.1, [], "0.1", [0.1, 0.1], [-0.1], [None], torch.tensor(0.1)],
    "log_to": [3, "wandb", [3]],
    "loss": [3, None, nn.MSELoss, takes_nothing, lambda: lambda output: output.sum(), "mse"],
    "lr": [*NUMBER, 0, [0.1]],
    "max_iterations": [*WHOLE, 0],
    "max_measurements": [*WHOLE, 0],
    "max_overhead": [*NUMBER, 0, 1.5],
    "max_sharpening": [0.5, math.nan, "2"],
    "measure.progress": [True, 3, takes_nothing],
    "model": [3, None, nn.Linear, takes_nothing],
    "assert_sound.network": [*BOOL, {"network": False, "lr": 0.1}],
    "optimizer": [*OPTIMIZERS, lambda: SGD(network().parameters(), lr=0.1)],
    "path": [3, b"curve", ""],
    "load.path": [3, None, b"report", ["report.json"]],
    "precision": [UNKNOWN, 16, None, torch.bfloat16],
    "progress": [1, "yes", None],
    "reduction": [UNKNOWN, "none", None],
    "report": ["yes", 1],
    "resume": [*BOOL, {"resume": True, "path": None}],
    "apply_scheme_, lsuv.sample": [None],
    "scheme": [UNKNOWN, None, 3],
    "schemes": [UNKNOWN, [], {}, [UNKNOWN], [None], 3, torch.ones(2), ["he", "he"], {3: write_ones}],
    "seed": WHOLE,
    "seeds": [*WHOLE, 0, [], [0, 0], [-1], ["0"], torch.tensor(1.0)],
    "stds": [0.1, [], "0.1", [0.1, 0.1], [-0.1], [None]],
    "steps": [*WHOLE, 9],
    "target": [{"target": value, "lr": None, "data": None} for value in [*NUMBER, 0]] + [1.0],
    "times_stable": [*NUMBER, 0],
    "tolerance": [*NUMBER, 0, 1.0],
    "trial_steps": WHOLE,
    "workers": [*WHOLE, 0],
}
# A sample goes to the model as it is, whatever it is.
TAKES_ANYTHING = [("apply_scheme_", "sample"), ("apply_scheme_, lsuv", "sample")]


def parameters_of(call: str) -> list[inspect.Parameter]:
    return [*inspect.signature(getattr(hessinit, call.split(",")[0])).parameters.values()]


def parts_of(call: str) -> dict[str, Any]:
    """The arguments that hold several options, with their classes."""
    name = call.split(",")[0]
    kinds = {"problem": hessinit.Problem, "fit": hessinit.Fit, "settings": SETTINGS.get(name)}
    if call in ("apply_scheme_", "apply_scheme_, lsuv"):  # which take a model alone
        del kinds["problem"]
    names = [parameter.name for parameter in parameters_of(call)]
    return {part: kind for part, kind in kinds.items() if part in names and kind is not None}


def options_of(call: str) -> list[str]:
    """The names in the signature, and the fields of what holds several options."""
    parts = parts_of(call)
    found = []
    for parameter in parameters_of(call):
        if parameter.name in parts:
            found += [field.name for field in dataclasses.fields(parts[parameter.name])]
        elif parameter.kind is parameter.VAR_KEYWORD:
            kind = str(parameter.annotation).removeprefix("Unpack[").removesuffix("]")
            function = inspect.unwrap(getattr(hessinit, call.split(",")[0]))
            found += eval(kind, function.__globals__).__annotations__
        else:
            found.append("model" if parameter.name == "problem" else parameter.name)
    known = list(dict.fromkeys(found))
    return [option for option in known if (call, option) not in LEFT_OUT]


def run_verb(call: str, given: Given) -> Any:
    """Call a function; what describes a problem, a fit or settings is passed as one."""
    given, parts = dict(given), parts_of(call)
    for part, kind in parts.items():
        names = [field.name for field in dataclasses.fields(kind) if field.name in given]
        given[part] = kind(**{option: given.pop(option) for option in names})
    if "problem" not in parts and "problem" in [parameter.name for parameter in parameters_of(call)]:
        given["problem"] = given.pop("model")
    return getattr(hessinit, call.split(",")[0])(**given)


LEFT_OUT = [("apply_scheme_, problem", "sample")]
FUNCTIONS = [name for name in hessinit.__all__ if inspect.isfunction(getattr(hessinit, name))]
CASES = [(call, option) for call in CALLS for option in options_of(call)]


def examples(table: dict[str, list[Any]], call: str, option: str) -> list[Any] | None:
    """Those of this call, else of the function, of the one whose options it has, or of the option."""
    name = call.split(",")[0]
    keys = [f"{one}.{option}" for one in (call, name, LIKE.get(name))]
    return next((table[key] for key in (*keys, option) if key in table), None)


def arguments(call: str, option: str, example: Any, build: Callable[[], nn.Module]) -> Given:
    value = example() if getattr(example, "__name__", "") in ("<lambda>", "save_report") else example
    own = value if isinstance(value, dict) and option in value else {option: value}
    names = options_of(call)
    given = {"model": build(), "build": build, **CALLS[call], **own}
    return {name: value for name, value in given.items() if name in names}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def alone_in_a_group() -> Iterator[None]:
    distributed = torch.distributed
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def test_every_function_and_option_has_examples() -> None:
    assert {call.split(",")[0] for call in CALLS} == set(FUNCTIONS)
    assert not [case for case in CASES if examples(RIGHT, *case) is None]
    assert not [case for case in CASES if examples(WRONG, *case) is None and case not in TAKES_ANYTHING]
    options = {option for _, option in CASES}
    assert not [key for key in (*RIGHT, *WRONG) if key.split(".")[-1] not in options]


@pytest.mark.parametrize(("call", "option"), CASES)
def test_what_is_right_works(call: str, option: str) -> None:
    right = examples(RIGHT, call, option)
    assert right
    for example in right:
        given = arguments(call, option, example, made)
        group = alone_in_a_group() if option == "distributed" else nullcontext()
        with warnings.catch_warnings(), group:
            warnings.simplefilter("ignore", hessinit.ConvergenceWarning)
            warnings.simplefilter("ignore", hessinit.EdgeOfStabilityWarning)
            result = run_verb(call, given)
        assert result is not None


@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_option_is_refused_as_python_does(call: str) -> None:
    with pytest.raises(TypeError, match="'?unknown('|= is no option)") as refusal:
        run_verb(call, {**arguments(call, "unknown", None, untouched), "unknown": True})
    assert not names_internals(str(refusal.value))


WAYS_OUT = re.compile(r"must|choose|pass|leave|give|build|scale|exchange|name|takes|are \d", re.IGNORECASE)
# What a message calls an option, where that is not its name.
CALLED = {"activation": ["activation"], "batch": ["batch", "inputs"], "data": ["data", "inputs"]}


@pytest.mark.parametrize(("call", "option"), [case for case in CASES if case not in TAKES_ANYTHING])
def test_what_is_wrong_is_refused_before_any_work(call: str, option: str) -> None:
    faults = []
    strange = {"executor": Strange(), "workers": None} if option == "executor" else Strange()
    for example in [*(examples(WRONG, call, option) or ()), strange]:
        given = arguments(call, option, example, untouched)
        try:
            run_verb(call, given)
            message = "it was accepted"
        except hessinit.ProblemError as refusal:
            message = str(refusal)
            named = any(word in message for word in CALLED.get(option, [option])) and WAYS_OUT.search(message)
            told = named and states(given[option], message) and not names_internals(message)
            message = "" if told else message
        except Exception as failure:
            message = repr(failure)
        faults += [f"{given[option]!r}: {message}"] if message else []
    assert not faults
    assert not os.listdir()  # no file was begun


def states(value: Any, message: str) -> bool:
    """Whether the message has the value or its type; of tensors and the like it says other things."""
    simple = isinstance(value, str | int | float | Strange | None)
    return not simple or repr(value)[:60] in message or type(value).__name__ in message


def names_internals(message: str) -> bool:
    return bool(internal_names() & set(re.findall(r"\w+", message)))


@cache
def internal_names() -> set[str]:
    """What is defined in the package under a name that no user knows and that is no plain word."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "hessinit"]
    defined = {
        name
        for module in modules
        for name, one in vars(module).items()
        if (inspect.isfunction(one) or inspect.isclass(one)) and one.__module__.startswith("hessinit.")
    }
    options = {option for _, option in CASES}
    return {
        name for name in defined - {*hessinit.__all__} - options if not name.isalpha() or not name.islower()
    }


SETTINGS_OF_OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("adam", {"momentum": 0.5}),
    *(("momentum", {"momentum": value}) for value in (torch.ones(2), 1.0)),
    *(("adam", {"betas": betas}) for betas in ((0.9, 1.5), (0.9,), 0.9, ("a", "b"))),
    *(("adam", {"eps": value}) for value in NUMBER),
    *(("sgd", {"weight_decay": value}) for value in (*NUMBER, torch.ones(2), [])),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS_OF_OPTIMIZERS, ids=str)
def test_wrong_settings_of_an_optimizer_are_refused_before_any_work(
    name: str, settings: dict[str, Any]
) -> None:
    training = hessinit.Training(name, settings=settings)
    given = arguments("advise", "optimizer", training, untouched)
    with pytest.raises(hessinit.ProblemError, match="settings|momentum|betas|eps|weight_decay"):
        run_verb("advise", given)
