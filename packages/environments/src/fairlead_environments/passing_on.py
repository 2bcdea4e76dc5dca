"""What a launcher around the ranks does with the signals that announce a stop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from fairlead import Finding, Resolution

PASSED_ON: Final = {
    "signals-not-passed-on": "torchrun ends at a signal that announces a stop, and its ranks with it.",
}
KILLED_SOON: Final = {
    "mpirun-kills-soon": "Open MPI kills its ranks so soon after a SIGTERM that they cannot save.",
}

HANDLED: Final = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Set by torchrun for its workers: the signals of `--signals-to-handle`."""
KILL_AFTER: Final = "OMPI_MCA_odls_base_sigkill_timeout"
"""Set by Open MPI's mpirun for its ranks, where `--mca odls_base_sigkill_timeout` is given; else it is 1 s."""
_TORCHRUN: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # what it handles by itself
_WARNINGS: Final = ("SIGUSR1", "SIGUSR2")
_ENOUGH_S: Final = 10


def check_torchrun(resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Does the agent pass on what a scheduler sends ahead?"""
    if not _restarts(resolution):
        return
    handled = {name.strip() for name in environ.get(HANDLED, _TORCHRUN).split(",")}
    lacking = [name for name in resolution.requeue.signals or _WARNINGS if name not in handled]
    if lacking:
        yield Finding(
            "warning",
            "signals-not-passed-on",
            f"torchrun ends at {' and '.join(lacking)}: nothing would be saved, and the job not restarted",
            where=f"environment variable {HANDLED}",
            why="it handles only the signals of --signals-to-handle, and stands between the scheduler and the ranks",
            fix=f"torchrun --signals-to-handle=SIGTERM,SIGINT,{','.join(lacking)} --shutdown-timeout=100 ..., "
            "or `srun fairlead fit` with one task for each rank",
        )


def check_mpirun(resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Does mpirun give its ranks the time that a checkpoint takes?"""
    if not _restarts(resolution) or "OMPI_COMM_WORLD_RANK" not in environ:
        return
    given = environ.get(KILL_AFTER, "1")
    if given.isdecimal() and int(given) < _ENOUGH_S:
        yield Finding(
            "warning",
            "mpirun-kills-soon",
            f"mpirun kills its ranks {given} s after a SIGTERM, as at a preemption: too soon to save",
            where=f"environment variable {KILL_AFTER}",
            why="that is the time between its SIGTERM and its SIGKILL",
            fix="mpirun --mca odls_base_sigkill_timeout 60 ...; a warning by SIGUSR1 is passed on either way",
        )


def _restarts(resolution: Resolution) -> bool:
    """Whether this is a job of a scheduler, which is stopped by signals and may be restarted."""
    return resolution.job is not None and resolution.requeue.name != "none"
