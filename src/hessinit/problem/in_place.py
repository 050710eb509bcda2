"""A problem on the model's own parameters, which runs the model as training does."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError, WeightsError, argument
from hessinit.problem import checks
from hessinit.problem.batches import Batch, map_tensors
from hessinit.problem.functional import FirstCall, FunctionalProblem, explained_memory
from hessinit.problem.preserve import StandIns, copies_beside, untouched_random_state
from hessinit.problem.problem import Problem
from hessinit.problem.ranks import lockstep_ranks, tolerating
from hessinit.problem.shards import gathered_parameters, is_dtensor, local_part, reshard

_BACKWARD_ONLY = re.compile(r"compatible with \.grad\(\)")  # what reentrant checkpoints say


class InPlaceProblem(FunctionalProblem):
    """A checked problem that moves the model's own weights, and puts them back bit for bit.

    So the model runs as it is trained: compiled, sharded, with fused kernels and checkpoints.
    `leaves` are the parameters themselves; of sharded ones, the part that this process holds.
    """

    runs_as_trained = True

    def __init__(self, problem: Problem, reason: str) -> None:
        self.reason = reason
        self.ranks = lockstep_ranks()  # that hold the other parts of the weights
        self._needs_graph = False  # the forward itself differentiates
        self._needs_backward = self.ranks is not None  # and not `autograd.grad`
        super().__init__(problem)

    def _find_model(self, problem: Problem) -> nn.Module:
        model = problem.model
        while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        checks.check_devices(model)
        return model

    def _choose_dtype(self, problem: Problem, dtypes: set[torch.dtype]) -> torch.dtype:
        parameters = dict(self.model.named_parameters())
        measured = {parameters[layer.parameter].dtype for layer in self.layers}
        dtype = max(measured, key=lambda kind: kind.itemsize)
        if len(measured) > 1 or dtype.itemsize < 4 or problem.dtype not in (None, dtype):
            held = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in measured))
            raise ProblemError(
                f"the measured weights are held in {held}, and the plain engine moves them as they "
                "are, by small steps that must not be rounded. Hold them all in float32, or all in "
                "float64, and leave out ",
                argument("dtype"),
                "; autocast may run the forward in less.",
            )
        return dtype

    def _convert(self, prefix: str, batch: Batch) -> Batch:
        def place(tensor: Tensor) -> Tensor:
            return tensor.detach().to(self.device)

        inputs = map_tensors(place, batch.inputs)
        checks.check_finite_inputs(inputs, prefix)
        return Batch(inputs, batch.targets, batch.size)

    def _check_values(self) -> None:
        if self.ranks is None:
            return super()._check_values()
        reason = ""
        try:
            super()._check_values()
        except WeightsError as refusal:
            reason = str(refusal)
        for shown in filter(None, self.ranks.exchange(reason)):
            raise WeightsError(shown)  # on all: a rank holds a part of the weights

    def _read_weights(self) -> None:
        self._guarded = False
        self._parameters = dict(self.model.named_parameters())
        self._buffers_of_scripts = {
            buffer
            for module in self.model.modules()
            if isinstance(module, torch.jit.ScriptModule)
            for buffer in module.buffers()
        }
        self._paddings = _padding_rows(self.model, self.rank, self.ranks_size)
        self._make_stand_in = copies_beside(self._parameters.values())
        self.leaves = {}
        self.constants = dict(self._parameters)
        for layer in self.layers:
            parameter = self.constants.pop(layer.parameter)
            if self.ranks is not None and not parameter.requires_grad:
                raise ProblemError(
                    argument("layers", layer.name),
                    " names a frozen weight of a sharded model, which gives no gradient for it; "
                    "unfreeze it with requires_grad_(), or leave it out.",
                )
            if parameter.is_inference():
                raise ProblemError(
                    f"{layer.name} was made under torch.inference_mode() and cannot be trained; "
                    "build or load the model outside of it."
                )
            part = local_part(parameter) if is_dtensor(parameter) else parameter
            self.leaves[layer.parameter] = part

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Those of training: compiled code runs compiled, every kernel is the user's choice.

        Hooks of parameters belong to the optimizer, and rest. Frozen weights that are measured are
        trained for the time.
        """
        parameters = self._parameters.values()
        saved = [(parameter, parameter.grad, parameter.requires_grad) for parameter in parameters]
        tables = list[tuple[dict[int, Any], dict[int, Any]]]()
        for parameter in parameters:
            for table in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                if table:
                    tables.append((table, dict(table)))
        with (
            explained_memory(self),
            untouched_random_state(self.device),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),
            torch.autocast(self.device.type, enabled=False),
        ):
            try:
                for table, _ in tables:
                    table.clear()
                for name in self.leaves:
                    self._parameters[name].requires_grad_()
                yield
            finally:
                for table, hooks in tables:
                    table.update(hooks)
                for parameter, gradient, is_trained in saved:
                    parameter.grad = gradient
                    parameter.requires_grad_(is_trained)

    def output(
        self,
        batch: Batch,
        *,
        draw: int = 0,
        weights: Mapping[str, Tensor] | None = None,
        plain: bool = True,
    ) -> Tensor:
        with self._with_model(self.leaves, draw) as stand_ins:
            return self._call_model(batch, draw, self.leaves, stand_ins, plain).output

    def output_and_loss(self, batch: Batch, inspect: Callable[[Tensor], None]) -> FirstCall:
        before = {name: leaf.detach().clone() for name, leaf in self.leaves.items()}
        changed = ""
        try:
            return super().output_and_loss(batch, inspect)
        finally:
            for name, values in before.items():
                if not torch.equal(self.leaves[name], values):
                    self.leaves[name].data.copy_(values)
                    changed = name
            if changed:
                raise ProblemError(
                    f"the forward writes into {changed} (as max_norm of an Embedding does), so it "
                    "is no function of its weights, and there is no single curvature; leave that "
                    "out while measuring."
                )

    def loss_of(self, output: Tensor, batch: Batch, *, draw: int = 0) -> Tensor:
        if not self._loss_state.meets_it:
            return self._call_loss(output, batch, draw)[0]
        with self._with_model(self.leaves, draw) as stand_ins:
            with torch.no_grad():  # the loss may read what the forward leaves in the model
                self._call_model(batch, draw, self.leaves, stand_ins, plain=True)
            return self._call_loss(output, batch, draw)[0]

    @property
    def rank(self) -> int:
        """The number of this process in its job."""
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def ranks_size(self) -> int:
        """The number of processes that hold the weights."""
        return 1 if self.ranks is None else self.ranks.size

    def shape_of(self, name: str) -> torch.Size:
        """That of the whole weight."""
        return self._parameters[name].shape

    def totals(self, numbers: Tensor) -> list[float]:
        """The sums of these numbers over the ranks."""
        return (numbers if self.ranks is None else self.ranks.sum(numbers)).tolist()

    def pull_again(
        self, output: Tensor, cotangent: Tensor, names: Sequence[str]
    ) -> list[Tensor | None] | None:
        """The same as `pull` on the graph of an output, which stays; None if it cannot."""
        parameters = [self._parameters[name] for name in names]
        with contextlib.suppress(RuntimeError), self._with_model(self.leaves, 0):
            gradients = torch.autograd.grad(
                output, parameters, cotangent, retain_graph=True, allow_unused=True
            )
            return [_dense(gradient) for gradient in gradients]
        return None

    def pull(self, batch: Batch, cotangent: Tensor, names: Sequence[str]) -> list[Tensor | None]:
        """The gradient of ⟨output, cotangent⟩ by these leaves; None for one that is not used.

        In a job, it is the mean of the ranks' own gradients: that is what sharded models give.
        """
        return self._run_backward(batch, names, lambda output: (output, cotangent))

    def gradients(self, batch: Batch, scale: float) -> list[Tensor | None]:
        """`scale` times the gradient of the training loss by every leaf.

        Penalties and auxiliary losses are included.
        """

        def end(output: Tensor) -> tuple[Tensor, Tensor]:
            loss, _ = self._call_loss(output, batch, 0)
            return loss, torch.full_like(loss, scale)

        return self._run_backward(batch, list(self.leaves), end)

    def _run_backward(
        self, batch: Batch, names: Sequence[str], end: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> list[Tensor | None]:
        """A forward and a backward from what `end` makes of the output, with its cotangent."""
        with self._with_model(self.leaves, 0) as stand_ins:
            root, cotangent = end(self._call_model(batch, 0, self.leaves, stand_ins, True).output)
            try:
                return self._differentiate(root, cotangent.to(root.dtype), names)
            except RuntimeError as failure:
                if self._needs_backward or not _BACKWARD_ONLY.search(str(failure)):
                    raise
        self._needs_backward = True
        return self._run_backward(batch, names, end)

    def _differentiate(
        self, root: Tensor, cotangent: Tensor, names: Sequence[str]
    ) -> list[Tensor | None]:
        """By `autograd.grad`, or else by `backward`."""
        parameters = [self._parameters[name] for name in names]
        if not self._needs_backward:
            parts = torch.autograd.grad(root, parameters, cotangent, allow_unused=True)
            return [_dense(part) for part in parts]
        for parameter in self._parameters.values():
            parameter.grad = None
        root.backward(cotangent)
        gradients = [_dense(parameter.grad) for parameter in parameters]
        for parameter in self._parameters.values():
            parameter.grad = None
        return gradients

    @contextlib.contextmanager
    def moved(self, changes: Mapping[str, Tensor], step: float) -> Iterator[None]:
        """The weights moved by `step` times their changes."""
        saved = {name: self.leaves[name].detach().clone() for name in changes}
        try:
            for name, change in changes.items():
                weight = self.leaves[name].data  # no graph sees a change of it
                weight.add_(change, alpha=step)
                for row in self._paddings.get(name, ()):  # that gets no gradient
                    weight[row] = saved[name][row]
            torch.clear_autocast_cache()  # which holds casts of the weights as they were
            yield
        finally:
            for name, values in saved.items():
                self.leaves[name].data.copy_(values)
            torch.clear_autocast_cache()

    def weights_of_forward(self) -> dict[str, Tensor]:
        return gathered_parameters(self.model)

    def output_at_factors(self, batch: Batch, factors: Mapping[str, float]) -> Tensor:
        parts = {name: local_part(self._parameters[name]) for name in factors}
        saved = {name: part.clone() for name, part in parts.items()}
        try:
            for name, part in parts.items():
                part.mul_(factors[name])
            return self.output_without_graph(batch)
        finally:
            for name, values in saved.items():
                parts[name].copy_(values)

    def output_without_graph(self, batch: Batch) -> Tensor:
        """The output, by a forward without a graph unless the forward itself differentiates."""
        outputs = list[Tensor]()
        if not self._needs_graph:
            with tolerating(RuntimeError, ProblemError), warnings.catch_warnings(), torch.no_grad():
                # Reentrant checkpoints warn that nothing is differentiated.
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
                outputs.append(self.output(batch).detach().clone())
        if not outputs:
            self._needs_graph = True
            outputs.append(self.output(batch).detach().clone())
        return outputs[0]

    @contextlib.contextmanager
    def _with_model(self, weights: Mapping[str, Tensor], draw: int) -> Iterator[StandIns]:
        with self._model_state.with_stand_ins(self._make_stand_in, self.seed + draw) as stand_ins:
            buffers = [(buffer, buffer.clone()) for buffer in self._buffers_of_scripts]
            try:
                yield stand_ins
            finally:
                for buffer, values in buffers:
                    buffer.copy_(values)
                # A further forward would take gathered weights for those that were moved.
                reshard(self.model)


def _dense(gradient: Tensor | None) -> Tensor | None:
    """The part of a gradient that this rank holds, and of a sparse one the numbers."""
    if gradient is None:
        return None
    return gradient.to_dense() if gradient.is_sparse else local_part(gradient)


def _padding_rows(model: nn.Module, rank: int, ranks: int) -> dict[str, list[int]]:
    """The rows of embeddings that are not trained; of sharded ones, those of this rank."""
    paddings = dict[str, list[int]]()
    for name, module in model.named_modules():
        row = getattr(module, "padding_idx", None)
        if row is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            rows = -(-module.num_embeddings // ranks)
            if row // rows == rank:
                paddings[f"{name}.weight".lstrip(".")] = [row - rank * rows]
    return paddings
