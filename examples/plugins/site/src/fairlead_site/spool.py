"""A requeuer for a site whose daemon starts again what is named in a folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from fairlead import RequeueConfigBase, RequeuePlugin, Requeuer
from fairlead.errors import RunFailedError


class SpoolRequeueConfig(RequeueConfigBase):
    """A file with the id of the job is put into a folder, when the checkpoint is complete."""

    name: Literal["spool"] = "spool"
    """The tag."""
    folder: str
    """The folder that the daemon watches."""


class Spool(RequeuePlugin):
    """The site's daemon."""

    config = SpoolRequeueConfig
    runtime = "fairlead_site.spool:build"
    example: ClassVar[Mapping[str, Any]] = {"folder": "/no/such/spool"}


class SpoolRequeuer(Requeuer):
    """Called on rank 0, when everything is saved."""

    config: SpoolRequeueConfig

    def requeue(self) -> str:
        """Writes the file, which says where to start again; the daemon deletes it when it has."""
        name = self.job.id if self.job is not None else f"{socket.gethostname()}-{os.getpid()}"
        path = Path(self.config.folder, name)
        try:
            path.write_text(str(Path.cwd()))
        except OSError as error:
            raise RunFailedError(
                "the job is not requeued", where=str(path), why=str(error), fix="ask the people who run the cluster"
            ) from error
        return f"wrote {path}"


build = SpoolRequeuer.build
spool = Spool()
