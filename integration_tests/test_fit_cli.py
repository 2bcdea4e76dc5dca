"""`fairlead fit`, `validate`, `test` and `predict`, as a user runs them: console script, two processes, real data."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fairlead import yaml
from fairlead_distributed import Predictions
from fairlead_runs.checkpoint_job import job_from_checkpoint
from fairlead_runs.commit import list_checkpoints
from integration_tests.jobs import JOB, Call, changed, dedent, events, fairlead, marked, names, repository, start, tree

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Fitted:
    """The GPT of the examples after a fit."""

    cwd: Path
    job: Path
    call: Call

    @property
    def run(self) -> Path:
        return self.cwd / "runs" / "gpt-tiny"


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    cwd = tmp_path_factory.mktemp("gpt")
    job = ROOT / "examples" / "gpt" / "tiny.yaml"
    return Fitted(cwd, job, fairlead("fit", str(job), cwd=cwd, fresh=True))


def steps(run: Path, column: str) -> list[int]:
    with (run / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row[column]]


def test_fit_trains_in_two_processes_and_says_how_it_goes(gpt: Fitted) -> None:
    assert gpt.call.code == 0, gpt.call.text
    lines = gpt.call.out.splitlines()
    assert any(line.startswith("step ") and "loss" in line for line in lines)
    closing = {line.split()[0]: line for line in lines if line[:1].isalpha()}
    assert "6 steps" in closing["done"]
    assert "samples/s" in closing["speed"]
    assert "val/loss" in closing["best"]
    assert "step-00000006" in closing["checkpoint"]
    assert "runs/gpt-tiny" in closing["run"]
    assert gpt.call.err == ""
    start = events(gpt.run)[0]
    assert (start["event"], start["world_size"], start["resumed_from"]) == ("start", 2, None)


def test_the_run_directory_holds_what_the_contract_says(gpt: Fitted) -> None:
    run = gpt.run
    assert (run / "job.yaml").read_text()
    for name in ("resolution.json", "provenance.json"):
        assert json.loads((run / "starts" / "1" / name).read_text())
    assert names(run)[-1] == "finished"
    assert (run / "logs" / "rank-00001.log").exists()
    assert list((run / "heartbeats").iterdir())
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    checkpoints = list_checkpoints(run / "checkpoints")
    assert checkpoints[-1].step == 6
    newest = (run / "checkpoints" / "latest").read_text()
    assert checkpoints[-1].path.name in newest
    for checkpoint in checkpoints:
        manifest = json.loads((checkpoint.path / "manifest.json").read_text())
        assert manifest["files"].keys() >= {"state.ckpt", "rank-00000.pt", "rank-00001.pt"}


def test_metrics_hold_each_step_once(gpt: Fitted) -> None:
    trained = steps(gpt.run, "train/loss")
    assert trained == sorted(set(trained))
    assert len(trained) == 6
    assert len(set(steps(gpt.run, "val/loss"))) == len(steps(gpt.run, "val/loss")) == 2


def test_a_finished_run_says_so_and_more_steps_go_on_from_there(gpt: Fitted, tmp_path: Path) -> None:
    shutil.copytree(gpt.run, tmp_path / "runs" / "gpt-tiny")
    run = tmp_path / "runs" / "gpt-tiny"
    before = tree(tmp_path)
    again = fairlead("fit", str(gpt.job), cwd=tmp_path)
    assert again.code == 0, again.text
    assert "is finished" in again.text
    assert tree(tmp_path) == before

    more = fairlead("fit", str(gpt.job), "--set", "trainer.max_steps=9", cwd=tmp_path)
    assert more.code == 0, more.text
    assert "resumes from" in more.out
    assert "3 of them in this start" in more.out
    trained = steps(run, "train/loss")
    assert trained == sorted(set(trained))
    assert len(trained) == 9
    assert [event["start"] for event in events(run) if event["event"] == "start"] == [1, 2]


@pytest.mark.full
def test_a_trial_is_enough_for_explain(tmp_path: Path) -> None:
    """Whether a resume is exact is not known before a start has seen the loaders; `fast_dev_run` is enough for that."""
    job = str(repository(tmp_path / "repo", job=changed(JOB, trainer={"devices": 1})))
    told = fairlead("explain", job, cwd=tmp_path)
    way = "--set trainer.fast_dev_run=true"
    assert told.out.splitlines()[-1] == f"resume: not known before the first start (fit {way} is enough)"
    tried = fairlead("fit", job, *way.split(), cwd=tmp_path)
    assert tried.code == 0, tried.text
    assert [path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()] == ["exactness.json"]
    told = fairlead("explain", job, cwd=tmp_path)
    assert told.out.splitlines()[-1].startswith("resume: exact for settings, loaders and what is in the checkpoint,")
    fitted = fairlead("fit", job, cwd=tmp_path)
    assert fitted.code == 0, fitted.text
    assert [event["start"] for event in events(tmp_path / "runs" / "small") if event["event"] == "start"] == [1]


@pytest.mark.full
def test_integers_as_keys_last_through_fit_and_resume(tmp_path: Path) -> None:
    """An accumulation schedule by epochs; its job is read again from the run directory, and its run goes on."""
    schedule = {
        "class": "lightning.pytorch.callbacks:GradientAccumulationScheduler",
        "args": {"scheduling": {0: 4, 1: 2}},
    }
    job = repository(tmp_path / "repo", job=changed(JOB, trainer={"devices": 1, "callbacks": [schedule]}))
    job.write_text(yaml.dump(changed(JOB, trainer={"devices": 1, "callbacks": [schedule]})))
    run = tmp_path / "runs" / "small"
    for steps in (4, 8):
        ended = fairlead("fit", str(job), "--set", f"trainer.max_steps={steps}", cwd=tmp_path)
        assert ended.code == 0, ended.text
    assert "resumes from" in ended.out
    (kept,) = job_from_checkpoint(run).trainer.callbacks
    assert kept.args == {"scheduling": {0: 4, 1: 2}}
    changed_schedule = fairlead("fit", str(job), "--set", "trainer.callbacks[0].args.scheduling.1=3", cwd=tmp_path)
    assert changed_schedule.code == 2
    assert "scheduling.1: 2 -> 3" in changed_schedule.err


def test_validate_takes_the_trained_weights_and_says_which(gpt: Fitted) -> None:
    before = tree(gpt.cwd)
    values, said = [], []
    run = gpt.cwd / "runs" / "gpt-tiny"
    for resume in ("never", None, "last", str(run), str(run / "best")):
        words = ("--resume", resume) if resume is not None else ()
        call = fairlead("validate", str(gpt.job), "--set", "trainer.devices=1", *words, cwd=gpt.cwd)
        assert call.code == 0, call.text
        values.append(dict(line.split() for line in call.out.splitlines() if line.startswith("val/")))
        said.append(call.out.splitlines()[0])
    fresh, trained, named, run_named, elsewhere = (float(value["val/loss"]) for value in values)
    assert trained == named == run_named == elsewhere < fresh
    assert "as the model is built" in said[0]
    assert said[1].startswith(f"weights     {Path('runs/gpt-tiny/checkpoints')}/step-")
    assert ", the best by val/loss (" in said[1]
    assert tree(gpt.cwd) == before


def test_test_and_predict_in_a_repository_of_the_users(tmp_path: Path) -> None:
    job = str(repository(tmp_path / "repo"))
    refused = fairlead("test", job, cwd=tmp_path)
    assert refused.code == 2, refused.text
    assert "no trained weights" in refused.err
    assert "--resume never" in refused.err
    built = ("--resume", "never")
    tested = fairlead("test", job, *built, cwd=tmp_path)
    assert tested.code == 0, tested.text
    assert tested.out.splitlines()[1].split()[0] == "test/loss"

    predicted = fairlead("predict", job, *built, cwd=tmp_path)
    assert predicted.code == 0, predicted.text
    folder = tmp_path / "runs" / "small" / "predictions-1"
    assert f"predictions  {folder} (64 samples)" in predicted.out
    both = Predictions(folder)
    assert both.loaders[0].indices.tolist() == list(range(64))

    alone = ("--out", "there", "--set", "trainer.devices=1", *built)
    elsewhere = fairlead("predict", job, *alone, cwd=tmp_path)
    assert elsewhere.code == 0, elsewhere.text
    assert torch.equal(Predictions(tmp_path / "there").to_torch(), both.to_torch())
    other = fairlead("predict", job, *alone, "--set", "model.args.width=3", cwd=tmp_path)
    assert other.code == 2
    assert "job.model.args.width: 4 -> 3" in other.err
    # Predictions that came first are no obstacle to the run.
    assert fairlead("fit", job, "--set", "trainer.devices=1", cwd=tmp_path).code == 0


@pytest.mark.full
def test_run_code_names_the_folder_of_the_users_code(tmp_path: Path) -> None:
    job = repository(tmp_path / "repo", mark=".git")
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "job.yaml"
    moved.write_text(job.read_text())
    lost = fairlead("fit", str(moved), cwd=tmp_path)
    assert lost.code == 2
    assert "mine" in lost.err
    assert "run.code" in lost.err or "looked in" in lost.err
    found = fairlead("fit", str(moved), "--set", "run.code=repo", cwd=tmp_path)
    assert found.code == 0, found.text


def test_a_job_may_be_a_function_in_a_module(tmp_path: Path) -> None:
    repository(tmp_path / "repo")
    module = f"""
        from fairlead import JobConfig

        def job():
            return JobConfig.model_validate({changed(JOB, trainer={"devices": 1})!r})
        """
    (tmp_path / "repo" / "mine" / "jobs.py").write_text(dedent(module))
    call = fairlead("fit", "mine.jobs:job", cwd=tmp_path / "repo", environ={"OMP_NUM_THREADS": "3"})
    assert call.code == 0, call.text
    assert next(line for line in call.out.splitlines() if line.startswith("start ")).endswith(" 3 threads")
    assert names(tmp_path / "repo" / "runs" / "small")[-1] == "finished"


def test_torchrun_starts_the_ranks_as_well(tmp_path: Path) -> None:
    job = repository(tmp_path / "repo")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d")
    words = ("--rdzv_endpoint=127.0.0.1:0", "-m", "fairlead", "fit", str(job))
    call = fairlead(*words, cwd=tmp_path, command=torchrun)
    assert call.code == 0, call.text
    assert call.out.count("done ") == 1
    start = events(tmp_path / "runs" / "small")[0]
    assert start["world_size"] == 2
    assert not [name for name in names(tmp_path / "runs" / "small") if name == "failed"]


def test_a_signal_to_all_of_a_job_that_has_just_finished_is_no_failure(tmp_path: Path) -> None:
    """As a scheduler sends it: to the ranks that are ending, to who watches them, and to what they were forked from."""
    job = repository(tmp_path)
    running = start("fit", str(job), cwd=tmp_path)
    running.until(lambda: "finished" in names(tmp_path / "runs" / "small"), "its end")
    for pid in marked(running.marker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    ended = running.end()
    assert ended.code == 0, ended.text
    assert names(tmp_path / "runs" / "small")[-1] == "finished"


@pytest.mark.full
def test_two_jobs_at_once_on_one_machine_do_not_take_each_others_port(tmp_path: Path) -> None:
    job = str(repository(tmp_path / "repo"))
    running = [start("fit", job, "--set", f"run.name=job-{n}", cwd=tmp_path) for n in (1, 2)]
    for call in [one.end() for one in running]:
        assert call.code == 0, call.text


def test_two_jobs_of_one_name_at_once(tmp_path: Path) -> None:
    """The second is told who is there, and what to do; the first does not notice it."""
    job = changed(JOB, trainer={"devices": 1, "strategy": "auto", "max_steps": 9999}, model={"args": {"delay": 0.2}})
    file = repository(tmp_path, job=job)
    run = tmp_path / "runs" / "small"
    first = start("fit", str(file), cwd=tmp_path)
    try:
        first.until(lambda: "checkpoint" in names(run), "its first checkpoint")
        second = fairlead("fit", str(file), cwd=tmp_path)
    finally:
        first.process.send_signal(signal.SIGTERM)
        ended = first.end()
    assert second.code == 2, second.text
    assert "another job is using this run directory" in second.text
    assert str(first.process.pid) in second.err
    assert "Traceback" not in second.text
    assert second.err.count("error: ") == 1
    assert "--resume never" in second.text
    assert ended.code == 143, ended.text
    assert names(run).count("start") == 1
    assert names(run)[-1] == "stop"
    # The signal may come at a step that has just been saved: nothing is saved twice.
    saved = [event["step"] for event in events(run) if event["event"] == "checkpoint"]
    assert saved[-1] == events(run)[-1]["step"]
