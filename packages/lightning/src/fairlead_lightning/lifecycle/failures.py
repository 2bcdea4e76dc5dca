"""A failure of a rank, as it is shown: the user's own frames, the exit code, and what helps where memory ran out."""

from __future__ import annotations

import os
import pkgutil
import re
import signal
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence

from fairlead.engines import requirement
from fairlead.errors import FairleadError, PluginError
from fairlead.install import install_line
from fairlead.jobs import LoadedJob
from fairlead.plugin_classes import CommandPlugin
from fairlead.plugins import PluginManager
from fairlead.resolve import Resolution
from fairlead.user_code import CodeRoot
from fairlead_lightning.lifecycle.stops import StopRequested

_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line \d+, in ')


def described_failure(error: BaseException, root: CodeRoot) -> tuple[str, int]:
    """The text to show for an error, and the exit code; only an error of the user's own code has a traceback."""
    if isinstance(error, FairleadError):
        return f"error: {error.block()}", error.exit_code
    if isinstance(error, StopRequested):
        # The first rank has reported how the fit was stopped.
        by = "Ctrl-C" if error.exit_code == 128 + signal.SIGINT else "a signal"
        return "" if error.outcome is not None else f"stopped by {by}; {error.saved}", error.exit_code
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        pressed = error if isinstance(error, KeyboardInterrupt) else error.__context__
        return ". ".join(["stopped by the keyboard", *getattr(pressed, "__notes__", [])]), 130
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return f"the job's own code called exit({code})\n{_traceback(error, root)}", 1
    return _traceback(error, root), 1


def _traceback(error: BaseException, root: CodeRoot, led_to: Sequence[BaseException] = ()) -> str:
    """The traceback of an error, and before it that of its cause, each cut; `led_to` are those that it has caused."""
    led_to = (*led_to, error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = ""
    if cause is not None and not any(cause is one for one in led_to):
        before = f"{_traceback(cause, root, led_to)}\n\nwhich led to:\n"
    frames = traceback.extract_tb(error.__traceback__)
    of_user = _of_user(root)
    users = [frame for frame in frames if of_user(frame.filename)]
    shown = list(users)
    if frames and (not users or frames[-1] is not users[-1]):
        shown.append(frames[-1])
    lines = ["Traceback (your code):\n" if users else "Traceback:\n", *traceback.format_list(shown)]
    text = "".join(traceback.format_exception_only(error))
    lines += [f"{line}\n" for line in _cut(text.splitlines(), of_user)]
    return before + "".join(lines).rstrip()


def _of_user(root: CodeRoot) -> Callable[[str], bool]:
    """Tells the files of the user from those of libraries."""
    folders = tuple(f"{folder}{os.sep}" for folder in root.folders)
    # In a checkout of Fairlead its own sources lie under the user's root as well.
    ours = (m for name, m in list(sys.modules.items()) if name.partition("_")[0] == "fairlead" and "." not in name)
    libraries = [*site.getsitepackages(), sysconfig.get_path("stdlib"), *(_folder(module) for module in ours)]
    others = tuple(f"{folder}{os.sep}" for folder in libraries if folder)
    return lambda path: path.startswith(folders) and not path.startswith(others)


def _folder(module: object) -> str | None:
    file = getattr(module, "__file__", None)
    return os.path.dirname(file) if file else None


def _cut(lines: Sequence[str], of_user: Callable[[str], bool]) -> Iterator[str]:
    """Without the library frames of a traceback that a message quotes: that of a DataLoader worker."""
    skipping = False
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            skipping = not of_user(frame["file"])
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            yield line


def what_helps(loaded: LoadedJob, resolution: Resolution, plugins: PluginManager) -> Iterator[str]:
    """The lines of the commands that know: `plan`, from what it predicts of this job; or how to get them."""
    commands = list(_that_know(plugins))
    for command in commands:
        assert command.out_of_memory is not None
        try:
            yield from pkgutil.resolve_name(command.out_of_memory)(loaded, resolution)
        except FairleadError as failure:
            yield f"`fairlead {command.name}` cannot say by how much: {failure.block()}"
        except Exception as failure:  # the user's code, run in another way: the fit's own error is to be shown
            yield f"`fairlead {command.name}` cannot say by how much: {type(failure).__name__}: {failure}"
    if not commands:
        yield f"`fairlead plan` comes with {install_line('plan')}"


def _that_know(plugins: PluginManager) -> Iterator[CommandPlugin]:
    for name in plugins.names("command"):
        try:
            command = plugins.command(name)
        except PluginError:
            continue  # `fairlead plugins` shows it
        if command.out_of_memory and all(plugins.is_installed(requirement(one)) for one in command.engines):
            yield command
