"""A test that fails when a start is unsound: what it says, and what it lets pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from adamw_truth import dense_adamw_limit
from hessinit import ConvergenceWarning, ProblemError, advise, assert_sound, initialize_, measure

ROOT = Path(__file__).parents[2]
SQUARES = nn.MSELoss()
FIT = "fit the weights: hessinit.initialize_(model, loss, batch, lr="


def quadratic(size: float = 1.0) -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """One weight of two numbers with H = size·I, in closed form: 2/2·XᵀX for X = √size·I."""
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(2, 1, bias=False, dtype=torch.float64))
    nn.init.ones_(model.fc.weight)
    inputs = size**0.5 * torch.eye(2, dtype=torch.float64)
    return model, SQUARES, (inputs, torch.zeros(2, 1, dtype=torch.float64))


def message(*arguments: object, **options: object) -> str:
    with pytest.raises(AssertionError) as failure:
        assert_sound(*arguments, **options)
    return re.sub(r"(?<=in )\S+(?= s )", "#", str(failure.value))


def paragraphs(*arguments: object, **options: object) -> list[str]:
    """What is said before the table, one paragraph unfolded, one way out."""
    said, _, _ = message(*arguments, **options).partition("\n\n")
    failed, _, way_out = said.partition("\nWay out")
    return [failed.replace("\n", " "), "Way out" + way_out.replace("\n", " ")]


def test_a_sound_network_gets_its_report_and_stays_as_it_was() -> None:
    model, loss, batch = quadratic()
    before = model.fc.weight.detach().clone()
    report = assert_sound(model, loss, batch, lr=0.5, seed=3)
    assert report.network.norm == pytest.approx(1.0, rel=1e-9)
    assert report.seed == 3
    assert {**report.to_dict(), "seconds": 0} == {
        **measure(model, loss, batch, seed=3).to_dict(),
        "seconds": 0,
    }
    assert torch.equal(model.fc.weight, before)
    assert model.fc.weight.grad is None


def test_a_vanishing_layer_is_named_with_its_norm_the_rule_the_way_out_and_the_table() -> None:
    text = message(*quadratic(1e-4))
    assert text.startswith(
        """\
not sound: fc vanishes (‖H‖ = 0.0001 is below smallest=0.001) and hardly changes the loss.
Way out: fit the weights: hessinit.initialize_(model, loss, batch, lr=…).

 layer     weight      ‖H‖   verdict
───────────────────────────────────────
 fc        (1, 2)   0.0001   vanishing
"""
    )


def test_an_exploding_layer_is_named_and_the_network_with_it() -> None:
    assert paragraphs(*quadratic(4e3)) == [
        "not sound: fc and the network explode: ‖H‖ = 4000 is above largest=1000.",
        "Way out: fit the weights: hessinit.initialize_(model, loss, batch, lr=…).",
    ]
    assert assert_sound(*quadratic(4e3), largest=5000.0).network.norm == pytest.approx(4000)


def test_a_rate_is_judged_by_the_stable_one_of_the_optimizer() -> None:
    # H = I: plain descent is stable up to 2, momentum 0.9 up to 3.8 (closed forms).
    failed, way_out = paragraphs(*quadratic(), lr=6.0)
    allowed = "at most times_stable=2.5 times it is allowed."
    assert failed == f"not sound: lr=6 is 3 times the stable learning rate of SGD, 2; {allowed}"
    assert way_out == f"Way out: lower lr to 5 or less, or {FIT}6)."
    assert assert_sound(*quadratic(), lr=4.9)
    assert assert_sound(*quadratic(), lr=6.0, optimizer="momentum")
    failed, way_out = paragraphs(*quadratic(), lr=10.0, optimizer="momentum")
    assert failed.startswith(
        "not sound: lr=10 is 2.6 times the stable learning rate of SGD(momentum=0.9), 3.8;"
    )
    assert way_out == (
        "Way out: lower lr to 9.5 or less, or fit the weights: hessinit.initialize_(model, loss, batch, "
        "lr=10, optimizer='momentum')."
    )


def test_times_stable_of_one_insists_on_the_stable_rate_and_an_optimizer_of_torch_is_read() -> None:
    model, loss, batch = quadratic()
    assert assert_sound(model, loss, batch, lr=1.99, times_stable=1)
    failed, way_out = paragraphs(model, loss, batch, lr=2.01, times_stable=1)
    assert failed == (
        "not sound: lr=2.01 is just above 1 times the stable learning rate of SGD, 2; at most times_stable=1 "
        "times it is allowed."
    )
    assert re.search(r"lower lr to (1.9|2) or less", way_out)
    heavy = torch.optim.SGD(model.parameters(), lr=10.0, momentum=0.9)
    failed, way_out = paragraphs(model, loss, batch, optimizer=heavy)
    assert failed.startswith(
        "not sound: lr=10 is 2.6 times the stable learning rate of SGD(momentum=0.9), 3.8;"
    )
    assert "lr=10, optimizer='momentum', momentum=0.9)" in way_out
    assert assert_sound(model, loss, batch, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("as_word", [True, False])
def test_an_adaptive_rate_is_judged_by_advise_and_no_new_weights_are_offered(as_word: bool) -> None:
    model, loss, batch = quadratic()
    stable = advise(model, loss, batch, optimizer="adam").stable_learning_rate
    optimizer = "adam" if as_word else torch.optim.Adam(model.parameters(), lr=3 * stable)
    rate = {"lr": 3 * stable} if as_word else {}
    failed, way_out = paragraphs(model, loss, iter([batch]), optimizer=optimizer, **rate)
    assert "is 3 times the stable learning rate of Adam" in failed
    assert re.fullmatch(r"Way out: lower lr to \S+ or less\.", way_out)
    assert assert_sound(model, loss, batch, optimizer="adam", lr=0.9 * stable)


def test_with_a_rate_a_layer_may_be_as_sharp_as_the_rate_allows() -> None:
    assert assert_sound(*quadratic(4e3), lr=4e-4).network.norm == pytest.approx(4000)
    failed, _ = paragraphs(*quadratic(4e3), lr=4e-4, largest=1000.0)
    assert failed == "not sound: fc and the network explode: ‖H‖ = 4000 is above largest=1000."


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("rate", [0.001, 0.1])
def test_the_way_out_leads_out(activation: type[nn.Module], rate: float) -> None:
    sizes = [(16, 32), (32, 32), (32, 32), (32, 32), (32, 32)]
    hidden = [part for size in sizes for part in (nn.Linear(*size), activation())]
    model, loss = nn.Sequential(*hidden, nn.Linear(32, 10)), nn.CrossEntropyLoss()
    batch = (torch.rand(64, 16), torch.arange(64) % 10)
    with torch.no_grad():
        model[0].weight.mul_(100)
        model[-1].weight.mul_(1e-4)
    with pytest.raises(AssertionError, match=re.escape(f"lr={rate:g})")):
        assert_sound(model, loss, batch, lr=rate)
    # The result says so where a rate is so small that its target is out of reach.
    initialize_(model, loss, batch, lr=rate, max_sharpening=1e9)
    assert assert_sound(model, loss, batch, lr=rate)


def test_weights_that_are_not_finite_are_a_failure() -> None:
    model, loss, batch = quadratic()
    with torch.no_grad():
        model.fc.weight[0, 1] = torch.nan
    assert (
        message(model, loss, batch, lr=0.1)
        == """\
not sound: fc.weight holds NaN or inf (it is the first parameter that does); initialize it again
before measuring.
Way out: draw new weights: hessinit.initialize_(model, loss, batch, lr=0.1).

There is no table: nothing can be measured."""
    )


def test_an_output_or_a_loss_that_is_not_finite_is_a_failure() -> None:
    model, _, batch = quadratic()
    failed, _ = paragraphs(model, lambda out, target: (out - target).pow(2).mean() / 0, batch)
    assert failed.startswith("not sound: the loss is inf though the model's output is finite")
    with torch.no_grad():
        model.fc.weight.fill_(1e308)
    failed, _ = paragraphs(model, SQUARES, (100 * batch[0], batch[1]))
    assert failed.startswith("not sound: the model's output holds NaN or inf (fc is the first layer whose")


def test_curvature_that_is_not_finite_is_a_failure_whatever_the_limit() -> None:
    model, _, batch = quadratic()
    nn.init.zeros_(model.fc.weight)

    def steep(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 1e300 * (1e5 * (output - target)).pow(2).mean()

    for options in ({}, {"lr": 1e-300}, {"largest": 1e308}):
        failed, _ = paragraphs(model, steep, batch, **options)
        assert re.search(r"fc and the network explode: ‖H‖ = ~(inf|nan) is ", failed), failed
        assert "tolerance" not in failed


def test_a_norm_that_did_not_converge_does_not_pass() -> None:
    model = nn.Linear(12, 4, bias=False)
    problem = (model, nn.CrossEntropyLoss(), (torch.randn(32, 12), torch.arange(32) % 4))
    unfinished = {"max_iterations": 1, "estimator": "lanczos"}
    with pytest.warns(ConvergenceWarning):
        assert not measure(*problem, **unfinished).converged
    failed, way_out = paragraphs(*problem, **unfinished)
    assert failed.startswith("not sound: weight and the network did not reach tolerance=0.001 (stopped")
    assert way_out == "Way out: raise max_iterations= or tolerance=."


def test_layers_and_the_other_options_of_measure_pass_through() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.mul_(1e-6)
    batch = (torch.randn(8, 4), torch.arange(8) % 2)
    failed, _ = paragraphs(model, nn.CrossEntropyLoss(), batch)
    assert failed.startswith("not sound: layer 0 vanishes")
    report = assert_sound(model, nn.CrossEntropyLoss(), batch, layers="1", curvature="hessian", network=False)
    assert (report.names, report.curvature) == (("1",), "hessian")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0}, "lr=0 must be a finite number above 0"),
        ({"lr": "fast"}, "lr='fast' must be a finite number above 0"),
        ({"smallest": -1}, "smallest=-1 must be a finite number, 0 or more"),
        ({"smallest": "x"}, "smallest='x' must be a finite number, 0 or more"),
        ({"smallest": 2.0, "largest": 1.0}, r"largest=1.0 must be a number above smallest=2.0"),
        ({"largest": "x"}, "largest='x' must be a number above smallest=0.001"),
        ({"largest": float("nan")}, "largest=nan must be a number above"),
        ({"times_stable": 0}, "times_stable=0 must be a finite number above 0, such as 1"),
        ({"optimizer": "adm"}, "optimizer='adm' is unknown; .* Did you mean 'adam'"),
        ({"optimizer": torch.optim.SGD}, "optimizer is a type; it must be a torch.optim"),
        ({"lr": 0.1, "network": False}, "network=False and a learning rate do not go together"),
        ({"curvature": "hessain"}, "curvature='hessain' is unknown"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(options: dict[str, object], words: str) -> None:
    class Untouchable(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("called")

    with pytest.raises(ProblemError, match=words):
        assert_sound(Untouchable(2, 1), SQUARES, (torch.eye(2), torch.zeros(2, 1)), **options)


def test_data_that_cannot_be_measured_stay_an_error_not_a_failure() -> None:
    model, loss, (inputs, targets) = quadratic()
    with pytest.raises(ProblemError, match="the inputs hold 4 NaN or inf"):
        assert_sound(model, loss, (inputs * torch.nan, targets))
    with pytest.raises(ProblemError, match="the targets hold 2 NaN or inf; clean them"):
        assert_sound(model, loss, (inputs, targets * torch.nan))


def classifier(*layers: nn.Module) -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(*layers), nn.CrossEntropyLoss(), (torch.randn(32, 5), torch.arange(32) % 3)


def test_a_saturated_start_is_a_failure() -> None:
    model, loss, batch = classifier(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        model[2].weight.mul_(1e6)
    failed, way_out = paragraphs(model, loss, batch)
    assert failed.startswith("not sound: the loss is saturated: it bends at smaller outputs of the model")
    assert way_out.startswith("Way out: draw new weights: hessinit.initialize_(")


@pytest.mark.parametrize(
    ("name", "value", "sound"),
    [
        ("running_mean", torch.nan, False),
        ("running_var", torch.inf, False),
        ("mask", -torch.inf, True),
        ("mask", torch.nan, False),
    ],
)
def test_buffers_must_be_finite_but_for_masks(name: str, value: float, sound: bool) -> None:
    model, loss, batch = classifier(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    model[1].register_buffer("mask", torch.zeros(16))  # in train mode the statistics are not used, either
    getattr(model[1], name)[3] = value
    before = model[1].running_var.clone()
    if sound:
        assert assert_sound(model, loss, batch)
    else:
        text = message(model, loss, batch)
        assert text.startswith(f"not sound: the buffer 1.{name} holds NaN or inf.\nWay out: reset it")
        assert re.search(r"^ 0 +\(16, 5\)", text, re.M)  # and there is the table
    assert torch.equal(model[1].running_var, before)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


def test_a_layer_behind_a_zero_weight_fails_in_its_own_words_unless_it_is_allowed() -> None:
    model, loss, batch = classifier(LowRank())
    failed, way_out = paragraphs(model, loss, batch)
    assert failed == (
        "not sound: layer 0.down does not change the loss at all (‖H‖ = 0): is the zero weight of layer 0.up "
        "after it intended, as in residual branches or LoRA?"
    )
    assert way_out.startswith(
        "Way out: if so, name the other layers in layers=, or pass smallest=0; if not, "
    )
    assert assert_sound(model, loss, batch, smallest=0)
    assert assert_sound(model, loss, batch, layers="*up")


def test_a_layer_that_is_dead_is_asked_about() -> None:
    model, loss, batch = classifier(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.constant_(model[0].bias, -100)
    failed, way_out = paragraphs(model, loss, batch)
    assert failed == (
        "not sound: layer 0 and layer 2 do not change the loss at all (‖H‖ = 0): does the forward use them, "
        "or are the units around them dead?"
    )
    assert way_out == "Way out: fit the weights: hessinit.initialize_(model, loss, batch, lr=…)."


@pytest.mark.parametrize("decays", [(0.0, 0.0), (40.0, 0.0)])
def test_groups_of_adamw_are_judged_by_the_dense_limit(decays: tuple[float, float]) -> None:
    """The network passes below the dense limit of both groups together, and fails above it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    loss, batch = nn.CrossEntropyLoss(), (torch.randn(16, 5).double(), torch.arange(16) % 3)

    def optimizer(rate: float) -> torch.optim.Optimizer:
        pairs = zip((0, 2), (rate, rate / 4), decays, strict=True)
        groups = [{"params": model[k].parameters(), "lr": r, "weight_decay": d} for k, r, d in pairs]
        return torch.optim.AdamW(groups)

    limit = dense_adamw_limit(model, loss, batch, optimizer(1.0))
    options = {"times_stable": 1, "smallest": 0}
    assert assert_sound(model, loss, batch, optimizer=optimizer(0.99 * limit), **options)
    failed, _ = paragraphs(model, loss, batch, optimizer=optimizer(3 * limit), **options)
    assert "is 3 times the stable learning rate of AdamW" in failed
