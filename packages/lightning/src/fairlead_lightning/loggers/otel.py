"""The logger `otel`: the state of a run over OpenTelemetry's protocol."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fairlead import LoggerConfigBase, LoggerPlugin


class OTelLoggerConfig(LoggerConfigBase):
    """Steps, logged values, throughput, memory, saves and restarts of a run, sent by OTLP (HTTP, protobuf) from rank 0.

    An OpenTelemetry collector takes it, and so do Prometheus, Grafana Cloud, Datadog and others. What OpenTelemetry's
    variables say (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES`, ...) holds;
    keep tokens there, not in a job.

    Example:
        >>> OTelLoggerConfig(endpoint="http://collector:4318").interval
        60.0
    """

    name: Literal["otel"] = "otel"
    endpoint: str | None = Field(None, pattern="^https?://")
    """The collector's address, to which `/v1/metrics` is added; None: as OpenTelemetry's variables say it, else
    http://localhost:4318."""
    interval: float = Field(60.0, gt=0)
    """Seconds between two exports."""
    timeout: float = Field(5.0, gt=0)
    """Seconds that an export may take, also the last one at the end of a start."""


class OTel(LoggerPlugin):
    """The state of a run over OpenTelemetry's protocol."""

    config = OTelLoggerConfig
    runtime = "fairlead_lightning.loggers.otel_runtime:OTelLogger"
    engines = ("torch", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
    extra = "otel"


otel = OTel()
