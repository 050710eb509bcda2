"""Recurrent networks: batch first and time first, stacked, bidirectional, cells unrolled by hand."""

from __future__ import annotations

import torch
from torch import nn

from zoo.embeddings import per_token_cross_entropy
from zoo.problem import Family, Parts, labels

family = Family()


class MeanState(nn.Module):
    """Classifies a batch-first sequence by the mean of its states."""

    def __init__(self, recurrent: nn.Module, states: int, classes: int) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(states, classes)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(sequence)[0].mean(dim=1))


class EveryState(nn.Module):
    """Labels every step of a sequence."""

    def __init__(self, recurrent: nn.Module, states: int, classes: int) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(states, classes)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(sequence)[0])


def classify(recurrent: nn.Module, states: int) -> Parts:
    return MeanState(recurrent, states, 3), nn.CrossEntropyLoss(), (torch.randn(4, 3, 2), labels(3, 4))


@family.add(hessian_by="loops")
def lstm_batch_first() -> Parts:
    return classify(nn.LSTM(2, 3, batch_first=True), 3)


@family.add(hessian_by="loops")
def gru_batch_first() -> Parts:
    return classify(nn.GRU(2, 3, batch_first=True), 3)


@family.add(hessian_by="loops")
def rnn_tanh_batch_first() -> Parts:
    return classify(nn.RNN(2, 4, batch_first=True), 4)


@family.add(hessian_by="loops")
def lstm_two_layers_bidirectional() -> Parts:
    return classify(nn.LSTM(2, 2, num_layers=2, bidirectional=True, batch_first=True), 4)


@family.add(hessian_by="loops")
def gru_two_layers_bidirectional() -> Parts:
    return classify(nn.GRU(2, 2, num_layers=2, bidirectional=True, batch_first=True), 4)


@family.add(hessian_by="loops")
def lstm_with_projection() -> Parts:
    return classify(nn.LSTM(2, 3, proj_size=2, batch_first=True), 2)


@family.add(hessian_by="loops")
def lstm_time_first() -> Parts:
    model = EveryState(nn.LSTM(2, 3), 3, 3)
    return model, per_token_cross_entropy, (torch.randn(3, 4, 2), labels(3, 3, 4))


@family.add(hessian_by="loops")
def gru_time_first() -> Parts:
    model = EveryState(nn.GRU(2, 3), 3, 3)
    return model, per_token_cross_entropy, (torch.randn(3, 4, 2), labels(3, 3, 4))


class UnrolledCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 3), nn.Linear(3, 2)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        state = sequence.new_zeros(len(sequence), 3)
        for step in sequence.unbind(dim=1):
            state = self.cell(step, state)
        return self.head(state)


@family.add(hessian_by="loops")
def gru_cell_unrolled() -> Parts:
    return UnrolledCell(), nn.CrossEntropyLoss(), (torch.randn(4, 3, 2), labels(2, 4))
