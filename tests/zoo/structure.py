"""Shapes of networks and of batches: residuals, sequences, frozen weights, in-place, nested inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.embeddings import per_token_cross_entropy
from zoo.problem import Family, Parts, labels

family = Family()


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return stream + self.branch(stream)


@family.add()
def residual_mlp() -> Parts:
    blocks = [Residual(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(4, 3)), nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


@family.add()
def residual_convolutions() -> Parts:
    branch = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, 2, 3, padding=1))
    model = nn.Sequential(Residual(branch), nn.Flatten(), nn.Linear(18, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(4, 2, 3, 3), labels(3, 4))


@family.add()
def inplace_activations() -> Parts:
    model = nn.Sequential(
        nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.SiLU(inplace=True), nn.Linear(5, 4),
        nn.ELU(inplace=True), nn.Linear(4, 3),
    )  # fmt: skip
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 5), labels(3, 6))


class InplaceResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Conv1d(2, 3, 2), nn.Linear(9, 3)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(signal)
        hidden += hidden.mean(dim=2, keepdim=True)
        hidden.clamp_(-0.6, 0.6)
        return self.outer(hidden.flatten(1)).mul_(1.5)


@family.add()
def inplace_arithmetic_on_layer_outputs() -> Parts:
    return InplaceResidual(), nn.CrossEntropyLoss(), (torch.randn(5, 2, 4), labels(3, 5))


@family.add()
def sequence_outputs() -> Parts:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
    return model, per_token_cross_entropy, (torch.randn(4, 3, 3), labels(4, 4, 3))


@family.add()
def sequence_outputs_regression() -> Parts:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, nn.MSELoss(), (torch.randn(4, 3, 3), torch.randn(4, 3, 2))


@family.add()
def frozen_weights() -> Parts:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


@family.add(options={"layers": ["0", "4"]})
def frozen_weight_asked_for_by_name() -> Parts:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


@family.add()
def dropout_in_eval_mode() -> Parts:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    return model.eval(), nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


@family.add()
def dropout_of_zero_in_train_mode() -> Parts:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.0), nn.Linear(6, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


class WithUnusedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(features)))


@family.add(flat_layers=("unused",))
def unused_layer() -> Parts:
    return WithUnusedHead(), nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.tokens, self.head = nn.Linear(3, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, numbers: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.numbers(numbers) + self.tokens(tokens)))


class DictionaryOut(TwoInputs):
    def forward(self, numbers: torch.Tensor, tokens: torch.Tensor) -> Any:
        return {"logits": super().forward(numbers, tokens), "extra": numbers}


@dataclass(frozen=True)
class Record:
    numbers: torch.Tensor
    tokens: torch.Tensor


@family.add(forward=lambda model, inputs: model(**inputs))
def inputs_in_a_dictionary() -> Parts:
    inputs = {"numbers": torch.randn(6, 3), "tokens": labels(5, 6)}
    return TwoInputs(), nn.CrossEntropyLoss(), (inputs, labels(3, 6))


@family.add(forward=lambda model, inputs: model(*inputs))
def inputs_in_a_tuple() -> Parts:
    return TwoInputs(), nn.CrossEntropyLoss(), ((torch.randn(6, 3), labels(5, 6)), labels(3, 6))


@family.add(forward=lambda model, inputs: model(inputs.numbers, inputs.tokens))
def inputs_in_a_dataclass() -> Parts:
    return TwoInputs(), nn.CrossEntropyLoss(), (Record(torch.randn(6, 3), labels(5, 6)), labels(3, 6))


@family.add(forward=lambda model, inputs: model(**inputs["fields"][0])["logits"])
def nested_inputs_and_dictionary_out() -> Parts:
    inputs = {"fields": [{"numbers": torch.randn(6, 3), "tokens": labels(5, 6)}]}
    return DictionaryOut(), nn.CrossEntropyLoss(), (inputs, labels(3, 6))


def small_network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3))


@family.add()
def uneven_list_of_batches() -> Parts:
    batches = [(torch.randn(size, 4), labels(3, size)) for size in (5, 5, 1)]
    return small_network(), nn.CrossEntropyLoss(), batches


@family.add()
def uneven_data_loader() -> Parts:
    data = TensorDataset(torch.randn(11, 4), torch.randn(11, 3))
    return small_network(), nn.MSELoss(), DataLoader(data, batch_size=4)


@family.add(forward=lambda model, inputs: model(**inputs))
def uneven_batches_of_dictionaries() -> Parts:
    batches = [
        ({"numbers": torch.randn(size, 3), "tokens": labels(5, size)}, labels(3, size)) for size in (4, 2)
    ]
    return TwoInputs(), nn.CrossEntropyLoss(), batches
