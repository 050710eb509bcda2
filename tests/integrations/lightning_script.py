"""Two ranks of Lightning's DDP: a run that initializes, and one whose loss fails on rank 0."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch

from hessinit.integrations.lightning_callback import CurvatureCallback
from integrations.lightning_digits import LOSS, digits_module, loader, make_network, trainer_of


class Watching(lightning.Callback):
    """The weights of this rank once they are initialized, before the first step."""

    digest = ""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if not index:
            bits = [tensor.numpy().tobytes() for tensor in module.state_dict().values()]
            self.digest = hashlib.sha256(b"".join(bits)).hexdigest()


def fail(*_: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def fit(loss: Any) -> str:
    callback, watching = CurvatureCallback(loss, every=1, initialize=True, dropout="freeze"), Watching()
    module = digits_module(lightning, make_network())
    trainer = trainer_of(
        lightning, ".", callback, watching, strategy="ddp", devices=2, max_steps=2, barebones=False
    )
    start = [weight.clone() for weight in module.parameters()]
    trainer.fit(module, loader())
    rank = torch.distributed.get_rank()
    assert (callback.tracking is not None) == (callback.initialization is not None) == (rank == 0)
    assert not all(torch.equal(one, other) for one, other in zip(start, module.parameters(), strict=True))
    return watching.digest


def main() -> None:
    warnings.simplefilter("ignore")
    said = [fit(LOSS)]
    rank = torch.distributed.get_rank()
    try:
        fit(fail)
    except BaseException as failure:
        said.append(f"{type(failure).__name__}: {failure}")
    Path(f"rank-{rank}.txt").write_text("\n".join(said))


if __name__ == "__main__":
    main()
