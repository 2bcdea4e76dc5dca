"""How much memory activation checkpointing saves: the peak of one training step of a transformer, and its seconds.

An encoder of 8 layers takes one step (forward and backward) plainly, with half and with all of its layers checkpointed,
with all of them but for their matrix products, and inside of `checkpoint_scope()`. `memory_pool_scope()` counts what
torch's operators hold beyond weights and input: after the forward pass (activations), and at most (peak), gradients
included; on a GPU it has the peak of its pool only. The steps are timed without counting; the sides take turns.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import Ratio, options, paired_ratio, report, take_turns
from fairlead_distributed import MemoryPool, SelectiveGradientCheckpointing, checkpoint_scope, memory_pool_scope

PLAIN, HALF, ALL, KEPT, SCOPE = "plain", "half", "all", "all_but_products", "scope"
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm")


def network(width: int, layers: int) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    block = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(*[block() for _ in range(layers)])


def side(kind: str, width: int, layers: int) -> tuple[nn.Module, Callable[[], AbstractContextManager[None]]]:
    """A model, and what surrounds its steps."""
    model = network(width, layers)
    if kind == HALF:
        SelectiveGradientCheckpointing(model, checkpoint_ratio=0.5)
    elif kind == ALL:
        SelectiveGradientCheckpointing(model, checkpoint_ratio=1.0)
    elif kind == KEPT:
        SelectiveGradientCheckpointing(model, checkpoint_ratio=1.0, save_ops=PRODUCTS)
    return model, checkpoint_scope if kind == SCOPE else contextlib.nullcontext


def main() -> None:
    given = options(__doc__, rounds=10)
    width, layers, batch, tokens = (32, 4, 2, 16) if given.quick else (128, 8, 8, 128)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(batch, tokens, width, device=device)
    models = {kind: side(kind, width, layers) for kind in (PLAIN, HALF, ALL, KEPT, SCOPE)}
    for model, _ in models.values():
        model.to(device)

    activations: dict[str, int] = {}

    def step(kind: str, pool: MemoryPool | None = None) -> None:
        model, around = models[kind]
        with around():
            loss = model(x).square().mean()
            if pool is not None:
                activations[kind] = pool.allocated
            loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    def timed(kind: str) -> float:
        began = time.perf_counter()
        step(kind)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    peaks: dict[str, int] = {}
    for kind in models:
        with memory_pool_scope(device) as pool:
            step(kind, pool)
        peaks[kind] = pool.peak
    seconds = take_turns({kind: partial(timed, kind) for kind in models}, given.rounds)
    ratios: dict[str, Ratio] = {}
    for kind in (HALF, ALL, KEPT, SCOPE):
        for what, counted in (("activations", activations), ("peak", peaks)):
            if counted[PLAIN]:
                share = counted[kind] / counted[PLAIN]  # counted, not timed: the same every time
                ratios[f"{what}_{kind}"] = Ratio(share, share, share)
        ratios[f"seconds_{kind}"] = paired_ratio(seconds[kind], seconds[PLAIN])
    sizes: dict[str, Any] = {"width": width, "layers": layers, "batch": batch, "tokens": tokens, "device": device}
    report("activation_memory", ratios, seconds, given, activation_bytes=activations, peak_bytes=peaks, **sizes)


if __name__ == "__main__":
    main()
