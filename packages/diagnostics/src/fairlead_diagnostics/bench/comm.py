"""`fairlead bench comm`: how fast the ranks of this allocation communicate, and which of them are slow."""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairlead.cli.session import Session
from fairlead.detect import choose_environment
from fairlead.errors import ConfigError, FairleadError, RunFailedError
from fairlead_diagnostics.bench.bandwidth import BUS_FACTORS, gigabytes, parse_size, slow_links
from fairlead_diagnostics.bench.layouts import aligned
from fairlead_diagnostics.bench.plot import Line, plot, plot_file
from fairlead_diagnostics.calibration import add_to_calibration, calibration_file
from fairlead_runs.describe import counted


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Measures between the ranks that a launcher has started, or starts some here; rank 0 shows it."""
    names = arguments.collectives.split(",") if arguments.collectives else list(BUS_FACTORS)
    unknown = sorted(set(names) - set(BUS_FACTORS))
    if unknown:
        raise ConfigError(
            f"there is no collective {unknown[0]!r}",
            where="--collectives",
            fix=f"name some of {', '.join(BUS_FACTORS)}",
        )
    drawn = plot_file(arguments.plot, session.cwd) if arguments.plot is not None else None
    calibration = calibration_file(arguments.calibration, session.cwd)
    sizes = sorted({parse_size(text) for text in arguments.sizes.split(",")})
    settings = {
        "names": names,
        "sizes": sizes,
        "rounds": arguments.rounds,
        "pair_bytes": sizes[-1] if arguments.pairs else None,
        "backend": arguments.backend,
    }
    record = _measured(settings, arguments, session)
    if record is None:
        return 0
    slow = slow_links(record["pairs"])
    if arguments.json:
        found = [{"nodes": one.nodes, "bytes_per_s": one.bytes_per_s, "below_median": one.below} for one in slow]
        session.print_json({**record, "slow": found})
    else:
        for line in (*report(record), *map(str, slow)):
            session.print(line)
    if drawn is not None:
        _plot(record, drawn)
    if calibration is not None:
        add_to_calibration(calibration, _calibration(record))
    return 0


def _measured(settings: Mapping[str, Any], arguments: argparse.Namespace, session: Session) -> dict[str, Any] | None:
    chosen = choose_environment("auto", session.environ, session.plugins, starting=True)
    size = chosen.topology.world_size if chosen.topology is not None and chosen.topology.launched else None
    if size is not None and size.value > 1:
        from fairlead_diagnostics.bench.collectives import measure

        return measure(**settings, environ=session.environ)
    from fairlead_launch.launcher import DistributedLauncher, processes_per_node
    from fairlead_launch.settings import LaunchConfig

    count: int = arguments.processes or max(2, processes_per_node("auto", session.environ, session.plugins)[0])
    if count < 2:
        raise ConfigError("one process has no peer to communicate with", where="--processes 1", fix="--processes 2")
    session.warn(f"{count} processes of this machine; between nodes: srun fairlead bench comm, or torchrun")
    with tempfile.TemporaryDirectory(prefix="fairlead-comm-") as folder:
        out = Path(folder, "record.json")
        config = LaunchConfig(
            nproc_per_node=count, module=True, max_restarts=0, tail="none", log_dir=folder, start_method="spawn"
        )
        launcher = DistributedLauncher(config, environ=session.environ, plugins=session.plugins)
        words = json.dumps({"measure": dict(settings), "out": str(out)})
        try:
            code = launcher.run("fairlead_diagnostics.bench.collectives", words)
        except FairleadError as error:
            raise RunFailedError("the ranks could not communicate", why=error.why or error.what) from error
        if code or not out.exists():
            raise RunFailedError("the ranks have measured nothing", why=f"exit code {code}")
        record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return record


def report(record: Mapping[str, Any]) -> Iterator[str]:
    """The lines that a person reads."""
    nodes = counted(len(set(record["hosts"])), "node")
    yield f"{counted(record['ranks'], 'rank')} on {nodes}, {record['backend']}, {record['device']}"
    yield "bus bandwidth as in nccl-tests: comparable with the hardware's, whatever the number of ranks"
    yield ""
    lines = [("collective", "size", "seconds", "lowest, highest", "algorithm GB/s", "bus GB/s")]
    failed = []
    for row in record["collectives"]:
        if "failed" in row:
            failed.append(f"{row['collective']}: {row['failed']}")
            continue
        taken = row["seconds"]
        spread = f"{min(taken):.3g}, {max(taken):.3g}"
        rates = (gigabytes(row["algorithm_bytes_per_s"]), gigabytes(row["bus_bytes_per_s"]))
        lines.append((row["collective"], _size(row["bytes"]), f"{statistics.median(taken):.3g}", spread, *rates))
    yield from aligned(lines)
    yield from dict.fromkeys(failed)
    if record["pairs"]:
        yield ""
        lines = [("pair", "", "size", "seconds", "GB/s each way", "")]
        for pair in record["pairs"]:
            row = (*pair["nodes"], _size(pair["bytes"]), f"{pair['seconds']:.3g}", gigabytes(pair["bytes_per_s"]), "")
            lines.append(row)
        yield from aligned(lines)


def _size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= 0.99 * unit:  # a multiple of the ranks may be a few bytes less
            return f"{count / unit:.3g} {name}"
    return f"{count} B"


def _calibration(record: Mapping[str, Any]) -> dict[str, Any]:
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


def _plot(record: Mapping[str, Any], file: Path) -> None:
    lines: dict[str, Line] = {}
    for row in record["collectives"]:
        if "failed" not in row:
            line = lines.setdefault(row["collective"], Line(row["collective"], [], []))
            line.x.append(row["bytes"])
            line.y.append(row["bus_bytes_per_s"] / 1e9)
    title = f"{counted(record['ranks'], 'rank')}, {record['backend']}"
    plot(file, list(lines.values()), title=title, x="bytes", y="bus bandwidth in GB/s", log=True)
