"""The logger `otel`: the state of a run over OpenTelemetry's protocol."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from fairlead import LoggerConfigBase, LoggerPlugin
from fairlead.open_union import config_mistake


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
    endpoint: str | None = None
    """The collector's address, to which `/v1/metrics` is added; None: as OpenTelemetry's variables say it, else
    http://localhost:4318."""
    interval: float = Field(60.0, gt=0)
    """Seconds between two exports."""
    timeout: float = Field(5.0, gt=0)
    """Seconds that an export may take, also the last one at the end of a start."""

    @field_validator("endpoint")
    @classmethod
    def _address(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            what = f"the endpoint {endpoint!r} must begin with http:// or https://"
            raise config_mistake("wrong-value", what, fix=f"http://{endpoint.rpartition('//')[2]}")
        return endpoint


class OTel(LoggerPlugin):
    """The state of a run over OpenTelemetry's protocol."""

    config = OTelLoggerConfig
    runtime = "fairlead_lightning.loggers.otel_runtime:OTelLogger"
    engines = ("torch", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
    extra = "otel"


otel = OTel()
