"""How a rank's process comes to be: a fresh interpreter, or a fork of one that has done its imports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from fairlead.user_code import CodeRoot
from fairlead.user_code.roots import script_folders
from fairlead_launch.forkserver import ForkedProcess, ForkServer

Process = subprocess.Popen[bytes] | ForkedProcess
"""A process of a rank; each leads its own process group."""
Starter = Callable[[Mapping[str, str], tuple[int, int], Sequence[int]], Process]
"""Starts a rank with all its variables, its standard output and error, and these file descriptors by number."""


def spawn(command: Sequence[str]) -> Starter:
    """Ranks that are fresh processes of a command."""

    def start(environ: Mapping[str, str], output: tuple[int, int], inherited: Sequence[int]) -> Process:
        return subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,  # reading from the terminal would stop a process that is not in its foreground
            stdout=output[0],
            stderr=output[1],
            pass_fds=inherited,
            process_group=0,
        )

    return start


def search_path(root: CodeRoot) -> list[str]:
    """`sys.path` for what is forked: the user's code comes first, and the folder of a script of ours is not there."""
    folders = [str(folder) for folder in root.folders]
    scripts = script_folders()
    return [*folders, *(one for one in sys.path if one not in folders and os.path.abspath(one) not in scripts)]


def forkable(server: ForkServer, received: Sequence[int], say: Callable[[str], None]) -> ForkServer | None:
    """The server, once it has imported all; None where forking would not work (reported), or after a signal."""
    try:
        obstacles = None
        while obstacles is None and not received:
            obstacles = server.obstacles(0.1)
    except RuntimeError:
        obstacles = ["importing ends the process"]
    if obstacles == [] and not received:
        return server
    server.close()
    if obstacles:
        say(f"each process imports for itself, which takes longer, as a fork would not work: {'; '.join(obstacles)}")
    return None


def fork(server: ForkServer, function: Callable[..., object], *args: object, cwd: str) -> Starter:
    """Ranks that are forks of a server and call `function(*args)`."""

    def start(environ: Mapping[str, str], output: tuple[int, int], inherited: Sequence[int]) -> Process:
        fds = {1: output[0], 2: output[1], **{fd: fd for fd in inherited}}
        return server.start(function, *args, environ=environ, cwd=cwd, fds=fds)

    return start
