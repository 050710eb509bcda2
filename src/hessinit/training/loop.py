"""The training loop of the project, its data and random streams."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import random
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError, argument, check_positive
from hessinit.problem import checks
from hessinit.problem.batches import Batch, map_tensors, part_of, read_batches, tensors_in
from hessinit.problem.preserve import uninterrupted, untouched_random_state, untouched_sources
from hessinit.problem.problem import Forward, Loss, Problem
from hessinit.problem.ranks import mean_over_ranks, on_any_rank, require_alike
from hessinit.problem.shards import local_part
from hessinit.problem.substitutes import in_mode
from hessinit.results.track_record import Tracking
from hessinit.training.optimizers import AnyOptimizer, Stepper, Training

ONE_AT_A_TIME = threading.RLock()  # runs use global generators and settings, so threads take turns
# Half of fewer examples may be far sharper than the batch.
FEWEST_TO_HALVE = 16


def derive(seed: int, purpose: str) -> int:
    """Return the seed for one purpose of a run: one for all would correlate weights and batches.

    >>> derive(0, "weights") == derive(0, "weights"), derive(0, "weights") == derive(0, "batches")
    (True, False)
    """
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def generator(seed: int, purpose: str) -> torch.Generator:
    """A generator on the CPU, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(derive(seed, purpose))


def seed_everything(seed: int, purpose: str) -> None:
    """Seed torch, random and numpy; call it inside `reproducible()` only."""
    seed_generators(derive(seed, purpose))


def seed_generators(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    # The user's code may draw from numpy's old global state.
    numpy.random.seed(number % 2**32)  # noqa: NPY002


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """Compute without autocast, on one thread, in which sums have one order; restore randomness."""
    threads = torch.get_num_threads()
    with (
        ONE_AT_A_TIME,
        untouched_random_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@dataclass(frozen=True)
class Data:
    """All examples in one part, from which mini-batches are drawn, or ready batches.

    Every epoch is a new permutation, of the examples (its remainder is dropped) or of the ready
    batches.
    """

    parts: tuple[Batch, ...]
    batch_size: int  # of ready batches: the size of the first
    ready: bool

    @property
    def examples(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def different(self) -> int:
        """How many batches there are before one comes again."""
        return len(self.parts) if self.ready else self.examples // self.batch_size

    def hold_out(self, batches: int, seed: int) -> tuple[Data, Data]:
        """Split off that many random batches; returns the remaining data, and the batches."""
        order = self._permutation(generator(seed, "held out"))
        size = self._entries_of_a_batch
        held_out = tuple(self._take(order[: batches * size], size))
        remaining = order[batches * size :]
        parts = tuple(self._take(remaining, len(remaining)))
        return replace(self, parts=parts), Data(held_out, self.batch_size, ready=True)

    def minibatches(self, seed: int) -> Iterator[Batch]:
        """An endless sequence, the same for the same seed."""
        source = generator(seed, "batches")
        while True:
            order = self._permutation(source)
            size = self._entries_of_a_batch
            yield from self._take(order[: self.different * size], size)

    def initial_batch(self, seed: int) -> Batch:
        """The batch that initializations see and on which the initial curvature is measured."""
        source = generator(seed, "starting batch")
        if self.ready:
            return self.parts[int(torch.randint(len(self.parts), (1,), generator=source))]
        return self.parts[0].take(self._permutation(source)[: self.batch_size])

    def tracked_batch(self, examples: int, seed: int) -> Any:
        """Return that many random examples, or ready batches with at least as many, as pairs."""
        order = self._permutation(generator(seed, "tracked batch"))
        if not self.ready:
            tracked = self.parts[0].take(order[:examples])
            return tracked.inputs, tracked.targets
        chosen: list[Batch] = []
        for index in order.tolist():
            if sum(batch.size for batch in chosen) < examples:
                chosen.append(self.parts[index])
        return [(batch.inputs, batch.targets) for batch in chosen]

    def digest(self) -> str:
        """Return a hash of all examples, with their shapes and dtypes."""
        digest = hashlib.sha256()
        for tensor in tensors_in([(part.inputs, part.targets) for part in self.parts]):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            entries = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(entries.view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    @property
    def _entries_of_a_batch(self) -> int:
        """How many entries of a permutation make a batch."""
        return 1 if self.ready else self.batch_size

    def _take(self, order: Tensor, size: int) -> Iterator[Batch]:
        """Return the ready batches with these numbers, or batches of `size` of these examples."""
        if self.ready:
            return (self.parts[index] for index in order.tolist())
        return (self.parts[0].take(rows) for rows in order.split(size))

    def _permutation(self, source: torch.Generator) -> Tensor:
        entries = len(self.parts) if self.ready else self.examples
        return torch.randperm(entries, generator=source)


def read_data(data: Any, batch_size: int, steps: int) -> Data:
    """Read `(inputs, targets)` with all examples, or at most `steps` ready batches."""
    if isinstance(data, Data):
        return data
    if isinstance(data, (Tensor, Mapping, str)) or not isinstance(data, Iterable):
        raise ProblemError(
            f"data is a {type(data).__name__}; it must be (inputs, targets) with all examples, "
            "where targets may be None, or an iterable of such pairs, as a DataLoader is."
        )
    if isinstance(data, (tuple, list)) and len(data) == 2:
        parts = tuple(batch for _, batch in read_batches(data))
        if len(parts) == 1:
            _check_examples(parts[0], batch_size)
            return Data(parts, batch_size, ready=False)
        return Data(parts, parts[0].size, ready=True)
    with untouched_random_state(), untouched_sources(data):
        seed_everything(0, "data")  # a loader that shuffles draws from the global generators
        # An iterator may be endless, and no run sees more batches than it has steps.
        pairs = list(data if isinstance(data, Sequence) else itertools.islice(data, steps))
    if not pairs:
        raise ProblemError("data is empty; it must hold at least one batch (inputs, targets).")
    for index, pair in enumerate(pairs):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise ProblemError(
                f"data[{index}] is a {type(pair).__name__}; every batch must be a pair (inputs, "
                "targets), or data one pair of all examples."
            )
    parts = tuple(read_batches(tuple(pair))[0][1] for pair in pairs)
    return Data(parts, parts[0].size, ready=True)


def copy_to(
    batch: Batch, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """Copy inputs and targets to the device: a model may write into its inputs.

    Floating-point tensors get the `dtype`. Where some tensors of inputs or targets are on the
    device already, the others stay where they are.
    """

    def copy_all(structure: Any) -> Any:
        is_there = any(tensor.device == device for tensor in tensors_in(structure))
        destination = None if is_there else device

        def copy_one(tensor: Tensor) -> Tensor:
            new_dtype = dtype if tensor.is_floating_point() else None
            copied = tensor.detach().to(device=destination, dtype=new_dtype, copy=True)
            return copied.requires_grad_(tensor.requires_grad)

        return map_tensors(copy_one, structure)

    return copy_all(batch.inputs), copy_all(batch.targets)


def device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of the floating-point parameters; None where they have several."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def half_of(batch: Batch, order: Tensor, source: torch.Generator) -> Batch:
    """Return half of the examples in `order`, drawn at random."""
    drawn = torch.randperm(len(order), generator=source)
    return part_of(batch, order[drawn[: max(1, len(order) // 2)]])


def order_by_content(batch: Batch, seed: int) -> Tensor:
    """Return the indices of the examples, sorted by what the examples hold.

    Random halves of them do not depend on the order in the batch. A batch that is repeated as a
    whole counts once.
    """
    by_inputs = _project(batch, batch.inputs, seed)
    content = by_inputs + _project(batch, batch.targets, seed + 1)
    # Targets may be renamed: they only decide where the inputs are the same.
    order = content.argsort(stable=True)
    order = order[by_inputs[order].argsort(stable=True)]
    sorted_content = content[order]
    jumps = sorted_content.diff(prepend=torch.tensor([math.inf])).abs()
    is_new = jumps > 1e-6 * content.abs().max()
    repetitions = math.gcd(*is_new.cumsum(0).bincount()[1:].tolist())
    is_enough = len(order) >= repetitions * FEWEST_TO_HALVE
    return order[::repetitions] if is_enough else order


def _project(batch: Batch, structure: Any, seed: int) -> Tensor:
    """Return a number for each example: its content along a random direction."""
    total = torch.zeros(batch.size)
    for tensor in tensors_in(structure):
        if tensor.ndim and len(tensor) % batch.size == 0:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            rows = real.detach().reshape(batch.size, -1).float()
            direction = torch.randn(rows.shape[1], generator=generator(seed, "order"))
            total = total + (rows @ direction.to(rows)).cpu()
    return total


def _check_examples(batch: Batch, batch_size: int) -> None:
    for name, structure in (("inputs", batch.inputs), ("targets", batch.targets)):
        shapes = [tuple(tensor.shape) for tensor in tensors_in(structure)]
        if structure is None or any(shape[:1] == (batch.size,) for shape in shapes):
            continue
        actual = f"are a {type(structure).__name__} without a tensor in it"
        if shapes:
            actual = f"have shape {shapes[0]}"
        raise ProblemError(
            f"the {name} of data {actual}, and the first dimension must count the {batch.size} "
            "examples. Transpose or convert them, or pass a list of ready batches."
        )
    if batch_size > batch.size:
        raise ProblemError(
            f"the data hold {batch.size} examples, fewer than ",
            argument("batch_size", batch_size),
            f"; pass {batch.size} or less.",
        )


def train(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[tuple[Any, Any]],
    optimizer: Stepper,
    *,
    warmup: int = 0,
    forward: Forward | None = None,
    build: Callable[[], nn.Module] | None = None,
    on_step: Callable[[int, float], object] | None = None,
) -> tuple[list[float], str]:
    """Train in place; returns the loss of every step before it is made, and why training failed.

    It is the mean over the mini-batches whose gradients the step accumulates, at the weights that
    count. A loss that is not finite is the last, and no step is made with it.
    An exception counts as a loss of nan if the weights are its cause: some are not finite, or a new
    model from `build` accepts the same batch. `on_step(number, loss)` is called after every step,
    counted from 1.
    """
    losses: list[float] = []
    # So many batches at a time; what remains is dropped.
    groups = zip(*[iter(batches)] * optimizer.accumulate, strict=False)
    for step, parts in enumerate(groups):
        optimizer.warm_up(step, warmup)
        model.zero_grad(set_to_none=True)  # that of the optimizer asks torch's compiler each time
        failure = ""
        try:
            losses.append(_add_gradients(model, loss, parts, forward, optimizer))
        except Exception as raised:
            require_alike(raised)
            # Some functions refuse nan and inf instead of passing them on.
            is_out_of_memory = isinstance(raised, torch.OutOfMemoryError)
            if is_out_of_memory or not _caused_by_weights(model, build, loss, parts[0], forward):
                raise
            failure = f"Step {step + 1} failed on the weights that training led to: {raised}"
            losses.append(math.nan)
        if math.isfinite(losses[-1]):
            optimizer.step()
        if on_step is not None:
            on_step(step + 1, losses[-1])
        if not math.isfinite(losses[-1]):
            return losses, failure
    return losses, ""


def _add_gradients(
    model: nn.Module,
    loss: Loss,
    parts: Sequence[tuple[Any, Any]],
    forward: Forward | None,
    optimizer: Stepper,
) -> float:
    """Add the mean gradient of the mini-batches to `.grad`; return the mean of their losses."""
    losses = []
    for part in parts:
        value = evaluate_loss(model, loss, part, forward)
        checks.check_loss_value(value)
        losses.append(mean_over_ranks(value).item())
        if not math.isfinite(losses[-1]):
            break
        (value / len(parts) if len(parts) > 1 else value).backward()
        if optimizer.averaging:
            with optimizer.evaluating():
                losses[-1] = mean_over_ranks(evaluate_loss(model, loss, part, forward)).item()
    return statistics.fmean(losses)


@uninterrupted
def evaluate_loss(
    model: nn.Module, loss: Loss, batch: tuple[Any, Any], forward: Forward | None
) -> Tensor:
    inputs, targets = batch
    output = model(inputs) if forward is None else forward(model, inputs)
    return loss(output, targets)


def _caused_by_weights(
    model: nn.Module,
    build: Callable[[], nn.Module] | None,
    loss: Loss,
    batch: tuple[Any, Any],
    forward: Forward | None,
) -> bool:
    parts = map(local_part, model.parameters())
    if not on_any_rank(not all(bool(torch.isfinite(part).all()) for part in parts)):
        if build is None:
            return False
        try:
            evaluate_loss(build(), loss, batch, forward)
        except Exception:
            return False
    return True


def train_and_track(
    problem: Problem,
    data: Data,
    *,
    lr: float,
    steps: int,
    optimizer: AnyOptimizer = "sgd",
    warmup: int = 0,
    name: str = "",
    on_step: Callable[[int, float], object] = lambda step, loss: None,
    **tracking: Any,
) -> Tracking:
    """Train the problem's model in place on mini-batches of `data`, and track its curvature.

    It is measured on the batch of the problem. `optimizer` and `warmup` are as in `compare`;
    `tracking` are arguments of `track`. Start and end are measured whatever the `max_overhead`.
    `on_step(step, loss)` is called after every step. The same seed gives the same weights, and the
    caller's random generators are not touched.
    """
    from hessinit.training.track import TrackSettings, track

    steps = checks.check_whole("steps", steps, at_least=1)
    rate = check_positive("lr", lr)
    training = Training.of(optimizer)
    model = problem.model
    with (
        in_mode(model, training=True),
        untouched_random_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        seed_everything(problem.seed, "training")
        stepper = training.build(model, rate)
        stepper.warm_up(0, warmup)
        quiet = {"path": None, "log_to": None, "settings": TrackSettings(warn=False)}
        with track(problem, optimizer=stepper.optimizers, **{**quiet, **tracking}) as tracker:
            tracker.name = name

            def after_step(step: int, loss: float) -> None:
                tracker.step(loss)
                on_step(step, loss)

            batches = itertools.islice(data.minibatches(problem.seed), steps)
            copies = (copy_to(batch, device_of(model)) for batch in batches)
            losses, _ = train(
                model,
                problem.loss,
                copies,
                stepper,
                warmup=warmup,
                forward=problem.forward,
                on_step=after_step,
            )
            if not math.isfinite(losses[-1]):
                tracker.add_note(
                    f"The loss became {losses[-1]} at step {tracker.steps}; training ended there."
                )
            if tracker.tracking.points[-1].step < tracker.steps:
                tracker.measure()
        return tracker.close()


def final_loss(losses: Sequence[float], last: int) -> float:
    """The mean of the last losses; the last one where it is not finite."""
    return statistics.fmean(losses[-last:]) if math.isfinite(losses[-1]) else losses[-1]


def chunk_means(losses: Sequence[float], length: int) -> list[float]:
    """The mean of every `length` losses in turn; the last chunk may be shorter.

    >>> chunk_means([4.0, 2.0, 1.0, 3.0, 1.0], length=2)
    [3.0, 2.0, 1.0]
    """
    return [
        statistics.fmean(losses[first : first + length]) for first in range(0, len(losses), length)
    ]
