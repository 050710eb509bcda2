"""On a GPU: the numbers of the CPU, generators and switches left as found, and running out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import hessinit
from calls import measure
from hessinit.curvature import engine, operators
from several_ranks import TESTS, run_on_ranks
from tiny import LOSS, Calling, Net, batch, inputs, labels, network

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
EXACT: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-8}


def images(width: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(9 * width, 3)
    )


LSTM = {"lstm": nn.LSTM(4, 5, batch_first=True), "last": nn.Linear(5, 3)}
ENCODER = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
PROBLEMS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "dense": (network(), inputs()),
    "convolution": (images(), inputs(6, 1, 8, 8)),
    "LSTM": (Net(lambda m, x: m.last(m.lstm(x)[0][:, -1]), **LSTM), inputs(6, 3, 4)),
    "transformer": (nn.Sequential(ENCODER, nn.Flatten(), nn.Linear(12, 3)), inputs(6, 3, 4)),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("settings", [EXACT, {}], ids=["double", "single"])
def test_a_gpu_gives_the_numbers_of_the_cpu(name: str, settings: dict[str, Any]) -> None:
    model, x = PROBLEMS[name]
    known = name != "LSTM"  # on a GPU, its fused cell adds the biases after the layers that are seen
    extras: dict[str, Any] = {"curvature": "both", "details": ["jacobians", "diagnostics"] if known else []}
    expected = measure(model, LOSS, (x, labels()), **extras, **EXACT)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")  # would be TF32, were it not for the settings
    try:
        # The batch is on the CPU: it is moved.
        report = measure(model.cuda(), LOSS, (x, labels()), **extras, **settings)
    finally:
        torch.set_float32_matmul_precision(precision)
        model.cpu()
    relative = 1e-6 if settings else 2e-3
    assert report.versions["device"] == "cuda:0"
    for row, true in zip((*report, report.network), (*expected, expected.network), strict=True):
        assert row.norm == pytest.approx(true.norm, rel=relative)
        assert row.approximation.value == pytest.approx(true.approximation.value, rel=relative)
    for row, true in zip(report if known else (), expected, strict=known):
        std = true.diagnostics.activation_std
        assert row.diagnostics.activation_std == pytest.approx(std, rel=relative)
        assert row.jacobians.backward.value == pytest.approx(true.jacobians.backward.value, rel=relative)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_gpu_generators_go_on_as_if_nothing_had_been_drawn(place: str) -> None:
    model = Calling(lambda net, x: F.dropout(net(x), 0.5)).to(place)
    if place == "cuda":
        with pytest.raises(hessinit.ProblemError, match="output changes from call to call"):
            hessinit.measure(hessinit.Problem(model, LOSS, batch(), dropout="refuse"))
    torch.cuda.manual_seed(5)
    undisturbed = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(5)
    reports = [measure(model, LOSS, batch(), dropout="freeze") for _ in range(2)]
    assert torch.equal(torch.rand(4, device="cuda"), undisturbed)
    assert reports[0].network == reports[1].network


def test_weights_on_two_devices_are_refused() -> None:
    model = network()
    model[2].cuda()
    with pytest.raises(hessinit.ProblemError, match="0.weight on cpu, 2.weight on cuda:0"):
        hessinit.measure(model, LOSS, batch())


def test_a_default_device_does_not_disturb() -> None:
    model, data = network().cuda(), batch()
    plain = hessinit.measure(model, LOSS, data, details=["top-2", "trace", "density", "frobenius"])
    torch.set_default_device("cuda")
    try:
        model = Calling(lambda net, x: net(x + torch.zeros(4)), model)  # this one needs the default
        again = hessinit.measure(model, LOSS, data, details=["top-2", "trace", "density", "frobenius"])
    finally:
        torch.set_default_device(None)
    assert again.network.norm == plain.network.norm
    assert again.network.trace == plain.network.trace


def test_lengths_that_belong_on_the_cpu_stay_there() -> None:
    rows, model = [torch.randn(length, 4) for length in (3, 2, 2)], nn.LSTM(4, 3).cuda()
    padded = nn.utils.rnn.pad_sequence(rows).cuda(), torch.tensor([3, 2, 2])

    def last(model: nn.Module, x: Any) -> torch.Tensor:
        is_packed = isinstance(x, nn.utils.rnn.PackedSequence)
        return model(x if is_packed else nn.utils.rnn.pack_padded_sequence(*x))[1][0][0]

    packed = nn.utils.rnn.pack_sequence(rows)
    norms = [measure(model, LOSS, (x, labels(3)), forward=last).network.norm for x in (packed, padded)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"estimator": "lanczos"}, {"curvature": "hessian"}], ids=str)
def test_running_out_of_memory_is_explained_and_fewer_examples_fit_afterwards(
    options: dict[str, Any],
) -> None:
    model = images(64).cuda()
    x, y = torch.randn(40_000, 1, 8, 8), labels(40_000)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.8 * 2**30 / total)
    try:
        message = "out of memory on cuda:0 with 40000 examples.*Pass fewer examples"
        with pytest.raises(hessinit.ProblemError, match=message):
            measure(model, LOSS, (x, y), **options)
        torch.cuda.empty_cache()  # what had been built is let go
        assert measure(model, LOSS, (x[:400], y[:400]), **options).network.norm > 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_scheme_draws_the_same_weights_for_every_device() -> None:
    placed = []
    for device in ("cpu", "cuda"):
        model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Dropout(0.4), nn.Linear(32, 10)).to(device)
        options = {"sample": inputs(16, 64), "generator": torch.Generator().manual_seed(0)}
        placed.append((hessinit.apply_scheme_(model, "he", **options).layers, model.cpu().state_dict()))
    assert placed[0][0] == placed[1][0]
    assert all(torch.equal(one, placed[1][1][name]) for name, one in placed[0][1].items())


@pytest.mark.parametrize("scheme", ["he", "orthogonal", "lsuv"])
def test_a_generator_of_the_device_draws_there(scheme: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).cuda().bfloat16()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    generator = torch.Generator("cuda").manual_seed(0)
    result = hessinit.apply_scheme_(model, scheme, sample=torch.randn(256, 64), generator=generator)
    std = model[0].weight.detach().float().std().item()
    assert std == pytest.approx(result["0"].std[0], rel=0.1)
    result.undo()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


class Normalized(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3),
        )  # fmt: skip


def test_recorded_products_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, data = Normalized().cuda(), (inputs(6, 1, 8, 8), labels())
    recorded: list[bool] = []
    record = operators.KernelRecorder.record

    def noticed(self: operators.KernelRecorder, function: Any) -> Any:
        found = record(self, function)
        recorded.append(found is not None)
        return found

    monkeypatch.setattr(operators.KernelRecorder, "record", noticed)
    fast = hessinit.measure(model, LOSS, data, estimator="lanczos", network=False)
    assert recorded
    assert all(recorded)
    monkeypatch.setattr(engine, "SIZES", engine.LanczosEngineSizes(recorded=0))
    plain = hessinit.measure(model, LOSS, data, estimator="lanczos", network=False)
    assert [row.norm for row in fast] == pytest.approx([row.norm for row in plain], rel=1e-5)
    assert len(recorded) == len(fast.layers)


def test_tf32_is_used_where_its_rounding_fits_into_the_tolerance() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 5_000)
    )
    data = torch.randn(512, 64), torch.randint(5_000, (512,))
    true = hessinit.measure(model.double(), LOSS, data, network=False, tolerance=1e-4)
    model.float().cuda()
    rough = hessinit.measure(model, LOSS, data, network=False, tolerance=0.1)
    assert rough.engine_reason.endswith("matrix products in TF32")
    assert "TF32" not in hessinit.measure(model, LOSS, data, network=False, tolerance=1e-5).engine_reason
    for row, exact in zip(rough, true, strict=True):
        assert abs(row.norm - exact.norm) <= row.top.error
    kinked = nn.Sequential(model[0], nn.ReLU(), model[4])
    assert "TF32" not in hessinit.measure(kinked, LOSS, data, network=False, tolerance=0.1).engine_reason


class Attentive(nn.Module):
    """One layer of attention by a kernel, in 16 bits where it wants that."""

    def __init__(self, attend: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 96), nn.Linear(32, 5)
        self.attend, self.kind = attend, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.into(x).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4).to(self.kind)
        return self.out(self.attend(*heads).float().transpose(1, 2).flatten(2).mean(1))


def by_flash(*heads: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*heads)


def by_flex(*heads: torch.Tensor) -> torch.Tensor:
    return torch.compile(flex_attention)(*heads)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize(
    ("attend", "dtype", "relative"),
    [(by_flash, torch.bfloat16, 0.05), (by_flex, torch.float32, 5e-3)],
    ids=["flash", "flex"],
)
def test_the_plain_engine_measures_attention_kernels_as_they_are_trained(
    attend: Any, dtype: torch.dtype, relative: float
) -> None:
    torch.manual_seed(0)
    expected = Attentive(F.scaled_dot_product_attention, torch.float32).cuda()
    model = Attentive(attend, dtype).cuda()
    model.load_state_dict(expected.state_dict())
    data = torch.randn(16, 128, 32, device="cuda"), torch.randint(5, (16,), device="cuda")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    truth = hessinit.measure(expected, LOSS, data)
    report = hessinit.measure(model, LOSS, data, estimator="plain", tolerance=0.05)
    assert report.engine == "plain"
    for row, true in zip((*report, report.network), (*truth, truth.network), strict=True):
        assert row.norm == pytest.approx(true.norm, rel=relative)
        assert abs(row.norm - true.norm) <= row.error + true.error
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_measured_as_compiled_on_a_gpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5)).cuda()
    data = torch.randn(64, 16, device="cuda"), torch.randint(5, (64,), device="cuda")
    truth = hessinit.measure(model, LOSS, data)
    report = hessinit.measure(torch.compile(model), LOSS, data, estimator="plain")
    for row, true in zip((*report, report.network), (*truth, truth.network), strict=True):
        assert row.norm == pytest.approx(true.norm, rel=2e-3)


def test_a_model_sharded_on_a_gpu_is_measured_tried_and_fitted_as_the_plain_one(tmp_path: Path) -> None:
    # One rank: NCCL takes one a device.
    run_on_ranks(TESTS / "measurement" / "sharded_ranks.py", "answer_on_a_gpu", tmp_path, 1)
