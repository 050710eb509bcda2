"""Models that only training can run: GPT-2 compiled, and a transformer that FSDP2 has sharded.

    python benchmarks/plain_scale.py gpt2      # eager and compiled, five layers at 0.1
    python benchmarks/plain_scale.py fsdp      # one process, then two, all layers; time and memory
    python benchmarks/plain_scale.py show

Each command writes its part of results/plain_scale.json. A cost is in gradients: forward and backward of
the same batch, timed before and after in the same process. Memory is resident memory above that before.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from record import run_facts  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import hessinit  # noqa: E402

RECORD = HERE / "results" / "plain_scale.json"
GPT2_LAYERS = ("h.0.attn.c_attn", "h.3.mlp.c_fc", "h.6.attn.c_proj", "h.9.mlp.c_proj", "h.11.attn.c_attn")
WIDTH, DEPTH, VOCABULARY, LENGTH, EXAMPLES = 448, 8, 512, 32, 4


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def median_seconds(step: Callable[[], object], count: int = 3) -> float:
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure_gpt2() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    # Without dropout: compiled code draws other masks.
    config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config).train()
    tokens = torch.randint(50257, (2, 33))
    batch = (tokens[:, :-1], tokens[:, 1:])
    layers = [f"*{name}" for name in GPT2_LAYERS]

    def forward(called: nn.Module, inputs: Tensor) -> Tensor:
        return called(input_ids=inputs).logits

    def gradient(called: nn.Module) -> None:
        torch.manual_seed(0)
        token_loss(forward(called, batch[0]), batch[1]).backward()
        called.zero_grad(set_to_none=True)

    record: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    compiled = torch.compile(model)
    for name, called, estimator in (
        ("eager, exact", model, "lanczos"),
        ("eager, plain", model, "plain"),
        ("compiled, plain", compiled, "plain"),
    ):
        gradient(called)
        before = median_seconds(lambda called=called: gradient(called))
        problem = hessinit.Problem(called, token_loss, batch, forward=forward, layers=layers)
        compiling = 0.0
        if called is compiled:  # the forward without a graph is compiled, too
            started = time.perf_counter()
            hessinit.measure(
                dataclasses.replace(problem, layers=layers[-1]),
                estimator=estimator,
                tolerance=0.1,
                network=False,
            )
            compiling = time.perf_counter() - started
        started = time.perf_counter()
        report = hessinit.measure(problem, estimator=estimator, tolerance=0.1, network=False)
        seconds = time.perf_counter() - started
        unit = (before + median_seconds(lambda called=called: gradient(called))) / 2
        record[name] = {
            "seconds": seconds,
            "seconds of a first measurement, which compiles": compiling,
            "seconds of a gradient": unit,
            "gradients": seconds / unit,
            "norms": {row.name.rpartition("transformer.")[2]: row.norm for row in report.layers},
            "engine": report.engine,
        }
    exact = record["eager, exact"]["norms"]
    for name in ("eager, plain", "compiled, plain"):
        norms = record[name]["norms"]
        record[name]["largest relative difference"] = max(abs(norms[key] / exact[key] - 1) for key in exact)
    return record


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 7, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
    for parameter in encoder.parameters():  # copies of one layer otherwise
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), encoder, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    )


class Memory:
    """The most resident memory inside the block, above that at its start."""

    def __enter__(self) -> Memory:
        gc.collect()
        self._start = self.most = self._resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.above = self.most - self._start

    @staticmethod
    def _resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, self._resident())


def measure_transformer(path: str) -> None:
    """In one process of one or two; rank 0 writes what it found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    model = transformer()
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (2 * EXAMPLES, LENGTH + 1))
    own = tokens[rank::ranks] if ranks > 1 else tokens[:EXAMPLES]
    whole = (tokens[:, :-1], tokens[:, 1:])
    if ranks > 1:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model[1].layers:  # type: ignore[index, union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    batch = (own[:, :-1], own[:, 1:])

    def gradient() -> None:
        token_loss(model(batch[0]), batch[1]).backward()
        for parameter in model.parameters():
            parameter.grad = None

    gradient()
    with Memory() as training:
        gradient()
    unit = median_seconds(gradient, 5)
    options: dict[str, Any] = {"estimator": "plain"} if ranks == 1 else {"distributed": "batch"}
    started = time.perf_counter()
    with Memory() as measuring:
        report = hessinit.measure(model, token_loss, batch, tolerance=0.1, **options)
    seconds = time.perf_counter() - started
    unit = (unit + median_seconds(gradient, 5)) / 2
    held = [parameter.to_local() if ranks > 1 else parameter for parameter in model.parameters()]
    weights = sum(part.nbytes for part in held if part.ndim > 1)
    products = max(report.network.estimate.products, 1)
    record = {
        "ranks": ranks,
        "examples": EXAMPLES * ranks,
        "seconds": seconds,
        "seconds of a gradient": unit,
        "gradients": seconds / unit,
        "network products": products,
        "MB of a training step": training.above / 1e6,
        "MB of the measurement": measuring.above / 1e6,
        "MB of the Lanczos vectors": (products + 1) * weights / 1e6,
        "layers": len(report.layers),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    if ranks > 1:
        dist.barrier()
    if rank == 0:
        if ranks > 1:
            single = hessinit.measure(
                transformer(), token_loss, whole, tolerance=0.1, estimator="lanczos", distributed="each"
            )
            record["largest relative difference from the exact engine"] = max(
                abs(row.norm / single[row.name].norm - 1) for row in report.layers
            )
        Path(path).write_text(json.dumps(record))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def run_fsdp() -> dict[str, Any]:
    record = {}
    for ranks in (1, 2):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
            command = [sys.executable, *launch, str(Path(__file__)), "rank", file.name]
            subprocess.run(command, check=True)
            record[f"{ranks} processes"] = json.loads(Path(file.name).read_text())
    one, two = record.values()
    record["seconds per example over those of one process"] = two["seconds"] / one["seconds"]
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["gpt2", "fsdp", "rank", "show"])
    parser.add_argument("path", nargs="?")
    arguments = parser.parse_args()
    if arguments.part == "rank":
        measure_transformer(arguments.path)
        return
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if arguments.part != "show":
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        made = measure_gpt2() if arguments.part == "gpt2" else run_fsdp()
        facts = run_facts("plain_scale.py")
        record[arguments.part] = {**facts, "command": f"{facts['command']} {arguments.part}", **made}
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(record, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
