"""A loop of one's own with `LoopRun`: what it keeps, how it goes on, and what it refuses."""

from __future__ import annotations

import math
import os
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.fabric as lf
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from tiny_job import checkpoints, contents, events, latest, metric_rows
from tiny_job import fit as fit_with_a_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from fairlead import LoopRun, RunConfig, TrainerConfig, fabric
from fairlead.config import CheckpointConfig
from fairlead.errors import (
    CheckpointError,
    ConfigError,
    FingerprintError,
    RunDirectoryError,
    RunFailedError,
    RunLockedError,
)
from fairlead_distributed import ResumableDistributedSampler, derive_seed
from fairlead_hpc_signals import StopOutcome, StopReason
from fairlead_lightning.custom_loop.state import plain
from fairlead_runs.commit import Syscalls, verify

SAMPLES, BATCH, STEPS = 22, 4, 6  # to an epoch, the last of half a batch


class InterruptedHereError(Exception):
    """Takes the place of a kill."""


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Tanh(), nn.Linear(width, 1)
        )
        self.mean_loss = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Job:
    """One start of a user's script, in this process; seeded and set up from the beginning."""

    def __init__(self, root: Path, *, epochs: int = 2, every: int = 3, die_at: int | None = None, **run: Any) -> None:
        self.epochs, self.every, self.die_at = epochs, every, die_at
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        self.fabric: lf.Fabric = run.pop("fabric", None) or fabric(TrainerConfig(accelerator="cpu", devices=1))
        data = TensorDataset(torch.randn(SAMPLES, 3), torch.randn(SAMPLES, 1))
        module = Net(run.pop("width", 6))
        model, optimizer = self.fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        self.model: Any = model
        self.sampler = ResumableDistributedSampler(SAMPLES, seed=4)
        self.loader = DataLoader(data, batch_size=BATCH, sampler=self.sampler)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        self.optimizer: Any = optimizer
        given = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler,
            "sampler": self.sampler,
            "best": 9.0,
        }
        leave_out = run.pop("leave_out", ())
        given = {name: value for name, value in given.items() if name not in leave_out} | run.pop("add", {})
        run.setdefault("config", {"lr": 0.1, "max_epochs": epochs})
        self.run = LoopRun(self.fabric, run.pop("run", root / "run"), **run, **given)
        self.seen: list[int] = []

    def train(self) -> Job:
        with self.run as run:
            run.restore()
            for run.epoch in range(self.sampler.epoch, self.epochs):
                for x, y in run.batches(self.loader):
                    self.step(x, y)
            run.finish()
        return self

    def step(self, x: Tensor, y: Tensor) -> None:
        run = self.run
        if run.step == self.die_at:
            raise InterruptedHereError
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        self.fabric.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.model.module.mean_loss.update(loss.detach())
        run.step += 1
        self.seen.append(run.step)
        run.state["best"] = min(run.state["best"], np.float64(loss.item()))
        run.log({"loss": loss, "noise": random.random() + np.random.rand()})
        if run.step % self.every == 0:
            run.save(metrics={"val_loss": loss})

    def result(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "momentum": [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()],
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "best": self.run.state["best"],
            "mean": self.model.module.mean_loss.compute(),
            "next": [torch.rand(3), random.random(), float(np.random.rand())],
            "metrics": (self.run.path / "metrics.csv").read_text(),
        }


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two results are not the same bits."""
    if isinstance(one, Tensor):
        same = torch.equal(one, other)
    elif isinstance(one, dict):
        yield from (d for key in one.keys() | other.keys() for d in differences(one[key], other[key], f"{path}.{key}"))
        same = True
    elif isinstance(one, (list, tuple)):
        pairs = enumerate(zip(one, other, strict=True))
        yield from (d for index, (a, b) in pairs for d in differences(a, b, f"{path}.{index}"))
        same = True
    else:
        same = one == other
    if not same:
        yield f"{path}: {one} is not {other}"


def stopped_by_keyboard(x: Tensor, y: Tensor) -> None:
    raise KeyboardInterrupt


def interrupted(root: Path, at: int, **more: Any) -> Job:
    job = Job(root, die_at=at, **more)
    with pytest.raises(InterruptedHereError):
        job.train()
    return job


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a run that nothing has disturbed."""
    return Job(tmp_path_factory.mktemp("whole")).train().result()


# -- what is kept


def test_a_stop_is_in_the_history_with_its_reason(tmp_path: Path) -> None:
    """And not as `SystemExit: 75`."""
    reason = StopReason("time_limit", "EndTime=...", scheduler_requeues=False)
    outcome = StopOutcome(75, reason, True, requeued="scontrol requeue 17")
    with pytest.raises(SystemExit) as ended, Job(tmp_path).run:
        outcome.exit()
    assert ended.value.code == 75
    (stop,) = events(tmp_path / "run", "stop")
    assert (stop["reason"], stop["evidence"], stop["requeued"]) == ("time_limit", "EndTime=...", "scontrol requeue 17")


def test_a_loop_gets_a_run_directory(tmp_path: Path) -> None:
    job = Job(tmp_path).train()
    run = tmp_path / "run"
    names = [event["event"] for event in events(run)]
    assert names == ["start", "training", "checkpoint", "checkpoint", "checkpoint", "checkpoint", "finished"]
    assert latest(run).step == 2 * STEPS
    assert all(verify(one.path, deep=True) == [] for one in checkpoints(run))
    assert [row["step"] for row in metric_rows(run)] == [str(step) for step in range(1, 2 * STEPS + 1)]
    assert [row["epoch"] for row in metric_rows(run)] == ["0"] * STEPS + ["1"] * STEPS
    assert latest(run).metadata["world_size"] == 1
    assert "test_loop_run:Net" in (run / "job.yaml").read_text()
    assert job.run.finished == "step 12"


def test_checkpoints_hold_plain_data_only(tmp_path: Path) -> None:
    """Reading them runs no code; a NumPy number in the state has become Python's."""
    Job(tmp_path).train()
    folder = latest(tmp_path / "run").path
    state = torch.load(folder / "state.ckpt", weights_only=True)
    assert set(state) == {"model", "optimizer", "scheduler", "sampler", "best", "fairlead"}
    assert type(state["best"]) is float
    assert "rng" in torch.load(folder / "rank-00000.pt", weights_only=True)


def test_the_best_checkpoint_stays_after_a_restart_that_has_measured_nothing_yet(tmp_path: Path) -> None:
    def train(values: dict[int, float], die_at: int | None) -> None:
        job = Job(tmp_path, every=99, die_at=die_at, checkpoint=CheckpointConfig(keep_last=1, keep_best=1))
        real = job.step

        def step(x: Tensor, y: Tensor) -> None:
            real(x, y)
            now = job.run.step
            job.run.save(metrics={"val/loss": values[now]} if now in values else None)

        job.step = step  # type: ignore[method-assign]
        with pytest.raises(InterruptedHereError):
            job.train()

    train({2: 0.1, 3: 0.5}, die_at=4)
    assert [c.step for c in checkpoints(tmp_path / "run")] == [2, 4]
    train({}, die_at=6)
    assert [c.step for c in checkpoints(tmp_path / "run")] == [2, 6]


def test_a_backend_in_the_background_is_drained_at_the_end(tmp_path: Path, whole: dict[str, Any]) -> None:
    fab = fabric(TrainerConfig(accelerator="cpu", devices=1, checkpoint_io="async"))
    interrupted(tmp_path, 8, fabric=fab)
    assert not list((tmp_path / "run/checkpoints").glob(".stage-*"))
    job = Job(tmp_path, fabric=fabric(TrainerConfig(accelerator="cpu", devices=1, checkpoint_io="async"))).train()
    assert job.seen[0] == 7
    assert list(differences(whole, job.result())) == []
    assert [e["event"] for e in events(tmp_path / "run")][-2:] == ["checkpoint", "finished"]


def test_the_fabric_is_given_back_as_it_was(tmp_path: Path) -> None:
    job = Job(tmp_path)
    before = job.fabric.strategy.checkpoint_io
    job.train()
    assert job.fabric.strategy.checkpoint_io is before


# -- exact resume


@pytest.mark.parametrize("die_at", [0, 1, STEPS - 1, STEPS, STEPS + 1, 2 * STEPS - 1])
@pytest.mark.parametrize("every", [1, 3])
def test_it_goes_on_bit_for_bit(tmp_path: Path, whole: dict[str, Any], die_at: int, every: int) -> None:
    """Saved at the first, a middle and the last batch of an epoch; the loader makes an iterator more."""
    interrupted(tmp_path, die_at, every=every)
    job = Job(tmp_path, every=every).train()
    assert job.seen == list(range(die_at // every * every + 1, 2 * STEPS + 1))
    assert list(differences(whole, job.result())) == []


def test_it_goes_on_bit_for_bit_twice_in_a_row(tmp_path: Path, whole: dict[str, Any]) -> None:
    interrupted(tmp_path, 4)
    interrupted(tmp_path, 5)
    interrupted(tmp_path, 11)
    assert list(differences(whole, Job(tmp_path).train().result())) == []


def test_workers_get_another_seed_in_each_epoch(tmp_path: Path) -> None:
    """The iterator takes no number from the generators, and yet the workers' seeds do not repeat."""
    seeds = []

    class Watched(DataLoader[Any]):
        def __iter__(self) -> Any:
            seeds.append(torch.initial_seed())
            return super().__iter__()

    job = Job(tmp_path)
    job.loader = Watched(job.loader.dataset, batch_size=BATCH, sampler=job.sampler)
    before = torch.get_rng_state()
    with job.run as run:
        run.restore()
        for _ in range(2):
            list(run.batches(job.loader))
    assert len(set(seeds)) == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert seeds[0] == derive_seed("loader", 4, 0, 0, 0, 0)


def test_a_loader_with_its_own_state_is_carried_for_each_rank(tmp_path: Path) -> None:
    class Stateful:
        """Counts what it has given."""

        def __init__(self) -> None:
            self.given = 0

        def state_dict(self) -> dict[str, int]:
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.given = state["given"]

        def __iter__(self) -> Iterator[Tensor]:
            while self.given < 8:
                self.given += 1
                yield torch.full((1,), float(self.given))

    def start(die_at: int) -> list[float]:
        loader, seen = Stateful(), []
        fab = fabric(TrainerConfig(accelerator="cpu", devices=1))
        with LoopRun(fab, tmp_path / "run", per_rank={"loader": loader, "mine": [1]}) as run:
            run.restore()
            batches: Iterator[Tensor] = run.batches(loader)  # type: ignore[arg-type]
            for batch in batches:
                seen.append(batch.item())
                run.step += 1
                run.per_rank["mine"] = [run.step]
                run.save()
                if run.step == die_at:
                    break
            assert run.per_rank["mine"] == [run.step]
        return seen

    assert start(3) == [1, 2, 3]
    assert start(8) == [4, 5, 6, 7, 8]


def test_what_is_frozen_and_what_is_evaluated_comes_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.run as run:
        run.restore()
        job.model.layers[0].weight.requires_grad_(False)
        job.model.layers[1].eval()
        run.save()
    again = Job(tmp_path)
    with again.run as run:
        assert run.restore()
        assert not again.model.layers[0].weight.requires_grad
        assert again.model.layers[4].weight.requires_grad
        assert not again.model.layers[1].training
        assert again.model.layers[2].training


def test_the_gradient_scaler_is_carried(tmp_path: Path) -> None:
    def start() -> tuple[LoopRun, Any]:
        fab = lf.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        scaler = fab.strategy.precision.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # type: ignore[attr-defined]
        return LoopRun(fab, tmp_path / "run"), scaler

    run, scaler = start()
    with run:
        run.restore()
        scaler.scale(torch.zeros(1))
        scaler.update(2.0)
        run.save()
    run, scaler = start()
    with run:
        run.restore()
        assert scaler.get_scale() == 2.0


def test_metrics_of_steps_that_are_done_again_are_cut_off(tmp_path: Path) -> None:
    """Also what came later in the row of the checkpoint's step, and columns that only came then."""
    job = Job(tmp_path, every=99)
    real = job.step

    def step(x: Tensor, y: Tensor) -> None:
        real(x, y)
        if job.run.step == 3:
            job.run.save()
            job.run.log({"late": 1.0})
        if job.run.step == 5:
            job.run.log({"later": 2.0})
            raise InterruptedHereError

    job.step = step  # type: ignore[method-assign]
    with pytest.raises(InterruptedHereError):
        job.train()
    assert "late,later" in (tmp_path / "run/metrics.csv").read_text()
    again = Job(tmp_path, every=99).train()
    assert again.seen[0] == 4
    result = again.result()
    assert list(differences(Job(tmp_path / "whole", every=99).train().result(), result)) == []


# -- which run


def test_a_finished_run_says_so_and_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Job(tmp_path).train()
    before = contents(tmp_path)
    again = Job(tmp_path).train()
    assert "is finished: step 12" in capsys.readouterr().out
    assert again.seen == []
    assert list(differences(first.model.state_dict(), again.model.state_dict())) == []
    assert contents(tmp_path) == before
    last = Job(tmp_path)
    with last.run as run:
        run.restore()
        for call in (lambda: run.save(), lambda: run.log({"a": 1.0}), lambda: run.batches(last.loader)):
            with pytest.raises(RunDirectoryError, match="raise `max_steps`"):
                call()
    assert contents(tmp_path) == before


def test_a_finished_run_goes_on_when_more_is_asked_for(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole", epochs=3).train().result()
    Job(tmp_path, epochs=2).train()
    job = Job(tmp_path, epochs=3).train()
    assert job.seen == list(range(2 * STEPS + 1, 3 * STEPS + 1))
    assert list(differences(whole, job.result())) == []


def test_another_config_is_another_run(tmp_path: Path) -> None:
    interrupted(tmp_path, 4)
    before = contents(tmp_path)
    with pytest.raises(FingerprintError, match=r"trainer\.lr: 0\.1 -> 0\.2"):
        Job(tmp_path, config={"lr": 0.2, "max_epochs": 2}).train()
    assert contents(tmp_path) == before
    job = Job(tmp_path, config={"lr": 0.2}, run=RunConfig(name="run", dir=str(tmp_path), resume="never")).train()
    assert job.run.path.name == "run-2"
    assert job.seen[0] == 1


def test_a_config_that_cannot_be_written_down_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a setting is a Net, which is not plain data"):
        Job(tmp_path, config={"model": Net()}).train()
    with pytest.raises(ConfigError, match="accumulate_grad_batches cannot be 'two'"):
        Job(tmp_path, config={"accumulate_grad_batches": "two"}).train()
    assert not (tmp_path / "run").exists()


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.run, pytest.raises(RunLockedError):
        Job(tmp_path).train()


def test_how_a_start_ended_is_in_the_history(tmp_path: Path) -> None:
    interrupted(tmp_path, 4)
    assert events(tmp_path / "run")[-1]["event"] == "failed"
    assert events(tmp_path / "run")[-1]["step"] == 4
    job = Job(tmp_path)
    job.step = stopped_by_keyboard  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        job.train()
    assert events(tmp_path / "run")[-1]["event"] == "stop"
    job = Job(tmp_path)
    with job.run as run:
        run.restore()
    assert events(tmp_path / "run")[-1]["reason"] == "the loop ended without finish()"


# -- what does not fit


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"leave_out": ("scheduler",)}, "also has 'scheduler', which was not given"),
        ({"add": {"ema": 0.5}}, "has no 'ema'"),
        ({"per_rank": {"mine": 1}}, "has no 'mine'"),
        ({"width": 7}, "size mismatch"),
    ],
)
def test_other_objects_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    interrupted(tmp_path, 4)
    job = Job(tmp_path, **change)
    with pytest.raises(CheckpointError) as caught, job.run as run:
        run.restore()
    assert said in str(caught.value)
    assert "step-00000003" in str(caught.value)
    assert events(tmp_path / "run")[-1]["event"] == "failed"
    assert Job(tmp_path).train().seen[0] == 4  # nothing is lost


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, 4)
    job = Job(tmp_path)
    less = job.fabric.setup_optimizers(torch.optim.SGD(job.model.module.layers[0].parameters(), lr=0.1))
    job.run.state["optimizer"] = less
    with pytest.raises(CheckpointError, match="parameter group"), job.run as run:
        run.restore()


def test_data_of_another_length_are_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, 4)
    job = Job(tmp_path)
    job.run.state["sampler"] = ResumableDistributedSampler(SAMPLES - 1, seed=4)
    with pytest.raises(CheckpointError, match="the number of samples was 22, now 21"), job.run as run:
        run.restore()


def test_a_state_of_another_kind_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, 4)
    job = Job(tmp_path)
    job.run.state["scheduler"] = job.sampler
    with pytest.raises(CheckpointError, match="ResumableDistributedSampler"), job.run as run:
        run.restore()


def test_checkpoints_of_others_are_refused(tmp_path: Path) -> None:
    fit_with_a_trainer(tmp_path / "trainer", max_steps=2)
    by_trainer = latest(tmp_path / "trainer/run").path
    torch.save({"model": {}}, tmp_path / "plain.ckpt")
    for path in (by_trainer, by_trainer / "state.ckpt", tmp_path / "plain.ckpt"):
        job = Job(tmp_path, run=RunConfig(name="run", dir=str(tmp_path), resume=str(path), seed=None))
        with pytest.raises(CheckpointError, match="no checkpoint of a loop's run"), job.run as run:
            run.restore()


def test_a_new_run_may_begin_from_a_checkpoint_of_another(tmp_path: Path) -> None:
    interrupted(tmp_path, 4)
    path = str(latest(tmp_path / "run").path)
    job = Job(tmp_path, config={"lr": 0.3}, run=RunConfig(name="run", dir=str(tmp_path), resume=path)).train()
    assert job.run.path.name == "run-2"
    assert job.seen[0] == 4
    assert metric_rows(job.run.path)[0]["step"] == "4"


def test_a_flipped_bit_in_a_ranks_part_is_found(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint before is used; where there is none, the run begins anew."""
    interrupted(tmp_path, 4)
    file = latest(tmp_path / "run").path / "rank-00000.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    job = Job(tmp_path).train()
    assert "rank-00000.pt: its xxh3_128 checksum is wrong" in capsys.readouterr().out
    assert list(differences(whole, job.result())) == []


# -- what is refused before anything is lost


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros(2), r"thing is a numpy\.ndarray"),
        ({"deep": [1, lambda: 1]}, r"thing\['deep'\]\[1\] is a builtins\.function"),
        (CheckpointConfig(), r"thing is a fairlead\.config\.checkpoint\.CheckpointConfig"),
        (object(), "cannot be read from a checkpoint again"),
        (torch.Generator(), "torch._C.Generator"),
    ],
)
def test_what_could_not_be_read_again_is_refused_at_once(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Job(tmp_path, add={"thing": value})


def test_what_becomes_unreadable_later_is_an_error_of_the_save(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.run as run:
        run.restore()
        run.state["best"] = np.zeros(1)
        with pytest.raises(ConfigError, match=r"best is a numpy\.ndarray"):
            run.save()
    assert checkpoints(tmp_path / "run") == []
    assert not list((tmp_path / "run/checkpoints").glob(".stage-*"))


def test_plain_data_keep_their_types() -> None:
    given = {"a": (1, [2.0, None]), "b": Counter({3: 1}), "c": {4}, "d": np.float32(0.5), 5: torch.Size([1])}
    found = plain(given, "x")
    assert found == given
    assert [type(v) for v in found.values()] == [tuple, Counter, set, float, torch.Size]


def test_the_order_of_calls_is_checked(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with pytest.raises(ConfigError, match="the run is not open"):
        job.run.restore()
    with job.run as run:
        for call in (run.save, run.finish, lambda: run.log({}), lambda: run.batches(job.loader)):
            with pytest.raises(ConfigError, match=r"before restore\(\)"):
                call()
        assert run.restore() is False
        with pytest.raises(ConfigError, match="restored already"):
            run.restore()
    with pytest.raises(ConfigError, match="opened once"), job.run:
        pass


def test_loaders_whose_place_is_not_saved_are_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.run as run:
        run.restore()
        with pytest.raises(ConfigError, match="set up by Fabric"):
            run.batches(job.fabric.setup_dataloaders(job.loader, use_distributed_sampler=False))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="cannot be saved"):
            run.batches(DataLoader(job.loader.dataset, batch_size=2, shuffle=True))
        other = ResumableDistributedSampler(SAMPLES)
        with pytest.raises(ConfigError, match="cannot be saved"):
            run.batches(DataLoader(job.loader.dataset, sampler=other))
    with pytest.raises(ConfigError, match="what setup_dataloaders returned"):
        LoopRun(job.fabric, loader=job.fabric.setup_dataloaders(job.loader, use_distributed_sampler=False))


def test_batches_from_elsewhere_are_warned_of_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.run as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.restore()
        for _ in job.sampler.batches(job.loader):
            run.step += 1
            run.save()
    assert [str(w.message)[:44] for w in caught] == ["the batches do not come from LoopRun.batches"]


def test_when_to_save_is_the_loops_to_decide(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every_n_steps: when to save"):
        Job(tmp_path, checkpoint=CheckpointConfig(every_n_steps=5))


def test_names_and_metrics_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fairlead' is the run's own"):
        Job(tmp_path, add={"fairlead": 1})
    job = Job(tmp_path)
    with job.run as run:
        run.restore()
        with pytest.raises(ConfigError, match="'loss' is not one number"):
            run.save(metrics={"loss": torch.zeros(2)})


def test_a_fabric_that_is_not_launched_is_refused(tmp_path: Path) -> None:
    fab = fabric(TrainerConfig(accelerator="cpu", devices=2))
    with pytest.raises(ConfigError, match=r"fabric\.launch\(\)"), LoopRun(fab, tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_lightnings_async_checkpoint_io_is_refused(tmp_path: Path) -> None:
    fab = lf.Fabric(accelerator="cpu", devices=1, plugins=[AsyncCheckpointIO()])
    with pytest.raises(ConfigError, match="when a file is complete"), LoopRun(fab, tmp_path / "run"):
        pass


# -- a disk that refuses


class Disk:
    """Refuses to write while it is full, but for some files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *room_for: str) -> None:
        self.full = False
        real = Syscalls.fsync

        def fsync(system: Syscalls, fd: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if self.full and not any(name in path for name in ("history", *room_for)):
                raise OSError(28, "No space left on device")
            real(system, fd)

        monkeypatch.setattr(Syscalls, "fsync", fsync)


@pytest.mark.parametrize("backend", ["torch", "async"])
@pytest.mark.filterwarnings("ignore:training continues")
def test_a_full_disk_costs_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """It is said, it is in the history, the training goes on, and the checkpoint before it stays."""
    disk = Disk(monkeypatch)
    job = Job(tmp_path, every=1, fabric=fabric(TrainerConfig(accelerator="cpu", devices=1, checkpoint_io=backend)))
    real = job.step

    def step(x: Tensor, y: Tensor) -> None:
        disk.full = job.run.step in (4, 5)
        real(x, y)

    job.step = step  # type: ignore[method-assign]
    job.train()
    run = tmp_path / "run"
    assert job.seen == list(range(1, 2 * STEPS + 1))
    assert "No space left" in str([e["error"] for e in events(run, "checkpoint-failed")])
    saved = [e["step"] for e in events(run, "checkpoint")]
    assert 5 not in saved  # in the background the disk is full for that of step 4 as well
    assert {3, 8, 12} < set(saved)
    assert not list((run / "checkpoints").glob(".stage-*"))


@pytest.mark.parametrize("backend", ["torch", "async"])
@pytest.mark.filterwarnings("ignore:training continues")
def test_a_result_that_cannot_be_saved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    disk = Disk(monkeypatch, "rank-")  # what is written in the background finds it full

    def start() -> Job:
        return Job(tmp_path, every=5, fabric=fabric(TrainerConfig(accelerator="cpu", devices=1, checkpoint_io=backend)))

    job = start()
    with job.run as run:
        run.restore()
        for run.epoch in range(2):
            for x, y in run.batches(job.loader):
                job.step(x, y)
        job.fabric.strategy.checkpoint_io.wait()  # type: ignore[attr-defined]
        disk.full = True
        with pytest.raises(CheckpointError, match="the state at step 12 could not be saved"):
            run.finish()
        disk.full = False
    assert events(tmp_path / "run", "finished") == []
    assert latest(tmp_path / "run").step == 10
    assert start().train().seen == [11, 12]


@pytest.mark.filterwarnings("ignore:training continues")
def test_what_fails_in_the_background_is_told_when_the_loop_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, "rank-")
    job = Job(tmp_path, fabric=fabric(TrainerConfig(accelerator="cpu", devices=1, checkpoint_io="async")))
    with pytest.raises(InterruptedHereError), job.run as run:  # noqa: PT012
        run.restore()
        run.log({"loss": 1.0})
        disk.full = True
        run.save()
        raise InterruptedHereError
    disk.full = False
    assert [e["event"] for e in events(tmp_path / "run")][-2:] == ["failed", "checkpoint-failed"]


def test_finish_with_metrics_saves_the_step_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.run as run:
        run.restore()
        run.save()
        run.finish(metrics={"val/loss": 0.5})
    assert [e["metrics"] for e in events(tmp_path / "run", "checkpoint")] == [{}, {"val/loss": 0.5}]
    assert events(tmp_path / "run")[-1]["event"] == "finished"


# -- weights


@pytest.mark.parametrize("finite", [True, False])
def test_weights_that_are_no_numbers_are_no_result(tmp_path: Path, finite: bool) -> None:
    """They end the run as failed, and the last good checkpoint stays; where they may, it stays as well."""

    def diverge(x: Tensor, y: Tensor) -> None:
        if job.run.step == 4:
            job.model.module.layers[0].weight.data.fill_(math.nan)
        job.run.step += 1
        if job.run.step % 2 == 0:
            job.run.save()

    job = Job(tmp_path, every=2, finite=finite, checkpoint=CheckpointConfig(keep_last=1))
    job.step = diverge  # type: ignore[method-assign]
    if finite:
        with pytest.raises(RunFailedError, match=r"at step 6 the weights are not finite") as failed:
            job.train()
        assert "the weight model.layers.0.weight is not finite" in str(failed.value)
        assert failed.value.exit_code == 1
        assert [e["event"] for e in events(tmp_path / "run")][-2:] == ["not-finite", "failed"]
    else:
        job.train()
        assert events(tmp_path / "run")[-1]["event"] == "finished"
    steps = [c.step for c in checkpoints(tmp_path / "run")]
    assert 4 in steps
    assert finite == (steps == [4])


@pytest.mark.parametrize("source", ["a loop's checkpoint", "torch.save"])
def test_a_new_run_begins_with_the_weights_of_another(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`resume="weights:PATH"`: the weights, and nothing else."""
    first = Job(tmp_path, epochs=1).train()
    weights = {name: value.clone() for name, value in first.model.module.state_dict().items()}
    path = tmp_path / "run" / "checkpoints" / "last"
    if source == "torch.save":
        path = tmp_path / "weights.pt"
        torch.save(weights, path)
    else:
        path = latest(tmp_path / "run").path
    run = RunConfig(name="tuned", dir=str(tmp_path), seed=None, resume=f"weights:{path}")
    job = Job(tmp_path, epochs=1, run=run)
    with job.run as tuned:
        assert not tuned.restore()
        assert not list(differences(dict(job.model.module.state_dict()), weights))
        assert (tuned.step, tuned.state["best"], job.optimizer.state) == (0, 9.0, {})
    assert "begins with the weights of" in capsys.readouterr().out
