"""A real Prometheus server scrapes a real training, over a kill and a resume, and PromQL gives the right numbers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration_tests.jobs import JOB, changed, events, marked, repository, start
from integration_tests.test_docs import DOCS, blocks

pytestmark = pytest.mark.full

STEPS = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A Prometheus that answers."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def query(self, text: str) -> list[Any]:
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            document = json.load(answer)
        assert document["status"] == "success", (text, document)
        found: list[Any] = document["data"]["result"]
        return found

    def value(self, text: str) -> float | None:
        found = self.query(text)
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else None

    def until(self, text: str, true: Callable[[float], bool]) -> float:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            value = self.value(text)
            if value is not None and true(value):
                return value
            time.sleep(0.3)
        raise AssertionError(f"{text} is {self.value(text)}")


@contextmanager
def prometheus(folder: Path) -> Iterator[Server]:
    """The server with the configuration of the page, but for the folder and the intervals."""
    program = shutil.which("prometheus")
    if program is None:
        if os.environ.get("CI"):
            raise AssertionError("apt-get install --no-install-recommends prometheus")
        pytest.skip("needs Debian's package prometheus")
    [shown] = [block for block in blocks("yml", pages=[DOCS / "how-to/monitoring.md"]) if block.title]
    text = shown.text.replace("/shared/prometheus", str(folder / "targets")).replace("15s", "1s").replace("30s", "1s")
    (folder / "prometheus.yml").write_text(text)
    port = free_port()
    words = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            server = Server(port)
            end = time.monotonic() + 30
            while True:
                try:
                    server.query("1")
                    break
                except OSError:
                    assert process.poll() is None, (folder / "prometheus.log").read_text()
                    assert time.monotonic() < end
                    time.sleep(0.2)
            yield server
        finally:
            process.terminate()
            process.wait(20)


def test_promql_gives_the_numbers_of_a_run_that_was_killed(tmp_path: Path) -> None:
    job = changed(
        JOB,
        model={"args": {"width": 4, "delay": 0.1}},
        trainer={
            "max_steps": STEPS,
            "max_epochs": -1,
            "limit_val_batches": 0,
            "log_every_n_steps": 1,
            "checkpoint": {"every_n_steps": 25},
            "loggers": [
                {"name": "prometheus", "port": 0, "targets": str(tmp_path / "targets"), "textfile": str(tmp_path)}
            ],
        },
    )
    file, run = str(repository(tmp_path, job=job)), tmp_path / "runs/small"
    (tmp_path / "targets").mkdir()
    with prometheus(tmp_path) as server:
        first = start("fit", file, cwd=tmp_path)
        server.until("fairlead_run_step", lambda step: step >= 60)
        for process in marked(first.marker):
            os.kill(process, signal.SIGKILL)
        first.process.wait()
        server.until("up", lambda up: up == 0)  # an alert would say so
        second = start("fit", file, cwd=tmp_path)
        server.until("fairlead_run_restarts_total", lambda restarts: restarts == 1)
        resumed = next(one["step"] for one in reversed(events(run)) if one["event"] == "training")
        assert 50 <= resumed <= 75
        server.until("fairlead_run_step", lambda step: step >= resumed + 110)
        forward = server.until('fairlead_step_share_ratio{part="forward"}', lambda share: share > 0)
        assert forward > 0.5, "where the model sleeps"
        assert server.value("sum(fairlead_step_share_ratio)") == pytest.approx(1, abs=0.01)
        good = server.value("fairlead_run_goodput_ratio")
        assert good is not None
        assert 0 < good < 1
        board = json.loads((DOCS / "how-to/grafana-dashboard.json").read_text())
        for query in (target["expr"] for panel in board["panels"] for target in panel["targets"]):
            assert server.query(query.replace("$run", ".*")), f"the dashboard shows nothing for {query}"
        rate = server.value("rate(fairlead_run_steps_total[10s])")
        said = server.value("fairlead_run_throughput_steps_per_second")
        assert rate is not None
        assert said is not None
        assert rate == pytest.approx(said, rel=0.5)
        assert second.end().code == 0
        assert server.value("resets(fairlead_run_steps_total[5m])") == 1, "a counter begins anew with each start"
        shown = server.value("last_over_time(fairlead_run_steps_total[5m])")
        saves = sum(one["event"] == "checkpoint" for one in events(run))
        counted = server.value('last_over_time(fairlead_run_saves_total{outcome="saved"}[5m])')
        assert counted is not None
        assert saves - 3 <= counted <= saves  # the last scrape is up to a second before the end
        losses = server.query('max_over_time({__name__=~"fairlead_logged_.*loss.*"}[5m])')
        assert {one["metric"]["metric"] for one in losses} == {"train/loss"}
    assert list((tmp_path / "targets").iterdir()) == []
    promtool = shutil.which("promtool")
    assert promtool is not None
    text = (tmp_path / "fairlead-small.prom").read_bytes()
    assert shown is not None
    told = next(line for line in text.decode().splitlines() if line.startswith("fairlead_run_steps_total"))
    last = float(told.rpartition(" ")[2])
    assert last == STEPS - resumed
    assert last - 30 <= shown <= last
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
