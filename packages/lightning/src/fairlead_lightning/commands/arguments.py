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
        help="how the ranks of this machine are started: forked from a process that has imported torch, Lightning and "
        "the job's modules once (default), or each with imports of its own",
    )


def fit_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead fit`."""
    _job_and_ranks(parser)
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        default=0,
        help="how often the ranks of this machine are started again after a failure, from the newest checkpoint "
        "(default: 0)",
    )
    parser.add_argument(
        "--resume",
        metavar="auto|never|best|last|PATH|weights:PATH",
        help="auto (default): go on with this run; never: a new run beside it; best, last: from this checkpoint of it; "
        "PATH: from any one, also RUN/best; weights:PATH: a new run with its weights and nothing else of it",
    )
    parser.add_argument(
        "--accept",
        metavar="SETTING",
        action="append",
        help="go on with this run although this setting has changed, as --accept data.args.path; repeatable",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait for another start that holds the run and says nothing: after two minutes it is taken over "
        "(the default in a scheduler's job)",
    )
    parser.add_argument(
        "--prove-resume",
        metavar="STEPS",
        type=int,
        nargs="?",
        const=8,
        help="train STEPS steps (8) undisturbed, and again with a kill and a resume, in a folder of their own; compare "
        "every bit: 0 equal, 1 not, with what differs first",
    )
    parser.set_defaults(command="fit")


def _evaluation(parser: argparse.ArgumentParser, command: str) -> None:
    _job_and_ranks(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|never|best|last|PATH",
        help="auto: the newest checkpoint of this run; best, last: this one of it; PATH: any one, also RUN/best; "
        "never (default): the model as it is built",
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
        help="a new folder for the predictions, or that of an interrupted one, which goes on (default: predictions-1, "
        "-2, ... in the run directory)",
    )
