"""Models that FSDP2 has sharded: the part that a rank holds, the state at rest, and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError

# All are recognized by name: importing their classes would take seconds.
_PLAIN_MODEL = (
    "Measure or initialize before the model is sharded, or copy the full weights into a plain "
    "model (get_model_state_dict of torch.distributed.checkpoint.state_dict, full_state_dict=True)."
)


def is_sharded(model: Any) -> bool:
    """Whether a model holds DTensors, or is FSDP2's, whose weights may be gathered just now."""
    return isinstance(model, nn.Module) and (
        any(map(_is_fsdp2, model.modules())) or any(map(is_dtensor, model.parameters()))
    )


def is_dtensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor"


def _is_fsdp2(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory; all of a plain tensor."""
    part: Any = tensor.detach()
    return part.to_local() if is_dtensor(part) else part


def reshard(*models: nn.Module) -> None:
    """Let FSDP2 free the weights that it has gathered, also after an exception in a forward."""
    modules: list[Any] = [
        module for model in models for module in model.modules() if _is_fsdp2(module)
    ]
    for module in modules:
        state = module._get_fsdp_state()
        if state._is_root and hasattr(module, "reset_iter_state"):  # since torch 2.12
            module.reset_iter_state()
        module.reshard()


def shard_of(whole: Tensor, parameter: Any) -> Tensor:
    """The part of a whole weight that this rank holds of the sharded parameter."""
    (placement,) = parameter.placements
    rank = parameter.device_mesh.get_local_rank()
    pieces = whole.chunk(parameter.device_mesh.size(), placement.dim)
    return pieces[rank] if rank < len(pieces) else whole.narrow(placement.dim, 0, 0)


def gathered_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that take the place of the shards in a forward, by name; empty until then.

    One layer is gathered at a time.
    """
    gathered: dict[str, Tensor] = dict(model.named_parameters())
    modules: list[Any] = [module for module in model.modules() if _is_fsdp2(module)]
    for module in modules:
        module.unshard()
        gathered |= {
            name: weight for name, weight in model.named_parameters() if not is_dtensor(weight)
        }
        module.reshard()
    return gathered


def in_shape_of(tensor: Tensor) -> Tensor:
    """A copy of a tensor; for a sharded one, zeros of the whole shape, which take no memory."""
    if not is_dtensor(tensor):
        return tensor.detach().clone()
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


@contextlib.contextmanager
def without_gathering(model: nn.Module) -> Iterator[None]:
    """Turn off FSDP2's hooks, so that the forward uses the weights that are in the modules."""
    saved: list[tuple[Any, dict[int, Any]]] = [
        (table, dict(table))
        for module in model.modules()
        for table in (module._forward_pre_hooks, module._forward_hooks)
    ]
    try:
        for table, hooks in saved:
            for key, hook in hooks.items():
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    del table[key]
        yield
    finally:
        for table, hooks in saved:
            table.clear()
            table.update(hooks)


def check_whole_weights(model: nn.Module) -> None:
    """Refuse a model of which a rank holds only a part of the weights."""
    # DeepSpeed marks its parameters by `ds_id`.
    other_shards = ("FullyShardedDataParallel", "ShardedTensor")
    for name, part in [*model.named_modules(), *model.named_parameters()]:
        by_fsdp2 = is_dtensor(part) or _is_fsdp2(part)
        if by_fsdp2 or type(part).__name__ in other_shards or hasattr(part, "ds_id"):
            way_out = 'With FSDP2, pass distributed="batch" on every rank. ' if by_fsdp2 else ""
            raise ProblemError(
                f"{name or 'the model'} is sharded: a rank holds only a part of the weights. "
                f"{way_out}{_PLAIN_MODEL}"
            )


def find_mesh(model: nn.Module, ranks: int) -> Any:
    """Return the mesh of a model that FSDP2 has sharded over all ranks; refuse any other model."""
    mesh: Any = None
    modules: dict[str, Any] = dict(model.named_modules())
    sharded = {name: module for name, module in modules.items() if _is_fsdp2(module)}
    for name, module in sharded.items():
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        policies = [getattr(group, "offload_policy", None) for group in groups]
        if any(type(policy).__name__ == "CPUOffloadPolicy" for policy in policies):
            raise ProblemError(
                f"{name or 'the model'} keeps its weights on the CPU (CPUOffloadPolicy), which is "
                "not supported; leave offload_policy= out of fully_shard."
            )
        for factor in [getattr(group, "gradient_divide_factor", None) for group in groups]:
            if factor is not None:
                raise ProblemError(
                    f"{name or 'the model'} divides its gradients by {factor:g}, and they must "
                    "be means over the ranks here; call set_gradient_divide_factor afterwards."
                )
    prefixes = tuple(f"{name}.".lstrip(".") for name in sharded)
    parameter: Any
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter) and name.startswith(prefixes):
            _check_mesh(name, parameter.device_mesh, ranks)
            mesh = mesh or parameter.device_mesh
            if parameter.device_mesh != mesh:
                raise ProblemError(
                    f"{name} is sharded over the ranks {parameter.device_mesh.mesh.tolist()}, and "
                    f"the weights before it over {mesh.mesh.tolist()}; pass the same mesh to every "
                    "fully_shard."
                )
        elif is_dtensor(parameter):
            raise ProblemError(
                f"{name} is a DTensor outside of fully_shard, as in tensor parallelism "
                f"(parallelize_module), whose ranks need the same examples. {_PLAIN_MODEL}"
            )
        elif parameter.requires_grad:
            raise ProblemError(
                f"{name} is trained but not sharded, unlike other weights: nothing averages its "
                "gradients over the ranks. Call fully_shard on the whole model, too."
            )
    return mesh


def _check_mesh(name: str, mesh: Any, ranks: int) -> None:
    if mesh.ndim != 1:
        raise ProblemError(
            f"{name} is sharded over a mesh of {mesh.ndim} dimensions, {tuple(mesh.shape)}, as in "
            "HSDP or tensor parallelism; pass fully_shard a mesh of one dimension. "
            f"{_PLAIN_MODEL}"
        )
    if mesh.size() != ranks:
        raise ProblemError(
            f"{name} is sharded over {mesh.size()} of the {ranks} ranks of this job; start a job "
            "of these ranks alone, or pass fully_shard a mesh of all ranks."
        )
