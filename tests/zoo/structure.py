"""Shapes of networks and of batches, and weights outside the well-known modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tiny import Net
from zoo.problem import Parts, classify, classify_by, classify_tokens, labels, mlp, problems, regress


def residual(*branch: nn.Module) -> nn.Module:
    return Net(lambda m, x: x + m.branch(x), branch=nn.Sequential(*branch))


def residual_convolutions() -> Parts:
    branch = residual(nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, 2, 3, padding=1))
    return classify(nn.Sequential(branch, nn.Flatten(), nn.Linear(18, 3)), 4, 2, 3, 3)


def inplace_activations() -> Parts:
    acts = iter((nn.ReLU, nn.SiLU, nn.ELU, nn.Identity))
    return classify(mlp(5, 6, 5, 4, 3, act=lambda: next(acts)(inplace=True)), 6, 5)


def in_place(model: Any, signal: Tensor) -> Tensor:
    hidden = model.inner(signal)
    hidden += hidden.mean(dim=2, keepdim=True)
    hidden.clamp_(-0.6, 0.6)
    return model.outer(hidden.flatten(1)).mul_(1.5)


def frozen() -> Parts:
    model = mlp(4, 5, 5, 3)
    model[0].requires_grad_(False)
    return classify(model, 6, 4)


def dropout(rate: float, training: bool) -> Parts:
    layers = nn.Linear(4, 6), nn.ReLU(), nn.Dropout(rate), nn.Linear(6, 3)
    model, *rest = classify(nn.Sequential(*layers), 6, 4)
    return model.train(training), *rest


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.tokens, self.head = nn.Linear(3, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, numbers: Tensor, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.numbers(numbers) + self.tokens(tokens)))


class DictionaryOut(TwoInputs):
    def forward(self, numbers: Tensor, tokens: Tensor) -> Any:
        return {"logits": super().forward(numbers, tokens), "extra": numbers}


@dataclass(frozen=True)
class Record:
    numbers: Tensor
    tokens: Tensor


def two_inputs(pack: Callable[[Tensor, Tensor], Any], model: type[nn.Module] = TwoInputs) -> Parts:
    built = model()
    return built, nn.CrossEntropyLoss(), (pack(torch.randn(6, 3), labels(5, 6)), labels(3, 6))


def named(numbers: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    return {"numbers": numbers, "tokens": tokens}


def uneven_list_of_batches() -> Parts:
    batches = [(torch.randn(size, 4), labels(3, size)) for size in (5, 5, 1)]
    return mlp(4, 5, 3, act=nn.GELU), nn.CrossEntropyLoss(), batches


def uneven_data_loader() -> Parts:
    data = TensorDataset(torch.randn(11, 4), torch.randn(11, 3))
    return mlp(4, 5, 3, act=nn.GELU), nn.MSELoss(), DataLoader(data, batch_size=4)


def uneven_batches_of_dictionaries() -> Parts:
    batches = [(named(torch.randn(size, 3), labels(5, size)), labels(3, size)) for size in (4, 2)]
    return TwoInputs(), nn.CrossEntropyLoss(), batches


def normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.6 * torch.randn(*shape))


def with_own_parameters(m: Any, features: Tensor) -> Tensor:
    hidden = torch.tanh(F.linear(features, m.by_linear))
    hidden = torch.tanh(torch.matmul(hidden, m.by_matmul))
    return torch.einsum("ni,hio->nho", hidden, m.by_einsum).mean(dim=1)


class Conv1D(nn.Module):
    """The Hugging Face layer of that name: a linear layer that keeps its weight as (in, out)."""

    def __init__(self, out: int, features: int) -> None:
        super().__init__()
        self.weight, self.bias = normal(features, out), nn.Parameter(torch.zeros(out))

    def forward(self, features: Tensor) -> Tensor:
        shape = (*features.shape[:-1], len(self.bias))
        return torch.addmm(self.bias, features.reshape(-1, features.shape[-1]), self.weight).view(shape)


class StandardizedConv2d(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        weight = centred / (centred.pow(2).mean(dim=(1, 2, 3), keepdim=True) + 1e-5).sqrt()
        return F.conv2d(images, weight, self.bias)


class ScaledLinear(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        return 3.0 * super().forward(features.sin())


def double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def shift(module: nn.Module, inputs: Any) -> tuple[Tensor]:
    return (inputs[0] + 0.5,)


def users_own_forward_hooks() -> Parts:
    model = mlp(4, 5, 3)
    model[0].register_forward_hook(double)
    model[2].register_forward_pre_hook(shift)
    return classify(model, 6, 4)


def make_weights(m: Any, features: Tensor) -> Tensor:
    """A hypernetwork: one layer's output is the next one's weight."""
    weight = m.maker(features[:, :2]).unflatten(1, (4, 3))
    return m.head(torch.tanh(torch.bmm(weight, features[:, 2:, None]).squeeze(2)))


TABLE: dict[str, Callable[[], Parts]] = {
    "residual_mlp": lambda: classify(
        nn.Sequential(*[residual(*mlp(4, 5, 4, act=nn.ReLU)) for _ in range(2)], nn.Linear(4, 3)), 6, 4
    ),
    "residual_convolutions": residual_convolutions,
    "inplace_activations": inplace_activations,
    "inplace_arithmetic_on_layer_outputs": lambda: classify_by(
        in_place, 5, 2, 4, inner=nn.Conv1d(2, 3, 2), outer=nn.Linear(9, 3)
    ),
    "sequence_outputs": lambda: classify_tokens(mlp(3, 5, 4, act=nn.ReLU), 4, 3, 3, classes=4),
    "sequence_outputs_regression": lambda: regress(mlp(3, 5, 2), (4, 3, 3), (4, 3, 2)),
    "frozen_weights": frozen,
    "frozen_weight_asked_for_by_name": frozen,
    "dropout_in_eval_mode": lambda: dropout(0.5, training=False),
    "dropout_of_zero_in_train_mode": lambda: dropout(0.0, training=True),
    "unused_layer": lambda: classify_by(
        lambda m, x: m.head(torch.tanh(m.body(x))), 6, 4,
        body=nn.Linear(4, 5), head=nn.Linear(5, 3), unused=nn.Linear(5, 2),
    ),
    "inputs_in_a_dictionary": lambda: two_inputs(named),
    "inputs_in_a_tuple": lambda: two_inputs(lambda *parts: parts),
    "inputs_in_a_dataclass": lambda: two_inputs(Record),
    "nested_inputs_and_dictionary_out": lambda: two_inputs(
        lambda *parts: {"fields": [named(*parts)]}, DictionaryOut
    ),
    "uneven_list_of_batches": uneven_list_of_batches,
    "uneven_data_loader": uneven_data_loader,
    "uneven_batches_of_dictionaries": uneven_batches_of_dictionaries,
    "own_parameters_linear_matmul_einsum": lambda: classify_by(
        with_own_parameters, 6, 4, by_linear=normal(5, 4), by_matmul=normal(5, 4), by_einsum=normal(2, 4, 3)
    ),
    "hugging_face_conv1d": lambda: classify_tokens(
        nn.Sequential(Conv1D(6, 4), nn.GELU(approximate="tanh"), Conv1D(3, 6)), 3, 3, 4
    ),
    "bilinear": lambda: classify_by(
        lambda m, x: m.bilinear(x, torch.relu(m.inner(x))), 6, 4,
        inner=nn.Linear(4, 3), bilinear=nn.Bilinear(4, 3, 3),
    ),
    "subclass_of_convolution": lambda: classify(
        nn.Sequential(StandardizedConv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)), 5, 2, 3, 3
    ),
    "subclass_of_linear": lambda: classify(
        nn.Sequential(ScaledLinear(4, 5), nn.ReLU(), ScaledLinear(5, 3)), 6, 4
    ),
    "users_own_forward_hooks": users_own_forward_hooks,
    # Called as a module, and read directly beside that.
    "weight_read_beside_the_call": lambda: classify_by(
        lambda m, x: m.last(torch.relu(m.first(x))) * m.first.weight.pow(2).mean().exp(), 6, 4,
        first=nn.Linear(4, 5), last=nn.Linear(5, 3),
    ),
    "weights_made_per_example": lambda: classify_by(
        make_weights, 6, 5, maker=nn.Linear(2, 12), head=nn.Linear(4, 3)
    ),
    "output_quadratic_in_the_weight": lambda: classify_by(
        lambda m, x: x @ m.weight.pow(2), 6, 4, weight=normal(4, 3)
    ),
}  # fmt: skip
PROBLEMS = problems(
    TABLE,
    frozen_weight_asked_for_by_name={"options": {"layers": ["0", "4"]}},
    unused_layer={"flat_layers": ("unused",)},
    inputs_in_a_dictionary={"forward": lambda model, inputs: model(**inputs)},
    inputs_in_a_tuple={"forward": lambda model, inputs: model(*inputs)},
    inputs_in_a_dataclass={"forward": lambda model, inputs: model(inputs.numbers, inputs.tokens)},
    nested_inputs_and_dictionary_out={
        "forward": lambda model, inputs: model(**inputs["fields"][0])["logits"]
    },
    uneven_batches_of_dictionaries={"forward": lambda model, inputs: model(**inputs)},
    bilinear={"hessian_by": "loops"},
)
