"""What the exit code of a run says to whoever started it; the page `docs/reference/exit-codes.md` has the rest."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of `fairlead`, and one of NVIDIA's resiliency extension that job scripts meet as well."""

    DONE = 0
    """The run is finished, perhaps since an earlier start."""
    FAILED = 1
    """The run failed: a rank died, its code raised, or its result could not be saved."""
    WRONG = 2
    """The job or the call is wrong; nothing was started."""
    AGAIN = 75
    """Stopped with everything saved, and another start is wanted (EX_TEMPFAIL); `requeue` may set another code."""
    NEVER_AGAIN = 93
    """What NVRx's `ft_launcher` ends with where its job is not to be requeued."""
    INTERRUPTED = 130
    """Stopped by the keyboard, with everything saved; no other start is wanted."""
    STOPPED = 143
    """Stopped by SIGTERM, a `STOP` file or `fairlead cancel`, with everything saved; no other start is wanted."""
