"""The everyday cases of `answers.py`: a network, its loss and its data, as a user would write them.

A step takes 0.3 to 5 ms on one core. `build` draws from torch's global generator; data are the same for every
seed. Digits get noise of their own standard deviation, so that no network fits them exactly in 200 steps.
Held out are the twenty cases whose names come first when they are ordered by their SHA-256: nothing is tuned
on them.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from arena.networks import CharacterLSTM, Transformer
from hessinit.digits import load_digits

Examples = tuple[Any, Tensor]
Loss = Callable[[Any, Any], Tensor]
HELD_OUT = 20
TOKENS, LENGTH = 32, 16


@dataclass(frozen=True)
class Case:
    """A network, its loss, and a function that returns all examples.

    `constant` says whether a constant output is a fair comparison: whether its loss has a minimum.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[], Examples]
    loss: Loss = F.cross_entropy
    batch_size: int = 64
    constant: bool = True
    sums: bool = False

    @property
    def held_out(self) -> bool:
        return self.name in held_out_names()


# --- Data -------------------------------------------------------------------------------------------------


def source_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def clean_digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits()
    order = torch.randperm(len(labels), generator=source_of(0))
    return (images[order] - images.mean()) / images.std(), labels[order]


@functools.cache
def digits(noise: float = 1.0, scale: float = 1.0) -> Examples:
    images, labels = clean_digits()
    noisy = images + noise * torch.randn(images.shape, generator=source_of(1))
    return scale * noisy, labels


def flat_digits(noise: float = 1.0, scale: float = 1.0) -> Examples:
    images, labels = digits(noise, scale)
    return images.flatten(1), labels


def raw_pixels() -> Examples:
    """Grey values from 0 to 255, as they come from a file."""
    images, labels = load_digits()
    noise = torch.randn(images.shape, generator=source_of(1))
    return (255 * (images + 0.2 * noise).clamp(0, 1)).flatten(1), labels


def half_precision_digits() -> Examples:
    images, labels = flat_digits()
    return images.bfloat16(), labels


def changed_labels() -> Examples:
    images, labels = flat_digits()
    return images, (3 * labels + 1) % 10


def flipped_digits() -> Examples:
    images, labels = digits()
    return images.flip(-1).flatten(1), labels


def digit_attributes() -> Examples:
    """Ten yes-or-no attributes of every digit."""
    images, labels = flat_digits()
    table = torch.rand(10, 10, generator=source_of(2)) < 0.3
    return images, table[labels].float()


def rare_digit() -> Examples:
    """Is it a 7? One in ten is."""
    images, labels = flat_digits()
    return images, (labels == 7).float().unsqueeze(1)


def soft_digits() -> Examples:
    """What a trained teacher says, at temperature 2."""
    images, _ = flat_digits()
    teacher = mlp(64, 64, 10)
    teacher.load_state_dict(pretrained(64, 64, 10))
    with torch.no_grad():
        return images, (teacher(images) / 2).softmax(1)


def inked_pixels() -> Examples:
    images, _ = digits()
    return images, (clean_digits()[0] > 0).float()


def labelled_pixels() -> Examples:
    """Background, ink, and pixels in between that count for nothing."""
    grey = clean_digits()[0].squeeze(1)
    labels = (grey > 0).long().masked_fill(grey.abs() < 0.3, -100)
    labels[:, 0, 0] = 0
    return digits()[0], labels


def same_digits(noise: float = 0.5) -> Examples:
    images, _ = digits(noise)
    return images.flatten(1), clean_digits()[0].flatten(1)


def grey_digits() -> Examples:
    """Grey values in [0, 1] and, for a VAE, the noise of its latents."""
    images, _ = load_digits()
    noise = torch.randn(len(images), 8, generator=source_of(3))
    return (images.flatten(1), noise), images.flatten(1)


def smooth_images() -> Examples:
    """Smooth colour images of 16 × 16 pixels, and noise for the latents."""
    coarse = torch.rand(1500, 3, 4, 4, generator=source_of(4))
    images = (0.15 + 0.7 * F.interpolate(coarse, 16, mode="bicubic")).clamp(0, 1).flatten(1)
    return (images, torch.randn(1500, 16, generator=source_of(5))), images


def diffused_digits() -> Examples:
    """Digits at a random time of a diffusion, the time, and the noise to predict."""
    images = torch.cat([clean_digits()[0].flatten(1)] * 3)
    noise = torch.randn(images.shape, generator=source_of(6))
    time = torch.rand(len(images), 1, generator=source_of(7))
    signal = torch.cos(math.pi / 2 * time)
    return torch.cat([signal * images + (1 - signal**2).sqrt() * noise, time], 1), noise


def two_views() -> Examples:
    """Every digit with noise, twice; the targets are not used."""
    images = clean_digits()[0].flatten(1)
    views = [images + torch.randn(images.shape, generator=source_of(seed)) for seed in (8, 9)]
    return (views[0], views[1]), torch.zeros(len(images))


def digit_pairs() -> Examples:
    images, labels = flat_digits()
    other = torch.randint(len(labels), labels.shape, generator=source_of(10))
    partner = torch.where(torch.arange(len(labels)) % 2 == 0, other, same_class(labels))
    return (images, images[partner]), (labels == labels[partner]).float()


def digit_triplets() -> Examples:
    images, labels = flat_digits()
    far = torch.randint(len(labels), labels.shape, generator=source_of(11))
    return (images, images[same_class(labels)], images[far]), torch.zeros(len(labels))


def same_class(labels: Tensor) -> Tensor:
    """For each example the next one of its class."""
    following = torch.empty_like(labels)
    for label in labels.unique():
        members = (labels == label).nonzero().squeeze(1)
        following[members] = members.roll(1)
    return following


def real_or_fake() -> Examples:
    real = clean_digits()[0].flatten(1)
    fake = real[torch.randperm(len(real), generator=source_of(12))].roll(4, 1)
    images = torch.cat([real, 0.5 * (fake + fake.flip(0))])
    images = images + 0.5 * torch.randn(images.shape, generator=source_of(13))
    return images, torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])


@functools.cache
def features(inputs: int = 10, count: int = 1024) -> Tensor:
    return torch.randn(count, inputs, generator=source_of(14))


@functools.cache
def table(scale: float = 1.0, noise: float = 0.3) -> Examples:
    """A smooth function of ten features, with noise."""
    x = features()
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.5 * x[:, 3:4]
    return x, scale * (y + noise * torch.randn(y.shape, generator=source_of(15)))


def steep_table() -> Examples:
    """Linear regression whose features have scales from 0.03 to 3."""
    x = features(20) * torch.logspace(-1.5, 0.5, 20)
    weights = torch.randn(20, 1, generator=source_of(16))
    return x, x @ weights + 0.1 * torch.randn(len(x), 1, generator=source_of(17))


def counts() -> Examples:
    x, y = table()
    return x, torch.poisson((0.7 * y).exp(), generator=source_of(18))


def heavy_tails() -> Examples:
    x, y = table()
    outlier = torch.rand(y.shape, generator=source_of(19)) < 0.05
    return x, torch.where(outlier, 10 * y, y)


def quiet_table() -> Examples:
    """A deterministic function: likelihoods exceed 1, so that their loss becomes negative."""
    x, y = table(noise=0.02)
    return x, 0.05 * y


def moons() -> Examples:
    """Two moons of small extent: the density is large and the loss of a flow negative."""
    angle = math.pi * torch.rand(2000, generator=source_of(20))
    side = (torch.arange(2000) % 2).float()
    circle = torch.stack([torch.cos(angle), torch.sin(angle)], 1) * (1 - 2 * side)[:, None]
    points = circle + torch.stack([side - 0.5, 0.5 * side - 0.25], 1)
    return 0.1 * (points + 0.05 * torch.randn(2000, 2, generator=source_of(21))), torch.zeros(2000)


def collocation() -> Examples:
    """Points inside, points at time 0, and the solution there: Burgers' equation."""
    inside = torch.rand(2000, 2, generator=source_of(22)) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0])
    start = 2 * torch.rand(2000, 1, generator=source_of(23)) - 1
    return (inside, torch.cat([start, torch.zeros_like(start)], 1)), -torch.sin(math.pi * start)


def pixels_of_an_image() -> Examples:
    """Coordinates of an image of 32 × 32 pixels and its grey values."""
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, 32)] * 2, indexing="ij"), -1).view(-1, 2)
    images = clean_digits()[0][:16].view(4, 4, 8, 8).permute(0, 2, 1, 3).reshape(-1, 1)
    return grid, images


def sets() -> Examples:
    """Twelve points; how far they are spread."""
    spread = 0.3 + torch.rand(1500, 1, 1, generator=source_of(24))
    points = spread * torch.randn(1500, 12, 3, generator=source_of(25))
    return points, spread.view(-1, 1)


def ratings() -> Examples:
    """Users, items and ratings of rank 4."""
    source = source_of(26)
    users, items = torch.randn(60, 4, generator=source), torch.randn(80, 4, generator=source)
    pairs = torch.stack([torch.randint(size, (3000,), generator=source) for size in (60, 80)], 1)
    rating = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) / 2
    return pairs, 3 + rating + 0.3 * torch.randn(3000, generator=source)


@functools.cache
def walks(count: int = 1200, length: int = LENGTH) -> Tensor:
    """Walks over a graph of tokens: after each one there are four that may follow."""
    source = source_of(27)
    following = torch.randint(TOKENS, (TOKENS, 4), generator=source)
    likely = torch.tensor([0.5, 0.3, 0.15, 0.05])
    token = torch.randint(TOKENS, (count,), generator=source)
    tokens = [token]
    for _ in range(length):
        choice = torch.multinomial(likely.expand(count, 4), 1, generator=source).squeeze(1)
        token = following[token, choice]
        tokens.append(token)
    return torch.stack(tokens, 1)


def next_tokens() -> Examples:
    tokens = walks()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def masked_tokens() -> Examples:
    tokens = walks()[:, :-1]
    hidden = torch.rand(tokens.shape, generator=source_of(28)) < 0.2
    hidden[:, 3] = True
    return tokens.masked_fill(hidden, TOKENS), tokens.masked_fill(~hidden, -100)


def neighbours() -> Examples:
    """Tokens, those beside them or drawn at random, and which of both it is."""
    tokens = walks()
    near = torch.stack([tokens[:, :-1].flatten(), tokens[:, 1:].flatten()], 1)[:4000]
    far = torch.randint(TOKENS, (8000,), generator=source_of(29))
    pairs = torch.cat([near, torch.stack([near[:, 0].repeat(2), far], 1)])
    return pairs, (torch.arange(len(pairs)) < len(near)).float()


def reversed_tokens() -> Examples:
    """A sequence, what a decoder is given, and what it should say: the sequence backwards."""
    tokens = walks(length=8)[:, 1:]
    wanted = tokens.flip(1)
    given = torch.cat([torch.full((len(wanted), 1), TOKENS), wanted[:, :-1]], 1)
    return (tokens, given), wanted


def parity() -> Examples:
    """Noisy waves of two frequencies, to be told apart."""
    time = torch.arange(24.0)
    label = torch.arange(1200) % 3
    phase = 2 * math.pi * torch.rand(1200, 1, generator=source_of(30))
    waves = torch.sin((0.4 + 0.15 * label[:, None]) * time + phase)
    return (waves + 0.5 * torch.randn(waves.shape, generator=source_of(31))).unsqueeze(-1), label


def spoken() -> Examples:
    """Four symbols of six, each for five frames, for CTC."""
    symbols = torch.randint(1, 7, (800, 4), generator=source_of(32))
    sound = torch.randn(7, 8, generator=source_of(33))
    frames = sound[symbols].repeat_interleave(5, 1)
    return frames + 0.5 * torch.randn(frames.shape, generator=source_of(34)), symbols


@functools.cache
def communities() -> tuple[Tensor, Tensor, Tensor]:
    """A normalized adjacency matrix, features of the nodes, and their communities."""
    label = torch.arange(400) % 4
    likely = torch.where(label[:, None] == label[None], 0.05, 0.01)
    linked = (torch.rand(400, 400, generator=source_of(35)) < likely).float().triu(1)
    linked = linked + linked.T + torch.eye(400)
    degree = linked.sum(1).rsqrt()
    centre = torch.randn(4, 16, generator=source_of(36))[label]
    nodes = centre + 2 * torch.randn(400, 16, generator=source_of(37))
    return degree[:, None] * linked * degree, nodes, label


def nodes_of_a_graph() -> Examples:
    return torch.arange(400), communities()[2]


def molecules() -> Examples:
    """Graphs of ten nodes as adjacency matrices with features; a property of the whole graph."""
    linked = (torch.rand(800, 10, 10, generator=source_of(38)) < 0.25).float().triu(1)
    linked = linked + linked.transpose(1, 2)
    nodes = torch.randn(800, 10, 4, generator=source_of(39))
    wanted = (linked @ nodes * nodes).sum((1, 2)) / 10
    return (linked, nodes), wanted.unsqueeze(1)


def bandit() -> Examples:
    """States, actions that were drawn uniformly, and returns in [0, 1]."""
    state, label = flat_digits()
    action = torch.randint(10, label.shape, generator=source_of(40))
    reward = (action == label).float() + 0.1 * torch.rand(label.shape, generator=source_of(41))
    return state, torch.stack([action.float(), reward], 1)


def transitions() -> Examples:
    """States, actions and targets r + γ max Q of a target network."""
    state = features(8, 1500)
    action = torch.randint(4, (1500,), generator=source_of(42))
    wish = torch.randn(8, 4, generator=source_of(43))
    reward = (state @ wish).gather(1, action[:, None]).squeeze(1).tanh()
    ahead = 0.9 * (0.3 * torch.randn(1500, generator=source_of(44)) + 1)
    return state, torch.stack([action.float(), reward + ahead], 1)


def rollouts() -> Examples:
    """States, actions, the old policy's log-probabilities, advantages and returns."""
    state = features(8, 1500)
    action = torch.randint(4, (1500,), generator=source_of(45))
    wish = torch.randn(8, 4, generator=source_of(46))
    gain = (state @ wish).gather(1, action[:, None]).squeeze(1)
    advantage = (gain - gain.mean()) / gain.std()
    old = torch.full((1500,), math.log(1 / 4))
    returned = state[:, 0].sin() + 0.2 * gain
    return state, torch.stack([action.float(), old, advantage, returned], 1)


def clicks() -> Examples:
    """Three categories of a user and an item; 5 % clicks."""
    source = source_of(47)
    categories = torch.stack([torch.randint(size, (4000,), generator=source) for size in (50, 30, 10)], 1)
    score = sum(torch.randn(size, generator=source)[categories[:, i]] for i, size in enumerate((50, 30, 10)))
    likely = torch.sigmoid(torch.as_tensor(score) - 3.5)
    return categories, (torch.rand(4000, generator=source) < likely).float()


def documents() -> Examples:
    """Pairs of documents for a query, of which the first is the better one."""
    weights = torch.randn(10, 1, generator=source_of(48))
    first, second = features(), torch.randn(1024, 10, generator=source_of(49))
    noise = torch.randn(1024, 1, generator=source_of(50))
    better = ((first - second) @ weights + noise > 0).float()
    return torch.stack([first * better + second * (1 - better), second * better + first * (1 - better)], 1), (
        torch.ones(1024)
    )


def bags() -> Examples:
    """Bags of eight digits: is there a 3 among them?"""
    images, labels = flat_digits(0.5)
    members = torch.randint(len(labels), (1200, 8), generator=source_of(51))
    return images[members], (labels[members] == 3).any(1).float()


# --- Losses -----------------------------------------------------------------------------------------------


def summed_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, reduction="sum")


def cross_entropy_plus_100(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels) + 100


def cross_entropy_minus_100(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels) - 100


def smoothed_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, label_smoothing=0.1)


def focal(scores: Tensor, labels: Tensor) -> Tensor:
    logarithm = -F.cross_entropy(scores, labels, reduction="none")
    return (-((1 - logarithm.exp()) ** 2) * logarithm).mean()


def cross_entropy_in_float32(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.float(), labels)


def distillation(scores: Tensor, teacher: Tensor) -> Tensor:
    return 4 * F.kl_div((scores / 2).log_softmax(1), teacher, reduction="batchmean")


def hinge(scores: Tensor, labels: Tensor) -> Tensor:
    return F.multi_margin_loss(scores, labels)


def token_cross_entropy(scores: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten(), ignore_index=-100)


def one_hot_mse(scores: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(scores, F.one_hot(labels, 10).to(scores.dtype))


def summed_mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def pinball(outputs: Tensor, targets: Tensor) -> Tensor:
    quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=outputs.dtype)
    miss = targets - outputs
    return torch.maximum(quantiles * miss, (quantiles - 1) * miss).mean()


def poisson_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.poisson_nll_loss(outputs, targets)


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    mean, logarithm = outputs[:, :1], outputs[:, 1:]
    return (0.5 * (logarithm + (targets - mean).square() * (-logarithm).exp())).mean()


def info_nce(output: Tensor, _: Tensor) -> Tensor:
    first, second = F.normalize(output, dim=-1).unbind(1)
    return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))


def contrastive(distance: Tensor, same: Tensor) -> Tensor:
    return (same * distance.square() + (1 - same) * F.relu(1 - distance).square()).mean()


def triplet(output: Tensor, _: Tensor) -> Tensor:
    anchor, near, far = output.unbind(1)
    return F.triplet_margin_loss(anchor, near, far)


def rank_net(scores: Tensor, _: Tensor) -> Tensor:
    return F.softplus(scores[:, 1] - scores[:, 0]).mean()


def vae_loss(pixels: int, latents: int) -> Loss:
    def loss(output: Tensor, images: Tensor) -> Tensor:
        scores, mean, logarithm = output.split([pixels, latents, latents], 1)
        shown = F.binary_cross_entropy_with_logits(scores, images, reduction="none").sum(1)
        divergence = -0.5 * (1 + logarithm - mean.square() - logarithm.exp()).sum(1)
        return (shown + divergence).mean()

    return loss


def flow_loss(output: Tensor, _: Tensor) -> Tensor:
    latent, volume = output[:, :2], output[:, 2]
    return (0.5 * latent.square().sum(1) + math.log(2 * math.pi) - volume).mean()


def pinn_loss(output: Tensor, start: Tensor) -> Tensor:
    residual, value = output[:, :1], output[:, 1:]
    return residual.square().mean() + (value - start).square().mean()


def policy_gradient(scores: Tensor, played: Tensor) -> Tensor:
    logarithm = scores.log_softmax(1)
    chosen = logarithm.gather(1, played[:, :1].long()).squeeze(1)
    entropy = -(logarithm.exp() * logarithm).sum(1)
    return -(played[:, 1] * chosen).mean() - 0.01 * entropy.mean()


def temporal_difference(values: Tensor, played: Tensor) -> Tensor:
    chosen = values.gather(1, played[:, :1].long()).squeeze(1)
    return F.smooth_l1_loss(chosen, played[:, 1])


def clipped_ratio(output: Tensor, played: Tensor) -> Tensor:
    """PPO: the clipped ratio, the value function and the entropy."""
    action, old, advantage, returned = played.unbind(1)
    logarithm, value = output[:, :4].log_softmax(1), output[:, 4]
    ratio = (logarithm.gather(1, action[:, None].long()).squeeze(1) - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    entropy = -(logarithm.exp() * logarithm).sum(1).mean()
    return -gain + 0.5 * (value - returned).square().mean() - 0.01 * entropy


def ctc(output: Tensor, symbols: Tensor) -> Tensor:
    logarithm = output.log_softmax(2).transpose(0, 1)
    frames = torch.full((len(symbols),), len(logarithm), dtype=torch.long)
    lengths = torch.full((len(symbols),), symbols.shape[1], dtype=torch.long)
    return F.ctc_loss(logarithm, symbols, frames, lengths)


# --- Networks ---------------------------------------------------------------------------------------------


def mlp(
    *widths: int, activation: type[nn.Module] = nn.ReLU, norm: Any = None, dropout: float = 0.0
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(widths, widths[1:], strict=False):
        layers.append(nn.Linear(fan_in, fan_out))
        layers += [norm(fan_out)] if norm else []
        layers.append(activation())
        layers += [nn.Dropout(dropout)] if dropout else []
    last = max(i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear))
    return nn.Sequential(*layers[: last + 1])


def he_mlp(depth: int) -> nn.Module:
    model = mlp(64, *[64] * (depth - 1), 10)
    for layer in linear_layers(model):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return model


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


@torch.no_grad()
def dead_mlp() -> nn.Module:
    model = mlp(64, 64, 64, 10)
    for layer in linear_layers(model)[:-1]:
        layer.bias.fill_(-20.0)
    return model


@torch.no_grad()
def saturated_mlp() -> nn.Module:
    model = mlp(64, 64, 64, 10, activation=nn.Sigmoid)
    for layer in linear_layers(model)[:-1]:
        layer.weight.mul_(30)
    return model


def zero_head() -> nn.Module:
    model = mlp(64, 128, 128, 10)
    nn.init.zeros_(model[-1].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model[-1].bias)  # type: ignore[arg-type]
    return model


def zero_mlp() -> nn.Module:
    model = mlp(64, 64, 64, 10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def weight_normed() -> nn.Module:
    model = mlp(64, 96, 96, 10)
    for layer in linear_layers(model):
        parametrizations.weight_norm(layer)
    return model


def spectral_normed() -> nn.Module:
    model = mlp(64, 64, 64, 1, activation=nn.LeakyReLU)
    for layer in linear_layers(model):
        parametrizations.spectral_norm(layer)
    return model


@functools.cache
def pretrained(*widths: int) -> dict[str, Tensor]:
    """The weights of a network that was trained on the digits for 150 steps of Adam."""
    images, labels = flat_digits()
    source = source_of(60)
    with torch.random.fork_rng():
        torch.manual_seed(60)
        model = mlp(*widths)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        rows = torch.randint(len(labels), (64,), generator=source)
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    return model.state_dict()


def pretrained_mlp() -> nn.Sequential:
    model = mlp(64, 128, 128, 10)
    model.load_state_dict(pretrained(64, 128, 128, 10))
    return model


def linear_probe() -> nn.Module:
    model = pretrained_mlp()
    model.requires_grad_(False)
    model[-1] = nn.Linear(128, 10)
    return model


def new_head() -> nn.Module:
    model = pretrained_mlp()
    model[-1] = nn.Linear(128, 10)
    return model


class LowRank(nn.Module):
    """A frozen layer and a product of two thin matrices, the second one zero: LoRA."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_a = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, state: Tensor) -> Tensor:
        return self.layer(state) + 2 * self.lora_b(self.lora_a(state))


def lora_mlp() -> nn.Module:
    layers = [LowRank(layer) if isinstance(layer, nn.Linear) else layer for layer in pretrained_mlp()]
    return nn.Sequential(*layers)


@functools.cache
def pretrained_language_model() -> dict[str, Tensor]:
    """A Transformer that was trained on walks for 150 steps."""
    inputs, targets = next_tokens()
    source = source_of(61)
    with torch.random.fork_rng():
        torch.manual_seed(61)
        model = language_model(norm_first=True)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        rows = torch.randint(len(inputs), (16,), generator=source)
        optimizer.zero_grad()
        token_cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return model.state_dict()


def other_walks() -> Examples:
    """The walks with their tokens renamed."""
    order = torch.randperm(TOKENS, generator=source_of(62))
    inputs, targets = next_tokens()
    return order[inputs], order[targets]


def lora_language_model() -> nn.Module:
    """Adapters on the attention's output and on the feed-forward layers; embeddings frozen."""
    model = language_model(norm_first=True)
    model.load_state_dict(pretrained_language_model(), strict=False)
    model.requires_grad_(False)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.linear1, layer.linear2 = LowRank(layer.linear1), LowRank(layer.linear2)
    model.head = LowRank(model.head)  # type: ignore[arg-type]
    return model.train()


def fine_tuned_language_model() -> nn.Module:
    model = language_model(norm_first=True)
    model.load_state_dict(pretrained_language_model(), strict=False)
    return model


class Experts(nn.Module):
    """Four experts, of which a gate chooses two for every example."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(64, 64), nn.Linear(64, 4)
        self.experts = nn.ModuleList(mlp(64, 64, 10) for _ in range(4))

    def forward(self, images: Tensor) -> Tensor:
        state = torch.relu(self.stem(images))
        scores, chosen = self.gate(state).topk(2, 1)
        weight = torch.zeros(len(state), 4, dtype=state.dtype).scatter(1, chosen, scores.softmax(1))
        outputs = torch.stack([expert(state) for expert in self.experts], 1)
        return (weight.unsqueeze(2) * outputs).sum(1)


class HyperNetwork(nn.Module):
    """A network that computes the weights of another one from the example."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(64, 16), nn.Tanh())
        self.generator = nn.Linear(16, 32 * 10)
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        weights = self.generator(self.embed(images)).view(-1, 32, 10)
        return torch.einsum("ni,nio->no", self.body(images), weights)


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), norm(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), norm(width),
        )  # fmt: skip

    def forward(self, state: Tensor) -> Tensor:
        return torch.relu(state + self.branch(state))


def cnn(norm: Callable[[int], nn.Module] = nn.Identity) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 1
    for width, stride in ((12, 1), (24, 2), (24, 1)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1), norm(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, 10))


def resnet(norm: Callable[[int], nn.Module]) -> nn.Module:
    stem = [nn.Conv2d(1, 12, 3, 2, 1), norm(12), nn.ReLU()]
    blocks = [Residual(12, norm) for _ in range(3)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10))


def tiny_resnet_without_norm() -> nn.Module:
    blocks = [Residual(12, nn.Identity) for _ in range(6)]
    stem = nn.Conv2d(1, 12, 3, 2, 1)
    return nn.Sequential(stem, *blocks, nn.Flatten(), nn.Linear(192, 10))


class VisionTransformer(nn.Module):
    """Encoder layers over patches of 2 × 2 pixels."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        state = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            state = layer(state)
        return self.head(self.norm(state).mean(1))


class Mixer(nn.Module):
    """An MLP-Mixer over patches of 2 × 2 pixels."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.tokens = nn.ModuleList(mlp(16, 32, 16, activation=nn.GELU) for _ in range(layers))
        self.channels = nn.ModuleList(mlp(width, 64, width, activation=nn.GELU) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        state = self.patches(images).flatten(2).transpose(1, 2)
        for i, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            state = state + tokens(self.norms[2 * i](state).transpose(1, 2)).transpose(1, 2)
            state = state + channels(self.norms[2 * i + 1](state))
        return self.head(self.norms[-1](state).mean(1))


class UNet(nn.Module):
    """Two resolutions and a skip connection; `outputs` scores for every pixel."""

    def __init__(self, outputs: int = 1, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join, self.out = nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(width, outputs, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = torch.relu(self.down1(images))
        coarse = torch.relu(self.middle(torch.relu(self.down2(fine))))
        return self.out(torch.relu(self.join(torch.cat([fine, torch.relu(self.up(coarse))], 1))))


class VAE(nn.Module):
    """Returns the scores of the pixels, and mean and log-variance of the latents, side by side."""

    def __init__(self, pixels: int, width: int, latents: int) -> None:
        super().__init__()
        self.encode = nn.Linear(pixels, width)
        self.mean, self.logarithm = nn.Linear(width, latents), nn.Linear(width, latents)
        self.decode = mlp(latents, width, pixels)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        images, noise = inputs
        state = torch.relu(self.encode(images))
        mean, logarithm = self.mean(state), self.logarithm(state)
        return torch.cat([self.decode(mean + noise * (logarithm / 2).exp()), mean, logarithm], 1)


class Flow(nn.Module):
    """RealNVP with four affine couplings in two dimensions: the latents and the log of the volume."""

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(mlp(1, 32, 32, 2, activation=nn.Tanh) for _ in range(4))

    def forward(self, points: Tensor) -> Tensor:
        first, second = points.split(1, 1)
        volume = torch.zeros_like(first)
        for coupling in self.couplings:
            scale, shift = coupling(first).split(1, 1)
            first, second = second * scale.exp() + shift, first
            volume = volume + scale
        return torch.cat([first, second, volume], 1)


class Encoder(nn.Module):
    """One network for the two views, or the three examples, of a contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(64, 96, 16)

    def forward(self, views: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([self.network(view) for view in views], 1)


class Siamese(nn.Module):
    """The distance between the embeddings of two images."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(64, 64, 8)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        difference = self.network(pair[0]) - self.network(pair[1])
        return (difference.square().sum(1) + 1e-6).sqrt()


class Scorer(nn.Module):
    """A score for each of the documents."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(10, 64, 1)

    def forward(self, documents: Tensor) -> Tensor:
        return self.network(documents).squeeze(-1)


class PhysicsInformed(nn.Module):
    """The residual of Burgers' equation and the solution at time 0."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(2, 32, 32, 32, 1, activation=nn.Tanh)

    def forward(self, points: tuple[Tensor, Tensor]) -> Tensor:
        inside, start = points
        inside = inside.detach().requires_grad_(True)
        value = self.network(inside)
        (slope,) = torch.autograd.grad(value.sum(), inside, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), inside, create_graph=True)
        residual = slope[:, 1:] + value * slope[:, :1] - 0.01 * bend[:, :1]
        return torch.cat([residual, self.network(start)], 1)


class Sine(nn.Module):
    """A layer of a SIREN: sin(30 (W x + b))."""

    def __init__(self, fan_in: int, fan_out: int, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(fan_in, fan_out)
        bound = 1 / fan_in if first else math.sqrt(6 / fan_in) / 30
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, state: Tensor) -> Tensor:
        return torch.sin(30 * self.linear(state))


def siren() -> nn.Module:
    head = nn.Linear(48, 1)
    nn.init.uniform_(head.weight, -math.sqrt(6 / 48) / 30, math.sqrt(6 / 48) / 30)
    return nn.Sequential(Sine(2, 48, first=True), Sine(48, 48), head)


class FourierFeatures(nn.Module):
    """Random frequencies and a network behind them, as in NeRF."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 4 * torch.randn(2, 24))
        self.network = mlp(48, 64, 64, 1)

    def forward(self, points: Tensor) -> Tensor:
        angle = points @ self.frequencies
        return self.network(torch.cat([angle.sin(), angle.cos()], 1))


class DeepSets(nn.Module):
    """A network of the sum over the set."""

    def __init__(self) -> None:
        super().__init__()
        self.element, self.rest = mlp(3, 32, 32), mlp(32, 32, 1)

    def forward(self, points: Tensor) -> Tensor:
        return self.rest(self.element(points).sum(1))


class Factorization(nn.Module):
    """Ratings as products of the embeddings of users and items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(60, 8), nn.Embedding(80, 8)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1) + self.mean


class SkipGram(nn.Module):
    """Scores of pairs of tokens by two tables of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(TOKENS, 16), nn.Embedding(TOKENS, 16)
        nn.init.uniform_(self.inner.weight, -0.5 / 16, 0.5 / 16)
        nn.init.zeros_(self.outer.weight)

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.inner(pairs[:, 0]) * self.outer(pairs[:, 1])).sum(1)


class WideAndDeep(nn.Module):
    """Clicks from categories: a linear part and a network over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (50, 30, 10)
        self.wide = nn.ModuleList(nn.Embedding(size, 1) for size in sizes)
        self.deep = nn.ModuleList(nn.Embedding(size, 8) for size in sizes)
        self.network = mlp(24, 32, 1)

    def forward(self, categories: Tensor) -> Tensor:
        columns = categories.unbind(1)
        wide = sum(table(column) for table, column in zip(self.wide, columns, strict=True))
        deep = torch.cat([table(column) for table, column in zip(self.deep, columns, strict=True)], 1)
        return (wide + self.network(deep)).squeeze(1)


class TokenRNN(nn.Module):
    """A recurrent network over tokens."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 48) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, width // 2), nn.Linear(width, TOKENS)
        self.recurrent = kind(width // 2, width, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(tokens))[0])


class WaveRNN(nn.Module):
    """A recurrent network over numbers, of which the last state decides."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(1, width, batch_first=True), nn.Linear(width, 3)

    def forward(self, waves: Tensor) -> Tensor:
        return self.head(self.recurrent(waves)[0][:, -1])


class Temporal(nn.Module):
    """Dilated convolutions over time."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, channels in enumerate((1, width, width)):
            layers += [nn.Conv1d(channels, width, 3, dilation=2**i, padding=2**i), nn.ReLU()]
        self.convolutions, self.head = nn.Sequential(*layers), nn.Linear(width, 3)

    def forward(self, waves: Tensor) -> Tensor:
        return self.head(self.convolutions(waves.transpose(1, 2)).mean(2))


class Listener(nn.Module):
    """Scores of symbols for every frame."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(8, width, batch_first=True), nn.Linear(width, 7)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.recurrent(frames)[0])


def language_model(*, norm_first: bool) -> nn.Module:
    return Transformer(TOKENS, LENGTH, norm_first=norm_first, width=32, layers=2)


class MaskedLanguageModel(nn.Module):
    """Post-LN encoder layers with weights of standard deviation 0.02, as BERT has them."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(TOKENS + 1, width), nn.Embedding(LENGTH, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, TOKENS)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.norm(self.embed(tokens) + self.position.weight)
        for layer in self.layers:
            state = layer(state)
        return self.head(state)


class TiedLanguageModel(nn.Module):
    """An LSTM whose output layer is its embedding."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(tokens))[0])


class EncoderDecoder(nn.Module):
    """torch's Transformer with an encoder and a decoder."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS + 1, width)
        self.position = nn.Parameter(0.1 * torch.randn(1, 8, width))
        self.transformer = nn.Transformer(width, 2, 1, 1, 2 * width, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(width, TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(8), persistent=False)

    def forward(self, tokens: tuple[Tensor, Tensor]) -> Tensor:
        source, given = (self.embed(part) + self.position for part in tokens)
        return self.head(self.transformer(source, given, tgt_mask=self.mask))


class GraphConvolution(nn.Module):
    """Two graph convolutions over one graph; the scores of the nodes asked for."""

    def __init__(self) -> None:
        super().__init__()
        adjacency, nodes, _ = communities()
        self.register_buffer("adjacency", adjacency)
        self.register_buffer("nodes", nodes)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, asked: Tensor) -> Tensor:
        state = torch.relu(self.adjacency @ self.first(self.nodes))
        return (self.adjacency @ self.second(state))[asked]


class MessagePassing(nn.Module):
    """Sums of messages over three rounds, and a sum over the graph."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.messages = nn.ModuleList(mlp(2 * width, width, width) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, graphs: tuple[Tensor, Tensor]) -> Tensor:
        linked, state = graphs[0], self.embed(graphs[1])
        for message in self.messages:
            state = state + message(torch.cat([state, linked @ state], 2))
        return self.head(state.sum(1))


class NeuralODE(nn.Module):
    """Eight steps of Runge and Kutta's second order through one network."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem, self.field = nn.Linear(64, width), mlp(width, width, width, activation=nn.Tanh)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        state = self.stem(images)
        for _ in range(8):
            state = state + self.field(state + self.field(state) / 16) / 8
        return self.head(state)


class MultipleInstance(nn.Module):
    """Attention over the members of a bag."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.weigh = mlp(64, width, width), mlp(width, width, 1, activation=nn.Tanh)
        self.head = nn.Linear(width, 1)

    def forward(self, bag: Tensor) -> Tensor:
        state = torch.relu(self.embed(bag))
        attention = self.weigh(state).softmax(1)
        return self.head((attention * state).sum(1)).squeeze(1)


def bfloat16_mlp() -> nn.Module:
    return mlp(64, 96, 10).bfloat16()


def softmax_before_cross_entropy() -> nn.Module:
    return nn.Sequential(*mlp(64, 96, 10), nn.Softmax(1))


part = functools.partial
BCE: Loss = F.binary_cross_entropy_with_logits
MSE: Loss = F.mse_loss
ALL = (
    Case("logistic regression", part(nn.Linear, 64, 10), flat_digits),
    Case("mlp", part(mlp, 64, 128, 128, 10), flat_digits),
    Case("mlp, dropout", part(mlp, 64, 128, 128, 10, dropout=0.3), flat_digits),
    Case("mlp, LayerNorm", part(mlp, 64, 96, 96, 96, 10, norm=nn.LayerNorm, activation=nn.GELU), flat_digits),
    Case("mlp, BatchNorm", part(mlp, 64, 96, 96, 96, 10, norm=nn.BatchNorm1d), flat_digits),
    Case("mlp, squared error of one-hot labels", part(mlp, 64, 96, 10), flat_digits, one_hot_mse),
    Case("selu, 8 layers", part(mlp, 64, *[64] * 7, 10, activation=nn.SELU), flat_digits),
    Case("deep linear", part(mlp, 64, *[64] * 5, 10, activation=nn.Identity), flat_digits),
    Case("tanh, 10 layers", part(mlp, 64, *[64] * 9, 10, activation=nn.Tanh), flat_digits),
    Case("tanh, 30 layers", part(mlp, 64, *[64] * 29, 10, activation=nn.Tanh), flat_digits),
    Case("sigmoid, 3 layers", part(mlp, 64, 64, 64, 10, activation=nn.Sigmoid), flat_digits),
    Case("sigmoid, 30 layers", part(mlp, 64, *[64] * 29, 10, activation=nn.Sigmoid), flat_digits),
    Case("relu, 20 layers", part(mlp, 64, *[64] * 19, 10), flat_digits),
    Case("relu, 10 layers, He", part(he_mlp, 10), flat_digits),
    Case("dead relu", dead_mlp, flat_digits),
    Case("saturated sigmoid", saturated_mlp, flat_digits),
    Case("inputs times 1000", part(mlp, 64, 96, 96, 10), part(flat_digits, 1.0, 1000.0)),
    Case("inputs times 0.001", part(mlp, 64, 96, 96, 10), part(flat_digits, 1.0, 0.001)),
    Case("pixels from 0 to 255", part(mlp, 64, 96, 96, 10), raw_pixels),
    Case("zero head", zero_head, flat_digits),
    Case("zero network", zero_mlp, flat_digits),
    Case("cnn", cnn, digits),
    Case("cnn, BatchNorm", part(cnn, nn.BatchNorm2d), digits),
    Case("resnet, BatchNorm", part(resnet, nn.BatchNorm2d), digits),
    Case("resnet, GroupNorm", part(resnet, part(nn.GroupNorm, 4)), digits),
    Case("resnet, no norm", tiny_resnet_without_norm, digits),
    Case("vision transformer", VisionTransformer, digits),
    Case("mlp-mixer", Mixer, digits),
    Case("bfloat16", bfloat16_mlp, half_precision_digits, cross_entropy_in_float32),
    Case("weight norm", weight_normed, flat_digits),
    Case("mixture of experts", Experts, flat_digits),
    Case("hypernetwork", HyperNetwork, flat_digits),
    Case("neural ode", NeuralODE, flat_digits),
    Case("linear probe", linear_probe, changed_labels),
    Case("new head on pretrained", new_head, changed_labels),
    Case("full fine-tuning", pretrained_mlp, flipped_digits),
    Case("lora, mlp", lora_mlp, changed_labels),
    Case("lora, language model", lora_language_model, other_walks, token_cross_entropy, 16),
    Case("fine-tuned language model", fine_tuned_language_model, other_walks, token_cross_entropy, 16),
    Case("cross-entropy plus 100", part(mlp, 64, 96, 10), flat_digits, cross_entropy_plus_100),
    Case("cross-entropy minus 100", part(mlp, 64, 96, 10), flat_digits, cross_entropy_minus_100),
    Case("summed cross-entropy", part(mlp, 64, 96, 10), flat_digits, summed_cross_entropy, sums=True),
    Case("label smoothing", part(mlp, 64, 128, 10), flat_digits, smoothed_cross_entropy),
    Case("focal loss", part(mlp, 64, 96, 10), flat_digits, focal),
    Case("distillation", part(mlp, 64, 32, 10), soft_digits, distillation),
    Case("multi-label", part(mlp, 64, 96, 10), digit_attributes, BCE),
    Case("rare positives", part(mlp, 64, 96, 1), rare_digit, BCE),
    Case("hinge loss", part(mlp, 64, 96, 10), flat_digits, hinge),
    Case("double softmax", softmax_before_cross_entropy, flat_digits),
    Case("siamese, contrastive", Siamese, digit_pairs, contrastive),
    Case("infonce", Encoder, two_views, info_nce, constant=False),
    Case("triplets", Encoder, digit_triplets, triplet, constant=False),
    Case("ranknet", Scorer, documents, rank_net, constant=False),
    Case("gan discriminator, spectral norm", spectral_normed, real_or_fake, BCE),
    Case("gan discriminator", part(mlp, 64, 96, 96, 1, activation=nn.LeakyReLU), real_or_fake, BCE),
    Case("u-net, ink", UNet, inked_pixels, BCE, 32),
    Case("u-net, ignored pixels", part(UNet, 2), labelled_pixels, batch_size=32),
    Case("autoencoder", part(mlp, 64, 48, 12, 48, 64), same_digits, MSE),
    Case("autoencoder, summed error", part(mlp, 64, 48, 12, 48, 64, activation=nn.Tanh), same_digits,
         summed_mse, sums=True),
    Case("vae, digits", part(VAE, 64, 64, 8), grey_digits, vae_loss(64, 8)),
    Case("vae, images", part(VAE, 768, 64, 16), smooth_images, vae_loss(768, 16)),
    Case("diffusion", part(mlp, 65, 128, 128, 64, activation=nn.SiLU), diffused_digits, MSE),
    Case("normalizing flow", Flow, moons, flow_loss, constant=False),
    Case("linear regression, badly conditioned", part(nn.Linear, 20, 1), steep_table, MSE),
    Case("regression", part(mlp, 10, 64, 64, 1), table, MSE),
    Case("regression, targets times 1000", part(mlp, 10, 64, 64, 1), part(table, 1000.0), MSE),
    Case("huber", part(mlp, 10, 64, 1), heavy_tails, F.huber_loss),
    Case("quantiles", part(mlp, 10, 64, 3), table, pinball),
    Case("poisson nll", part(mlp, 10, 64, 1), counts, poisson_nll),
    Case("gaussian nll", part(mlp, 10, 64, 2, activation=nn.SiLU), quiet_table, gaussian_nll),
    Case("pinn", PhysicsInformed, collocation, pinn_loss, 128, constant=False),
    Case("siren", siren, pixels_of_an_image, MSE, 128),
    Case("fourier features", FourierFeatures, pixels_of_an_image, MSE, 128),
    Case("deep sets", DeepSets, sets, MSE),
    Case("matrix factorization", Factorization, ratings, MSE, 128),
    Case("skip-gram", SkipGram, neighbours, BCE, 128),
    Case("clicks, wide and deep", WideAndDeep, clicks, BCE, 128),
    Case("policy gradient", part(mlp, 64, 64, 10, activation=nn.Tanh), bandit, policy_gradient,
         constant=False),
    Case("dqn", part(mlp, 8, 64, 64, 4), transitions, temporal_difference, constant=False),
    Case("ppo", part(mlp, 8, 64, 64, 5, activation=nn.Tanh), rollouts, clipped_ratio, constant=False),
    Case("rnn", part(TokenRNN, nn.RNN), next_tokens, token_cross_entropy, 16),
    Case("lstm", part(CharacterLSTM, TOKENS, 48), next_tokens, token_cross_entropy, 16),
    Case("gru over waves", WaveRNN, parity, batch_size=32),
    Case("tied embeddings", TiedLanguageModel, next_tokens, token_cross_entropy, 16),
    Case("transformer, pre-LN", part(language_model, norm_first=True), next_tokens,
         token_cross_entropy, 16),
    Case("transformer, post-LN", part(language_model, norm_first=False), next_tokens,
         token_cross_entropy, 16),
    Case("masked language model", MaskedLanguageModel, masked_tokens, token_cross_entropy, 16),
    Case("encoder and decoder", EncoderDecoder, reversed_tokens, token_cross_entropy, 32),
    Case("dilated convolutions", Temporal, parity),
    Case("ctc", Listener, spoken, ctc, 32, constant=False),
    Case("graph convolution", GraphConvolution, nodes_of_a_graph),
    Case("message passing", MessagePassing, molecules, MSE),
    Case("multiple instances", MultipleInstance, bags, BCE, 32),
)  # fmt: skip
CASES = {case.name: case for case in ALL}


@functools.cache
def held_out_names() -> frozenset[str]:
    ordered = sorted(CASES, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return frozenset(ordered[:HELD_OUT])
