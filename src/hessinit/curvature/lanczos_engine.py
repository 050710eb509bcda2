"""The Lanczos engine: Gauss-Newton products by tangents through the graph, a run per block."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hessinit.curvature import lanczos, operators
from hessinit.curvature.engine import Engine, Extremes, LanczosSettings
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.krylov import Operator
from hessinit.curvature.loss_hessian import LossFactor
from hessinit.curvature.probes import ProbeStream


@dataclass(frozen=True)
class LanczosEngineSizes:
    """Sizes up to which layers are searched together, and products recorded."""

    searched_together: int = 2**20  # weights whose Lanczos vectors are kept at a time, at least
    recorded: int = 2**23  # numbers per operation: of fewer, a GPU starts kernels longer than runs


SIZES = LanczosEngineSizes()


class LanczosEngine(Engine):
    """One Lanczos run for each block.

    `rank` bounds that of a semidefinite curvature; it is None if the curvature is indefinite. If
    definiteness is unknown, `ends="norm"`: only the end of larger size must converge.
    """

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
        settings: LanczosSettings,
        reason: str,
        rank: int | None,
        ends: lanczos.Which = "both",
        factors: Sequence[LossFactor] = (),
    ) -> None:
        self._evaluations = evaluations
        self.settings = settings
        self.reason = reason
        self.rank = rank
        self.ends = ends
        self._factors = factors

    def operator(self, names: Sequence[str]) -> operators.WeightOperator:
        return operators.GaussNewtonOperator(self._evaluations, names)

    @cached_property
    def _recorder(self) -> operators.KernelRecorder | None:
        """For kernels so small that starting them takes longer than running them."""
        if self._evaluations[0].problem.device.type != "cuda":
            return None
        numbers = max(evaluation.numbers_per_node for evaluation in self._evaluations)
        return operators.KernelRecorder(self._evaluations) if numbers < SIZES.recorded else None

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._recorder is not None:
                stack.enter_context(self._recorder.stream())
            yield

    def _block(self, names: Sequence[str]) -> Operator:
        operator = self.operator(names)
        recorder = self._recorder
        block = operator if recorder is None else operators.RecordedOperator(operator, recorder)
        return self.settings.watched(block, names)

    def extremes(self, names: Sequence[str]) -> Extremes:
        with self._stream():
            return self._search(self.rank, [self._block(names)], [self._start(names)])[0]

    def _start(self, names: Sequence[str]) -> lanczos.Start | None:
        """`Jᵀ S w` of random numbers w, where `S Sᵀ` is the loss's Hessian by the output."""
        vectors, squares = self._starts
        square = sum(squares.get(name, 0.0) for name in names)
        if not 0 < square < math.inf:
            return None
        return lanczos.Start(operators.join([vectors[name] for name in names]), square)

    @cached_property
    def _starts(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Each leaf's start vector and the square of its length; empty where `S` is unknown."""
        names = list(self._evaluations[0].leaves)
        sums = dict[str, Tensor]()
        for number, evaluation in enumerate(self._evaluations):
            output = evaluation.output
            root = self._factors[number] if self._factors else evaluation.softmax
            if root is None:
                return {}, {}
            seed = self.settings.seed + number
            stream = ProbeStream(
                output.numel(), seed=seed, dtype=output.dtype, device=output.device
            )
            pulled = evaluation.pull(names, root.sample(stream.draw().view_as(output)))
            for name, gradient in zip(names, pulled, strict=True):
                part = gradient * math.sqrt(evaluation.weight)
                sums[name] = sums[name] + part if name in sums else part
        squares = torch.stack(
            [torch.linalg.vector_norm(start).double().square() for start in sums.values()]
        )
        return sums, dict(zip(names, squares.tolist(), strict=True))

    def extremes_of_each(self, names: Sequence[str]) -> dict[str, Extremes]:
        """In groups, whose Lanczos vectors take less memory than those of the largest layer."""
        sizes = {name: self._evaluations[0].leaves[name].numel() for name in names}
        extremes: dict[str, Extremes] = {}
        with self._stream():
            for group in _groups(names, sizes):
                blocks = [self._block([name]) for name in group]
                starts = [self._start([name]) for name in group]
                extremes |= zip(group, self._search(self.rank, blocks, starts), strict=True)
                self.settings.report_done(*group)
        return extremes


def _groups(names: Sequence[str], sizes: Mapping[str, int]) -> list[list[str]]:
    groups = list[list[str]]()
    room = 0
    for name in names:
        if sizes[name] > room:
            groups.append([])
            room = max(max(sizes.values()) // 4, SIZES.searched_together)
        groups[-1].append(name)
        room -= sizes[name]
    return groups
