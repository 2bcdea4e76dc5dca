"""What a command is run with, and how it speaks."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fairlead.plugins import PluginManager


@dataclass(frozen=True)
class Session:
    """One call of the command line: results go to `stdout`, errors and progress to `stderr`.

    `argv` is what follows `fairlead`: a launcher starts the other ranks with the same.
    """

    plugins: PluginManager
    environ: Mapping[str, str]
    cwd: Path
    argv: tuple[str, ...] = ()
    debug: bool = False
    stdout: IO[str] = field(default_factory=lambda: sys.stdout)
    stderr: IO[str] = field(default_factory=lambda: sys.stderr)

    def print(self, text: str = "") -> None:
        """Writes a line of the result."""
        print(text, file=self.stdout, flush=True)

    def print_json(self, document: Any) -> None:
        """Writes one JSON document, and nothing else may be written to stdout."""
        self.print(json.dumps(document, indent=2, default=str))

    def warn(self, text: str) -> None:
        """Writes a line to stderr."""
        print(text, file=self.stderr, flush=True)
