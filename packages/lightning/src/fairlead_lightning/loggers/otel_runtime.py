"""Exports a run's metrics by OTLP, from rank 0."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from fairlead.interfaces import BuildContext
from fairlead_lightning.loggers.monitor import Monitor
from fairlead_lightning.loggers.otel import OTelLoggerConfig
from fairlead_runs.monitoring import METRICS, Metric, Reading, logged_metric

_TOGETHER_S = 0.5  # an export asks for one metric after the other: all get the values of one moment


class OTelLogger(Monitor):
    """Sends a run's metrics to a collector; one that does not answer is a warning of OpenTelemetry's."""

    name = "otel"

    def __init__(self, config: OTelLoggerConfig, context: BuildContext) -> None:
        super().__init__(context)
        self._config = config
        self._own_name = "OTEL_SERVICE_NAME" not in context.environ
        self._provider: MeterProvider | None = None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """As any; a metric that is new is exported from now on."""
        super().log_metrics(metrics, step)
        if self._provider is not None:
            for name in metrics.keys() - {"epoch", "step"}:
                self._observe(logged_metric(name))

    def _begin(self) -> None:
        config, self._pid = self._config, os.getpid()
        endpoint = f"{config.endpoint.rstrip('/').removesuffix('/v1/metrics')}/v1/metrics" if config.endpoint else None
        exporter = OTLPMetricExporter(endpoint=endpoint, timeout=config.timeout)
        reader = PeriodicExportingMetricReader(
            exporter, export_interval_millis=1000 * config.interval, export_timeout_millis=1000 * config.timeout
        )
        who = {
            "service.instance.id": f"{self.run}@{socket.gethostname()}",
            "fairlead.run.name": self.run,
            "fairlead.run.directory": str(self._path),
            **({"service.name": "fairlead"} if self._own_name else {}),
        }
        self._provider = MeterProvider([reader], Resource.create(who), shutdown_on_exit=False)
        self._meter: Meter = self._provider.get_meter("fairlead")
        self._active, self._read_at, self._last = True, float("-inf"), list[Reading]()
        self._lock = threading.Lock()
        self._observed: set[str] = set()
        for metric in METRICS:
            self._observe(metric)

    def _observe(self, metric: Metric) -> None:
        if metric.name in self._observed:  # of two names that differ in a dot
            return
        self._observed.add(metric.name)
        counter = metric.kind == "counter"
        make = self._meter.create_observable_counter if counter else self._meter.create_observable_gauge

        def observe(_: CallbackOptions) -> Iterator[Observation]:
            for one in self._now():
                if one.metric.name == metric.name and math.isfinite(one.value):  # OpenTelemetry warns of others
                    yield Observation(one.value, dict(one.labels))

        make(metric.name, [observe], metric.unit, metric.text)

    def _now(self) -> list[Reading]:
        if os.getpid() != self._pid:
            return []  # OpenTelemetry restarts its thread in each worker of a loader
        with self._lock:
            if time.monotonic() - self._read_at > _TOGETHER_S:
                self._last, self._read_at = self.readings(active=self._active), time.monotonic()
            return self._last

    def _end(self) -> None:
        provider, self._provider = self._provider, None
        self._active, self._read_at = False, float("-inf")
        if provider is not None:
            provider.shutdown(timeout_millis=1000 * self._config.timeout)
