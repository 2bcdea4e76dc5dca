"""`fairlead bench gemm`: what this machine's device computes, on the terminal and in a calibration."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fairlead.cli.session import Session
from fairlead_diagnostics.bench.gemm import measure
from fairlead_diagnostics.bench.layouts import aligned
from fairlead_diagnostics.calibration import add_to_calibration, calibration_file


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Measures this machine's device, shows it, and writes it down."""
    file = calibration_file(arguments.calibration, session.cwd)
    found = measure(arguments.rounds)
    if arguments.json:
        session.print_json(found)
    else:
        for line in report(found):
            session.print(line)
    if file is not None:
        add_to_calibration(file, found)
    return 0


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines that a person reads; the single figures are in the calibration and under --json."""
    yield f"{found['device']}; {found['source']}"
    yield ""
    products = found["matmul"]
    lines: list[Sequence[str]] = [("matrix products", "shapes", "TFLOP/s: lowest", "median", "highest", "m x n x k")]
    for dtype in dict.fromkeys(row["dtype"] for row in products):
        own = sorted((row for row in products if row["dtype"] == dtype), key=lambda row: row["tflops"])
        middle = statistics.median(row["tflops"] for row in own)
        best = own[-1]
        rates = [f"{rate:.4g}" for rate in (own[0]["tflops"], middle, best["tflops"])]
        lines.append((dtype, str(len(own)), *rates, f"{best['m']} x {best['n']} x {best['k']}"))
    yield from aligned(lines)
    yield ""
    lines = [("attention", "length", "width of a head", "TFLOP/s: forward", "backward", "")]
    passes: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in found["attention"]:
        case = row["batch_heads"], row["length"], row["width"], row["causal"]
        passes.setdefault(case, {})[row["pass"]] = row["tflops"]
    for (heads, length, width, causal), by_pass in passes.items():
        kind = f"{'causal' if causal else 'full'}, {heads} heads"
        lines.append((kind, f"{length}", f"{width}", f"{by_pass['forward']:.4g}", f"{by_pass['backward']:.4g}", ""))
    yield from aligned(lines)
    yield ""
    lines = [("memory", "read and written", "GB/s", "", "", "")]
    lines += [(row["op"], f"{row['bytes']:,} bytes", f"{row['gb_s']:.4g}", "", "", "") for row in found["memory"]]
    yield from aligned(lines)
    yield ""
    each = ", ".join(f"{row['op']} {row['us']:.3g}" for row in found["launch"])
    yield f"the host launches an operator in {found['launch_us']:.3g} us ({each})"
