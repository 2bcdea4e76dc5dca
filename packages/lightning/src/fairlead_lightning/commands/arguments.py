"""The arguments of `fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

import argparse
from functools import partial

from fairlead.cli.job import job_arguments


def _job_and_ranks(parser: argparse.ArgumentParser) -> None:
    """The job, and how its ranks on this machine are started."""
    job_arguments(parser)
    parser.add_argument(
        "--start-method",
        choices=("fork-server", "spawn"),
        default="fork-server",
        help="fork-server (default): import torch, Lightning and the job's modules once, and fork the ranks of this "
        "machine; spawn: each rank imports for itself",
    )


def fit_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead fit`."""
    _job_and_ranks(parser)
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        default=0,
        help="how often to restart the ranks of this machine after a failure, from the newest checkpoint (default: 0)",
    )
    parser.add_argument(
        "--resume",
        metavar="auto|never|best|last|PATH|weights:PATH",
        help="auto (default): resume this run; never: start a new run beside it; best, last: resume from that "
        "checkpoint; PATH: from any checkpoint, also RUN/best, or RUN: its newest; weights:PATH: start a new run with "
        "only its weights",
    )
    parser.add_argument(
        "--accept",
        metavar="SETTING",
        action="append",
        help="resume although this setting has changed, as --accept data.args.path; repeatable",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="if another start holds the run, wait for it; after two minutes without a heartbeat, take the run over "
        "(the default in a scheduler's job)",
    )
    parser.add_argument(
        "--prove-resume",
        metavar="STEPS",
        type=int,
        nargs="?",
        const=8,
        help="train STEPS steps (8) twice in a separate folder, once with a kill and a resume, and compare every bit; "
        "exits with 0 if equal, else with 1 and the first difference",
    )
    parser.set_defaults(command="fit")


def _evaluation(parser: argparse.ArgumentParser, command: str) -> None:
    _job_and_ranks(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|never|best|last|PATH",
        help="the weights to load; auto (default): the run's best checkpoint by the metric that it monitors, else its "
        "newest; best, last: that one; PATH: any checkpoint, or of a run directory its best or newest; never: none, "
        "the model as it is built",
    )
    parser.set_defaults(command=command)


validate_arguments = partial(_evaluation, command="validate")
test_arguments = partial(_evaluation, command="test")


def predict_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead predict`."""
    _evaluation(parser, "predict")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="a new folder for the predictions, or the folder of an interrupted prediction to resume (default: "
        "predictions-1, -2, ... in the run directory)",
    )
