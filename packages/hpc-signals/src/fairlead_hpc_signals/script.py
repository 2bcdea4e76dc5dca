"""The requeuer `script`: writes a script that has the job restarted, for the job script to run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from pydantic import Field

from fairlead.config_bases import RequeueConfigBase
from fairlead.errors import RunFailedError
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead.interfaces import Requeuer
from fairlead.plugin_classes import RequeuePlugin
from fairlead_hpc_signals.programs import JOB_UNKNOWN, check_job, requeue_command
from fairlead_runs.commit import Syscalls
from fairlead_runs.commit.files import disk_error, ensure_dir, replace_file

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

# Variables of the job runner nshrunner that name the directory; the first that is set counts.
_DIRECTORY_VARIABLES: Final = ("NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR", "NSHRUNNER_LSF_EXIT_SCRIPT_DIR")
_NO_DIRECTORY: Final = {
    "where": "trainer.requeue.directory",
    "why": f"neither {' nor '.join(_DIRECTORY_VARIABLES)} is set",
    "fix": "set `requeue: {name: script, directory: ...}`",
}


class ScriptRequeueConfig(RequeueConfigBase):
    """Writes an executable script; the job script runs it after the step, where the scheduler's commands are.

    In the job script, after `srun`: `for script in "$DIR"/*.sh; do [ -e "$script" ] && "$script"; done`. The script
    deletes itself, so that it requeues the job only once.
    """

    name: Literal["script"] = "script"
    directory: str | None = Field(default=None, min_length=1)
    """Where the script goes, as `requeue_JOB.sh`; made when missing. Default null: the variable
    NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR, else the older NSHRUNNER_LSF_EXIT_SCRIPT_DIR."""
    argv: tuple[str, ...] | None = Field(default=None, min_length=1, strict=False)
    """What the script runs, as a list of words. Default null: the command that the environment of the
    job's scheduler names, such as `scontrol requeue JOB`."""


class Script(RequeuePlugin):
    """Works where `scontrol` is not in the container."""

    config = ScriptRequeueConfig
    runtime = "fairlead_hpc_signals.script:build"
    extra = "lightning"
    example_environ: ClassVar[Mapping[str, str]] = {
        "SLURM_JOB_ID": "7",
    }
    codes: ClassVar[Mapping[str, str]] = {
        "requeue-directory-missing": "The requeuer `script` has no directory to write into.",
        **JOB_UNKNOWN,
    }
    before_the_launcher = True  # whoever sets the variable runs what is written there, and nothing else

    def evidence(self, environ: Mapping[str, str]) -> str | None:
        """The job runner's variable."""
        return next((f"{name} is set" for name in _DIRECTORY_VARIABLES if environ.get(name)), None)

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is there a directory, and something to run?"""
        config = resolution.requeue
        assert isinstance(config, ScriptRequeueConfig)  # it is called for the selected plugin
        if _directory(config, environ) is None:
            yield Finding(
                "error" if resolution.inside_job else "info",
                "requeue-directory-missing",
                "`requeue: script` has no directory to write the script into",
                **_NO_DIRECTORY,
            )
        if config.argv is None:
            yield from check_job(resolution)


class ScriptRequeuer(Requeuer):
    """Writes the script on one rank, when everything is saved."""

    config: ScriptRequeueConfig

    def requeue(self) -> str:
        """Writes the script, executable and atomically; returns its path."""
        directory = _directory(self.config, self.environ)
        if directory is None:
            raise RunFailedError("the job is not requeued: there is no directory for the script", **_NO_DIRECTORY)
        argv = self.config.argv or requeue_command(self.job)
        if not argv:
            raise RunFailedError(
                "the job is not requeued: there is nothing for the script to run",
                where="trainer.requeue.argv",
                why="no installed environment names a command for this process",
                fix="set `requeue: {name: script, argv: [...]}`",
            )
        job = next(reversed(requeue_command(self.job)), "job")
        name = re.sub(r"[^\w.-]+", "_", job).strip("_")  # needs no quotes
        path = directory / f"requeue_{name}.sh"
        try:
            ensure_dir(directory, Syscalls())
            # Executable before it has its name: a job script runs whatever it finds.
            replace_file(path, _script(path, argv).encode(), mode=0o755)
        except OSError as error:
            raise disk_error(
                error, "the job is not requeued: the script cannot be written", path, RunFailedError
            ) from error
        return f"wrote {path}: {shlex.join(argv)}"


def _directory(config: ScriptRequeueConfig, environ: Mapping[str, str]) -> Path | None:
    """The absolute directory of the config, else of the environment; None when neither says."""
    named = config.directory or next((environ[name] for name in _DIRECTORY_VARIABLES if environ.get(name)), None)
    return Path(named).absolute() if named else None


def _script(path: Path, argv: tuple[str, ...]) -> str:
    # It goes first: `scontrol requeue` ends the job script, so nothing after it is sure to run, and a script
    # that stays would requeue the finished job for ever.
    return f"#!/bin/sh\nrm -f -- {shlex.quote(str(path))}\nexec {shlex.join(argv)}\n"


build = ScriptRequeuer.build
script = Script()
