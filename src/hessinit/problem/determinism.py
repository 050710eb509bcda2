"""Checks of the forward pass: it must repeat itself, stay finite, and be seen by autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError, WeightsError
from hessinit.problem.batches import Batch, tensors_in
from hessinit.problem.graph import first_leaf, nodes_behind
from hessinit.problem.validate import all_finite, name_large_inputs

if TYPE_CHECKING:
    from hessinit.problem.functional import FirstCall, FunctionalProblem


def check_graph(problem: FunctionalProblem, output: Tensor, loss: Tensor) -> None:
    """Refuse a loss that sees weights other than through the output, and hidden paths to weights."""
    if not output.requires_grad:
        raise ProblemError(
            "the model's output does not depend on any measured weight: it was detached, computed "
            "under torch.no_grad(), or the weights are not used. Remove the detach, or measure "
            "other layers."
        )
    parameters = {name: problem.model.get_parameter(name) for name in problem.leaves}
    for who, end in (("the forward", output), ("the loss", loss)):
        if (name := first_leaf(nodes_behind(end.grad_fn), parameters)) is not None:
            raise ProblemError(
                f"{who} reaches {name} by a way that cannot be followed (an attribute in "
                "__slots__, an earlier view, TorchScript), so that its derivative would be "
                "missing. Keep the weight in an attribute of the model, and make views of it "
                "inside the forward."
            )
    after = list(nodes_behind(loss.grad_fn, stop=output.grad_fn))
    if output.grad_fn not in after:
        why = "the loss is not a function of the model's output (it was detached, or the loss ignores it)"
        raise ProblemError(f"{why}; compute it from its first argument.")
    if (name := first_leaf(after, problem.leaves)) is not None:
        raise ProblemError(
            f"the loss depends on {name} not only through the model's output: by a penalty, by an "
            "auxiliary loss that the forward keeps in an attribute, or by a layer that the loss "
            "uses, too. Leave a penalty out (c·‖w‖² adds 2c to every eigenvalue of the exact "
            "Hessian); return anything else as a further column of the output (forward=) and take "
            "it from there in the loss."
        )
    check_no_reentrant_checkpoints(output)


def check_no_reentrant_checkpoints(output: Tensor) -> None:
    """They recompute the forward inside `backward()`, and refuse `autograd.grad`."""
    if any(
        type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_behind(output.grad_fn)
    ):
        raise ProblemError(
            "the model recomputes activations by reentrant checkpoints, which have no second "
            "derivative. Turn them off while measuring, or pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint."
        )


# Dropping one layer in ten goes unnoticed in one repetition nine times out of ten, in nineteen once
# in seven.
_DRAWS = 20


def check_forward(problem: FunctionalProblem, batch: Batch) -> tuple[FirstCall, bool]:
    """The first call, and whether a part of the batch can be evaluated alone.

    Refuses a random forward.

    Evaluates once, and once more on an eighth of the examples under other random numbers. If these
    agree with the whole, the forward is deterministic. If not, the examples may just see each other
    (as in BatchNorm's train mode): then a second whole evaluation decides. A forward that draws, and
    whose draws are frozen, must give the same again for the same draws.
    """
    call = problem.output_and_loss(
        batch, lambda output: _check_finite_output(problem, batch, output)
    )
    output = call.output
    loss = call.loss
    if not all_finite(loss.detach()):
        bad = sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors_in(batch.targets))
        cause = "check the targets and the loss"
        error: type[ProblemError] = WeightsError
        if bad:
            cause = f"the targets hold {bad} NaN or inf; clean them"
            error = ProblemError
        raise error(f"the loss is {loss.item()} though the model's output is finite: {cause}.")
    check_graph(problem, output, loss)
    _check_loss_repeats(problem, batch, call)
    if call.drew and problem.dropout == "freeze":
        _check_draw_repeats(problem, batch, output)
        return call, False
    return call, _check_forward_repeats(problem, batch, call)


def _check_forward_repeats(problem: FunctionalProblem, batch: Batch, call: FirstCall) -> bool:
    output = call.output
    if not call.drew and _sample_agrees(problem, batch, output):
        return True
    # A forward that draws may still agree with itself by chance, as when it drops one layer in ten.
    for draw in range(1, _DRAWS if call.drew else 2):
        again = problem.output(batch, draw=draw).detach()
        if again.shape != output.shape or not agree(again, output):
            raise ProblemError(
                "the model's output changes from call to call on the same batch, so there is no "
                "single Hessian. Make the forward deterministic (model.eval()), or pass "
                'dropout="freeze" to keep one draw.'
            )
    return False


def _check_draw_repeats(problem: FunctionalProblem, batch: Batch, output: Tensor) -> None:
    again = problem.output(batch)
    if again.shape != output.shape or not agree(again.detach(), output.detach()):
        raise ProblemError(
            "the model's output changes from call to call under the same random numbers: it draws "
            "from a generator that is not known here. Keep that one in an attribute of the model, "
            "or make it deterministic."
        )


def _check_loss_repeats(problem: FunctionalProblem, batch: Batch, call: FirstCall) -> None:
    output = call.output.detach()
    loss = call.loss.detach()
    for draw in range(_DRAWS if call.drew and problem.dropout != "freeze" else 1):
        if not agree(problem.loss_of(output, batch, draw=draw).detach(), loss):
            raise ProblemError(
                "the loss changes from call to call on the same output, so there is no single "
                'Hessian: it draws random numbers (dropout="freeze" keeps one draw), keeps a state '
                "where none is looked for (in an attribute in __slots__, say), or reads what the "
                "forward leaves in an attribute of the model. Make it a function of its two "
                "arguments; with forward= the model can give it more columns of output."
            )


def _sample_agrees(problem: FunctionalProblem, batch: Batch, output: Tensor) -> bool:
    if output.ndim < 1 or output.shape[0] != batch.size or batch.size < 2:
        return False
    examples = batch.sample()
    try:
        with torch.no_grad():
            alone = problem.output(batch.take(examples), draw=1)
    except Exception:
        # The model needs the whole batch; a forward that fails on that has failed before.
        return False
    in_batch = output[examples.to(output.device)]
    return alone.shape == in_batch.shape and agree(alone, in_batch)


def agree(first: Tensor, second: Tensor) -> bool:
    """Equal but for the rounding of differently blocked sums."""
    with torch.no_grad():
        rounding = torch.finfo(first.dtype).eps ** 0.6  # 7e-5 in fp32, 4e-10 in fp64
        return bool((first - second).abs().max() <= rounding * second.abs().max())


def _check_finite_output(problem: FunctionalProblem, batch: Batch, output: Tensor) -> None:
    """Refuse NaN and inf; name the first module at fault, by one more call with hooks."""
    if all_finite(output.detach()):
        return
    at_fault: list[str] = []
    names = {module: name for name, module in problem.model.named_modules()}

    def watch(module: nn.Module, inputs: object, output: object) -> None:
        if not at_fault and any(
            not bool(torch.isfinite(tensor).all()) for tensor in tensors_in(output)
        ):
            at_fault.append(names[module] or f"the {type(module).__name__} itself")

    layers = [module for module in names if not any(module.children())]
    handles = [module.register_forward_hook(watch) for module in layers]
    try:
        problem.output(batch)
    finally:
        for handle in handles:
            handle.remove()
    source = f" ({at_fault[0]} is the first layer whose output does)" if at_fault else ""
    hint = name_large_inputs(batch.inputs) or (
        "If it overflows, scale its weights down or measure with dtype=torch.float64; if not, look "
        "for a division or a logarithm of zero there."
    )
    raise WeightsError(f"the model's output holds NaN or inf{source}. {hint}")


def find_bad_buffer(model: nn.Module) -> str | None:
    """The first that holds NaN or, as a statistic of a normalization, inf; a mask may hold inf."""
    for name, buffer in model.named_buffers():
        bad = buffer.isnan()
        if name.endswith(("running_mean", "running_var")):
            bad = ~buffer.isfinite()
        if bool(bad.any()):
            return name
    return None
