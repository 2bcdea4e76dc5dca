"""The loggers `prometheus` and `otel`: what a server sees of a training, in each engine."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from tiny_job import Data, Line, fit, loader, make_trainer, plain, samples

from fairlead import Fairlead, Run, TrainerConfig, fabric
from fairlead.cli.main import main
from fairlead.errors import ConfigError
from fairlead_runs.monitoring import METRICS, PROMETHEUS_TARGETS, scraped_at

ROOT = Path(__file__).parents[3]
Values = dict[str, float]


def parsed(text: str) -> Values:
    """The samples of Prometheus's text by their names, with the values of all labels but the run's."""
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    assert {one.labels.get("run") for one in samples} == {"run"}
    return {"|".join([one.name, *(v for k, v in one.labels.items() if k != "run")]): one.value for one in samples}


def scraped(run: Path) -> Values:
    address = scraped_at(run)
    assert address is not None
    with urllib.request.urlopen(address.replace(address.split("/")[2].split(":")[0], "127.0.0.1"), timeout=5) as answer:
        return parsed(answer.read().decode())


def watched(run: Path, at: int) -> Watched:
    model = Watched()
    vars(model).update(run=run, at=at, found={}, code=-1)
    return model


class Watched(Line):
    """Looks at itself from outside when a step is done; the first look waits until the heartbeat is written."""

    resume_attributes: Any = ()

    run: Path
    at: int
    found: Values
    code: int

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.at:
            time.sleep(1.1)
            self.found = scraped(self.run)
            self.code = main(["status", str(self.run)])


def test_prometheus_scrapes_a_training_and_its_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, model = tmp_path / "run", watched(tmp_path / "run", 5)
    loggers = [{"name": "prometheus", "port": 0, "textfile": str(tmp_path)}]
    fit(tmp_path, model=model, max_epochs=1, loggers=loggers, checkpoint={"every_n_steps": 4})
    address = re.search(r"Prometheus: (http://\S+)", capsys.readouterr().out)
    assert address is not None
    assert model.code == 0
    found = model.found
    assert found == found | {
        "fairlead_run_active": 1,
        "fairlead_run_step": 5,
        "fairlead_run_steps_total": 5,
        "fairlead_run_samples_total": 20,
        "fairlead_run_saves_total|saved": 1,
        "fairlead_run_save_step": 4,
        "fairlead_run_restarts_total": 0,
        "fairlead_rank_seen": 1,
    }
    assert 0 < found["fairlead_logged_train_loss|train/loss"] < 100
    assert found["fairlead_run_memory_usage_bytes|host"] > 1e8
    assert found["fairlead_run_throughput_steps_per_second"] > 0
    assert not (run / PROMETHEUS_TARGETS).exists(), "nobody asks for a run that has ended"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address[1].replace(address[1].split("/")[2].split(":")[0], "127.0.0.1"), timeout=5)
    last = parsed((tmp_path / "fairlead-run.prom").read_text())
    assert (last["fairlead_run_active"], last["fairlead_run_steps_total"]) == (0, 8)

    model = watched(run, 12)
    fit(tmp_path, model=model, max_epochs=2, loggers=loggers, checkpoint={"every_n_steps": 4})
    assert "  scraped:   http://" in capsys.readouterr().out
    found = model.found
    assert (found["fairlead_run_steps_total"], found["fairlead_run_restarts_total"]) == (4, 1)
    assert found["fairlead_run_samples_total"] == 16


def test_a_port_that_is_taken_is_the_next_one_or_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiver() as (port, _):
        monkeypatch.setattr("fairlead_lightning.loggers.prometheus_runtime._PORTS", range(port, port + 20))
        fit(tmp_path, max_steps=1, loggers=[{"name": "prometheus", "targets": str(tmp_path / "new" / "targets")}])
        assert (tmp_path / "new" / "targets").is_dir()
        with pytest.raises(ConfigError, match=f"the port {port} of .* is in use"):
            fit(tmp_path / "other", max_steps=1, loggers=[{"name": "prometheus", "port": port}])
    shown = re.search(r"Prometheus: http://\S+:(\d+)/metrics", capsys.readouterr().out)
    assert shown is not None
    assert int(shown[1]) > port


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"host": "192.0.2.1"}, "cannot be served"),
        ({"textfile": "/no/such"}, "/no/such"),
        ({"targets": "/proc/no/such"}, "cannot be written into /proc/no/such"),
    ],
)
def test_what_cannot_be_shown_is_an_error_before_the_first_step(tmp_path: Path, fields: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        fit(tmp_path, max_steps=1, loggers=[{"name": "prometheus", "port": 0, **fields}])


def test_settings_that_can_show_nothing() -> None:
    for logger, what in (
        ({"name": "prometheus", "port": None}, "shows nothing: no port and no textfile"),
        ({"name": "otel", "endpoint": "localhost:4318"}, "must begin with http:// or https://"),
    ):
        with pytest.raises(ValidationError, match=what):
            TrainerConfig.model_validate({"loggers": [logger]})


def test_a_fabric_has_no_run_to_show() -> None:
    with pytest.raises(ConfigError, match="there is none here"):
        fabric(TrainerConfig.model_validate({"accelerator": "cpu", "devices": 1, "loggers": ["prometheus"]}))


def test_a_script_and_a_loop_show_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The callback in a script's Trainer, and `Run` in a custom loop; the loop's TensorBoard goes on, too."""
    model = watched(tmp_path / "run", 5)
    logger = {"name": "prometheus", "port": 0, "textfile": str(tmp_path)}
    trainer = plain(max_epochs=1, callbacks=[Fairlead(tmp_path / "run", loggers=[logger])])
    trainer.fit(model, datamodule=Data())
    of_script = parsed((tmp_path / "fairlead-run.prom").read_text())

    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found: Values = {}
    for epochs in (1, 2):
        state: dict[str, Any] = {"model": net, "optimizer": optimizer, "max_epochs": epochs, "log_every_n_steps": 1}
        with Run(tmp_path / "loop" / "run", loggers=[logger, "tensorboard"], **state) as run:
            run.restore()
            for x, y in run.batches(loader()):
                loss: Any = torch.nn.functional.mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss=loss)
                if run.steps == 13:
                    time.sleep(1.1)
                    found = scraped(tmp_path / "loop" / "run")
    last = parsed((tmp_path / "fairlead-run.prom").read_text())
    same = ["fairlead_run_step", "fairlead_run_samples_total", "fairlead_run_saves_total|saved", "fairlead_run_active"]
    assert [of_script[name] for name in same] == [8, 32, 1, 0]
    assert [last[name] for name in same] == [16, 32, 2, 0]
    assert found["fairlead_run_steps_total"] == 5
    assert found["fairlead_logged_loss|loss"] > 0
    assert list((tmp_path / "loop" / "run" / "tensorboard").glob("*tfevents*"))


# -- OpenTelemetry


@contextmanager
def receiver(silent: bool = False) -> Iterator[tuple[int, list[ExportMetricsServiceRequest]]]:
    """A receiver of OTLP over HTTP: reads what is posted with the protocol's own messages; `silent`: never answers."""
    found: list[ExportMetricsServiceRequest] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if silent:
                over.wait(60)
            assert self.path == "/v1/metrics"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            found.append(ExportMetricsServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port, found
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def received(request: ExportMetricsServiceRequest) -> dict[str, tuple[str, str, float, int]]:
    """Name and labels to the kind, the unit, the value, and how many points."""
    [resource] = request.resource_metrics
    [scope] = resource.scope_metrics
    found = {}
    for metric in scope.metrics:
        kind = str(metric.WhichOneof("data"))
        data = getattr(metric, kind)
        assert kind == "gauge" or (data.is_monotonic and data.aggregation_temporality == 2)
        for point in data.data_points:
            labels = {one.key: one.value.string_value for one in point.attributes}
            assert labels.pop("run") == "run"
            value = point.as_double if point.HasField("as_double") else point.as_int
            found["|".join([metric.name, *labels.values()])] = (kind, metric.unit, value, len(data.data_points))
    return found


class Loaded(Line):
    """Trains from two workers, in which OpenTelemetry would start its thread again."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(samples(), batch_size=4, num_workers=2)

    validation_step: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.15)


def test_otlp_is_sent_with_names_units_and_counters_of_each_start(tmp_path: Path) -> None:
    with receiver() as (port, found):
        logger = {"name": "otel", "endpoint": f"http://127.0.0.1:{port}", "interval": 0.3}
        began = time.monotonic()
        for epochs in (1, 2):
            make_trainer(tmp_path, max_epochs=epochs, loggers=[logger]).fit(Loaded())
            last = received(found[-1])
            assert last["fairlead.run.steps"] == ("sum", "{step}", 8, 1)
            assert last["fairlead.run.active"][2] == 0
        elapsed = time.monotonic() - began
    assert last["fairlead.run.saves|saved"] == ("sum", "{save}", 2, 2)
    assert last["fairlead.run.save.time"][:2] == ("sum", "s")
    assert last["fairlead.run.memory.usage|host"][1] == "By"
    assert last["fairlead.run.samples"][2] == 32
    assert last["fairlead.logged.train_loss|train/loss"][0] == "gauge"
    assert last["fairlead.run.restarts"][2] == 1
    attributes = {one.key: one.value.string_value for one in found[-1].resource_metrics[0].resource.attributes}
    assert (attributes["service.name"], attributes["fairlead.run.name"]) == ("fairlead", "run")
    assert len(found) <= elapsed / 0.3 + 4, "the workers send nothing"


def test_a_collector_that_is_silent_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with receiver(silent=True) as (port, _):
        began = time.monotonic()
        fit(tmp_path, max_steps=1, loggers=[{"name": "otel", "endpoint": f"http://127.0.0.1:{port}", "timeout": 0.5}])
        assert time.monotonic() - began < 8


# -- the dashboard


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads((ROOT / "docs/how-to/grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"\bfairlead_(?!logged)\w+", query)}
    names = {metric.prometheus for metric in METRICS}
    assert asked - names == set()
    assert names - asked == set(), "each is on a panel"
    assert "label_values(fairlead_run_active, run)" in json.dumps(board["templating"])
