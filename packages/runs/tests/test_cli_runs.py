"""`fairlead runs` and `fairlead status` over real run directories."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlead import PluginManager, yaml
from fairlead.cli import main
from fairlead.testing import FakeEntryPoint
from fairlead_runs import RunDirectory, fingerprint
from fairlead_runs.commands import plugins as commands
from fairlead_runs.commit import checkpoint_name, publish, stage
from fairlead_runs.submitted import Record


def job(**trainer: Any) -> dict[str, Any]:
    """A job as plain data."""
    return {
        "model": {"class": "m:Net", "args": {"lr": 0.1}},
        "run": {"seed": 0},
        "trainer": {"max_steps": 10, **trainer},
    }


def open_run(path: Path, **trainer: Any) -> RunDirectory:
    """A run that has started and is held by this process."""
    made = RunDirectory.open(path, job=job(**trainer), fingerprint=fingerprint(job(**trainer)))
    made.begin(resolution={}, provenance={})
    return made


@pytest.fixture
def fairlead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs a command in a folder with three runs: one finished, one failed, one running."""
    with open_run(tmp_path / "runs" / "done") as run:
        run.history.append("checkpoint", step=10, metrics={"train/loss": 2.0, "val/loss": 1.23456})
        run.finish(step=10)
    with open_run(tmp_path / "runs" / "broken", max_steps=20) as run:
        run.history.append("failed", reason="rank 1: ValueError: bad batch")
    (tmp_path / "runs" / "notes").mkdir()
    running = open_run(tmp_path / "runs" / "going", batch_policy="keep_global")
    plugins = PluginManager([FakeEntryPoint(f"command.{n}", getattr(commands, n)) for n in commands.__all__])

    def run_command(*words: str) -> tuple[int, str, str]:
        code = main(words, plugins=plugins, environ={}, cwd=tmp_path)
        return code, *capsys.readouterr()

    with running:
        yield run_command


Fairlead = Callable[..., tuple[int, str, str]]


def test_runs_lists_every_run(fairlead: Fairlead) -> None:
    code, out, err = fairlead("runs")
    assert (code, err) == (0, "")
    header, *rows = out.splitlines()
    assert header.split()[:6] == ["name", "state", "step", "metric", "best", "starts"]
    assert header.split()[-2:] == ["trainer.batch_policy", "trainer.max_steps"]  # in which they differ
    assert [row.split()[:5] for row in rows] == [
        ["broken", "failed", "-", "-", "-"],
        ["done", "finished", "10", "val/loss=1.235", "-"],
        ["going", "running", "-", "-", "-"],
    ]
    assert [row.split()[-2:] for row in rows] == [["null", "20"], ["null", "10"], ["keep_global", "10"]]


def test_runs_are_sorted_by_their_best_value(fairlead: Fairlead, tmp_path: Path) -> None:
    """The last value is not the best one, whose checkpoint may be gone."""
    for name, losses in (("a", (3.0, 1.5, 2.0)), ("b", (3.0, 1.0, 4.0)), ("c", (2.5, math.nan))):
        with open_run(tmp_path / "sweep" / name) as run:
            for step, loss in enumerate(losses, start=1):
                run.history.append("checkpoint", step=step, metrics={"val/loss": loss})
            metadata = {"step": len(losses), "start": 1, "monitor": "val/loss", "mode": "min"}
            staged = stage(run.checkpoints, checkpoint_name(len(losses)), token="s1")
            (staged / "state.ckpt").touch()
            publish(staged, metadata)
    _, out, _ = fairlead("runs", "sweep", "--sort", "best")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["b", "a", "c"]
    assert "val/loss=1 at 2" in out
    document = json.loads(fairlead("runs", "sweep", "--sort", "step", "--json")[1])
    assert [(run["name"], run["best"]["value"]) for run in document] == [("a", 1.5), ("b", 1.0), ("c", 2.5)]


def test_the_settings_of_the_model_come_first_and_those_of_a_submission_not_at_all(
    fairlead: Fairlead, tmp_path: Path
) -> None:
    for number in range(2):
        settings: dict[str, Any] = {
            "model": {"class": "m:Net", "args": {"lr": number}},
            "data": {"class": "m:Data", "args": {f"option_{letter}": number for letter in "abc"}},
            "run": {"seed": number, "name": f"r{number}", "dir": f"d{number}", "code": [f"/s/{number}/code", "/s"]},
            "trainer": {"max_steps": 10 + number, "callbacks": [{"class": "m:C", "args": {"n": number}}]},
            "submit": {"to": "slurm", "time": f"{number}:00:00", "env": {"A": number}},
            "resources": {"nodes": 1 + number},
        }
        path = tmp_path / "many" / f"r{number}"
        with RunDirectory.open(path, job=settings, fingerprint=fingerprint(settings)) as run:
            run.begin(resolution={}, provenance={})
    header, first = (line.split() for line in fairlead("runs", "many")[1].splitlines()[:2])
    assert header[-6:] == [
        "model.args.lr", "data.args.option_a", "data.args.option_b", "data.args.option_c",
        "trainer.callbacks[0].args.n", "trainer.max_steps",
    ]  # fmt: skip
    assert first[-6:] == ["0", "0", "0", "0", "0", "10"]
    shown = json.loads(fairlead("runs", "many", "--json")[1])[0]["settings"]
    assert shown.keys() == {*header[-6:], "run.seed", "resources.nodes"}


def test_runs_as_json(fairlead: Fairlead) -> None:
    code, out, _ = fairlead("runs", "runs", "--json")
    runs = {run["name"]: run for run in json.loads(out)}
    assert code == 0
    assert list(runs["done"]) == [
        "name", "path", "state", "reason", "step", "metrics", "best",
        "starts", "started", "heartbeat_age_s", "settings",
    ]  # fmt: skip
    assert (runs["done"]["metrics"]["val/loss"], runs["done"]["starts"]) == (1.23456, 1)
    assert runs["broken"]["reason"] == "rank 1: ValueError: bad batch"


def test_runs_of_a_folder_that_is_not_there(fairlead: Fairlead, tmp_path: Path) -> None:
    code, out, err = fairlead("runs", "experiments")
    assert (code, out) == (2, "")
    assert str(tmp_path / "experiments") in err
    (tmp_path / "empty").mkdir()
    assert fairlead("runs", "empty")[:2] == (0, "no runs in empty\n")


def test_diff_shows_the_settings_that_differ(fairlead: Fairlead) -> None:
    code, out, _ = fairlead("runs", "diff", "done", "going")
    assert code == 0
    header, row = out.splitlines()
    assert header.split() == ["setting", "done", "going"]
    assert row.split() == ["trainer.batch_policy", "-", "keep_global"]
    code, out, _ = fairlead("runs", "diff", "done", "runs/broken", "--json")
    assert json.loads(out) == {"trainer.max_steps": {"a": 10, "b": 20}}
    assert "the same settings" in fairlead("runs", "diff", "done", "done")[1]


def test_a_run_that_has_not_begun_is_compared_by_the_job_that_was_submitted(fairlead: Fairlead, tmp_path: Path) -> None:
    run = tmp_path / "runs/queued"
    sent = run / "submissions/1"
    Record("slurm", "7", None, str(run), (str(run),), "2026-01-01T00:00:00+00:00", folder=str(sent)).write(sent)
    (sent / "job.yaml").write_text(yaml.dump(job(max_steps=30)))
    code, out, _ = fairlead("runs", "diff", "done", "queued", "--json")
    assert (code, json.loads(out)) == (0, {"trainer.max_steps": {"a": 10, "b": 30}})


@pytest.mark.parametrize(
    "words", [["diff"], ["diff", "done"], ["diff", "done", "going", "x"], ["runs", "more"], ["diff", "done", "goin"]]
)
def test_a_wrong_call_of_runs_is_2(fairlead: Fairlead, words: list[str]) -> None:
    code, out, err = fairlead("runs", *words)
    assert (code, out) == (2, "")
    assert "do:" in err


def test_status_says_why_a_run_ended(fairlead: Fairlead) -> None:
    code, out, _ = fairlead("status", "broken")
    assert code == 0
    assert out.startswith("broken: failed (rank 1: ValueError: bad batch)\n")


def test_status_of_a_run_that_is_not_there(fairlead: Fairlead) -> None:
    code, out, err = fairlead("status", "goign")
    assert (code, out) == (2, "")
    assert "did you mean 'going'?" in err
