"""What lies before a weight: from its input back to the signal that feeds it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from hessinit.schemes.chains import Chain, Link, function_of, link_of, moment, product_of, put_before
from hessinit.schemes.gains import second_moment
from hessinit.schemes.record import Record, Step
from hessinit.schemes.simplify import keeps_elements
from hessinit.schemes.site import BY_SHAPE, Passage

_PASSED = ("rearrange", "split", "pool", "centre")
_SIGMOID = Link("sigmoid", torch.sigmoid)


def passage_before(record: Record, step: Step) -> Passage:
    """The passage that ends at the weight of `step`, which lies on a simplified record."""
    if step.use is not None and step.use.kind == "embedding":
        return Passage(end="tokens")
    if not step.sources:
        return Passage(end="constant")
    if step.use is not None and step.use.kind == "bilinear":
        return _product([_back(record, source) for source in step.sources], ())
    return _back(record, step.sources[0])


def _back(record: Record, index: int, chain: Chain = (), words: tuple[str, ...] = ()) -> Passage:
    """From step `index` back to its source; `chain` comes after the step, `words` name it."""
    keep, runs, trouble = 1.0, False, ""
    while True:
        step = record[index]
        if step.kind in ("elementwise", "dropout"):
            chain, kept = put_before(step, chain)
            keep, runs, words = keep * kept, runs or step.runs, (step.name, *words)
        elif step.kind not in _PASSED or not step.sources or step.resizes:
            break
        trouble = trouble or (BY_SHAPE if step.name == BY_SHAPE else "")
        index = step.sources[0]
    found = _source(record, step, chain)
    shown = ", ".join(filter(None, (found.words, *words)))
    trouble = found.trouble or trouble or (shown if math.isnan(found.moment) else "")
    runs = runs or found.dropout_runs
    return replace(found, words=shown, keep=found.keep * keep, dropout_runs=runs, trouble=trouble)


def _source(record: Record, step: Step, chain: Chain) -> Passage:
    if step.kind == "product":
        chains = {root: product_of(found) for root, found in _factors(record, step).items()}
        factors = [
            _back(record, root, functions, tuple(link.name for link in functions))
            for root, functions in chains.items()
        ]
        return _product(factors, chain)
    if step.kind == "gate":
        halves = [_back(record, step.sources[0]), _back(record, step.sources[0], (_SIGMOID,))]
        return replace(_product(halves, chain), words="glu")
    if step.kind == "cat" and step.sources:
        return _joined(record, step, [_back(record, source, chain) for source in step.sources])
    if step.kind == "normalizing":
        return Passage(step.name, end=step.name, trouble=step.name)
    size = moment(chain, second_moment)
    if step.kind == "pool":  # that changes the size; but a sum of what a softmax has weighed is a mean
        mixes = _back(record, step.sources[0]).end == "mix"
        return Passage(step.name, size, end="mix" if mixes else "unknown")
    if step.kind in ("state", "gates"):
        return Passage("hidden state", size, end="state")
    feeder = step.index if step.use is not None else -1
    return Passage(moment=size, end=step.kind, feeder=feeder, function=function_of(chain))


def _factors(record: Record, step: Step) -> dict[int, list[Chain]]:
    """What is multiplied: the steps that the factors are functions of, each with its functions."""
    found: dict[int, list[Chain]] = {}
    for index in step.sources:
        chain: Chain = ()
        while record[index].kind == "elementwise" or keeps_elements(record, record[index]):
            if record[index].kind == "elementwise":
                chain = (link_of(record[index]), *chain)
            index = record[index].sources[0]
        inner = {index: [chain]}
        if record[index].kind == "product" and not chain:
            inner = _factors(record, record[index])
        for root, chains in inner.items():
            found.setdefault(root, []).extend(chains)
    return found


def _product(factors: list[Passage], chain: Chain) -> Passage:
    """Of different signals, taken as independent: second moments multiply."""
    troubles = {factor.trouble for factor in factors if factor.trouble}
    if troubles - {BY_SHAPE}:  # weights from a softmax, as in attention
        return Passage(end="mix", moment=moment(chain, second_moment))
    size = math.prod(factor.moment for factor in factors)
    return Passage(
        words=" × ".join(factor.words or factor.end for factor in factors),
        moment=moment(chain, second_moment, math.sqrt(size)),
        keep=math.prod(factor.keep for factor in factors),
        dropout_runs=any(factor.dropout_runs for factor in factors),
        end="product",
        trouble=next(iter(troubles), ""),
    )


def _joined(record: Record, step: Step, branches: list[Passage]) -> Passage:
    """Side by side: mean squares average, by the branches' sizes where these are known."""
    shapes = [record[source].shape for source in step.sources]
    sizes = [1.0 if None in shapes else float(math.prod(shape or ())) for shape in shapes]
    squares = [size * branch.moment for size, branch in zip(sizes, branches, strict=True)]
    dropped = [
        square / branch.keep if branch.keep else math.inf
        for square, branch in zip(squares, branches, strict=True)
    ]
    words = dict.fromkeys(branch.words or branch.end for branch in branches)
    return Passage(
        words=f"{step.name} of {' and '.join(words)}",
        moment=sum(squares) / sum(sizes),
        keep=sum(squares) / sum(dropped) if sum(squares) else 1.0,
        dropout_runs=any(branch.dropout_runs for branch in branches),
        end="unknown" if any(branch.end == "unknown" for branch in branches) else "cat",
        trouble=next((branch.trouble for branch in branches if branch.trouble), ""),
    )
