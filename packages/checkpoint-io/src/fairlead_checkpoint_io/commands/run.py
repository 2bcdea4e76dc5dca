"""Runs a subcommand of `fairlead checkpoint`, if what it needs is installed."""

from __future__ import annotations

import argparse
import importlib
from typing import Final

from fairlead.cli.session import Session
from fairlead.errors import MissingDependencyError

__all__ = ["run_checkpoint"]

_ENGINES: Final = {
    "ls": (),
    "verify": (),
    "diff": ("torch>=2.13,<3",),
    "convert": ("torch>=2.13,<3", "safetensors>=0.5,<1"),
    "consolidate": ("torch>=2.13,<3",),
    "export": ("torch>=2.13,<3", "safetensors>=0.5,<1"),
}


def run_checkpoint(arguments: argparse.Namespace, session: Session) -> int:
    """Runs one subcommand and returns its exit code.

    Raises:
        MissingDependencyError: It needs torch or another engine that is not installed here.
    """
    action: str = arguments.action
    missing = [engine for engine in _ENGINES[action] if not session.plugins.is_installed(engine)]
    if missing:
        raise MissingDependencyError(
            f"fairlead checkpoint {action} needs {', '.join(missing)}",
            why="`ls` and `verify` work without",
            fix="pip install 'fairlead[lightning]'",
        )
    module = importlib.import_module(f"fairlead_checkpoint_io.commands.{action}")
    code: int = module.run(arguments, session)
    return code
