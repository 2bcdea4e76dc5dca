"""Ordinary `train.py` scripts, run by `python`, by torchrun, and with `ddp_spawn`: two processes, one run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_runs import read_history
from fairlead_runs.commit import list_checkpoints, verify
from integration_tests.forked import fork

ROOT = Path(__file__).parents[1]
LIMIT_S = 300.0  # only against a script that would hang for ever
CLOSE = 1e-6
"""The largest difference of any weight: with two ranks float32 values are added in another order."""

HEAD = f"""
import sys
import warnings
sys.path.append({str(ROOT / "packages" / "lightning" / "tests")!r})  # tiny_job
warnings.filterwarnings("ignore")
import torch
import lightning.pytorch as L
from torch.utils.data import DataLoader, DistributedSampler
from fairlead import Fairlead, RunConfig, Trainer, TrainerConfig, fabric
from fairlead.config import CheckpointConfig
from tiny_job import Data, Line, loader, samples, weights

QUIET = dict(enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, num_sanity_val_steps=0)

def config(**more):
    return TrainerConfig.model_validate({{"accelerator": "cpu", "devices": 2, "strategy": "ddp", **QUIET, **more}})

def say(text):
    sys.stdout.write(text + "\\n")  # one write, so that the lines of two ranks do not mix
    sys.stdout.flush()

class Split(L.LightningDataModule):
    # Rank r of n takes the samples r, r + n, ...: Lightning itself would shuffle them.

    def __init__(self, batch_size):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        sampler = DistributedSampler(
            samples(), num_replicas=self.trainer.world_size, rank=self.trainer.global_rank, shuffle=False)
        return DataLoader(samples(), batch_size=self.hparams["batch_size"], sampler=sampler)

    val_dataloader = train_dataloader
"""


def environment() -> dict[str, str]:
    """This process's, without what a launcher of ours may have left."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FAIRLEAD", "SLURM", "MASTER", "PL_"))}
    kept = {k: v for k, v in kept.items() if k not in {"RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"}}
    with socket.socket() as free:  # other tests on this machine start jobs too, on the usual port
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    return {**kept, "OMP_NUM_THREADS": "1", "MASTER_PORT": port}


def script(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return path


def run(folder: Path, *command: str, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if expect is not None:
        assert done.returncode == expect, done.stdout + done.stderr
    return done


def python(folder: Path, body: str, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs the script; `fresh` as a user does, else forked: its rank 1 is fresh in both."""
    command = [str(script(folder, body)), *arguments]
    if fresh:
        return run(folder, sys.executable, *command)
    files = folder / "said.out", folder / "said.err"
    with files[0].open("w") as out, files[1].open("w") as err:
        code = fork(command, environment(), folder, out, err).wait(LIMIT_S)
    done = subprocess.CompletedProcess(command, code, *(file.read_text() for file in files))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def torchrun(folder: Path, *arguments: str, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    return run(folder, *launcher, "train.py", *arguments, expect=expect)


def events(run_dir: Path, name: str | None = None) -> list[dict[str, Any]]:
    return [e for e in read_history(run_dir / "history.jsonl") if name in (None, e["event"])]


def weights(checkpoint: Path) -> torch.Tensor:
    state = torch.load(checkpoint / "state.ckpt", weights_only=True)["state_dict"]
    return torch.cat([value.flatten() for value in state.values()])


def reference(folder: Path, steps: int, **settings: Any) -> torch.Tensor:
    """The weights of one process with plain Lightning and the global batch of two ranks."""
    body = f"""
    model = Line()
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps={steps}, logger=False, enable_checkpointing=False,
                        **QUIET, **{settings!r})
    data = samples()
    trainer.fit(model, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
    torch.save(weights(model), "reference.pt")
    """
    folder.mkdir(parents=True)
    with (folder / "said.txt").open("w") as said:
        process = fork([str(script(folder, body))], environment(), folder, said, said)
    assert process.wait(LIMIT_S) == 0, (folder / "said.txt").read_text()
    found: torch.Tensor = torch.load(folder / "reference.pt", weights_only=True)
    return found


# -- Lightning's launcher


def test_python_train_py_starts_its_ranks_and_hands_the_run_over(tmp_path: Path) -> None:
    """`python train.py` trains on two ranks as one process with the global batch would.

    The same script then validates, goes on with a second run, and makes a second trainer: the ranks
    are there already and are not started again.
    """
    body = """
    model = Line()
    trainer = Trainer(config(max_steps=8), run=RunConfig(name="one", dir="runs"))
    trainer.fit(model, datamodule=Split(4))
    say(f"rank {trainer.global_rank} of {trainer.world_size} at {trainer.global_step}")
    (found,) = trainer.validate(model, datamodule=Data(), verbose=False)
    say(f"validated {found['val/loss']:.6f}")
    second = Trainer(config(max_steps=4), run=RunConfig(name="two", dir="runs"))
    second.fit(Line(), datamodule=Data())
    say(f"second: rank {second.global_rank} at {second.global_step}")
    trainer.fit(model, datamodule=Split(4))
    say("all done")
    """
    done = python(tmp_path, body, fresh=True)
    lines = done.stdout.splitlines()
    assert sorted(x for x in lines if x.startswith("rank")) == ["rank 0 of 2 at 8", "rank 1 of 2 at 8"]
    assert sorted(x for x in lines if x.startswith("second")) == ["second: rank 0 at 4", "second: rank 1 at 4"]
    assert len({x for x in lines if x.startswith("validated")}) == 1
    assert lines.count("all done") == 2
    one, two = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    for path in (one, two):
        assert len(events(path, "start")) == len(events(path, "finished")) == 1
        (start,) = events(path, "start")
        assert start["world_size"] == 2
        assert all(verify(c.path, deep=True) == [] for c in list_checkpoints(path / "checkpoints"))
        newest = list_checkpoints(path / "checkpoints")[-1]
        assert {p.name for p in newest.path.glob("rank-*")} == {"rank-00000.pt", "rank-00001.pt"}
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["one", "two"]
    expected = reference(tmp_path / "reference", 8)
    assert float((weights(one / "checkpoints" / "step-00000008") - expected).abs().max()) < CLOSE
    # Again: everything is finished, but `validate` still starts rank 1, which finds nothing to do before it.
    before = {p: p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file()}
    again = python(tmp_path, body)
    assert again.stdout.count("is finished") == 3
    assert again.stdout.count("all done") == 2
    assert {p: p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file()} == before


@pytest.mark.full
def test_a_script_may_begin_with_a_prediction(tmp_path: Path) -> None:
    """The documents' three lines: Lightning starts rank 1 for it, and both return what all have predicted."""
    body = """
    trainer = Trainer(config(), run=RunConfig(name="one", dir="runs"))
    predictions = trainer.distributed_predict(Line(), dataloaders=loader(), ckpt_path="never")
    say(f"rank {trainer.global_rank}: {len(predictions)}, {predictions.to_torch().shape}")
    """
    lines = python(tmp_path, body).stdout.splitlines()
    assert {f"rank {rank}: 32, torch.Size([32, 1])" for rank in (0, 1)} <= set(lines)
    assert (tmp_path / "runs" / "one" / "predictions-1" / "manifest.json").is_file()


@pytest.mark.full
def test_accumulated_micro_batches_on_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """Two ranks x two micro-batches of two samples are a global batch of eight; gradients are sent once for each."""
    body = """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    sent = []

    def count(state, bucket):
        sent.append(bucket.index())
        return allreduce_hook(None, bucket)

    class Counting(Line):
        def on_train_start(self):
            self.trainer.strategy.model.register_comm_hook(None, count)

    Trainer(config(max_steps=4, accumulate_grad_batches=2, gradient_clip_val=0.5), run=RunConfig(name="run")).fit(
        Counting(), datamodule=Split(2))
    say(f"sent {sent}")
    """
    assert python(tmp_path, body).stdout.count("sent [0, 0, 0, 0]") == 2
    expected = reference(tmp_path / "reference", 4, gradient_clip_val=0.5)
    assert float((weights(tmp_path / "runs/run/checkpoints/step-00000004") - expected).abs().max()) < CLOSE


@pytest.mark.full
@pytest.mark.slow
def test_the_global_batch_survives_another_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks, then one, then two again, with `keep_global`: the same eight samples make each step."""
    body = """
    devices, steps, policy = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    trainer = Trainer(
        config(devices=devices, strategy="auto", max_steps=steps, batch_policy=None if policy == "none" else policy),
        run=RunConfig(name="run"))
    trainer.fit(Line(), datamodule=Split(4))
    say(f"accumulate {trainer.accumulate_grad_batches}")
    """
    python(tmp_path, body, "2", "4", "none")
    assert "accumulate 2" in python(tmp_path, body, "1", "8", "keep_global").stdout
    assert "accumulate 1" in python(tmp_path, body, "2", "12", "keep_global").stdout
    expected = reference(tmp_path / "reference", 12)
    assert float((weights(tmp_path / "runs/run/checkpoints/step-00000012") - expected).abs().max()) < CLOSE


@pytest.mark.full
def test_a_finished_run_before_the_one_that_starts_ranks(tmp_path: Path) -> None:
    """Rank 1 runs the script from its first line: what was finished in rank 0 is finished there too."""
    body = """
    for name, steps in (("first", 4), ("second", int(sys.argv[1]))):
        trainer = Trainer(config(max_steps=steps), run=RunConfig(name=name))
        trainer.fit(Line(), datamodule=Data())
        say(f"{name}: rank {trainer.global_rank} at {trainer.global_step}")
    """
    python(tmp_path, body, "4")
    done = python(tmp_path, body, "8")
    lines = [line for line in done.stdout.splitlines() if line.startswith("second:")]
    assert sorted(lines) == ["second: rank 0 at 8", "second: rank 1 at 8"]
    assert [len(events(tmp_path / "runs" / name, "start")) for name in ("first", "second")] == [1, 2]


@pytest.mark.full
@pytest.mark.slow
def test_ddp_spawn_trains_and_returns_the_result(tmp_path: Path) -> None:
    """The ranks are spawned; the trainer, with its run, travels to them."""
    body = """
    def main():
        model = Line()
        trainer = Trainer(config(strategy="ddp_spawn", max_steps=8), run=RunConfig(name="run"))
        trainer.fit(model, datamodule=Data())
        say(f"metrics {sorted(trainer.callback_metrics)}")
        torch.save(weights(model), "model.pt")
        say(f"best {trainer.checkpoint_callback.best_model_path}")

    if __name__ == "__main__":
        main()
    """
    done = python(tmp_path, body, fresh=True)
    run_dir = tmp_path / "runs" / "run"
    assert [e["event"] for e in events(run_dir)][-1] == "finished"
    newest = list_checkpoints(run_dir / "checkpoints")[-1]
    assert {p.name for p in newest.path.glob("rank-*")} == {"rank-00000.pt", "rank-00001.pt"}
    assert float((weights(newest.path) - torch.load(tmp_path / "model.pt", weights_only=True)).abs().max()) == 0
    assert "train/loss" in done.stdout
    assert str(newest.path) in done.stdout


# -- torchrun


UNDER_TORCHRUN = """
    import os
    run = RunConfig(name="run", resume=sys.argv[1])
    trainer = Trainer(config(devices="auto", strategy="auto", max_steps=8), run=run)
    try:
        trainer.fit(Line(lr=float(sys.argv[2])), datamodule=Data())
    except Exception as error:
        say(f"rank {os.environ['RANK']}: {type(error).__name__}")
        raise
    say(f"rank {trainer.global_rank} in {trainer.session.path.name} at {trainer.global_step}")
    """


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a script has trained one run under torchrun."""
    folder = tmp_path_factory.mktemp("torchrun")
    script(folder, UNDER_TORCHRUN)
    done = torchrun(folder, "auto", "0.05")
    assert done.stdout.count("in run at 8") == 2
    return folder


@pytest.mark.full
def test_torchrun_one_rank_decides_for_all(trained: Path) -> None:
    """The ranks that torchrun has started are used, and rank 0 tells the others of the run."""
    never = torchrun(trained, "never", "0.05")
    assert never.stdout.count("in run-2 at 8") == 2


@pytest.mark.full
def test_an_error_on_rank_0_ends_all_ranks(trained: Path) -> None:
    """A run directory of other settings: every rank says so at once, and none waits for another."""
    refused = torchrun(trained, "auto", "0.01", expect=None)
    assert refused.returncode != 0
    said = [line for line in refused.stdout.splitlines() if line.startswith("rank")]
    # torchrun stops the other rank as soon as one has ended; each that speaks says the same.
    assert said
    assert {line.partition(": ")[2] for line in said} == {"FingerprintError"}
    assert "0.05" in refused.stderr
    # Of rank 0; the other says one line at most.
    assert refused.stderr.count("model.args.lr: 0.05 -> 0.01") == 1, refused.stderr
    assert len(events(trained / "runs" / "run", "start")) == 1


# -- the callback


CALLBACK = """
    import time
    devices, epochs, slow = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

    class Slow(Line):
        resume_attributes = ()  # `seen` is of this process

        def on_train_batch_end(self, *args):
            time.sleep(slow)

    model = Slow()
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, max_epochs=epochs, enable_checkpointing=False, logger=False, **QUIET,
        callbacks=[Fairlead(run="runs/mine", checkpoint=CheckpointConfig(every_n_steps=2))],
    )
    trainer.fit(model, datamodule=Data())
    say(f"rank {trainer.global_rank} trained {model.seen} now at {trainer.global_step}")
    """


def kill_in_training(folder: Path, devices: int, step: int) -> None:
    """Starts the callback's script and kills every process of it once a checkpoint of `step` is complete."""
    command = [sys.executable, str(script(folder, CALLBACK)), str(devices), "3", "0.3"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (folder / f"runs/mine/checkpoints/step-{step:08d}").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 2])
def test_an_unmodified_script_goes_on_after_kill_9(tmp_path: Path, devices: int) -> None:
    """One callback: steps and metrics.csv go on; a run that is finished is not trained again."""
    per_epoch = 8 // devices
    kill_in_training(tmp_path, devices, per_epoch)
    done = python(tmp_path, CALLBACK, str(devices), "3", "0")
    run_dir = tmp_path / "runs" / "mine"
    (first,) = [line for line in done.stdout.splitlines() if line.startswith("rank 0")]
    trained = json.loads(first[first.index("[") : first.index("]") + 1])
    assert trained[0] >= per_epoch
    assert f"now at {trained[-1] + 1}" in first
    assert trained[-1] == 3 * per_epoch - 1
    assert [e["start"] for e in events(run_dir, "start")] == [1, 2]
    assert len(events(run_dir, "finished")) == 1
    rows = (run_dir / "metrics.csv").read_text().splitlines()[1:]
    steps = [int(row.partition(",")[0]) for row in rows]
    assert steps == sorted(set(steps))  # each step once
    assert set(trained) <= set(steps)
    again = python(tmp_path, CALLBACK, str(devices), "3", "0")
    assert "is finished" in again.stdout
    assert again.stdout.count("trained []") == devices
    assert [e["start"] for e in events(run_dir, "start")] == [1, 2]
    # The run may be trained for longer.
    more = python(tmp_path, CALLBACK, str(devices), "4", "0")
    assert more.stdout.count("now at") == devices
    assert f"trained {list(range(trained[-1] + 1, trained[-1] + 1 + per_epoch))}" in more.stdout


# -- fabric


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2])
def test_a_loop_of_ones_own_on_fabric(tmp_path: Path, devices: int) -> None:
    """`fabric(config)` trains as Lightning's Trainer does, on one process and on two."""
    body = """
    devices = int(sys.argv[1])
    fab = fabric(TrainerConfig(accelerator="cpu", devices=devices, strategy="ddp" if devices == 2 else "auto"))
    fab.launch()
    net = Line().net
    net, optimizer = fab.setup(net, torch.optim.Adam(net.parameters(), lr=0.05))
    data = fab.setup_dataloaders(DataLoader(samples(), batch_size=8 // devices))
    for x, y in data:
        optimizer.zero_grad()
        fab.backward(torch.nn.functional.mse_loss(net(x), y))
        optimizer.step()
    if fab.is_global_zero:
        torch.save(torch.cat([p.detach().flatten() for p in net.parameters()]), "fabric.pt")
    say(f"rank {fab.global_rank} of {fab.world_size}")
    """
    done = python(tmp_path, body, str(devices))
    assert done.stdout.count(f"of {devices}") == devices
    expected = reference(tmp_path / "reference", 4)
    found = torch.load(tmp_path / "fabric.pt", weights_only=True)
    assert float((found - expected).abs().max()) < CLOSE


# -- the example


@pytest.mark.slow
def test_the_digits_example_reaches_its_accuracy(tmp_path: Path) -> None:
    """An unmodified Lightning script with one line of Fairlead, as the README shows it."""
    train = ROOT / "examples" / "digits" / "train.py"
    done = run(tmp_path, sys.executable, str(train), "--epochs", "6")
    (line,) = [line for line in done.stdout.splitlines() if "held-out accuracy" in line]
    assert float(line.rpartition(" ")[2].rstrip("%")) > 95
    assert events(tmp_path / "runs" / "digits")[-1]["event"] == "finished"
