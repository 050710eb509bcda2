"""New weights, drawn for one output block at a time (a gate, a head's q), and LSUV.

Numbers are drawn in fp32 (fp64 for fp64 weights) on the generator's device and then copied, so a
weight in bf16 or fp16, on any device, gets the rounded numbers of its fp32 twin. Nothing is written
to the model here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hessinit.errors import ProblemError, choose
from hessinit.init.recorder import prepare_sample, preserved, run
from hessinit.init.trace import WeightUse
from hessinit.init.weights import Target, block_views
from hessinit.problem.batches import tensors_in
from hessinit.problem.checks import layer_name
from hessinit.problem.graph import name_of, operation_named
from hessinit.problem.preserve import memory_of
from hessinit.problem.problem import Forward
from hessinit.problem.ranks import lockstep_ranks, mean_over_ranks, on_any_rank
from hessinit.problem.shards import gathered_parameters, local_part
from hessinit.results.initialization import PlannedWeight

DISTRIBUTIONS = ("normal", "truncated normal", "uniform")
_CUT = 2.0  # a truncated normal ends at this many standard deviations of its parent
_MASS = math.erf(_CUT / math.sqrt(2))  # of the parent within the cuts
_DENSITY_AT_CUT = math.exp(-(_CUT**2) / 2) / math.sqrt(2 * math.pi)
# Of a unit normal that is cut there: 0.8796.
TRUNCATED_STD = math.sqrt(1 - 2 * _CUT * _DENSITY_AT_CUT / _MASS)


@torch.no_grad()
def draw_(
    view: Tensor, std: float, distribution: str = "normal", generator: torch.Generator | None = None
) -> None:
    """Fill `view` with independent numbers of mean 0 and standard deviation `std`.

    "truncated normal" ends at two standard deviations of its parent (2.27 `std`), "uniform" at √3
    `std`. Without a generator, the global one of the CPU is drawn from.
    """
    choose("distribution", distribution, list(DISTRIBUTIONS))
    dtype = _precision(view)
    device = _device(generator)
    if distribution == "normal":
        block = torch.randn(view.shape, dtype=dtype, generator=generator, device=device).mul_(std)
    else:
        even = torch.rand(view.shape, dtype=dtype, generator=generator, device=device)
        even.mul_(2).sub_(1)  # in [-1, 1)
        if distribution == "uniform":
            block = even.mul_(math.sqrt(3) * std)
        else:
            parent = even.mul_(_MASS).erfinv_().mul_(math.sqrt(2)).clamp_(-_CUT, _CUT)
            block = parent.mul_(std / TRUNCATED_STD)
    view.copy_(block)


@torch.no_grad()
def draw_orthogonal_(view: Tensor, gain: float, generator: torch.Generator | None = None) -> None:
    """Fill `view` (out, in, *kernel) with `gain` times a random semi-orthogonal matrix.

    Its rows are orthonormal, or its columns where it has more rows than columns, and it is uniform
    among such matrices (Haar). Costs a QR decomposition in fp64.
    """
    rows = view.shape[0]
    columns = math.prod(view.shape[1:])
    shape = (max(rows, columns), min(rows, columns))
    device = _device(generator)
    q, r = torch.linalg.qr(
        torch.randn(shape, dtype=torch.float64, generator=generator, device=device)
    )
    # LAPACK's choice of signs is not uniform; a positive diagonal of R makes it so (Mezzadri 2007).
    q *= torch.where(r.diagonal() < 0, -1.0, 1.0)
    matrix = q if rows >= columns else q.T
    view.copy_(matrix.mul_(gain).reshape(view.shape))


def draw_delta_orthogonal_(
    view: Tensor, gain: float, generator: torch.Generator | None = None
) -> None:
    """Fill the middle of `view` (out, in, *kernel) with an orthogonal matrix, the rest with 0.

    The matrix is multiplied by `gain`. The convolution then keeps norms, up to its borders,
    where it has no fewer outputs than inputs (Xiao et al. 2018). Without a kernel, the same as
    `draw_orthogonal_`.
    """
    middle = view.detach().zero_()
    for length in view.shape[2:]:
        middle = middle.select(2, length // 2)
    draw_orthogonal_(middle, gain, generator)


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _device(generator: torch.Generator | None) -> torch.device:
    # Named, because torch.set_default_device may have chosen another.
    return torch.device("cpu") if generator is None else generator.device


@dataclass(frozen=True)
class Draft:
    """A weight with its plan, and the use that decides it; None for a weight that stays.

    `gain` is the factor on an orthogonal matrix, or, for LSUV, the std that its output shall have;
    `factor` is the dropout's factor on top of a measured size.
    """

    target: Target
    planned: PlannedWeight
    use: WeightUse | None = None
    gain: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True)
class Drawn:
    """The new values, and the plan with the standard deviations that were drawn."""

    weights: Sequence[tuple[Target, Tensor]]
    biases: dict[nn.Parameter, Tensor]
    planned: tuple[PlannedWeight, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DrawingJob:
    """The model to draw weights for, how it is called, and the generator of the draws."""

    model: nn.Module
    sample: Any
    forward: Forward | None
    generator: torch.Generator | None = None


def draw_values(
    job: DrawingJob, drafts: Sequence[Draft], scheme: str, distribution: str | None, biases: str
) -> Drawn:
    """New weights for all drafts that are to be written, and new biases."""
    generator = _independent(job.generator)
    planned = {draft.target.key: draft.planned for draft in drafts}
    written = {draft.target.key: draft for draft in drafts if draft.use is not None}
    if lockstep_ranks() is not None:
        return _draw_in_place_(job, written, planned, scheme, distribution, biases, generator)
    weights = {key: _draw(draft, scheme, distribution, generator) for key, draft in written.items()}
    zeros = {
        bias: torch.zeros_like(bias, requires_grad=False)
        for draft in written.values()
        for bias in draft.target.biases().values()
        if biases != "keep"
    }
    notes: tuple[str, ...] = ()
    if scheme == "lsuv":
        notes = _scale_to_unit_variance_(job, written, weights, zeros)
    if distribution is None:
        planned |= {key: _measured(draft, weights[key]) for key, draft in written.items()}
    values = [(draft.target, weights[key]) for key, draft in written.items()]
    return Drawn(values, zeros, tuple(planned.values()), notes)


def _draw_in_place_(
    job: DrawingJob,
    written: Mapping[str, Draft],
    planned: dict[str, PlannedWeight],
    scheme: str,
    distribution: str | None,
    biases: str,
    generator: torch.Generator,
) -> Drawn:
    """Write the new weights of a sharded model one after the other; every rank draws the same.

    The caller can undo it.
    """
    for key, draft in written.items():
        value = _draw(draft, scheme, distribution, generator)
        if distribution is None:
            planned[key] = _measured(draft, value)
        draft.target.write_(value)
        for bias in draft.target.biases().values() if biases != "keep" else ():
            bias.detach().zero_()
    notes: tuple[str, ...] = ()
    if scheme == "lsuv":
        # The forward gathers one layer at a time, which is scaled while it is whole.
        gathered = gathered_parameters(job.model)
        weights = {key: gathered[key] for key in written}
        factors, notes = _find_unit_variance(job, written, weights, {})
        for key, draft in written.items():
            local_part(draft.target.stored[0]).mul_(factors[key])
            std = tuple(factors[key] * std for std in planned[key].std)
            planned[key] = replace(planned[key], std=std)
    return Drawn([], {}, tuple(planned.values()), notes)


def _draw(
    draft: Draft, scheme: str, distribution: str | None, generator: torch.Generator
) -> Tensor:
    assert draft.use is not None
    dtype = _precision(draft.target.stored[0])
    value = torch.empty(draft.use.shape, dtype=dtype, device=generator.device)
    for number, groups in enumerate(block_views(draft.use, value)):
        for block in groups:
            if distribution is not None:
                draw_(block, draft.planned.std[number], distribution, generator)
            elif scheme == "delta-orthogonal":
                draw_delta_orthogonal_(block, draft.gain, generator)
            else:
                draw_orthogonal_(block, draft.gain, generator)
    padding = getattr(draft.target.owner, "padding_idx", None)
    if draft.use.kind == "embedding" and padding is not None:
        value[padding] = 0
    return value


def _independent(generator: torch.Generator | None) -> torch.Generator:
    """A new generator, seeded from the one that was given, or from the global one.

    After torch.manual_seed(0) the user's data are the numbers that seed 0 gives. Weights drawn from
    another generator of that seed would be those very numbers: the first layer's output is several
    times too large.
    """
    seed = torch.randint(2**62, (1,), generator=generator, device=_device(generator))
    return torch.Generator(_device(generator)).manual_seed(int(seed))


def _measured(draft: Draft, value: Tensor) -> PlannedWeight:
    assert draft.use is not None
    blocks = [
        torch.cat([group.reshape(-1) for group in groups])
        for groups in block_views(draft.use, value)
    ]
    std = tuple(float(block.double().square().mean().sqrt()) for block in blocks)
    return replace(draft.planned, std=std)


# --- Layer-sequential unit variance (Mishkin & Matas, ICLR 2016), in one forward pass
#
# A layer's output is linear in its weight, so one division makes its variance 1; what follows then
# runs on the corrected output. The original runs the network several times for each layer.


@dataclass(frozen=True)
class _Tolerances:
    """How close to its standard deviation an output is brought.

    With a bias one division is not exact: the original allows ten `rounds`, to within a tenth
    (`close_enough`). A later use may be twice as large as asked for, as it is in recurrences and at
    random (`exploding`).
    """

    rounds: int = 10
    close: float = 1e-3
    close_enough: float = 0.1
    exploding: float = 0.5


_LSUV = _Tolerances()


class UnitVariance(TorchFunctionMode):
    """Scales each weight in place, where a layer first uses it, until its output has its std.

    `factors` are what each weight was multiplied by, `shrunk` the parts of them that are due to a
    later use, which would have exploded; `zero` are weights whose output was 0, `failed` those that
    no scale suits.
    """

    def __init__(self, weights: Mapping[str, Tensor], stds: Mapping[str, float]) -> None:
        super().__init__()
        self._weights = weights
        self._stds = stds
        self.factors = dict[str, float]()
        self.shrunk = dict[str, float]()
        self.zero = list[str]()
        self.failed = list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        again = functools.partial(func, *args, **(kwargs or {}))
        result = again()
        if not operation_named(name_of(func)).maps or not isinstance(result, Tensor):
            return result
        # By storage, as `x @ weight.T` uses a view; that of a sharded weight is gathered just now.
        names = {memory_of(weight): name for name, weight in self._weights.items()}
        for tensor in tensors_in((args, kwargs)):
            name = names.get(memory_of(tensor)) if tensor.numel() else None
            if name in self.factors:
                result = self._shrink_(name, result, again)
            elif name is not None:
                result = self._scale_(name, result, again)
        return result

    def _multiply_(self, name: str, factor: float) -> None:
        self._weights[name].detach().mul_(factor)
        self.factors[name] *= factor

    def _shrink_(self, name: str, result: Tensor, again: Callable[[], Tensor]) -> Tensor:
        """A tied weight must suit the use that would explode first, as in an output layer."""
        deviation = _deviation(result)
        factor = self._stds[name] / deviation if deviation > 0 else 1.0
        if not factor < _LSUV.exploding or name in self.failed:
            return result
        self._multiply_(name, factor)
        self.shrunk[name] = self.shrunk.get(name, 1.0) * factor
        return again()

    def _scale_(self, name: str, result: Tensor, again: Callable[[], Tensor]) -> Tensor:
        std = self._stds[name]
        if not on_any_rank(bool(result.any())):
            self.zero.append(name)  # as on the zero state of a recurrence: its next use may tell
            return result
        self.factors[name] = 1.0
        for _ in range(_LSUV.rounds):
            deviation = _deviation(result)
            if not 0 < deviation < math.inf:
                raise ProblemError(
                    f"the output of {layer_name(name)} on this sample has standard deviation "
                    f"{deviation:g}, so no scale makes it 1. Pass a finite sample of several "
                    "examples that differ."
                )
            if abs(deviation / std - 1) < _LSUV.close:
                return result
            self._multiply_(name, std / deviation)
            result = again()
        if abs(_deviation(result) / std - 1) < _LSUV.close_enough:
            return result
        self._weights[name].detach().div_(self.factors[name])
        self.factors[name] = 1.0
        self.failed.append(name)
        return again()


def _deviation(result: Tensor) -> float:
    values = result.detach().double()
    mean = mean_over_ranks(values.mean())
    return float(mean_over_ranks((values - mean).square().mean()).sqrt())


def _scale_to_unit_variance_(
    job: DrawingJob,
    drafts: Mapping[str, Draft],
    weights: dict[str, Tensor],
    biases: dict[nn.Parameter, Tensor],
) -> tuple[str, ...]:
    """Scale `weights` in place by one forward on copies of them; returns notes."""
    model = job.model
    copies = {
        key: weights[key].to(draft.target.stored[0], copy=True)
        for key, draft in drafts.items()
        if not draft.target.is_parametrized
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    tensors = {**buffers, **copies, **{names[id(bias)]: value for bias, value in biases.items()}}
    factors, notes = _find_unit_variance(job, drafts, copies, tensors)
    for key, factor in factors.items():
        weights[key] *= factor
    return notes


def _find_unit_variance(
    job: DrawingJob,
    drafts: Mapping[str, Draft],
    weights: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, float], tuple[str, ...]]:
    """The factor of each weight, from a forward that scales `weights` in place; and notes."""
    mode = UnitVariance(weights, {key: draft.gain for key, draft in drafts.items()})
    with preserved(job.model):
        run(job.model, prepare_sample(job.model, job.sample), job.forward, tensors, mode)
    if mode.zero and not mode.factors:
        raise ProblemError(
            f"the output of {layer_name(mode.zero[0])} on this sample is 0 everywhere, and so is "
            "all behind it, so there is nothing to measure. Pass a sample of several examples that "
            "differ."
        )
    factors = {key: mode.factors.get(key, 1.0) * draft.factor for key, draft in drafts.items()}
    names = {key: draft.target.name for key, draft in drafts.items()}
    return factors, tuple(_notes_on(mode, names))


def _notes_on(mode: UnitVariance, names: Mapping[str, str]) -> Iterator[str]:
    unmeasured = ", ".join(name for key, name in names.items() if key not in mode.factors)
    if unmeasured:
        yield f"{unmeasured}: parametrized, or no output to measure, so left orthogonal."
    for key, factor in mode.shrunk.items():
        yield (
            f"{names[key]} is used again, where its output would be {1 / factor:.2g} times too "
            "large, so it is that much smaller, and so is the output of its first use."
        )
    failed = ", ".join(names[key] for key in mode.failed)
    if failed:
        yield f"{failed}: no scale gives variance 1 (a bias? max_norm?), left orthogonal."
