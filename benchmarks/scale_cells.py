"""One cell of `scale.py`: hessinit or a peer on one problem, in gradients and in training steps' memory."""

from __future__ import annotations

import importlib
import inspect
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from contestants import training_step
from peers import curvlinops, eigenthings, pyhessian
from problems import Problem
from timing import finish_kernels, peak_memory, time_gradients, time_interleaved
from torch import Tensor
from torch.func import replace_all_batch_norm_modules_
from torch.nn.attention import SDPBackend, sdpa_kernel
from truth import TruthBook

import hessinit

# Each peer: its contestant, where its product with the matrix is, and whether that matrix is Gauss-Newton.
PEERS: dict[str, tuple[Callable, str, str, bool]] = {
    "hessian-eigenthings": (
        eigenthings, "hessian_eigenthings.operators.ggn", "GGNOperator._matvec_one_batch", True,
    ),
    "curvlinops + eigsh": (curvlinops, "curvlinops.ggn", "GGNLinearOperator._matmat_batch", True),
    "PyHessian": (pyhessian, "pyhessian.hessian", "hessian_vector_product", False),
}  # fmt: skip
WARM_UP_PRODUCTS = 2
CAPPED_LAYERS = 2  # after so many a peer's race ends
TRUTH_STEPS = 80
TRUTH_RESIDUAL = 1e-4  # relative; an eigenvalue's error is about its square over the gap
TRUTHS_ON_FILE = Path(__file__).parent / "results" / "curvature_truth.json"
Cell = dict[str, Any]


class CappedError(Exception):
    """A peer's time, or its warm-up, is over."""


# --- The yardsticks -----------------------------------------------------------------------------------------


def measure_step(problem: Problem, device: str) -> float:
    """Peak memory of one training step (forward, backward, SGD without momentum) above its start, in MiB."""
    run = training_step(problem, "gauss-newton")
    list(run())  # what is allocated once
    problem.model.zero_grad(set_to_none=True)
    with peak_memory(device) as memory:
        list(run())
    problem.model.zero_grad(set_to_none=True)
    return memory.mebibytes


def without_tf32() -> AbstractContextManager[Any]:
    """Plain float32, as hessinit computes: by default convolutions on a GPU use TF32."""
    if not torch.cuda.is_available():
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


def plain_gradients(problem: Problem, device: str) -> list[float]:
    """Gradients without TF32; none on a CPU, which has no TF32."""
    if device == "cpu":
        return []
    with without_tf32():
        time_gradients(problem)
        return time_gradients(problem)


def describe(problem: Problem) -> Cell:
    return {
        "layers": len(problem.weights),
        "parameters": sum(one.numel() for one in problem.model.parameters()),
    }


# --- hessinit -----------------------------------------------------------------------------------------------


def hessinit_cell(
    problem: Problem, device: str, tolerance: float, network: bool = False, progress: bool = False,
    precision: str = "auto",
) -> Cell:  # fmt: skip
    """Cost and memory of `measure`; gradients before, between and after the calls."""
    reports: list[hessinit.CurvatureReport] = []
    options = {"progress": show_progress()} if progress and accepts_progress() else {}

    def call(layers: list[str] | None, **more: Any) -> None:
        measured = hessinit.Problem(
            problem.model, problem.loss, (problem.inputs, problem.targets), layers=layers, precision=precision
        )
        reports.append(hessinit.measure(measured, **more))

    def whole() -> None:
        wanted = list(problem.only) or None
        call(wanted, tolerance=tolerance, network=network, **options)

    names = list(problem.weights)
    call(
        sorted({names[0], names[-1]}), tolerance=0.1, network=False
    )  # loads kernels and what is imported late
    time_gradients(problem)
    gradients = time_gradients(problem)
    with peak_memory(device) as memory:
        finish_kernels()
        start = time.perf_counter()
        whole()
        finish_kernels()
        first = time.perf_counter() - start
    seconds, more = time_interleaved(problem, whole, first)
    gradients += more
    seconds = seconds[1:] or seconds  # memory was returned to the system before the first
    report = reports[-1]
    rows = [*report.layers, *([report.network] if network else [])]
    step = measure_step(problem, device)
    return {
        "status": "ok",
        **describe(problem),
        **costs(seconds, gradients, plain_gradients(problem, device)),
        "peak_mib": round(memory.mebibytes, 1),
        "step_mib": round(step, 1),
        "products": sum(row.products for row in rows),
        "own_gradients": report.gradients,
        "engine": report.engine,
        "engine_reason": report.engine_reason,
        "engines": sorted({row.engine for row in rows}),
        "converged": sum(row.converged for row in rows),
        "norms": {row.name: row.norm for row in rows},
        "stated_errors": {row.name: row.error for row in rows},
    }


def costs(seconds: list[float], gradients: list[float], plain: list[float]) -> Cell:
    """Medians and raw values. The unit is the gradient under torch's own settings (TF32 in convolutions)."""
    found = {
        "seconds": statistics.median(seconds),
        "gradient_seconds": statistics.median(gradients),
        "gradients": statistics.median(seconds) / statistics.median(gradients),
        "all_seconds": [round(one, 6) for one in seconds],
        "all_gradient_seconds": [round(one, 6) for one in gradients],
    }
    if plain:
        found["gradient_seconds_without_tf32"] = statistics.median(plain)
    return found


def accepts_progress() -> bool:
    return "progress" in inspect.signature(hessinit.measure).parameters


def show_progress() -> Callable[..., None]:
    """A callback that prints what it is given, at most once a second."""
    last = [0.0]

    def show(*values: Any, **named: Any) -> None:
        if time.perf_counter() - last[0] > 1:
            last[0] = time.perf_counter()
            print("   ", *values, *named.values(), file=sys.stderr, flush=True)

    return show


# --- Peers --------------------------------------------------------------------------------------------------


class Watch:
    """Counts a peer's products, and stops it between two of them."""

    def __init__(self) -> None:
        self.products, self.most, self.deadline = 0, WARM_UP_PRODUCTS, float("inf")

    def restart(self, cap: float) -> None:
        self.products, self.most, self.deadline = 0, sys.maxsize, time.perf_counter() + cap

    def wrap(self, product: Callable) -> Callable:
        def counted(*arguments: Any, **named: Any) -> Any:
            if self.products >= self.most or time.perf_counter() > self.deadline:
                raise CappedError
            self.products += 1
            return product(*arguments, **named)

        return counted


def find_product(module: str, path: str) -> tuple[Any, str]:
    """The object that holds the function, and the function's name."""
    importlib.import_module(module)
    owner: Any = sys.modules[module]  # not by attribute: pyhessian.hessian is also a class
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def peer_cell(problem: Problem, device: str, peer: str, cap: float) -> Cell:
    """The peer on each layer, one after the other, to tolerance 1e-3, without TF32.

    BatchNorm's running statistics are taken off, as PyTorch's documents say for `torch.func`, without which
    two of the peers fail; in train mode they do not enter the output.
    Capped: the layer took longer than `cap`, so that its seconds are a lower bound; after two it ends.
    """
    contestant, module, path, gauss_newton = PEERS[peer]
    cell: Cell = {"status": "ok", "gauss_newton": gauss_newton, "rows": {}, **describe(problem)}
    try:
        owner, name = find_product(module, path)
    except ImportError as error:
        return {"status": "missing", "message": str(error)}
    replace_all_batch_norm_modules_(problem.model)
    cell["step_mib"] = round(measure_step(problem, device), 1)
    time_gradients(problem)
    times = time_gradients(problem)
    watch, capped = Watch(), 0
    own = mock.patch.object(owner, name, watch.wrap(getattr(owner, name)))
    with own, sdpa_kernel(SDPBackend.MATH), without_tf32(), peak_memory(device) as memory:
        for number, layer in enumerate(problem.weights):
            run = contestant(replace(problem, only=(layer,)), "gauss-newton")
            try:
                if number == 0:
                    warm_up(run)
                watch.restart(cap)
                start = time.perf_counter()
                row = {"norm": dict(run())[layer]}
            except CappedError:
                capped, row = capped + 1, {"capped": True}
                cell["status"] = "capped"
            except Exception as error:  # a peer's failure is a result
                cell |= {"status": "error", "message": f"{layer}: {short(error)}"}
                break
            finish_kernels()
            row |= {"seconds": time.perf_counter() - start, "products": watch.products}
            cell["rows"][layer] = row
            if capped == CAPPED_LAYERS:
                break
    if cell["status"] != "error":
        times += time_gradients(problem)
    cell |= {"peak_mib": round(memory.mebibytes, 1), "gradient_seconds": statistics.median(times)}
    return cell


def warm_up(run: Callable) -> None:
    with suppress(CappedError):
        list(run())


def short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# --- Truth --------------------------------------------------------------------------------------------------


def truth_cell(problem: Problem, rough: bool) -> Cell:
    """The raced layers' Gauss-Newton norms without hessinit: from the file of truths, or by Lanczos.

    In float64, or in float32 where that would take minutes; double-backward products, full
    reorthogonalization, until the residual is 1e-4 of the eigenvalue.
    """
    on_file = problem.name.endswith("-relu")  # those of the race of `curvature_cost.py`
    known = TruthBook(TRUTHS_ON_FILE).look_up(problem, "gauss-newton") if on_file else None
    if known:
        return {"status": "ok", "route": "results/curvature_truth.json, float64", "norms": known}
    start = time.perf_counter()
    precise = problem if rough else problem.in_double()
    norms, residuals = {}, {}
    with sdpa_kernel(SDPBackend.MATH), without_tf32():
        for layer in precise.weights:
            product = gauss_newton_product(precise, layer)
            norms[layer], residuals[layer] = lanczos(product, precise.weights[layer])
            del product  # with its graph
    return {
        "status": "ok",
        "route": f"Lanczos, {'float32' if rough else 'float64'}, without hessinit",
        "norms": norms,
        "residual": max(residuals.values()),
        "seconds": time.perf_counter() - start,
    }


def gauss_newton_product(problem: Problem, layer: str) -> Callable[[Tensor], Tensor]:
    """v → Jᵀ H_z J v of one weight. J v is the derivative of Jᵀu by u (double backward)."""
    weight = problem.weights[layer]
    output = problem.model(problem.inputs)
    direction = torch.zeros_like(output, requires_grad=True)
    (transposed,) = torch.autograd.grad(output, weight, direction, create_graph=True)
    cut = output.detach().requires_grad_()
    (slope,) = torch.autograd.grad(problem.loss(cut, problem.targets), cut, create_graph=True)

    def product(vector: Tensor) -> Tensor:
        (pushed,) = torch.autograd.grad(transposed, direction, vector.view_as(weight), retain_graph=True)
        (bent,) = torch.autograd.grad(slope, cut, pushed, retain_graph=True)
        return torch.autograd.grad(output, weight, bent, retain_graph=True)[0].flatten()

    return product


def lanczos(product: Callable[[Tensor], Tensor], like: Tensor) -> tuple[float, float]:
    """The largest eigenvalue and its residual, relative."""
    generator = torch.Generator(like.device).manual_seed(1)
    vector = torch.randn(like.numel(), dtype=like.dtype, device=like.device, generator=generator)
    basis, diagonal, beside = [vector / vector.norm()], [], []
    value, residual = 0.0, float("inf")
    for _ in range(min(TRUTH_STEPS, like.numel())):
        image = product(basis[-1])
        diagonal.append(float(basis[-1] @ image))
        for _ in range(2):  # Twice is enough (Parlett, after Kahan).
            for one in basis:
                image = image - (one @ image) * one
        beside.append(float(image.norm()))
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        matrix += torch.diag(torch.tensor(beside[:-1], dtype=torch.float64), 1)
        values, vectors = torch.linalg.eigh(matrix, UPLO="U")
        value, residual = float(values[-1]), float(beside[-1] * vectors[-1, -1].abs() / values[-1])
        if residual < TRUTH_RESIDUAL or beside[-1] == 0:
            break
        basis.append(image / beside[-1])
    return value, residual
