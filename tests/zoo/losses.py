"""One network, every loss: weighted, smoothed, masked, summed, robust, convex or not, and over the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny import Net
from zoo.problem import Parts, classify, classify_by, labels, mlp, problems

Loss = Callable[[Tensor, Tensor], Tensor]


def network(outputs: int = 3) -> nn.Module:
    return mlp(4, 5, outputs)


def masked_labels() -> Tensor:
    target = labels(3, 7)
    target[[1, 4]] = -100
    return target


def soft_labels() -> Tensor:
    return torch.randn(7, 3).softmax(dim=1)


def hard_labels() -> Tensor:
    return labels(3, 7)


def squared_hinge(output: Tensor, target: Tensor) -> Tensor:
    return torch.relu(1 - output.gather(1, target[:, None]) + output).pow(2).sum(dim=1).mean()


def focal(output: Tensor, target: Tensor) -> Tensor:
    probability = output.softmax(dim=1).gather(1, target[:, None])
    return ((1 - probability) ** 2 * -probability.log()).mean()


CLASSIFICATION: dict[str, tuple[Loss, Callable[[], Tensor]]] = {
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
    "kl_divergence": (lambda z, t: F.kl_div(z.log_softmax(dim=1), t, reduction="batchmean"), soft_labels),
    "squared_hinge": (squared_hinge, hard_labels),
    "focal": (focal, hard_labels),
}
REGRESSION: dict[str, Loss] = {
    "mse_mean": nn.MSELoss(),
    "mse_sum": nn.MSELoss(reduction="sum"),
    "huber": nn.HuberLoss(delta=0.7),
    "smooth_l1": nn.SmoothL1Loss(beta=0.9),
    "log_sum_exp": lambda output, target: torch.logsumexp(output - target, dim=1).mean(),
    "one_minus_cosine": lambda output, target: (1 - torch.cos(output - target)).mean(),
    "one_minus_cosine_similarity": lambda z, target: (1 - F.cosine_similarity(z, target, dim=1)).mean(),
    "cauchy": lambda output, target: torch.log1p(4 * (output - target) ** 2).sum(dim=1).mean(),
    "welsch": lambda output, target: (1 - torch.exp(-((output - target) ** 2) / 2)).mean(),
    "concave": lambda output, target: -((output - target) ** 2).mean(),
}


def gaussian(output: Tensor, target: Tensor) -> Tensor:
    """Mean and variance are both learned."""
    mean, log_variance = output.chunk(2, dim=1)
    return (0.5 * log_variance + 0.5 * (target - mean) ** 2 * torch.exp(-log_variance)).mean()


BINARY = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 2.0, 4.0]))
SUMMED = nn.BCEWithLogitsLoss(reduction="sum")
TABLE: dict[str, Callable[[], Parts]] = {
    **{
        f"loss_{name}": lambda loss=loss, target=target: (network(), loss, (torch.randn(7, 4), target()))
        for name, (loss, target) in CLASSIFICATION.items()
    },
    **{
        f"loss_{name}": lambda loss=loss: (network(), loss, (torch.randn(7, 4), torch.randn(7, 3)))
        for name, loss in REGRESSION.items()
    },
    "loss_bce_with_pos_weight": lambda: (network(), BINARY, (torch.randn(7, 4), labels(2, 7, 3).float())),
    "loss_bce_one_logit_squeezed": lambda: (
        nn.Sequential(network(1), nn.Flatten(0)), SUMMED, (torch.randn(7, 4), labels(2, 7).float())
    ),
    "loss_poisson": lambda: (network(2), nn.PoissonNLLLoss(), (torch.randn(7, 4), labels(4, 7, 2).float())),
    "loss_gaussian_with_learned_variance": lambda: (
        network(2), gaussian, (torch.randn(7, 4), torch.randn(7, 1))
    ),
}  # fmt: skip
PROBLEMS = problems(TABLE)

# Examples that see each other, in the model or in the loss: no factorization by example holds here.


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Every other example of the batch is a negative, as in CLIP."""
    return F.cross_entropy(output @ target.t(), torch.arange(len(output), device=output.device))


def self_contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Pairs of outputs meet: the loss's Hessian has blocks off the diagonal, and is indefinite."""
    return F.cross_entropy(output @ output.roll(1, dims=0).t(), target)


def batch_correlation(output: Tensor, target: Tensor) -> Tensor:
    centred = output - output.mean(dim=0)
    identity = torch.eye(output.shape[1], device=output.device)
    return (centred.t() @ centred / len(output) - identity).pow(2).sum()


def squared_mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean(dim=0).pow(2).sum()


def with_targets(loss: Loss) -> Parts:
    return network(), loss, (torch.randn(5, 4), torch.randn(5, 3))


COUPLED = problems(
    {
        "loss_contrastive_against_targets": lambda: with_targets(contrastive),
        "loss_contrastive_between_outputs": lambda: (
            network(), self_contrastive, (torch.randn(5, 4), torch.arange(5))
        ),
        "loss_of_batch_correlation": lambda: with_targets(batch_correlation),
        "loss_square_of_the_batch_mean": lambda: with_targets(squared_mean),
        "model_centres_over_the_batch": lambda: classify(
            nn.Sequential(nn.Linear(4, 5), Net(lambda _, x: x - x.mean(0)), nn.ReLU(), nn.Linear(5, 3)), 6, 4
        ),
        # A transformer layer that was given its batch in the wrong place: the examples attend to each other.
        "model_attends_over_the_batch": lambda: classify_by(
            lambda m, x: m.head(m.attention(x, x, x, need_weights=False)[0]), 5, 4,
            attention=nn.MultiheadAttention(4, 2), head=nn.Linear(4, 3),
        ),
    }
)  # fmt: skip
