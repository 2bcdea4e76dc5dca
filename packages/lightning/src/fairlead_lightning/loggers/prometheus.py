"""The logger `prometheus`: the state of a run for a Prometheus server."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fairlead import LoggerConfigBase, LoggerPlugin
from fairlead.open_union import config_mistake


class PrometheusLoggerConfig(LoggerConfigBase):
    """Steps, logged values, throughput, memory, saves and restarts of a run, for Prometheus to scrape from rank 0.

    The address is printed, shown by `fairlead status`, and stands in `prometheus-targets.json` of the run directory, in
    the form of Prometheus's `file_sd_configs`. Where a compute node's ports are closed, a file for the text
    collector of its node exporter does the same.

    Example:
        >>> PrometheusLoggerConfig(port=None, textfile="/var/lib/prometheus/node-exporter").port
    """

    name: Literal["prometheus"] = "prometheus"
    port: Annotated[int, Field(ge=0, le=65535)] | Literal["auto"] | None = "auto"
    """Where rank 0 answers; auto: the first free port from 9464, which OpenTelemetry has registered for this, to 9483;
    0: any that is free; None: nowhere."""
    host: str = ""
    """The address to listen on, as 127.0.0.1; empty: all of the node's. Whoever reaches it can read the metrics."""
    targets: str | None = None
    """A folder, made if need be, for the same address as `fairlead-<run>.json`, while the run trains: a server finds
    all runs in it."""
    textfile: str | None = None
    """The folder of the node exporter's text collector (`--collector.textfile.directory`), for a file
    `fairlead-<run>.prom`."""
    interval: float = Field(15.0, gt=0)
    """Seconds between two writes of that file."""

    @model_validator(mode="after")
    def _shows_something(self) -> Self:
        if self.port is None and self.textfile is None:
            fix = "leave port out, or add a textfile: the folder of the node exporter's text collector"
            raise config_mistake("wrong-value", "the logger prometheus shows nothing: no port and no textfile", fix=fix)
        return self


class Prometheus(LoggerPlugin):
    """The state of a run for a Prometheus server."""

    config = PrometheusLoggerConfig
    runtime = "fairlead_lightning.loggers.prometheus_runtime:PrometheusLogger"
    engines = ("torch", "prometheus-client")
    extra = "prometheus"


prometheus = Prometheus()
