"""What the requeuer `script` contributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from fairlead.axes import RequeuePlugin
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead_hpc_signals.checks import JOB_UNKNOWN, check_job
from fairlead_hpc_signals.jobs import current_job
from fairlead_hpc_signals.script.config import ScriptRequeueConfig
from fairlead_hpc_signals.script.places import DIRECTORY_VARIABLES, script_directory

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

__all__ = ["Script", "script"]


class Script(RequeuePlugin):
    """Works where `scontrol` is not in the container."""

    config = ScriptRequeueConfig
    runtime = "fairlead_hpc_signals.script.runtime:build"
    extra = "lightning"
    codes: ClassVar[Mapping[str, str]] = {
        "requeue-directory-missing": "The requeuer `script` has no directory to write into.",
        **JOB_UNKNOWN,
    }

    before_the_launcher = True  # whoever sets the variable runs what is written there, and nothing else

    def evidence(self, environ: Mapping[str, str]) -> str | None:
        """The job runner's variable."""
        return next((f"{name} is set" for name in DIRECTORY_VARIABLES if environ.get(name)), None)

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is there a directory, and something to run?"""
        config = resolution.requeue
        assert isinstance(config, ScriptRequeueConfig)  # it is called for the selected plugin
        if script_directory(config, environ) is None:
            yield Finding(
                "error" if resolution.inside_job else "info",
                "requeue-directory-missing",
                "`requeue: script` has no directory to write the script into",
                where="trainer.requeue.directory",
                why=f"neither {' nor '.join(DIRECTORY_VARIABLES)} is set",
                fix="set `requeue: {name: script, directory: ...}`",
            )
        if config.argv is None:
            yield from check_job(
                current_job(environ), "SLURM or LSF", "neither SLURM_JOB_ID nor LSB_JOBID is set", resolution
            )


script = Script()
