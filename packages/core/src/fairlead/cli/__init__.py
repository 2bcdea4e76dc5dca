"""The command line: `fairlead <command> ...`. Commands are plugins; the core brings those that need no torch."""

from __future__ import annotations

from fairlead.cli.main import main

__all__ = ["main"]
