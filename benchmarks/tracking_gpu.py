"""What following a language model costs on a GPU: GPT-2 (124M, from its configuration), AdamW, `track`.

    python benchmarks/tracking_gpu.py [--steps 4000] [--max-overhead 0.05]

Prints the seconds of a training step, of a measurement, and the share of the time that measuring took.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hessinit

EXAMPLES, LENGTH = 8, 512
MEASURED = 2  # examples that the curvature is measured on


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--max-overhead", type=float, default=0.05)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    # Words of a Zipf distribution: there is something to learn, and nothing to download.
    chances = 1 / torch.arange(1, 50_258, device=device)
    tokens = torch.multinomial(chances.expand(64 * EXAMPLES, -1), LENGTH, replacement=True)

    def step(number: int) -> float:
        rows = tokens[(number * EXAMPLES) % len(tokens) :][:EXAMPLES]
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    for number in range(10):
        step(number)
    started = time.perf_counter()
    for number in range(30):
        step(number)
    alone = (time.perf_counter() - started) / 30
    problem = hessinit.logits_problem(model, {"input_ids": tokens[:MEASURED]})
    started = time.perf_counter()
    tracker = hessinit.track(
        problem, optimizer=optimizer, every=10, max_overhead=options.max_overhead, path=None
    )
    with tracker:
        for number in range(options.steps):
            tracker.step(step(number))
    seconds = time.perf_counter() - started
    tracking = tracker.tracking
    costs = [point.measuring_seconds for point in tracking.points]
    later = sum(costs[1:]) / len(costs[1:]) if costs[1:] else costs[0]
    where = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    print(tracking)
    print(f"\ntorch {torch.__version__}, {where}; a training step takes {1000 * alone:.0f} ms.")
    print(f"A measurement on {MEASURED} × {LENGTH} tokens: {costs[0]:.2f} s at first, {later:.2f} s later.")
    print(
        f"{len(costs)} of them in {options.steps} steps and {seconds:.0f} s: {100 * tracker.overhead:.1f} % "
        f"of the time, max_overhead={options.max_overhead:g}."
    )


if __name__ == "__main__":
    main()
