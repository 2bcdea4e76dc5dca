"""What the backend `remote` contributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, cast

from fairlead.axes import CheckpointIOPlugin
from fairlead.capabilities import Capability
from fairlead.findings import Finding, Inexact
from fairlead.hookspecs import hookimpl
from fairlead.resolve import Resolution
from fairlead_checkpoint_io.remote.config import RemoteCheckpointIOConfig
from fairlead_runs.remote.store import missing_library

__all__ = ["Remote", "remote"]


class Remote(CheckpointIOPlugin):
    """Copies every committed checkpoint to an object store."""

    config = RemoteCheckpointIOConfig
    runtime = "fairlead_checkpoint_io.remote.runtime:build"
    engines = ("torch>=2.13", "lightning>=2.6.6,<2.7", "fsspec>=2025.3")
    extra = "remote"
    codes: ClassVar[Mapping[str, str]] = {
        "remote-library": "The URL of `checkpoint_io: remote` needs a package that is not installed: s3fs for `s3://`, "
        "gcsfs for `gs://`. It is said before the job waits for its nodes.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Lightning's XLA strategies refuse it; what the inner backend does not go with, that one says."""
        yield Capability(
            "checkpoint_io.remote",
            ("strategy.xla",),
            "no",
            "Lightning's XLA strategy takes the XLA checkpoint backend only",
            "checkpoint_io: xla, and copy its checkpoints afterwards with fairlead_runs.remote.upload",
        )
        yield Capability(
            "checkpoint_io.remote",
            ("strategy.ddp", "strategy.fsdp2", "strategy.single_device"),
            "yes",
            "whole files and shards of all ranks are copied once they are committed, and read again",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Whether the store's library is there; the store itself is asked when a run starts."""
        config = cast("RemoteCheckpointIOConfig", resolution.checkpoint_io)
        lacking = missing_library(config.url)
        if lacking is not None:
            where = "trainer.checkpoint_io.url"
            yield Finding("error", "remote-library", lacking.what, where=where, fix=lacking.fix)

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """The wrapped backend writes, and copies are byte for byte."""
        return ()


remote = Remote()
