"""The arguments of `fairlead verify`."""

from __future__ import annotations

import argparse

from fairlead.cli.job import job_arguments


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    """A job, how much of it is trained, and how it is shown."""
    job_arguments(parser)
    parser.add_argument(
        "--steps", metavar="N", type=int, default=3, help="optimizer steps of each training (default: 3)"
    )
    parser.add_argument(
        "--repeats",
        metavar="N",
        type=int,
        default=4,
        help="trainings in one process to measure the noise of float32 (default: 4)",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="verify the layout in its full size; by default, of more than 4 ranks each dimension above 1 is reduced "
        "to 2, and copies and shards to 3 as well",
    )
    parser.add_argument(
        "--batch-dim",
        metavar="N",
        type=_dimension,
        default=0,
        help="the dimension of the samples in a batch, along which the batches of all replicas are put together "
        "(default: 0); none: train on them one by one",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    # As `fit`, whose ranks these are.
    parser.set_defaults(command="verify", resume=None)


def _dimension(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no dimension: 0, 1, ... or none")
    return int(text)
