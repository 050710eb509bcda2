"""Models that FSDP2 has sharded: the part of a rank, their state at rest, and what is refused."""

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
    if not isinstance(model, nn.Module):
        return False
    return any(map(_is_fsdp2, model.modules())) or any(map(is_dtensor, model.parameters()))


def is_dtensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor"


def _is_fsdp2(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, on the same memory: all of a plain one."""
    part: Any = tensor.detach()
    return part.to_local() if is_dtensor(part) else part


def reshard(model: nn.Module) -> None:
    """Bring a model of FSDP2 to rest, each rank with its shards, also after an exception."""
    modules: list[Any] = [module for module in model.modules() if _is_fsdp2(module)]
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
    """The tensors that take the place of shards in a forward, by name; they are empty until then.

    One layer is gathered at a time.
    """
    gathered: dict[str, Tensor] = dict(model.named_parameters())
    modules: list[Any] = [module for module in model.modules() if _is_fsdp2(module)]
    for module in modules:
        module.unshard()
        now = model.named_parameters()
        gathered |= {name: weight for name, weight in now if not is_dtensor(weight)}
        module.reshard()
    return gathered


def in_shape_of(tensor: Tensor) -> Tensor:
    """A copy; of a sharded tensor zeros of its whole shape, which take no memory."""
    if not is_dtensor(tensor):
        return tensor.detach().clone()
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


@contextlib.contextmanager
def without_gathering(model: nn.Module) -> Iterator[None]:
    """Let the forward use the weights that it finds in the modules, without FSDP2's hooks."""
    modules = model.modules()
    tables: list[Any] = [
        table for part in modules for table in (part._forward_pre_hooks, part._forward_hooks)
    ]
    hooks = [dict(table) for table in tables]
    try:
        for table in tables:
            for key, hook in list(table.items()):
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    del table[key]
        yield
    finally:
        for table, entries in zip(tables, hooks, strict=True):
            table.clear()
            table.update(entries)


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
    """Return the mesh of a model that FSDP2 has sharded over all ranks; refuse other ways."""
    mesh: Any = None
    for name, module in model.named_modules():
        if _is_fsdp2(module) and _is_offloaded(module):
            raise ProblemError(
                f"{name or 'the model'} keeps its weights on the CPU (CPUOffloadPolicy), and they "
                "are moved where they are; leave offload_policy= out of fully_shard."
            )
    for name, parameter in model.named_parameters():
        paths = [name.rpartition(".")[0]]
        while paths[-1]:
            paths.append(paths[-1].rpartition(".")[0])
        if not any(_is_fsdp2(model.get_submodule(path)) for path in paths):
            _refuse_beside_fsdp2(name, parameter)
        elif is_dtensor(parameter):
            sharded: Any = parameter
            _check_mesh(name, sharded, ranks)
            mesh = mesh or sharded.device_mesh
            if sharded.device_mesh != mesh:
                raise ProblemError(
                    f"{name} is sharded over the ranks {sharded.device_mesh.mesh.tolist()}, and "
                    f"weights before it over {mesh.mesh.tolist()}; pass one mesh to every "
                    "fully_shard."
                )
        elif parameter.requires_grad:
            _refuse_beside_fsdp2(name, parameter)
    return mesh


def _is_offloaded(module: Any) -> bool:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    policies = [getattr(group, "offload_policy", None) for group in groups]
    return any(type(policy).__name__ == "CPUOffloadPolicy" for policy in policies)


def _refuse_beside_fsdp2(name: str, parameter: Tensor) -> None:
    if is_dtensor(parameter):
        raise ProblemError(
            f"{name} is a DTensor outside of fully_shard, as of tensor parallelism "
            f"(parallelize_module): its ranks need the same examples. {_PLAIN_MODEL}"
        )
    if parameter.requires_grad:
        raise ProblemError(
            f"{name} is trained and not sharded, beside weights that are: nothing averages its "
            "gradients over the ranks. Call fully_shard on the whole model, too."
        )


def _check_mesh(name: str, parameter: Any, ranks: int) -> None:
    mesh = parameter.device_mesh
    if mesh.ndim != 1:
        raise ProblemError(
            f"{name} is sharded over a mesh of {mesh.ndim} dimensions, {tuple(mesh.shape)}, as of "
            "HSDP or with tensor parallelism; pass fully_shard a mesh of one dimension. "
            f"{_PLAIN_MODEL}"
        )
    if mesh.size() != ranks:
        raise ProblemError(
            f"{name} is sharded over {mesh.size()} of the {ranks} ranks of this job; call "
            "init_process_group in a job of these ranks alone, or pass fully_shard a mesh of all."
        )
