"""The problem of a model that returns logits (Hugging Face, timm) on a tokenized batch."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hessinit.errors import ProblemError, choose
from hessinit.problem.batches import cast, read_few
from hessinit.problem.checks import check_model, unwrap
from hessinit.problem.preserve import UserState, uninterrupted, untouched_random_state
from hessinit.problem.problem import Loss, Problem

TASKS = ["causal-lm", "masked-lm", "seq2seq-lm", "classification", "regression"]
IGNORED = -100  # the label of positions that do not count, in torch as in Transformers

# Transformers names its models after their task; a subclass keeps the name among its ancestors.
_BY_NAME = {
    r"ForCausalLM$|(?<!With)LMHeadModel$": "causal-lm",
    r"ForMaskedLM$": "masked-lm",
    r"MarianMTModel$|EncoderDecoderModel$": "seq2seq-lm",
    r"For\w*Classification$|ForMultipleChoice$": "classification",
}
_LABELS = ("labels", "label")
# What tokenizers and the Trainer add to the inputs; passed to a model only if its forward takes it.
_EXTRA = {
    "special_tokens_mask",
    "offset_mapping",
    "overflow_to_sample_mapping",
    "length",
    "return_loss",
}
_OTHERWISE = (
    "call hessinit.measure(hessinit.Problem(model, loss, batch, forward=…)) with the loss that you "
    "train"
)


@uninterrupted
def logits_problem(model: nn.Module, batch: Any, *, task: str = "auto") -> Problem:
    """Return the `Problem` of a model that returns logits, for `hessinit.measure` and other verbs.

    `batch` is what a tokenizer or a collator returns: a dict of tensors with `labels`, where −100
    is ignored; a pair `(inputs, labels)`, as timm's models take it; or an iterable of either,
    averaged over examples. `task` is "causal-lm", "masked-lm", "seq2seq-lm", "classification" or
    "regression"; "auto" reads it from the model's class name (`BertForMaskedLM`), for other models
    from the labels. Without labels a causal language model predicts its own input, padding left
    out.

    The loss is the model's own, `model(**batch).loss`, as a function of its logits; the two are
    compared on the first batch, at the cost of one forward, and a model with another loss is
    refused. For other options: `dataclasses.replace(problem, layers=…)`.

    >>> images, labels = torch.ones(2, 4), torch.tensor([0, 2])
    >>> model = nn.Linear(4, 3)
    >>> problem = logits_problem(model, (images, labels))
    >>> problem.loss(model(images), labels) == nn.CrossEntropyLoss()(model(images), labels)
    tensor(True)
    """
    choose("task", task, ["auto", *TASKS], {"classify": "classification", "lm": "causal-lm"})
    check_model(model, None)
    inner = unwrap(model)
    is_alone = isinstance(batch, Mapping) or _is_pair(batch)
    batches = [batch] if is_alone else _list_batches(batch)
    readings = [_read_batch(inner, tokenized) for tokenized in batches]
    if task == "auto":
        task = _find_task(inner, readings[0][1])
    labelled = [_with_labels(inner, task, inputs, labels) for inputs, labels in readings]
    pairs = [(inputs, _targets(task, labels)) for inputs, labels in labelled]
    loss = _find_loss(task, inner, pairs[0][1])
    _check_own_loss(inner, *labelled[0], pairs[0][1], loss, task)
    return Problem(model, loss, pairs[0] if is_alone else pairs, forward=call_for_logits)


def call_for_logits(model: nn.Module, inputs: Any) -> Tensor:
    """Return the logits of a model that is called by argument names or with one input."""
    with _as_written(model):
        output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(output, Mapping):
        logits = output.get("logits")
    if not isinstance(logits, Tensor):
        raise ProblemError(
            f"{type(model).__name__} returned a {type(output).__name__} without logits; it must "
            "return a tensor, or an output with .logits (model.config.return_dict = True, a model "
            f"with a head). For another output, {_OTHERWISE}."
        )
    return logits


def _list_batches(batches: Any) -> list[Any]:
    """Return the dicts or pairs that an iterable gives."""
    is_iterable = isinstance(batches, Iterable) and not isinstance(batches, Tensor | str)
    listed = read_few(batches, "one dict or pair") if is_iterable else [batches]
    for batch in listed:
        if not (isinstance(batch, Mapping) or _is_pair(batch)):
            raise ProblemError(
                f"a batch is a {type(batch).__name__}; it must be a dict of tensors, as a "
                "tokenizer or a collator returns it, or a pair (inputs, labels); several come as "
                "an iterable of these."
            )
    return listed


def _is_pair(batch: Any) -> bool:
    """Return whether the batch is (inputs, labels), not a list of two batches."""
    is_two = isinstance(batch, tuple | list) and len(batch) == 2
    return is_two and isinstance(batch[0], Tensor | Mapping) and isinstance(batch[1], Tensor)


def _read_batch(model: nn.Module, batch: Any) -> tuple[Any, Tensor | None]:
    """Return the inputs that the model takes, with its cache switched off, and the labels."""
    if not isinstance(batch, Mapping):
        inputs, labels = batch
        if not isinstance(inputs, Mapping):
            return inputs, labels
        batch = {**inputs, "labels": labels}
    named = {str(name): value for name, value in batch.items() if value is not None}
    _check_tensors(named)
    labels = next((named[name] for name in _LABELS if name in named), None)
    parameters = inspect.signature(model.forward).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = {parameter.name for parameter in parameters if parameter.kind in by_name}
    left_out = {*_LABELS, *(_EXTRA - accepted)}
    inputs = {name: value for name, value in named.items() if name not in left_out}
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if len(inputs) == 1 and not accepts_any and not accepted.intersection(inputs):
        return next(iter(inputs.values())), labels  # model(images), whatever the batch calls them
    if "use_cache" in accepted:
        inputs["use_cache"] = False  # keys and values for the next token would only take memory
    return inputs, labels


def _check_tensors(named: Mapping[str, Any]) -> None:
    """Raise ProblemError for lists of tokens, and for one example without a batch dimension."""
    for name, value in named.items():
        if name not in _EXTRA and not isinstance(value, Tensor | bool | int | str):
            raise ProblemError(
                f"batch[{name!r}] is a {type(value).__name__}; it must be a tensor. Tokenize with "
                'return_tensors="pt" and padding=True, or collate the examples first.'
            )
    tokens = named.get("input_ids")
    if tokens is not None and tokens.ndim < 2:
        raise ProblemError(
            f"batch['input_ids'] has shape {tuple(tokens.shape)}, that of one example; collate the "
            "examples first (transformers.default_data_collator(examples))."
        )


def _with_labels(
    model: nn.Module, task: str, inputs: Any, labels: Tensor | None
) -> tuple[Any, Tensor]:
    """Return inputs and labels of a task; a causal model's labels are its own tokens."""
    if labels is None and task == "causal-lm" and isinstance(inputs, dict):
        labels = inputs.get("input_ids")
        mask = inputs.get("attention_mask")
        if labels is not None and mask is not None and mask.shape == labels.shape:
            labels = labels.masked_fill(mask == 0, IGNORED)
    if labels is None:
        raise ProblemError(
            f"the batch has no 'labels', and task={task!r} needs them: one for each example or "
            "token. For masked models, transformers.DataCollatorForLanguageModeling(tokenizer) "
            "adds them."
        )
    if task == "seq2seq-lm" and (isinstance(inputs, Tensor) or "decoder_input_ids" not in inputs):
        parameters = inspect.signature(model.forward).parameters
        if isinstance(inputs, Tensor) or "labels" not in parameters:
            raise ProblemError(
                f"the batch has no 'decoder_input_ids', and {type(model).__name__} does not make "
                "them from labels. Add them to the batch: the labels, shifted by one position."
            )
        inputs = {**inputs, "labels": labels}  # the model shifts them in its own way
    return inputs, labels


def _targets(task: str, labels: Tensor) -> Tensor:
    """Return the labels beside the logits; those of a causal model are shifted by one position."""
    if task == "causal-lm":  # each position predicts the next one, and the last nothing
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)
    if bool((labels == IGNORED).all()):
        raise ProblemError(
            f"every label is {IGNORED}, which is ignored (a causal model predicts each next "
            "token); pass a batch with labels."
        )
    return labels


def _find_task(model: nn.Module, labels: Tensor | None) -> str:
    """Return the task that the name of the model's class says; for other models, the labels."""
    names = [ancestor.__name__ for ancestor in type(model).__mro__]
    for pattern, task in _BY_NAME.items():
        if any(re.search(pattern, name) for name in names):
            return task
    if any(name.endswith("ForConditionalGeneration") for name in names):
        return "seq2seq-lm" if _setting(model, "is_encoder_decoder") else "causal-lm"
    if labels is not None and labels.ndim == 1 and not labels.is_floating_point():
        return "classification"
    raise ProblemError(
        f"neither the name {type(model).__name__} nor the labels say which task it is for. If it "
        f"is one of {', '.join(map(repr, TASKS))}, pass task=; for any other, as question "
        f"answering, {_OTHERWISE}."
    )


def _find_loss(task: str, model: nn.Module, labels: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of a task: a function of (logits, labels) that can be pickled."""
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
            f"labels of {labels.dtype} may be values, probabilities or several classes at once; "
            f"pass task='regression' for the squared error, otherwise {_OTHERWISE}."
        )
    return multi_label_cross_entropy


def token_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy averaged over all labels but −100, of examples or of tokens.

    >>> uniform = torch.zeros(2, 3, 4)  # log 4, whatever is ignored
    >>> round(token_cross_entropy(uniform, torch.tensor([[1, 2, -100], [3, -100, -100]])).item(), 4)
    1.3863
    """
    if logits.shape[:-1] != labels.shape:
        raise ProblemError(
            f"logits of shape {tuple(logits.shape)} and labels of {tuple(labels.shape)} do not "
            "fit: the last dimension of the logits must count the classes, and the others be those "
            f"of the labels. For another loss, {_OTHERWISE}."
        )
    flat = logits.flatten(0, -2) if logits.ndim > 1 else logits
    return F.cross_entropy(
        flat, labels.flatten().long(), ignore_index=IGNORED, label_smoothing=smoothing
    )


def multi_label_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy averaged over examples and classes."""
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


def squared_error(outputs: Tensor, values: Tensor) -> Tensor:
    """Return the mean over examples and values; a last dimension of one may be missing.

    >>> squared_error(torch.zeros(2, 1), torch.tensor([1.0, 3.0])).item()
    5.0
    """
    return F.mse_loss(outputs.reshape(values.shape), values.to(outputs.dtype))


def _check_own_loss(
    model: nn.Module, inputs: Any, labels: Tensor, targets: Tensor, loss: Loss, task: str
) -> None:
    """Refuse a model whose own loss in eval mode, if it has one, is not `loss` of its logits."""
    computed = _own_loss(model, inputs, labels)
    if computed is None:
        return
    own_loss, logits = computed
    try:
        ours = float(loss(logits, targets.to(logits.device)))
        theirs = own_loss.item()
    except (IndexError, RuntimeError) as refusal:
        raise ProblemError(
            f"logits of shape {tuple(logits.shape)} and labels of {tuple(targets.shape)} do not "
            f"fit task={task!r}: {refusal} Pass another task=, or {_OTHERWISE}."
        ) from refusal
    # Logits near zero give almost the same loss for all labels: two losses differ in few digits.
    relative = max(5e-5, 8 * torch.finfo(own_loss.dtype).eps)
    is_same = math.isclose(ours, theirs, rel_tol=relative, abs_tol=1e-6)
    if not is_same and not (math.isnan(ours) and math.isnan(theirs)):
        raise ProblemError(
            f"{type(model).__name__}'s own loss of this batch is {theirs:.6g}, and that of "
            f"task={task!r} {ours:.6g}: what is measured would not be what is trained. To measure, "
            f"{_OTHERWISE}."
        )


def _own_loss(model: nn.Module, inputs: Any, labels: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the loss that the model itself computes in eval mode, and its logits, if it does."""
    first = next(model.parameters(), None)
    has_loss = "labels" in inspect.signature(model.forward).parameters
    if not has_loss or not isinstance(inputs, Mapping) or first is None:
        return None
    arguments = cast(inputs, first.dtype, first.device)
    try:
        with (
            untouched_random_state(first.device),
            UserState(model).with_stand_ins(),
            _as_written(model),
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            model.eval()  # the mode is restored with the other attributes
            warnings.simplefilter("ignore")  # the same call warns again when it is measured
            # Labels are not cast: doubles mean several classes.
            output = model(**{**arguments, "labels": labels.to(first.device)})
    except Exception:
        return None
    loss = getattr(output, "loss", None)
    logits = getattr(output, "logits", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(logits, Tensor):
        return None
    is_low = logits.dtype in (torch.float16, torch.bfloat16)
    return loss, logits.float() if is_low else logits  # most models compute the loss in float32


@contextlib.contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """Run the model as it was written.

    Gradient checkpoints have no forward-mode derivative, and the autocast that accelerate puts
    around a forward hides symmetries by its rounding.
    """
    switch = "gradient_checkpointing"
    attributes = [vars(module) for module in model.modules() if vars(module).get(switch) is True]
    wrapped = {}
    if "_original_forward" in vars(model):
        wrapped["forward"] = vars(model)["forward"]
    try:
        for checkpointed in attributes:
            checkpointed[switch] = False
        vars(model).update(dict.fromkeys(wrapped, vars(model).get("_original_forward")))
        yield
    finally:
        vars(model).update(wrapped)
        for checkpointed in attributes:
            checkpointed[switch] = True


def _setting(model: nn.Module, name: str) -> Any:
    """Return a setting of the model's configuration; None where there is none."""
    return getattr(getattr(model, "config", None), name, None)
