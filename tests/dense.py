"""The independent truth: whole curvature matrices in fp64, by definition, for problems with few weights."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tiny import Net

Forward = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class DenseCurvature:
    """One symmetric matrix per layer, and the one of all these layers together."""

    layers: dict[str, Tensor]
    network: Tensor


@dataclass(frozen=True)
class Extremes:
    """The two ends of a spectrum, and the larger of their sizes."""

    norm: float
    top: float
    bottom: float


def ends(matrix: Tensor) -> Extremes:
    """
    >>> ends(torch.diag(torch.tensor([1.0, -3.0, 2.0])))
    Extremes(norm=3.0, top=2.0, bottom=-3.0)
    """
    eigenvalues = torch.linalg.eigvalsh(matrix)
    top, bottom = eigenvalues[-1].item(), eigenvalues[0].item()
    return Extremes(max(abs(top), abs(bottom)), top, bottom)


def in_double(value: Any) -> Any:
    """A copy with every floating tensor in fp64, through dictionaries, sequences and dataclasses."""
    if isinstance(value, Tensor):
        return value.detach().clone().double() if value.is_floating_point() else value.clone()
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).double()
    if isinstance(value, Mapping):
        return {key: in_double(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(in_double(entry) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: in_double(getattr(value, part.name)) for part in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def layer_parameters(model: nn.Module, layers: Sequence[str] | None = None) -> dict[str, str]:
    """{layer name: parameter name}: weights of two or more dimensions, trainable or asked for by name."""
    found = {
        name.removesuffix(".weight"): name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and (parameter.requires_grad or layers is not None)
    }
    return found if layers is None else {layer: found[layer] for layer in layers}


def dense_curvature(
    model: nn.Module,
    loss: Callable[[Tensor, Any], Tensor],
    batch: Any,
    curvature: str,
    *,
    layers: Sequence[str] | None = None,
    forward: Forward | None = None,
    hessian_by: str = "func",
) -> DenseCurvature:
    """The exact Hessian or the Gauss-Newton matrix of sum_i (n_i / N) loss_i, from a copy in fp64.

    Costs one gradient per weight (Hessian) or per output (Gauss-Newton), and weights² memory.

    >>> model, features = nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> dense_curvature(model, nn.MSELoss(), (features, torch.ones(2, 1)), "hessian").network
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    with torch.random.fork_rng(devices=[]):  # a DataLoader draws a seed each time it is read
        batches = [in_double(part) for part in ([batch] if isinstance(batch, tuple) else batch)]
    sizes = [len(targets) for _, targets in batches]
    call = forward or (lambda model, inputs: model(inputs))
    called = Net(lambda net, inputs: call(net.model, inputs), model=in_double(model))
    loss = in_double(loss)
    names = [f"model.{name}" for name in layer_parameters(model, layers).values()]
    assemble = {"gauss-newton": _gauss_newton, "hessian": _HESSIANS[hessian_by]}[curvature]
    with sdpa_kernel(SDPBackend.MATH):
        network = sum(
            (size / sum(sizes)) * assemble(called, loss, inputs, targets, names)
            for size, (inputs, targets) in zip(sizes, batches, strict=True)
        )
    skew, size = (network - network.t()).abs().max().item(), network.abs().max().item()
    assert skew <= 1e-9 * size, f"the dense truth is not symmetric: off by {skew:.1e} at a size of {size:.1e}"
    network = (network + network.t()) / 2
    blocks, start = {}, 0
    for layer, name in layer_parameters(model, layers).items():
        stop = start + model.get_parameter(name).numel()
        blocks[layer], start = network[start:stop, start:stop], stop
    return DenseCurvature(blocks, network)


def _hessian_by_func(called: nn.Module, loss: Any, inputs: Any, targets: Any, names: list[str]) -> Tensor:
    parameters = dict(called.named_parameters())
    shapes = [parameters[name].shape for name in names]
    fixed = {name: parameter.detach() for name, parameter in parameters.items() if name not in names}
    fixed |= {name: buffer.clone() for name, buffer in called.named_buffers()}

    def evaluate(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        moved = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return loss(torch.func.functional_call(called, {**fixed, **moved}, (inputs,)), targets)

    start = torch.cat([parameters[name].detach().flatten() for name in names])
    with warnings.catch_warnings():
        # torch scripts its own forward-mode rules on first use, and its own torch.jit.script then complains.
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        return torch.func.hessian(evaluate)(start)


def _hessian_by_loops(called: nn.Module, loss: Any, inputs: Any, targets: Any, names: list[str]) -> Tensor:
    output, parameters = _run(called, inputs, names)
    return _second_derivative(loss(output, targets), parameters)


def _gauss_newton(called: nn.Module, loss: Any, inputs: Any, targets: Any, names: list[str]) -> Tensor:
    output, parameters = _run(called, inputs, names)
    jacobian = _rows(output.flatten(), parameters)
    seen = output.detach().requires_grad_()
    return jacobian.t() @ _second_derivative(loss(seen, targets), [seen]) @ jacobian


_HESSIANS = {"func": _hessian_by_func, "loops": _hessian_by_loops}


def _run(called: nn.Module, inputs: Any, names: list[str]) -> tuple[Tensor, list[Tensor]]:
    # A copy per run: train-mode statistics move during a forward, and the next run must not see that.
    called = copy.deepcopy(called)
    parameters = [dict(called.named_parameters())[name].requires_grad_() for name in names]
    return called(in_double(inputs)), parameters


def _second_derivative(value: Tensor, variables: list[Tensor]) -> Tensor:
    gradients = torch.autograd.grad(value, variables, create_graph=True, materialize_grads=True)
    return _rows(torch.cat([gradient.flatten() for gradient in gradients]), variables)


def _rows(values: Tensor, variables: list[Tensor]) -> Tensor:
    rows = []
    for entry in values:
        row = torch.autograd.grad(entry, variables, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in row]))
    return torch.stack(rows)
