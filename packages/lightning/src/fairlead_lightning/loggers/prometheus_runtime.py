"""A scrape endpoint on rank 0, and a file for the node exporter's text collector."""

from __future__ import annotations

import errno
import json
import socket
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_lightning.loggers.monitor import Monitor
from fairlead_lightning.loggers.prometheus import PrometheusLoggerConfig
from fairlead_runs.commit.files import replace_file
from fairlead_runs.monitoring import PROMETHEUS_TARGETS

_PORTS: Final = range(9464, 9484)  # so many runs on one node each find one


class PrometheusLogger(Monitor, Collector):
    """Shows a run to Prometheus."""

    name = "prometheus"

    def __init__(self, config: PrometheusLoggerConfig, context: BuildContext) -> None:
        super().__init__(context)
        self._config = config
        self._active = True
        self._stop: list[Any] = []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The values of all metrics now; the client calls it, in its own thread."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for one in self.readings(active=self._active):
            metric, names = one.metric, list(one.labels)
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = families.setdefault(metric.prometheus, kind(metric.prometheus, metric.text, labels=names))
            family.add_metric(list(one.labels.values()), one.value)
        yield from families.values()

    def _begin(self) -> None:
        self._active = True
        registry = CollectorRegistry()
        registry.register(self)
        if self._config.textfile is not None:
            self._write_file(registry, Path(self._config.textfile, f"fairlead-{self.run}.prom"))
        if self._config.port is not None:
            self._listen(registry)

    def _listen(self, registry: CollectorRegistry) -> None:
        server, thread = self._server(registry)
        address, files = f"{socket.gethostname()}:{server.server_port}", [self._path / PROMETHEUS_TARGETS]
        print(f"Prometheus: http://{address}/metrics", flush=True)
        if self._config.targets is not None:
            files.append(Path(self._config.targets, f"fairlead-{self.run}.json"))

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()
            for file in files:
                file.unlink(missing_ok=True)  # else Prometheus asks for a run that has ended

        self._stop.append(stop)
        # One series over all starts, on whichever node: by itself Prometheus calls the address the instance.
        targets = [{"targets": [address], "labels": {"job": "fairlead", "instance": self.run}}]
        for file in files:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(file, (json.dumps(targets) + "\n").encode())
            except OSError as error:
                raise ConfigError(
                    f"the address cannot be written into {file.parent}",
                    where="trainer.loggers: prometheus: targets",
                    why=str(error),
                    fix="name a folder that this user may write to, and that the Prometheus server reads",
                ) from error

    def _server(self, registry: CollectorRegistry) -> Any:
        asked = self._config.port
        for port in _PORTS if asked == "auto" else (asked or 0,):
            try:
                return start_http_server(port, self._config.host or "0.0.0.0", registry)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"Prometheus's metrics cannot be served at {self._config.host or '*'}:{port}",
                        where="trainer.loggers: prometheus",
                        why=str(error),
                        fix="give an address of this node and a port above 1023; "
                        "or port: null and a textfile for the node exporter",
                    ) from error
        raise ConfigError(
            f"the ports {_PORTS[0]} to {_PORTS[-1]} of {socket.gethostname()} are all in use"
            if asked == "auto"
            else f"the port {asked} of {socket.gethostname()} is in use",
            where="trainer.loggers: prometheus: port",
            fix="give another port; or 0, for any that is free",
        )

    def _write_file(self, registry: CollectorRegistry, file: Path) -> None:
        write = partial(write_to_textfile, str(file), registry)
        try:
            write()
        except OSError as error:
            raise ConfigError(
                f"the metrics cannot be written into {file.parent}",
                where="trainer.loggers: prometheus: textfile",
                why=str(error),
                fix="name the folder that the node exporter was given as --collector.textfile.directory, and that this "
                "user may write to",
            ) from error
        ended = threading.Event()

        def follow() -> None:
            warned = False
            while not ended.wait(self._config.interval):
                try:
                    write()
                except OSError as error:
                    if not warned:
                        warned = True
                        warnings.warn(f"{file} is not up to date: {error}; training continues", stacklevel=2)

        thread = threading.Thread(target=follow, name="fairlead-prometheus", daemon=True)
        thread.start()

        def stop() -> None:
            ended.set()
            thread.join()
            write()

        self._stop.append(stop)

    def _end(self) -> None:
        self._active = False
        while self._stop:
            self._stop.pop()()
