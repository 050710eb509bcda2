"""On a GPU: the numbers of the CPU, training unchanged, and no wait for a loss that nobody reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from training_loops import batches, tracked, train

import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize("fused", [False, True])
def test_points_on_the_gpu_are_those_on_the_cpu(fused: bool) -> None:
    ends = []
    for device in ("cpu", "cuda"):
        model = tiny.network(device=device, dtype=torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused and device == "cuda")
        doubles = [(inputs.double().to(device), targets.to(device)) for inputs, targets in batches(5)]
        batch = tiny.batch()[0].double(), tiny.batch()[1]  # on the CPU, whatever the model's device
        tracker = tracked(model, batch, optimizer, each_layer=True, tolerance=1e-6)
        train(model, doubles, optimizer, tracker)
        ends.append(tracker.close())
    for one, other in zip(*(tracking.points for tracking in ends), strict=True):
        assert one.norm == pytest.approx(other.norm, rel=1e-5)
        assert one.lr_over_limit == pytest.approx(other.lr_over_limit, rel=1e-5)
        assert one.layers == pytest.approx(other.layers, rel=1e-5)
    assert [loss for _, loss in ends[0].losses] == pytest.approx([loss for _, loss in ends[1].losses])


def test_a_loss_on_the_gpu_is_not_read_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = tracked(tiny.network(device="cuda"), tiny.batch(), every=100)
    reads: list[int] = []
    plain = Tensor.__float__
    monkeypatch.setattr(Tensor, "__float__", lambda tensor: reads.append(1) or plain(tensor))
    buffer = torch.zeros((), device="cuda")
    for step in range(5):
        buffer.fill_(step)  # used again, as under CUDA graphs
        tracker.step(buffer)
    assert not reads
    assert tracker.close().losses == tuple((step + 1, float(step)) for step in range(5))


def test_training_on_the_gpu_is_unchanged() -> None:
    ends = []
    for follows in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Dropout(0.3), tiny.network()).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pairs = [(inputs.cuda(), targets.cuda()) for inputs, targets in batches(6)]
        train(model, pairs, optimizer, tracked(model, pairs[0], optimizer) if follows else None)
        ends.append(model[1][0].weight)
    assert torch.equal(*ends)
