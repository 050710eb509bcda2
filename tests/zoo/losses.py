"""One network, every loss: weighted, smoothed, masked, summed, robust, convex or not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from zoo.problem import Family, Parts, labels

family = Family()

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def masked_labels() -> torch.Tensor:
    target = labels(3, 7)
    target[[1, 4]] = -100
    return target


def soft_labels() -> torch.Tensor:
    return torch.randn(7, 3).softmax(dim=1)


def hard_labels() -> torch.Tensor:
    return labels(3, 7)


def squared_hinge(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    margins = torch.relu(1 - output.gather(1, target[:, None]) + output)
    return margins.pow(2).sum(dim=1).mean()


def focal(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    probability = output.softmax(dim=1).gather(1, target[:, None])
    return ((1 - probability) ** 2 * -probability.log()).mean()


CLASSIFICATION: dict[str, tuple[Loss, Callable[[], torch.Tensor]]] = {
    "cross_entropy_class_weights": (nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0])), hard_labels),
    "cross_entropy_label_smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), hard_labels),
    "cross_entropy_ignore_index": (nn.CrossEntropyLoss(), masked_labels),
    "cross_entropy_soft_targets": (nn.CrossEntropyLoss(), soft_labels),
    "cross_entropy_sum": (nn.CrossEntropyLoss(reduction="sum"), hard_labels),
    "cross_entropy_everything_at_once": (
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0]), label_smoothing=0.2, reduction="sum"),
        masked_labels,
    ),
    "cross_entropy_function": (F.cross_entropy, hard_labels),
    "nll_of_log_softmax": (lambda output, target: F.nll_loss(output.log_softmax(dim=1), target), hard_labels),
    "kl_divergence": (
        lambda output, target: F.kl_div(output.log_softmax(dim=1), target, reduction="batchmean"),
        soft_labels,
    ),
    "squared_hinge": (squared_hinge, hard_labels),
    "focal": (focal, hard_labels),
}


def welsch(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (1 - torch.exp(-((output - target) ** 2) / 2)).mean()


def cauchy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.log1p(4 * (output - target) ** 2).sum(dim=1).mean()


def one_minus_cosine(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (1 - torch.cos(output - target)).mean()


def one_minus_cosine_similarity(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (1 - F.cosine_similarity(output, target, dim=1)).mean()


def log_sum_exp(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(output - target, dim=1).mean()


def concave(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -((output - target) ** 2).mean()


REGRESSION: dict[str, Loss] = {
    "mse_mean": nn.MSELoss(),
    "mse_sum": nn.MSELoss(reduction="sum"),
    "huber": nn.HuberLoss(delta=0.7),
    "smooth_l1": nn.SmoothL1Loss(beta=0.9),
    "log_sum_exp": log_sum_exp,
    "one_minus_cosine": one_minus_cosine,
    "one_minus_cosine_similarity": one_minus_cosine_similarity,
    "cauchy": cauchy,
    "welsch": welsch,
    "concave": concave,
}

for _name, (_loss, _target) in CLASSIFICATION.items():
    family.add(f"loss_{_name}")(
        lambda loss=_loss, target=_target: (network(3), loss, (torch.randn(7, 4), target()))
    )
for _name, _loss in REGRESSION.items():
    family.add(f"loss_{_name}")(lambda loss=_loss: (network(3), loss, (torch.randn(7, 4), torch.randn(7, 3))))


@family.add()
def loss_bce_with_pos_weight() -> Parts:
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 2.0, 4.0]))
    return network(3), loss, (torch.randn(7, 4), labels(2, 7, 3).float())


@family.add()
def loss_bce_one_logit_squeezed() -> Parts:
    model = nn.Sequential(network(1), nn.Flatten(0))
    return model, nn.BCEWithLogitsLoss(reduction="sum"), (torch.randn(7, 4), labels(2, 7).float())


@family.add()
def loss_poisson() -> Parts:
    return network(2), nn.PoissonNLLLoss(), (torch.randn(7, 4), labels(4, 7, 2).float())


@family.add()
def loss_gaussian_with_learned_variance() -> Parts:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mean, log_variance = output.chunk(2, dim=1)
        return (0.5 * log_variance + 0.5 * (target - mean) ** 2 * torch.exp(-log_variance)).mean()

    return network(2), loss, (torch.randn(7, 4), torch.randn(7, 1))
