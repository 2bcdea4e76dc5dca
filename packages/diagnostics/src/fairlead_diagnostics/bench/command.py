"""The command `bench`: its arguments, and which module runs each subcommand."""

from __future__ import annotations

import argparse
import pkgutil
from typing import TYPE_CHECKING, Final

from fairlead.cli.job import job_arguments
from fairlead.engines import LIGHTNING
from fairlead.errors import ConfigError
from fairlead.plugin_classes import CommandPlugin

if TYPE_CHECKING:
    from fairlead.cli.session import Session

bench = CommandPlugin(
    "bench",
    "measure communication, the device, scaling, and which settings are fastest for your job",
    arguments="fairlead_diagnostics.bench.command:bench_arguments",
    runtime="fairlead_diagnostics.bench.command:run_bench",
    engines=(*LIGHTNING, "fairlead-lightning"),
    extra="lightning",
    example=("threads", "no-such.yaml"),
)

_RUNTIMES: Final = {
    "threads": "threads:run",
    "scaling": "scaling:run",
    "comm": "comm:run",
    "gemm": "device:run",
}
"""The module and function of each subcommand."""


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead bench`."""
    actions = parser.add_subparsers(
        dest="action", metavar="comm|gemm|scaling|threads", required=True, help="what to measure"
    )

    def action(name: str, text: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.add_argument("--json", action="store_true", help="print one JSON document")
        return added

    _comm(action("comm", "time each collective between the ranks of this allocation, or of this machine"))
    gemm = action("gemm", "time matrix products, attention, memory and launches on this machine's device")
    gemm.add_argument("--rounds", metavar="N", type=_count, default=5, help="how often to time each (default: 5)")
    _calibration(gemm)
    threads = action("threads", "compare one process on all CPUs with several on a share each, and advise which to use")
    scaling = action("scaling", "train your job with several numbers of workers: speed-up, efficiency, communication")
    threads.add_argument(
        "--processes",
        metavar="N,N",
        type=_counts,
        help="numbers of processes to try (default: powers of two and the number of NUMA nodes and sockets, up to the "
        "CPUs)",
    )
    _trials(threads, rounds=5)
    _trials(scaling, rounds=3)
    scaling.add_argument(
        "--workers", metavar="N,N", type=_counts, default=(1, 2, 4, 8), help="their numbers (default: 1,2,4,8)"
    )
    scaling.add_argument(
        "--at-least",
        metavar="E",
        type=float,
        help="exit with 1 if the largest number of workers is less efficient: 0.85",
    )
    scaling.add_argument(
        "--launcher",
        metavar="COMMAND",
        help="start the ranks by this command instead of processes of this machine, as 'srun -n {workers}'",
    )
    scaling.add_argument(
        "--recovery", action="store_true", help="also kill a rank, and time how long the restart takes to the next step"
    )
    _plot(scaling)


def _comm(comm: argparse.ArgumentParser) -> None:
    comm.add_argument(
        "--processes",
        metavar="N",
        type=_count,
        help="without a launcher: ranks to start here (default: the GPUs, or 2)",
    )
    sizes = "1KiB,64KiB,1MiB,16MiB,64MiB"
    comm.add_argument(
        "--sizes", metavar="S,S", default=sizes, help=f"bytes of a message, as 512, 4KiB, 8M (default: {sizes})"
    )
    comm.add_argument("--collectives", metavar="C,C", help="which to time (default: all)")
    comm.add_argument("--rounds", metavar="N", type=_count, default=5, help="how often to time each (default: 5)")
    comm.add_argument(
        "--backend", choices=("auto", "gloo", "nccl"), default="auto", help="default: what fits the device"
    )
    comm.add_argument(
        "--pairs",
        action="store_true",
        help="also the link of each pair of nodes (of ranks on one machine); name slow ones",
    )
    _plot(comm)
    _calibration(comm)


def _calibration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibration", metavar="FILE", help="add the figures to this JSON file, which `fairlead plan` reads"
    )


def _plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="FILE", help="draw it, as scaling.svg or .png")


def _trials(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """The arguments of what trains a job for a while."""
    job_arguments(parser)
    parser.add_argument(
        "--batch",
        choices=("global", "per_device"),
        help="what stays constant: the batch of all processes together (default, if the job has a number at "
        "trainer.batch_size_from), or the batch of each process",
    )
    parser.add_argument(
        "--rounds", metavar="N", type=_count, default=rounds, help=f"how often to time each (default: {rounds})"
    )
    parser.add_argument("--seconds", metavar="S", type=float, default=5.0, help="seconds per timing (default: 5)")
    parser.add_argument("--steps", metavar="N", type=_count, help="steps per timing, instead of --seconds")


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(word) for word in text.split(",")}))


def run_bench(arguments: argparse.Namespace, session: Session) -> int:
    """Runs one subcommand and returns its exit code."""
    if getattr(arguments, "seconds", 1.0) <= 0:
        raise ConfigError(f"--seconds {arguments.seconds:g} is no time", where="--seconds", fix="--seconds 5")
    code: int = pkgutil.resolve_name(f"fairlead_diagnostics.bench.{_RUNTIMES[arguments.action]}")(arguments, session)
    return code
