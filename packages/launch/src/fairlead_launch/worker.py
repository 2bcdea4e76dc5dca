"""A rank of `fairlead launch`: runs the user's script as Python would, and tells the supervisor how it failed."""

from __future__ import annotations

import functools
import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final

from fairlead.errors import FairleadError
from fairlead_launch.forked_child import run_python
from fairlead_launch.reports import lost_a_peer, say_joining, send_report, watch_supervisor
from fairlead_runs.exit_codes import ExitCode

_NO_FAILURE: Final = (ExitCode.DONE, ExitCode.AGAIN, ExitCode.STOPPED, ExitCode.INTERRUPTED)


def run_worker(module: bool, *words: str) -> None:
    """Does what `python SCRIPT ARGUMENTS` does, or `python -m MODULE ARGUMENTS`."""
    environ = dict(os.environ)  # the script may change its own
    watch_supervisor(environ)
    _tell_joining(environ)
    try:
        if module:
            _run_module(*words)
        else:
            run_python(*words)
    except SystemExit as ended:
        if ended.code is not None and ended.code not in _NO_FAILURE:
            send_report(environ, _exit_report(ended), 1)
        raise
    except Exception as error:
        error.__traceback__ = _of_the_user(error)
        text = "".join(traceback.format_exception(error)).rstrip()
        code = 1
        if isinstance(error, FairleadError):
            text, code = f"error: {error.block()}", error.exit_code
        if not send_report(environ, text, code, lost_a_peer=lost_a_peer(error)):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(code)


def _exit_report(ended: SystemExit) -> str:
    """Where a script has ended itself: the same line each time is the same failure."""
    frames = traceback.extract_tb(_of_the_user(ended))
    location = f" at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
    return f"SystemExit: sys.exit({ended.code!r}){location}"


def _run_module(name: str, *words: str) -> None:
    sys.orig_argv = [sys.executable, "-m", name, *words]
    sys.argv = [name, *words]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _of_the_user(error: BaseException) -> TracebackType | None:
    """The traceback without what has started the script."""
    ours = (os.path.dirname(__file__) + os.sep, "<frozen ", os.path.dirname(os.__file__) + os.sep + "runpy.py")
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def _tell_joining(environ: Mapping[str, str]) -> None:
    """Notifies the supervisor when this rank joins the process group: it names those that never do."""
    if "torch" not in sys.modules:
        return  # not imported for it beforehand, and importing it here may be needless
    distributed: Any = sys.modules["torch"].distributed
    if not distributed.is_available():
        return
    init = distributed.init_process_group

    @functools.wraps(init)
    def announcing(*args: Any, **kwargs: Any) -> Any:
        say_joining(environ)
        return init(*args, **kwargs)

    distributed.init_process_group = announcing


if __name__ == "__main__":
    run_worker(sys.argv[1] == "module", *sys.argv[2:])
