"""A LightningModule on the digits, for either name of the library."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hessinit.digits import load_digits

LOSS = nn.CrossEntropyLoss()


def make_network() -> nn.Sequential:
    """BatchNorm and dropout: what a careless measurement would disturb."""
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10))


def plain_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def digits(examples: int = 64) -> tuple[Tensor, Tensor]:
    images, labels = load_digits()
    return images[:examples].flatten(1), labels[:examples]


def loader(examples: int = 64, *, batch_size: int = 16, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*digits(examples)), batch_size=batch_size, shuffle=shuffle)


def digits_module(package: Any, network: nn.Module, *, lr: float = 0.1, **settings: Any) -> Any:
    """A LightningModule of `package`, which is lightning.pytorch or pytorch_lightning."""

    class Digits(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = network
            self.seen: list[float] = []

        def forward(self, images: Tensor) -> Tensor:
            return self.network(images)

        def training_step(self, batch: Any, index: int) -> Tensor:
            images, labels = batch
            loss = LOSS(self(images), labels)
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=lr, **settings)

    return Digits()


def trainer_of(package: Any, folder: Any, *callbacks: Any, **settings: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    options = {"logger": False, "enable_checkpointing": False, **quiet, **settings}
    return package.Trainer(accelerator="cpu", default_root_dir=folder, callbacks=list(callbacks), **options)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def fit_from(checkpoint: Any, trainer: Any, module: Any, data: DataLoader[Any]) -> None:
    # Lightning 2.4 does not know the argument: it unpickles whatever a checkpoint holds.
    known = "weights_only" in inspect.signature(trainer.fit).parameters
    trainer.fit(module, data, ckpt_path=checkpoint, **({"weights_only": True} if known else {}))
