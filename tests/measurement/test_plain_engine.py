"""What trains is measured as it is trained; what has no curvature is refused, and all is left as it was."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import hessinit
from calls import measure
from dense import dense_curvature, ends
from hessinit.digits import load_digits
from tiny import LOSS, Calling, Net, batch, inputs, labels, network
from zoo.snapshot import bits, differences, snapshot

pytestmark = pytest.mark.filterwarnings(
    "ignore::hessinit.ConvergenceWarning",
    "ignore:.torch.jit.(script|trace):DeprecationWarning",
    "ignore:.torch.jit.(script|trace):FutureWarning",
)
Build = Callable[[], Any]


def check(report: hessinit.CurvatureReport, truth: hessinit.CurvatureReport, relative: float = 1e-3) -> None:
    """Against a measurement in float64 by the exact engines."""
    assert report.engine == "plain"
    true_norms = [row.norm for row in (*truth, truth.network)]
    for row, true in zip((*report, report.network), true_norms, strict=True):
        assert row.norm == pytest.approx(true, rel=relative)
        assert abs(row.norm - true) <= row.error + 1e-4 * true


def in_double(model: nn.Module, loss: Any = LOSS, data: Any = None, **options: Any) -> Any:
    data = batch(24) if data is None else data
    return measure(model, loss, data, dtype=torch.float64, tolerance=1e-6, **options)


class OnceTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 - torch.tanh(x) ** 2)


class OnceAttention(torch.autograd.Function):
    """Fused attention has a first derivative only; on a CPU this stands for it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return F.scaled_dot_product_attention(query, key, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            parts = [part.detach().requires_grad_() for part in ctx.saved_tensors]
            return torch.autograd.grad(F.scaled_dot_product_attention(*parts), parts, gradient)


class FusedCrossEntropy(torch.autograd.Function):
    """As in Liger: the forward finds the gradient, and the backward only scales it, by 1 if it is right."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        gradient = logits.softmax(1) - F.one_hot(targets, logits.shape[1])
        ctx.save_for_backward(scale * gradient / len(targets))
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return scale * gradient, None, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def seeded(build: Build) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return build()


def attending(attention: Callable[..., Tensor]) -> nn.Module:
    def run(model: Any, x: Tensor) -> Tensor:
        parts = model.into(x).unflatten(-1, (3, 1, 4)).permute(2, 0, 3, 1, 4)
        return model.head(attention(*parts).transpose(1, 2).flatten(1))

    return seeded(lambda: Net(run, into=nn.Linear(4, 12), head=nn.Linear(12, 3)))


def bend(x: Tensor) -> Tensor:
    """GELU is written out where its own gradient jumps in float32."""
    return x * torch.sigmoid(1.7 * x)


def normalized(reentrant: bool | None) -> nn.Module:
    def run(model: Any, x: Tensor) -> Tensor:
        def block(hidden: Tensor) -> Tensor:
            return F.dropout(bend(model.norm(model.first(hidden))), 0.2)

        hidden = model.into(x)
        inner = block(hidden) if reentrant is None else checkpoint(block, hidden, use_reentrant=reentrant)
        return model.last(inner)

    parts: Build = lambda: {"into": nn.Linear(4, 5), "first": nn.Linear(5, 5), "last": nn.Linear(5, 3)}  # noqa: E731
    return seeded(lambda: Net(run, norm=nn.BatchNorm1d(5), **parts()))


class Slots:
    __slots__ = ("weight",)


def in_slots(hidden: bool) -> nn.Module:
    holder = Slots()
    model = Net(lambda net, x: net.last(torch.tanh(x @ (holder.weight if hidden else net.first.weight).T)))
    model.first, model.last = network()[0], network()[2]
    holder.weight = model.first.weight
    return model


def with_hooks() -> nn.Module:
    model = network()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 3 * gradient)
        steps = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, steps=steps: steps.step())
    return model


def frozen() -> nn.Module:
    model = network()
    model[0].weight.requires_grad_(False)
    return model


def words(mode: str, **options: Any) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.EmbeddingBag(7, 5, mode=mode, **options), nn.Linear(5, 3)))


def largest_words() -> nn.Module:
    run = lambda model, x: model[1](model[0].weight[x].amax(1))  # noqa: E731
    return Net(lambda net, x: run([net.bag, net.head], x), bag=words("max")[0], head=words("max")[1])


SEQUENCES = inputs(6, 3, 4), labels()
SENTENCES = torch.randint(7, (12, 4), generator=torch.Generator().manual_seed(1)), labels(12)
# What could not be measured, and what is the same and can be; a batch, and options.
OPENED: dict[str, tuple[Build, Build, Any, dict[str, Any]]] = {
    "a custom function": (
        lambda: Net(lambda m, x: m.net[2](OnceTanh.apply(m.net[0](x))), net=network()),
        lambda: Net(lambda m, x: m.net(x), net=network()),
        batch(24), {"curvature": "hessian"},
    ),
    "fused attention": (
        lambda: attending(OnceAttention.apply),
        lambda: attending(F.scaled_dot_product_attention),
        SEQUENCES, {"curvature": "hessian"},
    ),
    "reentrant checkpoints": (lambda: normalized(True), lambda: normalized(None), batch(24), {}),
    "checkpoints": (lambda: normalized(False), lambda: normalized(None), batch(24), {}),
    "the largest of some words": (lambda: words("max"), largest_words, SENTENCES, {}),
    "sparse gradients": (
        lambda: words("sum", sparse=True), lambda: words("sum"), SENTENCES, {"estimator": "plain"},
    ),
    "TorchScript": (lambda: torch.jit.script(network()), network, batch(24), {}),
    "a weight in slots": (lambda: in_slots(True), lambda: in_slots(False), batch(24), {}),
    "hooks of parameters": (with_hooks, network, batch(24), {"estimator": "plain"}),
    "a frozen weight": (frozen, network, batch(24), {"estimator": "plain", "layers": ["0"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPENED)
def test_what_only_trains_is_measured_as_it_trains(name: str) -> None:
    build, twin, data, options = OPENED[name]
    model = build()
    before = snapshot(model, LOSS, data)
    report = measure(model, LOSS, data, **options)
    assert not differences(before, snapshot(model, LOSS, data))
    del before
    truth = in_double(twin(), LOSS, data, **{**options, "estimator": "auto"})
    check(report, truth)


@pytest.mark.parametrize("options", [{}, {"curvature": "hessian"}], ids=["gauss-newton", "hessian"])
def test_a_fused_loss_has_the_curvature_of_the_one_that_it_fuses(options: dict[str, Any]) -> None:
    check(measure(network(), FusedCrossEntropy.apply, batch(24), **options), in_double(network(), **options))


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a compiler")
@pytest.mark.filterwarnings("ignore")  # those of the compiler
def test_a_compiled_model_runs_compiled_and_keeps_its_statistics() -> None:
    def build() -> nn.Module:
        layers: Build = lambda: nn.Sequential(  # noqa: E731
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)
        )
        return Net(lambda model, x: model.net(x), net=seeded(layers))  # torch compiles no bare Sequential

    compiled = itertools.count()

    def counted(*args: Any, count: Any = compiled.__next__) -> Any:
        count()
        return torch._inductor.compile(*args)

    model = build()
    model.compile(backend=counted)
    before = snapshot(model, LOSS, batch(24))
    report = measure(model, LOSS, batch(24), estimator="plain")
    assert next(compiled) > 0
    assert not differences(before, snapshot(model, LOSS, batch(24)))
    check(report, in_double(build()))


class Experts(nn.Module):
    """A mixture of experts, whose router is balanced by an auxiliary loss that the forward leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.balance: Any = None

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        self.balance = shares.mean(0).square().sum()
        return sum(
            share.unsqueeze(1) * expert(x) for share, expert in zip(shares.T, self.experts, strict=True)
        )


def test_auxiliary_losses_are_in_the_hessian() -> None:
    model = seeded(Experts)
    loss = lambda output, target: LOSS(output, target) + 10 * model.balance  # noqa: E731
    report = hessinit.measure(model, loss, batch(24), curvature="hessian")
    both = Net(lambda net, x: torch.cat([net.model(x), net.model.balance.expand(len(x), 1)], 1), model=model)
    full = lambda z, target: LOSS(z[:, :3], target) + 10 * z[:, 3].mean()  # noqa: E731
    truth = dense_curvature(both, full, batch(24), "hessian")
    check_dense(report, truth, "model.")
    with pytest.raises(hessinit.ProblemError, match="Gauss-Newton leaves that out|not only through"):
        measure(model, loss, batch(24))


def check_dense(report: hessinit.CurvatureReport, truth: Any, prefix: str = "") -> None:
    for row in report:
        true = ends(truth.layers[prefix + row.name]).norm
        assert row.norm == pytest.approx(true, rel=1e-3)
        assert abs(row.norm - true) <= row.error + 1e-4 * true
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-3)


def import_quietly(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except Exception as failure:  # an older torch fails in many ways
            pytest.skip(f"{name} cannot be imported: {failure}")


def adapted(quantize: Callable[[nn.Linear], nn.Linear], dora: bool = False) -> nn.Module:
    """An adapter beside a quantized layer, which it reads through the module that holds it."""
    peft = import_quietly("peft")
    base = seeded(lambda: Net(lambda m, x: m.last(torch.tanh(m.first(x)))))
    base.last = seeded(lambda: nn.Linear(32, 3))
    base.first = quantize(seeded(lambda: nn.Linear(32, 32)))
    settings = peft.LoraConfig(r=2, target_modules=["first"], use_dora=dora, init_lora_weights=False)
    return seeded(lambda: peft.get_peft_model(base, settings))


def by_torchao(layer: nn.Linear) -> nn.Linear:
    quantization = import_quietly("torchao.quantization")
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer


def by_bitsandbytes(layer: nn.Linear) -> nn.Linear:
    parts = import_quietly("bitsandbytes").nn
    quantized = parts.Linear8bitLt(32, 32, has_fp16_weights=False)
    quantized.load_state_dict(layer.state_dict())
    return quantized.to("cpu")


QUANTIZED = {"torchao": by_torchao, "bitsandbytes": by_bitsandbytes}
WIDE = inputs(24, 32), labels(24)


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("package", QUANTIZED)
def test_adapters_beside_quantized_weights_are_measured_and_these_are_refused_by_name(package: str) -> None:
    model = adapted(QUANTIZED[package])
    before = model(WIDE[0]) if package == "torchao" else adapted(by_bitsandbytes)(WIDE[0])
    report = measure(model, LOSS, WIDE, estimator="plain")
    assert torch.equal(model(WIDE[0]), before)  # bitsandbytes moves its numbers in the first forward

    def whole(layer: nn.Linear) -> nn.Linear:
        quantized = QUANTIZED[package](layer)
        plain = seeded(lambda: nn.Linear(32, 32))
        plain.weight.data = (quantized(torch.eye(32)) - quantized(torch.zeros(1, 32))).detach().T
        return plain

    # bitsandbytes rounds the inputs, too.
    relative = 1e-3 if package == "torchao" else 0.02
    truth = in_double(adapted(whole), LOSS, WIDE)
    for row, true in zip(report, truth, strict=True):
        assert row.norm == pytest.approx(true.norm, rel=relative)
    assert measure(model, LOSS, WIDE).network.norm == pytest.approx(report.network.norm, rel=2e-3)
    with pytest.raises(hessinit.ProblemError, match="first.base_layer .*curvature needs .*layers="):
        measure(model, LOSS, WIDE, layers=["*base_layer*"], estimator="plain")


@pytest.mark.filterwarnings("ignore")  # of the packages
def test_weights_beside_quantized_ones_are_planned_drawn_and_initialized() -> None:
    model = adapted(by_torchao)
    before = model(WIDE[0])
    assert hessinit.plan(model, LOSS, WIDE).gradients > 0
    problem = hessinit.Problem(model, LOSS, WIDE, layers="*lora_*")
    hessinit.initialize_(problem, lr=0.5, fit=hessinit.Fit(overwrite=True)).undo()
    assert torch.equal(model(WIDE[0]), before)
    hessinit.apply_scheme_(model, "he")
    assert not torch.equal(model(WIDE[0]), before)


@pytest.mark.filterwarnings("ignore")  # of the packages
def test_dora_stops_the_gradient_of_its_norm_and_is_measured_so_without_the_check() -> None:
    model = adapted(by_torchao, dora=True)
    with pytest.raises(hessinit.ProblemError, match="is not (that of|the derivative of)"):
        measure(model, LOSS, WIDE)
    truth = dense_curvature(adapted(lambda layer: layer, dora=True), LOSS, WIDE, "gauss-newton")
    report = measure(model, LOSS, WIDE, check=False)
    for name, row in zip(("lora_A.default", "lora_B.default"), report, strict=True):
        true = next(matrix for layer, matrix in truth.layers.items() if layer.endswith(name))
        assert row.norm == pytest.approx(ends(true).norm, rel=0.02)  # of weights in 8 bits


def digits_network(activation: Build, seed: int) -> nn.Module:
    """A plain network, whose layers rounding in 16 bits nearly hides."""
    torch.manual_seed(seed)
    hidden = [nn.Linear(64, 32), activation(), nn.Linear(32, 32), activation()]
    return nn.Sequential(*hidden, nn.Linear(32, 10))


def test_a_tolerance_beyond_the_precision_is_no_wrong_backward() -> None:
    images, targets = load_digits()
    data = images[:64].flatten(1), targets[:64]
    for seed in range(3):
        model = digits_network(nn.Tanh, seed)
        with pytest.warns(hessinit.ConvergenceWarning, match="pass a larger tolerance"):
            report = measure(model, LOSS, data, estimator="plain", tolerance=1e-6)
        exact = measure(model, LOSS, data, dtype=torch.float64, tolerance=1e-7)
        for row, true in zip((*report, report.network), (*exact, exact.network), strict=True):
            assert abs(row.norm - true.norm) <= row.error < 1e-3 * true.norm


@pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")
def test_stated_errors_hold_where_gradients_jump() -> None:
    images, targets = load_digits()
    data = images[:64].flatten(1), targets[:64]
    held = list[bool]()
    for seed in range(16):
        model = digits_network(nn.ReLU, seed)
        report = measure(model, LOSS, data, estimator="plain", network=False)
        exact = measure(model, LOSS, data, network=False, tolerance=1e-5)
        held += [abs(row.norm - true.norm) <= row.error for row, true in zip(report, exact, strict=True)]
    assert held.count(False) <= 1  # 6 where two step sizes alone said how far differences are off


@pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")
@pytest.mark.parametrize("tolerance", [1e-3, 0.05])
def test_longer_steps_of_layers_that_rounding_hides_do_not_spoil_the_network(tolerance: float) -> None:
    images, targets = load_digits()
    data = images[:64].flatten(1), targets[:64]

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    for seed in range(4):
        model = digits_network(nn.Tanh, seed)
        report = measure(model, LOSS, data, forward=forward, tolerance=tolerance)
        exact = measure(model, LOSS, data).network
        assert abs(report.network.norm - exact.norm) <= min(report.network.error, 0.05 * exact.norm)


@pytest.mark.parametrize("activation", [nn.GELU, nn.Tanh, nn.ReLU])
def test_mixed_precision_is_within_some_percent_and_says_so(activation: Build) -> None:
    def build() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(32, 64), activation(), nn.Linear(64, 10)))

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    data = inputs(128, 32), torch.arange(128) % 10
    report = measure(build(), LOSS, data, forward=forward)
    truth = in_double(build(), LOSS, data)
    assert report.engine == "plain"
    for row, true in zip((*report, report.network), (*truth, truth.network), strict=True):
        assert row.norm == pytest.approx(true.norm, rel=0.05)
        assert abs(row.norm - true.norm) <= row.error


@pytest.fixture
def one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_of_ddp_is_measured_as_the_one_inside(one_process: None) -> None:
    model = nn.parallel.DistributedDataParallel(network())
    before = snapshot(model, LOSS, batch(24))
    check(measure(model, LOSS, batch(24), estimator="plain"), in_double(network()))
    assert not differences(before, snapshot(model, LOSS, batch(24)))


def scaled(factor: float, layer: int) -> nn.Module:
    model = network()
    model[layer].weight.data *= factor
    return model


def reached(run: Callable[..., Tensor]) -> Build:
    return lambda: Calling(run)


def cached(model: Any, x: Tensor, store: Any) -> Tensor:
    if getattr(store, "weight", None) is None:
        store.weight = 2 * model[0].weight
    return model[2](torch.tanh(F.linear(x, store.weight)))


def spectral() -> nn.Module:
    model = network()
    seeded(lambda: nn.utils.parametrizations.spectral_norm(model[0]))
    return model


def tied() -> nn.Module:
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 3))


def recurrent() -> nn.Module:
    parts: Build = lambda: {"cell": nn.LSTM(4, 5, batch_first=True), "head": nn.Linear(5, 3)}  # noqa: E731
    return seeded(lambda: Net(lambda m, x: m.head(m.cell(x)[0][:, -1]), **parts()))


def encoder() -> nn.Module:
    layer: Build = lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, bend, batch_first=True)  # noqa: E731
    return seeded(lambda: nn.Sequential(layer(), nn.Flatten(), nn.Linear(12, 3))).eval()


class Cache:
    weight: Any = None


CACHE = Cache()


UNEVEN = [(inputs(24)[:5], labels(5)), (inputs(24)[5:], labels(19))]
RIGHT: dict[str, tuple[Build, Any, dict[str, Any]]] = {
    "weights that are cached": (lambda: Calling(lambda m, x: cached(m, x, CACHE)), batch(24), {}),
    "a norm that is iterated": (spectral, batch(24), {}),
    "a tied weight": (lambda: seeded(tied), batch(24), {}),
    "dropout": (reached(lambda m, x: m[2](F.dropout(torch.tanh(m[0](x)), 0.3))), batch(24), {}),
    "inputs that are overwritten": (reached(lambda m, x: m(x.mul_(2))), batch(24), {}),
    "a zero head": (lambda: scaled(0.0, 2), batch(24), {}),
    "a small layer": (lambda: scaled(1e-3, 0), batch(24), {}),
    "a large layer": (lambda: scaled(1e3, 0), (inputs(24) / 1e3, labels(24)), {}),
    "uneven batches": (network, UNEVEN, {}),
    "biases": (network, batch(24), {"layers": "**"}),
    "a recurrent network": (
        recurrent, SEQUENCES, {},
    ),
    "attention's fast path": (
        encoder, SEQUENCES, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
@pytest.mark.parametrize("name", RIGHT)
def test_unusual_networks_have_the_curvature_of_the_exact_engines(name: str, curvature: str) -> None:
    build, data, options = RIGHT[name]
    if name == "a norm that is iterated" and curvature == "hessian":
        pytest.skip("its backward takes singular vectors as constants")
    report = measure(build(), LOSS, data, estimator="plain", curvature=curvature, **options)
    truth = in_double(build(), LOSS, data, curvature=curvature, **options)
    for row, true in zip((*report, report.network), (*truth, truth.network), strict=True):
        assert abs(row.norm - true.norm) <= max(row.error, 1e-4 * true.norm) + true.error
        if row.converged:
            assert row.error <= 2e-3 * true.norm


def test_float64_is_measured_to_its_own_precision() -> None:
    data = inputs(24).double(), labels(24)
    report = measure(network(dtype=torch.float64), LOSS, data, estimator="plain", tolerance=1e-6)
    check(report, in_double(network(), LOSS, data), 2e-6)


def detached(part: int) -> Build:
    def run(model: Any, x: Tensor) -> Tensor:
        hidden = x
        for number, layer in enumerate(model):
            weight = layer.weight.detach() if number == part else None
            hidden = layer(hidden) if weight is None else F.linear(hidden, weight, layer.bias)
        return hidden

    return reached(run)


def beside_large() -> nn.Module:
    """A layer whose gradient is stopped, and whose effect is far below that of the others."""
    parts = {"large": nn.Linear(4, 256), "small": nn.Linear(4, 3), "last": nn.Linear(256, 3)}
    stopped = lambda m, x: m.last(torch.tanh(m.large(x))) + 0.05 * F.linear(x, m.small.weight.detach())  # noqa: E731
    return Net(lambda m, x: stopped(m, x) + 0 * m.small.weight.sum(), **parts)


def clamped(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
    return model(x)


HIDDEN = Slots()


def with_holder(model: Any, x: Tensor) -> Tensor:
    return cached(model, x, HIDDEN)


def straight_through(x: Tensor) -> Tensor:
    return x + ((4 * x).round() / 4 - x).detach()


REFUSED: dict[str, tuple[Build, Any, str, dict[str, Any]]] = {
    "a weight that is detached": (detached(0), LOSS, "not the derivative of its forward", {}),
    "a last weight that is detached": (detached(2), LOSS, "not the derivative of its forward", {}),
    "a small layer that is detached": (
        lambda: seeded(beside_large), LOSS, "not the derivative of its forward", {},
    ),
    "signs": (reached(lambda m, x: m[2](Sign.apply(m[0](x)))), LOSS, "backward of the model", {}),
    "rounded weights": (
        reached(lambda m, x: m[2](torch.tanh(F.linear(x, straight_through(m[0].weight))))),
        LOSS, "not the derivative of its forward", {},
    ),
    "reversed gradients": (
        reached(lambda m, x: m[2](Reversed.apply(torch.tanh(m[0](x))))), LOSS, "gradient reversal", {},
    ),
    "a cache that is not found": (reached(with_holder), LOSS, "not the derivative of its forward", {}),
    "a forward that clamps": (reached(clamped), LOSS, "writes into inner.0.weight", {}),
    "a linear loss": (network, lambda z, _: z.mean(), "linear in the model's output", {}),
    "a detached loss": (network, lambda z, y: LOSS(z.detach(), y), "is not a function of the model", {}),
    "a fused loss with a wrong gradient": (
        network, lambda z, y: FusedCrossEntropy.apply(z, y, 1.5), "the derivative of the loss is not", {},
    ),
    "weights in 16 bits": (
        lambda: network().bfloat16(), LOSS, "held in bfloat16.*Hold them all in float32", {},
    ),
    "dropout": (
        reached(lambda m, x: m[2](F.dropout(torch.tanh(m[0](x)), 0.1))),
        LOSS, "output is random", {"dropout": "refuse"},
    ),
    "kinks": (
        lambda: seeded(lambda: nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 3))),
        LOSS, "the gradient jumps", {"curvature": "hessian"},
    ),
    "Jacobians": (network, LOSS, "details='jacobians' needs a model", {"details": "jacobians"}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_curvature_is_refused_and_left_as_it_was(name: str) -> None:
    build, loss, message, options = REFUSED[name]
    model, data = build(), batch(24)
    if name == "weights in 16 bits":
        data = data[0].bfloat16(), data[1]
    before = [parameter.detach().float().clone() for parameter in model.parameters()]
    with pytest.raises(hessinit.ProblemError, match=message):
        measure(model, loss, data, estimator="plain", **options)
    for parameter, values in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().float(), values)


def test_a_linear_loss_has_an_exact_hessian() -> None:
    mean = lambda z, _: z.mean()  # noqa: E731
    options = {"curvature": "hessian"}
    check(
        measure(network(), mean, batch(24), estimator="plain", **options),
        in_double(network(), mean, **options),
    )


def statistics_of(model: nn.Module) -> list[Any]:
    tables = [
        [dict(table or {}) for table in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)]
        for parameter in model.parameters()
    ]
    return [tables, [bits(buffer) for buffer in model.buffers()]]


@pytest.mark.parametrize("scripted", [False, True], ids=["modules", "TorchScript"])
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_the_model_comes_back_from_any_call_that_raises(curvature: str, scripted: bool) -> None:
    for number in (0, 1, 2, 3, 5, 8, 13):
        model: Any = seeded(
            lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
        )
        LOSS(model(inputs()), labels()).backward()
        model[0].weight.requires_grad_(False)
        model[3].weight.register_hook(lambda gradient: 2 * gradient)
        model[3].bias.register_post_accumulate_grad_hook(lambda parameter: None)
        if scripted:
            model = torch.jit.script(model)
        calls = itertools.count()
        error = KeyboardInterrupt if number % 2 else ValueError

        def raising(
            net: Any, x: Tensor, calls: Any = calls.__next__, last: int = number, error: Any = error
        ) -> Any:
            output = net(x)
            if calls() >= last:
                raise error
            return output

        before = snapshot(model, LOSS, batch(24)), statistics_of(model)
        with pytest.raises(error):
            measure(
                model,
                LOSS,
                batch(24),
                estimator="plain",
                forward=raising,
                curvature=curvature,
                layers=["0", "3"],
            )
        after = snapshot(model, LOSS, batch(24)), statistics_of(model)
        assert not differences(before[0], after[0])
        assert before[1] == after[1]


def test_no_optimizer_steps_in_a_backward_that_is_the_only_one() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        return model[2](checkpoint(lambda hidden: torch.tanh(hidden), model[0](x), use_reentrant=True))

    model = with_hooks()
    before = snapshot(model, LOSS, batch(24))
    report = measure(model, LOSS, batch(24), forward=run, estimator="plain")
    assert not differences(before, snapshot(model, LOSS, batch(24)))
    check(report, in_double(network()))


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian", "both"])
def test_a_plan_names_the_engine_and_expects_what_it_costs(curvature: str) -> None:
    options: dict[str, Any] = {"estimator": "plain", "curvature": curvature}
    planned = hessinit.plan(network(), LOSS, batch(24), **options)
    assert (planned.engine, planned.engine_reason) == ("plain", "estimator='plain' was asked for")
    assert planned.memory > 0
    products = sum(row.top.products for row in measure(network(), LOSS, batch(24), **options))
    assert planned.gradients > products / 3
    seen_anyhow = Net(lambda m, x: m.net[2](OnceTanh.apply(m.net[0](x))), net=network())
    by_itself = hessinit.plan(seen_anyhow, LOSS, batch(24), curvature=curvature)
    assert by_itself.engine in ("plain", "gram", "lanczos")


def test_signals_that_were_not_judged_are_not_called_sound() -> None:
    report = measure(network(), LOSS, batch(24), estimator="plain")
    assert report.findings is None
    assert "Sound" not in str(report)
    with contextlib.suppress(AssertionError):
        hessinit.assert_sound(network(), LOSS, batch(24))
