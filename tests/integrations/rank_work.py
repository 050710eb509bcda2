"""What two ranks do. Each function imports what its work needs, and returns the work, which prints."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hessinit
from calls import call
from hessinit.integrations.callback import on_first_rank, share_weights


class Odd(nn.Module):
    """Weights and buffers of every kind."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.short = nn.Parameter(torch.randn(5).bfloat16())
        nan = [float("nan") if rank == 0 else 1.0]
        for name, buffer in (("switch", rank == 0), ("undefined", nan), ("empty", [])):
            self.register_buffer(name, torch.tensor(buffer))


def share() -> Callable[[], None]:
    def work() -> None:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        model, truth = Odd(rank), Odd(0).state_dict()
        kept = [parameter.data_ptr() for parameter in model.parameters()]
        share_weights(model)
        for name, tensor in model.state_dict().items():
            raw = [one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, truth[name])]
            assert torch.equal(*raw), name
        assert [parameter.data_ptr() for parameter in model.parameters()] == kept
        assert on_first_rank(lambda: 42, doing="counting") == (42 if rank == 0 else None)
        try:
            on_first_rank(lambda: [][3], doing="looking")
        except Exception as failure:
            print(f"{type(failure).__name__}: {failure}")
        torch.distributed.destroy_process_group()

    return work


def hash_weights(model: nn.Module) -> str:
    bits = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(bits)).hexdigest()


def train_twice(train: Callable[[Any], str], fine: Any, failing: Any) -> Callable[[], None]:
    """Print the digest of the initialized weights of one run, and the failure of another."""

    def work() -> None:
        warnings.simplefilter("ignore")
        print("weights", train(fine))
        try:
            train(failing)
        except BaseException as failure:
            print(f"failed {type(failure).__name__}: {failure}")

    return work


def check_results(callback: Any, before: list[torch.Tensor], model: nn.Module) -> None:
    assert torch.distributed.get_world_size() == 2
    is_first = torch.distributed.get_rank() == 0
    assert (callback.tracking is not None) == (callback.initialization is not None) == is_first
    assert not all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def fit_lightning() -> Callable[[], None]:
    import lightning.pytorch as lightning

    from hessinit.integrations.lightning_callback import CurvatureCallback
    from integrations.lightning_digits import LOSS, digits_module, loader, make_network, trainer_of

    class Digest(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if not index:
                self.digest = hash_weights(module)

    def train(loss: Any) -> str:
        callback, digest = CurvatureCallback(loss, every=1, initialize=True), Digest()
        module = digits_module(lightning, make_network())
        ranks = {"strategy": "ddp", "devices": 2}
        trainer = trainer_of(lightning, ".", callback, digest, **ranks, max_steps=2, barebones=False)
        before = [weight.clone() for weight in module.parameters()]
        trainer.fit(module, loader())
        check_results(callback, before, module)
        return digest.digest

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    return train_twice(train, LOSS, fail)


def train_transformer() -> Callable[[], None]:
    import transformers

    from hessinit.integrations.trainer_callback import CurvatureTrainerCallback
    from integrations.trainer_runs import trainer_of

    class Digest(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if not state.global_step:
                self.digest = hash_weights(model)

    def train(initialize: Any) -> str:
        callback, digest = CurvatureTrainerCallback(every=1, initialize=initialize), Digest()
        trainer = trainer_of(Path(), callback, digest, max_steps=2, ddp_backend="gloo")
        before = [weight.clone() for weight in trainer.model.parameters()]
        trainer.train()
        check_results(callback, before, trainer.model)
        return digest.digest

    def fail(problem: hessinit.Problem) -> hessinit.Initialization:
        parts = problem.model, problem.loss, problem.batch
        return call(hessinit.initialize_, *parts, target=-1, forward=problem.forward, distributed="each")

    return train_twice(train, True, fail)
