"""Whatever the caller has switched on, wrapped or hooked, the numbers are those of the plain model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hessinit
from dense import dense_curvature, ends
from tiny import LOSS, Calling, batch, inputs, labels, network


def norms(model: nn.Module, data: Any = None, **options: Any) -> dict[str, float]:
    report = hessinit.measure(model, LOSS, data or batch(), curvature="both", **options)
    rows = {layer.name: layer for layer in (*report.layers, report.network)}
    return {name: row.norm for name, row in rows.items()} | {"gap": report.network.gap or 0}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def backend_precision(precision: str) -> Iterator[None]:
    """The newer switches, one for each backend; while they are set, torch refuses to tell the older one."""
    switches: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = precision
    try:
        yield
        assert [switch.fp32_precision for switch in switches] == [precision] * 2
    finally:
        for switch, was in zip(switches, before, strict=True):
            switch.fp32_precision = was


SETTINGS: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    # A forward on the CPU under another default device: what we create must not follow the default.
    "default device meta": lambda: torch.device("meta"),
    "medium matmul precision": lambda: matmul_precision("medium"),
}
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # since torch 2.9
    SETTINGS["TF32 by backend"] = lambda: backend_precision("tf32")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("estimator", ["auto", "lanczos"])
def test_the_callers_settings_change_no_bit(setting: str, estimator: str) -> None:
    model, data, lanczos = network(), batch(), {"estimator": estimator}
    plain = norms(model, data, **lanczos)
    with SETTINGS[setting]():
        assert norms(model, data, **lanczos) == plain


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("make", [hessinit.hessian, hessinit.gauss_newton])
def test_the_callers_settings_change_no_bit_of_a_product(setting: str, make: Any) -> None:
    model, data, vector = network(), batch(), torch.randn(35)
    expected = make(model, LOSS, data) @ vector
    with SETTINGS[setting]():
        assert torch.equal(make(model, LOSS, data) @ vector, expected)
    early = make(model, LOSS, data)
    with SETTINGS[setting]():
        assert torch.equal(early @ vector, expected)


def test_anomaly_detection_prints_nothing_while_measuring(capfd: pytest.CaptureFixture[str]) -> None:
    with torch.autograd.set_detect_anomaly(True):
        norms(network())
        assert torch.is_anomaly_enabled()
    assert "Error detected" not in capfd.readouterr().err  # torch writes there itself


def test_tensors_born_in_inference_mode_are_measured() -> None:
    with torch.inference_mode():
        model, data = network(), batch()
    assert norms(model, data) == norms(network(), batch())
    with torch.inference_mode():
        assert norms(network(dtype=torch.bfloat16), batch(), layers="0")["0"] > 0


def test_compiled_models_are_measured_as_written() -> None:
    def never(graph: Any, examples: Any) -> Any:
        raise AssertionError("compiled")

    plain = norms(network())
    inner, inside = network(), network()
    inner.compile(backend=never)
    inside[0] = torch.compile(inside[0], backend=never)
    assert norms(torch.compile(network(), backend=never)) == plain
    assert norms(inner) == plain
    assert norms(inside) == plain
    assert inner._compiled_call_impl is not None


def test_parallel_wrappers_are_looked_through() -> None:
    from torch import distributed

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        assert norms(nn.parallel.DistributedDataParallel(network())) == norms(network())
    finally:
        distributed.destroy_process_group()
    # Where there are GPUs, this one moves the model to the first.
    assert norms(nn.DataParallel(network())) == pytest.approx(norms(network()), rel=1e-4)


def test_forward_hooks_are_part_of_the_model_and_backward_hooks_are_not() -> None:
    hooked, scaled = network(), Calling(lambda net, x: net[2](net[1](net[0](x)) * 3))
    hooked[1].register_forward_hook(lambda module, given, output: output * 3)
    hooked[2].register_full_backward_hook(lambda module, inward, outward: (inward[0] * 100,))
    hooked[2].weight.register_hook(lambda gradient: gradient * 100)
    of_all = nn.modules.module.register_module_full_backward_hook(
        lambda module, inward, outward: pytest.fail("not training")
    )
    try:
        assert list(norms(hooked).values()) == list(norms(scaled).values())
        with pytest.raises(pytest.fail.Exception):
            scaled(inputs().requires_grad_()).sum().backward()  # they are back
    finally:
        of_all.remove()


class LowRank(nn.Module):
    """A frozen weight with a trainable correction, and a module without parameters in between."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 5).requires_grad_(False)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 5, bias=False)
        self.between = nn.Sequential(nn.Tanh(), nn.Flatten())
        self.head = nn.Linear(5, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.base(x) + self.up(self.down(x))))


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_frozen_parts_are_left_out_and_the_rest_is_right(curvature: str) -> None:
    model = LowRank()
    settings: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-8}
    report = hessinit.measure(model, LOSS, batch(), curvature=curvature, **settings)
    truth = dense_curvature(model, LOSS, batch(), curvature)
    assert report.names == ("down", "up")
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-6)
    assert any("2 frozen weights were left out" in note for note in report.notes)


@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_is_measured_at_its_present_vectors(wrap: Any) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(wrap(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)).eval()
    settings: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-8, "curvature": "hessian"}
    report = hessinit.measure(model, LOSS, batch(), **settings)
    # In eval mode the vectors are constants, and so is their part in the scale: W / (u·Wv).
    if wrap is nn.utils.spectral_norm:
        left, right, raw = model[0].weight_u, model[0].weight_v, model[0].weight_orig
    else:
        norm = model[0].parametrizations.weight[0]
        left, right, raw = norm._u, norm._v, model[0].parametrizations.weight.original

    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raw = nn.Parameter(raw.detach().clone())
            self.register_buffer("left", left.clone())
            self.register_buffer("right", right.clone())
            self.bias, self.last = nn.Parameter(model[0].bias.detach().clone()), model[2]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.raw / (self.left @ self.raw @ self.right)
            return self.last(torch.tanh(x @ weight.T + self.bias))

    truth = dense_curvature(ByHand(), LOSS, batch(), "hessian")
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-6)


def test_a_forward_that_differentiates_by_its_inputs_is_measured() -> None:
    def slope(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0][:, :3]

    settings: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-8, "curvature": "hessian"}
    report = hessinit.measure(Calling(slope), LOSS, batch(), **settings)

    def by_hand(net: Any, x: torch.Tensor) -> torch.Tensor:
        slopes = 1 - torch.tanh(net[0](x)).square()
        return ((slopes * net[2].weight.sum(0)) @ net[0].weight)[:, :3]

    truth = dense_curvature(Calling(by_hand), LOSS, batch(), "hessian")
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-6)


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_activation_checkpoints_change_nothing_where_they_can_be_followed(curvature: str) -> None:
    from torch.utils.checkpoint import checkpoint

    model = Calling(lambda net, x: net[2](checkpoint(lambda x: net[1](net[0](x)), x, use_reentrant=False)))
    report = hessinit.measure(model, LOSS, batch(), curvature=curvature)
    plain = hessinit.measure(network(), LOSS, batch(), curvature=curvature)
    assert report.network.norm == pytest.approx(plain.network.norm, rel=1e-5)


def test_a_forward_that_writes_into_its_inputs_finds_the_same_data_every_time() -> None:
    data = batch()
    before = data[0].clone()
    model = Calling(lambda net, x: net(x.mul_(2).relu_()))
    assert norms(model, data)["network"] == norms(network(), (inputs().mul(2).relu(), labels()))["network"]
    assert torch.equal(data[0], before)
