from __future__ import annotations

import pytest
import torch

from hessinit.curvature.probes import ProbeStream


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(kind):
    first, again = (ProbeStream(1000, seed=3, kind=kind).draw_block(2) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, ProbeStream(1000, seed=4, kind=kind).draw_block(2))
    assert not torch.equal(first[:, 0], first[:, 1])


def test_the_first_probes_of_many_are_the_few():
    few, many = (ProbeStream(50, seed=1).draw_block(count) for count in (3, 10))
    assert torch.equal(few, many[:, :3])


def test_the_global_random_state_is_neither_read_nor_moved():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = ProbeStream(100, seed=5).draw()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(ProbeStream(100, seed=5).draw(), first)


@pytest.mark.parametrize("seed", [0, 1, 42, -7, 2**63])
def test_probes_are_not_the_numbers_that_the_user_drew_from_the_same_seed(seed):
    own = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    cosine = torch.nn.functional.cosine_similarity(own, ProbeStream(1000, seed=seed).draw(), dim=0)
    assert abs(cosine) < 0.15


def test_gaussian_probes_have_unit_variance_and_rademacher_ones_are_fair_signs():
    gaussian = ProbeStream(100_000, seed=0, dtype=torch.float64).draw()
    assert abs(gaussian.mean()) < 0.02
    assert abs(gaussian.var() - 1) < 0.02
    signs = ProbeStream(100_000, seed=0, kind="rademacher", dtype=torch.float64).draw()
    assert sorted(signs.unique().tolist()) == [-1.0, 1.0]
    assert abs(signs.mean()) < 0.02


def test_an_unknown_kind_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="kind='normal' is unknown; choose from 'gaussian', 'rademacher'"):
        ProbeStream(5, seed=0, kind="normal")
