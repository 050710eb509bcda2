"""Small runs of the Trainer of Transformers, on data made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

from integrations.tiny_transformers import LENGTH, VOCABULARY, model_and_batch


class Sentences(Dataset[dict[str, Tensor]]):
    """Random tokens, each its own label; or the parity of the first token as a class."""

    def __init__(self, examples: int = 16, *, classes: bool = False) -> None:
        generator = torch.Generator().manual_seed(4)
        self.tokens = torch.randint(2, VOCABULARY, (examples, LENGTH), generator=generator)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens[0] % 3 if self.classes else tokens}

    def batch(self, count: int = 4) -> dict[str, Tensor]:
        examples = [self[index] for index in range(count)]
        return {name: torch.stack([one[name] for one in examples]) for name in examples[0]}


def trainer_of(folder: Path, *callbacks: Any, model: str = "GPT-2", data: Any = None, **settings: Any) -> Any:
    """A Trainer with a batch of 4, by plain SGD unless said otherwise."""
    transformers.set_seed(0)
    collator, kind = settings.pop("collator", None), settings.pop("kind", transformers.Trainer)
    given = {"max_steps": 4, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    given |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", **settings}
    given |= {"per_device_train_batch_size": 4, "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(folder), **given)
    data = Sentences() if data is None else data
    parts = {"train_dataset": data, "data_collator": collator, "callbacks": list(callbacks)}
    return kind(model_and_batch(model)[0], arguments, **parts)
