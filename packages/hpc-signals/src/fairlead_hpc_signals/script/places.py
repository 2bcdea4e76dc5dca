"""Where the script goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fairlead_hpc_signals.script.config import ScriptRequeueConfig

__all__ = ["DIRECTORY_VARIABLES", "script_directory"]

DIRECTORY_VARIABLES = ("NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR", "NSHRUNNER_LSF_EXIT_SCRIPT_DIR")
"""Variables of the job runner nshrunner that name the directory; the first that is set counts."""


def script_directory(config: ScriptRequeueConfig, environ: Mapping[str, str]) -> Path | None:
    """The absolute directory of the config, else of the environment; None when neither says."""
    named = config.directory or next((environ[name] for name in DIRECTORY_VARIABLES if environ.get(name)), None)
    return Path(named).absolute() if named else None
