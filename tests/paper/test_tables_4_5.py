"""Tables 4 and 5: norms against dense fp64 matrices, recorded trainings, and findings from known results."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
import torch
from torch import nn

from dense import dense_curvature, ends
from hessinit.jobs import Job
from hessinit_paper.experiments import PaperSetting, find_experiment, run_job
from hessinit_paper.images import load_images
from hessinit_paper.networks import dense, glorot_, lenet
from hessinit_paper.reproduction import Plain
from hessinit_paper.tables_4_5 import clipped_cross_entropy, measure_norms

TABLE_4, TABLE_5 = find_experiment("table-4"), find_experiment("table-5")
MNIST = PaperSetting("table-4", "mnist", "two-hidden", (0, 1, 2))
CROSS_ENTROPY = nn.functional.cross_entropy
NETWORK = TABLE_4.variants["two-hidden"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny(std: float) -> nn.Sequential:
    model = dense([6, 5, 4, 3], "relu")
    glorot_(model, seeded())
    for number, name in enumerate(("dense1", "dense2")):
        nn.init.normal_(model.get_parameter(f"{name}.weight"), 0.0, std, generator=seeded(number + 1))
    return model


def tiny_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(8, 6, generator=seeded(9)), torch.arange(8) % 3


def check_norms(model: nn.Module, loss: object, batch: tuple[torch.Tensor, ...], *layers: str) -> None:
    before = [weight.detach().clone() for weight in model.parameters()]
    found = measure_norms(model, loss, batch, layers)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    for kind, curvature in (("approximate", "gauss-newton"), ("exact", "hessian")):
        truth = dense_curvature(model, loss, batch, curvature)
        expected = [ends(truth.layers[name]).norm for name in layers]
        assert min(expected) > 0
        assert found[kind] == pytest.approx(expected, rel=1e-3)
        if kind == "approximate":
            assert found["network"] == pytest.approx(ends(truth.network).norm, rel=1e-3)


@pytest.mark.parametrize("loss", [CROSS_ENTROPY, clipped_cross_entropy])
def test_norms_are_the_largest_eigenvalues_of_the_dense_matrices(loss: object) -> None:
    for std in (0.1, 2.0):
        check_norms(tiny(std), loss, tiny_batch(), "dense1", "dense2")
    kernels = lenet((1, 8, 8), channels=(2, 3), pool="max", head=(4,), activation="relu")
    glorot_(kernels, seeded())
    check_norms(kernels, loss, load_images("digits").batch(torch.arange(5), flat=False), "conv1", "conv2")


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
    model = tiny(1.0)
    with torch.no_grad():
        model.dense3.bias.copy_(torch.tensor([100.0, 0.0, 0.0]))
    found = measure_norms(model, clipped_cross_entropy, tiny_batch(), ("dense1", "dense2"))
    assert found == {"approximate": [0.0, 0.0], "exact": [0.0, 0.0], "network": 0.0}


# Seed 0 on the digits, as recorded before: the first initialization's norms, and training losses.
NORMS = [
    (TABLE_4, "two-hidden", "hessinit", [392.2309, 0.08507039], 392.3588),
    (TABLE_4, "clipped", "1.000", [5.946858, 6.49465], 273.9542),
    (TABLE_5, "lenet-5", "hessinit", [0.3036393, 1.036772], 424.361),
]


@pytest.mark.parametrize(("table", "variant", "row", "norms", "network"), NORMS)
def test_norms_are_the_recorded_ones(table, variant: str, row: str, norms: list[float], network) -> None:
    found = table.variants[variant].measure(load_images("digits"), row, 0)
    assert found["approximate"] == pytest.approx(norms, rel=1e-3)
    assert found["network"] == pytest.approx(network, rel=1e-3)


def test_a_training_gives_the_recorded_loss() -> None:
    setting = PaperSetting("table-4", "digits", "two-hidden", (0,))
    training = run_job(Job("", (setting, {"part": "training", "row": "0.100", "seed": 0})))["value"]
    assert training["training loss"] == pytest.approx(0.3246669, rel=1e-2)


def invented(losses: dict[str, list[Plain]]) -> dict[str, Plain]:
    """Results whose conclusions are known: norms 100 and 200 times std², exact ones 1 % above."""
    results: dict[str, Plain] = {}
    for row in TABLE_4.rows:
        square = 4 if row == "hessinit" else float(row) ** 2
        for seed in MNIST.seeds:
            spread = 1 + 0.1 * seed
            first, second = 100 * square * spread, 200 * square * spread
            results[f"norms {row} seed {seed}"] = {
                "approximate": [[first, second], [first, second]],
                "exact": [[1.01 * first, 1.01 * second]] * 2,
                "network": [first + second] * 2,
            }
            loss = losses[row][seed]
            curve = [2.0 + seed, 1.0 + seed] if isinstance(loss, float) else [2.0, "inf"]
            results[f"training {row} seed {seed}"] = {"steps": 3750, "training loss": loss, "curve": curve}
    return results


def usual_losses() -> dict[str, list[Plain]]:
    means = dict(zip(TABLE_4.stds, [8.0, 1.2, 0.3, 0.32, 0.4, 0.5], strict=True))
    losses = {row: [mean + 0.001 * seed for seed in MNIST.seeds] for row, mean in means.items()}
    return {**losses, "hessinit": [0.2, 0.21, 0.19]}


def test_findings_of_known_results() -> None:
    findings = TABLE_4.conclude(MNIST, invented(usual_losses()))
    table, scaling, together = findings.tables
    loss, norm = table.cell("0.100", "Training loss"), table.cell("0.100", "Hessian 2")
    assert (loss.ours, loss.n) == (pytest.approx(0.301), 3)
    assert loss.error == pytest.approx(0.001 / math.sqrt(3))
    assert (norm.ours, norm.n) == (pytest.approx(2.2), 6)
    assert norm.error == pytest.approx(statistics.stdev([2.0, 2.0, 2.2, 2.2, 2.4, 2.4]) / math.sqrt(6))
    assert table.cell("0.100", "exact 1").ours == pytest.approx(1.01 * 1.1)
    assert scaling.cell("power of the std", "Hessian 2 / std²").ours == pytest.approx(2)
    assert together.cell("hessinit", "lr · network").ours == pytest.approx(0.01 * 4 * 300 * 1.1)
    best, ranks, ours = findings.sentences
    assert "0.100 ends with the lowest training loss, 0.301 ± 0.0006 (n = 3)." in best
    assert "are 1.1 and 2.2, within a factor of 2.2 of it" in best
    # |ln ‖H‖| of the first weight: 4.7 3.3 0.1 0.5 1.3 5.9, ranks 5 4 1 2 3 6 against 6 5 1 2 3 4.
    assert "ρ = 0.83 (p = 0.058) for the first weight" in ranks
    assert "ends with 0.2 ± 0.006 (n = 3); the difference from std 0.100" in ours
    assert "is -0.101 ± 0.006, seed by seed" in ours
    curve = findings.figures[0].curves[0]
    assert (curve.name, curve.x, curve.y) == ("std 1.000", (31.5, 94.5), (3.0, 2.0))  # chunks of 63 steps
    assert curve.error == pytest.approx([1 / math.sqrt(3)] * 2)


def test_a_training_that_broke_off_no_curvature_and_one_seed_do_not_stop_the_conclusion() -> None:
    results = invented({**usual_losses(), "1.000": [8.0, "nan", "inf"]})
    findings = TABLE_4.conclude(MNIST, results)
    cell, curve = findings.tables[0].cell("1.000", "Training loss"), findings.figures[0].curves[0]
    assert (math.isfinite(cell.ours), cell.within) == (False, False)
    assert "ρ = 0.83" in findings.sentences[1]  # it ranks last
    assert (curve.x, curve.y) == ((31.5,), (2.0,))  # up to where the first seed broke off
    flat = {"approximate": [[0.0, 0.0]] * 2, "exact": [[0.0, 0.0]] * 2, "network": [0.0] * 2}
    findings = TABLE_4.conclude(MNIST, results | {f"norms 0.100 seed {seed}": flat for seed in MNIST.seeds})
    assert findings.tables[0].cell("0.100", "Hessian 1").ours == 0
    assert math.isnan(findings.tables[1].cell("power of the std", "Hessian 1 / std²").ours)
    alone = TABLE_4.conclude(dataclasses.replace(MNIST, seeds=(0,)), invented(usual_losses()))
    assert alone.figures[0].curves[0].error is None
    assert "nan" not in " ".join(alone.sentences)
