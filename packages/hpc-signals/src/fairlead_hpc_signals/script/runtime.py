"""Leaves a script behind that has the job started again."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from fairlead.errors import RunFailedError
from fairlead.interfaces import BuildContext
from fairlead_hpc_signals.jobs import current_job
from fairlead_hpc_signals.script.config import ScriptRequeueConfig
from fairlead_hpc_signals.script.places import DIRECTORY_VARIABLES, script_directory
from fairlead_runs.commit import Syscalls, write_file
from fairlead_runs.commit.files import disk_error, ensure_dir

__all__ = ["ScriptRequeuer", "build"]


def build(config: ScriptRequeueConfig, context: BuildContext) -> ScriptRequeuer:
    """The runtime of the requeuer `script`."""
    return ScriptRequeuer(config, context.environ)


class ScriptRequeuer:
    """Writes the script on one rank, when everything is saved."""

    def __init__(self, config: ScriptRequeueConfig, environ: Mapping[str, str]) -> None:
        self._config = config
        self._environ = environ

    def requeue(self) -> str:
        """Writes the script, executable and as a whole; returns its path.

        Raises:
            RunFailedError: There is no directory or no command for it, or it cannot be written.
        """
        directory = script_directory(self._config, self._environ)
        if directory is None:
            raise RunFailedError(
                "the job is not requeued: there is no directory for the script",
                where="trainer.requeue.directory",
                why=f"neither {' nor '.join(DIRECTORY_VARIABLES)} is set",
                fix="set `requeue: {name: script, directory: ...}`",
            )
        job = current_job(self._environ)
        argv = self._config.argv or (job.command if job else None)
        if argv is None:
            raise RunFailedError(
                "the job is not requeued: there is nothing for the script to run",
                where="trainer.requeue.argv",
                why="this process belongs to no SLURM or LSF job",
                fix="set `requeue: {name: script, argv: [...]}`",
            )
        path = directory / f"requeue_{job.file_name if job else 'job'}.sh"
        try:
            _write_executable(path, _script(path, argv))
        except OSError as error:
            raise disk_error(
                error, "the job is not requeued: the script cannot be written", path, RunFailedError
            ) from error
        return f"wrote {path}: {shlex.join(argv)}"


def _script(path: Path, argv: tuple[str, ...]) -> str:
    # It goes first: `scontrol requeue` ends the job script, so nothing after it is sure to run, and a script
    # that stays would requeue the finished job for ever.
    return f"#!/bin/sh\nrm -f -- {shlex.quote(str(path))}\nexec {shlex.join(argv)}\n"


def _write_executable(path: Path, text: str) -> None:
    """As `atomic_write`, but executable before it has its name: a job script runs whatever it finds."""
    system = Syscalls()
    ensure_dir(path.parent, system)
    temporary = path.with_name(f".tmp-{secrets.token_hex(6)}")
    try:
        write_file(temporary, text.encode(), syscalls=system)
        os.chmod(temporary, 0o755)
        system.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    system.fsync_dir(path.parent)
