"""The loggers besides `metrics.csv`: a restart continues the same record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, cast

import pytest

from fairlead.errors import ConfigError, RunDirectoryError
from fairlead.interfaces import BuildContext
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager
from fairlead_lightning.loggers import wandb_runtime
from fairlead_lightning.loggers.csv import build as build_csv
from fairlead_lightning.loggers.wandb_runtime import can_connect, wandb_mode


def context(run_dir: Path, **extras: Any) -> BuildContext:
    return BuildContext(cast("Any", None), {}, PluginManager([]), run_dir=run_dir, extras=cast("Any", extras))


def config(name: str, **fields: Any) -> Any:
    return parse_backend("logger", {"name": name, **fields}, PluginManager())


def test_csv_is_the_file_that_is_written_anyway(tmp_path: Path) -> None:
    build_csv(config("csv"), context(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside tensorboard and protobuf
def test_tensorboard_continues_in_its_folder_without_what_is_done_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    from fairlead_lightning.loggers.tensorboard.runtime import build

    first = build(config("tensorboard"), context(tmp_path))
    for step in range(6):
        first.log_metrics({"loss": 1.0}, step)
    first.finalize("success")
    second = build(config("tensorboard"), context(tmp_path, resume_step=3))
    second.log_metrics({"loss": 2.0}, 3)  # Lightning counts from 0: this is the fourth step
    second.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 1), (1, 1), (2, 1), (3, 2)]


KEY = {"WANDB_API_KEY": "x"}


@pytest.mark.parametrize(
    ("asked", "environ", "answers", "mode"),
    [
        (None, {}, True, "offline"),
        (None, KEY, True, "online"),
        (None, KEY, False, "offline"),
        (None, {**KEY, "WANDB_MODE": "offline"}, True, "offline"),
        (None, {"WANDB_MODE": "online"}, False, "online"),
        (None, {"WANDB_MODE": "disabled"}, True, "disabled"),
        (True, KEY, True, "offline"),
        (False, {}, False, "online"),
    ],
)
def test_wandb_goes_offline_where_it_must(
    asked: bool | None, environ: dict[str, str], answers: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_runtime, "can_connect", lambda *_: answers)
    assert wandb_mode(asked, environ)[0] == mode


def test_a_login_in_netrc_counts_for_its_host_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_runtime, "can_connect", lambda *_: True)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    environ = {"HOME": str(tmp_path)}
    assert wandb_mode(None, environ)[0] == "online"
    other = {**environ, "WANDB_BASE_URL": "https://wandb.example.org"}
    assert wandb_mode(None, other)[0] == "offline"


def test_a_server_that_refuses_is_not_reachable() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert can_connect(f"http://127.0.0.1:{port}", {})
        assert can_connect("https://api.wandb.ai", {"HTTPS_PROXY": f"http://127.0.0.1:{port}"})
    assert not can_connect(f"http://127.0.0.1:{port}", {})


def test_the_id_at_wandb_is_kept_and_a_new_run_gets_another(tmp_path: Path) -> None:
    from fairlead_lightning.loggers.wandb_runtime import build, run_id

    run = tmp_path / "run"
    run.mkdir()
    (run / "history.jsonl").write_text('{"event": "start", "time": 1}\n')
    first = run_id(run)
    assert run_id(run) == first
    build(config("wandb", offline=True), context(run))
    assert json.loads((run / "wandb-run.json").read_text()) == {"id": first}
    moved = run.rename(tmp_path / "moved")
    assert run_id(moved) == first
    run.mkdir()
    (run / "history.jsonl").write_text('{"event": "start", "time": 2}\n')
    assert run_id(run) != first
    (run / "wandb-run.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="damaged"):
        run_id(run)


def test_wandb_offline_records_and_says_how_to_upload(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from fairlead.interfaces import BuildContext
        from fairlead.open_union import parse_backend
        from fairlead.plugins import PluginManager
        from fairlead_lightning.loggers.wandb_runtime import build
        plugins = PluginManager()
        config = parse_backend("logger", {"name": "wandb", "project": "p", "tags": ["a"]}, plugins)
        context = BuildContext(None, os.environ, plugins, run_dir=Path(sys.argv[1]), extras={"run_name": "first"})
        logger = build(config, context)
        logger.log_hyperparams({"lr": 0.1})
        logger.log_metrics({"loss": 1.0}, 0)
        logger.finalize("success")
        """)
    )
    run = tmp_path / "run dir"
    run.mkdir()
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environ |= {"WANDB_MODE": "offline", "HOME": str(tmp_path), "WANDB_SILENT": "true"}
    for start in (1, 2):
        command = [sys.executable, "-W", "error::UserWarning", str(script), str(run)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        identity = json.loads((run / "wandb-run.json").read_text())["id"]
        folders = sorted((run / "wandb").glob(f"offline-run-*-{identity}"))
        assert len(folders) == start, "all starts have one id"
        assert "recorded offline (WANDB_MODE=offline)" in done.stdout
        assert f"for run in '{run / 'wandb'}'/offline-run-*-{identity}; do WANDB_RESUME=allow wandb sync" in done.stdout


def test_one_tag_in_yaml_is_a_list() -> None:
    assert config("wandb", tags=["a", "b"]).tags == ("a", "b")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_rows_wait_for_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a checkpoint too: the start that resumes from it sends them, and each step is there once."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    from fairlead_lightning.loggers.mlflow_runtime import RunLogger, build
    from fairlead_runs.logger_positions import logger_positions

    send, fails = MlflowClient.log_batch, [2, 3, 4, 5]
    calls = iter(range(100))

    def log_batch(self: Any, *arguments: Any, **named: Any) -> Any:
        if next(calls) in fails:
            raise MlflowException("API request failed: connection refused")
        return send(self, *arguments, **named)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    first = build(config("mlflow"), context(tmp_path))
    first.log_metrics({"loss": 0.0, "epoch": 0}, 0)
    first.log_metrics({"loss": 1.0, "epoch": 0}, 1)
    with pytest.warns(UserWarning, match="connection refused; training continues, it will be retried"):
        first.log_metrics({"loss": 2.0, "epoch": 0}, 2)
    first.log_metrics({"loss": 3.0, "epoch": 0}, 3)
    positions = json.loads(json.dumps(logger_positions([first])))
    assert positions["mlflow"]["pending"] == [[2, {"loss": 2.0, "epoch": 0}], [3, {"loss": 3.0, "epoch": 0}]]

    second = build(config("mlflow"), context(tmp_path, resume_step=4, logger_positions=positions))
    assert isinstance(second, RunLogger)
    with pytest.warns(UserWarning, match="connection refused"):
        second.log_metrics({"loss": 4.0, "epoch": 0}, 4)
    second.log_metrics({"loss": 5.0, "epoch": 0}, 5)
    second.finalize("success")
    history = second.experiment.get_metric_history(second.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(step, float(step)) for step in range(6)]
    assert second.experiment.get_run(second.run_id).info.status == "FINISHED"

    (tmp_path / "mlflow-run.json").write_text('{"id": "' + "0" * 32 + '"}')
    with pytest.raises(RunDirectoryError, match="MLflow does not know the run"):
        build(config("mlflow"), context(tmp_path)).log_metrics({"loss": 0.0}, 0)
    with pytest.raises(ConfigError, match="MLflow cannot log to 'no-such-scheme://x'"):
        build(config("mlflow", tracking_uri="no-such-scheme://x"), context(tmp_path / "new"))
