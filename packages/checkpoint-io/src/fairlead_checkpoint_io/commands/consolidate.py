"""`fairlead checkpoint consolidate`: all shards in one plain Lightning file."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairlead.cli.session import Session
from fairlead_checkpoint_io.commands.convert import report, write_plain
from fairlead_checkpoint_io.commands.destination import prepare_target
from fairlead_checkpoint_io.commands.states import read_any
from fairlead_checkpoint_io.commands.stored import sources

__all__ = ["run"]


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Reads a checkpoint of any format, writes one file."""
    with sources((arguments.path,), session) as (source,):
        output = arguments.output or f"{source.name}.ckpt"
        target = Path(session.cwd, output).expanduser()
        prepare_target(target, source.path, source.content, overwrite=arguments.overwrite, where="--output")
        write_plain(read_any(source, arguments.trust), target)
        report(source, target, arguments, session, to="torch", left_out=[])
    return 0
