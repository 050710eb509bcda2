"""Ctrl-C at any moment of any verb: everything is as it was, or the result is there. With real signals."""

from __future__ import annotations

import itertools
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hessinit
import hessinit_paper
from calls import call, measure
from conftest import read_global_torch_state
from tiny import LOSS, SHORT_RUNS, batch, network, raise_from
from zoo.snapshot import differences, snapshot

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="sends signals"),
    pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning"),
]

SIGNALS = 15  # for each of the 20 verbs
SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    time.sleep(max(0.0, float(line) - time.perf_counter()))
    os.kill(os.getppid(), signal.SIGINT)
"""
BATCH = batch(12)
NAMED = {"inputs": BATCH[0], "labels": BATCH[1]}
EACH = DataLoader(TensorDataset(*BATCH), batch_size=4)
FEW = {**SHORT_RUNS, "batch_size": 4}
FREEZE: dict[str, Any] = {"dropout": "freeze"}


def build() -> nn.Module:
    """With what a forward and a training may move: statistics, masks, gradients and hooks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first, last = nn.Linear(4, 5), nn.Linear(5, 3)
        model = nn.Sequential(first, nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.1), last)
        model(BATCH[0]).sum().backward()
    model[1].register_forward_hook(lambda module, given, output: output + 0)
    return model


class Labelled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.inner(inputs)
        return type("Output", (), {"logits": logits, "loss": LOSS(logits, labels)})()


def on_data(model: nn.Module) -> Any:
    return hessinit.initialize_(
        model, LOSS, BATCH, lr=0.1, data=EACH, progress=False, fit=hessinit.Fit(trial_steps=3)
    )


def track(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    quiet: dict[str, Any] = {"path": None, "log_to": None}
    quiet["settings"] = hessinit.TrackSettings(warn=False)
    return hessinit.track(model, LOSS, BATCH, optimizer=optimizer, **quiet).measure()


def sound(model: nn.Module) -> Any:
    try:
        return call(hessinit.assert_sound, model, LOSS, BATCH, lr=1e-3, optimizer="adamw", **FREEZE)
    except AssertionError as verdict:
        return verdict


def products(model: nn.Module) -> Any:
    operators = (hessinit.hessian, hessinit.gauss_newton, hessinit.jacobian)
    return [call(make, model, LOSS, BATCH, **FREEZE).to_dense() for make in operators]


VERBS: dict[str, Callable[[nn.Module], Any]] = {
    "measure": lambda model: measure(model, LOSS, BATCH, **FREEZE),
    "both": lambda model: measure(model, LOSS, EACH, curvature="both", **FREEZE),
    "bounds": lambda model: hessinit.measure(model.eval(), LOSS, BATCH, details="jacobians"),
    "diagnostics": lambda model: measure(model, LOSS, BATCH, **FREEZE, details="diagnostics"),
    "trace": lambda model: measure(model, LOSS, BATCH, **FREEZE, details=["top-2", "trace"]),
    "operators": products,
    "quadratic_form": lambda model: hessinit_paper.quadratic_form(hessinit.Problem(model, LOSS, BATCH)),
    "advise": lambda model: hessinit.advise(model, LOSS, BATCH, optimizer="adamw"),
    "assert_sound": sound,
    "track": track,
    "initialize_": lambda model: hessinit.initialize_(model, LOSS, BATCH, lr=0.1),
    "dry_run": lambda model: hessinit.initialize_(model, LOSS, BATCH, lr=0.1, dry_run=True),
    "gains": lambda model: hessinit.initialize_(
        model.eval(), LOSS, BATCH, lr=0.1, fit=hessinit.Fit(scaling="all")
    ),
    "on data": on_data,
    "he": lambda model: hessinit.apply_scheme_(model, "he", sample=BATCH[0]),
    "lsuv": lambda model: hessinit.apply_scheme_(model, "lsuv", sample=BATCH[0]),
    "logits_problem": lambda model: hessinit.logits_problem(Labelled(model), NAMED),
    "gain": lambda model: hessinit.gain(lambda x: x * torch.sigmoid(x)),
    "compare": lambda _: hessinit.compare(build, LOSS, BATCH, schemes=["he"], learning_rates=[0.1], **FEW),
    "sweep": lambda model: hessinit.sweep(build, LOSS, BATCH, stds=[0.1], **FEW),
}


@pytest.fixture(scope="module")
def send_at() -> Iterator[Callable[[float], None]]:
    """Another process sends a SIGINT to this one at a moment of `time.perf_counter`."""
    process = subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, text=True)
    pipe: Any = process.stdin
    yield lambda moment: print(repr(moment), file=pipe, flush=True)
    pipe.close()
    process.wait()


def values(model: nn.Module) -> list[Any]:
    return [weight.tolist() for weight in model.parameters()]


def picture(model: nn.Module, writes: bool) -> dict[str, Any]:
    """All that must stay; the values of the weights are compared beside it where the verb writes."""
    found = {**snapshot(model, LOSS, BATCH), **read_global_torch_state()}
    if writes:
        names = [f"state of {name}" for name, _ in model.named_parameters()]
        found = {name: value for name, value in found.items() if name not in (*names, "torch random state")}
    # The stacks of function modes and of torch.func have no public names.
    found["function modes"] = list(torch.overrides._get_current_function_mode_stack())
    found["level of torch.func"] = torch._C._functorch.maybe_current_level()
    found["handler"] = signal.getsignal(signal.SIGINT)
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupt_at_any_moment_leaves_all_as_it_was_or_the_result_in_hand(
    verb: str, send_at: Callable[[float], None]
) -> None:
    run, source = VERBS[verb], random.Random(verb)
    writes = verb in ("initialize_", "gains", "on data", "he", "lsuv")
    run(build())  # what is done once, in the first call
    torch.manual_seed(2)
    model, started = build(), time.perf_counter()
    run(model)
    seconds, new = time.perf_counter() - started, values(model)
    for number in range(SIGNALS):
        model, result = build(), None
        if verb in ("bounds", "gains"):
            model.eval()
        torch.manual_seed(2)
        before, old = picture(model, writes), values(model)
        try:
            send_at(time.perf_counter() + source.uniform(0.0, seconds))
            result = run(model)
            time.sleep(30)
            pytest.fail("no signal came, also not after the end")
        except KeyboardInterrupt:
            pass
        assert differences(before, picture(model, writes)) == [], f"signal {number}"
        assert values(model) == (new if writes and result is not None else old), f"signal {number}"


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_interrupt_of_the_last_forward_of_initialize_brings_the_old_weights_back(dry_run: bool) -> None:
    def calling(count: Callable[[], Any]) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
        return lambda model, inputs: (count(), model(inputs))[1]

    def initialize(model: nn.Module, count: Callable[[], Any]) -> None:
        hessinit.initialize_(
            hessinit.Problem(model, LOSS, BATCH, forward=calling(count)), lr=0.1, dry_run=dry_run
        )

    calls, interrupted = itertools.count().__next__, 0
    initialize(build(), calls)
    # The last forwards, after the trials, are those of the gradient that is timed: one or two.
    made = calls()
    for number in range(made - 3, made + 1):
        model = build()
        old = values(model)
        try:
            initialize(model, raise_from(number, KeyboardInterrupt()))
        except KeyboardInterrupt:
            interrupted += 1
            assert values(model) == old
    assert interrupted >= 2


def test_a_warning_that_is_an_error_brings_the_old_weights_back() -> None:
    model = network()
    old = values(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hessinit.ConvergenceWarning)
        with pytest.raises(hessinit.ConvergenceWarning, match="2 measurements were not enough"):
            hessinit.initialize_(
                model, LOSS, BATCH, target=1e6, fit=hessinit.Fit(scaling="last", max_measurements=2)
            )
    assert values(model) == old


@pytest.mark.parametrize("place", ["forward", "loss", "data", "build"])
def test_code_that_waits_is_interrupted_at_once(place: str) -> None:
    first, model = [place], build()
    before = picture(model, False)

    def wait(here: str) -> None:
        if here in first:
            first.clear()
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(30)

    def forward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        wait("forward")
        return model(inputs)

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wait("loss")
        return LOSS(output, labels)

    def batches() -> Iterator[Any]:
        wait("data")
        yield BATCH

    def make() -> nn.Module:
        wait("build")
        return build()

    def run() -> None:
        if place == "build":
            hessinit.compare(make, LOSS, BATCH, **FEW)
        measure(model, loss, batches(), forward=forward, **FREEZE)

    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run()
    assert time.perf_counter() - started < 15
    assert differences(before, picture(model, False)) == []


def test_a_handler_of_the_user_s_own_is_called_and_kept() -> None:
    calls, heard = itertools.count().__next__, queue.SimpleQueue[int]()  # neither is put back

    def listen(number: int, frame: object) -> None:
        heard.put(number)

    def forward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        if calls() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return model(inputs)

    before = signal.signal(signal.SIGINT, listen)
    try:
        report = measure(build(), LOSS, BATCH, forward=forward, **FREEZE)
        assert signal.getsignal(signal.SIGINT) is listen
    finally:
        signal.signal(signal.SIGINT, before)
    assert (heard.get_nowait(), heard.empty()) == (signal.SIGINT, True)
    assert report.network.norm > 0


def test_a_timeout_by_an_alarm_leaves_all_as_it_was() -> None:
    class Expired(BaseException):
        pass

    def expire(number: int, frame: object) -> None:
        raise Expired

    def measure_for(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            measure(model, LOSS, BATCH, **FREEZE)

    measure(build(), LOSS, BATCH, **FREEZE)
    before, model = signal.signal(signal.SIGALRM, expire), build()
    kept, source = picture(model, False), random.Random(0)
    try:
        for _ in range(20):
            with pytest.raises(Expired):
                measure_for(source.uniform(1e-4, 1e-2))
            assert differences(kept, picture(model, False)) == []
            assert signal.getsignal(signal.SIGALRM) is expire
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_another_thread_measures_without_touching_the_handlers() -> None:
    found: list[Any] = []
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        found.append(measure(build(), LOSS, BATCH, **FREEZE).network.norm)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] == measure(build(), LOSS, BATCH, **FREEZE).network.norm
    assert signal.getsignal(signal.SIGINT) is before
