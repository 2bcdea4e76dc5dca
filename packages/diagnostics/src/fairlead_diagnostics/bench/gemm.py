"""How fast this machine's device computes: matrix products, attention, memory, and the host's launches.

Needs nothing but torch, so that it runs alone where nothing else is installed:

    python gemm.py --json figures.json

Each case is timed in each round, the cases one after another (a device that gets hot or slow is so for all of them),
and its median counts. Operands are random numbers, since a device computes zeros at a lower power and a higher clock;
they are more than a cache holds where the case is smaller, as what a training step reads has mostly left the cache.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

Call = Callable[[], object]

_TIMING_S: Final = 0.008
"""How long one timing lasts on a device, about; on a CPU at least one call."""
_MOST_CALLS: Final = 60  # queued behind one another: a stream takes 1,024 launches before the host waits
_COLD_BYTES: Final = 2**28
"""Over so many bytes a small case goes round: several times the cache of an H200."""
_MOST_COPIES: Final = 16
_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "tf32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
        part: The list of the result that it belongs to: matmul, attention, memory.
        row: What it is, as the result has it.
        work: FLOPs or bytes of one call.
        bytes: What its operands take, for how many sets of them are made.
        make: Makes the operands once more, and returns the call.
    """

    part: str
    row: dict[str, Any]
    work: float
    bytes: float
    make: Callable[[], Call]


def measure(rounds: int = 5, device: torch.device | None = None) -> dict[str, Any]:
    """Times everything on one device, by default this machine's accelerator, or its CPU.

    Returns:
        device, source, date; matmul: rows of dtype, m, n, k, layout (`nt` as in a linear layer's forward pass, `nn`
        for the gradient of its input, `tn` for that of its weight), tflops; attention: rows of dtype, batch_heads,
        length, width, causal, pass, tflops, where a causal one counts half of the pairs and a backward pass 2.5 times
        the forward one; memory: rows of op, bytes (read and written), gb_s; launch: rows of op, us; launch_us, their
        median; seconds of each row's call.
    """
    device = device or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    most = _memory_bytes(device) / 8
    cases = [case for case in (*_products(device), *_attentions(device), *_memory(device)) if case.bytes <= most]
    seconds: list[list[float]] = [[] for _ in cases]
    launches: dict[str, list[float]] = {}
    for _ in range(rounds):
        for case, found in zip(cases, seconds, strict=True):
            found.append(_timed(case, device))
        for name, own in _launches(device):
            launches.setdefault(name, []).append(own)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "source": f"fairlead bench gemm, torch {torch.__version__}, CUDA {torch.version.cuda}, {rounds} rounds",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "matmul": [],
        "attention": [],
        "memory": [],
    }
    for case, found in zip(cases, seconds, strict=True):
        middle = statistics.median(found)
        rate = {"gb_s": case.work / middle / 1e9} if case.part == "memory" else {"tflops": case.work / middle / 1e12}
        result[case.part].append({**case.row, **rate, "seconds": middle, "spread": (max(found) - min(found)) / middle})
    result["launch"] = [{"op": name, "us": statistics.median(own) * 1e6} for name, own in launches.items()]
    result["launch_us"] = statistics.median(row["us"] for row in result["launch"])
    return result


def _memory_bytes(device: torch.device) -> float:
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 2.0**32


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _timed(case: Case, device: torch.device) -> float:
    """Seconds of one call; on a CUDA device by its own clock, without the host's launches."""
    copies = 1 if device.type == "cpu" else max(1, min(_MOST_COPIES, math.ceil(_COLD_BYTES / case.bytes)))
    tf32 = case.row.get("dtype") == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    calls = [case.make() for _ in range(copies)]
    for call in calls:  # the first one compiles, picks an algorithm, fills workspaces
        call()
    _synchronize(device)
    began = time.perf_counter()
    calls[0]()
    _synchronize(device)
    once = time.perf_counter() - began
    count = max(1 if device.type == "cpu" else 3, min(_MOST_CALLS, round(_TIMING_S / once)))
    queue = list(itertools.islice(itertools.cycle(calls), count))
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # 0.02 ms a product, 0.1 ms what autograd or an optimizer adds: the host queues all before the first one runs.
        torch.cuda._sleep(count * (40_000 if case.part == "matmul" else 200_000))  # type: ignore[no-untyped-call]
        start.record()
        for call in queue:
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count
    began = time.perf_counter()
    for call in queue:
        call()
    _synchronize(device)
    return (time.perf_counter() - began) / count


def _products(device: torch.device) -> Iterator[Case]:
    """Those of transformers' layers: so many tokens by the widths of 100M to 400B models, full and split."""
    if device.type == "cpu":
        for dtype, size in itertools.product(("float32", "bfloat16"), (64, 128, 256, 512, 1024)):
            yield _product(dtype, size, size, size, "nt", device)
        yield from (_product("float32", 512, 1024, 256, layout, device) for layout in ("nt", "nn", "tn"))
        return
    shapes = [(m, n, k) for m in (256, 1024, 4096, 16384) for n, k in _WIDTHS]
    shapes += [(m, n, k) for m in (4096, 16384) for n, k in ((50304, 1024), (32000, 4096), (128256, 8192))]
    shapes += [(n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192, 12288)]
    yield from (_product("bfloat16", *shape, "nt", device) for shape in shapes)
    for (n, k), layout in itertools.product(_WIDTHS, ("nn", "tn")):
        yield _product("bfloat16", *((4096, k, n) if layout == "nn" else (n, k, 4096)), layout, device)
    few = [(m, n, k) for m in (1024, 8192) for n, k in ((1024, 1024), (4096, 4096), (14336, 4096), (8192, 8192))]
    some = [*few, (1024, 1024, 1024), (4096, 4096, 4096), (8192, 28672, 8192)]
    others = ["float16", "tf32", "float32"]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        others.append("float8_e4m3fn")
    for dtype in others:
        sizes = few if dtype == "float32" else some
        yield from (_product(dtype, *shape, "nt", device) for shape in sizes)


_WIDTHS: Final = (
    (768, 768),
    (3072, 768),
    (1024, 1024),
    (4096, 1024),
    (1024, 4096),
    (2048, 2048),
    (8192, 2048),
    (4096, 4096),
    (1536, 4096),
    (14336, 4096),
    (4096, 14336),
    (8192, 8192),
    (1024, 8192),
    (8192, 3584),
    (28672, 8192),
)
"""Of weights: outputs, inputs."""


def _product(dtype: str, m: int, n: int, k: int, layout: str, device: torch.device) -> Case:
    kind = _DTYPES[dtype]
    size = torch.empty(0, dtype=kind).element_size()

    def make() -> Call:
        def operand(rows: int, columns: int) -> torch.Tensor:
            wide = torch.randn(rows, columns, device=device, dtype=torch.bfloat16 if size == 1 else kind)
            return wide.to(kind)

        # As torch's linear layer lies in memory: x (tokens, in), weight (out, in).
        a = operand(k, m).t() if layout == "tn" else operand(m, k)
        b = operand(n, k).t() if layout == "nt" else operand(k, n)
        if kind == torch.float8_e4m3fn:
            one = torch.ones((), device=device)
            return lambda: torch._scaled_mm(
                a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        return lambda: torch.mm(a, b)

    row = {"dtype": dtype, "m": m, "n": n, "k": k, "layout": layout}
    return Case("matmul", row, 2.0 * m * n * k, size * (m * k + n * k) + max(size, 2) * m * n, make)


def _attentions(device: torch.device) -> Iterator[Case]:
    if device.type == "cpu":
        sizes = [(8, length, 64, True) for length in (64, 256, 512)]
        dtype = "float32"
    else:
        lengths = (512, 1024, 2048, 4096, 8192, 16384)
        sizes = [(max(16, 2**18 // length), length, width, True) for length in lengths for width in (64, 128)]
        sizes += [(64, length, 128, False) for length in (1024, 4096)]
        sizes += [(16, length, 128, True) for length in (1024, 4096)]
        dtype = "bfloat16"
    for (heads, length, width, causal), direction in itertools.product(sizes, ("forward", "backward")):
        yield _attention(dtype, heads, length, width, causal, direction, device)


def _attention(
    dtype: str, heads: int, length: int, width: int, causal: bool, direction: str, device: torch.device
) -> Case:
    def make() -> Call:
        def operand() -> torch.Tensor:
            return torch.randn(1, heads, length, width, device=device, dtype=_DTYPES[dtype])

        q, k, v, above = (operand() for _ in range(4))
        if direction == "forward":
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return lambda: torch.autograd.grad(out, inputs, above, retain_graph=True)

    flops = 4.0 * heads * length**2 * width * (0.5 if causal else 1) * (1 if direction == "forward" else 2.5)
    row = {"dtype": dtype, "batch_heads": heads, "length": length, "width": width, "causal": causal, "pass": direction}
    return Case("attention", row, flops, 8 * heads * length * width * _DTYPES[dtype].itemsize, make)


def _memory(device: torch.device) -> Iterator[Case]:
    """By the bytes that must be read and written: copies and sums by size, and what a training step is made of."""
    least, most = (16, 26) if device.type == "cpu" else (16, 32)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for power in range(least, most + 1, 2):
        for op, operands in (("copy", 2), ("add", 3)):
            yield _pass(op, 2**power // operands // dtype.itemsize, dtype, device)
    width, rows = (256, 2048) if device.type == "cpu" else (4096, 8192)
    for op in ("gelu", "cast", "layer_norm", "layer_norm_backward", "rms_norm", "softmax", "adamw"):
        yield _pass(op, rows * width, dtype, device, width)


def _pass(op: str, count: int, dtype: torch.dtype, device: torch.device, width: int = 1) -> Case:
    size = dtype.itemsize
    per_element = {"copy": 2 * size, "add": 3 * size, "cast": size + 4, "layer_norm_backward": 3 * size, "adamw": 28}
    work = count * per_element.get(op, 2 * size)

    def make() -> Call:
        def operand(kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(count // width, width, device=device, dtype=kind)

        x = operand()
        if op == "copy":
            out = torch.empty_like(x)
            return lambda: out.copy_(x)
        if op == "add":
            y, out = operand(), torch.empty_like(x)
            return lambda: torch.add(x, y, out=out)
        if op == "adamw":  # float32: reads gradient, weight and two moments, writes three of them
            weight = torch.nn.Parameter(operand(torch.float32))
            weight.grad = operand(torch.float32)
            return torch.optim.AdamW([weight], fused=True).step
        if op == "layer_norm_backward":
            out = F.layer_norm(x.requires_grad_(), (width,))
            above = operand()
            return lambda: torch.autograd.grad(out, x, above, retain_graph=True)
        simple: dict[str, Call] = {
            "gelu": lambda: F.gelu(x),
            "cast": lambda: x.to(torch.float32 if dtype != torch.float32 else torch.float64),
            "layer_norm": lambda: F.layer_norm(x, (width,)),
            "rms_norm": lambda: F.rms_norm(x, (width,)),
            "softmax": lambda: F.softmax(x, -1),
        }
        return simple[op]

    if op == "cast" and dtype == torch.float32:
        work = count * 12
    return Case("memory", {"op": op, "bytes": int(work)}, work, work, make)


def _launches(device: torch.device) -> Iterator[tuple[str, float]]:
    """Host seconds of one operator on tensors so small that only the launch takes time; on a CPU with the work."""
    x = torch.randn(16, 16, device=device)
    weight = torch.randn(16, 16, device=device, requires_grad=True)
    count = 100

    def host(call: Call, operators: int) -> float:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # the device is busy: the host waits for nothing
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) / operators

    def plain() -> None:
        for _ in range(count):
            x + x

    def forward() -> torch.Tensor:
        y = x
        for _ in range(count // 2):
            y = F.gelu(y @ weight)
        return y

    yield "add", host(plain, count)
    yield "forward", host(forward, count)
    ends = iter([forward().sum() for _ in range(2)])
    yield "backward", host(lambda: torch.autograd.grad(next(ends), weight), 2 * count)  # two products, a sum, a gelu


def main(words: Sequence[str] | None = None) -> None:
    """Writes the figures into a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", required=True, help="where the figures go")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="how often to time each (default: 5)")
    given = parser.parse_args(words)
    began = time.perf_counter()
    result = measure(given.rounds)
    Path(given.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{result['device']}: {time.perf_counter() - began:.0f} s, {given.json}")


if __name__ == "__main__":
    main()
