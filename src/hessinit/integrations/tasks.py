"""What a model of logits is trained for, and the loss that goes with it: the same as the model's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hessinit.errors import ProblemError

TASKS = ["causal-lm", "masked-lm", "seq2seq-lm", "classification", "regression"]
IGNORED = -100  # the label of positions that do not count, in torch as in Transformers

# Transformers names its models after what they are for; a subclass keeps the name among its ancestors.
_BY_NAME = {
    r"ForCausalLM$|(?<!With)LMHeadModel$": "causal-lm",
    r"ForMaskedLM$": "masked-lm",
    r"For\w*Classification$|ForMultipleChoice$": "classification",
}


def task_of(model: nn.Module, labels: Tensor | None) -> str:
    """The task that the model's class is named after; for other models, what the labels leave open.

    >>> task_of(nn.Linear(4, 3), torch.tensor([0, 2]))
    'classification'
    """
    names = [one.__name__ for one in type(model).__mro__]
    for pattern, task in _BY_NAME.items():
        if any(re.search(pattern, name) for name in names):
            return task
    if any(name.endswith("ForConditionalGeneration") for name in names):
        return "seq2seq-lm" if _setting(model, "is_encoder_decoder") else "causal-lm"
    if labels is not None and labels.ndim == 1 and not labels.is_floating_point():
        return "classification"
    found = "there are no labels"
    if labels is not None:
        found = f"neither do labels of shape {tuple(labels.shape)} and {labels.dtype}"
    raise ProblemError(
        f"the name {type(model).__name__} does not tell what the model is for, and {found}; pass task=, one "
        f"of {', '.join(map(repr, TASKS))}. For any other loss, call hessinit.measure(model, loss, batch, "
        "forward=…) itself."
    )


def loss_for(task: str, model: nn.Module, labels: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a task: a function of (logits, labels) that pickles."""
    if _setting(model, "output_router_logits"):
        raise ProblemError(
            "the model adds a loss of its routers (config.output_router_logits=True), which is no function "
            "of the logits; set it to False while measuring."
        )
    if task == "regression":
        return squared_error
    if task != "classification":
        return token_cross_entropy
    kind = _setting(model, "problem_type")
    if kind == "regression" or (kind is None and _setting(model, "num_labels") == 1):
        return squared_error
    if not labels.is_floating_point() and kind != "multi_label_classification":
        return token_cross_entropy
    if kind is None and _setting(model, "num_labels") is None:
        raise ProblemError(
            f"labels of {labels.dtype} may be values, probabilities or several classes at once; pass "
            "task='regression' for the squared error, else call hessinit.measure(model, loss, batch) with "
            "the loss you train."
        )
    return each_label_cross_entropy


def token_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Averaged over all labels but those of −100: one for an example, or one for each of its tokens.

    A last dimension of one may follow.

    >>> uniform = torch.zeros(2, 3, 4)  # log 4, whatever does not count
    >>> round(token_cross_entropy(uniform, torch.tensor([[1, 2, -100], [3, -100, -100]])).item(), 4)
    1.3863
    """
    if labels.shape == (*logits.shape[:-1], 1):
        labels = labels[..., 0]
    if logits.shape[:-1] != labels.shape:
        raise ProblemError(
            f"logits of shape {tuple(logits.shape)} and labels of {tuple(labels.shape)} do not fit: the last "
            "dimension of the logits must count the classes, the others be those of the labels. For another "
            "loss, call hessinit.measure(model, loss, batch, forward=…) itself."
        )
    flat = logits.flatten(0, -2) if logits.ndim > 1 else logits
    return F.cross_entropy(flat, labels.flatten().long(), ignore_index=IGNORED, label_smoothing=smoothing)


def each_label_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Every class is there or not by itself, averaged over examples and classes."""
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


def squared_error(outputs: Tensor, values: Tensor) -> Tensor:
    """Averaged over examples and values; a last dimension of one may be missing on either side.

    >>> squared_error(torch.zeros(2, 1), torch.tensor([1.0, 3.0])).item()
    5.0
    """
    if outputs.numel() != values.numel():
        raise ProblemError(
            f"outputs of shape {tuple(outputs.shape)} and labels of {tuple(values.shape)} do not fit: the "
            "squared error needs one label for each output."
        )
    return F.mse_loss(outputs.reshape(values.shape), values.to(outputs.dtype))


def next_tokens(labels: Tensor) -> Tensor:
    """What each position is to predict: the label of the one after it, and nothing for the last.

    >>> next_tokens(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


def _setting(model: nn.Module, name: str) -> Any:
    return getattr(getattr(model, "config", None), name, None)
