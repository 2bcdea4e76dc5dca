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
    "measure on this machine which settings are fastest for your job",
    arguments="fairlead_diagnostics.bench.command:bench_arguments",
    runtime="fairlead_diagnostics.bench.command:run_bench",
    engines=(*LIGHTNING, "fairlead-lightning"),
    extra="lightning",
    example=("threads", "no-such.yaml"),
)

_RUNTIMES: Final = {"threads": "threads:run"}
"""The module and function of each subcommand."""


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead bench`."""
    actions = parser.add_subparsers(dest="action", metavar="threads", required=True, help="what to measure")
    text = "compare one process on all CPUs with several on a share each, and advise which to use"
    threads = actions.add_parser("threads", help=text, description=text, allow_abbrev=False)
    job_arguments(threads)
    threads.add_argument(
        "--processes",
        metavar="N,N",
        type=_counts,
        help="numbers of processes to try (default: powers of two and the number of NUMA nodes and sockets, up to the "
        "CPUs)",
    )
    threads.add_argument(
        "--batch",
        choices=("global", "per_device"),
        help="what stays constant: the batch of all processes together (default, if the job has a number at "
        "trainer.batch_size_from), or the batch of each process",
    )
    threads.add_argument(
        "--rounds", metavar="N", type=_count, default=5, help="how often to time each division (default: 5)"
    )
    threads.add_argument("--seconds", metavar="S", type=float, default=5.0, help="seconds per timing (default: 5)")
    threads.add_argument("--steps", metavar="N", type=_count, help="steps per timing, instead of --seconds")
    threads.add_argument("--json", action="store_true", help="print one JSON document")


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(word) for word in text.split(",")}))


def run_bench(arguments: argparse.Namespace, session: Session) -> int:
    """Runs one subcommand and returns its exit code."""
    if arguments.seconds <= 0:
        raise ConfigError(f"--seconds {arguments.seconds:g} is no time", where="--seconds", fix="--seconds 5")
    code: int = pkgutil.resolve_name(f"fairlead_diagnostics.bench.{_RUNTIMES[arguments.action]}")(arguments, session)
    return code
