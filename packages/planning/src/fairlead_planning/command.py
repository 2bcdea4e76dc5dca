"""The command `plan`: its arguments. Imports no torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from fairlead.cli.job import job_arguments
from fairlead.engines import LIGHTNING
from fairlead.plugin_classes import CommandPlugin

plan = CommandPlugin(
    "plan",
    "which layouts of a job fit on how many devices, how fast they are, and what failures will cost; without a GPU",
    arguments="fairlead_planning.command:plan_arguments",
    runtime="fairlead_planning.run:run",
    engines=(*LIGHTNING, "fairlead-lightning", "numpy"),
    extra="plan",
    group="job",
    example=("no-such.yaml", "--gpus", "8xh100"),
    out_of_memory="fairlead_planning.out_of_memory:of_job",
)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead plan`."""
    job_arguments(parser)
    parser.add_argument(
        "--gpus",
        metavar="NxDEVICE",
        help="how many devices of which kind, as 64xh100 or 8xa100-40gb; with --nodes, on each of them (default: the "
        "job's `resources`)",
    )
    parser.add_argument("--nodes", metavar="N", type=_count, help="nodes, of as many devices each as --gpus says")
    parser.add_argument("--network", metavar="NAME", help="between nodes (default: what is usual for the device)")
    parser.add_argument(
        "--batch",
        metavar="N",
        type=_count,
        help="samples of one optimizer step (default: the job's, times the devices)",
    )
    parser.add_argument("--steps", metavar="N", type=_count, help="optimizer steps of the job (default: the job's)")
    parser.add_argument("--memory", metavar="GIB", type=_positive, help="of one device, if less than it has is usable")
    parser.add_argument(
        "--strategy",
        dest="strategies",
        metavar="NAME",
        action="append",
        help="only this one: ddp, fsdp2, hybrid, deepspeed; repeatable",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help="what `fairlead bench gemm` and `bench comm` measured on this cluster"
    )
    parser.add_argument(
        "--failures",
        metavar="N",
        type=_not_negative,
        help="of 1,000 nodes in a day (default: of the job's history, or assumed)",
    )
    parser.add_argument("--top", metavar="N", type=_count, default=5, help="how many layouts to print (default: 5)")
    parser.add_argument(
        "--write",
        metavar="FILE",
        help="write the job with the fastest layout (or --choose) to this file, and what is predicted into its run",
    )
    parser.add_argument("--choose", metavar="N", type=_count, default=1, help="which of the printed --write takes")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _positive(text: str) -> float:
    return _number(text, lambda value: value > 0, "is no number above 0")


def _not_negative(text: str) -> float:
    return _number(text, lambda value: value >= 0, "is no number from 0 on")


def _number(text: str, right: Callable[[float], bool], wrong: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and right(value)):
        raise argparse.ArgumentTypeError(f"{text!r} {wrong}")
    return value


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)
