"""Whatever the caller has switched on, wrapped or hooked, the numbers are those of the plain model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hessinit
from calls import measure
from dense import dense_curvature, ends
from tiny import LOSS, Calling, Net, batch, inputs, labels, network

EXACT: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-8}
each_curvature = pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])


def norms(model: nn.Module, data: Any = None, **options: Any) -> dict[str, float]:
    report = measure(model, LOSS, data or batch(), curvature="both", **options)
    rows = {layer.name: layer for layer in (*report.layers, report.network)}
    return {name: row.norm for name, row in rows.items()} | {"gap": report.network.gap or 0}


def assert_true(model: nn.Module, by_hand: nn.Module, curvature: str, data: Any = None) -> Any:
    """The norm of the network is that of the dense matrix of an equal model."""
    report = measure(model, LOSS, data or batch(), curvature=curvature, **EXACT)
    truth = dense_curvature(by_hand, LOSS, data or batch(), curvature)
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-6)
    return report


@contextlib.contextmanager
def switched(get: Callable[[], Any], set_: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    set_(value)
    try:
        yield
        assert get() == value
    finally:
        set_(before)


def default_dtype(dtype: torch.dtype) -> Any:
    return switched(torch.get_default_dtype, torch.set_default_dtype, dtype)


def set_backends(precisions: list[str]) -> None:
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = precisions


def get_backends() -> list[str]:
    return [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]


SETTINGS: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    # A forward on the CPU under another default device: what we create must not follow the default.
    "default device meta": lambda: torch.device("meta"),
    "medium matmul precision": lambda: switched(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
}
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # since torch 2.9
    SETTINGS["TF32 by backend"] = lambda: switched(get_backends, set_backends, ["tf32", "tf32"])


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_callers_settings_change_no_bit(setting: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, data, vector = network(), batch(), torch.randn(35)
    verbs = [lambda name=name: norms(model, data, estimator=name) for name in ("auto", "lanczos")]
    early = [make(model, LOSS, data) for make in (hessinit.hessian, hessinit.gauss_newton)]
    plain, products = [verb() for verb in verbs], [operator @ vector for operator in early]
    with SETTINGS[setting]():
        assert [verb() for verb in verbs] == plain
        late = [make(model, LOSS, data) for make in (hessinit.hessian, hessinit.gauss_newton)]
        for one, other, expected in zip(early, late, products, strict=True):
            assert torch.equal(one @ vector, expected)
            assert torch.equal(other @ vector, expected)
    assert "Error detected" not in capfd.readouterr().err  # torch writes there itself


def test_tensors_born_in_inference_mode_are_measured() -> None:
    with torch.inference_mode():
        model, data = network(), batch()
    assert norms(model, data) == norms(network(), batch())
    with torch.inference_mode():
        assert norms(network(dtype=torch.bfloat16), batch(), layers="0")["0"] > 0


def test_compiled_models_and_parallel_wrappers_are_measured_as_written() -> None:
    def never(graph: Any, examples: Any) -> Any:
        raise AssertionError("compiled")

    plain, inner, inside = norms(network()), network(), network()
    inner.compile(backend=never)
    inside[0] = torch.compile(inside[0], backend=never)
    for model in (torch.compile(network(), backend=never), inner, inside):
        assert norms(model) == plain
    assert inner._compiled_call_impl is not None
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        assert norms(nn.parallel.DistributedDataParallel(network())) == plain
    finally:
        torch.distributed.destroy_process_group()
    # Where there are GPUs, this one moves the model to the first.
    assert norms(nn.DataParallel(network())) == pytest.approx(plain, rel=1e-4)


def test_forward_hooks_are_part_of_the_model_and_backward_hooks_are_not() -> None:
    hooked, scaled = network(), Calling(lambda net, x: net[2](net[1](net[0](x)) * 3))
    hooked[1].register_forward_hook(lambda module, given, output: output * 3)
    hooked[2].register_full_backward_hook(lambda module, inward, outward: (inward[0] * 100,))
    hooked[2].weight.register_hook(lambda gradient: gradient * 100)
    of_all = nn.modules.module.register_module_full_backward_hook(lambda *_: pytest.fail("not training"))
    try:
        assert list(norms(hooked).values()) == list(norms(scaled).values())
        with pytest.raises(pytest.fail.Exception):
            scaled(inputs().requires_grad_()).sum().backward()  # they are back
    finally:
        of_all.remove()


def test_a_forward_that_differentiates_by_its_inputs_is_measured() -> None:
    def slope(net: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0][:, :3]

    def by_hand(net: Any, x: Tensor) -> Tensor:
        slopes = 1 - torch.tanh(net[0](x)).square()
        return ((slopes * net[2].weight.sum(0)) @ net[0].weight)[:, :3]

    assert_true(Calling(slope), Calling(by_hand), "hessian")


@each_curvature
def test_a_forward_that_differentiates_by_its_weights_is_measured_or_refused(curvature: str) -> None:
    def stepped(net: nn.Linear, x: Tensor) -> Tensor:
        slopes = torch.autograd.grad(net(x).square().mean(), list(net.parameters()), create_graph=True)
        return nn.functional.linear(x, net.weight - 0.1 * slopes[0], net.bias)

    def by_hand(net: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, net.weight - 0.2 / (3 * len(x)) * net.weight @ x.T @ x)

    inner = nn.Linear(4, 3, bias=False)
    assert_true(Calling(stepped, inner), Calling(by_hand, inner), curvature)
    with_bias = Calling(stepped, nn.Linear(4, 3))
    constant = r"differentiates by a tensor that is held constant .* layers='\*\*' measures all"
    with pytest.raises(hessinit.ProblemError, match=constant):
        hessinit.measure(with_bias, LOSS, batch(), curvature=curvature)
    assert measure(with_bias, LOSS, batch(), layers="**", curvature=curvature).network.norm > 0


def test_an_encoder_is_measured_as_it_is_trained_not_by_its_path_for_inference() -> None:
    padding = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    norms_of, fast = [], torch.backends.mha.get_fastpath_enabled()
    for nested in (True, False):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        model = Net(  # the mean runs over padded positions, where the path for inference gives zeros
            lambda net, x: net.head(net.body(x, src_key_padding_mask=padding).mean(1)),
            body=nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested), head=nn.Linear(4, 3),
        )  # fmt: skip
        norms_of.append(norms(model.eval(), (inputs(4, 3, 4), labels(4))))
    assert norms_of[0] == norms_of[1]
    assert torch.backends.mha.get_fastpath_enabled() == fast


@each_curvature
def test_activation_checkpoints_change_nothing_where_they_can_be_followed(curvature: str) -> None:
    model = Calling(lambda net, x: net[2](checkpoint(lambda x: net[1](net[0](x)), x, use_reentrant=False)))
    report, plain = (hessinit.measure(m, LOSS, batch(), curvature=curvature) for m in (model, network()))
    assert report.network.norm == pytest.approx(plain.network.norm, rel=1e-5)


def test_the_same_seed_gives_the_same_bits() -> None:
    convolution = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.AvgPool2d(2), nn.Flatten()
    problems: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (network(), batch(), {"details": ["top-2", "trace", "frobenius", "density"]}),
        (nn.Sequential(*convolution, nn.Linear(36, 3)), (inputs(8, 1, 8, 8), labels(8)), {}),
    ]
    for model, data, extras in problems:
        reports = []
        for _ in range(2):
            torch.rand(3)  # the global generator has no part in it
            report = measure(model, LOSS, data, curvature="both", seed=7, **extras)
            reports.append(dataclasses.replace(report, seconds=None, gradients=None).to_json())
        assert reports[0] == reports[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_curvature
def test_half_precision_models_losses_and_targets_are_measured_in_single(dtype: Any, curvature: str) -> None:
    model, target = network(dtype=dtype), torch.rand(6, 3).round().to(dtype)
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0], dtype=dtype))
    data = inputs().to(dtype), target
    report = hessinit.measure(model, loss, data, curvature=curvature)
    truth = dense_curvature(model, loss, data, curvature)
    assert report.versions["dtype"] == "float32"
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-3)
    for layer in report:
        assert layer.norm == pytest.approx(ends(truth.layers[layer.name]).norm, rel=1e-3)
    assert model[0].weight.dtype == data[0].dtype == loss.pos_weight.dtype == dtype


@pytest.mark.parametrize(
    ("model", "asked", "used"),
    [
        (network(dtype=torch.float64), torch.float32, "float32"),
        (network(dtype=torch.bfloat16), torch.float64, "float64"),
        (nn.Sequential(network(dtype=torch.bfloat16), nn.Linear(3, 3).double()), None, "float64"),
    ],
)
def test_the_precision_is_the_better_of_single_and_the_models_own_or_the_one_asked_for(
    model: nn.Module, asked: torch.dtype | None, used: str
) -> None:
    assert measure(model, LOSS, batch(), dtype=asked).versions["dtype"] == used


@each_curvature
def test_a_sparse_embedding_is_measured_like_a_dense_one(curvature: str) -> None:
    embeddings = nn.Embedding(7, 3, sparse=True), nn.Embedding(7, 3)
    sparse, dense = (nn.Sequential(one, nn.Tanh(), nn.Flatten(), nn.Linear(6, 4)) for one in embeddings)
    dense.load_state_dict(sparse.state_dict())
    data = torch.randint(7, (5, 2)), torch.randint(4, (5,))
    found, truth = (hessinit.measure(model, LOSS, data, curvature=curvature) for model in (sparse, dense))
    assert [layer.norm for layer in found] == [layer.norm for layer in truth]
    assert found.network.norm == truth.network.norm > 0


@pytest.mark.parametrize("inplace", [False, True])
def test_a_hardsigmoid_has_the_second_derivative_that_torch_lacks(inplace: bool) -> None:
    first, _, last = network(dtype=torch.float64)
    options = {"curvature": "both", "details": "jacobians", "tolerance": 1e-8}
    by_hand = Net(lambda _, x: nn.functional.relu6(x + 3) / 6)
    models = [nn.Sequential(first, middle, last) for middle in (nn.Hardsigmoid(inplace), by_hand)]
    report, truth = (measure(model, LOSS, batch(), **options) for model in models)
    for row, other in zip(report, truth, strict=True):
        assert row.norm == pytest.approx(other.norm, rel=1e-6)
    assert report["0"].jacobians.activation == pytest.approx(1 / 6)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15), reason="torch 2.15 has that of cdist"
)
@each_curvature
def test_a_second_derivative_that_torch_lacks_is_named_and_the_way_out_leads_out(curvature: str) -> None:
    def spread(output: Tensor, target: None) -> Tensor:
        return torch.cdist(output, output.roll(1, 0)).square().mean()

    with pytest.raises(hessinit.ProblemError, match="of cdist, which the loss uses.*Write the loss"):
        hessinit.measure(nn.Linear(4, 3), spread, (inputs(), None), curvature=curvature, estimator="lanczos")
    radial = Net(
        lambda m, x: m.head(torch.exp(-torch.cdist(x, m.centres))),
        centres=nn.Parameter(torch.randn(5, 4)), head=nn.Linear(5, 3),
    )  # fmt: skip
    with pytest.raises(hessinit.ProblemError, match="of cdist.*Leave the weights before it out .layers=."):
        hessinit.measure(radial, LOSS, batch(), curvature=curvature, estimator="lanczos")
    assert measure(radial, LOSS, batch(), layers="head", curvature=curvature).network.norm > 0
