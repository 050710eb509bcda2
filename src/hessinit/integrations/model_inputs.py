"""A tokenized batch, read: which tensors the model is called with, and which it is trained on."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hessinit.errors import ProblemError, did_you_mean
from hessinit.integrations.model_modes import differentiable_outputs
from hessinit.problem.batches import read_few

_LABELS = ("labels", "label")
_COUNT = "num_items_in_batch"
# What tokenizers and the Trainer put beside the inputs; models are called with these only if they say so.
_BESIDE = {
    "special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length", "return_loss",
    _COUNT,
}  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """The model's inputs, by name or a single tensor, and the labels, where the batch has any.

    `extra` is what only the model's own loss takes: the number of labels that the Trainer divides by.
    """

    inputs: Any
    labels: Tensor | None
    extra: Mapping[str, Any] = field(default_factory=dict)


def list_batches(batch: Any) -> tuple[list[Any], bool]:
    """The batches, and whether several were given."""
    if isinstance(batch, Mapping) or _is_pair(batch):
        return [batch], False
    if isinstance(batch, Tensor | str) or not isinstance(batch, Iterable):
        raise ProblemError(
            f"batch is a {type(batch).__name__}; it must be a dict of tensors, as a tokenizer or a collator "
            "returns it, a pair (inputs, labels), or an iterable of these."
        )
    batches = read_few(batch, "one dict or pair")
    for number, one in enumerate(batches):
        if not (isinstance(one, Mapping) or _is_pair(one)):
            raise ProblemError(
                f"batch {number} is a {type(one).__name__}; every batch must be a dict of tensors, or a pair "
                "(inputs, labels)."
            )
    return batches, True


def read_inputs(model: nn.Module, batch: Any) -> Reading:
    """Pick the labels out, leave out what is no input, switch the cache off."""
    if not isinstance(batch, Mapping):
        inputs, labels = batch
        if not isinstance(inputs, Mapping):
            return Reading(inputs, labels)
        batch = {**inputs, "labels": labels}
    named = {str(name): value for name, value in batch.items() if value is not None}
    _check_tensors(named)
    labels = next((named[name] for name in _LABELS if name in named), None)
    parameters = inspect.signature(model.forward).parameters.values()
    known = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    left_out = {*_LABELS, *(_BESIDE.difference(known))}
    inputs = {name: value for name, value in named.items() if name not in left_out}
    extra = {_COUNT: named[_COUNT]} if _COUNT in named else {}
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        extra = {}
        strange = [name for name in inputs if name not in known]
        if strange and len(inputs) == 1:
            return Reading(inputs[strange[0]], labels)  # model(images), whatever the batch calls them
        if strange:
            raise ProblemError(
                f"the batch has {strange[0]!r}, and {type(model).__name__} takes {', '.join(known)}; leave "
                f"it out of the batch.{did_you_mean(strange[0], known)}"
            )
    if "use_cache" in known:
        inputs["use_cache"] = False  # keys and values kept for the next token are memory for nothing
    return Reading(inputs, labels, extra)


def logits_of(model: nn.Module, inputs: Any) -> Tensor:
    """Call the model by name or with its one input; its output may be a tensor, or hold `logits`."""
    with differentiable_outputs(model):
        output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ProblemError(
            f"{type(model).__name__} returned a {type(output).__name__} without logits; it must return a "
            "tensor, or an output with .logits (model.config.return_dict = True, a model with a head). For "
            "another output, call hessinit.measure(model, loss, batch, forward=…) itself."
        )
    return logits


def _is_pair(batch: Any) -> bool:
    """(inputs, labels), not a list of two batches."""
    return (
        isinstance(batch, tuple | list)
        and len(batch) == 2
        and isinstance(batch[0], Tensor | Mapping)
        and isinstance(batch[1], Tensor)
    )


def _check_tensors(named: Mapping[str, Any]) -> None:
    for name, value in named.items():
        if name not in _BESIDE and not isinstance(value, Tensor | bool | int | str):
            raise ProblemError(
                f"batch[{name!r}] is a {type(value).__name__}; it must be a tensor. Tokenize with "
                'return_tensors="pt" and padding=True, or collate the examples first.'
            )
    tokens = named.get("input_ids")
    if isinstance(tokens, Tensor) and tokens.ndim < 2:
        raise ProblemError(
            f"batch['input_ids'] has shape {tuple(tokens.shape)}, as one example of a dataset has it; a "
            "batch has a row for each sentence. Collate the examples first "
            "(transformers.default_data_collator(examples))."
        )
