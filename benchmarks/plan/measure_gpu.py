"""Measures steps of models on one GPU: their time, and the most memory that they took. Needs torch alone.

    python benchmarks/plan/measure_gpu.py --json steps.json --seconds 240
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils._pytree import tree_map

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.plan.models import LARGE

CASES: list[tuple[str, int, str, str, bool]] = [
    # model, rows, precision, checkpointing, compiled
    ("gpt2-124m", 16, "bf16-mixed", "none", False),
    ("gpt2-124m", 16, "bf16-mixed", "none", True),
    ("gpt2-124m", 16, "32-true", "none", False),
    ("gpt2-124m", 64, "bf16-mixed", "none", False),
    ("llama-1b", 2, "bf16-true", "none", False),
    ("llama-1b", 2, "bf16-true", "none", True),
    ("llama-1b", 2, "bf16-mixed", "full", False),
    ("llama-8b-4layers", 1, "bf16-true", "none", False),
    ("llama-8b-4layers", 1, "bf16-mixed", "none", False),
    ("llama-8b-4layers", 2, "bf16-true", "full", False),
    ("llama-8b-4layers", 1, "bf16-true", "none", True),
    ("gpt-1.3b", 4, "bf16-mixed", "none", False),
    ("gpt-1.3b", 8, "bf16-true", "full", False),
    ("gpt2-350m", 16, "bf16-mixed", "none", False),
    ("gpt2-350m", 16, "bf16-mixed", "full", False),
    ("gpt2-350m", 16, "16-mixed", "none", False),
    ("gpt2-dropout", 16, "bf16-mixed", "none", False),
    ("resnet-50", 128, "bf16-mixed", "none", False),
    ("resnet-50", 64, "32-true", "none", False),
    ("vit-large", 64, "bf16-mixed", "none", False),
    ("vit-large", 64, "bf16-true", "none", False),
    ("mixture-8x", 8, "bf16-mixed", "none", False),
    ("mixture-8x", 16, "bf16-true", "none", False),
    ("convolutions", 32, "bf16-mixed", "none", False),
    ("convolutions", 32, "32-true", "none", False),
    ("gpt2-124m", 4, "bf16-true", "none", False),
    ("gpt2-350m", 64, "bf16-mixed", "full", False),
    ("llama-1b", 4, "bf16-mixed", "none", False),
    ("vit-large", 256, "bf16-mixed", "full", False),
    ("gpt-1.3b", 4, "bf16-mixed", "none", True),
]


def measure(name: str, rows: int, precision: str, checkpointing: str, compiled: bool) -> dict[str, Any]:
    """One case, in steps of forward, backward and AdamW."""
    build, sample, loss_of = LARGE[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    low = {"bf16": torch.bfloat16, "16": torch.float16, "32": None}[precision.partition("-")[0]]
    with torch.device("cuda"):
        model = build()
    batch = tree_map(lambda x: x.cuda(), sample(rows))
    if precision.endswith("-true") and low is not None:
        model.to(low)
        batch = tree_map(lambda x: x.to(low) if x.is_floating_point() else x, batch)
    if checkpointing == "full":
        for part in model.modules():
            if isinstance(part, torch.nn.ModuleList):
                for layer in part:
                    own = layer.forward
                    layer.forward = lambda *args, own=own: checkpoint(own, *args, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters())
    called = torch.compile(model) if compiled else model
    mixed = torch.autocast("cuda", low) if precision.endswith("-mixed") else nullcontext()

    def step() -> None:
        with mixed:
            loss = loss_of(called, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    begin = time.monotonic()
    while len(times) < 12 and (len(times) < 4 or time.monotonic() - begin < 4):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_s": statistics.median(times),
        "spread": [min(times), max(times)],
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def main() -> None:
    """Measures the cases, as many as there is time for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    found: list[dict[str, Any]] = []
    end = time.monotonic() + args.seconds
    for case in CASES:
        if time.monotonic() > end:
            break
        start = time.monotonic()
        one: dict[str, Any] = dict(zip(("model", "rows", "precision", "checkpointing", "compiled"), case, strict=True))
        try:
            one |= measure(*case)
        except torch.OutOfMemoryError as error:
            one["error"] = str(error)[:200]
        found.append(one)
        gc.collect()
        torch.cuda.empty_cache()
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": found}
        args.json.write_text(json.dumps(facts, indent=1))
        print(round(time.monotonic() - start, 1), json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
