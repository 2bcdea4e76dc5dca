"""The config of the requeuer `script`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fairlead.bases import RequeueConfigBase

__all__ = ["ScriptRequeueConfig"]


class ScriptRequeueConfig(RequeueConfigBase):
    """Writes an executable script; the job script runs it after the step, where the scheduler's commands are.

    In the job script, after `srun`: `for script in "$DIR"/*.sh; do [ -e "$script" ] && "$script"; done`.
    The script deletes itself, so that it has the job started again once.
    """

    name: Literal["script"] = "script"
    directory: str | None = Field(default=None, min_length=1)
    """Where the script goes, as `requeue_JOB.sh`; made when missing. Default null: the variable
    NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR, else the older NSHRUNNER_LSF_EXIT_SCRIPT_DIR."""
    argv: tuple[str, ...] | None = Field(default=None, min_length=1, strict=False)
    """What the script runs, as a list of words. Default null: `scontrol requeue` or `brequeue` for this job."""
