"""From a user's arguments to an `Experiment`, everything checked."""

from __future__ import annotations

from typing import Any

from hessinit.comparing.arguments import check_problem, read_device
from hessinit.comparing.batching import read_data
from hessinit.comparing.experiment import Experiment, TorchSettings
from hessinit.comparing.optimizers import check_optimizer
from hessinit.comparing.starts import Start
from hessinit.problem.validate import check_whole


def prepare(
    kind: str,
    build: Any,
    loss: Any,
    data: Any,
    *,
    starts: tuple[Start, ...],
    steps: int,
    batch_size: Any,
    optimizer: Any,
    forward: Any,
    device: Any,
) -> Experiment:
    """Check what all runs share, and put it together."""
    check_problem(build, loss, forward)
    check_optimizer(optimizer)
    return Experiment(
        kind=kind,
        build=build,
        loss=loss,
        data=read_data(data, check_whole("batch_size", batch_size, at_least=1), steps),
        forward=forward,
        starts=starts,
        steps=steps,
        optimizer=optimizer,
        device=read_device(device),
        settings=TorchSettings.of_this_process(),
    )
