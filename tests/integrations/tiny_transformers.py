"""Real models of Transformers, made from tiny configurations: no download, a thousand weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH = 11, 5, 4
_SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def _gpt2(**settings: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 1, "n_head": 2}
    return transformers.GPT2Config(**sizes, **_SPECIAL, **settings)


def _bert(**settings: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=6, max_position_embeddings=LENGTH, **_SPECIAL, **settings,
    )  # fmt: skip


def _llama() -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=6, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=LENGTH, **_SPECIAL,
    )  # fmt: skip


def _t5() -> Any:
    return transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=2, d_ff=6, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip


def _bart() -> Any:
    return transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=6, decoder_ffn_dim=6, max_position_embeddings=LENGTH,
        **_SPECIAL,
    )  # fmt: skip


def _whisper() -> Any:
    return transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=6, decoder_ffn_dim=6, num_mel_bins=2,
        max_source_positions=3, max_target_positions=LENGTH, decoder_start_token_id=2, **_SPECIAL,
    )  # fmt: skip


def _marian() -> Any:
    return transformers.MarianConfig(**{**_bart().to_dict(), "decoder_start_token_id": 2, "pad_token_id": 0})


def _vit() -> Any:
    return transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6, image_size=4,
        patch_size=2, num_channels=1, num_labels=3,
    )  # fmt: skip


def _tokens(generator: torch.Generator, examples: int = 3) -> dict[str, Tensor]:
    tokens = torch.randint(2, VOCABULARY, (examples, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[-1, 3:] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}


def _causal(generator: torch.Generator) -> dict[str, Tensor]:
    batch = _tokens(generator)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def _masked(generator: torch.Generator) -> dict[str, Tensor]:
    batch = _tokens(generator)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, 1::2] = batch["input_ids"][:, 1::2]
    return {**batch, "labels": labels}


def _classes(generator: torch.Generator) -> dict[str, Tensor]:
    return {**_tokens(generator), "labels": torch.tensor([0, 2, 1])}


def _images(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 1, 4, 4, generator=generator), "labels": torch.tensor([0, 2, 1])}


def _speech(generator: torch.Generator) -> dict[str, Tensor]:
    features = torch.randn(3, 2, 6, generator=generator)
    return {"input_features": features, "labels": _causal(generator)["labels"]}


def _spans(generator: torch.Generator) -> dict[str, Tensor]:
    ends = {"start_positions": torch.tensor([0, 1, 2]), "end_positions": torch.tensor([3, 1, 2])}
    return {**_tokens(generator), **ends}


def _values(generator: torch.Generator) -> dict[str, Tensor]:
    return {**_tokens(generator), "labels": torch.tensor([0.5, -1.0, 2.0])}


def _zeros(generator: torch.Generator) -> dict[str, Tensor]:
    return {**_tokens(generator), "labels": torch.zeros(3, LENGTH).long()}


def _several(generator: torch.Generator) -> dict[str, Tensor]:
    return {**_tokens(generator), "labels": torch.eye(3)}


_MADE: dict[str, tuple[Any, Any, Any]] = {
    "GPT-2": (transformers.GPT2LMHeadModel, _gpt2, _causal),
    "Llama": (transformers.LlamaForCausalLM, _llama, _causal),
    "masked BERT": (transformers.BertForMaskedLM, _bert, _masked),
    "BERT classifier": (transformers.BertForSequenceClassification, lambda: _bert(num_labels=3), _classes),
    "token classifier": (transformers.BertForTokenClassification, lambda: _bert(num_labels=11), _masked),
    "regression": (transformers.BertForSequenceClassification, lambda: _bert(num_labels=1), _values),
    "several labels": (transformers.BertForSequenceClassification, lambda: _bert(num_labels=3), _several),
    "T5": (transformers.T5ForConditionalGeneration, _t5, _masked),
    "BART": (transformers.BartForConditionalGeneration, _bart, _causal),
    "Marian": (transformers.MarianMTModel, _marian, _causal),
    "Whisper": (transformers.WhisperForConditionalGeneration, _whisper, _speech),
    "ViT": (transformers.ViTForImageClassification, _vit, _images),
}
NAMES = list(_MADE)


_REFUSED: dict[str, tuple[Any, Any, Any]] = {
    "one class": (transformers.BertForTokenClassification, lambda: _bert(num_labels=1), _zeros),
    "question answering": (transformers.BertForQuestionAnswering, _bert, _spans),
    "BART's decoder": (transformers.BartForCausalLM, _bart, _causal),  # leaves the shift to the user
}  # fmt: skip


def model_and_batch(name: str, **settings: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The same weights and data at every call, in eval mode; larger weights than the library's 0.02."""
    kind, config, data = {**_MADE, **_REFUSED}[name]
    with torch.random.fork_rng(devices=[]):
        model = kind(config(**settings)).eval()
        torch.manual_seed(1)  # only now: what a model draws when it is made depends on the library's version
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model, data(torch.Generator().manual_seed(2))


def with_frozen_positions(kind: str) -> tuple[nn.Module, Any, Any, Any]:
    """Model, loss, batch and forward of an architecture that freezes a table of sines when it is made."""
    torch.manual_seed(0)
    if kind == "ViT-MAE":
        sizes: dict[str, Any] = {"num_channels": 1, "image_size": 4, "patch_size": 2, "mask_ratio": 0.5}
        for part in ("", "decoder_"):
            sizes |= {f"{part}num_hidden_layers": 1, f"{part}num_attention_heads": 2}
            sizes |= {f"{part}hidden_size": 4, f"{part}intermediate_size": 6}
        masked = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**sizes))
        batch = (torch.randn(3, 1, 4, 4), torch.rand(3, 4)), torch.randn(3, 4, 4)
        return masked, nn.MSELoss(), batch, lambda model, x: model(x[0], noise=x[1]).logits
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=3, d_model=WIDTH, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=6, decoder_ffn_dim=6,
        max_source_positions=LENGTH, max_target_positions=LENGTH, decoder_start_token_id=1, **_SPECIAL,
    )  # fmt: skip
    tokens = _tokens(torch.Generator().manual_seed(2))["input_ids"]
    named = {"input_features": torch.randn(3, 3, 2 * LENGTH), "decoder_input_ids": tokens, "use_cache": False}

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    speech = transformers.WhisperForConditionalGeneration(config).eval()
    return speech, loss, (named, tokens), lambda model, x: model(**x).logits
