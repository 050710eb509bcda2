"""A problem from a model of logits and a tokenized batch: dict in, `.logits` out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hessinit.errors import ProblemError, choose
from hessinit.integrations.model_inputs import Reading, list_batches, logits_of, read_inputs
from hessinit.integrations.own_loss import OwnLoss, find_own_loss
from hessinit.integrations.tasks import IGNORED, TASKS, loss_for, next_tokens, task_of
from hessinit.problem.problem import Loss
from hessinit.problem.validate import check_model, unwrap


def logits_problem(
    model: nn.Module, batch: Any, *, task: str = "auto"
) -> tuple[nn.Module, Loss, Any, dict[str, Any]]:
    """`model, loss, batch, options` for `hessinit.measure(model, loss, batch, **options)` and its sisters.

    `batch` is what a tokenizer or a collator returns: a dict of tensors with `labels`, where −100 does not
    count; a pair `(inputs, labels)`, as timm's models take it; or an iterable of either. `task` is
    "causal-lm", "masked-lm", "seq2seq-lm", "classification" or "regression"; "auto" reads it off the class
    of the model (`BertForMaskedLM`), for other models off the labels. Without labels a causal language
    model is to predict its own input, padding left out.

    The loss is the model's own, `model(**batch).loss`, as a function of its logits; on the first batch the
    two are compared, and a model whose own loss is another is refused. Several batches are averaged over
    their examples, each being an average over its tokens. Costs one forward, for models that have a loss.

    >>> import torch
    >>> images, labels = torch.ones(2, 4), torch.tensor([0, 2])
    >>> model, loss, batch, options = logits_problem(nn.Linear(4, 3), (images, labels))
    >>> loss(options["forward"](model, batch[0]), batch[1]) == nn.CrossEntropyLoss()(model(images), labels)
    tensor(True)
    """
    choose("task", task, ["auto", *TASKS], {"classify": "classification", "lm": "causal-lm"})
    check_model(model, None)
    inside = unwrap(model)
    batches, several = list_batches(batch)
    readings = [read_inputs(inside, one) for one in batches]
    chosen = task_of(inside, readings[0].labels) if task == "auto" else task
    given = [_pair(inside, chosen, reading) for reading in readings]
    pairs = [_trained(chosen, *pair) for pair in given]
    loss = loss_for(chosen, inside, pairs[0][1])
    own = find_own_loss(inside, *given[0], readings[0].extra)
    if own is not None and not own.agrees(ours := _value(loss, own, chosen, pairs[0][1])):
        # BART's and XLNet's language models leave it to the user to move the labels.
        if chosen != "causal-lm" or not own.agrees(_value(loss, own, chosen, given[0][1])):
            raise ProblemError(_another_loss(inside, chosen, own, ours, readings[0]))
        pairs = given
    return model, loss, pairs if several else pairs[0], {"forward": logits_of}


def _pair(model: nn.Module, task: str, reading: Reading) -> tuple[Any, Tensor]:
    """The model's inputs and labels, as its own loss takes them."""
    inputs, labels = reading.inputs, reading.labels
    if labels is None:
        labels = _own_tokens(inputs) if task == "causal-lm" else None
    if labels is None:
        raise ProblemError(_no_labels(task, inputs))
    if task == "seq2seq-lm" and "decoder_input_ids" not in inputs:
        inputs = {**inputs, "decoder_input_ids": _decoder_inputs(model, labels)}
    return inputs, labels


def _trained(task: str, inputs: Any, labels: Tensor) -> tuple[Any, Tensor]:
    """What each output is trained on."""
    labels = next_tokens(labels) if task == "causal-lm" else labels
    if not labels.is_floating_point() and labels.numel() and bool((labels == IGNORED).all()):
        raise ProblemError(
            f"every label is {IGNORED}, so that nothing counts"
            + (" once each token predicts the one after it" if task == "causal-lm" else "")
            + "; pass a batch with labels."
        )
    return inputs, labels


def _own_tokens(inputs: Any) -> Tensor | None:
    tokens: Tensor | None = inputs.get("input_ids") if isinstance(inputs, dict) else None
    mask = inputs.get("attention_mask") if tokens is not None else None
    if tokens is None or mask is None or mask.shape != tokens.shape:
        return tokens
    return tokens.masked_fill(mask == 0, IGNORED)


def _decoder_inputs(model: nn.Module, labels: Tensor) -> Tensor:
    prepare: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None:
        raise ProblemError(
            f"{type(model).__name__} does not say how its decoder starts; put batch['decoder_input_ids'] in, "
            "the labels moved by one."
        )
    return prepare(labels=labels)


def _no_labels(task: str, inputs: Any) -> str:
    keys = f" (it has {', '.join(inputs)})" if isinstance(inputs, dict) else ""
    ways = {
        "masked-lm": "Mask some tokens with transformers.DataCollatorForLanguageModeling(tokenizer), which "
        "adds them.",
        "causal-lm": "Pass the tokens as batch['input_ids'], or add the labels.",
    }
    way = ways.get(task, "Add batch['labels'], one for each example or token.")
    return f"the batch has no 'labels'{keys}, and task={task!r} needs them. {way}"


def _value(loss: Loss, own: OwnLoss, task: str, labels: Tensor) -> float:
    try:
        return float(loss(own.logits, labels.to(own.logits.device)))
    except (IndexError, RuntimeError, ValueError) as refusal:
        if isinstance(refusal, ProblemError):
            raise
        raise ProblemError(
            f"logits of shape {tuple(own.logits.shape)} and labels of {tuple(labels.shape)} do not fit "
            f"task={task!r}: {refusal} Pass another task=, or call hessinit.measure(model, loss, batch, "
            "forward=…) with the loss that you train."
        ) from refusal


def _another_loss(model: nn.Module, task: str, own: OwnLoss, ours: float, reading: Reading) -> str:
    way = "Call hessinit.measure(model, loss, batch, forward=…) with the loss that you train."
    if reading.extra:
        way = f"The batch says what to divide by; leave {', '.join(map(repr, reading.extra))} out of it."
    return (
        f"{type(model).__name__}'s own loss of this batch is {own.value:.6g}, and that of task={task!r} "
        f"{ours:.6g}: what is measured would not be what is trained. {way}"
    )
