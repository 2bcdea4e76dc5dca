"""A plain loop with `Run`: what it keeps, how it resumes, and what it refuses."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_records import checkpoints, contents, events, latest, metric_rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from fairlead import Run, RunConfig, Stopped
from fairlead.errors import (
    CheckpointError,
    ConfigError,
    FingerprintError,
    RunDirectoryError,
    RunFailedError,
    RunLockedError,
)
from fairlead.exactness import last_record
from fairlead_distributed.plain_data import from_plain
from fairlead_distributed.run.registry import serialize
from fairlead_runs.commit import Syscalls, verify

SAMPLES, BATCH, STEPS = 22, 4, 6  # to an epoch, the last of half a batch


class InterruptedHereError(Exception):
    """Takes the place of a kill."""


class Job:
    """One start of a user's script, in this process; seeded and set up from the beginning."""

    def __init__(
        self,
        root: Path,
        *,
        epochs: int = 2,
        every: int | None = 3,
        die_at: int | None = None,
        width: int = 6,
        leave_out: tuple[str, ...] = (),
        add: dict[str, Any] | None = None,
        **run: Any,
    ) -> None:
        self.die_at = die_at
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        data = TensorDataset(torch.randn(SAMPLES, 3), torch.randn(SAMPLES, 1))
        self.model = nn.Sequential(
            nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Tanh(), nn.Linear(width, 1)
        )
        self.loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, gamma=0.5)
        own = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        given: dict[str, Any] = own | (add or {})
        run.setdefault("config", {"lr": 0.1})
        run.setdefault("checkpoint", {"every_n_steps": every, "every_n_epochs": None, "keep_last": 3})
        self.run = Run(
            run.pop("run", root / "run"),
            max_epochs=epochs,
            log_every_n_steps=1,
            **run,
            **{name: value for name, value in given.items() if name not in leave_out},
        )
        self.run.state["best"] = 9.0
        self.seen: list[int] = []

    def train(self) -> Job:
        with self.run as run:
            run.restore()
            for x, y in run.batches(self.loader):
                self.step(x, y)
        return self

    def step(self, x: Tensor, y: Tensor) -> None:
        run = self.run
        if run.steps == self.die_at:
            raise InterruptedHereError
        self.optimizer.zero_grad()
        loss: Any = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        run.step(loss=loss, noise=random.random() + np.random.rand())
        self.seen.append(run.steps)
        run.state["best"] = min(run.state["best"], np.float64(loss.item()))

    def result(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict()),
            "momentum": [self.optimizer.state[p]["exp_avg"] for p in self.model.parameters()],
            "scheduler": self.scheduler.state_dict(),
            "best": float(self.run.state["best"]),
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


def test_a_loop_gets_a_run_directory(tmp_path: Path) -> None:
    job = Job(tmp_path).train()
    run = tmp_path / "run"
    names = [event["event"] for event in events(run)]
    assert names == ["start", "training", "batch", "checkpoint", "checkpoint", "checkpoint", "checkpoint", "finished"]
    assert latest(run).step == 2 * STEPS
    assert all(verify(one.path, deep=True) == [] for one in checkpoints(run))
    assert [row["step"] for row in metric_rows(run)] == [str(step) for step in range(1, 2 * STEPS + 1)]
    assert [row["epoch"] for row in metric_rows(run)] == ["0"] * STEPS + ["1"] * STEPS
    assert "torch.nn.modules.container:Sequential" in (run / "job.yaml").read_text()
    assert job.run.finished == "step 12"
    record = last_record(run)
    assert record is not None
    assert record.seen == ()


def test_checkpoints_hold_plain_data_only(tmp_path: Path) -> None:
    """Reading them runs no code."""
    Job(tmp_path).train()
    folder = latest(tmp_path / "run").path
    state = torch.load(folder / "state.ckpt", weights_only=True)
    assert set(state) == {"model", "optimizer", "scheduler", "fairlead"}
    assert type(from_plain(state["fairlead"]["state"])["best"]) is np.float64
    assert "rng" in torch.load(folder / "rank-00000.pt", weights_only=True)


def test_a_validation_is_saved_with_its_metrics_and_the_best_one_stays(tmp_path: Path) -> None:
    values = {2: 0.5, 4: 0.1, 6: 0.7, 8: 0.6}

    def train(die_at: int) -> None:
        job = Job(tmp_path, every=None, die_at=die_at, checkpoint={"keep_last": 1, "every_n_epochs": None})
        real = job.step

        def step(x: Tensor, y: Tensor) -> None:
            real(x, y)
            if job.run.due(every=2):
                with job.run.phase("validate"):
                    job.run.log({"val/loss": values[job.run.steps]})

        job.step = step  # type: ignore[method-assign]
        with pytest.raises(InterruptedHereError):
            job.train()

    train(7)
    assert [c.step for c in checkpoints(tmp_path / "run")] == [4, 6]
    assert checkpoints(tmp_path / "run")[0].metadata["metrics"]["val/loss"] == 0.1
    train(8)  # which begins without having measured anything
    assert [c.step for c in checkpoints(tmp_path / "run")] == [4, 8]


# -- exact resume


@pytest.mark.parametrize(
    ("die_at", "every"),
    [(0, 3), (1, 1), (STEPS - 1, 1), (STEPS, 1), (STEPS, 3), (STEPS + 1, 3), (2 * STEPS - 1, 1)],
)
def test_it_resumes_bit_for_bit(tmp_path: Path, whole: dict[str, Any], die_at: int, every: int) -> None:
    """Saved at the first, a middle and the last batch of an epoch."""
    interrupted(tmp_path, die_at, every=every)
    job = Job(tmp_path, every=every).train()
    assert job.seen == list(range(die_at // every * every + 1, 2 * STEPS + 1))
    assert list(differences(whole, job.result())) == []


def test_it_resumes_bit_for_bit_twice_in_a_row(tmp_path: Path, whole: dict[str, Any]) -> None:
    for at in (4, 5, 11):
        interrupted(tmp_path, at)
    assert list(differences(whole, Job(tmp_path).train().result())) == []


def test_what_follows_an_epoch_is_done_where_the_run_stopped_before_it(tmp_path: Path) -> None:
    """A stop behind an epoch's last batch: the validation and the schedule of the epoch are still to come."""

    def train(root: Path, die_at: int | None = None) -> list[str]:
        job, did = Job(root, every=1, die_at=die_at), []
        with job.run as run:
            run.restore()
            for epoch in run.epochs():
                for x, y in run.batches(job.loader):
                    job.step(x, y)
                    if die_at == run.steps and die_at % STEPS == 0:
                        (root / "run" / "STOP").touch()
                        until = threading.Event()
                        until.wait(2.0)  # rank 0 looks each second
                did.append(f"after epoch {epoch} at step {run.steps}: {torch.rand(1).item()}")
        return did

    undisturbed = train(tmp_path / "whole")
    with pytest.raises(Stopped):
        train(tmp_path, STEPS)
    assert events(tmp_path / "run", "stop")[0]["step"] == STEPS
    assert train(tmp_path) == undisturbed


def test_micro_batches_are_counted_and_saved_behind_steps_only(tmp_path: Path) -> None:
    def train(root: Path, die_after: int | None = None) -> list[float]:
        job, taken = Job(root, every=1), []
        with job.run as run:
            run.restore()
            for index, (x, y) in enumerate(run.batches(job.loader)):
                loss: Any = nn.functional.mse_loss(job.model(x), y)
                loss.backward()
                taken.append(float(x.sum()))
                if index % 2:
                    job.optimizer.step()
                    job.optimizer.zero_grad()
                    run.step()
                if index == die_after:
                    raise InterruptedHereError
        return taken

    undisturbed = train(tmp_path / "whole")
    with pytest.raises(InterruptedHereError):
        train(tmp_path, 4)  # within the third step: the first two are saved, of four batches
    assert train(tmp_path) == undisturbed[4:]


def test_an_early_end_of_each_epoch_begins_the_next_one(tmp_path: Path) -> None:
    job = Job(tmp_path, every=None)
    with job.run as run:
        run.restore()
        for _ in run.epochs():
            for index, (x, y) in enumerate(run.batches(job.loader)):
                job.step(x, y)
                if index == 1:
                    break
    assert [row["epoch"] for row in metric_rows(tmp_path / "run")] == ["0", "0", "1", "1"]


def test_max_steps_ends_it_and_more_of_them_continue(tmp_path: Path) -> None:
    def train(root: Path, steps: int) -> list[int]:
        torch.manual_seed(1)
        seen, net = [], nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with Run(root / "run", max_steps=steps, model=net, optimizer=optimizer) as run:
            run.restore()
            for batch in run.batches(DataLoader(range(5), batch_size=1, shuffle=True)):  # type: ignore[arg-type]
                seen.append(int(batch))
                run.step()
        return seen

    whole = train(tmp_path / "whole", 11)
    assert whole[:5] != whole[5:10]  # another order in each epoch
    parts = [train(tmp_path, steps) for steps in (5, 7, 7, 10, 11)]  # also to the very end of an epoch
    assert [len(one) for one in parts] == [5, 2, 0, 3, 1]
    assert [one for part in parts for one in part] == whole


class Stream(IterableDataset[int]):
    """A stream with a position of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 6:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def stream_job(root: Path, loader: Any, die_at: int | None = None) -> list[int]:
    torch.manual_seed(1)
    seen, net = [], nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    more: dict[str, Any] = {"max_epochs": 2, "checkpoint": {"every_n_steps": 1}}
    with Run(root / "run", model=net, optimizer=optimizer, **more) as run:
        run.restore()
        for batch in run.batches(loader):
            if run.steps == die_at:
                raise InterruptedHereError
            seen.append(int(batch))
            run.step()
    return seen


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("die_at", [2, 6, 8])
def test_a_loader_with_a_state_of_its_own_continues(tmp_path: Path, die_at: int) -> None:
    with pytest.raises(InterruptedHereError):
        stream_job(tmp_path, StatefulDataLoader(Stream(), batch_size=1), die_at)
    found = stream_job(tmp_path, StatefulDataLoader(Stream(), batch_size=1))
    assert found == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6][die_at:]


def test_a_loader_without_a_position_begins_its_epoch_anew_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(6))

    with pytest.raises(InterruptedHereError):
        stream_job(tmp_path, DataLoader(Plain(), batch_size=1), 2)
    assert "resume is not exact:" in capsys.readouterr().out
    record = last_record(tmp_path / "run")
    assert record is not None
    assert [one.what for one in record.seen] == ["the IterableDataset Plain"]
    assert stream_job(tmp_path, DataLoader(Plain(), batch_size=1))[:4] == [0, 1, 2, 3]


def test_what_is_frozen_and_what_is_evaluated_comes_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with pytest.raises(InterruptedHereError), job.run as run:  # noqa: PT012
        run.restore()
        job.model[0].weight.requires_grad_(False)
        job.model[1].eval()
        run.save()
        raise InterruptedHereError
    again = Job(tmp_path)
    with again.run as run:
        assert run.restore()
        assert not again.model[0].weight.requires_grad
        assert again.model[4].weight.requires_grad
        assert not again.model[1].training
        assert again.model[2].training


def test_scalers_and_generators_are_registered_like_anything_else(tmp_path: Path) -> None:
    def start() -> tuple[Run, Any, dict[str, Any]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        drawn: dict[str, Any] = {"torchs": torch.Generator().manual_seed(1), "numpys": np.random.default_rng(2)}
        run = Run(tmp_path / "run", scaler=scaler, **drawn, per_rank={"pythons": random.Random(3)})
        return run, scaler, {**drawn, "pythons": next(one.value for one in run._registry if one.name == "pythons")}

    def draw(made: dict[str, Any]) -> list[float]:
        return [torch.rand(1, generator=made["torchs"]).item(), made["numpys"].random(), made["pythons"].random()]

    run, scaler, made = start()
    with pytest.raises(InterruptedHereError), run:  # noqa: PT012
        run.restore()
        scaler.scale(torch.zeros(1))
        scaler.update(2.0)
        draw(made)
        run.save()
        after = draw(made)
        raise InterruptedHereError
    run, scaler, made = start()
    with run:
        run.restore()
        assert scaler.get_scale() == 2.0
        assert draw(made) == after


def test_a_compiled_model_is_saved_by_the_names_of_the_plain_one(tmp_path: Path) -> None:
    def start(compiled: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        with Run(tmp_path / "run", model=torch.compile(net, backend="eager") if compiled else net) as run:
            run.restore()
            if compiled:
                net[0].weight.data.fill_(0.25)
        return dict(net.state_dict())

    first = start(compiled=True)
    assert set(torch.load(latest(tmp_path / "run").path / "state.ckpt")["model"]) == set(first)
    assert list(differences(start(compiled=False), first)) == []


def test_a_loop_without_batches_saves_and_stops_behind_each_step(tmp_path: Path) -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Run(tmp_path / "run", model=net, optimizer=optimizer, checkpoint={"every_n_steps": 2}) as run:
        run.restore()
        for _ in range(5):
            net.weight.data += 1
            run.step()
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint")] == [2, 4, 5]


# -- stops


def test_a_signal_stops_it_behind_a_step_with_everything_saved(
    tmp_path: Path, whole: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, every=None, environ={})
    real = job.step

    def step(x: Tensor, y: Tensor) -> None:
        real(x, y)
        if job.run.steps == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    job.step = step  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        job.train()
    assert stopped.value.code == 143
    assert "everything is saved" in capfd.readouterr().out
    run = tmp_path / "run"
    assert latest(run).step == 4
    assert [event["event"] for event in events(run)][-3:] == ["signal", "checkpoint", "stop"]
    assert list(differences(whole, Job(tmp_path).train().result())) == []
    signal.signal(signal.SIGTERM, before)  # a stop leaves its handlers: the process is to end


# -- which run


def test_a_start_with_damaged_checkpoints_only_says_that_it_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InterruptedHereError):
        Job(tmp_path, die_at=5, checkpoint={"every_n_steps": 2}).train()
    for file in (tmp_path / "run" / "checkpoints").glob("step-*/rank-00000.pt"):
        os.truncate(file, 100)
    assert Job(tmp_path).train().seen[0] == 1
    shown = capsys.readouterr()
    assert "step-00000002/rank-00000.pt: 100 bytes" in shown.out + shown.err
    assert "no undamaged checkpoint is left: the run starts from the beginning" in shown.out + shown.err


def test_a_finished_run_says_so_and_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Job(tmp_path).train()
    before = contents(tmp_path)
    again = Job(tmp_path).train()
    assert "is finished: step 12" in capsys.readouterr().out
    assert again.seen == []
    assert list(differences(dict(first.model.state_dict()), dict(again.model.state_dict()))) == []
    assert contents(tmp_path) == before
    last = Job(tmp_path)
    with last.run as run:
        run.restore()
        assert list(run.batches(last.loader)) == []
        assert list(run.epochs(5)) == []
        with run.phase("test"):  # as a script evaluates behind its loop
            run.log({"test/loss": 1.0})
        run.save()
        with pytest.raises(RunDirectoryError, match="raise `max_steps`"):
            run.step()
    assert contents(tmp_path) == before


def test_a_finished_run_continues_when_more_is_asked_for(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole", epochs=3).train().result()
    Job(tmp_path, epochs=2).train()
    job = Job(tmp_path, epochs=3).train()
    assert job.seen == list(range(2 * STEPS + 1, 3 * STEPS + 1))
    assert list(differences(whole, job.result())) == []


def test_another_config_is_another_run(tmp_path: Path) -> None:
    interrupted(tmp_path, 4)
    before = contents(tmp_path)
    with pytest.raises(FingerprintError, match=r"trainer\.lr: 0\.1 -> 0\.2") as refused:
        Job(tmp_path, config={"lr": 0.2}).train()
    assert "RunConfig(accept=" in str(refused.value)
    assert contents(tmp_path) == before
    job = Job(tmp_path, config={"lr": 0.2}, run=RunConfig(name="run", dir=str(tmp_path), resume="never")).train()
    assert job.run.path.name == "run-2"
    assert job.seen[0] == 1


def test_a_run_that_cannot_be_opened_leaves_signals_as_they_were(tmp_path: Path) -> None:
    """Where the caller goes on after the error, as in a notebook."""

    def noticed() -> list[Any]:
        watches = [one for one in threading.enumerate() if one.name == "fairlead-stop-deadline"]
        return [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), *watches]

    before = noticed()
    with pytest.raises(ConfigError):
        Job(tmp_path, config={"model": nn.Linear(1, 1)}, environ={}).train()
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError):
        Job(tmp_path, environ={}).train()
    assert noticed() == before


def test_a_config_that_cannot_be_written_down_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a setting is a Linear, which is not plain data"):
        Job(tmp_path, config={"model": nn.Linear(1, 1)}).train()
    with pytest.raises(ConfigError, match="accumulate_grad_batches is the text 'two'"):
        Job(tmp_path, config={"accumulate_grad_batches": "two"})
    with pytest.raises(ConfigError, match="max_steps is the text 'many'"):
        Job(tmp_path, config={"max_steps": "many"})
    assert not (tmp_path / "run").exists()


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.run as run:
        run.restore()
        with pytest.raises(RunLockedError):
            Job(tmp_path).train()


def test_how_a_start_ended_is_in_the_history(tmp_path: Path) -> None:
    interrupted(tmp_path, 4)
    assert events(tmp_path / "run")[-1]["event"] == "failed"
    assert events(tmp_path / "run")[-1]["step"] == 4
    job = Job(tmp_path)

    def pressed(x: Tensor, y: Tensor) -> None:
        raise KeyboardInterrupt

    job.step = pressed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        job.train()
    assert events(tmp_path / "run")[-1]["event"] == "stop"


def test_one_of_several_ranks_that_are_not_connected_is_refused(tmp_path: Path) -> None:
    """Each would train alone, and all of them write into one run."""
    ranks = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}
    ranks |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    with pytest.raises(ConfigError, match=r"call fairlead_distributed\.init_process_group\(\) before Run"):
        Job(tmp_path, environ=ranks).train()
    assert not (tmp_path / "run").exists()


# -- what does not fit


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"leave_out": ("scheduler",)}, "also has 'scheduler', which was not given"),
        ({"add": {"noise": torch.Generator()}}, "has no 'noise'"),
        ({"per_rank": {"mine": torch.Generator()}}, "has no 'mine'"),
        ({"width": 7}, "size mismatch"),
    ],
)
def test_other_objects_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    interrupted(tmp_path, 4)
    job = Job(tmp_path, **change)
    with pytest.raises(CheckpointError) as caught, job.run as opened:
        opened.restore()
    assert said in str(caught.value)
    assert "step-00000003" in str(caught.value)
    assert events(tmp_path / "run")[-1]["event"] == "failed"
    assert Job(tmp_path).train().seen[0] == 4  # nothing is lost


def test_a_parameter_group_that_the_loop_adds_is_said_and_an_optimizer_without_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, every=2, die_at=4)
    with pytest.raises(InterruptedHereError), job.run as run:  # noqa: PT012
        run.restore()
        job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        for x, y in run.batches(job.loader):
            job.step(x, y)
    assert "not exact, because of the parameter groups that the loop has added to optimizer" in capsys.readouterr().out
    job = Job(tmp_path, every=2)
    with pytest.raises(CheckpointError, match="optimizer has 1 parameter group, and in the checkpoint 2"):
        job.train()
    job = Job(tmp_path, every=2)
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert job.train().seen[0] == 5


def test_data_of_another_length_are_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, 4)
    job = Job(tmp_path)
    job.loader = DataLoader(TensorDataset(*[t[:-1] for t in job.loader.dataset.tensors]), batch_size=4, shuffle=True)
    with pytest.raises(CheckpointError, match="the number of samples was 22, now 21"):
        job.train()


def test_checkpoints_of_others_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "plain.ckpt")
    job = Job(tmp_path, run=RunConfig(name="run", dir=str(tmp_path), resume=str(tmp_path / "plain.ckpt"), seed=None))
    with pytest.raises(CheckpointError, match="no checkpoint of a Run"), job.run as run:
        run.restore()


def test_a_new_run_may_begin_from_a_checkpoint_of_another(tmp_path: Path) -> None:
    interrupted(tmp_path, 4)
    path = str(latest(tmp_path / "run").path)
    job = Job(tmp_path, config={"lr": 0.3}, run=RunConfig(name="run", dir=str(tmp_path), resume=path)).train()
    assert job.run.path.name == "run-2"
    assert job.seen[0] == 4
    assert metric_rows(job.run.path)[0]["step"] == "4"


def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_used(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(tmp_path, 7)
    file = latest(tmp_path / "run").path / "rank-00000.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    job = Job(tmp_path).train()
    assert "rank-00000.pt: its xxh3_128 checksum is wrong" in capsys.readouterr().out
    assert job.seen[0] == 4
    assert list(differences(whole, job.result())) == []


# -- what is refused before anything is lost


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.5, r"thing is a builtins.float, which has no state to restore"),
        (np.zeros(2), r"put plain data into run\.state\['thing'\]"),
        (object(), r"it has no state_dict\(\) and load_state_dict\(\)"),
    ],
)
def test_what_has_no_state_is_refused_at_once(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Job(tmp_path, add={"thing": value})


def test_what_cannot_be_read_again_is_an_error_of_the_save(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.state\['best'\] is a Linear, which is no plain"), job.run as run:  # noqa: PT012
        run.restore()
        run.state["best"] = nn.Linear(1, 1)
        run.save()
    assert checkpoints(tmp_path / "run") == []
    assert not list((tmp_path / "run/checkpoints").glob(".stage-*"))


def test_plain_data_keep_their_types() -> None:
    given = {"a": (1, [2.0, None]), "b": Counter({3: 1}), "c": {4}, "d": np.float32(0.5), 5: torch.Size([1])}
    found = from_plain(serialize(given, "x"))
    assert found == given
    assert [type(v) for v in found.values()] == [tuple, Counter, set, np.float32, torch.Size]


def test_the_order_of_calls_is_checked(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with pytest.raises(ConfigError, match="the run is not open"):
        job.run.restore()
    with pytest.raises(InterruptedHereError), job.run as run:  # noqa: PT012
        for call in (run.save, run.step, run.finish, lambda: run.log({}), lambda: next(run.batches(job.loader))):
            with pytest.raises(ConfigError, match=r"before restore\(\)"):
                call()
        assert run.restore() is False
        with pytest.raises(ConfigError, match="restored already"):
            run.restore()
        with pytest.raises(ConfigError, match=r"after restore\(\)"):
            run.register("late", nn.Linear(1, 1))
        raise InterruptedHereError
    with pytest.raises(ConfigError, match="opened once"), job.run:
        pass


def test_names_and_loaders_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fairlead' is the run's own"):
        Job(tmp_path, add={"fairlead": nn.Linear(1, 1)})
    job = Job(tmp_path)
    with pytest.raises(ConfigError, match="two loaders are read under the name 'train'"), job.run as run:  # noqa: PT012
        run.restore()
        for _ in zip(run.batches(job.loader), run.batches(job.loader), strict=True):
            pass


@pytest.mark.parametrize("left_out", [("optimizer",), ("optimizer", "scheduler")])
def test_an_optimizer_that_is_not_registered_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left_out: tuple[str, ...]
) -> None:
    """Its scheduler knows it, and saves nothing of it."""
    with Job(tmp_path, leave_out=left_out).run as run:
        run.restore()
    assert "none is registered: what it keeps of earlier steps is in no checkpoint" in capsys.readouterr().out


# -- a disk that refuses


class Disk:
    """Refuses to write while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        real = Syscalls.fsync

        def fsync(system: Syscalls, fd: int) -> None:
            if self.full and "history" not in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(28, "No space left on device")
            real(system, fd)

        monkeypatch.setattr(Syscalls, "fsync", fsync)


@pytest.mark.filterwarnings("ignore:training continues")
def test_a_full_disk_costs_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, it is in the history, the training goes on, and the checkpoint before it stays."""
    disk = Disk(monkeypatch)
    job = Job(tmp_path, every=1)
    real = job.step

    def step(x: Tensor, y: Tensor) -> None:
        real(x, y)
        disk.full = job.run.steps in (4, 5)

    job.step = step  # type: ignore[method-assign]
    job.train()
    run = tmp_path / "run"
    assert job.seen == list(range(1, 2 * STEPS + 1))
    assert "No space left" in str([e["error"] for e in events(run, "checkpoint-failed")])
    assert [e["step"] for e in events(run, "checkpoint")] == [1, 2, 3, 6, 7, 8, 9, 10, 11, 12]
    assert not list((run / "checkpoints").glob(".stage-*"))


@pytest.mark.filterwarnings("ignore:training continues")
def test_a_result_that_cannot_be_saved_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    job = Job(tmp_path, every=5)
    with pytest.raises(CheckpointError, match="the state at step 12 could not be saved"), job.run as run:  # noqa: PT012
        run.restore()
        for x, y in run.batches(job.loader):
            job.step(x, y)
        disk.full = True
    disk.full = False
    assert events(tmp_path / "run", "finished") == []
    assert latest(tmp_path / "run").step == 10
    assert Job(tmp_path, every=5).train().seen == [11, 12]


# -- weights


@pytest.mark.parametrize("finite", [True, False])
def test_weights_that_are_not_finite_are_no_result(tmp_path: Path, finite: bool) -> None:
    """They end the run as failed, and the last good checkpoint stays; where they may, it stays as well."""

    def diverge(x: Tensor, y: Tensor) -> None:
        if job.run.steps == 4:
            next(job.model.parameters()).data.fill_(math.nan)
        job.run.step()

    keep = {"keep_last": 1, "every_n_steps": 2, "every_n_epochs": None}
    job = Job(tmp_path, finite=finite, checkpoint=keep)
    job.step = diverge  # type: ignore[method-assign]
    if finite:
        with pytest.raises(RunFailedError, match=r"at step 6 the weights are not finite") as failed:
            job.train()
        assert "the weight model.0.weight is not finite" in str(failed.value)
        assert [e["event"] for e in events(tmp_path / "run")][-2:] == ["not-finite", "failed"]
    else:
        job.train()
        assert events(tmp_path / "run")[-1]["event"] == "finished"
    steps = [c.step for c in checkpoints(tmp_path / "run")]
    assert 4 in steps
    assert finite == (steps == [4])


@pytest.mark.parametrize("source", ["a run's checkpoint", "torch.save"])
def test_a_new_run_begins_with_the_weights_of_another(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`resume="weights:PATH"`: the weights, and nothing else."""
    first = Job(tmp_path, epochs=1).train()
    weights = {name: value.clone() for name, value in first.model.state_dict().items()}
    path = latest(tmp_path / "run").path
    if source == "torch.save":
        path = tmp_path / "weights.pt"
        torch.save(weights, path)
    job = Job(tmp_path, epochs=1, run=RunConfig(name="tuned", dir=str(tmp_path), seed=None, resume=f"weights:{path}"))
    with job.run as tuned:
        assert not tuned.restore()
        assert not list(differences(dict(job.model.state_dict()), weights))
        assert (tuned.steps, tuned.state["best"], dict(job.optimizer.state)) == (0, 9.0, {})
    assert "begins with the weights of" in capsys.readouterr().out
