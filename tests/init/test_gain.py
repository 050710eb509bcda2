"""Gains against published digits, closed forms and scipy; what has none is refused."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import norm
from torch import nn

from hessinit.errors import ProblemError
from hessinit.init.gain import gain, moment

FORWARD = {
    "relu": 1.4142, "gelu": 1.5335, "silu": 1.6765, "mish": 1.4868, "elu": 1.2452, "selu": 1.0,
    "tanh": 1.5925, "sigmoid": 1.8462, "softplus": 1.0419, "hardswish": 1.7367,
}  # fmt: skip
BACKWARD = {
    "gelu": 1.4811, "silu": 1.6233, "mish": 1.4448, "elu": 1.2234, "selu": 0.9660, "tanh": 1.4674,
    "sigmoid": 4.7226,
}  # fmt: skip


def test_gains_agree_with_the_published_digits():
    for digits, backward in ((FORWARD, False), (BACKWARD, True)):
        for name, value in digits.items():
            assert gain(name, backward=backward) == pytest.approx(value, abs=5.1e-5), name


def upper(cut: float, power: int) -> float:
    """E zᵖᵒʷᵉʳ over z > cut."""
    return float({0: norm.sf(cut), 1: norm.pdf(cut), 2: cut * norm.pdf(cut) + norm.sf(cut)}[power])


def shrunk(cut: float) -> float:
    """E max(z − cut, 0)²."""
    return upper(cut, 2) - 2 * cut * upper(cut, 1) + cut**2 * upper(cut, 0)


BELOW = {k: math.exp(k**2 / 2) * norm.cdf(-k) for k in (1, 2)}  # E exp(kz) over z < 0
RRELU = (1 / 8 + 1 / 3) / 2
CLOSED_FORMS = {
    "identity": (nn.Identity(), 1, 1),
    "relu": (nn.ReLU(), 1 / 2, 1 / 2),
    "relu in place": (nn.ReLU(inplace=True), 1 / 2, 1 / 2),
    "leaky relu": (nn.LeakyReLU(0.3), 1.09 / 2, 1.09 / 2),
    "rrelu in eval mode": (nn.RReLU().eval(), (1 + RRELU**2) / 2, (1 + RRELU**2) / 2),
    "relu with its kink in an odd place": (lambda z: F.relu(z - 0.1234), shrunk(0.1234), norm.sf(0.1234)),
    "relu far out": (lambda z: F.relu(z - 5.03), shrunk(5.03), norm.sf(5.03)),
    "hardtanh": (
        nn.Hardtanh(-1.1, 1.1), 1 - 2 * upper(1.1, 2) + 2 * 1.21 * norm.sf(1.1), 1 - 2 * norm.sf(1.1)
    ),
    "relu6": (F.relu6, 0.5 - upper(6, 2) + 36 * norm.sf(6), 0.5 - norm.sf(6)),
    "softshrink": (nn.Softshrink(0.37), 2 * shrunk(0.37), 2 * norm.sf(0.37)),
    "hardshrink": (nn.Hardshrink(0.37), 2 * upper(0.37, 2), 2 * norm.sf(0.37)),
    "threshold": (nn.Threshold(0.1, 20.0), upper(0.1, 2) + 400 * norm.cdf(0.1), norm.sf(0.1)),
    "elu": (nn.ELU(), 0.5 + BELOW[2] - 2 * BELOW[1] + 0.5, 0.5 + BELOW[2]),
    "erf": (torch.erf, 2 / math.pi * math.asin(2 / 3), 4 / math.pi / math.sqrt(5)),
    "sine": (torch.sin, (1 - math.exp(-2)) / 2, (1 + math.exp(-2)) / 2),
    "fast sine": (lambda z: torch.sin(100 * z), 1 / 2, 100**2 / 2),
    "steep erf": (
        lambda z: torch.erf(50 * z), 2 / math.pi * math.asin(5000 / 5001), 10000 / math.pi / math.sqrt(10001)
    ),
    "exponential": (torch.exp, math.e**2, math.e**2),
    "steep exponential": (lambda z: torch.exp(2 * z), math.e**8, 4 * math.e**8),
    "cube": (lambda z: z**3, 15, 27),
    "tiny": (lambda z: 1e-20 * z, 1e-40, 1e-40),
    "composite": (nn.Sequential(nn.ReLU(), nn.Hardtanh(-9, 9), nn.Identity()), 1 / 2, 1 / 2),
    "absolute value": (torch.abs, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", CLOSED_FORMS)
def test_moments_agree_with_closed_forms(case):
    function, second, slope = CLOSED_FORMS[case]
    assert moment(function) == pytest.approx(second, rel=1e-9)
    assert moment(function, slope=True) == pytest.approx(slope, rel=1e-9)
    assert gain(function) == pytest.approx(second**-0.5, rel=1e-9)
    assert gain(function, backward=True) == pytest.approx(slope**-0.5, rel=1e-9)


def test_a_module_its_class_a_function_and_a_name_have_the_same_gain():
    for function in (nn.GELU(), nn.GELU, F.gelu, lambda z: F.gelu(z), nn.GELU().forward):
        assert gain(function) == pytest.approx(gain("gelu"), rel=1e-14)
        assert gain(function, backward=True) == pytest.approx(gain("gelu", backward=True), rel=1e-14)
    assert gain(nn.RReLU) == gain("rrelu") == pytest.approx(math.sqrt(2 / (1 + RRELU**2)), rel=1e-12)
    assert gain("linear") == nn.init.calculate_gain("linear") == 1
    single = gain(lambda z: torch.tanh(z.float()), backward=True)  # computes in single precision: six digits
    assert single == pytest.approx(gain("tanh", backward=True), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_prelu_counts_with_the_mean_over_its_slopes(dtype):
    module = nn.PReLU(3).to(dtype)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
    expected = (1 + (0.25 + 1 + 4) / 3) / 2
    assert moment(module) == moment(module, slope=True) == pytest.approx(expected, rel=1e-15)
    assert moment(nn.Sequential(nn.PReLU(1, 0.5)).to(dtype)) == pytest.approx(0.625, rel=1e-12)


class Scaled(nn.Module):
    """A user's activation with a parameter, a buffer and a counter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(0.0))
        self.calls = 0

    def forward(self, z):
        self.calls += 1
        self.shift.add_(0.0)
        return self.scale * torch.relu(z) + self.shift


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_users_module_and_generators_stay_as_they_were(dtype):
    module = Scaled().to(dtype).train()
    fired = []
    module.register_forward_hook(lambda *_: fired.append(1))
    torch.manual_seed(3)
    before = torch.get_rng_state(), numpy.random.get_state()[1].copy()  # noqa: NPY002
    scale = module.scale
    assert gain(module) == pytest.approx(math.sqrt(2) / 2, rel=1e-12)
    assert gain(nn.Sequential(module), backward=True) == pytest.approx(math.sqrt(2) / 2, rel=1e-12)
    with pytest.raises(ProblemError, match="is random"):
        gain(nn.Dropout())
    assert module.scale is scale
    assert module.scale.dtype == module.shift.dtype == dtype
    assert module.scale.grad is None
    assert module.training
    assert (module.calls, fired, len(module._forward_hooks)) == (0, [], 1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (numpy.random.get_state()[1] == before[1]).all()  # noqa: NPY002


SETTINGS = [
    torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.device("meta"),
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=["inference mode", "no grad", "autocast", "default device"])
def test_the_callers_settings_do_not_reach_the_gain(setting):
    function = torch.nn.Sequential(nn.Softplus(), nn.LogSigmoid(), nn.PReLU())
    plain = gain(function), gain(function, backward=True)
    with setting():
        assert (gain(function), gain(function, backward=True)) == plain
        assert gain(lambda z: z * torch.ones(1)) == pytest.approx(1, rel=1e-12)


def test_a_gain_is_cheap_also_where_a_kink_must_be_searched_for():
    points = []

    def kinked(z):
        points.append(z.numel())
        return F.relu(z - 0.1234)

    gain(kinked, backward=True)  # f' jumps
    assert len(points) <= 15
    assert sum(points) <= 10_000


def test_gains_follow_what_changes():
    leaky = nn.LeakyReLU(0.0)
    first = gain(leaky)
    leaky.negative_slope = 1.0
    assert (first, gain(leaky)) == (pytest.approx(math.sqrt(2)), pytest.approx(1))
    for module in (nn.ReLU(), nn.Identity(), nn.PReLU()):
        module.forward = lambda z: 2 * z
        assert gain(module) == pytest.approx(0.5)


own_generator = torch.Generator().manual_seed(0)
ONE_NUMBER = "A gain belongs to a function of one number; pass (the elementwise|that) function"
COUPLED = f"not elementwise: its value at one unit depends on the other units. {ONE_NUMBER}"
RANDOM = "is random: two calls differ.*Call .eval"
NOT_FINITE = "finite everywhere and grows no faster"
REFUSED = {
    "softmax": (nn.Softmax(-1), rf"Softmax\(dim=-1\) is {COUPLED}"),
    "layer norm": (nn.LayerNorm(64), f"LayerNorm.* could not be evaluated .*{ONE_NUMBER}"),
    "gated": (nn.GLU(), rf"GLU\(dim=-1\) .* it does not give one real number for each .*{ONE_NUMBER}"),
    "running sum": (lambda z: z.cumsum(0), COUPLED),
    "clipped at a share of its largest": (lambda z: z.clamp(max=0.9 * z.max().item()), COUPLED),
    "sorted": (lambda z: z.sort().values, COUPLED),
    "a pair": (lambda z: (z, z), "one real number"),
    "complex": (lambda z: z * 1j, "one real number"),
    "slopes for channels": (nn.Sequential(nn.PReLU(4)), "could not be evaluated"),
    "small but coupled": (lambda z: 1e-20 * z.softmax(0), COUPLED),
    "rrelu": (nn.RReLU(), rf"RReLU\(.*\) {RANDOM}"),
    "numpy": (lambda z: z * numpy.random.random_sample(), RANDOM),  # noqa: NPY002
    "its own generator": (lambda z: z + torch.rand(z.shape, generator=own_generator), RANDOM),
    "dropout inside": (nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), RANDOM),
    "nothing": (torch.zeros_like, r"zeros_like has no gain: E f\(z\)² is 0 .* lets something through"),
    "root": (torch.sqrt, f"of sqrt, .* cannot be found: it is not finite at z = -0.00.*{NOT_FINITE}"),
    "pole": (lambda z: 1 / z, f"of <lambda>, .* does not settle.*{NOT_FINITE}"),
    "explosion": (lambda z: torch.exp(z**2), r"grows so fast that values beyond \|z\| = 12"),
    "infinite far out": (lambda z: torch.where(z > 7, math.inf, z), "it is not finite at z = 7"),
    "meta": (nn.PReLU(device="meta"), r"PReLU\(num_parameters=1\) has no gain: its slopes are not finite"),
    "nan slopes": (nn.PReLU(init=math.nan), "its slopes are not finite"),
    "typo": ("rleu", "activation='rleu' is unknown; choose from 'celu'.*Did you mean 'relu'?"),
    "arguments": (nn.Threshold, "Threshold cannot be built without arguments .*Pass an instance"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_gain_is_refused_with_the_way_out(case):
    function, message = REFUSED[case]
    with pytest.raises(ProblemError, match=message):
        gain(function)


def test_a_flat_function_has_no_gain_backward():
    for flat in (torch.sign, torch.ones_like, lambda z: z > 0, lambda z: z.detach()):
        assert moment(flat, slope=True) == 0
        with pytest.raises(ProblemError, match=r"has no gain: E f'\(z\)² is 0"):
            gain(flat, backward=True)
    assert gain(torch.sign) == pytest.approx(1, rel=1e-12)
    assert gain(lambda z: z > 0) == pytest.approx(math.sqrt(2), rel=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_module_on_another_device_has_the_same_gain_and_stays_there():
    module = nn.Sequential(nn.PReLU(), nn.GELU()).cuda().half()
    assert gain(module) == gain(nn.Sequential(nn.PReLU(), nn.GELU()))
    assert (module[0].weight.is_cuda, module[0].weight.dtype) == (True, torch.float16)
