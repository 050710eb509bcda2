"""Skip-gram on Wikipedia text: final loss from several initializations, over learning rates.

    HESSINIT_DATA=folder python benchmarks/skip_gram.py    5 minutes on one core; results/skip_gram.txt

3,000 words, vectors of 64 numbers, 400 steps of 256 pairs, the mean loss of the last 40; one seed. "softmax"
scores every word, "negative" a near word and five others. word2vec draws centre vectors from ±1/128 and sets
the others to 0.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path[:0] = [str(Path(__file__).parent)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from arena.data import text_of  # noqa: E402
from hessinit import apply_scheme_, initialize_  # noqa: E402
from hessinit_paper.word2vec import SkipGram  # noqa: E402

VOCABULARY, DIMENSION, PAIRS, STEPS = 3000, 64, 256, 400
RATES = {"sgd": (0.1, 1.0, 10.0), "adam": (1e-3, 1e-2)}
STARTS = ("default", "word2vec", "glorot", "lsuv", "hessinit", "hessinit + race")


def draw(text: Tensor, negative: bool, source: torch.Generator) -> tuple[Tensor, Tensor]:
    places = torch.randint(5, len(text) - 5, (PAIRS,), generator=source)
    signs = 1 - 2 * torch.randint(0, 2, (PAIRS,), generator=source)
    centre, near = text[places], text[places + signs * torch.randint(1, 4, (PAIRS,), generator=source)]
    if not negative:
        return centre, near
    noise = text[torch.randint(0, len(text), (PAIRS, 5), generator=source)]
    targets = torch.zeros(PAIRS, 6)
    targets[:, 0] = 1
    return torch.cat([centre[:, None], near[:, None], noise], 1), targets


def final_loss(text: Tensor, negative: bool, optimizer: str, lr: float, start: str) -> float:
    torch.manual_seed(0)
    model = SkipGram(VOCABULARY, DIMENSION, negative)
    for module in (model.centre, model.context):
        module.reset_parameters()
    loss = F.binary_cross_entropy_with_logits if negative else F.cross_entropy
    source = torch.Generator().manual_seed(1)
    batch = draw(text, negative, source)
    if start == "word2vec":
        with torch.no_grad():
            model.centre.weight.uniform_(-0.5 / DIMENSION, 0.5 / DIMENSION)
            model.context.weight.zero_()
    elif start.startswith("hessinit"):
        batches = [draw(text, negative, torch.Generator().manual_seed(100 + step)) for step in range(60)]
        data = batches if "race" in start else None
        initialize_(model, loss, batch, lr=lr, optimizer=optimizer, data=data, progress=False)
    elif start != "default":
        apply_scheme_(model, start, sample=batch[0])
    make = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    stepper, losses = make(model.parameters(), lr), []
    for _ in range(STEPS):
        words, targets = draw(text, negative, source)
        value = loss(model(words), targets)
        stepper.zero_grad()
        value.backward()
        stepper.step()
        losses.append(value.item())
    return sum(losses[-40:]) / 40


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    words = re.findall(r"[a-z]+", text_of(8_000_000).lower())
    places = {word: place for place, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1))}
    text = torch.tensor([places.get(word, VOCABULARY - 1) for word in words])
    print(f"{'':22s}" + "".join(f"{start:>17s}" for start in STARTS))
    for negative in (False, True):
        for optimizer, rates in RATES.items():
            for lr in rates:
                losses = [final_loss(text, negative, optimizer, lr, start) for start in STARTS]
                name = f"{'negative' if negative else 'softmax'} {optimizer} {lr:g}"
                print(f"{name:22s}" + "".join(f"{loss:17.3f}" for loss in losses), flush=True)
    print(f"torch {torch.__version__}, one thread; {len(words):,} words")


if __name__ == "__main__":
    main()
