"""The command `checkpoint`: its arguments, and which module runs each subcommand, if what that needs is installed."""

from __future__ import annotations

import argparse
import pkgutil
from typing import TYPE_CHECKING, Final

from fairlead.engines import requirement
from fairlead.errors import MissingDependencyError
from fairlead.install import install_line
from fairlead.plugin_classes import CommandPlugin

if TYPE_CHECKING:
    from fairlead.cli.session import Session

checkpoint = CommandPlugin(
    "checkpoint",
    "list, verify, compare, convert and export checkpoints",
    arguments="fairlead_checkpoint_io.commands.checkpoint:checkpoint_arguments",
    runtime="fairlead_checkpoint_io.commands.checkpoint:run_checkpoint",
    group="checkpoints",
    example=("ls", "no-such-run"),
)

_RUNTIMES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "ls": ("ls:run", ()),
    "verify": ("verify:run", ()),
    "diff": ("diff:run", ("torch",)),
    "convert": ("convert:run", ("torch", "safetensors")),
    "consolidate": ("convert:run_consolidate", ("torch",)),
    "export": ("export:run", ("torch", "safetensors")),
}
"""The module and function of each subcommand, and what it needs."""

_PATH: Final = (
    "a run directory, its checkpoints/ folder, or one checkpoint; or the URL of a run or checkpoint "
    "(default: the working directory)"
)
_ONE: Final = "a checkpoint: its folder, file or URL; or a run directory: its newest complete checkpoint"


def checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead checkpoint`."""
    actions = parser.add_subparsers(
        dest="action", metavar="ls|verify|diff|convert|consolidate|export", required=True, help="the subcommand"
    )
    ls = _action(actions, "ls", "list all checkpoints of a run: step, metrics, size, and whether each is complete")
    verify = _action(actions, "verify", "compare sizes and checksums with the manifests; exits with 1 on damage")
    for one in (ls, verify):
        one.add_argument("path", metavar="PATH", nargs="?", default=".", help=_PATH)
    verify.add_argument("--newest", action="store_true", help="only the newest checkpoint of the run")
    verify.add_argument(
        "--threads", metavar="N", type=int, help="files to read in parallel (default: one per core, at most 16)"
    )

    diff = _action(actions, "diff", "show which tensors and values of two checkpoints differ; exits with 1 if any do")
    diff.add_argument("a", metavar="A", help=_ONE)
    diff.add_argument("b", metavar="B", help="the other checkpoint")
    diff.add_argument("--weights", action="store_true", help="compare the model's weights only")
    _trust(diff)

    convert = _action(actions, "convert", "write a checkpoint in another format; the format of A is detected")
    convert.add_argument("a", metavar="A", help=_ONE)
    convert.add_argument("b", metavar="B", help="the file or folder to write")
    formats = "torch, distributed, safetensors, or one of an installed plugin"
    convert.add_argument("--to", metavar="FORMAT", required=True, help=f"the format of B: {formats}")
    convert.add_argument(
        "--weights", action="store_true", help="the model's weights only, without optimizers and loops"
    )
    _writes(convert)

    consolidate = _action(actions, "consolidate", "merge a sharded checkpoint into one plain Lightning file")
    consolidate.add_argument("path", metavar="PATH", help=_ONE)
    consolidate.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: NAME.ckpt here)")
    _writes(consolidate)

    export = _action(actions, "export", "write a portable folder: weights, job, model card")
    export.add_argument("path", metavar="PATH", help=_ONE)
    export.add_argument("-o", "--output", metavar="FOLDER", required=True, help="the folder to write")
    _writes(export)


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        metavar="NAME",
        action="append",
        default=[],
        help="a class or function (package.module.Name) that the checkpoint may contain; loading calls it. Repeatable",
    )


def _writes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="overwrite an existing target")
    _trust(parser)


def run_checkpoint(arguments: argparse.Namespace, session: Session) -> int:
    """Runs one subcommand and returns its exit code; raises when it needs an engine that is not installed here."""
    runtime, engines = _RUNTIMES[arguments.action]
    missing = [requirement(engine) for engine in engines if not session.plugins.is_installed(engine)]
    if missing:
        raise MissingDependencyError(
            f"fairlead checkpoint {arguments.action} needs {', '.join(missing)}",
            why="`ls` and `verify` work without",
            fix=install_line("lightning"),
        )
    code: int = pkgutil.resolve_name(f"fairlead_checkpoint_io.commands.{runtime}")(arguments, session)
    return code
