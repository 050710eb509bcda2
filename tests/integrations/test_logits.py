"""A problem from a model of logits: the model's own loss, and the curvature of dense fp64 matrices."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hessinit
from dense import DenseCurvature, dense_curvature, ends
from hessinit.integrations.logits import logits_problem
from integrations.timm_style import image_network, images_and_labels
from integrations.tiny_transformers import NAMES, model_and_batch


def value_of(problem: tuple[Any, ...]) -> Tensor:
    model, loss, (inputs, targets), options = problem
    return loss(options["forward"](model, inputs), targets)


def dense_truth(*problem: Any, **options: Any) -> DenseCurvature:
    # Older Transformers fill a mask of the default dtype with the least number of the model's dtype.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return dense_curvature(*problem, **options)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_models_own(name: str) -> None:
    model, batch = model_and_batch(name)
    ours = value_of(logits_problem(model, batch))
    assert ours.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)


SOME = ["GPT-2", "masked BERT", "several labels", "T5", "ViT"]  # GPT-2's embeddings are tied


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.sweep) for name in NAMES]
)
def test_norms_are_those_of_dense_matrices(name: str) -> None:
    model, batch = model_and_batch(name)
    model, loss, batch, options = logits_problem(model, batch)
    report = hessinit.measure(model, loss, batch, **options)
    truth = dense_truth(model, loss, batch, "gauss-newton", **options)
    assert report.curvature == "gauss-newton"
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-3)
    for row in report.layers:
        assert row.norm == pytest.approx(ends(truth.layers[row.name]).norm, rel=1e-3, abs=1e-7), row.name


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.sweep)])
def test_the_exact_hessian_needs_no_other_attention(attention: str) -> None:
    model, batch = model_and_batch("GPT-2", attn_implementation=attention)
    model, loss, batch, options = logits_problem(model, batch)
    report = hessinit.measure(model, loss, batch, curvature="hessian", **options)
    truth = dense_truth(model, loss, batch, "hessian", hessian_by="loops", **options)
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-3)


def test_a_causal_model_without_labels_predicts_its_own_tokens_but_no_padding() -> None:
    model, batch = model_and_batch("GPT-2")
    labels = batch.pop("labels")
    _, _, (inputs, targets), _ = logits_problem(model, batch)
    assert "labels" not in inputs
    assert targets.tolist() == [[*row[1:], -100] for row in labels.tolist()]
    assert (targets == -100).sum() == 3 + 2  # the last of each, and the padding of the third
    del batch["attention_mask"]
    assert (logits_problem(model, batch)[2][1] == -100).sum() == 3


def test_what_a_tokenizer_returns_is_accepted() -> None:
    from transformers import BatchEncoding

    model, batch = model_and_batch("BERT classifier")
    extra = {"special_tokens_mask": torch.zeros(3, 5), "length": torch.full((3,), 5), "token_type_ids": None}
    encoded = value_of(logits_problem(model, BatchEncoding({**batch, **extra})))
    assert encoded.item() == value_of(logits_problem(model, batch)).item()


def test_several_batches_are_averaged_over_their_examples() -> None:
    model, whole = model_and_batch("BERT classifier")
    parts = [{name: tensor[at] for name, tensor in whole.items()} for at in (slice(0, 1), slice(1, 3))]
    norms = []
    for batch in (whole, parts, iter(parts)):
        made, loss, batches, options = logits_problem(model, batch)
        norms.append(hessinit.measure(made, loss, batches, **options).network.norm)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-3)


def test_nothing_about_the_model_changes() -> None:
    model, batch = model_and_batch("BERT classifier")
    model.bert.pooler.train()  # some in eval mode, some not
    modes = [module.training for module in model.modules()]
    settings, weights = model.config.to_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    model, loss, pair, options = logits_problem(model, batch)
    hessinit.measure(model, loss, pair, **options)
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
        loss = None if labels is None else 2 * nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


def test_the_look_at_the_models_own_loss_leaves_it_as_found() -> None:
    model, before = Restless(), Restless()
    before.load_state_dict(model.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(hessinit.ProblemError, match="Restless's own loss of this batch"):
        logits_problem(
            model, {"x": torch.randn(2, 4, generator=torch.Generator()), "labels": torch.tensor([0, 2])}
        )
    assert torch.equal(torch.get_rng_state(), state)
    assert model.calls == 0
    assert not hasattr(model, "called")
    assert model.training
    pairs = zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("name", "own", "ours"),
    [
        ("DeBERTa", "soft", "each"),
        ("one class", "zero", "square"),
        ("BART's decoder", "same token", "next token"),
    ],
)
def test_a_model_with_another_loss_is_refused_with_both_numbers(name: str, own: str, ours: str) -> None:
    model, batch = model_and_batch(name)
    logits = model(**{**batch, "labels": None}).logits
    labels = batch["labels"]
    kinds = {
        "soft": lambda: -(labels * logits.log_softmax(-1)).sum(-1).mean(),
        "each": lambda: nn.functional.binary_cross_entropy_with_logits(logits, labels),
        "zero": lambda: torch.zeros(()),
        "square": lambda: logits.square().mean(),
        "same token": lambda: nn.functional.cross_entropy(logits.mT, labels),
        "next token": lambda: nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:]),
    }
    both = [kinds[kind]().item() for kind in (own, ours)]
    with pytest.raises(hessinit.ProblemError, match="with the loss that you train") as refused:
        logits_problem(model, batch)
    said = [
        float(number) for number in re.findall(r"(?:is|'[a-z-]+') ([\d.]+(?:e-\d+)?)[,:]", str(refused.value))
    ]
    assert said == pytest.approx(both, rel=1e-4)


def test_gradient_checkpoints_are_switched_for_the_call_alone() -> None:
    model, batch = model_and_batch("Llama")
    norms = []
    for _ in range(2):
        made, loss, pair, options = logits_problem(model, batch)
        norms.append(hessinit.measure(made, loss, pair, **options).network.norm)
        model.train()  # Llama has no dropout
        model.gradient_checkpointing_enable()
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert model.is_gradient_checkpointing


def test_a_loader_with_a_generator_of_its_own_is_left_where_it_was() -> None:
    images, labels = images_and_labels()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(images, labels), batch_size=2, shuffle=True, generator=generator)
    state = generator.get_state()
    _, _, batches, _ = logits_problem(image_network(), loader)
    assert torch.equal(generator.get_state(), state)
    assert [pair[1].tolist() for pair in batches] == [pair[1].tolist() for pair in loader]


@pytest.mark.parametrize("name", ["GPT-2", "BERT classifier"])
def test_initialize_and_advise_take_it_too(name: str) -> None:
    model, batch = model_and_batch(name)
    model, loss, batch, options = logits_problem(model, batch)
    advice = hessinit.advise(model, loss, batch, optimizer="adamw", lr=1e-3, **options)
    assert advice.stable_learning_rate > 0
    result = hessinit.initialize_(model, loss, batch, target=0.7, **options)
    truth = dense_truth(model, loss, batch, "gauss-newton", **options)
    assert ends(truth.network).norm == pytest.approx(0.7, rel=0.06)
    assert result.converged


def test_loss_and_forward_pickle_for_other_processes() -> None:
    _, loss, _, options = logits_problem(*model_and_batch("GPT-2"))
    assert pickle.loads(pickle.dumps((loss, options))) == (loss, options)


@pytest.mark.sweep
def test_the_command_line_takes_the_four_values(tmp_path: Path) -> None:
    file = tmp_path / "small_network.py"
    folder = Path(__file__).resolve().parent.parent
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(folder)!r})\nimport hessinit\n"
        "from integrations.timm_style import image_network, images_and_labels\n"
        "def problem():\n    return hessinit.logits_problem(image_network().eval(), images_and_labels())\n"
    )
    command = [sys.executable, "-m", "hessinit", "measure", f"{file}:problem", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    model, loss, batch, options = logits_problem(image_network().eval(), images_and_labels())
    here = hessinit.measure(model, loss, batch, **options)
    there = hessinit.CurvatureReport.from_json(done.stdout)
    assert there.network.norm == pytest.approx(here.network.norm, rel=1e-6)


# timm's convention: images in, logits out.


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


def test_batch_statistics_in_train_mode_are_part_of_the_curvature_and_stay_as_they_were() -> None:
    model = image_network().train()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model, loss, batch, options = logits_problem(model, images_and_labels())
    report = hessinit.measure(model, loss, batch, **options)
    truth, fixed = (
        ends(dense_truth(model.train(mode), loss, batch, "gauss-newton", **options).network).norm
        for mode in (True, False)
    )
    assert report.network.norm == pytest.approx(truth, rel=1e-3)
    assert truth != pytest.approx(fixed, rel=0.01)
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())


# What it refuses, and the way out.


class Strange(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def refusals() -> dict[str, tuple[Any, str]]:
    masked, tokens = model_and_batch("masked BERT")
    gpt, _ = model_and_batch("GPT-2")
    images, labels = images_and_labels()
    bare = {"input_ids": tokens["input_ids"]}
    router, _ = model_and_batch("Llama")
    router.config.output_router_logits = True
    return {
        "a class": ((nn.Linear, (images, labels)), "Pass an instance, not the class"),
        "no labels": ((masked, bare), r"no 'labels' \(it has input_ids.*DataCollatorForLanguageModeling"),
        "lists": ((gpt, {"input_ids": [[1, 2], [3, 4]]}), r'is a list; it must be a tensor.*_tensors="pt"'),
        "an example": ((gpt, [{"input_ids": torch.ones(5).long()}]), r"\(5,\), that of one example.*Collate"),
        "one token": ((gpt, {"input_ids": torch.ones(2, 1).long()}), "every label is -100.*the next one"),
        "a tensor": ((image_network(), images), "batch is a Tensor; it must be a dict of tensors"),
        "nothing": ((image_network(), []), "empty iterable"),
        "odd batches": ((image_network(), [images] * 3), "batch 0 is a Tensor; every batch must be"),
        "unknown key": (
            (image_network(), {"x": images, "mask": images, "labels": labels}),
            "the batch has 'mask', and ImageNetwork takes x; leave it out",
        ),
        "soft labels": ((image_network(), (images, torch.rand(6, 3))), "neither do labels of shape .6, 3."),
        "bare": ((image_network(), {"x": images}), "and there are no labels; pass task=, one of 'causal-lm'"),
        "a task": ((image_network(), (images, labels), "casual-lm"), "Did you mean 'causal-lm'"),
        "a count": ((gpt, {**bare, "num_items_in_batch": 5}), "leave 'num_items_in_batch' out of it"),
        "routers": ((router, tokens), "config.output_router_logits=True"),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(refusals()))
def test_what_cannot_be_read_is_refused_with_the_way_out(name: str) -> None:
    arguments, message = refusals()[name]
    with pytest.raises(hessinit.ProblemError, match=f"(?s){message}"):
        logits_problem(*arguments[:2], **({"task": arguments[2]} if len(arguments) > 2 else {}))


def test_float_labels_of_a_classifier_need_a_word() -> None:
    images, _ = images_and_labels()
    with pytest.raises(hessinit.ProblemError, match="task='regression' for the squared error"):
        logits_problem(image_network(), (images, torch.rand(6, 3)), task="classification")
    problem = logits_problem(image_network(), (images, torch.ones(6, 3)), task="regression")
    expected = nn.functional.mse_loss(image_network()(images), torch.ones(6, 3))
    assert value_of(problem).item() == expected.item()


def test_an_output_without_logits_is_refused() -> None:
    model, loss, batch, options = logits_problem(Strange(4, 3), (torch.ones(2, 4), torch.tensor([0, 2])))
    with pytest.raises(hessinit.ProblemError, match="Strange returned a tuple without logits"):
        hessinit.measure(model, loss, batch, **options)


def test_reading_a_problem_does_not_import_transformers() -> None:
    code = (
        "import sys, torch, hessinit\n"
        "hessinit.logits_problem(torch.nn.Linear(4, 3), (torch.ones(2, 4), torch.tensor([0, 2])))\n"
        "assert not {'transformers', 'lightning', 'accelerate'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
