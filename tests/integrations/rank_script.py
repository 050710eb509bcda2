"""Run as two ranks: share weights of every kind, then a failure; says on each rank what it got."""

from __future__ import annotations

import torch
from torch import nn

from hessinit.integrations.callback import on_first_rank, share_weights


class Odd(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.plain = nn.Linear(3, 2)
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.short = nn.Parameter(torch.randn(5).bfloat16())
        self.register_buffer("switch", torch.tensor(rank == 0))
        self.register_buffer("count", torch.tensor(7 + rank))
        self.register_buffer("undefined", torch.tensor([float("nan") if rank == 0 else 1.0]))
        self.register_buffer("empty", torch.zeros(0))


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = Odd(rank)
    kept = [parameter.data_ptr() for parameter in model.parameters()]
    share_weights(model)
    truth = Odd(0)
    for (name, tensor), expected in zip(model.state_dict().items(), truth.state_dict().values(), strict=True):
        raw = [one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, expected)]
        assert torch.equal(*raw), name
    assert [parameter.data_ptr() for parameter in model.parameters()] == kept
    assert on_first_rank(lambda: 42, model, doing="counting") == (42 if rank == 0 else None)
    try:
        on_first_rank(lambda: [][3], model, doing="looking")
    except Exception as failure:
        print(f"rank {rank}: {type(failure).__name__}: {failure}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
