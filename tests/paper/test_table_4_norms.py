"""The Hessian norms of a std sweep against dense fp64 matrices, the law of std², and the clipped loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dense import dense_curvature, ends
from hessinit.paper.experiment import Setting
from hessinit.paper.minibatches import images_of
from hessinit.paper.networks import dense, glorot_, lenet, normal_
from hessinit.paper.std_sweep import measure_norms, restart_seed, start, start_norms
from hessinit.paper.table_4 import SWEEP, clipped_cross_entropy

DIGITS = Setting("table-4", "digits", "two-hidden", (0,))
CROSS_ENTROPY = nn.functional.cross_entropy
READING = SWEEP.variants["two-hidden"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny(std: float) -> nn.Sequential:
    model = dense([6, 5, 4, 3], "relu")
    glorot_(model, seeded())
    for number, name in enumerate(("dense1", "dense2")):
        normal_(model.get_submodule(name), std, seeded(number + 1))
    return model


def tiny_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(8, 6, generator=seeded(9)), torch.arange(8) % 3


@pytest.mark.parametrize("loss", [CROSS_ENTROPY, clipped_cross_entropy])
@pytest.mark.parametrize("std", [0.1, 2.0])
def test_dense_norms_are_the_largest_eigenvalues_of_the_dense_matrices(loss: object, std: float) -> None:
    found = measure_norms(tiny(std), loss, tiny_batch(), ("dense1", "dense2"))
    for kind, curvature in (("approximate", "gauss-newton"), ("exact", "hessian")):
        truth = dense_curvature(tiny(std), loss, tiny_batch(), curvature)
        expected = [ends(truth.layers[name]).norm for name in ("dense1", "dense2")]
        assert min(expected) > 0
        assert found[kind] == pytest.approx(expected, rel=1e-3)
        if kind == "approximate":
            assert found["network"] == pytest.approx(ends(truth.network).norm, rel=1e-3)


def test_kernel_norms_are_the_largest_eigenvalues_of_the_dense_matrices() -> None:
    model = lenet((1, 8, 8), channels=(2, 3), pool="max", head=(4,), activation="relu")
    glorot_(model, seeded())
    batch = images_of(DIGITS).batch(torch.arange(5), flat=False)
    found = measure_norms(model, CROSS_ENTROPY, batch, ("conv1", "conv2"))
    for kind, curvature in (("approximate", "gauss-newton"), ("exact", "hessian")):
        truth = dense_curvature(model, CROSS_ENTROPY, batch, curvature, layers=["conv1", "conv2"])
        expected = [ends(truth.layers[name]).norm for name in ("conv1", "conv2")]
        assert found[kind] == pytest.approx(expected, rel=1e-3)


def test_measuring_leaves_the_weights_in_single_precision_as_they_were() -> None:
    model = tiny(0.1)
    before = [weight.detach().clone() for weight in model.parameters()]
    measure_norms(model, CROSS_ENTROPY, tiny_batch(), ("dense1", "dense2"))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("variant", ["two-hidden", "one-hidden"])
def test_norms_grow_as_the_square_of_the_std(variant: str) -> None:
    found = [
        start_norms(SWEEP.variants[variant], images_of(DIGITS), row, seed=3)["approximate"]
        for row in ("0.002", "0.006")
    ]
    assert [large / small for small, large in zip(*found, strict=True)] == pytest.approx([9, 9], rel=0.01)


def test_the_rows_of_a_seed_are_the_same_numbers_scaled() -> None:
    small, large = (start(READING, images_of(DIGITS), row, seed=1) for row in ("0.100", "0.500"))
    for name in READING.swept:
        torch.testing.assert_close(
            5 * small.get_parameter(f"{name}.weight"), large.get_parameter(f"{name}.weight")
        )
    assert torch.equal(small.dense3.weight, large.dense3.weight)
    assert small.dense1.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert not any(large.get_parameter(f"dense{number}.bias").any() for number in (1, 2, 3))


def test_the_layers_of_a_start_and_its_restarts_are_independent() -> None:
    images = images_of(DIGITS)
    first, second = (start(READING, images, "0.100", restart_seed(0, number)) for number in (0, 1))
    assert not torch.equal(first.dense1.weight, second.dense1.weight)
    assert not torch.equal(first.dense1.weight, first.dense2.weight)
    assert restart_seed(0, 0) == 0
    assert len({restart_seed(seed, number) for seed in range(5) for number in range(10)}) == 50


def test_our_own_start_brings_the_network_near_the_target_of_the_rate() -> None:
    found = start_norms(READING, images_of(DIGITS), "hessinit", seed=0)
    assert 200 < found["network"] < 800  # κ / lr = 400 on a batch of its own


def test_the_clipped_loss_is_the_logarithm_of_the_clipped_softmax() -> None:
    outputs = torch.tensor([[2.0, 1.0, 0.0], [30.0, 0.0, 0.0], [0.0, 30.0, 0.0]], dtype=torch.float64)
    outputs.requires_grad_()
    value = clipped_cross_entropy(outputs, torch.tensor([1, 0, 0]))
    usual = -math.log(math.exp(1) / (math.exp(2) + math.exp(1) + 1))
    expected = (usual - math.log(1 - 1e-7) - math.log(1e-7)) / 3
    assert value.item() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(value, outputs)
    softmax = torch.softmax(outputs[0], 0) - torch.tensor([0, 1, 0])
    torch.testing.assert_close(gradient[0], softmax / 3)
    assert not gradient[1:].any()  # the right answer and the wrong one: both beyond a limit


def test_a_start_whose_examples_are_all_clipped_has_no_curvature() -> None:
    model = tiny(1.0)
    with torch.no_grad():
        model.dense3.bias.copy_(torch.tensor([100.0, 0.0, 0.0]))
    found = measure_norms(model, clipped_cross_entropy, tiny_batch(), ("dense1", "dense2"))
    assert found == {"approximate": [0.0, 0.0], "exact": [0.0, 0.0], "network": 0.0}
    truth = dense_curvature(model, clipped_cross_entropy, tiny_batch(), "hessian")
    assert not truth.network.any()
