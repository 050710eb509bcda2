"""Two ranks of the Trainer: a run that initializes, and one whose initialization fails on rank 0."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from hessinit.integrations.trainer_callback import CurvatureTrainerCallback
from integrations.trainer_runs import trainer_of


class Watching(transformers.TrainerCallback):
    """The weights of this rank once they are initialized, before the first step."""

    digest = ""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not state.global_step:
            bits = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
            self.digest = hashlib.sha256(b"".join(bits)).hexdigest()


def train(initialize: Any) -> str:
    callback, watching = CurvatureTrainerCallback(every=1, initialize=initialize), Watching()
    trainer = trainer_of(Path(), callback, watching, max_steps=2, ddp_backend="gloo")
    start = [weight.clone() for weight in trainer.model.parameters()]
    trainer.train()
    assert torch.distributed.get_world_size() == 2
    first = torch.distributed.get_rank() == 0
    assert (callback.tracking is not None) == (callback.initialization is not None) == first
    weights = trainer.model.parameters()
    assert not all(torch.equal(one, other) for one, other in zip(start, weights, strict=True))
    return watching.digest


def main() -> None:
    warnings.simplefilter("ignore")
    said = [train(True)]
    rank = torch.distributed.get_rank()
    try:
        train({"target": -1})
    except BaseException as failure:
        said.append(f"{type(failure).__name__}: {failure}")
    Path(f"rank-{rank}.txt").write_text("\n".join(said))


if __name__ == "__main__":
    main()
