"""The logger itself; imported only when a run is built."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from fairlead import BuildContext
from fairlead.errors import ConfigError
from fairlead_site.jsonl import JSONLLoggerConfig


class JSONLLogger(Logger):
    """Rank 0 writes; `position` is asked with each checkpoint, and the file is cut to it when a run resumes."""

    position_key: ClassVar[str] = "jsonl"

    def __init__(self, path: Path, size: int) -> None:
        super().__init__()
        self._path, self._size = path, size
        self._opened = False

    @property
    def name(self) -> str:
        """What Lightning calls it."""
        return "jsonl"

    @property
    def version(self) -> str:
        """A run has one."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The run directory has the job."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Appends a line."""
        if not self._opened:  # what an earlier start has logged behind its last checkpoint comes again
            self._opened = True
            self._path.touch()
            os.truncate(self._path, min(self._size, self._path.stat().st_size))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    @rank_zero_only
    def position(self) -> dict[str, Any] | None:
        """The size of the file, all of which is on the disk; None on the other ranks."""
        if not self._opened:
            return {"size": self._size}
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        return {"size": self._path.stat().st_size}


def build(config: JSONLLoggerConfig, context: BuildContext) -> JSONLLogger:
    """The logger, at the position that the checkpoint names; a new run begins with an empty file."""
    if context.run_dir is None:
        raise ConfigError("the logger jsonl needs a run directory", where="trainer.loggers", fix="give the job a `run`")
    position = context.extras.get("logger_positions", {}).get(JSONLLogger.position_key, {})
    return JSONLLogger(context.run_dir / config.file, position.get("size", 0))
