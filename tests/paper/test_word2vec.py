"""Word2vec: losses, gradients and steps by hand, curvature against dense fp64 autograd, and findings."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dense import dense_curvature, ends
from hessinit_paper.corpus import Corpus, Vocabulary
from hessinit_paper.experiments import PaperSetting, find_experiment
from hessinit_paper.reference import rank_correlation
from hessinit_paper.reproduction import Plain
from hessinit_paper.word2vec import MODELS, ROWS, SkipGram, draw_batches

SIZES = {"vocabulary": {"softmax": 20, "negative": 25}, "dimensions": (16, 64), "steps": 20}
EXPERIMENT = dataclasses.replace(find_experiment("word2vec"), **SIZES)
VOCABULARY, DIMENSION, PAIRS, NEGATIVES = 7, 3, 9, 2
WEIGHTS = ("centre.weight", "context.weight")
COUNTS = (400, 100, 50, 25, 20, 5)
models = pytest.mark.parametrize("kind", MODELS)


def tiny(kind: str, std: float) -> tuple[SkipGram, tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(3)
    model = SkipGram(VOCABULARY, DIMENSION, kind == "negative").double()
    for name in WEIGHTS:
        torch.nn.init.normal_(model.get_parameter(name), 0.0, std, generator=source)
    words = torch.randint(VOCABULARY, (PAIRS, 2 + NEGATIVES), generator=source)
    if kind == "softmax":
        return model, (words[:, 0], words[:, 1])
    labels = torch.zeros(PAIRS, 1 + NEGATIVES, dtype=torch.float64)
    labels[:, 0] = 1
    return model, (words, labels)


def loss_by_hand(kind: str, centre: Any, context: Any, words: Any, targets: Any) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row, target in zip(words.tolist(), targets.tolist(), strict=True):
        if kind == "softmax":
            scores = context @ centre[row]
            total = total + scores.exp().sum().log() - scores[target]
        else:
            for sign, other in zip([1, -1, -1], row[1:], strict=True):
                total = total + (1 + (-sign * (context[other] @ centre[row[0]])).exp()).log()
    return total / len(words)


@models
def test_a_step_is_the_rate_times_the_gradient_of_the_loss_by_hand(kind: str) -> None:
    model, batch = tiny(kind, std=0.8)
    before = [model.get_parameter(name).detach().clone().requires_grad_() for name in WEIGHTS]
    expected = loss_by_hand(kind, *before, *batch)
    assert model.train_([batch], 0.7) == [pytest.approx(expected.item(), rel=1e-12)]
    for name, old, gradient in zip(WEIGHTS, before, torch.autograd.grad(expected, before), strict=True):
        torch.testing.assert_close(model.get_parameter(name), old - 0.7 * gradient, rtol=1e-9, atol=1e-12)


@models
@pytest.mark.parametrize("std", [0.05, 1.0])
def test_measured_norms_are_those_of_the_dense_hessian(kind: str, std: float) -> None:
    model, batch = tiny(kind, std)
    exact, approximate = (dense_curvature(model, model.loss, batch, c) for c in ("hessian", "gauss-newton"))
    found = model.measure(batch, seed=0)
    for name in ("centre", "context"):
        assert found[name] == pytest.approx(ends(exact.layers[name]).norm, rel=0.01)
        # Bilinear: Gauss-Newton is exact in a block.
        torch.testing.assert_close(exact.layers[name], approximate.layers[name], rtol=1e-9, atol=1e-15)
    assert found["exact"] == pytest.approx(ends(exact.network).norm, rel=0.01)
    assert found["network"] == pytest.approx(ends(approximate.network).norm, rel=0.01)


def make_text() -> Corpus:
    source = np.random.default_rng(0)
    centres = source.integers(len(COUNTS), size=600)
    contexts = (centres + source.integers(1, 3, size=600)) % len(COUNTS)
    vocabulary = Vocabulary(tuple("abcdef"), COUNTS, sum(COUNTS))
    return Corpus(vocabulary, np.stack([centres, contexts], 1).astype(np.int32))


def batches(kind: str, steps: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(draw_batches(kind, make_text(), steps=steps, seed=0))


def test_every_pair_is_used_once_before_any_is_used_again() -> None:
    twice = torch.cat([torch.stack(batch, dim=1) for batch in batches("softmax", steps=12)])
    assert sorted(twice[:600].tolist()) == sorted(make_text().pairs.tolist())
    assert torch.equal(twice[600:], twice[:600])


def test_negatives_come_behind_the_same_pairs_and_follow_counts_to_the_power_three_quarters() -> None:
    for (words, targets), (rows, labels) in zip(batches("softmax"), batches("negative"), strict=True):
        assert torch.equal(rows[:, :2], torch.stack([words, targets], dim=1))
        assert labels.tolist() == [[1, 0, 0, 0, 0, 0]] * 100
    drawn = torch.cat([rows[:, 2:].flatten() for rows, _ in batches("negative", steps=200)])
    found = np.bincount(drawn.numpy(), minlength=len(COUNTS))
    weights = np.array(COUNTS) ** 0.75
    assert stats.chisquare(found, weights / weights.sum() * found.sum()).pvalue > 1e-3


@models
def test_training_lowers_the_loss_and_divergence_is_infinite_from_then_on(kind: str) -> None:
    some = batches(kind, steps=100)
    model = SkipGram(len(COUNTS), 4, kind == "negative")
    model.initialize_(some[0], "0.3", 1.0, seed=0)
    losses = model.train_(some, 3.0)
    # Two contexts follow each word with equal chances: no model can tell them apart.
    floor = math.log(2) if kind == "softmax" else 0.0
    assert floor < np.mean(losses[-10:]) < 0.75 * np.mean(losses[:3])
    model.initialize_(some[0], "3", 1.0, seed=0)
    diverged = model.train_(some, 1e30)
    assert math.isfinite(diverged[0])
    assert diverged[-1] == math.inf
    assert not any(map(math.isnan, diverged))
    assert len(diverged) == 100


@pytest.fixture
def setting(tmp_path: Path) -> PaperSetting:
    words = [a + b for a in "bdfgk" for b in ("alo", "ero", "imu", "obe", "uta")]
    chosen = random.Random(0)
    lines = [" ".join(chosen.choices(words, k=8)) + "." for _ in range(200)]
    (tmp_path / "wiki.txt").write_text("\n".join(lines), encoding="utf-8")
    return PaperSetting("word2vec", "wikipedia", "mean", (0,), str(tmp_path))


def run(setting: PaperSetting, key: str) -> Plain:
    job = next(job for job in EXPERIMENT.plan(setting) if job.key == key)
    return EXPERIMENT.run(setting, job.parameters)


@models
def test_jobs_give_the_same_json_every_time(setting: PaperSetting, kind: str) -> None:
    first, again, plain = (run(setting, f"{kind}-16-{row}-0") for row in ("hessinit", "hessinit", "0.03"))
    assert json.loads(json.dumps(first, allow_nan=False)) == first == again
    assert first["0.1"]["converged"]
    assert (bool(first["0.1"]["remark"]), plain["0.1"]["remark"]) == (True, "")
    assert plain["0.1"]["final"] < plain["0.025"]["final"] < plain["0.1"]["first"]


def invented(setting: PaperSetting, loss: Any) -> dict[str, Plain]:
    """Norms of 4·std² for the network; the final loss is a function of the std."""
    results = {}
    for job in EXPERIMENT.plan(setting):
        std = 1.0 if (row := job.parameters["row"]) == "hessinit" else float(row)
        norms = {"centre": std**2, "context": std, "network": 4 * std**2, "exact": 1.0 + std}
        results[job.key] = {rate: {**norms, "final": loss(std)} for rate in ("0.025", "0.1")}
    return results


@pytest.mark.parametrize(
    ("loss", "verdicts"),
    [
        (lambda std: abs(math.log(4 * std**2)), (4, 0)),  # the nearer ‖H‖ is to 1, the better
        (lambda std: -abs(math.log(4 * std**2)), (0, 4)),
        (lambda std: math.sin(50 * std), (0, 0)),
    ],
)
def test_findings_of_known_results(setting: PaperSetting, loss: Any, verdicts: tuple[int, int]) -> None:
    results = invented(setting, loss)
    findings = EXPERIMENT.conclude(setting, results)
    support, contradict = verdicts
    expected = f"Of 4 sweeps, each one model at one rate, {support} support and {contradict} contradict"
    assert findings.sentences[0].startswith(expected)
    assert findings.tables[0].cell("0.1", "‖H‖ network").ours == pytest.approx(0.04)
    assert findings.tables[0].cell("0.3", "loss at 0.1").ours == pytest.approx(loss(0.3))
    # The mean over a batch of 100 pairs and the rate for one pair: 100 and 0.1 · 100 times the norm.
    shifted = [abs(math.log(10 * 4 * float(row) ** 2)) for row in ROWS[:-1]]
    expected = rank_correlation(shifted * 2, [loss(float(row)) for row in ROWS[:-1]] * 2, blocks=2)
    assert findings.tables[3].cell("network", "ρ, lr·‖H‖").ours == expected.rho
