"""`fairlead fit --max-restarts`: the ranks of this machine are started again after a failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_checkpoint_io import TorchCheckpointIOConfig
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO
from integration_tests.jobs import JOB, changed, events, fairlead, marked, names, repository, start


def weights(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "weights-0.pt")
    return loaded


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = repository(folder / "repo")
    assert fairlead("fit", str(job), cwd=folder, environ={"WEIGHTS": "1"}).code == 0
    return weights(folder)


@pytest.mark.parametrize("method", ["fork-server", pytest.param("spawn", marks=pytest.mark.full)])
def test_a_killed_rank_costs_no_more_than_a_restart(tmp_path: Path, undisturbed: dict[str, Any], method: str) -> None:
    """The first restart is enough, it goes on from the newest checkpoint, and ends with the same bits."""
    job = repository(tmp_path / "repo")
    words = ("fit", str(job), "--max-restarts", "1", "--start-method", method)
    fit = fairlead(*words, cwd=tmp_path, environ={"WEIGHTS": "1", "FAIL": "once:1:5"})
    assert fit.code == 0, fit.text
    assert "rank 1 of 2 was killed by SIGKILL" in fit.err
    assert fit.err.count("restarting the ranks (1 of 1)") == 1
    assert "2 ranks on 1 node, ddp on cpu, 32-true, 1 thread each, gloo, Master: 127.0.0.1:" in fit.out
    assert "model       20 parameters, batch 4 per device x 2 devices = 8 in all" in fit.out
    ours = weights(tmp_path)
    assert all(torch.equal(ours[name], undisturbed[name]) for name in undisturbed)
    run = tmp_path / "runs" / "small"
    told = events(run)
    assert [event["event"] for event in told if event["event"] in ("start", "failed", "finished")] == [
        *("start", "failed", "start", "finished")
    ]
    assert [event["step"] for event in told if event["event"] == "training"] == [0, 4]
    for rank in range(2):  # of both starts
        assert (run / "logs" / f"rank-0000{rank}.log").exists()
    assert (run / "logs" / "rank-00000.log").read_text().count("INFO: start ") == 2


SPLIT: dict[str, Any] = {
    "name": "hybrid",
    "shard": 2,
    "tensor": 2,
    "plan": {"layer.0": "colwise", "layer.2": "rowwise"},
}


@pytest.mark.full
@pytest.mark.parametrize("checkpoint_io", ["distributed", pytest.param("torch", marks=pytest.mark.full)])
def test_a_killed_rank_of_a_split_model(tmp_path: Path, checkpoint_io: str) -> None:
    """Two shards of two parts of each layer: of the four ranks one is killed, and the end is the same in every bit."""
    trainer = {"devices": 4, "strategy": SPLIT, "checkpoint_io": checkpoint_io}
    states = []
    for name, environ in (("straight", {}), ("killed", {"FAIL": "once:1:5"})):
        job = repository(tmp_path / name / "repo", job=changed(JOB, trainer=trainer))
        model = job.parent.parent / "mine" / "model.py"
        layers = "torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, width))"
        model.write_text(model.read_text().replace("torch.nn.Linear(4, width)", layers))
        fit = fairlead("fit", str(job), "--max-restarts", "1", cwd=tmp_path / name, environ=environ)
        assert fit.code == 0, fit.text
        run = tmp_path / name / "runs" / "small"
        steps = [event["step"] for event in events(run) if event["event"] == "training"]
        assert steps == ([0, 4] if environ else [0])
        io = TorchFileCheckpointIO(TorchCheckpointIOConfig())
        states.append(io.load_checkpoint(run / "checkpoints" / "step-00000008"))
    straight, killed = states
    assert straight["global_step"] == killed["global_step"] == 8
    assert len(straight["state_dict"]) == 4
    assert all(torch.equal(value, killed["state_dict"][name]) for name, value in straight["state_dict"].items())


@pytest.mark.full
def test_a_new_run_is_not_begun_again_by_a_restart(tmp_path: Path) -> None:
    """`--resume never` makes a sibling once, also when the ranks fail in it."""
    job = repository(tmp_path / "repo")
    assert fairlead("fit", str(job), cwd=tmp_path).code == 0
    words = ("fit", str(job), "--resume", "never", "--max-restarts", "2")
    fit = fairlead(*words, cwd=tmp_path, environ={"FAIL": "once:1:5"})
    assert fit.code == 0, fit.text
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["small", "small-2"]
    assert [event["event"] for event in events(tmp_path / "runs" / "small-2")].count("start") == 2


def test_who_wants_another_start_of_others_gets_none_here(tmp_path: Path) -> None:
    """A rank alone hears a signal: all save and end with 75, which asks whoever is outside, once."""
    job = repository(tmp_path / "repo")
    slow = ("--set", "model.args.delay=0.2", "--set", "trainer.max_steps=200", "--set", "trainer.requeue=exit_code")
    fit = start("fit", str(job), *slow, "--max-restarts", "3", cwd=tmp_path, environ={"OMP_NUM_THREADS": "2,1"})
    run = tmp_path / "runs" / "small"
    fit.until(lambda: "checkpoint" in names(run), "the first checkpoint")
    variables = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in marked(fit.marker)}
    (rank,) = (pid for pid, found in variables.items() if b"RANK=1" in found)
    os.kill(rank, signal.SIGUSR1)
    ended = fit.end()
    assert ended.code == 75, ended.text
    assert "restarting the ranks" not in ended.err
    assert names(run).count("start") == 1
    assert "2 threads each" in ended.out  # what is for nested regions is no number of ours


def test_the_same_failure_again_and_again_ends_it(tmp_path: Path) -> None:
    job = repository(tmp_path / "repo")
    fit = fairlead("fit", str(job), "--max-restarts", "9", cwd=tmp_path, environ={"FAIL": "raise:1:5"})
    assert fit.code == 1
    assert fit.err.count("restarting the ranks") == 2
    assert "no luck in the step" in fit.err
    assert "the same failure 3 times at step 5: another restart would not help" in fit.err
    assert "fairlead_launch" not in fit.err
    assert "no luck in the step" in (tmp_path / "runs" / "small" / "logs" / "rank-00001.log").read_text()
