"""A problem from a model that returns logits (Hugging Face, timm) and a tokenized batch."""

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
from hessinit.problem.preserve import UserState, uninterrupted, untouched_random_state
from hessinit.problem.problem import Loss
from hessinit.problem.validate import check_model, unwrap

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
# Logits near zero give almost the same loss for all labels, so two losses are told apart by few
# digits.
_RELATIVE = 5e-5
_ABSOLUTE = 1e-6
_OTHERWISE = "call hessinit.measure(model, loss, batch, forward=…) with the loss that you train"


@uninterrupted
def logits_problem(
    model: nn.Module, batch: Any, *, task: str = "auto"
) -> tuple[nn.Module, Loss, Any, dict[str, Any]]:
    """`model, loss, batch, options` for `hessinit.measure(model, loss, batch, **options)` and other verbs.

    `batch` is what a tokenizer or a collator returns: a dict of tensors with `labels`, where −100
    is ignored; a pair `(inputs, labels)`, as timm's models take it; or an iterable of either,
    averaged over examples. `task` is "causal-lm", "masked-lm", "seq2seq-lm", "classification" or
    "regression"; "auto" reads it from the model's class name (`BertForMaskedLM`), for other models
    from the labels. Without labels a causal language model predicts its own input, padding left
    out.

    The loss is the model's own, `model(**batch).loss`, as a function of its logits; the two are
    compared on the first batch, at the cost of one forward, and a model with another loss is
    refused.

    >>> images, labels = torch.ones(2, 4), torch.tensor([0, 2])
    >>> model, loss, batch, options = logits_problem(nn.Linear(4, 3), (images, labels))
    >>> loss(options["forward"](model, batch[0]), batch[1]) == nn.CrossEntropyLoss()(model(images), labels)
    tensor(True)
    """
    choose("task", task, ["auto", *TASKS], {"classify": "classification", "lm": "causal-lm"})
    check_model(model, None)
    inner = unwrap(model)
    batches, several = _list_batches(batch)
    readings = [_read_inputs(inner, one) for one in batches]
    chosen = _find_task(inner, readings[0][1]) if task == "auto" else task
    given = [_with_labels(inner, chosen, *meaning) for meaning in readings]
    pairs = [(inputs, _targets(chosen, labels)) for inputs, labels in given]
    loss = _find_loss(chosen, inner, pairs[0][1])
    _check_own_loss(inner, *given[0], pairs[0][1], loss, chosen)
    return model, loss, pairs if several else pairs[0], {"forward": call_for_logits}


def call_for_logits(model: nn.Module, inputs: Any) -> Tensor:
    """Call the model by name or with its one input, and return its logits."""
    with _as_written(model):
        output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    if isinstance(output, Tensor):
        return output
    logits = (
        output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    )
    if not isinstance(logits, Tensor):
        raise ProblemError(
            f"{type(model).__name__} returned a {type(output).__name__} without logits; it must return a "
            "tensor, or an output with .logits (model.config.return_dict = True, a model with a head). For "
            f"another output, {_OTHERWISE}."
        )
    return logits


def _list_batches(batch: Any) -> tuple[list[Any], bool]:
    several = not (isinstance(batch, Mapping) or _is_pair(batch))
    is_iterable = isinstance(batch, Iterable) and not isinstance(batch, Tensor | str)
    batches = read_few(batch, "one dict or pair") if several and is_iterable else [batch]
    for one in batches:
        if not (isinstance(one, Mapping) or _is_pair(one)):
            raise ProblemError(
                f"a batch is a {type(one).__name__}; it must be a dict of tensors, as a tokenizer or a "
                "collator returns it, or a pair (inputs, labels); several come as an iterable of these."
            )
    return batches, several


def _is_pair(batch: Any) -> bool:
    """(inputs, labels), not a list of two batches."""
    is_two = isinstance(batch, tuple | list) and len(batch) == 2
    return is_two and isinstance(batch[0], Tensor | Mapping) and isinstance(batch[1], Tensor)


def _read_inputs(model: nn.Module, batch: Any) -> tuple[Any, Tensor | None]:
    """Separate the labels, drop what is no input of the model, and switch its cache off."""
    if not isinstance(batch, Mapping):
        inputs, labels = batch
        if not isinstance(inputs, Mapping):
            return inputs, labels
        batch = {**inputs, "labels": labels}
    named = {str(name): value for name, value in batch.items() if value is not None}
    for name, value in named.items():
        if name not in _EXTRA and not isinstance(value, Tensor | bool | int | str):
            way = (
                'Tokenize with return_tensors="pt" and padding=True, or collate the examples first'
            )
            raise ProblemError(
                f"batch[{name!r}] is a {type(value).__name__}; it must be a tensor. {way}."
            )
    if (tokens := named.get("input_ids")) is not None and tokens.ndim < 2:
        way = "collate the examples first (transformers.default_data_collator(examples))"
        raise ProblemError(
            f"batch['input_ids'] has shape {tuple(tokens.shape)}, that of one example; {way}."
        )
    labels = next((named[name] for name in _LABELS if name in named), None)
    parameters = inspect.signature(model.forward).parameters.values()
    known = [
        one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    left_out = {*_LABELS, *(_EXTRA.difference(known))}
    inputs = {name: value for name, value in named.items() if name not in left_out}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if len(inputs) == 1 and not takes_any and not set(known).intersection(inputs):
        return next(iter(inputs.values())), labels  # model(images), whatever the batch calls them
    if "use_cache" in known:
        inputs["use_cache"] = False  # keys and values for the next token would only take memory
    return inputs, labels


def _with_labels(
    model: nn.Module, task: str, inputs: Any, labels: Tensor | None
) -> tuple[Any, Tensor]:
    if labels is None and task == "causal-lm" and isinstance(inputs, dict):
        labels = inputs.get("input_ids")
        mask = inputs.get("attention_mask")
        if labels is not None and mask is not None and mask.shape == labels.shape:
            labels = labels.masked_fill(mask == 0, IGNORED)
    if labels is None:
        raise ProblemError(
            f"the batch has no 'labels', and task={task!r} needs them: one for each example or token. For "
            "masked models, transformers.DataCollatorForLanguageModeling(tokenizer) adds them."
        )
    if task == "seq2seq-lm" and (isinstance(inputs, Tensor) or "decoder_input_ids" not in inputs):
        if (
            isinstance(inputs, Tensor)
            or "labels" not in inspect.signature(model.forward).parameters
        ):
            raise ProblemError(
                f"the batch has no 'decoder_input_ids', and {type(model).__name__} does not make them of "
                "labels. Add them to the batch: the labels, moved on by one position."
            )
        inputs = {
            **inputs,
            "labels": labels,
        }  # the model moves them on by one position in its own way
    return inputs, labels


def _targets(task: str, labels: Tensor) -> Tensor:
    if task == "causal-lm":  # each position predicts the next one, and the last nothing
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)
    if bool((labels == IGNORED).all()):
        why = (
            f"every label is {IGNORED}, which is ignored (a causal model predicts each next token)"
        )
        raise ProblemError(f"{why}; pass a batch with labels.")
    return labels


def _find_task(model: nn.Module, labels: Tensor | None) -> str:
    """The task in the name of the model's class; for other models, that of the labels."""
    names = [one.__name__ for one in type(model).__mro__]
    for pattern, task in _BY_NAME.items():
        if any(re.search(pattern, name) for name in names):
            return task
    if any(name.endswith("ForConditionalGeneration") for name in names):
        return "seq2seq-lm" if _setting(model, "is_encoder_decoder") else "causal-lm"
    if labels is not None and labels.ndim == 1 and not labels.is_floating_point():
        return "classification"
    raise ProblemError(
        f"neither the name {type(model).__name__} nor the labels say which task it is for. If it is one of "
        f"{', '.join(map(repr, TASKS))}, pass task=; for any other, as question answering, {_OTHERWISE}."
    )


def _find_loss(task: str, model: nn.Module, labels: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a task: a function of (logits, labels) that pickles."""
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
        why = f"labels of {labels.dtype} may be values, probabilities or several classes at once"
        raise ProblemError(
            f"{why}; pass task='regression' for the squared error, else {_OTHERWISE}."
        )
    return multi_label_cross_entropy


def token_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy averaged over all labels but −100: one for an example, or for each of its tokens.

    >>> uniform = torch.zeros(2, 3, 4)  # log 4, whatever is ignored
    >>> round(token_cross_entropy(uniform, torch.tensor([[1, 2, -100], [3, -100, -100]])).item(), 4)
    1.3863
    """
    if logits.shape[:-1] != labels.shape:
        raise ProblemError(
            f"logits of shape {tuple(logits.shape)} and labels of {tuple(labels.shape)} do not fit: the last "
            "dimension of the logits must count the classes, the others be those of the labels. For another "
            f"loss, {_OTHERWISE}."
        )
    flat = logits.flatten(0, -2) if logits.ndim > 1 else logits
    return F.cross_entropy(
        flat, labels.flatten().long(), ignore_index=IGNORED, label_smoothing=smoothing
    )


def multi_label_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of every class, averaged over examples and classes."""
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


def squared_error(outputs: Tensor, values: Tensor) -> Tensor:
    """Averaged over examples and values; a last dimension of one may be missing on either side.

    >>> squared_error(torch.zeros(2, 1), torch.tensor([1.0, 3.0])).item()
    5.0
    """
    return F.mse_loss(outputs.reshape(values.shape), values.to(outputs.dtype))


def _check_own_loss(
    model: nn.Module, inputs: Any, labels: Tensor, targets: Tensor, loss: Loss, task: str
) -> None:
    """Refuse a model whose own loss of its logits, in eval mode, is another one; it need not have one."""
    first = next(model.parameters(), None)
    has_loss = "labels" in inspect.signature(model.forward).parameters
    if not has_loss or not isinstance(inputs, Mapping) or first is None:
        return
    call = cast(inputs, first.dtype, first.device)
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
            # Doubles stay so: several classes.
            output = model(**{**call, "labels": labels.to(first.device)})
    except Exception:
        return
    found = getattr(output, "loss", None)
    logits = getattr(output, "logits", None)
    if not isinstance(found, Tensor) or found.numel() != 1 or not isinstance(logits, Tensor):
        return
    if logits.dtype in (torch.float16, torch.bfloat16):  # most models compute the loss in float32
        logits = logits.float()
    try:
        ours = float(loss(logits, targets.to(logits.device)))
        own = found.item()
    except (IndexError, RuntimeError) as refusal:
        raise ProblemError(
            f"logits of shape {tuple(logits.shape)} and labels of {tuple(targets.shape)} do not fit "
            f"task={task!r}: {refusal} Pass another task=, or {_OTHERWISE}."
        ) from refusal
    relative = max(_RELATIVE, 8 * torch.finfo(found.dtype).eps)
    is_same = math.isclose(ours, own, rel_tol=relative, abs_tol=_ABSOLUTE)
    if not is_same and not (math.isnan(ours) and math.isnan(own)):
        raise ProblemError(
            f"{type(model).__name__}'s own loss of this batch is {own:.6g}, and that of task={task!r} "
            f"{ours:.6g}: what is measured would not be what is trained. To measure, {_OTHERWISE}."
        )


@contextlib.contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """The model as it was written: without gradient checkpoints, which have no forward-mode derivative, and
    without the autocast that accelerate puts around a forward, whose rounding hides symmetries.
    """
    modules: list[Any] = list(model.modules())
    checkpointed = [one for one in modules if getattr(one, "gradient_checkpointing", False) is True]
    wrapped = {"forward": vars(model)["forward"]} if "_original_forward" in vars(model) else {}
    try:
        for module in checkpointed:
            module.gradient_checkpointing = False
        vars(model).update(dict.fromkeys(wrapped, vars(model).get("_original_forward")))
        yield
    finally:
        vars(model).update(wrapped)
        for module in checkpointed:
            module.gradient_checkpointing = True


def _setting(model: nn.Module, name: str) -> Any:
    return getattr(getattr(model, "config", None), name, None)
