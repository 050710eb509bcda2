"""`apply_scheme_`: the plan, what is written and what is not, undo, refusals."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from networks import mlp, seeded
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hessinit.errors import ProblemError
from hessinit.init.apply_scheme import SCHEMES, apply_scheme_
from hessinit.problem.problem import Problem
from tiny import Net
from zoo.snapshot import differences, snapshot


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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_plan_dry_run_undo_and_seeds(scheme: str) -> None:
    model, sample, generator = small(), torch.randn(16, 8), seeded(3)
    before = snapshot(model, None, sample)
    plan = apply_scheme_(model, scheme, sample=sample, generator=generator, dry_run=True)
    assert differences(before, snapshot(model, None, sample)) == []
    with pytest.raises(ValueError, match="nothing to undo: this is a dry run"):
        plan.undo()
    if scheme in EXPECTED:
        assert [layer.std[0] ** 2 for layer in plan] == pytest.approx(EXPECTED[scheme], rel=1e-6)
    applied = apply_scheme_(model, scheme, sample=sample, generator=generator)
    first = weights(model)
    assert (applied, applied.applied, plan.applied) == (plan, True, False)
    assert all(layer.std for layer in plan)
    assert len(differences(before, snapshot(model, None, sample))) == 4  # two weights, two biases
    applied.undo()
    assert differences(before, snapshot(model, None, sample)) == []
    for seed in (3, 4):
        apply_scheme_(model, scheme, sample=sample, generator=seeded(seed))
        assert same(first, weights(model)) == (seed == 3)


def test_a_problem_brings_its_sample_its_layers_and_its_forward() -> None:
    data = (torch.randn(16, 8), torch.zeros(16, dtype=torch.long))
    problem = Problem(small(), nn.CrossEntropyLoss(), data, layers="3", forward=lambda net, x: net(x))
    plan = apply_scheme_(problem, "lsuv", generator=seeded(3))
    assert [layer.name for layer in plan] == ["3"]
    model = small()
    apply_scheme_(model, "lsuv", sample=data[0], layers="3", generator=seeded(3))
    assert same(weights(model), weights(problem.model))
    with pytest.raises(ProblemError, match="a Problem already holds the sample and the layers"):
        apply_scheme_(problem, "he", sample=data[0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_precision_gets_the_rounded_numbers_of_single_precision(scheme: str) -> None:
    sample, half = torch.randn(16, 8), torch.bfloat16
    models = small(), small().to(half)
    for model in models:
        apply_scheme_(model, scheme, sample=sample, generator=seeded())
    tolerance = 2e-2 if scheme == "lsuv" else 0.0  # measured on outputs in half precision
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert other.dtype == half
        assert torch.allclose(one.to(half).float(), other.float(), rtol=tolerance, atol=0.0)


def test_without_a_generator_the_global_seed_decides_and_a_uniform_draw_ends_at_its_edge() -> None:
    found = []
    for _ in range(2):
        model = small()  # seeds the global generator
        apply_scheme_(model, "he")
        found.append(weights(model))
    assert same(*found)
    model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Conv1d(200, 100, 1))
    plan = apply_scheme_(model, "he", distribution="uniform")
    assert float(model[0].weight.detach().abs().max()) == pytest.approx(3**0.5 * plan["0"].std[0], rel=1e-3)


def tied(run: Any, **parts: Any) -> Net:
    model = Net(run, **parts)
    model.head.weight = model.embed.weight
    return model


def test_a_tied_weight_is_drawn_once_and_suits_its_larger_use() -> None:
    model = tied(
        lambda net, x: net.head(torch.tanh(net.embed(x))), embed=nn.Embedding(50, 16),
        head=nn.Linear(16, 50, bias=False),
    )  # fmt: skip
    plan = apply_scheme_(model, "lecun", sample=torch.randint(50, (4, 5)), generator=seeded())
    assert (plan[0].name, plan[0].aliases, plan[0].kind, len(plan)) == ("embed", ("head",), "dense", 1)
    assert plan[0].std == pytest.approx((1 / 4,))  # as a head: 1/√16; as an embedding it would be 1
    assert plan["head"] is plan[0]
    language = tied(
        lambda net, x: net.head(nn.functional.layer_norm(net.layer(net.embed(x)), (64,))),
        embed=nn.Embedding(100, 64), layer=nn.Linear(64, 64), head=nn.Linear(64, 100, bias=False),
    )  # fmt: skip
    tokens = torch.randint(100, (16, 12))
    plan = apply_scheme_(language, "lsuv", sample=tokens, generator=seeded())
    assert float(language(tokens).detach().std()) == pytest.approx(1, rel=0.05)
    assert any("embed is used again" in note for note in plan.notes)


@pytest.mark.parametrize("scheme", ["orthogonal", "delta-orthogonal", "he"])
@pytest.mark.parametrize("words", [1000, 8])
def test_looked_up_embeddings_have_size_one(scheme: str, words: int) -> None:
    model, tokens = nn.Sequential(nn.Embedding(words, 32), nn.Linear(32, 5)), torch.arange(words)
    plan = apply_scheme_(model, scheme, sample=tokens, generator=seeded())
    assert plan["0"].std == pytest.approx((1.0,))
    assert float(model[0](tokens).detach().square().mean()) == pytest.approx(1, rel=0.15)
    padded = nn.Sequential(nn.Embedding(words, 32, padding_idx=2), nn.Linear(32, 5))
    apply_scheme_(padded, scheme, sample=tokens, generator=seeded())
    assert padded[0].weight.detach().any(dim=1).tolist() == [at != 2 for at in range(words)]


def test_frozen_sparse_unwritable_and_changed_weights_are_unchanged_with_a_reason() -> None:
    model = small()
    model[0].requires_grad_(False)
    before = weights(model)
    plan = apply_scheme_(model, "he", generator=seeded())
    assert [layer.unchanged for layer in plan] == ["frozen", ""]
    assert same(before[:2], weights(model)[:2])
    sparse = nn.Parameter(torch.eye(8).to_sparse())
    first = Net(lambda net, x: torch.sparse.mm(net.matrix, x.T).T, matrix=sparse)
    model = nn.Sequential(first, nn.Linear(8, 3))
    plan = apply_scheme_(model, "he", generator=seeded())
    assert [plan[name].unchanged for name in ("0.matrix", "1")] == ["a sparse tensor", ""]
    weight = nn.Parameter(torch.eye(4))
    equalized = Net(lambda net, x: nn.functional.linear(x, net.weight * 0.1), weight=weight)
    doubled = Net(lambda net, weight: 2 * weight)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), equalized)
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", doubled)
    plan = apply_scheme_(model, "he", sample=torch.randn(3, 4))
    assert plan["0"].unchanged == "its parametrization has no right_inverse"
    assert plan["2"].unchanged == "the forward changes it before using it"
    parts = {"start": nn.Parameter(torch.randn(4, 8)), "query": nn.Linear(8, 8), "last": nn.Linear(8, 3)}
    model = Net(lambda net, x: net.last(torch.softmax(net.query(net.start) @ x.T, -1) @ x), **parts)
    plan = apply_scheme_(model, "he", sample=torch.randn(5, 8))
    assert plan["query"].std == pytest.approx((8**-0.5,))
    assert "learned input" in plan["start"].unchanged


def test_only_the_named_layers_are_drawn_and_biases_become_zero_or_stay() -> None:
    model = small()
    before = weights(model)
    plan = apply_scheme_(model, "he", layers="3", biases="keep", generator=seeded())
    assert [layer.name for layer in plan] == ["3"]
    kept = [torch.equal(*pair) for pair in zip(before, weights(model), strict=True)]
    assert kept == [True, True, False, True]
    assert plan[0].dropout_factor == pytest.approx(0.8)  # the context is seen all the same
    apply_scheme_(model, "he")
    assert not bool(model[0].bias.any())


def test_parametrized_weights_are_written_through_and_undone() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(200, 100)), nn.ReLU(), nn.Linear(100, 3))
    plan = apply_scheme_(model, "he", sample=torch.randn(4, 200), generator=seeded())
    assert plan["0"].std == pytest.approx((200**-0.5,))
    assert float(model[0].weight.detach().std()) == pytest.approx(200**-0.5, rel=0.02)
    assert plan.notes == ()
    for wrap in (parametrizations.orthogonal, parametrizations.spectral_norm):
        torch.manual_seed(0)
        model = nn.Sequential(wrap(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 4)).eval()
        sample = torch.randn(8, 16)
        before = model(sample)
        plan = apply_scheme_(model, "he", generator=seeded())
        assert any("0: the parametrization changes its value" in note for note in plan.notes)
        assert not torch.equal(model(sample), before)
        plan.undo()
        assert torch.equal(model(sample), before)


class Refusing(nn.Identity):
    def right_inverse(self, weight: Tensor) -> Tensor:
        if weight.abs().max() > 1e-3:
            raise RuntimeError("not this value")
        return weight


def test_a_value_that_is_refused_leaves_everything_as_it_was() -> None:
    model = small()
    nn.init.zeros_(model[3].weight)
    torch.nn.utils.parametrize.register_parametrization(model[3], "weight", Refusing())
    before = weights(model)
    with pytest.raises(RuntimeError, match="not this value"):
        apply_scheme_(model, "he", generator=seeded())
    assert same(before, weights(model))


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (4, 4)])
def test_orthogonal_parametrizations_of_every_shape_are_written_through(shape: tuple[int, int]) -> None:
    for kind in ("householder", "matrix_exp", "cayley"):
        first = parametrizations.orthogonal(nn.Linear(*shape), orthogonal_map=kind)
        model = nn.Sequential(first, nn.Tanh(), nn.Linear(shape[1], 3))
        apply_scheme_(model, "orthogonal", sample=torch.randn(8, shape[0]))
        weight = model[0].weight.detach()
        gram = weight @ weight.T if shape[0] > shape[1] else weight.T @ weight
        assert torch.allclose(gram, gram[0, 0] * torch.eye(len(gram)), atol=1e-5)


def test_lsuv_with_large_biases_zero_states_and_stds_asked_for() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    nn.init.normal_(model[0].bias, std=3.0)
    plan = apply_scheme_(model, "lsuv", sample=torch.randn(256, 64), biases="keep", generator=seeded())
    assert plan["0"].std[0] == pytest.approx(1 / 8, rel=1e-3)
    assert any("0: no scale gives variance 1" in note for note in plan.notes)
    assert float(model(torch.randn(256, 64)).detach().std()) == pytest.approx(1, rel=0.2)

    def recurrence(net: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 8)
        for _ in range(3):
            state = torch.tanh(net.u(state) + net.w(x))
        return net.o(state)

    model = Net(recurrence, u=nn.Linear(8, 8), w=nn.Linear(16, 8), o=nn.Linear(8, 3))
    sample = torch.randn(64, 16)
    assert apply_scheme_(model, "lsuv", sample=sample, generator=seeded()).notes == ()
    assert float(model.u(torch.tanh(model.w(sample))).detach().std()) == pytest.approx(1, rel=0.01)
    model, sample = mlp(4, nn.Tanh), torch.rand(64, 64)
    plan = apply_scheme_(model, "lsuv", sample=sample, gains={"1": 0.5})
    assert float(model[:2](sample).detach().std()) == pytest.approx(0.5, rel=0.01)
    assert float(model(sample).detach().std()) == pytest.approx(1.0, rel=0.01)
    assert (plan["1"].gain, plan["3"].gain) == (0.5, pytest.approx(1.0))


def test_gains_override_and_a_name_beats_a_glob() -> None:
    gains = {"3": numpy.float32(2.0), "*": 1.0}
    plan = apply_scheme_(small(), "he", gains=gains, dropout=False, dry_run=True)
    assert (plan["0"].gain, plan["3"].gain) == (1.0, 2.0)
    assert plan["3"].std == pytest.approx((2 / math.sqrt(6),))


def test_threads_and_inference_mode_disturb_nothing() -> None:
    models = [small() for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(lambda model: apply_scheme_(model, "he", generator=seeded()), models))
    assert len({tuple(layer.std for layer in plan) for plan in plans}) == 1
    model = small()
    with torch.inference_mode():
        apply_scheme_(model, "lsuv", sample=torch.randn(16, 8))
    model(torch.randn(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def bare() -> Net:
    parts = {"soft": nn.Softmax(dim=-1), "one": nn.Linear(4, 4), "two": nn.Linear(4, 2)}
    return Net(lambda net, x: net.two(net.soft(net.one(x))), **parts)


def branching() -> Net:
    return Net(lambda net, x: net.fc(x) if x.sum() > 0 else net.fc(-x), fc=nn.Linear(4, 4))


REFUSED: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("scheme='orthognal' is unknown.*Did you mean 'orthogonal'", small, "orthognal", {}),
    ("scheme='kaiming_normal_' is unknown.*mean 'he'", small, "kaiming_normal_", {}),
    ("distribution='uniform' has no meaning for", small, "orthogonal", {"distribution": "uniform"}),
    ("model is a type.*instance, not the class", lambda: nn.Linear, "he", {}),
    ("scheme='lsuv' measures.*pass sample=", small, "lsuv", {}),
    ("pass sample=", branching, "he", {}),
    ("no weight of two or more dimensions", lambda: nn.LayerNorm(3), "he", {}),
    (r"softmax before two is not elementwise.*gains={'two': 1.0}.*lsuv", bare, "he", {}),
    (r"gains names 'fc9', which fits no weight", small, "he", {"gains": {"fc9": 1.0}}),
    (r"gains\['3'\]=-1 must be a finite number above 0", small, "he", {"gains": {"3": -1}}),
    ("gains has no meaning for scheme='lecun'", small, "lecun", {"gains": {"3": 1.0}}),
    ("layers='0.bias' names no weight of two", small, "he", {"layers": "0.bias"}),
    ("the model failed on inputs of shape .2, 5.", small, "he", {"sample": torch.ones(2, 5)}),
    ("a dropout of p = 1 stands next to 1", lambda: nn.Sequential(nn.Dropout(1), nn.Linear(3, 3)), "he", {}),
    ("the output of 0 on this sample is 0 everywhere", small, "lsuv", {"sample": torch.zeros(4, 8)}),
]


@pytest.mark.parametrize(
    ("message", "build", "scheme", "options"), REFUSED, ids=[one[0][:40] for one in REFUSED]
)
def test_bad_input_is_refused(message: str, build: Any, scheme: str, options: dict[str, Any]) -> None:
    with pytest.raises(ProblemError, match=f"(?s){message}"):
        apply_scheme_(build(), scheme, **options)


def joined(function: Any) -> Net:
    """Two branches, concatenated; the first is worked on by `function`."""
    parts = {"one": nn.Linear(4, 6), "two": nn.Linear(4, 6), "out": nn.Linear(12, 3), "function": function}
    return Net(lambda net, x: net.out(torch.cat([net.function(net.one(x)), net.two(x)], 1)), **parts)


def test_a_dropout_of_one_is_blamed_only_where_nothing_passes() -> None:
    # Of the 12 inputs only the 6 of the second branch hold something.
    closed = apply_scheme_(joined(nn.Dropout(1.0)), "he", sample=torch.randn(8, 4))
    assert closed["out"].std[0] ** 2 == pytest.approx(1 / 6)
    # 1/z has no second moment; no dropout is to blame.
    with pytest.raises(ProblemError, match="reciprocal before out is not elementwise, or not finite"):
        apply_scheme_(joined(torch.reciprocal), "he", sample=torch.randn(8, 4))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_zero_fan_is_refused_and_what_has_a_way_out_is_not() -> None:
    with pytest.raises(ProblemError, match=r"0 has shape \(0, 4\): a fan is zero"):
        apply_scheme_(nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 3)), "he")
    assert apply_scheme_(bare(), "he", gains={"two": 2.0})["two"].gain == 2.0
    assert apply_scheme_(bare(), "lsuv", sample=torch.randn(16, 4)).applied
    assert apply_scheme_(bare(), "glorot").applied
    assert apply_scheme_(nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0)), "he").applied
