"""The findings of word2vec in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hessinit.paper.rank_correlation import RankCorrelation
from hessinit.paper.word2vec_design import BATCH, MODEL_NAMES, STDS, step_length
from hessinit.paper.word2vec_sweep import Sweep, correlate

SIGNIFICANT = 0.05
SUPPORTED, CONTRADICTED = "is supported", "is contradicted"
LEVEL_WORDS = {
    "mean": "‖H‖ near 1 for the loss averaged over pairs, the paper's claim",
    "sum": f"‖H‖ near 1 for the loss summed over the {BATCH} pairs of a batch",
    "step": "lr·‖H‖ near 1, our version of it",
}


def describe_all(sweeps: Sequence[Sweep]) -> list[str]:
    """How each version of the claim fares in all sweeps, and how far to trust the numbers."""
    sentences = []
    for level, words in LEVEL_WORDS.items():
        verdicts = [judge(*_correlations(sweep, level)) for sweep in sweeps]
        supported, contradicted = verdicts.count(SUPPORTED), verdicts.count(CONTRADICTED)
        sentences.append(
            f"Of {len(sweeps)} sweeps, each one model at one rate, {supported} support and {contradicted} "
            f"contradict that the best starts have {words}; the rest show nothing at p < {SIGNIFICANT:g}."
        )
    sentences.append(_describe_exact(sweeps))
    places, dimensions = len(sweeps[0].drawn), len(sweeps[0].dimensions)
    sentences.append(
        f"The {places} points of a sweep are fewer than they look: a norm is nearly a function of the "
        f"standard deviation, so that about {len(STDS)} are independent; p therefore exchanges whole "
        f"standard deviations, in all {dimensions} dimensions alike, and is not corrected for testing often."
    )
    return sentences


def _describe_exact(sweeps: Sequence[Sweep]) -> str:
    """The other norm of the network, which the verdicts do not go by; it need not agree."""
    found = {
        name: ", ".join(
            f"{one.rho:.2f} (p = {one.p:.2g})" for one in (correlate(s, "exact", level) for s in sweeps)
        )
        for level, name in (("mean", "averaged"), ("sum", "summed"), ("step", "averaged, times lr"))
    }
    listed = "; ".join(f"{name}: {values}" for name, values in found.items())
    return (
        "These verdicts go by the network's Gauss-Newton norm. By its exact norm Spearman's ρ, sweep by "
        f"sweep, is, for the loss {listed}."
    )


def describe_sweep(sweep: Sweep) -> list[str]:
    """The best start and the one nearest 1, a verdict for each version of the claim, and our own start."""
    claims = [_describe_claim(sweep, level) for level in LEVEL_WORDS]
    return [_describe_best(sweep), _describe_nearest(sweep), *claims, _describe_ours(sweep)]


def judge(pooled: RankCorrelation, within: list[RankCorrelation]) -> str:
    """What a rank correlation and its parts say of the claim.

    >>> up, down = RankCorrelation(0.8, 0.01, 21), RankCorrelation(-0.8, 0.01, 21)
    >>> judge(up, [up, up]), judge(down, [down, down]), judge(up, [up, down])
    ('is supported', 'is contradicted', 'is neither supported nor contradicted')
    """
    agree = [found.rho * pooled.rho > 0 for found in within]
    if not (pooled.p < SIGNIFICANT and all(agree)):
        return "is neither supported nor contradicted"
    return SUPPORTED if pooled.rho > 0 else CONTRADICTED


def describe_bilinear(sweep: Sweep) -> str:
    """Why the exact norm of the network and its Gauss-Newton norm part at small weights."""
    smallest = min(sweep.drawn, key=lambda place: (float(place.row), -place.dimension))
    return (
        f"With {MODEL_NAMES[sweep.model]} the scores are bilinear in the two matrices, so that the "
        f"Gauss-Newton block of each is its exact Hessian; the network's is not: at std {smallest.row}, "
        f"dimension {smallest.dimension}, its exact ‖H‖ is {smallest.norm('exact'):.2g} and Gauss-Newton "
        f"gives {smallest.norm('network'):.2g}. The rest is the block that mixes the two matrices, which the "
        "weights' size does not change, and which leads away from the saddle at zero."
    )


def _opening(sweep: Sweep) -> str:
    return f"{MODEL_NAMES[sweep.model].capitalize()}, rate {sweep.rate:g}"


def _describe_best(sweep: Sweep) -> str:
    best = sweep.best
    norm = best.norm("network")
    return (
        f"{_opening(sweep)} a pair (lr = {step_length(sweep.rate):g} for the mean of {BATCH}): the lowest "
        f"training loss, {best.loss:.3f} (n = {len(best.final)} seeds), follows std {best.row} in dimension "
        f"{best.dimension}, where the network's ‖H‖ (largest |eigenvalue|, Gauss-Newton) is {norm:.2g}, "
        f"{BATCH * norm:.2g} for the loss summed over a batch, and lr·‖H‖ = "
        f"{sweep.factor('step') * norm:.2g}."
    )


def _describe_nearest(sweep: Sweep) -> str:
    nearest = min(sweep.drawn, key=lambda place: abs(math.log(place.norm("network"))))
    better = sum(place.loss < nearest.loss for place in sweep.drawn)
    return (
        f"{_opening(sweep)}: the start whose ‖H‖ is nearest 1, std {nearest.row} in dimension "
        f"{nearest.dimension} with {nearest.norm('network'):.2g}, ends at {nearest.loss:.3f}, and {better} "
        f"of the {len(sweep.drawn)} starts end lower."
    )


def _correlations(sweep: Sweep, level: str) -> tuple[RankCorrelation, list[RankCorrelation]]:
    within = [correlate(sweep, "network", level, dimension) for dimension in sweep.dimensions]
    return correlate(sweep, "network", level), within


def _describe_claim(sweep: Sweep, level: str) -> str:
    pooled, within = _correlations(sweep, level)
    return (
        f"{_opening(sweep)}: that the best starts have {LEVEL_WORDS[level]}, {judge(pooled, within)}: "
        f"Spearman's ρ = {pooled.rho:.2f} for the network (p = {pooled.p:.2g}, n = {pooled.n})."
    )


def _describe_ours(sweep: Sweep) -> str:
    rivals = [[one for one in sweep.drawn if one.dimension == ours.dimension] for ours in sweep.ours]
    beaten = [
        sum(ours.loss < one.loss for one in others) for ours, others in zip(sweep.ours, rivals, strict=True)
    ]
    return (
        f"{_opening(sweep)}: hessinit's own start ends at {_join(ours.loss for ours in sweep.ours)} in "
        f"{_dimensions(sweep)}, and the best standard deviation at "
        f"{_join(min(one.loss for one in others) for others in rivals)}; it beats "
        f"{', '.join(map(str, beaten))} of the {len(STDS)}. In the last it says of itself: "
        f"{sweep.ours[-1].remarks[0]}."
    )


def _dimensions(sweep: Sweep) -> str:
    return f"dimensions {', '.join(map(str, sweep.dimensions))}"


def _join(losses: Iterable[float]) -> str:
    return ", ".join(f"{loss:.3f}" for loss in losses)
