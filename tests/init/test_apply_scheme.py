"""`apply_scheme_`: the plan, what is written and what is not, undo."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hessinit.init.apply_scheme import SCHEMES, apply_scheme_
from hessinit.results.initialization import SchemePlan
from zoo.snapshot import differences, snapshot


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Dropout(0.36), nn.Linear(6, 3))


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


EXPECTED = {
    # (layer 1, layer 2): the input has size 1, the second weight sits behind a ReLU and a dropout of 0.36.
    "forward": (1 / 6, 2 * 0.64 / 3),
    "backward": (2 * 0.64 / 8, 1 / 6),
    "compromise": (2 / (6 + 8 / (2 * 0.64)), 2 / (3 / (2 * 0.64) + 6)),
    "lecun": (1 / 8, 0.64 / 6),
    "glorot": (2 / 14, 0.64 * 2 / 9),
    "he": (1 / 8, 2 * 0.64 / 6),
    "orthogonal": (1 / 8, 2 * 0.64 / 6),
    "delta-orthogonal": (1 / 8, 2 * 0.64 / 6),
}


@pytest.mark.parametrize("scheme", EXPECTED)
def test_the_plan_is_the_formula(scheme: str) -> None:
    plan = apply_scheme_(small(), scheme, dry_run=True)
    assert [layer.std[0] ** 2 for layer in plan] == pytest.approx(EXPECTED[scheme], rel=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_dry_run_touches_nothing(scheme: str) -> None:
    model, sample, generator = small(), torch.randn(16, 8), seeded()
    before, state = snapshot(model, None, sample), generator.get_state()
    plan = apply_scheme_(model, scheme, sample=sample, generator=generator, dry_run=True)
    assert differences(before, snapshot(model, None, sample)) == []
    assert torch.equal(generator.get_state(), state)
    assert isinstance(plan, SchemePlan)
    assert len(plan) == 2
    assert not plan.applied
    with pytest.raises(ValueError, match="nothing to undo: this plan is a dry run"):
        plan.undo()
    assert all(layer.std for layer in plan)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_dry_run_tells_the_std_of_the_real_one(scheme: str) -> None:
    model, sample = small(), torch.randn(16, 8)
    planned = apply_scheme_(model, scheme, sample=sample, generator=seeded(), dry_run=True)
    applied = apply_scheme_(model, scheme, sample=sample, generator=seeded())
    assert [layer.std for layer in planned] == [layer.std for layer in applied]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_undo_puts_every_bit_back_on_the_same_parameters(scheme: str) -> None:
    model, sample = small(), torch.randn(16, 8)
    before, objects = weights(model), [id(parameter) for parameter in model.parameters()]
    applied: Any = apply_scheme_(model, scheme, sample=sample, generator=seeded())
    assert not same(before, weights(model))
    assert [id(parameter) for parameter in model.parameters()] == objects
    applied.undo()
    assert same(before, weights(model))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_generator_gives_the_same_bits_and_leaves_the_global_one_alone(scheme: str) -> None:
    model, sample = small(), torch.randn(16, 8)
    state = torch.get_rng_state()
    apply_scheme_(model, scheme, sample=sample, generator=seeded(3))
    first = weights(model)
    apply_scheme_(model, scheme, sample=sample, generator=seeded(3))
    assert same(first, weights(model))
    apply_scheme_(model, scheme, sample=sample, generator=seeded(4))
    assert not same(first, weights(model))
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_generator_the_global_seed_rules() -> None:
    model = small()
    torch.manual_seed(5)
    apply_scheme_(model, "he")
    first = weights(model)
    torch.manual_seed(5)
    apply_scheme_(model, "he")
    assert same(first, weights(model))


def test_default_without_dropout_is_what_torch_does() -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Conv1d(200, 100, 1))
    torch.manual_seed(7)
    apply_scheme_(model, "default", sample=None, layers=["0"])
    torch.manual_seed(7)
    twin = nn.Linear(300, 200)
    assert torch.equal(model[0].weight, twin.weight)
    assert torch.equal(model[0].bias, twin.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_precision_gets_the_rounded_numbers_of_single_precision(scheme: str, dtype: torch.dtype) -> None:
    single, sample = small(), torch.randn(16, 8)
    half = copy.deepcopy(single).to(dtype)
    apply_scheme_(single, scheme, sample=sample, generator=seeded())
    apply_scheme_(half, scheme, sample=sample, generator=seeded())
    tolerance = 2e-2 if scheme == "lsuv" else 0.0  # measured on outputs in half precision
    for one, other in zip(single.parameters(), half.parameters(), strict=True):
        assert other.dtype == dtype
        assert torch.allclose(one.to(dtype).float(), other.float(), rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("distribution", ["normal", "truncated normal", "uniform"])
def test_every_distribution_has_the_planned_std(distribution: str) -> None:
    model = nn.Linear(400, 300)
    plan = apply_scheme_(model, "he", distribution=distribution, generator=seeded())
    assert plan.distribution == distribution
    assert float(model.weight.detach().std()) == pytest.approx(plan[0].std[0], rel=0.01)
    assert (float(model.weight.detach().abs().max()) / plan[0].std[0] < 2.3) == (distribution != "normal")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def test_a_tied_weight_is_drawn_once_and_suits_its_larger_use() -> None:
    model = Tied()
    plan = apply_scheme_(model, "lecun", sample=torch.randint(50, (4, 5)), generator=seeded())
    assert plan.layers[0].name == "embed"
    assert plan.layers[0].aliases == ("head",)
    assert len(plan) == 1
    assert plan[0].std == pytest.approx((1 / 4,))  # as a head: 1/√16; as an embedding it would be 1
    assert plan["head"] is plan[0]


def test_the_padding_row_of_an_embedding_stays_zero() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, padding_idx=2), nn.Linear(4, 3))
    apply_scheme_(model, "he", sample=torch.randint(10, (4, 5)), generator=seeded())
    assert not bool(model[0].weight.detach()[2].any())
    assert float(model[0].weight.detach()[3:].std()) > 0.5


def test_biases_become_zero_or_stay() -> None:
    model = small()
    kept = model[0].bias.detach().clone()
    apply_scheme_(model, "he", biases="keep")
    assert torch.equal(model[0].bias, kept)
    apply_scheme_(model, "he")
    assert not bool(model[0].bias.any())


def test_a_frozen_weight_is_unchanged_and_said_so() -> None:
    model = small()
    model[0].requires_grad_(False)
    before = weights(model)
    plan = apply_scheme_(model, "he", generator=seeded())
    assert plan["0"].unchanged == "frozen"
    assert plan["3"].unchanged == ""
    after = weights(model)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[2], after[2])
    assert "frozen" in str(plan)
    assert "1 left alone" in str(plan)


def test_a_sparse_weight_is_unchanged() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.eye(8).to_sparse())

        def forward(self, signal: Tensor) -> Tensor:
            return torch.sparse.mm(self.matrix, signal.T).T

    plan = apply_scheme_(nn.Sequential(Sparse(), nn.Linear(8, 3)), "he", generator=seeded())
    assert plan["0.matrix"].unchanged == "a sparse tensor"
    assert plan["1"].unchanged == ""


def test_only_the_named_layers_are_drawn() -> None:
    model = small()
    before = weights(model)
    plan = apply_scheme_(model, "he", layers="3", generator=seeded())
    assert [layer.name for layer in plan] == ["3"]
    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(model[3].weight, before[2])
    assert plan[0].dropout_factor == pytest.approx(0.8)  # the surroundings are seen all the same


def test_a_parametrized_weight_is_written_through_its_parametrization() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(200, 100)), nn.ReLU(), nn.Linear(100, 3))
    plan: Any = apply_scheme_(model, "he", sample=torch.randn(4, 200), generator=seeded())
    assert plan["0"].std == pytest.approx((200**-0.5,))
    assert float(model[0].weight.detach().std()) == pytest.approx(200**-0.5, rel=0.02)
    assert plan.notes == ()


def test_a_parametrization_that_changes_its_weight_is_named() -> None:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(20, 10)), nn.ReLU(), nn.Linear(10, 3))
    plan = apply_scheme_(model, "he", sample=torch.randn(4, 20), generator=seeded())
    assert any("0: the parametrization changes its value" in note for note in plan.notes)


@pytest.mark.parametrize("wrap", [parametrizations.orthogonal, parametrizations.spectral_norm])
def test_undo_reaches_what_a_parametrization_keeps_in_buffers(wrap: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 4)).eval()
    sample = torch.randn(8, 16)
    before = model(sample)
    applied: Any = apply_scheme_(model, "he", generator=seeded())
    assert not torch.equal(model(sample), before)
    applied.undo()
    assert torch.equal(model(sample), before)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_a_weight_that_cannot_be_written_or_is_changed_by_the_forward_is_unchanged() -> None:
    class Equalized(nn.Linear):
        def forward(self, signal: Tensor) -> Tensor:
            return nn.functional.linear(signal, self.weight * 0.1, self.bias)

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Equalized(4, 4))
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
    plan = apply_scheme_(model, "he", sample=torch.randn(3, 4))
    assert plan["0"].unchanged == "its parametrization has no right_inverse"
    assert plan["2"].unchanged == "the forward changes it before using it"


def test_lsuv_leaves_a_weight_alone_whose_bias_is_too_large_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    nn.init.normal_(model[0].bias, std=3.0)
    plan = apply_scheme_(model, "lsuv", sample=torch.randn(256, 64), biases="keep", generator=seeded())
    assert plan["0"].std[0] == pytest.approx(1 / 8, rel=1e-3)
    assert any("0: no scale gives variance 1" in note for note in plan.notes)
    assert float(model(torch.randn(256, 64)).detach().std()) == pytest.approx(1, rel=0.2)


def test_the_use_that_loses_is_told() -> None:
    plan = apply_scheme_(Tied(), "he", sample=torch.randint(50, (4, 5)), dry_run=True)
    assert any("embed is drawn for its use as dense" in note for note in plan.notes)


class Language(nn.Module):
    """An embedding, a layer, and the embedding again as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(100, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(nn.functional.layer_norm(self.layer(self.embed(tokens)), (64,)))


class Recurrence(nn.Module):
    """By hand, from a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.w, self.o = nn.Linear(8, 8), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 8)
        for _ in range(3):
            state = torch.tanh(self.u(state) + self.w(x))
        return self.o(state)


def test_lsuv_waits_for_the_first_use_that_is_not_zero() -> None:
    model, sample = Recurrence(), torch.randn(64, 16)
    plan = apply_scheme_(model, "lsuv", sample=sample, generator=seeded())
    assert plan.notes == ()
    first = torch.tanh(model.w(sample))
    assert float(model.u(first).detach().std()) == pytest.approx(1, rel=0.01)


class LearnedStart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(4, 8))
        self.query, self.keys, self.last = nn.Linear(8, 8), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x)
        scores = self.query(self.start) @ keys.T
        return self.last(torch.softmax(scores, -1) @ keys)


@pytest.mark.parametrize("with_sample", [True, False])
def test_a_layer_on_a_learned_start_is_drawn_and_the_start_unchanged(with_sample: bool) -> None:
    plan = apply_scheme_(LearnedStart(), "he", sample=torch.randn(5, 16) if with_sample else None)
    assert plan["query"].std == pytest.approx((8**-0.5,))
    assert "learned input" in plan["start"].unchanged


def test_lsuv_suits_a_tied_weight_to_the_use_that_would_explode() -> None:
    model, tokens = Language(), torch.randint(100, (16, 12))
    plan = apply_scheme_(model, "lsuv", sample=tokens, generator=seeded())
    assert float(model(tokens).detach().std()) == pytest.approx(1, rel=0.05)
    assert any("embed is used again" in note for note in plan.notes)


@pytest.mark.parametrize("scheme", ["orthogonal", "delta-orthogonal", "he"])
@pytest.mark.parametrize("words", [1000, 8])
def test_looked_up_embeddings_have_size_one(scheme: str, words: int) -> None:
    model, tokens = nn.Sequential(nn.Embedding(words, 32), nn.Linear(32, 5)), torch.arange(words)
    plan = apply_scheme_(model, scheme, sample=tokens, generator=seeded())
    assert plan["0"].std == (1.0,)
    assert float(model[0](tokens).detach().square().mean()) == pytest.approx(1, rel=0.15)


def test_a_plan_is_plain_data() -> None:
    import json
    import pickle

    applied = apply_scheme_(small(), "he", generator=seeded())
    assert applied.applied
    assert applied == apply_scheme_(small(), "he", dry_run=True)
    travelled = pickle.loads(pickle.dumps(applied))
    assert travelled == applied
    assert not travelled.applied
    assert json.loads(json.dumps(applied.to_dict()))["layers"][1]["name"] == "3"
    assert repr(applied) == "<SchemePlan 'he' of 2 weights, applied>"


def test_lengths_through_changing_widths_are_told_to_be_rough_where_they_are() -> None:
    def tapered(activation: nn.Module) -> nn.Sequential:
        return nn.Sequential(nn.Linear(16, 64), activation, nn.Linear(64, 64), activation, nn.Linear(64, 16))

    assert apply_scheme_(tapered(nn.ReLU()), "forward", dry_run=True).notes == ()
    assert apply_scheme_(tapered(nn.Tanh()), "he", dry_run=True).notes == ()
    (note,) = apply_scheme_(tapered(nn.Tanh()), "forward", dry_run=True).notes
    assert "the gain of tanh is that of size 1" in note


def test_a_name_beats_a_glob_in_gains_and_numpy_numbers_count() -> None:
    import numpy

    plan = apply_scheme_(small(), "he", gains={"3": numpy.float32(2.0), "*": 1.0}, dry_run=True)
    assert (plan["0"].gain, plan["3"].gain) == (1.0, 2.0)


def test_threads_do_not_disturb_each_other() -> None:
    from concurrent.futures import ThreadPoolExecutor

    models = [small() for _ in range(32)]
    with ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(lambda model: apply_scheme_(model, "he", generator=seeded()), models))
    assert len({tuple(layer.std for layer in plan) for plan in plans}) == 1


def test_inference_mode_around_the_call_changes_nothing() -> None:
    model = small()
    with torch.inference_mode():
        apply_scheme_(model, "lsuv", sample=torch.randn(16, 8))
    model(torch.randn(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gains_override_what_was_found() -> None:
    plan = apply_scheme_(small(), "he", gains={"3": 2.0}, dropout=False, dry_run=True)
    assert plan["3"].gain == 2.0
    assert plan["3"].std == pytest.approx((2 / math.sqrt(6),))


def test_a_model_on_its_own_weights_gets_the_same_optimizer_state() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_scheme_(model, "he", generator=seeded())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in held] == [id(parameter) for parameter in model.parameters()]
