"""In place on the same Parameters, all or nothing, undone bit for bit, nothing else touched."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from initialized_networks import LOSS, digits, lstm, mlp, normalized, state, text, text_loss, transformer
from torch import nn
from torch.nn.utils import parametrizations

from hessinit.init import initialize, scales
from hessinit.init.initialize import initialize_
from hessinit.measurement.measure import measure
from tiny import raise_from


@pytest.mark.parametrize("rule", ["network", "layers"])
def test_undo_and_dry_run_bit_for_bit(rule: str) -> None:
    model = mlp(4, nn.GELU)
    before = state(model)
    planned = initialize_(model, LOSS, digits(), rule=rule, dry_run=True)
    assert state(model) == before
    assert not planned.applied
    with pytest.raises(ValueError, match="nothing to undo"):
        planned.undo()
    result = initialize_(model, LOSS, digits(), rule=rule)
    assert state(model) != before
    assert result.applied
    assert result.scales == planned.scales
    result.undo()
    assert state(model) == before


def test_an_optimizer_made_before_trains_the_new_weights() -> None:
    model, batch = mlp(3), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = initialize_(model, LOSS, batch, lr=0.1)
    assert result.converged
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = LOSS(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("moment", [1, 2, 6, 11])
def test_whatever_is_raised_the_model_is_as_found(failure: type[BaseException], moment: int) -> None:
    model = mlp(4, nn.Tanh)
    before, count = state(model), raise_from(2 * moment, failure("stopped"))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        count()
        return LOSS(output, target)

    with pytest.raises(failure, match="stopped"):
        initialize_(model, loss, digits(), lr=1.0)
    assert state(model) == before


def test_an_error_while_writing_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = normalized()
    before = state(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("while judging")

    monkeypatch.setattr(initialize, "_judge", fail)
    with pytest.raises(RuntimeError, match="while judging"):
        initialize_(model, LOSS, digits())
    assert state(model) == before


def test_generators_modes_gradients_and_buffers_stay() -> None:
    model = nn.Sequential(*normalized(), nn.Dropout(0.1)).train()
    model[0].eval()
    model[1].weight.grad = torch.ones_like(model[1].weight)
    modes = [module.training for module in model.modules()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    states = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state())  # noqa: NPY002
    initialize_(model, LOSS, digits(), target=2.0)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), repr(numpy.random.get_state()))  # noqa: NPY002
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(*pair) for pair in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(model[1].weight.grad, torch.ones_like(model[1].weight))


def test_the_same_seed_gives_the_same_weights() -> None:
    models = [mlp(3) for _ in range(3)]
    for model, seed in zip(models, (4, 4, 5), strict=True):
        torch.rand(3)
        initialize_(model, LOSS, digits(), seed=seed)
    first, second, third = (model[1].weight.detach() for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_frozen_weights_are_never_touched() -> None:
    model = mlp(4)
    model[3].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    kept = model[3].weight.clone(), model[3].bias.clone()
    result = initialize_(model, LOSS, digits(), target=2.0)
    assert result.converged
    assert torch.equal(kept[0], model[3].weight)
    assert torch.equal(kept[1], model[3].bias)
    assert "3" not in result.scales


def test_biases_become_zero_unless_they_are_kept() -> None:
    model = mlp(3)
    kept = model[1].bias.detach().clone()
    initialize_(model, LOSS, digits(), target=5.0, biases="keep")
    assert torch.equal(model[1].bias, kept)
    initialize_(model, LOSS, digits(), target=5.0, scheme="keep")
    assert torch.equal(model[1].bias, kept)
    initialize_(model, LOSS, digits(), target=5.0, scheme="default")
    assert not model[1].bias.any()


def test_tied_weights_are_scaled_once_and_stay_tied() -> None:
    model = transformer(tied=True)
    result = initialize_(
        model, text_loss, text(), target=8.0, scheme="keep", scaling="last", max_sharpening=2.0
    )
    assert model.head.weight is model.embed.weight
    assert [name for name, scale in result.scales.items() if scale != 1] == ["embed"]
    assert result.converged


def test_scales_are_what_the_weights_were_multiplied_by() -> None:
    model = lstm()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    result = initialize_(model, text_loss, text(), target=0.5, scheme="keep")
    assert result.plan is None
    for name, scale in result.scales.items():
        key = name if name in before else f"{name}.weight"
        torch.testing.assert_close(dict(model.named_parameters())[key].detach(), before[key] * scale)


def test_parametrized_weights_are_written_through_their_parametrization() -> None:
    model = mlp(3)
    parametrizations.weight_norm(model[3])
    parametrizations.spectral_norm(model[5])
    model.eval()
    before = state(model)
    result = initialize_(model, LOSS, digits(), target=1.5)
    assert result.converged, result.reason
    assert any("5: the parametrization removes the scale" in note for note in result.notes)
    assert result.scales["3"] != 1
    assert measure(model, LOSS, digits()).network.norm == pytest.approx(1.5, rel=0.05)
    result.undo()
    assert state(model) == before


def test_weights_that_hold_nothing_yet_are_drawn() -> None:
    model = mlp(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    result = initialize_(model, LOSS, digits(), target=2.0)
    assert result.before is None
    assert result.converged


def test_half_precision_weights_keep_their_type() -> None:
    model = mlp(3).to(torch.bfloat16)
    images, labels = digits()
    result = initialize_(model, LOSS, (images.to(torch.bfloat16), labels), target=2.0)
    assert model[1].weight.dtype == torch.bfloat16
    assert result.converged, result.reason


def test_active_dropout_is_frozen_to_one_draw() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))
    result = initialize_(model, LOSS, digits(), target=2.0)
    assert result.converged
    again = measure(model, LOSS, digits(), dropout="freeze").network.norm
    assert again == pytest.approx(2.0, rel=0.05)


def test_layers_limits_what_is_measured_and_set() -> None:
    model = mlp(4)
    kept = model[1].weight.detach().clone()
    result = initialize_(model, LOSS, digits(), target=1.0, layers=["3", "7"])
    assert torch.equal(model[1].weight, kept)
    assert set(result.scales) == {"3", "7"}
    assert measure(model, LOSS, digits(), layers=["3", "7"]).network.norm == pytest.approx(1.0, rel=0.05)


def test_saved_weights_come_back(tmp_path: Path) -> None:
    model, other = transformer(tied=True), transformer(tied=True)
    result = initialize_(model, text_loss, text(), target=2.0)
    result.save_weights(tmp_path / "w.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    safetensors.torch.load_model(other, tmp_path / "w.safetensors")
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(FileNotFoundError, match="does not exist. Create it first."):
        result.save_weights(tmp_path / "missing" / "w.safetensors")
    with pytest.raises(ValueError, match="is not a file"):
        result.save_weights(tmp_path)
    dry = initialize_(model, text_loss, text(), dry_run=True)
    with pytest.raises(ValueError, match="no weights to save"):
        dry.save_weights(tmp_path / "w.safetensors")


def test_a_broken_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = initialize_(mlp(3), LOSS, digits())
    path = tmp_path / "w.safetensors"
    path.write_text("old")

    def fail(model: nn.Module, filename: str) -> None:
        Path(filename).write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_model", fail)
    with pytest.raises(OSError, match="disk full"):
        result.save_weights(path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_the_cost_is_a_few_measurements_and_many_cheap_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    original = scales.ScaledModel.output

    def count(self: Any) -> Any:
        nonlocal looks
        looks += 1
        return original(self)

    monkeypatch.setattr(scales.ScaledModel, "output", count)
    result = initialize_(mlp(10), LOSS, digits(), lr=0.3)
    # A look is a forward (a third of a gradient), a measurement with ten outputs less than ten gradients.
    assert len(result.measurements) <= 4
    assert looks <= 20
