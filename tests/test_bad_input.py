"""A model or a loss that cannot be measured is refused before any work: the value, the rule, the way out."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hessinit
from tiny import LOSS, Calling, batch, inputs, labels, network


@pytest.fixture(autouse=True)
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: pytest.fail("work was begun"))


def check_refused(message: str, model: Any, loss: Any = LOSS, data: Any = None, **options: Any) -> None:
    with pytest.raises(hessinit.ProblemError, match=message):
        hessinit.measure(model, loss, batch() if data is None else data, **options)


class Parametrized(nn.Module):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.matrix = parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.matrix.dtype) @ self.matrix).abs().float()


def test_a_model_must_be_a_module_and_an_instance() -> None:
    check_refused("model is a function; it must be a torch.nn.Module", lambda x: x)
    check_refused("model is a type; .* Pass an instance, not the class", nn.Linear)


def test_a_model_without_weights_is_refused() -> None:
    check_refused("the model has no parameters", nn.ReLU())
    check_refused("no parameter of two or more dimensions.*layers=\\['weight', 'bias'\\]", nn.LayerNorm(4))


def test_a_frozen_model_is_measured_only_by_name() -> None:
    frozen = network().requires_grad_(False)
    check_refused("all 2 are frozen .*Unfreeze some, or name.*layers=\\['0', '2'\\]", frozen)


def test_whole_and_complex_weights_are_refused() -> None:
    whole = nn.Parameter(torch.ones(4, 3, dtype=torch.int8), requires_grad=False)
    check_refused("matrix has dtype torch.int8.*floating-point.*before it is quantized", Parametrized(whole))
    check_refused("matrix has dtype torch.int8.*floating-point", Parametrized(whole), layers="matrix")
    unreal = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))
    check_refused(
        "matrix has dtype torch.complex64.*real floating-point.*view_as_real.*leave this weight out",
        Parametrized(unreal),
    )


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_weights_are_refused(layout: torch.layout) -> None:
    sparse = nn.Parameter(torch.eye(4, 3).to_sparse(layout=layout))
    check_refused(f"matrix is a sparse tensor .{layout}.*dense weight.*layers=", Parametrized(sparse))


def test_weights_without_values_are_refused() -> None:
    check_refused("0.weight is on the meta device.*to_empty", network(device="meta"))
    check_refused("weight is lazy and has no shape yet; run the model on a batch once", nn.LazyLinear(3))


def test_weights_on_several_devices_are_refused() -> None:
    class Elsewhere(nn.Parameter):
        device = property(lambda self: torch.device("cuda:1"))  # type: ignore[assignment]

    model = network()
    model[2].weight = Elsewhere(model[2].weight.detach())
    check_refused(
        "different devices \\(0.weight on cpu, 2.weight on cuda:1\\); .*model.to\\(device\\)", model
    )


def test_weights_on_an_apple_gpu_are_refused() -> None:
    class Elsewhere(nn.Parameter):
        device = property(lambda self: torch.device("mps"))  # type: ignore[assignment]

    model = nn.Linear(3, 2, bias=False)
    model.weight = Elsewhere(model.weight.detach())
    check_refused("an Apple GPU \\(mps\\), which has no float64.*model.cpu\\(\\)", model)


def test_scripted_modules_are_refused() -> None:
    class Scripted(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

    check_refused(
        "inner is a TorchScript module.*pass the module it was made from", Calling(None, Scripted())
    )


def test_weights_that_are_not_finite_are_refused_by_the_first_ones_name() -> None:
    model = network()
    with torch.no_grad():
        model[0].bias[1], model[2].weight[0, 0] = torch.nan, torch.inf
    check_refused(
        "0.bias holds NaN or inf \\(it is the first parameter that does\\); initialize it again", model
    )


def test_activations_that_overflow_are_refused_by_the_first_layers_name() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(1e15)
    check_refused(
        "output holds NaN or inf \\(2 is the first layer whose output does\\).*torch.float64", model
    )
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_submodules_is_named_by_its_type() -> None:
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, 3e38)
    check_refused("the Linear itself is the first layer", model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net, x: (net(x), x), "the model returned a tuple of 2; .*model\\(x\\)\\[0\\]"),
        (lambda net, x: [net(x)], "the model returned a list of 1; .*model\\(x\\)\\[0\\]"),
        (lambda net, x: {"out": net(x)}, "a dict with keys \\['out'\\]; .*model\\(x\\)\\['out'\\]"),
        (
            lambda net, x: types.SimpleNamespace(logits=net(x)),
            "a SimpleNamespace; .*model\\(\\*\\*x\\).logits",
        ),
        (lambda net, x: None, "a NoneType; curvature needs one tensor"),
        (lambda net, x: net(x).argmax(1), "the model's output has dtype torch.int64"),
        (lambda net, x: net(x).bfloat16(), "output has dtype torch.bfloat16.*Leave the cast out"),
        (lambda net, x: net(x).detach(), "does not depend on any measured weight.*Remove the detach"),
    ],
)
def test_an_output_that_is_not_one_real_tensor_of_the_weights_is_refused(call: Any, message: str) -> None:
    check_refused(message, Calling(call))


def test_a_forward_that_returns_no_tensor_is_called_by_its_name() -> None:
    check_refused("forward= returned a tuple of 2", network(), forward=lambda model, x: (model(x), x))
    check_refused("forward is a int; it must be callable as forward\\(model, inputs\\)", network(), forward=3)


def test_a_model_that_wants_its_inputs_one_by_one_is_told_how() -> None:
    class Two(nn.Linear):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    check_refused(
        "called with one dict, failed.*scale.*model\\(\\*\\*x\\)", Two(4, 3), data=({"x": inputs()}, labels())
    )
    check_refused(
        "called with one tuple, failed.*model\\(\\*x\\)", Two(4, 3), data=((inputs(), inputs()), labels())
    )


def test_a_model_that_casts_by_itself_is_told_to_follow_its_weights() -> None:
    model = Calling(lambda net, x: net(x.bfloat16()), network(dtype=torch.bfloat16))
    check_refused("converted to float32 or better.*same dtype.*x.to\\(self.linear.weight.dtype\\)", model)


def checkpointed(reentrant: bool) -> Calling:
    from torch.utils.checkpoint import checkpoint

    return Calling(lambda net, x: checkpoint(net[2], net[1](net[0](x)), use_reentrant=reentrant))


def test_checkpoints_that_would_run_on_other_weights_are_refused() -> None:
    check_refused(
        "recomputes activations.*gradient_checkpointing_disable", checkpointed(False), dtype=torch.float64
    )
    check_refused("reentrant checkpoints.*use_reentrant=False", checkpointed(True))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "loss is a NoneType; it must be callable as loss\\(output, target\\)"),
        (nn.MSELoss, "loss is the class MSELoss; pass an instance: MSELoss\\(\\)"),
        (nn.CrossEntropyLoss(reduction="none"), 'loss has shape \\(6,\\); .*reduction="mean"'),
        (lambda output, target: 1.0, "the loss returned a float; it must return a scalar tensor"),
        (lambda output, target: output.argmax(), "the loss has dtype torch.int64"),
        (lambda output, target: torch.ones(()), "not a function of the model's output"),
        (lambda output, target: output.detach().sum(), "not a function of the model's output"),
        (lambda output, target: nn.Parameter(torch.ones(())) ** 2, "not a function of the model's output"),
        (lambda output, target: -output.sum().abs().neg().log(), "the loss is nan.*check the targets"),
        (
            lambda output, target: F.cross_entropy(output.div_(2), target),
            "changes the model's output in place",
        ),
    ],
)
def test_a_loss_must_be_a_number_and_a_function_of_the_output(loss: Any, message: str) -> None:
    check_refused(message, network(), loss)


def test_a_penalty_on_the_weights_inside_the_loss_is_not_missed() -> None:
    model = network()
    check_refused(
        "the loss depends on 0.weight not only through the model's output: by a penalty.*Leave a penalty "
        "out.*2c",
        model,
        lambda output, target: F.cross_entropy(output, target) + model[0].weight.square().sum(),
    )


def test_targets_that_make_the_loss_nan_are_counted() -> None:
    target = torch.randn(6, 3)
    target[2, 0] = torch.nan
    check_refused("the targets hold 1 NaN or inf", network(), nn.MSELoss(), (inputs(), target))


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support:UserWarning")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_sharded_weights_are_refused(mesh: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import distribute_module

    check_refused("0.weight is sharded \\(DTensor\\).*Measure before", distribute_module(network(), mesh))
    wrapped = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    check_refused("the model is sharded \\(FSDP\\).*full_state_dict", wrapped)
