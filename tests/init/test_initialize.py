"""`initialize_`: the norm meets κ/lr, or the result says why not; in place, all or nothing, never worse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from networks import LOSS, cnn, digits, lstm, mlp, normalized, residual, state, text, text_loss, transformer
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from calls import call, measure
from dense import dense_curvature, ends
from hessinit import Fit, Problem
from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError
from hessinit.init.apply_scheme import apply_scheme_
from hessinit.init.options import KAPPA, SCALING
from hessinit.training.advise import advise
from hessinit.training.initialize import initialize_
from tiny import Net, inputs, labels
from zoo.snapshot import differences, snapshot

sweep = pytest.mark.sweep


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Any]]] = {
    "relu 3": (lambda: mlp(3), LOSS, digits),
    "relu 30": (lambda: mlp(30), LOSS, digits),
    "tanh 10": (lambda: mlp(10, nn.Tanh), LOSS, digits),
    "tanh 30": (lambda: mlp(30, nn.Tanh), LOSS, digits),
    "gelu 10": (lambda: mlp(10, nn.GELU), LOSS, digits),
    "sigmoid 3": (lambda: mlp(3, nn.Sigmoid), LOSS, digits),
    "cnn": (lambda: cnn(6), LOSS, digits),
    "batch norm": (normalized, LOSS, digits),
    "batch norm, eval": (lambda: normalized().eval(), LOSS, digits),
    "residual": (lambda: residual(12), LOSS, digits),
    "residual with layer norm": (lambda: residual(6, norm=True), LOSS, digits),
    "transformer, pre": (lambda: transformer(True), text_loss, text),
    "transformer, post": (lambda: transformer(False), text_loss, text),
    "lstm": (lstm, text_loss, text),
}


def check_norm(model: nn.Module, loss: Any, batch: Any, result: Any, target: float) -> None:
    """Measured again, tightly and in double precision, by the verb that the search does not use."""
    assert result.converged, result.reason
    again = measure(model, loss, batch, dtype=torch.float64, dropout="freeze", seed=9, tolerance=1e-5).network
    assert again.norm == pytest.approx(target, rel=0.051)
    assert result.after.network.norm == pytest.approx(again.norm, rel=6e-3)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scaling", ["all", "last"])
def test_the_network_norm_meets_the_target(name: str, scaling: str) -> None:
    build, loss, data = CASES[name]
    model, batch = build(), data()
    # A last layer's own norm is a floor that it cannot lower.
    target = 4.0 if scaling == "all" or "sigmoid" in name else 30.0 if name == "residual" else 7.0
    result = initialize_(model, loss, batch, target=target, fit=Fit(scaling=scaling))
    check_norm(model, loss, batch, result, target)
    assert len(result.measurements) <= 8


@pytest.mark.parametrize("name", ["relu 3", "relu 30", "cnn", "residual"])
@pytest.mark.parametrize("target", [60.0, pytest.param(6000.0, marks=sweep)])
def test_homogeneous_networks_are_sharpened_with_a_small_output(name: str, target: float) -> None:
    build, loss, data = CASES[name]
    model, batch = build(), data()
    result = initialize_(model, loss, batch, target=target)
    check_norm(model, loss, batch, result, target)
    assert (result.scaling, len(result.measurements) <= 5) == ("small-output", True)
    size = float(model(batch[0]).detach().square().mean().sqrt())
    assert size == pytest.approx(SCALING.small_output, rel=0.01)
    assert sum(scale < 1 for scale in result.scales.values()) == 1  # the largest, or the first on the trunk


def test_what_is_scaled_depends_on_the_network() -> None:
    last = initialize_(mlp(6, nn.Tanh), LOSS, digits(), target=60.0)
    assert (last.scaling, last.converged) == ("last", True)
    assert [name for name, scale in last.scales.items() if scale != 1] == ["11"]
    gain = initialize_(mlp(6), LOSS, digits(), target=0.4)  # too sharp: one gain
    assert (gain.scaling, gain.converged) == ("all", True)
    (scale,) = set(gain.scales.values())
    assert scale < 1
    behind = initialize_(normalized(), LOSS, digits(), target=2.0)  # before a norm, scales are kept
    assert [scale == 1 for scale in behind.scales.values()] == [True, True, True, False]
    found = [initialize_(mlp(10), LOSS, digits(), target=4 / rate).scales for rate in (0.1, 1.0, 10.0)]
    factors = [max(one.values()) for one in found]
    assert factors[0] > factors[1] > factors[2]  # flatter for larger rates


def test_both_of_two_heads_are_scaled() -> None:
    torch.manual_seed(0)
    parts = {"body": nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh())}
    parts |= {"first": nn.Linear(32, 4), "second": nn.Linear(32, 6)}
    model = Net(lambda net, x: torch.cat([net.first(state := net.body(x)), net.second(state)], 1), **parts)
    result = initialize_(model, LOSS, digits(), target=9.0, fit=Fit(scaling="last"))
    assert [name for name, scale in result.scales.items() if scale != 1] == ["first", "second"]


def test_by_a_rate_networks_without_scale_free_weights_or_of_tokens_are_not_sharpened() -> None:
    normalized = transformer(False), KAPPA.normalized, "normalized"
    for model, kappa, why in (normalized, (lstm(), KAPPA.plain, "tokens")):
        result = initialize_(model, text_loss, text(), lr=1e-3)  # without a warning: nothing is wrong with it
        assert (result.scaling, result.kappa, result.converged) == ("none", kappa, False)
        assert why in result.reason
        assert set(result.scales.values()) == {1.0}
    with pytest.warns(ConvergenceWarning, match="undo much of a gain"):  # nor is the gain driven to nothing
        result = initialize_(transformer(False), text_loss, text(), lr=1.0)
    assert {round(scale, 6) for scale in result.scales.values()} == {0.5}


def test_a_quadratic_loss_has_a_kappa_of_its_own_and_is_not_sharpened() -> None:
    data = digits()[0], digits()[1].float().unsqueeze(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))
    flat = initialize_(model, nn.MSELoss(), data, lr=1e-5)
    assert (flat.kappa, flat.scaling) == (KAPPA.quadratic, "none")
    assert "quadratic" in flat.reason
    own = initialize_(model, nn.MSELoss(), data, lr="auto")
    assert own.lr * own.after.network.norm == pytest.approx(1.0, rel=0.05)


def test_rates_of_every_kind() -> None:
    plain = initialize_(mlp(4, nn.Tanh), LOSS, digits(), lr="auto")  # suits the weights as they are
    assert plain.lr == pytest.approx(KAPPA.plain / plain.after.network.norm, rel=0.05)
    assert set(plain.scales.values()) == {1.0}
    sharpened = initialize_(mlp(4), LOSS, digits(), lr="auto")
    assert sharpened.lr == pytest.approx(1 / sharpened.measurements[0].norm, rel=1e-6)
    assert sharpened.after.network.norm * sharpened.lr == pytest.approx(KAPPA.plain, rel=0.05)
    heavy = initialize_(mlp(4), LOSS, digits(), lr=0.1, optimizer="momentum", fit=Fit(momentum=0.8))
    assert heavy.target == pytest.approx(KAPPA.plain * 0.2 / 0.1)
    adam = initialize_(mlp(4), LOSS, digits(), lr=1e-3, optimizer="adam")
    assert (adam.converged, adam.scaling, adam.lr) == (True, "none", 1e-3)
    assert set(adam.scales.values()) == {1.0}
    assert "do not grow with the gradient" in adam.reason
    model = mlp(4)
    own = initialize_(model, LOSS, digits(), lr="auto", optimizer="adamw")
    advised = advise(model, LOSS, digits(), optimizer="adamw", trial_steps=0)
    assert own.lr == pytest.approx(advised.learning_rate, rel=0.01)
    neither = initialize_(mlp(3), LOSS, digits())
    assert (neither.target, neither.lr, neither.kappa) == (1.0, None, None)
    assert neither.after.network.norm == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_the_norm_is_right_against_a_dense_matrix(curvature: str) -> None:
    model, batch = mlp(3, nn.Tanh, width=6).double(), digits(12)
    batch = (batch[0].double(), batch[1])
    result = initialize_(model, LOSS, batch, lr=2.0, fit=Fit(curvature=curvature))
    truth = ends(dense_curvature(model, LOSS, batch, curvature).network).norm
    assert (result.target, result.kappa) == (KAPPA.plain / 2.0, KAPPA.plain)
    assert truth == pytest.approx(result.target, rel=0.05)


def multiply_(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def test_weights_that_overflow_or_saturate_are_brought_back() -> None:
    model = multiply_(residual(30), 25)  # not finite is too sharp, never flat
    assert not torch.isfinite(model(digits()[0])).all()
    result = initialize_(model, LOSS, digits(), lr=0.01, fit=Fit(scheme="keep", biases="zero"))
    assert result.before is None
    assert "not finite" in " ".join(result.notes)
    assert result.converged, result.reason
    assert all(scale < 0.1 for scale in result.scales.values())
    model = multiply_(residual(30), 25)
    with pytest.warns(ConvergenceWarning, match="old weights survive at no rate; these survive at lr = 0"):
        result = initialize_(model, LOSS, digits(), lr=1.0, fit=Fit(scheme="keep", biases="zero"))
    assert 0.001 < result.lr < 1
    model = mlp(4)  # from beyond the top of λ the way leads down to the smallest root, not up into saturation
    initialize_(model, LOSS, digits(), target=3.0)
    multiply_(model, 8)
    result = initialize_(model, LOSS, digits(), target=3.0, fit=Fit(scheme="keep", scaling="all"))
    assert result.converged, result.reason
    assert list(result.scales.values()) == pytest.approx([1 / 8] * 4, rel=0.02)


def test_a_target_beyond_saturation_is_capped_and_said() -> None:
    model = mlp(3, nn.Tanh)
    before = state(model)
    with pytest.raises(ConvergenceError, match="saturate"):
        initialize_(model, LOSS, digits(), lr=1e-4, fit=Fit(scaling="last", strict=True))
    assert state(model) == before
    result = initialize_(mlp(3, nn.Tanh), LOSS, digits(), lr=1e-4, fit=Fit(strict=True))
    assert result.scaling == "small-output"
    with pytest.warns(ConvergenceWarning, match="saturate|rises no further"):
        result = initialize_(model, LOSS, digits(), lr=1e-4, fit=Fit(scaling="last"))
    assert not result.converged
    assert result.after.loss < 4.01 * math.log(10)  # four times the loss of a zero output
    assert result.after.network.norm > result.measurements[0].norm  # as far as it went
    free = initialize_(mlp(3, nn.Tanh), LOSS, digits(), target=1e6, fit=Fit(max_sharpening=math.inf))
    with pytest.warns(ConvergenceWarning, match="1.2× the loss of a zero output"):
        tight = initialize_(mlp(3, nn.Tanh), LOSS, digits(), target=1e6, fit=Fit(max_sharpening=1.2))
    assert tight.after.loss <= 1.21 * math.log(10) < free.after.loss


def test_a_dead_network_and_one_that_falls_no_further_are_said() -> None:
    for rule in ("network", "layers"):
        model = mlp(3)
        nn.init.constant_(model[3].bias, -1e4)
        before = state(model)
        with pytest.warns(ConvergenceWarning, match="no curvature .*units are dead or numbers underflow"):
            initialize_(model, LOSS, digits(), fit=Fit(scheme="keep", rule=rule))
        assert state(model) == before
    model, data = mlp(6), digits()  # below its own norm, the last layer's scale cannot get
    apply_scheme_(model, "lsuv", sample=data[0])
    with pytest.warns(ConvergenceWarning, match="falls no further"):
        result = initialize_(model, LOSS, data, target=1e-3, fit=Fit(scaling="last", scheme="keep"))
    assert {name for name, scale in result.scales.items() if scale != 1} == {"11"}


def test_several_batches_count_together() -> None:
    (images, targets), model = digits(), mlp(3)
    batches = [(images[:40], targets[:40]), (images[40:], targets[40:])]
    result = initialize_(model, LOSS, iter(batches), target=3.0)
    check_norm(model, LOSS, (images, targets), result, 3.0)


SCHEMES = ["he", "glorot", "lecun", "orthogonal", "lsuv", "forward", "backward", "compromise"]
LAYER_CASES: list[Any] = list(itertools.product((mlp, cnn), (3, 10), (0.1, 1.0), SCHEMES))
LAYER_CASES += [(mlp, 30, 1.0, "he"), (mlp, 30, 10.0, "lsuv"), (cnn, 30, 1.0, "lecun")]
LAYER_CASES = [one if at % 8 == 0 else pytest.param(*one, marks=sweep) for at, one in enumerate(LAYER_CASES)]


@pytest.mark.parametrize(("build", "depth", "target", "scheme"), LAYER_CASES)
def test_every_layer_meets_the_target(build: Any, depth: int, target: float, scheme: str) -> None:
    model, batch = build(depth), digits(48)
    result = initialize_(model, LOSS, batch, target=target, fit=Fit(rule="layers", scheme=scheme))
    assert result.converged, result.reason
    assert len(result.measurements) <= 6
    again = measure(model, LOSS, batch, dtype=torch.float64, seed=5, tolerance=1e-4, network=False)
    assert len(again) == len(result.scales)
    for layer in again:
        assert layer.norm == pytest.approx(target, rel=0.05)


@pytest.mark.parametrize("build", [lambda: mlp(3, nn.Sigmoid), lambda: mlp(10, nn.Tanh)])
def test_what_saturates_is_left_no_worse_than_found(build: Callable[[], nn.Module]) -> None:
    model, batch, worst = build(), digits(), []
    for _ in range(2):
        worst.append(max(abs(math.log(row.norm / 20.0)) for row in measure(model, LOSS, batch)))
        with pytest.warns(ConvergenceWarning, match=r"layers are not within 5 % of 20, the farthest"):
            initialize_(model, LOSS, batch, target=20.0, fit=Fit(rule="layers", max_measurements=5))
    assert worst[1] <= worst[0] * 1.01


def test_weights_that_were_closer_are_put_back() -> None:
    model, batch = mlp(3, nn.Sigmoid), digits()
    initialize_(model, LOSS, batch, target=5.0, fit=Fit(scheme="lsuv"))
    kept = state(model)
    options = {"target": measure(model, LOSS, batch)["3"].norm * 0.9, "scheme": "glorot"}
    with pytest.warns(ConvergenceWarning, match="farther from the target, so the old weights"):
        result = call(initialize_, model, LOSS, batch, rule="layers", max_measurements=1, **options)
    assert state(model) == kept
    assert result.after == result.before


def test_weights_before_a_norm_move_the_other_way() -> None:
    """λ(c·W) = λ(W)/c² before a normalization; the last layer's norm depends on no scale at all."""
    model, batch = normalized(), digits()
    with pytest.warns(ConvergenceWarning, match="1 of 4 layers are not within"):
        result = initialize_(model, LOSS, batch, target=0.3, fit=Fit(rule="layers"))
    assert [row.norm for row in result.after][:3] == pytest.approx([0.3] * 3, rel=0.05)


@pytest.mark.parametrize("rule", ["network", "layers"])
def test_undo_and_dry_run_bit_for_bit(rule: str) -> None:
    model = mlp(4, nn.GELU)
    before = state(model)
    planned = initialize_(model, LOSS, digits(), dry_run=True, fit=Fit(rule=rule))
    assert state(model) == before
    with pytest.raises(ValueError, match="nothing to undo"):
        planned.undo()
    result = initialize_(model, LOSS, digits(), fit=Fit(rule=rule))
    assert state(model) != before
    assert (planned.applied, result.applied, result.scales) == (False, True, planned.scales)
    result.undo()
    assert state(model) == before


def test_generators_modes_gradients_and_buffers_stay_and_seeds_decide() -> None:
    model = nn.Sequential(*normalized(), nn.Dropout(0.1)).train()
    model[0].eval()
    model[1].weight.grad = torch.ones_like(model[1].weight)
    before = snapshot(model, LOSS, digits())
    initialize_(model, LOSS, digits(), target=2.0)
    drawn = {f"state of {at}.{part}" for at in (1, 4, 7, 10) for part in ("weight", "bias")}
    assert set(differences(before, snapshot(model, LOSS, digits()))) == drawn
    models = [mlp(3) for _ in range(3)]
    for one, seed in zip(models, (4, 4, 5), strict=True):
        torch.rand(3)
        initialize_(Problem(one, LOSS, digits(), seed=seed))
    first, second, third = (one[1].weight.detach() for one in models)
    assert (torch.equal(first, second), torch.equal(first, third)) == (True, False)


def test_frozen_weights_biases_and_layers_left_out_stay() -> None:
    model = mlp(4)
    model[3].requires_grad_(False)
    kept = state(model[3])
    result = initialize_(model, LOSS, digits(), target=2.0, fit=Fit(overwrite=True))
    assert result.converged
    assert state(model[3]) == kept
    assert "3" not in result.scales
    model = mlp(3)
    kept = state(model)["1.bias"]
    for options in ({"biases": "keep"}, {"scheme": "keep"}):
        call(initialize_, model, LOSS, digits(), target=5.0, **options)
        assert state(model)["1.bias"] == kept
    initialize_(model, LOSS, digits(), target=5.0, fit=Fit(scheme="he"))
    assert not model[1].bias.any()
    model = mlp(4)
    kept = state(model[1])
    result = initialize_(Problem(model, LOSS, digits(), layers=["3", "7"]), target=1.0)
    assert state(model[1]) == kept
    assert set(result.scales) == {"3", "7"}
    assert measure(model, LOSS, digits(), layers=["3", "7"]).network.norm == pytest.approx(1.0, rel=0.05)


def adapted() -> Net:
    """As with LoRA: a frozen layer and a product of two thin matrices, the second one zero."""
    parts = {"layer": nn.Linear(16, 16).requires_grad_(False)}
    parts |= {"down": nn.Linear(16, 2, bias=False), "up": nn.Linear(2, 16, bias=False)}
    nn.init.zeros_(parts["up"].weight)
    return Net(lambda net, x: torch.relu(net.layer(x) + net.up(net.down(x))), **parts)


def trained_before(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "embedding":
        words = nn.Embedding(7, 4).requires_grad_(False)
        return nn.Sequential(words, nn.Flatten(), nn.Linear(12, 3)), torch.arange(24).view(8, 3) % 7
    if kind == "convolution":
        first = nn.Conv1d(1, 2, 3).requires_grad_(False)
        return nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(28, 3)), inputs(8, 1, 16)
    if kind == "parametrized":
        first = parametrizations.weight_norm(nn.Linear(16, 4)).requires_grad_(False)
        return nn.Sequential(first, nn.ReLU(), nn.Linear(4, 3)), inputs(8, 16)
    return nn.Sequential(adapted(), nn.Linear(16, 3)), inputs(8, 16)


@pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")
@pytest.mark.parametrize("kind", ["embedding", "convolution", "parametrized", "lora"])
def test_what_was_trained_before_is_drawn_anew_only_where_that_is_asked_for(kind: str) -> None:
    model, data = trained_before(kind)
    named = "0.layer" if kind == "lora" else "0"
    before, batch, last = state(model), (data, labels(8)), model[-1]
    asked = {"lr": 0.1}, {"lr": "auto"}, {"target": 1.0, "scheme": "keep"}, {"lr": 0.1, "dry_run": True}
    for options in asked:
        with pytest.raises(ProblemError, match=rf"has frozen weights \({named}.* pass overwrite=True"):
            call(initialize_, model, LOSS, batch, **options)
    assert state(model) == before
    frozen = {name: one.clone() for name, one in model.named_parameters() if not one.requires_grad}
    old = last.weight.detach().clone()
    initialize_(model, LOSS, batch, target=1.0, fit=Fit(overwrite=True))
    assert not torch.equal(last.weight, old)
    assert all(torch.equal(model.get_parameter(name), one) for name, one in frozen.items())


@pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")
def test_zeros_beside_trained_weights_stay_zero_unless_they_are_named() -> None:
    model, data = trained_before("lora")
    lora, batch = model[0], (data, labels(8))
    old = lora.down.weight.detach().clone()
    fresh = {"data": [batch] * 3, "trial_steps": 3}
    for options in ({"lr": 0.1}, {"lr": 0.1, **fresh}, {"lr": 1e-3, "optimizer": "adam"}):
        call(initialize_, model, LOSS, batch, overwrite=True, **options)
        assert not lora.up.weight.any()
    assert not torch.equal(lora.down.weight, old)
    plan = apply_scheme_(model, "he", sample=data)
    assert {one.name: one.unchanged for one in plan}["0.up"] == "zero beside trained weights"
    assert not lora.up.weight.any()
    initialize_(Problem(model, LOSS, batch, layers=["0.down", "1"]), lr=0.1)
    assert not lora.up.weight.any()
    initialize_(Problem(model, LOSS, batch, layers="0.up"), lr=0.1)
    assert lora.up.weight.any()
    scratch = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.zeros_(scratch[2].weight)
    initialize_(scratch, LOSS, batch, target=1.0)
    assert scratch[2].weight.any()


def test_scales_are_what_the_weights_were_multiplied_by_and_tied_weights_once() -> None:
    model = lstm()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    result = initialize_(model, text_loss, text(), target=0.5, fit=Fit(scheme="keep"))
    assert result.plan is None
    for name, scale in result.scales.items():
        key = name if name in before else f"{name}.weight"
        torch.testing.assert_close(dict(model.named_parameters())[key].detach(), before[key] * scale)
    tied = transformer(tied=True)
    options = {"target": 8.0, "scheme": "keep", "scaling": "last", "max_sharpening": 2.0}
    result = call(initialize_, tied, text_loss, text(), **options)
    assert tied.head.weight is tied.embed.weight
    assert [name for name, scale in result.scales.items() if scale != 1] == ["embed"]
    assert result.converged


def test_parametrized_weights_are_written_through_their_parametrization() -> None:
    model = mlp(3)
    parametrizations.weight_norm(model[3])
    parametrizations.spectral_norm(model[5])
    model.eval()
    before = state(model)
    result = initialize_(model, LOSS, digits(), target=1.5)
    check_norm(model, LOSS, digits(), result, 1.5)
    assert any("5: the parametrization removes the scale" in note for note in result.notes)
    assert result.scales["3"] != 1
    result.undo()
    assert state(model) == before


def test_empty_weights_half_precision_and_active_dropout() -> None:
    result = initialize_(multiply_(mlp(3), math.nan), LOSS, digits(), target=2.0)
    assert (result.before, result.converged) == (None, True)
    images, targets = digits()
    model = mlp(3).to(torch.bfloat16)
    result = initialize_(model, LOSS, (images.to(torch.bfloat16), targets), target=2.0)
    assert model[1].weight.dtype == torch.bfloat16
    assert result.converged, result.reason
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))
    assert initialize_(model, LOSS, digits(), target=2.0).converged
    assert measure(model, LOSS, digits(), dropout="freeze").network.norm == pytest.approx(2.0, rel=0.05)
    with pytest.raises(ProblemError, match="active .train mode."):
        initialize_(Problem(model, LOSS, digits(), dropout="refuse"))


def test_saved_weights_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, path = transformer(tied=True), transformer(tied=True), tmp_path / "w.safetensors"
    result = initialize_(model, text_loss, text(), target=2.0)
    result.save_weights(path)
    assert list(tmp_path.iterdir()) == [path]
    safetensors.torch.load_model(other, path)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(FileNotFoundError, match="does not exist. Create it first."):
        result.save_weights(tmp_path / "missing" / "w.safetensors")
    with pytest.raises(ValueError, match="no weights to save"):
        initialize_(model, text_loss, text(), dry_run=True).save_weights(path)

    def fail(model: nn.Module, filename: str) -> None:
        Path(filename).write_text("half")
        raise OSError("disk full")

    path.write_text("old")
    monkeypatch.setattr(safetensors.torch, "save_model", fail)
    with pytest.raises(OSError, match="disk full"):
        result.save_weights(path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def gated() -> Net:
    torch.manual_seed(0)
    parts = {"first": nn.Linear(6, 16), "gate": nn.Parameter(torch.tensor(1e-4)), "head": nn.Linear(16, 3)}
    return Net(lambda net, x: net.head(net.gate * torch.relu(net.first(x))), **parts)


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
@pytest.mark.parametrize("rule", ["network", "layers"])
def test_weights_that_would_be_worse_are_not_kept(rule: str) -> None:
    """LSUV makes up for a small factor before a weight, as a LayerScale is."""
    model = gated()
    before = state(model)
    result = initialize_(model, LOSS, (inputs(8, 6), labels(8)), lr=0.1, fit=Fit(rule=rule))
    assert "the old weights were put back" in result.reason
    assert state(model) == before
    assert (result.after, result.converged, set(result.scales.values())) == (result.before, False, {1.0})


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
@pytest.mark.parametrize("seed", [at if at < 3 else pytest.param(at, marks=sweep) for at in range(12)])
def test_a_result_is_never_twice_as_far_from_the_target_as_what_was_found(seed: int) -> None:
    torch.manual_seed(seed)
    depth, width = 2 + seed % 4, (8, 16, 32)[seed % 3]
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), *layers, nn.Linear(width, 3))
    problem = Problem(model, LOSS, (inputs(16, 6), labels(16)), seed=seed)
    result = initialize_(problem, lr=10.0 ** (seed % 5 - 3))
    before, after = (abs(math.log(one.network.norm / result.target)) for one in (result.before, result.after))
    assert result.converged or result.scaling == "none" or after <= 2 * before


@pytest.mark.parametrize("constant", [0.0, 1000.0, -1000.0])
def test_a_loss_that_explodes_puts_the_weights_back(constant: float) -> None:
    """A quadratic loss does not saturate: any norm can be reached, at any loss."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, targets) + constant

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    data, before = (inputs(8, 6), torch.zeros(8, 3)), state(model)
    options = {"target": 1e4, "scaling": "all"}
    with pytest.warns(ConvergenceWarning, match="the loss would be .* the old weights were put back"):
        call(initialize_, model, loss, data, **options)
    assert state(model) == before
    assert call(initialize_, model, loss, data, **options, max_sharpening=math.inf).converged


@pytest.mark.parametrize("scheme", ["auto", "orthogonal", "keep"])
def test_a_forward_that_differentiates_by_its_inputs_is_initialized(scheme: str) -> None:
    def physical(net: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        u = net.inner(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + slope.sum(1, keepdim=True)

    torch.manual_seed(0)
    model = Net(physical, inner=nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
    data = inputs(8, 2), torch.zeros(8, 1)
    result = initialize_(model, nn.MSELoss(), data, target=12.0, fit=Fit(scheme=scheme))
    check_norm(model, nn.MSELoss(), data, result, 12.0)
    assert not data[0].requires_grad


def test_a_forward_that_differentiates_by_its_weights_is_told_the_way_out_and_it_leads_out() -> None:
    def meta(net: Any, x: Tensor) -> Tensor:
        (step,) = torch.autograd.grad(net.first(x).square().mean(), net.first.weight, create_graph=True)
        return net.last(F.linear(x, net.first.weight - step).tanh())

    torch.manual_seed(0)
    model, data = Net(meta, first=nn.Linear(4, 5), last=nn.Linear(5, 3)), (inputs(8, 4), labels(8))
    for scheme in ("auto", "he"):
        with pytest.raises(ProblemError, match="differentiates by its own weights.*scheme=.keep"):
            initialize_(model, LOSS, data, lr=0.1, fit=Fit(scheme=scheme))
    assert initialize_(model, LOSS, data, target=0.3, fit=Fit(scheme="keep")).converged


BAD: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0.1, "target": 2.0}, r"lr=0.1 and target=2.0 both set the norm .* pass one of them"),
    ({"rule": "layer"}, "rule='layer' is unknown; .* Did you mean 'layers'"),
    ({"scheme": "kaiming"}, "scheme='kaiming' is unknown; .* Did you mean 'he'"),
    ({"scaling": "last", "rule": "layers"}, "scaling='last' has no meaning for rule='layers'"),
    ({"rule": "layers", "lr": 0.1, "optimizer": "adam"}, "rule='layers' with optimizer='adam'.*pass target="),
    ({"layers": "1.bias"}, "no weight of two or more dimensions can be set"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = mlp(3)
    before = state(model)
    with pytest.raises(ProblemError, match=message):
        call(initialize_, model, LOSS, digits(), **options)
    assert state(model) == before


def test_models_and_losses_that_cannot_be_initialized_are_refused() -> None:
    with pytest.raises(ProblemError, match="no weight of two or more dimensions can be set .*frozen"):
        initialize_(mlp(3).requires_grad_(False), LOSS, digits())
    linear = nn.Sequential(*mlp(3), nn.LogSoftmax(1))
    broken = Net(lambda net, x: net.inner(x) + torch.log(torch.zeros(())), inner=mlp(3))
    refused = (linear, nn.NLLLoss(), "move log_softmax into the loss"), (broken, LOSS, "NaN or inf")
    for model, loss, message in refused:
        before = state(model)
        with pytest.raises(ProblemError, match=message):
            initialize_(model, loss, digits())
        assert state(model) == before
