"""`fairlead bench gemm`, and the calibration file that it and `bench comm` write for `fairlead plan --calibration`."""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fairlead.cli.session import Session
from fairlead.errors import ConfigError, RunDirectoryError
from fairlead_diagnostics.bench.gemm import measure
from fairlead_diagnostics.bench.layouts import aligned
from fairlead_runs.commit import atomic_write
from fairlead_runs.device_models import find_device

_KEYS: Final = {"communication": ("op", "ranks", "nodes", "bytes")}
"""By what the rows of a part are told apart, where measurements add up; the other parts are replaced."""


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


def calibration_file(given: str | None, cwd: Path) -> Path | None:
    """Where the figures go, looked at before anything is measured; None: nowhere."""
    if given is None:
        return None
    file = cwd / given
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent}", where="--calibration", fix="make it, or name another")
    if file.exists():
        _read(file)
    return file


def add_to_calibration(file: Path, found: Mapping[str, Any]) -> None:
    """Puts what was measured into a calibration; of other parts, ranks and sizes it keeps what it has."""
    device = device_name(str(found["device"]))
    before = _read(file) if file.exists() else {}
    if before.get("device", device) != device:
        raise ConfigError(
            f"{file.name} is a calibration of {before['device']}, and this device is {device}",
            where="--calibration",
            fix="name another file: each kind of device has its own",
        )
    merged = {**before, **found, "device": device}
    if before:
        merged["source"] = "; ".join(dict.fromkeys([*str(before.get("source", "")).split("; "), found["source"]]))
    for part, keys in _KEYS.items():
        rows = {tuple(row[key] for key in keys): row for row in (*before.get(part, ()), *found.get(part, ()))}
        merged[part] = list(rows.values())
    atomic_write(file, (json.dumps(merged, indent=1) + "\n").encode(), error=RunDirectoryError)


def device_name(name: str) -> str:
    """As a job file's `resources.device` has it, `h100`; the driver's name if it is not known."""
    model = find_device(name)
    return model.name if model is not None else name


def communication(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a calibration that `bench comm` has measured; latency is the time of the smallest message."""
    rows = [row for row in record["collectives"] if "failed" not in row]
    nodes = len(set(record["hosts"]))
    found = []
    for row in rows:
        smallest = min((one for one in rows if one["collective"] == row["collective"]), key=lambda one: one["bytes"])
        found.append(
            {
                "op": row["collective"],
                "ranks": record["ranks"],
                "nodes": nodes,
                "bytes": row["bytes"],
                "bus_gb_s": row["bus_bytes_per_s"] / 1e9,
                "latency_us": statistics.median(smallest["seconds"]) * 1e6,
            }
        )
    return {
        "device": record["device"],
        "source": f"fairlead bench comm, torch {record['torch']}, {record['backend']}, {record['ranks']} ranks",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "communication": found,
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} is no calibration", where="--calibration", why=str(error), fix="name another file"
        ) from error
    if not isinstance(found, dict) or not {"device", "source"} <= found.keys():
        raise ConfigError(
            f"{file} is no calibration",
            where="--calibration",
            why="it has no device and source, as `fairlead bench gemm --calibration` writes them",
            fix="name another file",
        )
    return found


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
