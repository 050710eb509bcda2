"""v = B^(k+1) A^(k) g F^(k); active units are u > 0; the two-layer example."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from pushing import DEPTH, EXAMPLES, WIDTH, both_passes, deep, linear, weights_of
from torch import Tensor, nn

from hessinit.init.apply_scheme import apply_scheme_


class Chain:
    """A tanh network without biases, written out as in the paper: z^(k+1) = tanh(w^(k) z^(k))."""

    def __init__(self, widths: Sequence[int]) -> None:
        torch.manual_seed(0)
        pairs = list(zip(widths[:-1], widths[1:], strict=True))
        modules = [module for m, n in pairs for module in (nn.Linear(m, n, bias=False), nn.Tanh())]
        self.model = nn.Sequential(*modules).double()
        apply_scheme_(self.model, "glorot")
        self.inputs = torch.randn(widths[0], dtype=torch.float64)
        self.weights = [layer.weight.detach() for layer in weights_of(self.model)]
        self.F, self.A = [self.inputs], []
        for weight in self.weights:
            u = weight @ self.F[-1]
            self.A.append(torch.diag(1 - u.tanh() ** 2))
            self.F.append(u.tanh())
        self.B = [torch.eye(widths[-1], dtype=torch.float64)]
        for weight, slope in zip(self.weights[::-1], self.A[::-1], strict=True):
            self.B.insert(0, self.B[0] @ slope @ weight)

    def derivative(self, k: int, g: Tensor) -> Tensor:
        """D_w z · g by autograd through the modules."""
        name = f"{2 * k}.weight"

        def output(weight: Tensor) -> Tensor:
            return torch.func.functional_call(self.model, {name: weight}, self.inputs)

        return torch.autograd.functional.jvp(output, self.weights[k], g)[1]


def test_v_takes_the_jacobian_behind_the_layer_and_not_the_one_before_it() -> None:
    chain = Chain([16] * (DEPTH + 1))
    for k in range(DEPTH):
        g = torch.randn_like(chain.weights[k])
        truth = chain.derivative(k, g)
        right = chain.B[k + 1] @ chain.A[k] @ g @ chain.F[k]
        printed = chain.B[k] @ chain.A[k] @ g @ chain.F[k]
        torch.testing.assert_close(right, truth, rtol=1e-10, atol=1e-14)
        assert (printed - truth).norm() > 0.2 * truth.norm()


def test_the_printed_product_has_no_shape_where_the_widths_differ() -> None:
    chain = Chain([5, 4, 3, 2])
    g = torch.randn_like(chain.weights[1])
    torch.testing.assert_close(chain.B[2] @ chain.A[1] @ g @ chain.F[1], chain.derivative(1, g))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        chain.B[1] @ chain.A[1]


def test_counting_the_units_above_zero_predicts_the_gradient_of_20_relu_layers() -> None:
    torch.manual_seed(0)
    model = deep(nn.ReLU, linear)
    apply_scheme_(model, "he")
    inputs = torch.randn(EXAMPLES, WIDTH)
    predicted, at_one, u = 1.0, 0, inputs
    for module in model:
        if isinstance(module, nn.ReLU):
            predicted *= (u > 0).float().mean().item() * WIDTH * (2 / WIDTH)
            at_one += int((u == 1).sum())
        u = module(u)
    backward = both_passes(model, inputs)[1]
    assert 0.5 < backward / predicted < 2
    assert at_one / (DEPTH * EXAMPLES * WIDTH) < 1e-5  # the printed count is nothing but rounding


def test_the_two_layer_example_has_an_x_and_a_plus() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    product = (model[1].weight * model[0].weight).item()
    for x, t in [(2.0, 0.5), (-0.7, 1.0), (1.0, 0.3)]:
        z = model(torch.tensor([x], dtype=torch.float64))
        (slope,) = torch.autograd.grad(((z - t) ** 2).sum(), z)
        assert slope.item() == pytest.approx(2 * (product * x - t))
        assert slope.item() != pytest.approx(-2 * (product - t), rel=0.1)
