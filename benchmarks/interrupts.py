"""Does Ctrl-C at any moment of any verb leave everything as it was? Real signals, from another process.

python benchmarks/interrupts.py                 # 3,000 signals, about ten minutes on one core
python benchmarks/interrupts.py --count 300 --budget 60 --results /tmp/some.jsonl

Every verb is interrupted at random moments of its work. Afterwards the model, its Parameters, buffers,
gradients, modules, hooks and modes, torch's switches, function modes and levels of torch.func, the random
states and the handler of the signal are compared with what they were. A verb that writes has to leave the old
weights, or all of the new ones with its result in hand. A line of the record is a block of signals of one
verb, with a seed of its own; a run that was stopped, or that used up its `--budget`, continues where the
record ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import numpy  # noqa: E402
import torch  # noqa: E402
from record import run_facts  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import hessinit  # noqa: E402
import hessinit_paper  # noqa: E402

RECORD = HERE / "results" / "interrupts.jsonl"
BLOCK = 25  # signals in one line of the record
# It waits for the moments that it is told, on the clock that both processes read.
SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    time.sleep(max(0.0, float(line) - time.perf_counter()))
    os.kill(os.getppid(), signal.SIGINT)
"""
LOSS = nn.CrossEntropyLoss()
OPTIONS: dict[str, Any] = {"dropout": "freeze"}
RUNS: dict[str, Any] = {"learning_rates": [0.1], "seeds": 1, "batch_size": 8}
RUNS["settings"] = hessinit.RunSettings(workers=1, progress=False)


class Network(nn.Module):
    """Has what a forward may move: statistics, a dropout, hooks, a counter, a cache; and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.cache: dict[str, Tensor] = {"hidden": torch.zeros(1)}

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.relu(self.norm(self.first(inputs)))
        self.cache["hidden"] = hidden
        return self.last(torch.tanh(self.second(self.drop(hidden))) + 0.1 * self.frozen(hidden))


def build() -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Network()
        model(torch.randn(8, 6)).sum().backward()
    model.norm.register_forward_hook(lambda module, given, output: output + 0)
    return model


def data() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(24, 6, generator=source), torch.arange(24) % 3


BATCH = data()
BATCHES = [(BATCH[0][start : start + 6], BATCH[1][start : start + 6]) for start in range(0, 24, 6)]
LOADER = DataLoader(TensorDataset(*BATCH), batch_size=6, shuffle=True)


class Labelled(nn.Module):
    """As models of Transformers: with a loss of its own, which `logits_problem` compares with its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.model(inputs)
        return type("Output", (), {"logits": logits, "loss": LOSS(logits, labels)})()


def track(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    facts: dict[str, Any] = {"optimizer": optimizer, "path": None, "log_to": None}
    facts["settings"] = hessinit.TrackSettings(warn=False)
    with hessinit.track(model, LOSS, BATCH, **facts) as tracker:
        return tracker.measure()


def sound(model: nn.Module) -> Any:
    try:
        return hessinit.assert_sound(model, LOSS, BATCH, lr=1e-3, optimizer="adamw")
    except AssertionError as verdict:
        return verdict


def undo(model: nn.Module) -> Any:
    done = hessinit.initialize_(
        model, LOSS, BATCH, lr=0.1, fit=hessinit.Fit(scaling="all", max_measurements=1)
    )
    done.undo()
    return done


VERBS: dict[str, Callable[[nn.Module], Any]] = {
    "measure": lambda model: hessinit.measure(model, LOSS, BATCH),
    "measure both": lambda model: hessinit.measure(model, LOSS, BATCHES, curvature="both"),
    "measure more": lambda model: hessinit.measure(
        model.eval(), LOSS, BATCH, details=["top-2", "trace", "frobenius", "jacobians", "diagnostics"]
    ),
    "measure plan": lambda model: hessinit.plan(model, LOSS, BATCH),
    "hessian": lambda model: hessinit.hessian(model, LOSS, BATCH).to_dense(),
    "gauss_newton": lambda model: hessinit.gauss_newton(model, LOSS, BATCH).to_dense(),
    "jacobian": lambda model: hessinit.jacobian(model, LOSS, BATCH).T.to_dense(),
    "quadratic_form": lambda model: hessinit_paper.quadratic_form(
        hessinit.Problem(model, LOSS, BATCH), draws=2
    ),
    "advise": lambda model: hessinit.advise(model, LOSS, BATCH, optimizer="adamw"),
    "assert_sound": sound,
    "track": track,
    "initialize_": lambda model: hessinit.initialize_(model, LOSS, BATCH, lr=0.1),
    "initialize_ dry_run": lambda model: hessinit.initialize_(model, LOSS, BATCH, lr=0.1, dry_run=True),
    "initialize_ auto": lambda model: hessinit.initialize_(model, LOSS, BATCH, lr="auto", optimizer="adamw"),
    "initialize_ race": lambda model: hessinit.initialize_(
        model, LOSS, BATCH, lr=0.1, data=LOADER, progress=False, fit=hessinit.Fit(trial_steps=6)
    ),
    "initialize_ undo": undo,
    "apply_scheme_": lambda model: hessinit.apply_scheme_(model, "he", sample=BATCH[0]),
    "apply_scheme_ lsuv": lambda model: hessinit.apply_scheme_(model, "lsuv", sample=BATCH[0]),
    "logits_problem": lambda model: hessinit.logits_problem(
        Labelled(model), {"inputs": BATCH[0], "labels": BATCH[1]}, task="classification"
    ),
    "gain": lambda model: hessinit.gain(lambda x: x * torch.sigmoid(x)),
    "compare": lambda model: hessinit.compare(build, LOSS, BATCH, schemes=["he"], steps=10, **RUNS),
    "sweep": lambda model: hessinit.sweep(
        build, LOSS, BATCH, stds=[0.1], steps=10, seeds=1, batch_size=8, settings=RUNS["settings"]
    ),
}
DRAWS = ("apply_scheme_", "apply_scheme_ lsuv")  # from the caller's generator, as it says
# A verb that writes while the interrupt comes must have its result in hand; `undo` is written, then undone.
EITHER = ("initialize_ undo",)


def bits(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.detach().contiguous().numpy().tobytes()


def weights_of(model: nn.Module) -> list[bytes]:
    return [bits(weight) for weight in model.parameters()]


def picture(model: nn.Module, verb: str) -> dict[str, Any]:
    """All that has to stay, but the values of the weights."""
    stack = torch.overrides._get_current_function_mode_stack()
    dispatch = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    cuda = torch.backends.cuda
    found: dict[str, Any] = {
        "grad mode, inference mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast, anomaly": (torch.is_autocast_enabled("cpu"), torch.is_anomaly_enabled()),
        "function modes": [type(mode).__name__ for mode in stack],
        "dispatch modes": [type(mode).__name__ for mode in dispatch],
        "levels of torch.func": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "attention": (cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "precision, dtype": (torch.get_float32_matmul_precision(), torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "forwards": (nn.Module.__call__, nn.Linear.forward, torch.nn.functional.linear),
        "hooks of all modules": [len(table) for table in tables_of_all_modules()],
        "handler": signal.getsignal(signal.SIGINT),
        "warnings": list(warnings.filters),
    }
    if verb not in DRAWS:
        of_numpy = numpy.random.get_state()  # noqa: NPY002 - the global one is at stake
        found["random states"] = (bits(torch.get_rng_state()), random.getstate(), repr(of_numpy))
    for name, weight in model.named_parameters():
        found[f"parameter {name}"] = (id(weight), type(weight), weight.data_ptr(), weight.requires_grad)
        found[f"gradient of {name}"] = (id(weight.grad), bits(weight.grad))
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = (id(buffer), bits(buffer))
    for name, module in model.named_modules():
        found[f"module {name}"] = [
            (key, list(value.items()) if key.endswith("hooks") else id(value))
            for key, value in sorted(vars(module).items())
        ]
    found["cache"] = {key: (id(value), bits(value)) for key, value in model.cache.items()}
    return found


def tables_of_all_modules() -> list[Any]:
    of_all = vars(torch.nn.modules.module)
    return [table for name, table in of_all.items() if name.startswith("_global") and isinstance(table, dict)]


class Signals:
    """Sends a SIGINT to this process at a moment of `time.perf_counter`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, text=True)
        self._pipe: Any = self._process.stdin

    def send_at(self, moment: float) -> None:
        self._pipe.write(f"{moment!r}\n")
        self._pipe.flush()

    def close(self) -> None:
        self._pipe.close()
        self._process.wait()


def interrupt(name: str, longest: float, source: random.Random, signals: Signals, new: list[bytes]) -> Any:
    """One signal at a random moment: whether it came during the verb, how long it waited, what is broken."""
    model, run = build(), VERBS[name]
    if name == "measure more":
        model.eval()
    torch.manual_seed(0)
    old, before, result, where = weights_of(model), picture(model, name), None, ""
    moment = time.perf_counter() + source.uniform(0.0, longest)
    try:
        signals.send_at(moment)
        result = run(model)
        time.sleep(60)  # it came too late
    except KeyboardInterrupt as stop:
        waited = time.perf_counter() - moment
        frames = [one for one in traceback.extract_tb(stop.__traceback__) if "/hessinit/" in one.filename]
        where = " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in frames[:-4:-1])
    after = picture(model, name)
    broken = [key for key in before | after if before.get(key) != after.get(key)]
    allowed = [old, new] if name in EITHER else [old if result is None else new]
    if weights_of(model) not in allowed:
        broken.append("weights")
    return result is None, waited, [f"{key} ({where})" for key in broken]


def run_block(name: str, seed: int, signals: Signals) -> dict[str, Any]:
    """As many signals as a line of the record holds that came during the verb."""
    source, model = random.Random(f"{name} {seed}"), build()
    VERBS[name](build())  # what is done once, in the first call
    torch.manual_seed(0)
    started = time.perf_counter()
    VERBS[name](model)
    seconds = time.perf_counter() - started
    new, during, late, waits, broken = weights_of(model), 0, 0, list[float](), list[str]()
    while during < BLOCK:
        was_during, waited, wrong = interrupt(name, 1.02 * seconds, source, signals, new)
        during, late, broken = during + was_during, late + (not was_during), broken + wrong
        waits += [waited] if was_during else []
    return {
        "verb": name, "seed": seed, "signals": during, "after the end": late, "broken": broken,
        "seconds": round(seconds, 4), "median wait": round(statistics.median(waits), 5),
        "longest wait": round(max(waits), 5),
    }  # fmt: skip


def summarize(records: list[dict[str, Any]]) -> str:
    lines = ["verb                    signals  after its end  broken  seconds  longest wait"]
    for name in VERBS:
        own = [one for one in records if one["verb"] == name]
        if own:
            counts = [sum(one[key] for one in own) for key in ("signals", "after the end")]
            counts.append(sum(len(one["broken"]) for one in own))
            times = statistics.median(one["seconds"] for one in own), max(one["longest wait"] for one in own)
            lines.append("{:22} {:8} {:14} {:7} {:8.3f} {:13.3f}".format(name, *counts, *times))
    total = sum(one["signals"] for one in records)
    broken = [f"{one['verb']}: {text}" for one in records for text in one["broken"]]
    return "\n".join([*lines, f"{total} signals, {len(broken)} broken promises", *broken])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=3000, help="signals (default: 3000)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds; the next run continues")
    parser.add_argument("--results", type=Path, default=RECORD, help="the record, which is continued")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    records = []
    if arguments.results.exists():
        records = [json.loads(line) for line in arguments.results.read_text(encoding="utf-8").splitlines()]
    known = {(one["verb"], one["seed"]) for one in records}
    started, signals = time.perf_counter(), Signals()
    facts = run_facts("interrupts.py", count=arguments.count)
    blocks = -(-arguments.count // (BLOCK * len(VERBS)))
    planned = [(name, seed) for seed in range(blocks) for name in VERBS if (name, seed) not in known]
    for name, seed in planned:
        if time.perf_counter() - started > arguments.budget:
            break
        records.append(run_block(name, seed, signals) | facts)
        with arguments.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(records[-1], ensure_ascii=False) + "\n")
    signals.close()
    print(summarize(records))


if __name__ == "__main__":
    main()
