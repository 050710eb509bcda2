"""A problem from a model of logits: the model's own loss, and the curvature of dense fp64 matrices."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hessinit
from calls import call
from dense import DenseCurvature, dense_curvature, ends
from hessinit.integrations.logits import logits_problem
from integrations.tiny_transformers import NAMES, model_and_batch
from tiny import Net


def value_of(problem: hessinit.Problem) -> Tensor:
    inputs, targets = problem.batch
    return problem.loss(problem.forward(problem.model, inputs), targets)


def dense_truth(problem: hessinit.Problem, curvature: str, **options: Any) -> DenseCurvature:
    # Older Transformers fill a mask of the default dtype with the least number of the model's dtype.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        parts = problem.model, problem.loss, problem.batch
        return dense_curvature(*parts, curvature, forward=problem.forward, **options)
    finally:
        torch.set_default_dtype(before)


SOME = ["GPT-2", "masked BERT", "several labels", "T5", "Whisper", "ViT"]  # GPT-2's embeddings are tied


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.sweep) for name in NAMES]
)
def test_the_loss_is_the_models_own_and_norms_are_those_of_dense_matrices(name: str) -> None:
    model, batch = model_and_batch(name)
    problem = logits_problem(model, batch)
    assert value_of(problem).item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    report = hessinit.measure(problem)
    truth = dense_truth(problem, "gauss-newton")
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-3)
    for row in report.layers:
        assert row.norm == pytest.approx(ends(truth.layers[row.name]).norm, rel=1e-3, abs=1e-7), row.name


def test_the_exact_hessian_needs_no_other_attention() -> None:
    problem = logits_problem(*model_and_batch("GPT-2"))
    report = hessinit.measure(problem, curvature="hessian")
    truth = dense_truth(problem, "hessian", hessian_by="loops")
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-3)


def test_a_causal_model_without_labels_predicts_its_own_tokens_but_no_padding() -> None:
    model, batch = model_and_batch("GPT-2")
    labels = batch.pop("labels")
    inputs, targets = logits_problem(model, batch).batch
    assert "labels" not in inputs
    assert targets.tolist() == [[*row[1:], -100] for row in labels.tolist()]
    assert (targets == -100).sum() == 3 + 2  # the last of each, and the padding of the third
    del batch["attention_mask"]
    assert (logits_problem(model, batch).batch[1] == -100).sum() == 3


def test_what_a_tokenizer_returns_is_accepted_and_batches_are_averaged_over_their_examples() -> None:
    from transformers import BatchEncoding

    model, whole = model_and_batch("BERT classifier")
    extra = {"special_tokens_mask": torch.zeros(3, 5), "length": torch.full((3,), 5), "token_type_ids": None}
    parts = [{name: tensor[at] for name, tensor in whole.items()} for at in (slice(0, 1), slice(1, 3))]
    norms = []
    for batch in (whole, BatchEncoding({**whole, **extra}), parts, iter(parts)):
        norms.append(hessinit.measure(logits_problem(model, batch)).network.norm)
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-3)


def answer_span(model: nn.Module, inputs: Any) -> Tensor:
    """The logits of both ends, (examples, 2, tokens)."""
    output = model(**inputs)
    return torch.stack([output.start_logits, output.end_logits], dim=1)


def test_question_answering_is_refused_and_what_the_refusal_says_gives_dense_truth() -> None:
    model, batch = model_and_batch("question answering")
    with pytest.raises(hessinit.ProblemError, match="as question answering, call hessinit.measure"):
        logits_problem(model, batch)
    targets = torch.stack([batch.pop("start_positions"), batch.pop("end_positions")], dim=1)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    own = model(**batch, start_positions=targets[:, 0], end_positions=targets[:, 1]).loss
    problem = hessinit.Problem(model, loss, (batch, targets), forward=answer_span)
    report = hessinit.measure(problem)
    truth = dense_truth(problem, "gauss-newton")
    assert report.loss == pytest.approx(own.item(), rel=1e-6)
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-3)


def test_a_decoder_that_makes_no_inputs_of_labels_is_refused() -> None:
    model = Net(lambda net, input_ids: input_ids, head=nn.Linear(2, 2))
    batch = {"input_ids": torch.ones(3, 5).long()}
    with pytest.raises(hessinit.ProblemError, match="the batch has no 'decoder_input_ids'.*Add them"):
        logits_problem(model, {**batch, "labels": batch["input_ids"]}, task="seq2seq-lm")


def test_nothing_about_the_model_changes() -> None:
    model, batch = model_and_batch("BERT classifier")
    model.bert.pooler.train()  # some in eval mode, some not
    modes = [module.training for module in model.modules()]
    settings, weights = model.config.to_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    hessinit.measure(logits_problem(model, batch))
    assert model.config.to_dict() == settings
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert [module.training for module in model.modules()] == modes


class Restless(nn.Module):
    """Has a loss of its own; counts its calls in every way, and draws numbers in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.calls += 1
        self.count += 1
        self.called = torch.rand(1)
        logits = self.layer(x)
        return SimpleNamespace(loss=2 * nn.functional.cross_entropy(logits, labels), logits=logits)


def test_the_look_at_the_models_own_loss_leaves_it_as_found() -> None:
    model, batch = Restless(), {"x": torch.ones(2, 4), "labels": torch.tensor([0, 2])}
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(hessinit.ProblemError, match="Restless's own loss of this batch"):
        logits_problem(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.calls, model.training, hasattr(model, "called")) == (0, True, False)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


KINDS: dict[str, Any] = {
    "zero": lambda logits, labels: torch.zeros(()),
    "square": lambda logits, labels: logits.square().mean(),
    "same token": lambda logits, labels: nn.functional.cross_entropy(logits.mT, labels),
    "next token": lambda logits, labels: nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:]),
}


@pytest.mark.parametrize(
    ("name", "own", "ours"), [("one class", "zero", "square"), ("BART's decoder", "same token", "next token")]
)
def test_a_model_with_another_loss_is_refused_with_both_numbers(name: str, own: str, ours: str) -> None:
    model, batch = model_and_batch(name)
    logits = model(**{**batch, "labels": None}).logits
    both = [KINDS[kind](logits, batch["labels"]).item() for kind in (own, ours)]
    with pytest.raises(hessinit.ProblemError, match="with the loss that you train") as refused:
        logits_problem(model, batch)
    said = re.findall(r"(?:is|'[a-z-]+') ([\d.]+(?:e-\d+)?)[,:]", str(refused.value))
    assert [float(number) for number in said] == pytest.approx(both, rel=1e-4)


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing(_enable)?. is deprecated:FutureWarning")
def test_gradient_checkpoints_are_switched_for_the_call_alone() -> None:
    model, batch = model_and_batch("Llama")
    norms = []
    for _ in range(2):
        norms.append(hessinit.measure(logits_problem(model, batch)).network.norm)
        model.train()  # Llama has no dropout
        model.gradient_checkpointing_enable()
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert model.is_gradient_checkpointing


def test_initialize_and_advise_take_it_too_and_it_pickles() -> None:
    problem = logits_problem(*model_and_batch("GPT-2"))
    parts = problem.model, problem.loss, problem.batch
    advice = call(hessinit.advise, *parts, optimizer="adamw", lr=1e-3, forward=problem.forward)
    assert advice.stable_learning_rate > 0
    result = call(hessinit.initialize_, *parts, target=0.7, forward=problem.forward)
    truth = dense_truth(problem, "gauss-newton")
    assert ends(truth.network).norm == pytest.approx(0.7, rel=0.06)
    assert result.converged
    assert pickle.loads(pickle.dumps(problem.loss)) == problem.loss
    assert pickle.loads(pickle.dumps(problem)).forward == problem.forward


def image_network() -> Net:
    """As of timm: images in, logits out."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        parts = {"stem": nn.Conv2d(1, 4, 3, padding=1), "block": block, "fc": nn.Linear(4, 3)}
    return Net(lambda m, x: m.fc((m.stem(x).relu() + m.block(m.stem(x).relu())).mean((2, 3))), **parts)


def images_and_labels() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(2)), torch.arange(6) % 3


@pytest.mark.parametrize("form", ["pair", "list", "dict", "dict by name"])
def test_images_and_labels_come_as_a_pair_or_by_any_name(form: str) -> None:
    model, (images, labels) = image_network(), images_and_labels()
    batch: Any = {
        "pair": (images, labels),
        "list": [images, labels],
        "dict": {"pixel_values": images, "label": labels},
        "dict by name": {"x": images, "labels": labels},
    }[form]
    expected = nn.functional.cross_entropy(model(images), labels)
    assert value_of(logits_problem(model, batch)).item() == expected.item()


def refusals() -> dict[str, tuple[Any, str]]:
    masked, tokens = model_and_batch("masked BERT")
    gpt, _ = model_and_batch("GPT-2")
    images, labels = images_and_labels()
    bare, floats = {"input_ids": tokens["input_ids"]}, (images, torch.rand(6, 3))
    return {
        "a class": ((nn.Linear, (images, labels)), "Pass an instance, not the class"),
        "no labels": ((masked, bare), "has no 'labels', and task='masked-lm' needs.*DataCollatorForLang"),
        "lists": ((gpt, {"input_ids": [[1, 2], [3, 4]]}), r'is a list; it must be a tensor.*_tensors="pt"'),
        "an example": ((gpt, [{"input_ids": torch.ones(5).long()}]), r"\(5,\), that of one example; collate"),
        "one token": ((gpt, {"input_ids": torch.ones(2, 1).long()}), "every label is -100.*each next token"),
        "a column": ((image_network(), (images, labels[:, None]), "classification"), "do not fit: the last"),
        "a tensor": ((image_network(), images), "batch is a Tensor; it must be a dict of tensors"),
        "nothing": ((image_network(), []), "empty iterable"),
        "odd batches": ((image_network(), [images] * 3), "a batch is a Tensor; it must be"),
        "soft labels": ((image_network(), floats), "neither the name Net nor the labels"),
        "bare": ((image_network(), {"x": images}), "If it is one of 'causal-lm', .* pass task="),
        "a task": ((image_network(), (images, labels), "casual-lm"), "Did you mean 'causal-lm'"),
        "a count": ((gpt, {**bare, "num_items_in_batch": 5}), "own loss of this batch is"),
        "float labels": ((image_network(), floats, "classification"), "task='regression' for the squared"),
    }


@pytest.mark.parametrize("name", list(refusals()))
def test_what_cannot_be_read_is_refused_with_the_way_out(name: str) -> None:
    arguments, message = refusals()[name]
    if name == "a count" and "kwargs" not in signature(arguments[0].forward).parameters:
        pytest.skip("GPT-2 of Transformers 4.48 has no such argument")
    with pytest.raises(hessinit.ProblemError, match=f"(?s){message}"):
        value_of(logits_problem(*arguments[:2], task=(*arguments, "auto")[2]))


def test_regression_is_the_squared_error_and_an_output_without_logits_is_refused() -> None:
    images, labels = images_and_labels()
    problem = logits_problem(image_network(), (images, torch.ones(6, 3)), task="regression")
    expected = nn.functional.mse_loss(image_network()(images), torch.ones(6, 3))
    assert value_of(problem).item() == expected.item()
    strange = Net(lambda m, x: (m.inner(x), x), inner=image_network())
    problem = logits_problem(strange, (images, labels))
    with pytest.raises(hessinit.ProblemError, match="Net returned a tuple without logits"):
        hessinit.measure(problem)


def test_reading_a_problem_does_not_import_transformers() -> None:
    code = (
        "import sys, torch, hessinit\n"
        "hessinit.logits_problem(torch.nn.Linear(4, 3), (torch.ones(2, 4), torch.tensor([0, 2])))\n"
        "assert not {'transformers', 'lightning', 'accelerate'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
