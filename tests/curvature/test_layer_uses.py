"""Calls read off the graph: `push` is linear in the weight and `pull` its adjoint, as autograd has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pieces import assert_right
from torch import Tensor, nn

from hessinit.curvature.layer_uses import DenseCall, EmbeddingCall, find_uses, read_call

TOKENS = torch.tensor([[0, 2, 1], [3, 0, 0]])
IMAGES = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(3)).double()
ROWS = IMAGES[:, 0, 0]
USES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "linear with bias": ((3, 5), lambda w: F.linear(ROWS, w, torch.ones(3).double())),
    "linear of three dimensions": ((3, 5), lambda w: F.linear(IMAGES[:, 0], w)),
    "addmm, stored as (in, out)": ((5, 3), lambda w: torch.addmm(torch.ones(3).double(), ROWS, w, beta=2)),
    "matmul, stored as (in, out)": ((5, 3), lambda w: ROWS @ w),
    "a transpose of a transpose": ((5, 3), lambda w: ROWS @ w.t().t()),
    "convolution": (
        (3, 4, 2, 3),
        lambda w: F.conv2d(IMAGES, w, stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
    ),
    "grouped convolution": ((6, 2, 2, 2), lambda w: F.conv2d(IMAGES, w, groups=2)),
    "transposed convolution": (
        (4, 3, 2, 2),
        lambda w: F.conv_transpose2d(IMAGES, w, stride=2, output_padding=1),
    ),
    "embedding": ((4, 3), lambda w: F.embedding(TOKENS, w)),
    "embedding with padding": ((4, 3), lambda w: F.embedding(TOKENS, w, padding_idx=0)),
    "embedding with padding from the end": ((4, 3), lambda w: F.embedding(TOKENS, w, padding_idx=-1)),
}


@pytest.mark.parametrize("name", USES)
def test_pull_is_autograds_gradient_and_push_its_adjoint(name: str) -> None:
    shape, use = USES[name]
    leaf = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    output = use(leaf)
    (found,) = find_uses(output, {"w": leaf})["w"]
    call = read_call(found, leaf)
    cotangent, change = torch.randn_like(output), torch.randn_like(leaf)
    (gradient,) = torch.autograd.grad(output, leaf, cotangent)
    pulled = call.pull(cotangent.view(call.output_shape))
    torch.testing.assert_close(pulled, gradient)
    pushed = call.push(change)
    assert tuple(pushed.shape) == call.output_shape
    assert pushed.shape[0] == call.rows == call.inputs.shape[0]
    torch.testing.assert_close((pushed * cotangent.view_as(pushed)).sum(), (change * gradient).sum())
    twice = call.on(torch.cat([call.inputs, call.inputs]))
    torch.testing.assert_close(twice.push(change), torch.cat([pushed, pushed]))
    assert twice.output_shape == (2 * call.rows, *call.output_shape[1:])


UNKNOWN: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "the weight on the left": ((3, 2), lambda w: w @ ROWS),
    "addmm with a factor": ((5, 3), lambda w: torch.addmm(torch.ones(3).double(), ROWS, w, alpha=2)),
    "embedding of one word": ((4, 3), lambda w: F.embedding(torch.tensor(2), w)),
    "gradients scaled by frequency": ((4, 3), lambda w: F.embedding(TOKENS, w, scale_grad_by_freq=True)),
    "the weight squared": ((5, 3), lambda w: ROWS @ w.pow(2)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_any_other_use_is_not_known(name: str) -> None:
    shape, use = UNKNOWN[name]
    leaf = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    uses = find_uses(use(leaf), {"w": leaf})["w"]
    assert [read_call(one, leaf) for one in uses] == [None] * len(uses) != []


def test_a_weight_stored_either_way_gives_the_same_output() -> None:
    weight = torch.randn(3, 5).double()
    torch.testing.assert_close(
        DenseCall(ROWS, (len(ROWS), 3), False).push(weight),
        DenseCall(ROWS, (len(ROWS), 3), True).push(weight.T.contiguous()),
    )


def test_the_padding_row_gets_nothing_and_gives_nothing() -> None:
    call = EmbeddingCall(TOKENS, (*TOKENS.shape, 3), weight_shape=(4, 3), padding=0)
    assert not call.push(torch.ones(4, 3))[TOKENS == 0].any()
    assert not call.pull(torch.ones(2, 3, 3))[0].any()


class OneWord(nn.Module):
    """Every example gets the same word: an index without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.word, self.last = nn.Linear(3, 4), nn.Embedding(3, 4), nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(features) + self.word(torch.tensor(1))))


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_an_embedding_of_one_word_for_all_examples_is_measured(curvature: str) -> None:
    batch = (torch.randn(5, 3).double(), torch.tensor([0, 1, 2, 0, 1]))
    assert_right(OneWord().double(), nn.CrossEntropyLoss(), batch, curvature=curvature)
