"""`quadratic_form`: gᵀHg of every layer, exact and by Theorem 1, along several directions."""

from __future__ import annotations

import glob
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hessinit import Problem, ProblemError
from hessinit.analysis import EvaluatedBatch, EvaluatedProblem, Layer, analyze
from hessinit_paper.checks import check_choice, check_count, offer_nearest
from hessinit_paper.quadratic_forms import QuadraticForm, QuadraticForms


@dataclass(frozen=True)
class Directions:
    """Several directions in one weight, (count, *shape), and their true lengths.

    `factors` turn a form along `tensor` into the one along the direction of that length.
    """

    tensor: Tensor
    lengths: Tensor
    factors: Tensor


def quadratic_form(
    problem: Problem, *, directions: str | Mapping[str, Tensor] = "random", draws: int = 1
) -> QuadraticForms:
    """Return gᵀHg in every layer's own Hessian block, exact and by Theorem 1.

    Theorem 1 is vᵀ H_z v, where v is the first-order change of the output along g. `directions` is
    "random" (`draws` of them in each layer, of unit length), "gradient" (the loss gradient by the
    layer), or a mapping from layer names to tensors of the weight's shape, or (draws, *shape) for
    several, which then chooses the layers.

    Both numbers are right to rounding. They come from one forward and one backward pass shared by
    all layers, and one more pass for each through the layers behind it: all layers of a five-layer
    MLP take the time of four (batch 128) to eight gradients (batch 32), the check of the
    derivatives another 8 to 16.

    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> problem = Problem(model, nn.MSELoss(), (inputs, torch.zeros(2, 1)))
    >>> forms = quadratic_form(problem, directions={"weight": torch.tensor([[3.0, 4.0]])})
    >>> round(forms["weight"].exact[0], 9)  # closed form: H = 2/n XᵀX = I
    25.0
    """
    if not isinstance(problem, Problem):
        raise ProblemError(
            f"problem is a {type(problem).__name__}; pass hessinit.Problem(model, loss, batch)."
        )
    check_count("draws", draws)
    if isinstance(directions, Mapping):
        if problem.layers is not None:
            raise ProblemError(
                "layers and the keys of directions both choose layers; leave layers out."
            )
        problem = replace(problem, layers=_named_layers(problem.model, directions))
    elif isinstance(directions, str):
        check_choice("directions", directions, ["random", "gradient"])
    else:
        raise ProblemError(
            f"directions is a {type(directions).__name__}; it must be 'random', 'gradient', or a "
            "mapping from layer names to tensors of their weights' shapes."
        )
    if directions == "gradient" and draws != 1:
        raise ProblemError(
            f"draws={draws} with directions='gradient': there is one loss gradient. Leave draws "
            "out, or choose directions='random'."
        )
    return analyze(problem, partial(_measure, directions=directions, draws=draws))


def _measure(
    evaluated: EvaluatedProblem, directions: str | Mapping[str, Tensor], draws: int
) -> QuadraticForms:
    kind = "given"
    tensors = {}
    if isinstance(directions, str):
        kind = directions
    else:
        for layer in evaluated.layers:
            tensors[layer.parameter] = _read_tensor(evaluated, layer, directions)
        draws = _count_draws(tensors, draws)
    passes = [SharedPass(batch) for batch in evaluated.batches]
    forms = []
    for layer in evaluated.layers_in_running_order:
        at_once = min(shared.at_once(layer) for shared in passes)
        if kind == "random":
            pieces = draw_random(evaluated, layer, draws, at_once)
        elif kind == "gradient":
            pieces = normalize(_gradient(passes, layer.parameter), at_once)
        else:
            pieces = normalize(tensors[layer.parameter], at_once)
        forms.append(_form(passes, layer, pieces))
    passes.clear()  # their graphs
    return QuadraticForms(layers=tuple(forms), directions=kind, draws=draws, **evaluated.facts())


def _named_layers(model: nn.Module, directions: Mapping[str, Tensor]) -> list[str]:
    """Return globs for the layers that the keys name, which fit nothing else."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names = [*map(_layer_name, parameters), *parameters]
    unknown = [key for key in directions if key not in names]
    if unknown or not directions:
        hint = offer_nearest(unknown[0], names) if unknown else ""
        raise ProblemError(
            f"directions must name parameters of the model, got {unknown or 'none'}; they are "
            f"{', '.join(parameters[:8])}.{hint}"
        )
    return [glob.escape(_layer_name(key)) for key in directions]


def _layer_name(parameter: str) -> str:
    """Return the name by which hessinit calls a layer: that of a compiled model's own parameter."""
    return parameter.replace("_orig_mod.", "").removesuffix(".weight")


def _read_tensor(
    evaluated: EvaluatedProblem, layer: Layer, directions: Mapping[str, Tensor]
) -> Tensor:
    """Return the user's own directions in one layer, checked: (draws, *shape)."""
    names = {layer.name, layer.parameter, *layer.aliases}
    keys = [key for key in directions if names & {key, _layer_name(key)}]
    if len(keys) > 1:
        raise ProblemError(
            f"directions {keys[0]!r} and {keys[1]!r} are one tied weight; give it once."
        )
    tensor = directions[keys[0]]
    fault = _find_fault(tensor, layer)
    if not fault:
        tensor = tensor.detach().to(evaluated.device, evaluated.dtype)
        count = int((~torch.isfinite(tensor)).sum())
        if not count:
            return tensor.reshape(-1, *layer.shape)
        values = f"{tensor.numel()} values (in {evaluated.dtype})"
        fault = f"holds {count} NaN or inf among {values}"
    shape = ", ".join(["draws", *map(str, layer.shape)])
    raise ProblemError(
        f"directions[{keys[0]!r}] {fault}; it must be a dense, real, finite tensor of shape "
        f"{layer.shape}, or ({shape}) for several."
    )


def _find_fault(value: object, layer: Layer) -> str:
    """Return what is wrong with the type, shape or dtype of the user's directions, or ""."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}"
    shape = tuple(value.shape)
    if layer.shape not in (shape, shape[1:]) or value.numel() == 0:
        return f"has shape {shape}"
    if value.layout is not torch.strided or value.is_complex():
        return f"has layout {value.layout} and dtype {value.dtype}"
    return ""


def _count_draws(tensors: Mapping[str, Tensor], draws: int) -> int:
    """Return how many directions each layer has: as many in all, and as `draws` says."""
    counts = {len(tensor) for tensor in tensors.values()}
    if len(counts) > 1 or draws not in (1, *counts):
        raise ProblemError(
            f"draws={draws}, but directions hold {sorted(counts)}; give every layer as many, and "
            "leave draws out: the tensors say it."
        )
    return counts.pop()


def draw_random(
    evaluated: EvaluatedProblem, layer: Layer, draws: int, at_once: int
) -> Iterator[Directions]:
    """Yield random unit directions; they depend on the seed, the layer's name and the dtype.

    Weights of 4096 numbers or more get random signs, as normal numbers would cost more than a
    gradient (benchmarks/quadratic_cost.py). Smaller ones have too few signs, so they get directions
    uniform on the sphere. The mean of gᵀHg is trace/size either way.
    """
    digest = hashlib.blake2b(f"{evaluated.problem.seed} {layer.name}".encode(), digest_size=8)
    seed = int.from_bytes(digest.digest(), "little")
    # Mixed once more: a model drawn from the same number would get its own weights as directions.
    mixed = np.random.SeedSequence(seed, spawn_key=(0x4E55,)).generate_state(1)[0]
    source = torch.Generator().manual_seed(int(mixed))
    for first in range(0, draws, at_once):
        count = min(at_once, draws - first)
        rows = [_draw(layer.size, source, evaluated.dtype) for _ in range(count)]
        tensor = torch.stack(rows).to(evaluated.device)
        squares = inner_products(tensor, tensor)
        yield Directions(tensor.view(count, *layer.shape), torch.ones_like(squares), 1 / squares)


def _draw(size: int, source: torch.Generator, dtype: torch.dtype) -> Tensor:
    if size < 4096:
        return torch.randn(size, generator=source, dtype=dtype)
    # Eight signs from every random byte: ten times as fast as a number for each sign.
    octets = torch.randint(0, 256, (-(-size // 8),), generator=source, dtype=torch.uint8)
    signs = torch.from_numpy(np.unpackbits(octets.numpy(), count=size))
    return signs.to(dtype).mul_(2).sub_(1)


def normalize(tensors: Tensor, at_once: int) -> Iterator[Directions]:
    """Yield directions (count, *shape) of any length; one of length 0 stays 0."""
    for part in tensors.split(at_once):
        # The squares of a vanished gradient, 1e-25, are 0 in float32: the largest entry is taken
        # out first.
        largest = _as_rows(part).abs().amax(1)
        tensor = part / torch.where(largest > 0, largest, 1).view(-1, *[1] * (part.ndim - 1))
        scales = largest.cpu().double()
        yield Directions(tensor, scales * inner_products(tensor, tensor).sqrt(), scales * scales)


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products of the rows, in double.

    `torch.linalg.vecdot` takes five times as long: it writes every product down.
    """
    rows = zip(_as_rows(left), _as_rows(right), strict=True)
    return torch.stack([torch.dot(*pair) for pair in rows]).cpu().double()


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1)  # not flatten(1): a scalar parameter has no dimension 1


class SharedPass:
    """The pass `q(u, w) = J(w)ᵀu` of one batch at `u = ∂L/∂z`, shared by all layers.

    It is linear in `u`, so its derivative by `u` along `g` is `v = J g`; its derivative by the
    layer's own weight is `Σ u_c ∇²z_c g`, what the exact Hessian has beyond Gauss-Newton. One pass
    gives both.
    """

    def __init__(self, batch: EvaluatedBatch) -> None:
        self.batch = batch
        self._cotangent = batch.loss_gradient[1].detach().requires_grad_()
        parameters = list(batch.parameters.values())
        adjoints: tuple[Tensor | None, ...] = torch.autograd.grad(
            batch.output, parameters, self._cotangent, create_graph=True, allow_unused=True
        )
        self._adjoints = dict(zip(batch.parameters, adjoints, strict=True))

    def gradient(self, parameter: str) -> Tensor:
        """Return the loss gradient by that parameter, in this batch's share of the loss."""
        adjoint = self._adjoints[parameter]
        if adjoint is None:
            return torch.zeros_like(self.batch.parameters[parameter])
        return adjoint.detach() * self.batch.weight

    def at_once(self, layer: Layer) -> int:
        """Return how many directions a batched pass takes: up to 16, in about 32 MB of memory."""
        size = layer.size * self._cotangent.element_size() + self.batch.activation_bytes
        return max(1, min(16, 2**25 // size))

    def forms(self, parameter: str, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return `vᵀ H_z v` for every direction, and what the exact form has beyond it."""
        zeros = torch.zeros(len(directions), dtype=torch.float64)
        adjoint = self._adjoints[parameter]
        if adjoint is None:
            return zeros, zeros  # the forward does not use it
        inputs = [self._cotangent, self.batch.parameters[parameter]]
        changes, bent = _pull_each(adjoint, inputs, directions)
        beyond = zeros if bent is None else inner_products(directions, bent)
        output, gradient = self.batch.loss_gradient
        if changes is None or not gradient.requires_grad:
            return zeros, beyond  # a loss that is linear in the output
        (curved,) = _pull_each(gradient, [output], changes)
        if curved is None:
            return zeros, beyond
        # In double: the product of two changes of 1e-22, as vanishing networks have, is 0 in
        # float32.
        return inner_products(changes.double(), curved.double()), beyond


def _pull_each(
    output: Tensor, inputs: list[Tensor], cotangents: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients for each cotangent; None for an input that the output ignores."""
    if len(cotangents) > 1:
        try:
            with warnings.catch_warnings():
                # A missing batching rule is only a warning, and slower than a loop.
                warnings.simplefilter("error")
                return torch.autograd.grad(
                    output,
                    inputs,
                    cotangents,
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=True,
                )
        except (RuntimeError, UserWarning):
            pass
    pulled = [
        torch.autograd.grad(output, inputs, cotangent, retain_graph=True, allow_unused=True)
        for cotangent in cotangents
    ]
    by_input = zip(*pulled, strict=True)
    return tuple(None if rows[0] is None else torch.stack(rows) for rows in by_input)


def _gradient(passes: Sequence[SharedPass], parameter: str) -> Tensor:
    """Return the loss gradient by a parameter over all batches, as one direction."""
    gradients = [shared.gradient(parameter) for shared in passes]
    return sum(gradients[1:], gradients[0]).unsqueeze(0)


def _form(
    passes: Sequence[SharedPass], layer: Layer, pieces: Iterator[Directions]
) -> QuadraticForm:
    columns = []
    for directions in pieces:
        totals = torch.zeros(2, len(directions.factors), dtype=torch.float64)
        for shared in passes:
            forms = torch.stack(shared.forms(layer.parameter, directions.tensor))
            totals += shared.batch.weight * forms * directions.factors
        columns.append(torch.stack([totals.sum(0), totals[0], directions.lengths]))
    exact, theorem1, lengths = torch.cat(columns, dim=1).tolist()
    return QuadraticForm(
        name=layer.name,
        aliases=layer.aliases,
        shape=layer.shape,
        exact=tuple(exact),
        theorem1=tuple(theorem1),
        length=tuple(lengths),
    )
