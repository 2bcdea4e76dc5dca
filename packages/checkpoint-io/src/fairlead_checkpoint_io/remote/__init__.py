"""The backend `remote`: checkpoints are saved locally and copied to an object store in the background."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, field_validator

from fairlead.capabilities import Capability
from fairlead.config_bases import CheckpointIOConfigBase
from fairlead.errors import ConfigError
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead.open_union import OpenUnion
from fairlead.resolve import Resolution
from fairlead_checkpoint_io.torch_file import FilePlugin, TorchCheckpointIOConfig
from fairlead_runs.remote.store import check_options, check_url, missing_library

__all__ = ["Remote", "RemoteCheckpointIOConfig", "remote"]


class RemoteCheckpointIOConfig(CheckpointIOConfigBase):
    """Saved in the run directory through `inner`, then copied to `<url>/<run name>/` by a thread.

    A start that finds a newer complete checkpoint there than in its run directory resumes from that. Credentials
    come from where the store's own library looks for them, never from here.
    """

    name: Literal["remote"] = "remote"
    url: str
    """Where the runs are kept, as `s3://bucket/prefix`, `gs://bucket/prefix`; any protocol of fsspec."""
    inner: Annotated[CheckpointIOConfigBase, OpenUnion("checkpoint_io")] = TorchCheckpointIOConfig()
    """The backend that writes the local files, any but `remote`. With `distributed` every rank writes its part."""
    retries: int = Field(default=8, ge=1)
    """Tries of each request to S3, with pauses that double; the libraries of other stores have their own rule. A
    checkpoint that failed all of them is retried after the next save, and at the end."""
    part_mib: int = Field(default=32, ge=5, le=5120)
    """MiB of each part of a large file. Host memory: twice this for each file that is being uploaded."""
    parallel_files: int = Field(default=4, ge=1)
    """Files uploaded or downloaded at a time."""
    stop_wait_s: float = Field(default=20.0, ge=0, strict=False)
    """Seconds after the signal for which a stop waits for the last upload; after that the run relies on the local copy,
    and reports it. Set it to less than the time between the signal and the kill."""
    storage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of fsspec's file system for this protocol: `{endpoint_url: "https://..."}`. Secrets are refused."""

    @property
    def saves_shards(self) -> bool:
        """As the inner one: every rank hands over its part, and rank 0 copies what all have written."""
        return self.inner.saves_shards

    @field_validator("url", "storage_options")
    @classmethod
    def _for_a_store(cls, value: Any) -> Any:
        try:
            if isinstance(value, str):
                return check_url(value)
            check_options(value)
        except ConfigError as error:
            raise ValueError(f"{error.what}; {error.fix}") from None
        return value

    @field_validator("inner")
    @classmethod
    def _not_itself(cls, inner: CheckpointIOConfigBase) -> CheckpointIOConfigBase:
        if inner.name == "remote":
            raise ValueError("`remote` cannot write through itself; choose `torch`, `async` or another backend")
        return inner


class Remote(FilePlugin):
    """Copies every committed checkpoint to an object store."""

    config = RemoteCheckpointIOConfig
    example: ClassVar[Mapping[str, Any]] = {"url": "s3://bucket/prefix"}
    runtime = "fairlead_checkpoint_io.remote.runtime:build"
    copies = "fairlead_checkpoint_io.remote.copies:StoreCopies"
    engines = (*FilePlugin.engines, "fsspec")
    extra = "remote"
    codes: ClassVar[Mapping[str, str]] = {
        "remote-library": "The URL of `checkpoint_io: remote` needs a package that is not installed: s3fs for `s3://`, "
        "gcsfs for `gs://`. It is said before the job waits for its nodes.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Lightning's XLA strategies refuse it; what the inner backend does not go with, that one says."""
        yield self.not_on_xla(
            "checkpoint_io: xla, and copy its checkpoints afterwards with fairlead_runs.remote.upload"
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


remote = Remote()
