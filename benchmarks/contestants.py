"""Every way to the norm of each layer: hessinit and the peers, each called as its own documentation says.

A contestant is a function of a problem and a curvature. It does its once-per-model preparation untimed and
returns a function whose iteration is timed: it yields (layer, norm), layer by layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from backpack_peers import backpack_hessianfree, backpack_products, backpack_square_root, vivit
from peers import curvlinops, eigenthings, pyhessian
from problems import Problem
from settings import TOLERANCE, Norms, NotOfferedError, Run

Contestant = Callable[[Problem, str], Run]


def hessinit_report(problem: Problem, curvature: str, **options: object) -> Run:
    import hessinit

    def run() -> Norms:
        batch = (problem.inputs, problem.targets)
        report = hessinit.measure(
            problem.model, problem.loss, batch, curvature=curvature, tolerance=TOLERANCE, **options
        )
        yield from ((layer, _value(report[layer].norm)) for layer in problem.weights)

    return run


def hessinit_layers(problem: Problem, curvature: str) -> Run:
    """Without the norm of the whole network, which no peer computes here."""
    import hessinit

    if "network" not in inspect.signature(hessinit.measure).parameters:
        raise NotOfferedError("hessinit.measure has no network= switch")
    return hessinit_report(problem, curvature, network=False)


def _value(number: object) -> float:
    return abs(float(getattr(number, "value", number)))


def training_step(problem: Problem, curvature: str) -> Run:
    """Not a contestant: forward, backward and one SGD step, the yardstick for memory."""
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.0)

    def run() -> Norms:
        optimizer.zero_grad()
        problem.loss(problem.model(problem.inputs), problem.targets).backward()
        optimizer.step()
        yield from ()

    return run


YARDSTICK = "training step"
CONTESTANTS: dict[str, Contestant] = {
    "hessinit": hessinit_report,
    "hessinit, layers only": hessinit_layers,
    "PyHessian": pyhessian,
    "curvlinops + eigsh": curvlinops,
    "hessian-eigenthings": eigenthings,
    "BackPACK square root": backpack_square_root,
    "BackPACK products": backpack_products,
    "BackPACK hessianfree": backpack_hessianfree,
    "ViViT": vivit,
    YARDSTICK: training_step,
}
GAUSS_NEWTON_ONLY = {"BackPACK square root", "ViViT"}
HESSIAN_ONLY = {"PyHessian"}


def contestants_for(curvature: str, piecewise_linear: bool) -> list[str]:
    """Those that offer the curvature.

    In a piecewise linear network a layer's Hessian is its Gauss-Newton block, so PyHessian runs for both.

    >>> "PyHessian" in contestants_for("gauss-newton", piecewise_linear=True)
    True
    """
    unable = GAUSS_NEWTON_ONLY if curvature == "hessian" else set() if piecewise_linear else HESSIAN_ONLY
    return [name for name in CONTESTANTS if name != YARDSTICK and name not in unable]
