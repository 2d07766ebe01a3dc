"""Time of a training step of each vision transformer in three precisions.

    OMP_NUM_THREADS=1 python benchmarks/attention_step.py

The precisions are single precision, torch's bf16 autocast, and bf16 autocast with `fast_attention`. With
`precision="bf16-mixed"`, the models of this library use `fast_attention`. A step is forward, backward and AdamW on a
batch of 32 random images of 32 x 32. The precisions alternate in one process. The time is processor time.
"""

import argparse
import statistics
import time
from contextlib import nullcontext
from unittest import mock

import torch
import torch.nn.functional as F

from lightning_fcl.models import LVT, create_vit, vit


def step(model, optimizer, x, y, way):
    """Run a training step, and return the processor time in seconds.

    ``way`` is "fp32", "bf16", or "ours" for bf16 with `fast_attention`.
    """
    began = time.process_time()
    rule = mock.patch.object(vit, "fast_attention", lambda x: nullcontext()) if way == "bf16" else nullcontext()
    with rule, torch.autocast("cpu", torch.bfloat16, enabled=way != "fp32"):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - began


def main():
    """Measure each network, and print a table with one row per network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["vit", "deit", "cait", "pit", "pvt", "levit", "swin", "cvt", "t2t", "LVT"]
    parser.add_argument("--networks", nargs="+", default=names)
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.randn(32, 3, 32, 32), torch.randint(100, (32,))
    for name in options.networks:
        model = LVT() if name == "LVT" else create_vit(name)
        optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
        turns = [
            {way: step(model, optimizer, x, y, way) for way in ("fp32", "bf16", "ours")}
            for _ in range(options.repeats + 1)
        ][1:]
        cells = [f"{1000 * statistics.median(turn[way] for turn in turns):.0f} ms" for way in turns[0]]
        for way in ("fp32", "bf16"):
            ratios = sorted(turn["ours"] / turn[way] for turn in turns)
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
