"""What cannot be measured is refused before any work is done: the value, the rule, the way out."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import hessinit
from calls import measure
from tiny import LOSS, Calling, Net, batch, inputs, labels, network, raise_from


def check_refused(message: str, model: Any, loss: Any, data: Any, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", lambda *_, **__: pytest.fail("work was begun"))
        with pytest.raises(hessinit.ProblemError, match=message):
            measure(model, loss, data, **options)


def broken(value: float) -> torch.Tensor:
    return inputs().index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(value))


EXACTLY = {"estimator": "lanczos"}  # and not by the plain engine, which needs only a gradient
EMPTY = inputs()[:0], labels()[:0]
NO_PAIR = "it must be \\(inputs, targets\\), or an iterable of such pairs"
BATCHES: list[tuple[Callable[[], Any], str]] = [
    (lambda: 3, f"batch is a int; {NO_PAIR}"),
    (inputs, f"batch is a Tensor; {NO_PAIR}"),
    (lambda: {"x": inputs()}, f"batch is a dict; {NO_PAIR}"),
    (lambda: TensorDataset(*batch()), f"batch is a TensorDataset; {NO_PAIR}"),
    (lambda: (inputs(), inputs(), labels()), "a tuple of 3 tensors; .*\\(\\(x1, x2\\), targets\\)"),
    (lambda: [batch(), batch(), (inputs(), inputs(), labels())], "batch 2 is a tuple; every batch must"),
    (lambda: [{"x": inputs(), "labels": labels()}], "batch 0 is a dict; every.*a pair.*b\\['labels'\\]"),
    (list, "batch is an empty iterable"),
    (lambda: itertools.repeat(batch(1)), "more than 1000 batches.*itertools.islice\\(batch, 8\\)"),
    (lambda: EMPTY, "the batch is empty .*shape \\(0,\\)\\); pass at least one example"),
    (lambda: [batch(), EMPTY], "batch 1: the batch is empty"),
    (
        lambda: (numpy.ones((6, 4)), [0, 1]),
        "type ndarray and .* list: neither .* Convert arrays with torch.as_",
    ),
    (lambda: [batch(), (inputs(4), labels(6))], "batch 1: inputs have 4 examples \\(shape \\(4, 4\\)\\)"),
    (lambda: [batch(), (broken(-torch.inf), labels())], "batch 1: the inputs hold 1 NaN or inf among 24 val"),
    (lambda: (inputs().double() * 1e300, labels()), "Scale them if they are beyond .*32.*torch.float64"),
]


@pytest.mark.parametrize(("data", "message"), BATCHES, ids=[message[:30] for _, message in BATCHES])
def test_data_that_cannot_be_measured(data: Callable[[], Any], message: str) -> None:
    check_refused(message, network(), LOSS, data())


def test_masks_of_minus_infinity_and_masked_nan_targets_are_no_reason_to_refuse() -> None:
    mask = torch.zeros(6, 4).index_fill(1, torch.tensor([2]), -torch.inf)
    data = ((inputs(), mask), labels())
    report = measure(network(), LOSS, data, forward=lambda model, x: model(x[0] * x[1].exp()))
    expected = hessinit.measure(network(), LOSS, (inputs() * mask.exp(), labels()))
    assert report.network.norm == expected.network.norm
    target = torch.ones(6, 3)
    target[4:] = torch.nan

    def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        known = ~target.isnan()
        return (output[known] - target[known]).square().mean()

    report = hessinit.measure(network(), masked, (inputs(), target))
    expected = hessinit.measure(network(), nn.MSELoss(), (inputs()[:4], target[:4]))
    assert report.network.norm == pytest.approx(expected.network.norm, rel=1e-3)


def parametrized(matrix: torch.Tensor) -> nn.Module:
    trained = matrix.is_floating_point() or matrix.is_complex()
    weight = nn.Parameter(matrix, requires_grad=trained)
    return Net(lambda m, x: (x.to(m.matrix.dtype) @ m.matrix).abs().float(), matrix=weight)


class TwoInputs(nn.Linear):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * scale


def elsewhere(device: str) -> nn.Module:
    class Elsewhere(nn.Parameter):
        device = property(lambda self: torch.device(device_name))  # type: ignore[assignment]

    device_name = device
    model = network() if device != "mps" else nn.Linear(4, 3, bias=False)
    last: Any = model[2] if isinstance(model, nn.Sequential) else model
    last.weight = Elsewhere(last.weight.detach())
    return model


def filled(model: nn.Module, value: float) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            nn.init.constant_(parameter, value)
    return model


def not_finite() -> nn.Module:
    model = network()
    with torch.no_grad():
        model[0].bias[1], model[2].weight[0, 0] = torch.nan, torch.inf
    return model


def marked_by_deepspeed() -> nn.Module:
    model = network()
    model[2].weight.ds_id = 3
    return model


def returning(function: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    return lambda: Calling(lambda net, x: function(net(x)))


def checkpointed(reentrant: bool) -> Calling:
    return Calling(lambda net, x: checkpoint(net[2], net[1](net[0](x)), use_reentrant=reentrant))


INT, COMPLEX, EYE = torch.ones(4, 3).to(torch.int8), torch.ones(4, 3) * 1j, torch.eye(4, 3)
HALF, THREE = network(dtype=torch.bfloat16), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
ONE_DICT = {"data": ({"x": inputs()}, labels())}
ONE_TUPLE = {"data": ((inputs(), inputs()), labels())}
MODELS: list[tuple[Callable[[], Any], str, dict[str, Any]]] = [
    (lambda: lambda x: x, "model is a function; it must be a torch.nn.Module", {}),
    (lambda: nn.Linear, "model is a type; .* Pass an instance, not the class", {}),
    (nn.ReLU, "the model has no parameters", {}),
    (lambda: nn.LayerNorm(4), "no parameter of two or more dimensions.*layers=\\['weight', 'bias'\\]", {}),
    (lambda: network().requires_grad_(False), "all 2 are frozen .*Unfreeze some, or.*layers=\\['0', '2'", {}),
    (lambda: parametrized(INT), "matrix has dtype torch.int8.*floating-point", {"layers": "matrix"}),
    (lambda: parametrized(COMPLEX), "torch.complex64.*view_as_real.*leave it out", {}),
    (lambda: parametrized(EYE.to_sparse()), "layout torch.sparse_coo; .*dense, real.*layers=", {}),
    (lambda: network(device="meta"), "0.weight is on the meta device.*to_empty", {}),
    (lambda: nn.LazyLinear(3), "weight is lazy and has no shape yet; run the model on a batch once", {}),
    (lambda: elsewhere("cuda:1"), "0.weight on cpu, 2.weight on cuda:1\\); .*model.to\\(", {}),
    (lambda: elsewhere("mps"), "an Apple GPU \\(mps\\), which has no float64.*model.cpu\\(\\)", {}),
    (not_finite, "0.bias holds NaN or inf \\(it is the first parameter.*; initialize it again", {}),
    (lambda: filled(THREE, 1e15), "NaN or inf \\(2 is the first layer whose output.*float64", {}),
    (returning(lambda z: (z, z)), "the model returned a tuple of 2; .*model\\(x\\)\\[0\\]", {}),
    (returning(lambda z: {"out": z}), "a dict with keys \\['out'\\]; .*model\\(x\\)\\['out'\\]", {}),
    (returning(lambda z: types.SimpleNamespace(logits=z)), "a SimpleNamespace; .*x\\).logits", {}),
    (returning(lambda z: z.argmax(1)), "the model's output has dtype torch.int64", {}),
    (returning(lambda z: z.bfloat16()), "output has dtype torch.bfloat16.*Leave casts", EXACTLY),
    (returning(lambda z: z.detach()), "does not depend on any measured weight.*Remove the det", {}),
    (network, "forward= returned a tuple of 2", {"forward": lambda model, x: (model(x), x)}),
    (network, "forward=3 must be a function, .* callable as forward\\(model, inputs\\)", {"forward": 3}),
    (lambda: TwoInputs(4, 3), "called with one dict, failed.*scale.*model\\(\\*\\*x\\)", ONE_DICT),
    (lambda: TwoInputs(4, 3), "called with one tuple, failed.*model\\(\\*x\\)", ONE_TUPLE),
    (lambda: Calling(lambda net, x: net(x.bfloat16()), HALF), "float32 or better.*same dtype.*x.to\\(", {}),
    (lambda: checkpointed(False), "recomputes activations.*gradient_checkp", {"dtype": torch.float64}),
    (lambda: checkpointed(True), "reentrant checkpoints.*use_reentrant=False", EXACTLY),
    (marked_by_deepspeed, "2.weight is sharded: .*before the model is sharded.*full_state_dict", {}),
    (
        lambda: torch.jit.script(network()),
        "the model is a TorchScript module.*pass the module it was",
        EXACTLY,
    ),
    (lambda: nn.Sequential(torch.jit.script(network())), "0 is a TorchScript module, whose weights", EXACTLY),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(("build", "message", "options"), MODELS, ids=[one[1][:30] for one in MODELS])
def test_models_that_cannot_be_measured(build: Callable[[], Any], message: str, options: Any) -> None:
    check_refused(message, build(), LOSS, **{"data": batch(), **options})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_schemes_refuse_torchscript() -> None:
    with pytest.raises(hessinit.ProblemError, match="the model is a TorchScript module"):
        hessinit.apply_scheme_(torch.jit.script(network()), "he")


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support:UserWarning")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_sharded_weights_are_refused() -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import distribute_module

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        sharded = distribute_module(network(), init_device_mesh("cpu", (1,)))
        check_refused("0.weight is sharded", sharded, LOSS, batch())
        wrapped = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
        check_refused("the model is sharded", wrapped, LOSS, batch())
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "loss=None must be a function, .* callable as loss\\(output, target\\)"),
        (nn.MSELoss, "MSELoss'> must be a function, or an instance"),
        (nn.CrossEntropyLoss(reduction="none"), "a tensor of shape \\(6,\\) .*Average it"),
        (lambda z, y: 1.0, "the loss returned 1.0; it must be one real number in a tensor"),
        (lambda z, y: z.argmax(), "the loss returned a tensor of shape \\(\\) and torch.int64"),
        (lambda z, y: z.detach().sum(), "not a function of the model's output"),
        (lambda z, y: nn.Parameter(torch.ones(())) ** 2, "not a function of the model's output"),
        (lambda z, y: -z.sum().abs().neg().log(), "the loss is nan.*check the targets"),
        (lambda z, y: F.cross_entropy(z.div_(2), y), "changes the model's output in place"),
        (lambda z, y: (z + torch.nan * y[:1, None]).sum(), "the loss is nan"),
    ],
)
def test_a_loss_must_be_a_number_and_a_function_of_the_output(loss: Any, message: str) -> None:
    check_refused(message, network(), loss, batch())


def test_a_penalty_on_the_weights_and_targets_that_make_the_loss_nan_are_not_missed() -> None:
    model = network()
    penalized = lambda z, y: F.cross_entropy(z, y) + model[0].weight.square().sum()  # noqa: E731
    message = "the loss depends on 0.weight not only through the model.*: by a penalty.*Leave a pen.*2c"
    check_refused(message, model, penalized, batch(), **EXACTLY)
    with pytest.raises(hessinit.ProblemError, match=message):
        hessinit.measure(model, penalized, batch())
    target = torch.randn(6, 3)
    target[2, 0] = torch.nan
    check_refused("the targets hold 1 NaN or inf", network(), nn.MSELoss(), (inputs(), target))


@pytest.mark.parametrize("loss", [nn.NLLLoss(), nn.L1Loss()])
def test_a_loss_that_is_linear_in_the_output_is_refused_not_measured_as_zero(loss: nn.Module) -> None:
    model = nn.Sequential(network(), nn.LogSoftmax(1))
    data = inputs(), labels() if isinstance(loss, nn.NLLLoss) else inputs(6, 3)
    linear = "linear in the model's output.*move log_softmax into the loss"
    with pytest.raises(hessinit.ProblemError, match=linear):
        hessinit.measure(model, loss, data)
    with pytest.raises(hessinit.ProblemError, match='measure the exact Hessian: curvature="hessian"'):
        hessinit.measure(model, loss, data, curvature="both")
    if isinstance(loss, nn.NLLLoss):
        exact = hessinit.measure(model, loss, data, curvature="hessian").network.norm
        within = hessinit.measure(network(), LOSS, batch(), curvature="hessian").network.norm
        assert exact == pytest.approx(within, rel=1e-3)


def test_a_loss_that_is_flat_at_these_outputs_is_not_called_linear() -> None:
    model = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    flat = "no curvature at these outputs of the model, though it has at others.*Measure at other weights"
    with pytest.raises(hessinit.ProblemError, match=flat):
        hessinit.measure(model, lambda output, target: output.pow(4).mean(), batch())
    with torch.no_grad():
        model.weight += 1
    assert hessinit.measure(model, lambda output, target: output.pow(4).mean(), batch()).network.norm > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curvature": "hessain"}, "curvature='hessain' is unknown; .*Did you mean 'hessian'?"),
        ({"estimator": "lanzcos"}, "estimator='lanzcos' is unknown; .*Did you mean 'lanczos'?"),
        ({"curvature": "hessian", "estimator": "gram"}, "'gram' measures Gauss-Newton.*'auto' or 'lanczos'"),
        ({"details": "top-3", "max_iterations": 1}, "top-3. with max_iterations=1.*_iterations=3 or more"),
        ({"layers": []}, "layers=\\[\\] must be names or globs.*leave it out to measure every weight"),
        ({"layers": "3"}, "layers='3' fits no parameter of the model; its layers are 0, 2\\."),
        ({"layers": ["0", "encoder.*"]}, "layers='encoder.\\*' fits no parameter"),
    ],
)
def test_options_outside_their_range(options: dict[str, Any], message: str) -> None:
    check_refused(message, network(), LOSS, batch(), **options)


def test_the_nearest_layer_is_offered() -> None:
    model = Net(lambda m, x: m.decoder(m.encoder(x)), encoder=nn.Linear(4, 5), decoder=nn.Linear(5, 3))
    offered = "layers are encoder, decoder. Did you mean 'encoder'?"
    check_refused(offered, model, LOSS, batch(), layers="encodr")


def failing(error: BaseException) -> Calling:
    count = raise_from(1, error)
    return Calling(lambda net, x: count() or net(x))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory: you tried"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError("Unable to allocate 8 GiB for an array"),
    ],
)
def test_a_forward_that_runs_out_of_memory_is_told_what_to_reduce(error: BaseException) -> None:
    message = "out of memory on cpu with 6 examples and 35 weights. Pass fewer examples.*fewer layers"
    for verb in (hessinit.measure, hessinit.hessian):
        with pytest.raises(hessinit.ProblemError, match=message) as caught:
            verb(failing(error), LOSS, batch())
        assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("the user's own"), KeyError("theirs"), KeyboardInterrupt()])
def test_other_errors_come_through_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        hessinit.measure(failing(error), LOSS, batch())
    assert caught.value is error
