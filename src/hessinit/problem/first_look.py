"""One look before the work begins: is the problem finite, repeatable, and a function of the weights?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError
from hessinit.problem.batches import Batch
from hessinit.problem.dependence import check_graph
from hessinit.problem.problem import Problem
from hessinit.problem.structures import tensors_in
from hessinit.problem.weights import all_finite

# Dropping one layer in ten goes unnoticed in one repetition nine times out of ten, in nineteen once in seven.
_DRAWS = 20


@dataclass(frozen=True)
class FirstLook:
    """The output of a batch and its loss, with their graph.

    `separable` if the forward gives a part of the batch the same outputs as the whole.
    """

    output: Tensor
    loss: Tensor
    separable: bool


def take_first_look(problem: Problem, batch: Batch) -> FirstLook:
    """Evaluate once, and once more on an eighth of the examples under other random numbers.

    If these agree with the whole, the forward is deterministic. If not, the examples may just see each
    other (as in BatchNorm's train mode): then a second whole evaluation decides.
    """
    output, loss, draws_forward, draws_loss = problem.output_and_loss(
        batch, lambda output: _check_finite_output(problem, batch, output)
    )
    _check_finite_loss(batch, loss)
    check_graph(problem, output, loss)
    _check_loss_repeats(problem, batch, output, loss, draws_loss)
    frozen = problem.dropout == "freeze"
    separable = not frozen and _check_forward_repeats(problem, batch, output, draws_forward)
    return FirstLook(output, loss, separable)


def _check_forward_repeats(problem: Problem, batch: Batch, output: Tensor, draws: bool) -> bool:
    """Whether a part of the batch was enough to see it."""
    # A forward that draws may still agree with itself by chance, as when it drops one layer in ten.
    for draw in range(1, _DRAWS if draws else 2):
        if not draws and _sample_agrees(problem, batch, output):
            return True
        again = _output_again(problem, batch, draw)
        if again.shape != output.shape or not agree(again, output):
            raise ProblemError(
                "the model's output changes from call to call on the same batch, so there is no single "
                'Hessian. Make the forward deterministic (model.eval()), or pass dropout="freeze" to keep '
                "one draw."
            )
    return False


def check_draw_repeats(problem: Problem, batch: Batch, output: Tensor) -> None:
    """Frozen to one draw, the forward must give the same again; `drew` then says whether it drew."""
    again = problem.output(batch)
    if again.shape != output.shape or not agree(again.detach(), output.detach()):
        raise ProblemError(
            "the model's output changes from call to call under the same random numbers: it draws from a "
            "generator that is not known here. Keep that one in an attribute of the model, or make it "
            "deterministic."
        )


def _check_loss_repeats(problem: Problem, batch: Batch, output: Tensor, loss: Tensor, draws: bool) -> None:
    """The same loss of the same output, also without the forward before it."""
    again = problem.loss_of(output.detach(), batch)
    if not agree(again.detach(), loss.detach()):
        raise ProblemError(
            "the loss changes from call to call on the same output, so there is no single Hessian: it keeps "
            "a state or a generator where none is looked for (in an attribute of a class, say), or reads "
            "what the forward leaves in an attribute of the model. Make it a function of its two arguments; "
            "with forward= the model can give it more columns of output."
        )
    for draw in range(1, _DRAWS if draws and problem.dropout != "freeze" else 1):
        again = problem.loss_of(output.detach(), batch, draw=draw)
        if not agree(again.detach(), loss.detach()):
            raise ProblemError(
                "the loss changes from call to call on the same output, so there is no single Hessian. "
                'Make it deterministic, or pass dropout="freeze" to keep one draw.'
            )


def _output_again(problem: Problem, batch: Batch, draw: int) -> Tensor:
    try:
        with torch.no_grad():
            return problem.output(batch, draw=draw)
    except RuntimeError:  # a forward that differentiates by its inputs needs the graph
        return problem.output(batch, draw=draw).detach()


def _sample_agrees(problem: Problem, batch: Batch, output: Tensor) -> bool:
    if output.ndim < 1 or output.shape[0] != batch.size or batch.size < 2:
        return False
    some = batch.sample()
    try:
        with torch.no_grad():
            sample = problem.output(batch.take(some), draw=1)
    except Exception:
        return False  # the model needs the whole batch; a forward that fails on the whole has failed before
    whole = output[some.to(output.device)]
    return sample.shape == whole.shape and agree(sample, whole)


def agree(one: Tensor, other: Tensor) -> bool:
    """Equal but for the rounding of differently blocked sums."""
    with torch.no_grad():
        rounding = torch.finfo(one.dtype).eps ** 0.6  # 7e-5 in fp32, 4e-10 in fp64
        return bool((one - other).abs().max() <= rounding * other.abs().max())


def _check_finite_output(problem: Problem, batch: Batch, output: Tensor) -> None:
    if not all_finite(output.detach()):
        where = first_not_finite(problem, batch)
        raise ProblemError(
            f"the model's output holds NaN or inf{where}. If it overflows, scale its weights down or measure "
            "with dtype=torch.float64; if not, look for a division or a logarithm of zero there."
        )


def _check_finite_loss(batch: Batch, loss: Tensor) -> None:
    if not all_finite(loss.detach()):
        bad = sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors_in(batch.targets))
        cause = f"the targets hold {bad} NaN or inf; clean them" if bad else "check the targets and the loss"
        raise ProblemError(f"the loss is {loss.item()} though the model's output is finite: {cause}.")


def first_not_finite(problem: Problem, batch: Batch) -> str:
    """Names the first module whose output is not finite, by running once more with temporary hooks."""
    found: list[str] = []

    def watch(name: str) -> object:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if not found and not all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(output)):
                found.append(name or f"the {type(module).__name__} itself")

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in problem.model.named_modules()
        if not any(module.children())
    ]
    try:
        problem.output(batch)
    finally:
        for handle in handles:
            handle.remove()
    return f" ({found[0]} is the first layer whose output does)" if found else ""
