"""Where the paper's text errs: the right factor keeps data and gradients in size through 20 real layers.

Each expectation is a closed form: a layer changes the squared size by variance × fan × what activation and
dropout leave of it, so 20 layers of a wrong factor end at a known power. docs/errata.md tells the story.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessinit.digits import load_digits
from hessinit.measuring import measure
from hessinit.schemes.applying import apply_scheme_
from hessinit.schemes.gains import gain

DEPTH, WIDTH, EXAMPLES, NETS = 20, 512, 64, 8
Set = Callable[[nn.Sequential], object]


def deep(*modules: Callable[[], nn.Module]) -> nn.Sequential:
    """The given modules, one of them linear, 20 times over."""
    return nn.Sequential(*[module() for _ in range(DEPTH) for module in modules])


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def squared_ratio(after: Tensor, before: Tensor) -> float:
    return (after.double().square().sum() / before.double().square().sum()).item()


def both_passes(model: nn.Module, inputs: Tensor) -> tuple[float, float]:
    """Squared length out over in of the data, and in over out of a random gradient, summed over examples."""
    inputs = inputs.requires_grad_()
    outputs = model(inputs)
    cotangent = torch.randn_like(outputs)
    (gradient,) = torch.autograd.grad(outputs, inputs, cotangent)
    return squared_ratio(outputs, inputs), squared_ratio(gradient, cotangent)


def mean_passes(
    build: Callable[[], nn.Sequential], set_: Set, width: int = WIDTH, scale: float = 1.0
) -> Tensor:
    """Forward and backward ratio, the mean over several networks; one alone may be 50 % off."""
    ratios = []
    for seed in range(NETS):
        torch.manual_seed(seed)
        model = build()
        set_(model)
        ratios.append(both_passes(model, scale * torch.randn(EXAMPLES, width)))
    return torch.tensor(ratios, dtype=torch.float64).mean(0)


def stay_within_two(ratios: Tensor) -> bool:
    return bool(((ratios > 0.5) & (ratios < 2)).all())


def end_at(ratios: Tensor, expected: float) -> bool:
    """Within a factor of 3 of where 20 layers of the wrong factor lead."""
    return bool((ratios.log() - math.log(expected)).abs().max() < math.log(3))


def weights_of(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


# 1. ReLU: σ·√2, printed as σ/√2


@pytest.mark.parametrize("scheme", ["he", "forward"])
def test_root_two_keeps_both_passes_through_20_relu_layers(scheme: str) -> None:
    assert stay_within_two(
        mean_passes(lambda: deep(nn.ReLU, linear), lambda model: apply_scheme_(model, scheme))
    )


def test_the_backward_scheme_finds_root_two_in_the_relu_that_follows() -> None:
    assert stay_within_two(
        mean_passes(lambda: deep(linear, nn.ReLU), lambda model: apply_scheme_(model, "backward"))
    )


def test_one_over_root_two_vanishes_as_a_quarter_a_layer_in_both_passes() -> None:
    ratios = mean_passes(
        lambda: deep(nn.ReLU, linear), lambda model: apply_scheme_(model, "he", gains={"*": 1 / math.sqrt(2)})
    )
    assert end_at(ratios, 0.25**DEPTH)


# 2. Dropout: σ·√(1−p), printed as σ/√(1−p)


def dropped(keep: float) -> nn.Sequential:
    return deep(nn.ReLU, lambda: nn.Dropout(1 - keep), linear)


@pytest.mark.parametrize("keep", [0.6, 0.2])
def test_the_root_of_the_keep_rate_keeps_both_passes_through_20_dropouts(keep: float) -> None:
    assert stay_within_two(mean_passes(lambda: dropped(keep), lambda model: apply_scheme_(model, "he")))


@pytest.mark.parametrize("keep", [0.6, 0.2])
def test_dividing_by_the_root_of_the_keep_rate_explodes_in_both_passes(keep: float) -> None:
    printed = {"*": math.sqrt(2 / keep)}
    ratios = mean_passes(
        lambda: dropped(keep), lambda model: apply_scheme_(model, "he", gains=printed, dropout=False)
    )
    assert end_at(ratios, keep ** (-2 * DEPTH))


@pytest.mark.parametrize("keep", [0.6, 0.2])
def test_without_a_correction_both_passes_grow_by_one_over_the_keep_rate(keep: float) -> None:
    ratios = mean_passes(lambda: dropped(keep), lambda model: apply_scheme_(model, "he", dropout=False))
    assert end_at(ratios, keep**-DEPTH)


class UnscaledDropout(nn.Module):
    """Units switched off, the others left as they are: the masks of the first dropout papers."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.bernoulli(torch.full_like(inputs, self.keep))


@pytest.mark.parametrize("keep", [0.6, 0.2])
def test_for_unscaled_masks_the_printed_dropout_factor_is_the_right_one(keep: float) -> None:
    def set_to(factor: float) -> Set:
        return lambda model: [
            nn.init.normal_(layer.weight, std=math.sqrt(2 / WIDTH) * factor) for layer in weights_of(model)
        ]

    def unscaled() -> nn.Sequential:
        return deep(nn.ReLU, lambda: UnscaledDropout(keep), lambda: nn.Linear(WIDTH, WIDTH, bias=False))

    assert stay_within_two(mean_passes(unscaled, set_to(1 / math.sqrt(keep))))
    assert end_at(mean_passes(unscaled, set_to(math.sqrt(keep))), keep ** (2 * DEPTH))


# 3. The spectral norm of an m × n matrix of unit-variance entries: √m + √n, printed as its reciprocal


@pytest.mark.parametrize("shape", [(512, 512), (2048, 128), (128, 2048), (1000, 250), (300, 1)])
@pytest.mark.parametrize("kind", ["normal", "signs"])
def test_the_spectral_norm_is_the_sum_of_the_roots_and_not_its_reciprocal(
    shape: tuple[int, int], kind: str
) -> None:
    torch.manual_seed(0)
    draws = [torch.randn(shape) if kind == "normal" else torch.randint(2, shape) * 2.0 - 1 for _ in range(4)]
    norm = sum(torch.linalg.matrix_norm(draw, 2).item() for draw in draws) / len(draws)
    total = math.sqrt(shape[0]) + math.sqrt(shape[1])
    assert 0.93 < norm / total < 1.03
    assert norm / (1 / total) > 300


def test_20_layers_over_the_sum_of_the_roots_have_norms_whose_product_stays_and_none_is_amplified() -> None:
    torch.manual_seed(0)
    widths = [512, 256] * (DEPTH // 2) + [512]
    model = nn.Sequential(
        *[nn.Linear(m, n, bias=False) for m, n in zip(widths[:-1], widths[1:], strict=True)]
    )
    growth = {"right": 0.0, "printed": 0.0}
    for layer in weights_of(model):
        nn.init.normal_(layer.weight)
        norm = torch.linalg.matrix_norm(layer.weight.double(), 2).item()
        total = sum(math.sqrt(side) for side in layer.weight.shape)
        growth["right"] += math.log(norm / total)
        growth["printed"] += math.log(norm / (1 / total))
        with torch.no_grad():
            layer.weight /= total
    assert abs(growth["right"]) < math.log(2)
    assert growth["printed"] > math.log(1e60)
    # A bound, and for long products a poor one, as the paper says: typical data shrink far below it.
    forward, backward = both_passes(model, torch.randn(EXAMPLES, widths[0]))
    assert forward < 1e-3
    assert backward < 1e-3


# 4. "Admissible loss functions": activations, and neither sigmoid nor GELU, SiLU, softplus are admissible


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (torch.tanh, (0, 1, 0)),
        (torch.sigmoid, (1 / 2, 1 / 4, 0)),
        (F.gelu, (0, 1 / 2, math.sqrt(2 / math.pi))),
        (F.silu, (0, 1 / 2, 1 / 2)),
        (F.softplus, (math.log(2), 1 / 2, 1 / 4)),
    ],
)
def test_the_value_and_slopes_of_activations_at_zero(
    activation: Callable[[Tensor], Tensor], expected: tuple[float, ...]
) -> None:
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    value = activation(zero)
    (slope,) = torch.autograd.grad(value, zero, create_graph=True)
    (bend,) = torch.autograd.grad(slope, zero)
    assert (value.item(), slope.item(), bend.item()) == pytest.approx(expected, abs=1e-12)


def first_layer_gap(activation: type[nn.Module], scale: float = 1.0, seed: int = 0) -> float:
    """The exact norm over that of Theorem 1: 64-64-64-64-10 as PyTorch starts it, then scaled."""
    torch.manual_seed(seed)
    hidden = [module for _ in range(3) for module in (nn.Linear(64, 64), activation())]
    model = nn.Sequential(*hidden, nn.Linear(64, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    images, labels = load_digits()
    batch = images[:128].flatten(1), labels[:128]
    report = measure(
        model,
        nn.CrossEntropyLoss(),
        batch,
        curvature="both",
        layers="0",
        network=False,
        dtype=torch.float64,
    )
    approximation = report["0"].approximation
    assert approximation is not None
    return report["0"].norm / approximation.value


def test_theorem_1_is_exact_for_relu_close_for_tanh_and_far_off_where_the_activation_bends_at_zero() -> None:
    assert first_layer_gap(nn.ReLU) == pytest.approx(1, rel=2e-3)
    assert 1.02 < first_layer_gap(nn.Tanh) < 2
    assert first_layer_gap(nn.SiLU) > 3
    assert first_layer_gap(nn.GELU) > 4


def test_smaller_weights_make_theorem_1_worse_though_the_inputs_get_smaller() -> None:
    assert first_layer_gap(nn.Tanh, scale=0.01) > 100 * first_layer_gap(nn.Tanh)


def test_a_sigmoid_needs_its_own_slope_and_its_offset_taken_away() -> None:
    def with_gain(factor: float, centred: bool) -> Set:
        @torch.no_grad()
        def set_(model: nn.Sequential) -> None:
            apply_scheme_(model, "he", gains={"*": factor})
            for layer in weights_of(model) if centred else []:
                layer.bias.copy_(-layer.weight.sum(1) / 2)  # what f(0) = 1/2 sends on

        return set_

    true = gain("sigmoid", backward=True)
    assert 1 / true < torch.sigmoid(torch.zeros(())).item() * 0.5  # E f'² < f'(0)² = 1/16

    def sigmoids() -> nn.Sequential:
        return deep(nn.Sigmoid, linear)

    assert stay_within_two(mean_passes(sigmoids, with_gain(true, centred=True)))
    # Taken for f'(0) = 1, each layer leaves less than f'(0)² of the gradient.
    assert mean_passes(sigmoids, with_gain(1.0, centred=False))[1] < (1 / 16) ** DEPTH
    # The right slope alone is not enough: f(0) = 1/2 drives the units into saturation.
    assert mean_passes(sigmoids, with_gain(true, centred=False))[1] < 1e-4


# 5. γ*: descent is guaranteed below 2/‖H‖; 1/‖H‖ is where the guaranteed decrease is largest


def losses_of_descent(
    model: nn.Module, weight: nn.Parameter, batch: tuple[Tensor, Tensor], rate: float
) -> Tensor:
    """The squared error at the start and after each of 60 steps in one weight, which is put back."""
    start = weight.detach().clone()
    losses = []
    for _ in range(61):
        loss = F.mse_loss(model(batch[0]), batch[1])
        losses.append(loss.detach())
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= rate * gradient
    with torch.no_grad():
        weight.copy_(start)
    return torch.stack(losses)


def always_descends(losses: Tensor) -> bool:
    return bool((losses.diff() < 0).all())


def test_descent_on_a_quadratic_turns_at_two_over_the_norm() -> None:
    torch.manual_seed(0)
    images = load_digits()[0][:256].flatten(1).double()
    model = nn.Linear(64, 10, bias=False).double()
    batch = images, torch.randn(256, 10, dtype=torch.float64)
    norm = measure(model, nn.MSELoss(), batch, tolerance=1e-6).network.norm
    truth = torch.linalg.eigvalsh(images.mT @ images)[-1].item() * 2 / (256 * 10)
    assert norm == pytest.approx(truth, rel=1e-5)
    for factor in (0.5, 1.0, 1.5, 1.95):
        assert always_descends(losses_of_descent(model, model.weight, batch, factor / norm))
    for factor in (2.1, 2.5):
        losses = losses_of_descent(model, model.weight, batch, factor / norm)
        assert losses[-1] > 10 * losses[0]


class NearItsMinimum:
    """A tanh network on the digits whose targets are its own outputs: it starts at a minimum."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.images = load_digits()[0][:64].flatten(1).double()
        self.model = nn.Sequential(
            nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 10)
        ).double()
        self.batch = self.images, self.model(self.images).detach()
        self.weight = self.model[2].weight
        self.minimum = self.weight.detach().clone()
        self.norm = self._measured()

    def _measured(self) -> float:
        return measure(
            self.model,
            nn.MSELoss(),
            self.batch,
            curvature="hessian",
            layers="2",
            network=False,
            tolerance=1e-6,
        )["2"].norm

    def move_to(self, offset: Tensor) -> None:
        with torch.no_grad():
            self.weight.copy_(self.minimum + 1e-4 * offset / offset.norm())

    def steepest(self) -> Tensor:
        """The top eigenvector, by a dense Hessian: the direction in which a step is least safe."""

        def loss(weight: Tensor) -> Tensor:
            outputs = torch.func.functional_call(self.model, {"2.weight": weight}, self.images)
            return F.mse_loss(outputs, self.batch[1])

        dense = torch.autograd.functional.hessian(loss, self.minimum).reshape(self.minimum.numel(), -1)
        return torch.linalg.eigh(dense).eigenvectors[:, -1].view_as(self.minimum)

    def gradient(self) -> Tensor:
        (gradient,) = torch.autograd.grad(F.mse_loss(self.model(self.images), self.batch[1]), self.weight)
        return gradient

    def decrease(self, factor: float) -> float:
        """Of one step of factor/‖H‖, in units of ‖g‖²/‖H‖."""
        losses = losses_of_descent(self.model, self.weight, self.batch, factor / self.norm)
        return ((losses[0] - losses[1]) * self.norm / self.gradient().square().sum()).item()


def test_descent_in_a_layer_of_a_network_turns_at_two_over_its_measured_norm() -> None:
    near = NearItsMinimum()
    near.move_to(torch.randn_like(near.minimum))
    for factor in (0.5, 1.0, 1.9):
        assert always_descends(losses_of_descent(near.model, near.weight, near.batch, factor / near.norm))
    losses = losses_of_descent(near.model, near.weight, near.batch, 2.2 / near.norm)
    assert losses[-1] > 10 * losses[0]


def test_the_guaranteed_decrease_is_largest_at_one_over_the_norm_and_gone_at_twice_that() -> None:
    near = NearItsMinimum()
    factors = [0.25 * step for step in range(1, 11)]
    near.move_to(near.steepest())
    worst = [near.decrease(factor) for factor in factors]
    assert worst == pytest.approx([factor - factor**2 / 2 for factor in factors], abs=2e-3)
    assert max(worst) == worst[factors.index(1.0)]
    near.move_to(torch.randn_like(near.minimum))
    # A guarantee: no direction does worse.
    assert all(near.decrease(factor) > least - 1e-3 for factor, least in zip(factors, worst, strict=True))


# 6. By norms (the paper) the forward rule is 1/outputs, by units (Glorot) it is 1/inputs


GROWING = [round(32 * 16 ** (layer / DEPTH)) for layer in range(DEPTH + 1)]


def mean_growth(widths: Sequence[int], scheme: str) -> tuple[float, float]:
    """Squared lengths, forward and backward, of small data: tanh is the identity, as in the corollary."""

    def growing() -> nn.Sequential:
        pairs = zip(widths[:-1], widths[1:], strict=True)
        return nn.Sequential(*[module for m, n in pairs for module in (nn.Tanh(), nn.Linear(m, n))])

    forward, backward = mean_passes(
        growing, lambda model: apply_scheme_(model, scheme, gains={"*": 1.0}), widths[0], scale=1e-3
    ).tolist()
    return forward, backward


@pytest.mark.parametrize("widths", [GROWING, GROWING[::-1]], ids=["growing", "shrinking"])
def test_each_rule_keeps_its_own_measure_and_misses_the_other_by_the_ratio_of_the_widths(
    widths: Sequence[int],
) -> None:
    ratio = widths[-1] / widths[0]
    by_outputs, by_inputs = mean_growth(widths, "forward"), mean_growth(widths, "backward")
    lengths = torch.tensor([by_outputs[0], by_inputs[1]])
    units = torch.tensor([by_inputs[0] / ratio, by_outputs[1] * ratio])
    assert stay_within_two(lengths)
    assert stay_within_two(units)
    # The same numbers, the other measure: off by 16 either way.
    assert not stay_within_two(torch.tensor([by_outputs[0] / ratio]))
    assert end_at(torch.tensor([by_inputs[0]]), ratio)
    assert end_at(torch.tensor([by_outputs[1]]), 1 / ratio)


def test_the_forward_rule_by_units_is_the_backward_rule_by_norms_and_the_compromise_is_the_same() -> None:
    model = nn.Sequential(nn.Linear(64, 16, bias=False), nn.Linear(16, 128, bias=False))

    def stds(scheme: str) -> list[float]:
        return [layer.std[0] for layer in apply_scheme_(model, scheme, dry_run=True)]

    assert stds("lecun") == pytest.approx(stds("backward"))
    assert stds("lecun") == pytest.approx([1 / 8, 1 / 4])
    assert stds("forward") == pytest.approx([1 / 4, math.sqrt(1 / 128)])
    assert stds("glorot") == pytest.approx(stds("compromise"))


# 7. v = B^(k+1) A^(k) g F^(k); active units are u > 0; the two-layer example


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
