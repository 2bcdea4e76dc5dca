"""The logger `prometheus`: the state of a run for a Prometheus server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fairlead import LoggerConfigBase, LoggerPlugin


class PrometheusLoggerConfig(LoggerConfigBase):
    """Steps, logged values, throughput, memory, saves and restarts of a run, for Prometheus to scrape from rank 0.

    The address is printed, shown by `fairlead status`, and stands in `prometheus-targets.json` of the run directory, in
    the form of Prometheus's `file_sd_configs`. Where a compute node's ports are closed, a file for the text
    collector of its node exporter does the same.

    Example:
        >>> PrometheusLoggerConfig(port=None, textfile="/var/lib/prometheus/node-exporter").port
    """

    name: Literal["prometheus"] = "prometheus"
    port: int | None = Field(9464, ge=0, le=65535)
    """Where rank 0 answers: the first free one of twenty ports from this; 0: any that is free; None: nowhere. 9464 is
    the one that OpenTelemetry has registered for this."""
    host: str = ""
    """The address to listen on, as 127.0.0.1; empty: all of the node's. Whoever reaches it can read the metrics."""
    targets: str | None = None
    """A folder for the same address as `fairlead-<run>.json`, while the run trains: a server finds all runs in it."""
    textfile: str | None = None
    """The folder of the node exporter's text collector (`--collector.textfile.directory`), for a file
    `fairlead-<run>.prom`."""
    interval: float = Field(15.0, gt=0)
    """Seconds between two writes of that file."""


class Prometheus(LoggerPlugin):
    """The state of a run for a Prometheus server."""

    config = PrometheusLoggerConfig
    runtime = "fairlead_lightning.loggers.prometheus_runtime:PrometheusLogger"
    engines = ("torch", "prometheus-client")
    extra = "prometheus"


prometheus = Prometheus()
