"""What ranks import, imported while their job is still checked."""

from __future__ import annotations

import argparse
from types import TracebackType

from fairlead.cli.session import Session
from fairlead.config import JobConfig
from fairlead.detect import choose_environment
from fairlead.jobs import LoadedJob
from fairlead_launch.forkserver import CAN_FORK, SERVER_FD, ForkServer
from fairlead_lightning.display.quiet import TORCH_DEFAULTS

PRELOAD = "fairlead_lightning.commands.preload"


class EarlyImports:
    """A server that begins to import once the job is read, where this process is going to start several ranks.

    Whether it will is known for sure after the check only: where it does not, the server is ended.
    """

    def __init__(self, arguments: argparse.Namespace, session: Session) -> None:
        self._session = session
        self._possible = CAN_FORK and arguments.start_method != "spawn" and SERVER_FD not in session.environ
        self.server: ForkServer | None = None

    def begin(self, loaded: LoadedJob) -> None:
        """Starts the server, if the job asks for several devices and no scheduler or launcher has started this."""
        if not (self._possible and loaded.job is not None and _several(loaded.job)):
            return
        session = self._session
        if not choose_environment("auto", session.environ, session.plugins, starting=True).inside_job:
            given = {name: value for name, value in session.environ.items() if name != "OMP_NUM_THREADS"}
            title = ("fairlead", *session.argv)
            self.server = ForkServer([PRELOAD], environ={**TORCH_DEFAULTS, **given}, title=title)

    def close(self) -> None:
        """Ends the server."""
        if self.server is not None:
            self.server.close()
            self.server = None

    def __enter__(self) -> EarlyImports:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _several(job: JobConfig) -> bool:
    devices = job.trainer.devices
    return len(devices) > 1 if isinstance(devices, list) else isinstance(devices, int) and devices > 1
