"""`quadratic_form`: gᵀHg of every layer along random directions, the gradient, or given directions."""

from __future__ import annotations

import glob
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hessinit.curvature import derivative_check, layer_uses
from hessinit.curvature.cost import cost_of
from hessinit.curvature.evaluation import Evaluation, evaluate
from hessinit.curvature.probes import ProbeKind, ProbeStream
from hessinit.errors import ProblemError, check_names, choose, did_you_mean
from hessinit.measurement.facts import facts_of, in_running_order, note_unchecked, notes_on
from hessinit.problem.functional import FunctionalProblem, ProblemOptions
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem
from hessinit.problem.validate import Layer, check_model, check_whole, layer_name, unwrap
from hessinit.results.quadratic_forms import QuadraticForm, QuadraticForms

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MANY_WEIGHTS = 4096


@dataclass(frozen=True)
class Directions:
    """Some directions in one weight, (count, *shape), and their true lengths.

    `factors` turn a form along `tensor` into the one along the direction of that length.
    """

    tensor: Tensor
    lengths: Tensor
    factors: Tensor


def _named_layers(model: nn.Module, directions: Mapping[Any, Any]) -> list[str]:
    """Globs for the layers that the keys name, which fit nothing else."""
    parameters = [name for name, _ in unwrap(model).named_parameters(remove_duplicate=False)]
    names = [*map(layer_name, parameters), *parameters]
    unknown = [key for key in directions if key not in names]
    if unknown or not directions:
        close = did_you_mean(str(unknown[0]), names) if unknown else ""
        raise ProblemError(
            f"directions must name parameters of the model, got {unknown or 'none'}; they are "
            f"{', '.join(parameters[:8])}.{close}"
        )
    return [glob.escape(layer_name(key)) for key in directions]


def _read_given(problem: FunctionalProblem, layer: Layer, directions: Mapping[Any, Any]) -> Tensor:
    """The user's own directions in one layer, checked: (draws, *shape)."""
    names = {layer.name, layer.parameter, *layer.aliases}
    key, *others = [key for key in directions if key in names or layer_name(key) in names]
    if others:
        raise ProblemError(
            f"directions {key!r} and {others[0]!r} are one tied weight; give it once."
        )
    given = directions[key]
    shape = tuple(given.shape) if isinstance(given, Tensor) else ()
    if not isinstance(given, Tensor):
        what = f"is a {type(given).__name__}"
    elif layer.shape not in (shape, shape[1:]) or given.numel() == 0:
        what = f"has shape {shape}"
    elif given.layout is not torch.strided or given.is_complex():
        what = f"has layout {given.layout} and dtype {given.dtype}"
    else:
        tensor = given.detach().to(problem.device, problem.dtype)
        bad = int((~torch.isfinite(tensor)).sum())
        if not bad:
            return tensor.reshape(-1, *layer.shape)
        what = f"holds {bad} NaN or inf among {tensor.numel()} values (in {problem.dtype})"
    several = ", ".join(["draws", *map(str, layer.shape)])
    raise ProblemError(
        f"directions[{key!r}] {what}; it must be a dense, real, finite tensor of shape {layer.shape}, or "
        f"({several}) for several."
    )


def draw_random(
    problem: FunctionalProblem, layer: Layer, draws: int, at_once: int
) -> Iterator[Directions]:
    """Random unit directions, a few at a time; they depend on the seed, the layer's name and the dtype.

    Large weights get random signs: normal numbers would cost more than a gradient, and the mean of
    gᵀHg is trace/size either way. Small ones have too few signs, so they get directions uniform on
    the sphere.
    """
    named = hashlib.blake2b(f"{problem.seed} {layer.name}".encode(), digest_size=8)
    seed = int.from_bytes(named.digest(), "little")
    kind: ProbeKind = "rademacher" if layer.size >= _MANY_WEIGHTS else "gaussian"
    stream = ProbeStream(
        layer.size, seed=seed, kind=kind, dtype=problem.dtype, device=problem.device
    )
    for first in range(0, draws, at_once):
        count = min(at_once, draws - first)
        probes = (
            stream.draw().unsqueeze(0) if count == 1 else stream.draw_block(count).T.contiguous()
        )
        squares = inner_products(probes, probes)
        yield Directions(probes.view(count, *layer.shape), torch.ones_like(squares), 1 / squares)


def normalize(given: Tensor, at_once: int) -> Iterator[Directions]:
    """Directions (count, *shape) of any length, a few at a time; one of length 0 stays 0."""
    for part in given.split(at_once):
        # The squares of a vanished gradient, 1e-25, are 0 in float32: the largest entry is taken
        # out first.
        largest = _as_rows(part).abs().amax(1)
        tensor = part / torch.where(largest > 0, largest, 1).view(-1, *[1] * (part.ndim - 1))
        scales = largest.cpu().double()
        yield Directions(tensor, scales * inner_products(tensor, tensor).sqrt(), scales * scales)


def inner_products(one: Tensor, other: Tensor) -> Tensor:
    """Row by row, which `torch.linalg.vecdot` takes five times as long for: it writes every product down."""
    rows = zip(_as_rows(one), _as_rows(other), strict=True)
    return torch.stack([torch.dot(left, right) for left, right in rows]).cpu().double()


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1)  # not flatten(1): a scalar parameter has no dimension 1


# So many directions at most go through one batched pass.
_MOST_AT_ONCE = 16
_BYTES_AT_ONCE = 2**25


@uninterrupted
def quadratic_form(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    directions: str | Mapping[str, Tensor] = "random",
    draws: int = 1,
    **options: Unpack[ProblemOptions],
) -> QuadraticForms:
    """`gᵀHg` in every layer's own Hessian block, exact and by Theorem 1: `vᵀ H_z v`, `v` the output's change.

    `directions` is "random" (`draws` of them in each layer, of unit length), "gradient" (the loss
    gradient by the layer), or your own: a mapping from layer names to tensors of the weight's
    shape, or (draws, *shape) for several, which then chooses the layers. The other options are
    those of `measure`: layers, forward, dtype, dropout, reduction, check, seed, precision.

    Both numbers are right to rounding. They come from one forward and one backward pass shared by
    all layers, and one more pass for each through the layers behind it: all layers of a five-layer
    MLP take the time of four (batch 128) to eight gradients (batch 32), the check of the
    derivatives another 8 to 16.

    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> along = {"weight": torch.tensor([[3.0, 4.0]])}
    >>> forms = quadratic_form(model, nn.MSELoss(), (inputs, torch.zeros(2, 1)), directions=along)
    >>> round(forms["weight"].exact[0], 9)  # closed form: H = 2/n XᵀX = I
    25.0
    """
    started = time.perf_counter()
    check_names(options, ProblemOptions.__annotations__)
    draws = check_whole("draws", draws, at_least=1)
    check_model(model, options.get("forward"))
    if isinstance(directions, Mapping):
        if options.get("layers") is not None:
            raise ProblemError(
                "layers and the keys of directions both choose layers; leave layers out."
            )
        options["layers"] = _named_layers(model, directions)
    elif not isinstance(directions, str):
        raise ProblemError(
            f"directions is a {type(directions).__name__}; it must be 'random', 'gradient', or a mapping "
            "from layer names to tensors of their weights' shapes."
        )
    else:
        choose("directions", directions, ["random", "gradient"])
    if directions == "gradient" and draws != 1:
        raise ProblemError(
            f"draws={draws} with directions='gradient': there is one loss gradient. Leave draws out, or "
            "choose directions='random'."
        )
    problem = FunctionalProblem(Problem(model, loss, batch, **options))
    with problem.settings():
        given: dict[str, Tensor] = {}
        if isinstance(directions, Mapping):
            given = {
                layer.parameter: _read_given(problem, layer, directions) for layer in problem.layers
            }
            counts = {len(tensor) for tensor in given.values()}
            if len(counts) > 1 or draws not in (1, *counts):
                raise ProblemError(
                    f"draws={draws}, but directions hold {sorted(counts)}; give every layer as many, and "
                    "leave draws out: the tensors say it."
                )
            draws = counts.pop()
        passes = [SharedPass(evaluation) for evaluation in evaluate(problem)]

        def along(layer: Layer) -> Iterator[Directions]:
            at_once = min(one.at_once(layer) for one in passes)
            if directions == "random":
                return draw_random(problem, layer, draws, at_once)
            if directions == "gradient":
                gradients = [
                    one.gradient(layer.parameter) * one.evaluation.weight for one in passes
                ]
                return normalize(sum(gradients[1:], gradients[0]).unsqueeze(0), at_once)
            return normalize(given[layer.parameter], at_once)

        evaluations = [one.evaluation for one in passes]
        layers = tuple(
            _form(passes, layer, along(layer)) for layer in in_running_order(problem, evaluations)
        )
        kind = directions if isinstance(directions, str) else "given"
        notes = (*notes_on(problem, evaluations), *note_unchecked(problem.check))
        passes.clear()  # their graphs
        facts = {
            **facts_of(problem, evaluations),
            **cost_of(problem, evaluations, started),
            "notes": notes,
        }
        return QuadraticForms(layers=layers, directions=kind, draws=draws, **facts)


class SharedPass:
    """One batch's `q(u, w) = J(w)ᵀu` at `u = ∂L/∂z`, for all layers at once.

    It is linear in `u`, so its derivative by `u` along `g` is `v = J g`; its derivative by the
    layer's own weight is `Σ u_c ∇²z_c g`, what the exact Hessian has beyond Gauss-Newton. One pass
    gives both.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        derivative_check.check_loss(evaluation)
        derivative_check.check_gradients(evaluation)
        _, gradient = evaluation.at_output.gradient
        self._leaves = evaluation.problem.leaves
        self._cotangent = gradient.detach().requires_grad_()
        output = evaluation.output
        leaves = list(self._leaves.values())
        found = torch.autograd.grad(
            output, leaves, self._cotangent, create_graph=True, allow_unused=True
        )
        self._adjoint: dict[str, Tensor | None] = dict(zip(self._leaves, found, strict=True))
        made = [use.node._input_metadata[0] for uses in evaluation.uses.values() for use in uses]
        self._bytes_between = sum(
            int(math.prod(one.shape)) * int(one.dtype.itemsize) for one in made
        )

    def gradient(self, parameter: str) -> Tensor:
        found = self._adjoint[parameter]
        return torch.zeros_like(self._leaves[parameter]) if found is None else found.detach()

    def at_once(self, layer: Layer) -> int:
        """How many directions a batched pass may take along without needing much memory."""
        each = layer.size * self._cotangent.element_size() + self._bytes_between
        return max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // each))

    def forms(self, parameter: str, directions: Tensor) -> tuple[Tensor, Tensor]:
        """`vᵀ H_z v` for every direction, and what the exact form has beyond it."""
        zeros = torch.zeros(len(directions), dtype=torch.float64)
        adjoint = self._adjoint[parameter]
        if adjoint is None:
            return zeros, zeros  # the forward does not use it
        changes, bent = _pull_each(adjoint, [self._cotangent, self._leaves[parameter]], directions)
        beyond = zeros if bent is None else inner_products(directions, bent)
        cut, gradient = self.evaluation.at_output.gradient
        if changes is None or not gradient.requires_grad:
            return zeros, beyond  # a loss that is linear in the output
        (curved,) = _pull_each(gradient, [cut], changes)
        # In double: the product of two changes of 1e-22, as vanishing networks have, is 0 in
        # float32.
        return zeros if curved is None else inner_products(
            changes.double(), curved.double()
        ), beyond


def _pull_each(
    output: Tensor, inputs: list[Tensor], cotangents: Tensor
) -> tuple[Tensor | None, ...]:
    """A backward pass for each cotangent, all in one where torch can; None for what the output ignores."""
    batched = layer_uses.batched_grad(output, inputs, cotangents) if len(cotangents) > 1 else None
    if batched is not None:
        return batched
    pulled = [
        torch.autograd.grad(output, inputs, cotangent, retain_graph=True, allow_unused=True)
        for cotangent in cotangents
    ]
    return tuple(
        None if some[0] is None else torch.stack(some) for some in zip(*pulled, strict=True)
    )


def _form(passes: Sequence[SharedPass], layer: Layer, along: Iterator[Directions]) -> QuadraticForm:
    found = []
    for some in along:
        totals = torch.zeros(2, len(some.factors), dtype=torch.float64)
        for one in passes:
            forms = torch.stack(one.forms(layer.parameter, some.tensor))
            totals += one.evaluation.weight * forms * some.factors
        found.append(torch.stack([totals.sum(0), totals[0], some.lengths]))
    named = zip(("exact", "theorem1", "length"), torch.cat(found, dim=1).tolist(), strict=True)
    numbers = {name: tuple(some) for name, some in named}
    return QuadraticForm(name=layer.name, aliases=layer.aliases, shape=layer.shape, **numbers)
