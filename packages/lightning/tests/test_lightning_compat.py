"""One test for each private part of Lightning that is used: they fail when Lightning changes it.

Each says after "If it breaks" what to do then; `docs/decisions.md` says what a user loses until that is done.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torchmetrics
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.callbacks import EarlyStopping, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from tiny_job import Data, Line, loader, plain
from torch import Tensor
from torch.multiprocessing import ProcessExitedException
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SubsetRandomSampler
from torchmetrics import CatMetric, MeanMetric

from fairlead_lightning import compat


def test_every_private_use_has_a_test_here() -> None:
    """A new one needs a contract test in this file."""
    here = Path(__file__).read_text()
    ours = [name for name, value in vars(compat).items() if "compat" in (getattr(value, "__module__", None) or "")]
    assert len(ours) > 20
    assert [name for name in ours if f"compat.{name}" not in here] == []


def test_a_dumped_checkpoint_is_what_lightning_saves(tmp_path: Path) -> None:
    """A backend that saves on all ranks is handed it; Lightning itself would hand it to rank 0's only.

    If it breaks: override `strategy.save_checkpoint` for one save, and take the dict that it is called with.
    """
    trainer = plain(max_steps=2)
    trainer.fit(Line(), datamodule=Data())
    for weights_only in (False, True):
        trainer.save_checkpoint(tmp_path / "saved.ckpt", weights_only)
        saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
        dumped = compat.dump_checkpoint(trainer, weights_only)
        assert list(dumped) == list(saved)
        assert ("optimizer_states" in dumped) is not weights_only
        assert all(torch.equal(value, saved["state_dict"][key]) for key, value in dumped["state_dict"].items())


def test_batch_hooks_that_are_not_there_are_passed_over() -> None:
    """A fit, a validation and a test call what a callback defines, and open no profiler's block for the rest.

    If it breaks: drop the decorator; each step costs some microseconds more.
    """
    called: list[str] = []

    @compat.only_its_own_batch_hooks
    class Lean(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            called.append("own")

    class Watching(PassThroughProfiler):
        def start(self, action_name: str) -> None:
            hook = action_name.rpartition(".")[2]
            if "Lean" in action_name and any(word in hook for word in ("batch", "before", "backward")):
                called.append(hook)

    trainer = plain(max_steps=2, callbacks=[Lean()], profiler=Watching(), num_sanity_val_steps=1)
    trainer.fit(Line(), datamodule=Data())
    assert called == ["on_train_batch_end", "own"] * 2
    trainer.validate(Line(), datamodule=Data(), verbose=False)
    assert len(called) == 4
    private: Any = Lean
    assert private.on_before_zero_grad is None
    assert private.on_after_backward is None
    assert private.on_train_start is L.Callback.on_train_start


class LogsAll(Line):
    """Everything that can be logged: numbers and metrics, of steps and epochs, by each reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("metric", self.mean, on_step=True, on_epoch=True)
        for reduction in ("mean", "max", "min", "sum"):
            self.log(reduction, loss, on_step=True, on_epoch=True, reduce_fx=reduction, prog_bar=True)
        self.log("count", batch_idx + 0.5, on_epoch=True)
        return loss


def test_less_overhead_changes_no_number() -> None:
    """What is logged is moved only where it is somewhere else, and nobody profiles; both end with the fit.

    If it breaks: drop it. Each step then takes about a fifth longer, by `benchmarks/step.py`.
    """
    found = []
    for lean in (False, True):
        trainer, model = plain(max_epochs=2), LogsAll()
        before = vars(trainer)["profiler"]
        undo = compat.less_overhead(trainer) if lean else lambda: None
        assert (vars(trainer)["profiler"] is before) is not lean
        trainer.fit(model, datamodule=Data())
        results: Any = trainer.fit_loop.epoch_loop._results
        assert all((type(one).__name__ == "_Result") is lean for one in results.values())
        results.to(torch.device("meta"))  # elsewhere everything is moved
        assert {one.value.device.type for one in results.values() if one.is_tensor} == {"meta"}
        undo()
        assert vars(trainer)["profiler"] is before
        assert type(results).__name__ == "_ResultCollection"
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert len(found[0]) > 10
    assert found[0] == found[1]


def test_a_profiler_that_was_asked_for_stays() -> None:
    trainer = plain(max_steps=1, profiler="simple")
    before = vars(trainer)["profiler"]
    compat.less_overhead(trainer)
    trainer.fit(Line(), datamodule=Data())
    assert vars(trainer)["profiler"] is before


def test_the_root_directory_can_be_moved(tmp_path: Path) -> None:
    """If it breaks: override `default_root_dir` in our Trainer."""
    trainer = plain(default_root_dir=str(tmp_path / "first"))
    assert trainer.default_root_dir == str(tmp_path / "first")
    compat.set_root_dir(trainer, tmp_path / "second")
    assert trainer.default_root_dir == str(tmp_path / "second")


def _averaging_again(model: L.LightningModule, first: Any) -> tuple[Any, L.Trainer]:
    """In a fit that begins with the state of an earlier one's callback."""
    again: Any = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1)
    trainer = plain(max_epochs=2, callbacks=[again])
    trainer.strategy._lightning_module = model
    trainer.strategy.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    again.setup(trainer, model, "fit")
    again.load_state_dict(first.state_dict())
    again.on_fit_start(trainer, model)
    return again, trainer


def test_averaging_is_resumed_inside_an_epoch() -> None:
    """Its hook at an epoch's begin is not called there, and its new scheduler sets the rate.

    If it breaks: name `StochasticWeightAveraging` in `seen.state_reasons`, and drop both functions.
    """
    first: Any = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1)
    trainer = plain(max_epochs=2, callbacks=[first])
    trainer.fit(Line(), datamodule=Data())
    assert first.state_dict()["scheduler_state"] is not None

    model = Line()
    again, trainer = _averaging_again(model, first)
    trainer.optimizers[0].param_groups[0]["lr"] = 0.123
    undo = compat.keep_rates(trainer)
    compat.resume_averaging(trainer)
    assert again._initialized
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.123
    undo()
    assert "on_train_epoch_start" not in vars(again)


def test_averaging_begins_again_in_its_last_epoch_and_uses_gradients_there() -> None:
    """In the epoch for batch norm it would have no scheduler, and the last gradients count once more.

    If it breaks: name `StochasticWeightAveraging` in `seen.state_reasons`, and drop `leaves_gradients`.
    """

    class Normed(Line):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(1)

    seen: list[tuple[int, bool]] = []

    class Looks(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.append((trainer.current_epoch, compat.leaves_gradients(trainer)))

    first: Any = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1)
    trainer = plain(max_epochs=2, callbacks=[first, Looks()])
    trainer.fit(Normed(), datamodule=Data())
    assert seen == [(0, False), (1, True), (2, True)]

    model = Normed()
    again, trainer = _averaging_again(model, first)
    epochs: Any = trainer.fit_loop.epoch_progress.current
    epochs.processed = 2
    trainer.fit_loop.max_batches = 4
    undo = compat.keep_rates(trainer)
    again.on_train_epoch_start(trainer, model)
    undo()
    assert again.state_dict()["scheduler_state"] is not None
    assert again.state_dict()["n_averaged"] == first.state_dict()["n_averaged"]


def test_pruning_that_resets_weights_is_told_apart() -> None:
    """If it breaks: name every `ModelPruning` in `seen.state_reasons`."""
    assert compat.resets_weights(ModelPruning("l1_unstructured"))
    assert not compat.resets_weights(ModelPruning("l1_unstructured", use_lottery_ticket_hypothesis=False))
    assert not compat.resets_weights(L.Callback())


@pytest.mark.parametrize(("mode", "ends"), [("max_size", True), ("max_size_cycle", False), ("min_size", False)])
def test_how_several_loaders_end(mode: Any, ends: bool) -> None:
    """If it breaks: call a job with several loaders inexact in `Loaders`."""
    trainer = plain(max_steps=1)
    assert not compat.ends_with_longest(trainer)

    class Two(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx)

    trainer.fit(Two(), CombinedLoader({"a": loader(), "b": loader()}, mode), loader())
    assert compat.ends_with_longest(trainer) is ends


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = plain(max_epochs=1)
    trainer.fit(Line(), datamodule=Data())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    return tmp_path / "saved.ckpt"


class Resumes(L.Callback):
    """Resumes every fit, from its `setup`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        compat.resume_from(trainer, self.path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_steps": 3}, "max_steps 3"),
        ({"max_epochs": 2}, "max_epochs 2"),
        ({"max_time": "00:00:00:00"}, "max_time"),
        ({"max_epochs": 2, "limit_train_batches": 0}, "limit_train_batches 0"),
    ],
)
def test_why_a_fit_is_over(settings: dict[str, Any], reason: str) -> None:
    trainer = plain(**settings)
    trainer.fit(Line(), datamodule=Data())
    assert compat.why_over(trainer) == reason


def test_why_a_fit_was_stopped_early() -> None:
    patient = EarlyStopping("train/loss", patience=1, min_delta=1e9, check_on_train_epoch_end=True)
    trainer = plain(max_epochs=9, callbacks=[patient])
    trainer.fit(Line(), datamodule=Data())
    assert "did not improve in the last 1 records" in str(compat.why_over(trainer))
    trainer = plain(max_epochs=9)
    assert compat.why_over(trainer) is None
    trainer.should_stop = True
    assert compat.why_over(trainer) == "trainer.should_stop"


def test_a_fit_that_is_under_way_is_resumed(saved: Path) -> None:
    """Weights, optimizer, loops: Lightning restores all of it from the file that `setup` named.

    If it breaks: find where `Trainer._run` passes `ckpt_path` on, and replace it there.
    """
    model = Line()
    trainer = plain(max_epochs=2, callbacks=[Resumes(saved)])
    trainer.fit(model, datamodule=Data())
    assert model.seen == list(range(8, 16))
    by_path = Line()
    plain(max_epochs=2).fit(by_path, datamodule=Data(), ckpt_path=str(saved))
    assert all((a == b).all() for a, b in zip(model.parameters(), by_path.parameters(), strict=True))


def test_resuming_is_for_one_fit(saved: Path) -> None:
    """The trainer's own method is there again afterwards."""
    trainer = plain(max_epochs=2, callbacks=[Resumes(saved)])
    private: Any = trainer
    trainer.fit(Line(), datamodule=Data())
    assert private._checkpoint_connector.resume_start.__func__ is type(private._checkpoint_connector).resume_start


class Terminated(Line):
    """Gets SIGTERM in its third step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_lightning_handles_no_signals() -> None:
    """Its own handler would stop this fit, or end a SLURM job by itself; whoever was there before goes on.

    If it breaks: install our handlers again in `on_fit_start`, and find what broadcasts a SIGTERM before a batch.
    """
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: noted.append(signum))
    try:
        trainer = plain(max_steps=5)
        undo = compat.without_signal_handlers(trainer)
        model = Terminated()
        trainer.fit(model, datamodule=Data())
        assert noted == [signal.SIGTERM]
        assert model.seen == [0, 1, 2, 3, 4]
        private: Any = trainer
        assert callable(type(private.fit_loop.epoch_loop)._broadcast_sigterm_tensor)  # what is put out of action
        undo()
        assert "register_signal_handlers" not in vars(private._signal_connector)
        assert "_broadcast_sigterm_tensor" not in vars(private.fit_loop.epoch_loop)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_children_may_end_with_a_code_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's observer kills the first rank when another one has ended with anything but 0.

    If it breaks: find what the launcher's observer thread watches, and empty that.
    """
    trainer = plain(max_steps=1, devices=2, strategy="ddp")
    launcher: Any = trainer.strategy.launcher
    launcher.procs = [subprocess.Popen([sys.executable, "-c", "raise SystemExit(75)"])]
    observer = _ChildProcessObserver(child_processes=launcher.procs, main_pid=os.getpid(), sleep_period=0)
    killed: list[int] = []
    monkeypatch.setattr(observer, "_terminate_all", lambda: killed.append(1))
    child = launcher.procs[0]
    child.wait()
    assert observer._run()
    assert killed == [1]  # what it does
    compat.let_children_end(trainer)
    assert observer._run()
    assert killed == [1]


class Raises(L.Callback):
    """Says where an exception of a spawned rank is heard of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (self.folder / f"spawned-{compat.is_spawned(trainer)}").touch()
        raise SystemExit(7)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        (self.folder / f"heard-{compat.is_spawned(trainer)}").touch()


@pytest.mark.full
def test_a_spawned_rank_tells_no_callback_of_its_end(tmp_path: Path) -> None:
    """If it breaks: see whether `on_exception` is called in spawned ranks by now."""
    trainer = plain(max_steps=1, devices=1, strategy="ddp_spawn", callbacks=[Raises(tmp_path)])
    with pytest.raises(ProcessExitedException):  # with any code: torch's threads may abort at the end
        trainer.fit(Line(), datamodule=Data())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heard-False", "spawned-True"]


def test_a_signal_reaches_spawned_children() -> None:
    """If it breaks: send it to the children of this process."""
    trainer = plain(max_steps=1, devices=2, strategy="ddp_spawn")
    launcher: Any = trainer.strategy.launcher
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    launcher.procs = [child]
    compat.signal_children(trainer, "SIGTERM")
    child.join(30)
    assert child.exitcode == -signal.SIGTERM


class Begins(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        compat.begin_next_epoch(trainer)


@pytest.mark.parametrize("limit", [{"max_steps": 24}, {"max_epochs": 3}])
def test_training_goes_on_with_the_next_epoch(saved: Path, limit: dict[str, int]) -> None:
    """Also fails when Lightning itself becomes right and the correction can go: see the last line."""
    epochs = []
    for callbacks in ([Begins()], []):
        model, trainer = Line(), plain(**limit, callbacks=callbacks)
        trainer.fit(model, datamodule=Data(), ckpt_path=str(saved))
        assert model.seen == list(range(8, 24))
        epochs.append(trainer.current_epoch)
    assert epochs == [3, 4 if "max_steps" in limit else 3]


def test_a_checkpoint_from_the_start_of_an_epoch_is_one_between_two(tmp_path: Path) -> None:
    """If it breaks: compare the counters of a checkpoint that Lightning saves in `on_train_epoch_end`."""

    class Saves(L.Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            compat.between_epochs(checkpoint)

        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    plain(max_epochs=2, callbacks=[Saves()]).fit(Line(), datamodule=Data())
    model, trainer = Line(), plain(max_steps=24, callbacks=[Begins()])
    trainer.fit(model, datamodule=Data(), ckpt_path=str(tmp_path / "saved.ckpt"))
    assert model.seen == list(range(8, 24))
    assert trainer.current_epoch == 3


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_checkpoint_inside_an_epoch_resumes_in_that_epoch(tmp_path: Path) -> None:
    """If it breaks: compare the counters of a checkpoint that Lightning saves in `on_train_batch_end`."""

    class Saves(L.Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            compat.inside_epoch(checkpoint)

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    plain(max_steps=11, callbacks=[Saves()]).fit(Line(), datamodule=Data())
    model, trainer = Line(), plain(max_steps=24)
    trainer.fit(model, datamodule=Data(), ckpt_path=str(tmp_path / "saved.ckpt"))
    assert model.seen == list(range(11, 24))
    assert trainer.current_epoch == 3


class Watcher(L.Callback):
    """Writes down the boundaries that a fit comes to, each with its place."""

    goes_on = False

    def __init__(self, trainer: L.Trainer, due: bool | None = None) -> None:
        self.trainer = trainer
        self.due = due
        self.came: list[tuple[str, tuple[int, int]]] = []
        vars(trainer)["callbacks"].append(self)

    def requesting_training(self, trainer: L.Trainer, *, rebuilt: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def requesting_validation(self, trainer: L.Trainer) -> AbstractContextManager[None] | None:
        return nullcontext()

    def _note(self, name: str) -> None:
        self.came.append((name, compat.training_position(self.trainer)))

    def before_epoch(self, trainer: L.Trainer) -> None:
        self._note("epoch")

    def going_on(self, trainer: L.Trainer) -> bool | None:
        self._note("going on")
        return self.due

    def after_batch(self, trainer: L.Trainer, validation_due: bool) -> None:
        self._note("batch, validation due" if validation_due else "batch")

    def after_validation(self, trainer: L.Trainer) -> None:
        self._note("done")

    def loaders_made(self, trainer: L.Trainer) -> None:
        pass

    def is_over(self, empty: bool) -> bool:
        return False


def watched(trainer: L.Trainer, watcher: Watcher) -> Callable[[], None]:
    return compat.watch_boundaries(trainer, watcher, watcher)


def test_the_boundaries_of_a_fit_are_watched() -> None:
    """An epoch, its batches, and the validation behind the last; afterwards the loops are as they were.

    If it breaks: read `_FitLoop.run` and `_TrainingEpochLoop.run`, and wrap what they call at these places.
    """
    trainer = plain(max_epochs=2, limit_train_batches=2)
    watcher = Watcher(trainer)
    undo = watched(trainer, watcher)
    trainer.fit(Line(), datamodule=Data())
    epoch = ["epoch", "batch", "done", "batch, validation due", "done"]
    assert [name for name, _ in watcher.came] == epoch * 2
    assert [place for _, place in watcher.came[:6]] == [(0, 0), (0, 1), (0, 1), (0, 2), (0, 2), (1, 0)]
    undo()
    assert not {"run", "on_advance_start", "setup_data"} & vars(trainer.fit_loop).keys()
    assert not {"on_run_start", "on_advance_end"} & vars(trainer.fit_loop.epoch_loop).keys()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_loaders_that_were_made_before_the_loops_were_restored_are_made_again(tmp_path: Path) -> None:
    """And a finder's trial, which has no callbacks, is not taken for a part of the fit.

    If it breaks: read `FitLoop.setup_data`, and who calls it.
    """
    asked: list[str] = []

    class Estimating(Line):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 16
            return super().configure_optimizers()

        def train_dataloader(self) -> Any:
            asked.append("asked")
            return loader()

    class Again(Watcher):
        def requesting_training(self, trainer: L.Trainer, *, rebuilt: bool) -> AbstractContextManager[None]:
            asked.append("again")
            return nullcontext()

        def after_batch(self, trainer: L.Trainer, validation_due: bool) -> None:
            super().after_batch(trainer, validation_due)
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    first = plain(max_epochs=2)
    watched(first, Again(first))
    first.fit(Estimating(), val_dataloaders=loader())
    assert asked == ["again", "asked"]

    asked.clear()
    model, trainer = Estimating(), plain(max_epochs=2)
    watched(trainer, Again(trainer))
    trainer.fit(model, val_dataloaders=loader(), ckpt_path=str(tmp_path / "saved.ckpt"))
    assert asked == ["again", "asked"] * 2
    assert model.seen == list(range(4, 16))

    trainer = plain(max_epochs=1)
    watcher = Again(trainer)
    watched(trainer, watcher)
    vars(trainer)["callbacks"].remove(watcher)
    trainer.fit(Line(), datamodule=Data())
    assert watcher.came == []


class SavesAfter(Watcher):
    """Saves when the first batch that has a validation behind it is done, before or after that validation."""

    path: Path

    def after_batch(self, trainer: L.Trainer, validation_due: bool) -> None:
        super().after_batch(trainer, validation_due)
        if validation_due and self.due:
            self.trainer.save_checkpoint(self.path)
            self.due = False

    def after_validation(self, trainer: L.Trainer) -> None:
        if self.came[-1][0] == "batch, validation due" and self.due is None:
            self.trainer.save_checkpoint(self.path)
            self.due = False
        super().after_validation(trainer)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_fit_goes_on_behind_a_batch(tmp_path: Path, before: bool) -> None:
    """The validation behind it runs if it is due, and not again if it is done.

    If it breaks: read `on_iteration_done` and what `restarting` guards in both loops.
    """

    class Counts(Line):
        validated = 0

        def on_validation_start(self) -> None:
            self.validated += 1

    first = plain(max_epochs=1, val_check_interval=4)
    saves = SavesAfter(first, due=True if before else None)
    saves.path = tmp_path / "saved.ckpt"
    watched(first, saves)
    first.fit(Counts(), datamodule=Data())
    model, trainer = Counts(), plain(max_epochs=1, val_check_interval=4)
    watched(trainer, Watcher(trainer, due=before))
    trainer.fit(model, datamodule=Data(), ckpt_path=str(saves.path))
    assert model.seen == [4, 5, 6, 7]
    assert model.validated == (2 if before else 1)
    private: Any = trainer.fit_loop.epoch_loop
    assert private._batches_that_stepped == 8


def test_the_number_of_batches_that_are_done_can_be_set() -> None:
    """If it breaks: find the counter that `_num_ready_batches_reached` compares."""

    class Skips(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            compat.set_batches_done(trainer, 5)
            private: Any = trainer.fit_loop.epoch_loop
            private.restarting = True

    model = Line()
    plain(max_epochs=1, callbacks=[Skips()]).fit(model, datamodule=Data())
    assert len(model.seen) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_epoch_can_end_before_its_data(stream: bool) -> None:
    """The last batch is known as such before its step: gradients that wait are used, and the validation comes.

    If it breaks: ranks with different numbers of batches wait for each other until the time-out. Find what
    `_num_ready_batches_reached` and `_should_check_val_fx` ask, and what `setup_data` and `on_run_start` do now.
    """
    seen: list[Any] = []

    class Cuts(Watcher):
        def loaders_made(self, trainer: L.Trainer) -> None:
            seen.append(compat.batches_of_epoch(trainer))
            if not stream:
                compat.limit_epoch(trainer, 5)

        def is_over(self, empty: bool) -> bool:
            seen.append(empty)
            return False

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            last = compat.is_last_batch(trainer)
            if stream and trainer.fit_loop.epoch_loop.batch_idx == 4:
                compat.end_epoch_here(trainer)
            seen.append(last)

    class Validates(Line):
        def on_validation_start(self) -> None:
            seen.append(f"validation at {self.global_step}")

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            data = Data().train_dataloader().dataset
            return (data[index] for index in range(32))

    model = Validates()
    trainer = plain(max_epochs=1, accumulate_grad_batches=2, val_check_interval=1.0)
    undo = watched(trainer, Cuts(trainer))
    batches: Any = DataLoader(Stream(), batch_size=4) if stream else loader()
    trainer.fit(model, batches, loader())
    assert seen == [None if stream else 8, False, False, False, False, False, not stream, "validation at 3"]
    assert trainer.global_step == 3
    undo()
    assert "setup_data" not in vars(trainer.fit_loop)
    assert "on_run_start" not in vars(trainer.fit_loop.epoch_loop)


def test_the_loaders_of_a_validation_are_those_of_an_epoch() -> None:
    """If it breaks: a resumed fit with `reload_dataloaders_every_n_epochs` validates on loaders of another epoch."""
    asked = []

    class Asked(Data):
        def val_dataloader(self) -> Any:
            assert self.trainer is not None
            asked.append(self.trainer.current_epoch)
            return super().val_dataloader()

    class Sets(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            compat.set_validation_requested(trainer, trainer.current_epoch)

    settings: dict[str, Any] = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 0}
    plain(**settings).fit(Line(), datamodule=Asked())
    assert asked == [0, 1, 2]
    asked.clear()
    plain(**settings, callbacks=[Sets()]).fit(Line(), datamodule=Asked())
    assert asked == [0], "as if they had been asked for in each epoch"


@pytest.mark.parametrize("asked", [True, False])
def test_samplers_are_left_as_they_are(asked: bool) -> None:
    """Also those of a Trainer that was made to replace them; it does so again when it is over.

    If it breaks: ask a script for `use_distributed_sampler=False`, and give our own Trainer that.
    """
    trainer = plain(strategy="ddp", use_distributed_sampler=asked)
    wanted, undo = compat.take_sharding(trainer)
    assert wanted is asked
    assert compat.take_sharding(plain())[0] is False
    private: Any = trainer
    data = Data().train_dataloader()
    assert private._data_connector._prepare_dataloader(data, True, RunningStage.TRAINING) is data
    undo()
    prepared = private._data_connector._prepare_dataloader(data, True, RunningStage.TRAINING)
    assert isinstance(prepared.sampler, DistributedSampler) is asked


@pytest.mark.parametrize("sampler", [RandomSampler(range(8)), SubsetRandomSampler(range(8))])
def test_a_loader_is_sharded_as_lightning_does_it(sampler: Any) -> None:
    """If Lightning has changed, do in `compat.sharded` what its `_get_distributed_sampler` does now."""
    data: DataLoader[Any] = DataLoader(range(8), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    trainer: Any = plain(strategy="ddp")
    theirs = trainer._data_connector._prepare_dataloader(data, True, RunningStage.TRAINING)
    ours = compat.sharded(data, True, 0, {"num_replicas": 2, "rank": 1})
    assert type(ours.sampler) is type(theirs.sampler)
    assert (ours.batch_size, len(ours.sampler), len(theirs.sampler)) == (2, 4, 8)  # type: ignore[arg-type]


def test_a_prediction_draws_from_the_loaders_that_are_made_ready() -> None:
    """Not from copies with a sampler of Lightning's own, whose arguments it guesses.

    If it breaks: find where `_PredictionLoop.setup_data` makes a loader anew, and take its place.
    """
    mine, undo, seen = loader(), [], []

    def prepare(one: Any) -> Any:
        seen.append(one)
        return mine

    class Takes(L.Callback):
        def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            undo.append(compat.take_prediction_loaders(trainer, prepare))

    trainer: Any = plain(callbacks=[Takes()])
    given = loader()
    trainer.predict(Line(), given)
    assert seen == [given]
    assert trainer.predict_dataloaders is mine
    undo[0]()
    assert "_prepare_dataloader" not in vars(trainer._data_connector)


def test_what_was_logged_can_be_saved_and_put_back(tmp_path: Path) -> None:
    """Running means of each kind, a metric, the last values: bit for bit, in another process's objects.

    If it breaks: read `_ResultCollection.log` and `should_reset_tensors`: what is put back must survive the next log.
    """

    class Logs(Line):
        def __init__(self) -> None:
            super().__init__()
            self.seen_loss = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.seen_loss(loss)
            self.log("metric", self.seen_loss, on_epoch=True)
            for kind in ("mean", "sum", "min", "max"):
                self.log(kind, loss.detach() / 3, on_step=kind == "sum", on_epoch=True, reduce_fx=kind, prog_bar=True)
            return loss

    class Saves(L.Callback):
        state: dict[str, Any]

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                torch.save(compat.logged_state(trainer), tmp_path / "logged.pt")
                self.state = torch.load(tmp_path / "logged.pt", weights_only=True)

    class Restores(L.Callback):
        state: dict[str, Any]

        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            compat.restore_logged(trainer, saves.state, batches=3)
            self.state = compat.logged_state(trainer)
            private: Any = trainer
            assert private._logger_connector._first_loop_iter is False  # or Lightning would forget it at the next log

    saves, restores = Saves(), Restores()
    plain(max_steps=3, callbacks=[saves]).fit(Logs(), datamodule=Data())
    plain(max_steps=1, callbacks=[restores]).fit(Logs(), datamodule=Data())
    assert restores.state == saves.state
    assert set(saves.state["results"]) > {"training_step.mean", "training_step.metric"}


@pytest.mark.parametrize("reload", [0, 1])
def test_batches_of_validations_are_counted_on(reload: int) -> None:
    """The numbers under which a validation's batches are logged, where its loaders are first asked for after it.

    If it breaks: find what step `update_eval_step_metrics` is called with.
    """

    class Restores(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 0:
                compat.restore_logged(trainer, {**compat.logged_state(trainer), "validated": {0: 40}}, batches=0)
                assert compat.logged_state(trainer)["validated"] == {0: 40}  # also before that validation

    trainer = plain(max_epochs=2, callbacks=[Restores()], reload_dataloaders_every_n_epochs=reload)
    trainer.fit(Line(), datamodule=Data())
    batches = len(Data().val_dataloader())
    assert compat.logged_state(trainer)["validated"] == {0: batches if reload else 40 + 2 * batches}


# -- what ranks log, made one


class Evaluated(Line):
    """Logs in every way in an evaluation of two loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = CatMetric()
        self.averaged = MeanMetric()
        self.count = 0

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.count += 1
        value = torch.tensor(float(self.count))
        self.log("mean", value, batch_size=self.count, on_step=True, on_epoch=True)
        self.log("sum", value, reduce_fx="sum")
        self.log("own", value, rank_zero_only=True)
        self.rows(value.repeat(2))
        self.averaged(value)
        self.log("rows", self.averaged)


class Changes(L.Callback):
    """Looks at what was logged for a loader and puts other numbers in its place, also under a key of its own."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, tuple[str, str, float, float]]]] = []
        self.done: dict[str, Tensor] = {}
        self.loaders: list[Any] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.calls: list[int] = []
        self.undo = compat.before_epoch_results(trainer, lambda number: self.change(trainer, number))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.undo()

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.loaders = compat.evaluation_loaders(trainer)

    def change(self, trainer: L.Trainer, number: int) -> None:
        self.calls.append(number)
        if len(self.calls) == 3:
            return
        logged = compat.logged_for_epoch(trainer, self.done)
        self.seen.append((number, {key: (x.hook, x.reduction, x.value, x.weight) for key, x in logged.items()}))
        mean: compat.Logged = logged[f"validation_step.mean.{number}"]
        absent = dataclasses.replace(
            mean, result={**mean.result, "arguments": {**mean.result["arguments"], "name": "absent", "prog_bar": True}}
        )
        self.done["mean"] = compat.set_logged(trainer, f"validation_step.mean.{number}", mean, 42.5)
        compat.set_logged(trainer, f"validation_step.absent.{number}", absent, 7.5)
        assert f"validation_step.mean.{number}" in compat.logged_for_epoch(trainer, {})
        assert f"validation_step.mean.{number}" not in compat.logged_for_epoch(
            trainer, {f"validation_step.mean.{number}": self.done["mean"]}
        )


def test_what_was_logged_for_a_loader_can_be_replaced() -> None:
    """Before Lightning computes it: in what `validate` returns, the callback metrics, the progress bar.

    If it breaks: find what computes the results of a loader, and what its cache is called.
    """
    changes, loaders = Changes(), [loader(16), loader(32)]
    trainer = plain(callbacks=[changes])
    given = trainer.validate(Evaluated(), loaders, verbose=False)
    assert changes.loaders == loaders
    assert changes.seen[0] == (
        0,
        {
            "validation_step.mean.0": ("validation_step", "mean", 1.0 + 4.0, 3.0),
            "validation_step.sum.0": ("validation_step", "sum", 3.0, 1.0),
        },
    )
    assert changes.calls == [0, 1, 1]
    for number, metrics in enumerate(given):
        assert metrics[f"mean_epoch/dataloader_idx_{number}"] == 42.5
        assert metrics[f"absent_epoch/dataloader_idx_{number}"] == 7.5
        assert trainer.callback_metrics[f"absent/dataloader_idx_{number}"] == 7.5
        assert trainer.progress_bar_metrics[f"absent_epoch/dataloader_idx_{number}"] == 7.5
    assert given[1]["sum/dataloader_idx_1"] == 3.0
    trainer.validate(Evaluated(), loaders, verbose=False)  # attached anew, and once
    assert changes.calls == [0, 1, 1]
    changes.undo()
    private: Any = trainer
    assert "epoch_end_reached" not in vars(private._logger_connector)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("kind", ["several at once", "dataloader_iter"])
def test_loaders_whose_batches_have_no_number(kind: str) -> None:
    """If it breaks: find how a CombinedLoader says that it goes through loaders in turn."""

    class Draws(Line):
        def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
            next(dataloader_iter)

    class Several(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    class Looks(L.Callback):
        found: Any = None

        def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            self.found = compat.evaluation_loaders(trainer)

    looks = Looks()
    one: Any = CombinedLoader([loader(), loader()], "max_size") if kind == "several at once" else loader()
    model = Several() if kind == "several at once" else Draws()
    plain(callbacks=[looks]).validate(model, one, verbose=False)
    assert looks.found == []


class Holds(L.Callback):
    """Lets the first batch count, and no other."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.steps: list[float] = []

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if args[1] == 1:
            self.held = [compat.hold_logged(trainer), compat.hold_metrics(pl_module)]

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.steps.append(float(trainer.logged_metrics.get("mean_step", torch.nan)))

    def release(self) -> None:
        while self.held:
            self.held.pop()()


def test_what_is_logged_while_it_is_held_does_not_count() -> None:
    """Neither in Lightning's own accumulation nor in torchmetrics; lists keep their length, with empty parts.

    If it breaks: wrap whatever adds a logged value to the results now.
    """
    holds, model = Holds(), Evaluated()
    trainer = plain(callbacks=[holds])
    undo = compat.before_epoch_results(trainer, lambda number: holds.release())
    trainer.validate(model, loader(8), verbose=False)
    undo()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics == {"mean": 1.0, "mean_epoch": 1.0, "sum": 1.0, "own": 1.0, "rows": 1.0}
    assert [len(one) for one in model.rows.metric_state["value"]] == [2, 0, 0, 0]
    assert model.rows.compute().tolist() == [1.0, 1.0]
    assert model.rows.update_count == 1


def test_iterators_are_made_behind_the_hooks_of_the_epoch(saved: Path) -> None:
    """Also where the fit was restored from between two epochs.

    If it breaks: read `_TrainingEpochLoop.on_run_start`: it decides whether an iterator is made anew.
    """
    came: list[str] = []

    class Watched(DataLoader[Any]):
        def __iter__(self) -> Any:
            came.append("iterator")
            return super().__iter__()

    class Begins(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            came.clear()
            compat.as_if_never_restored(trainer)

        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            came.append("epoch")

    data = Data().train_dataloader().dataset
    plain(max_epochs=2, callbacks=[Begins()]).fit(
        Line(), Watched(data, batch_size=4), Data().val_dataloader(), ckpt_path=str(saved)
    )
    assert came == ["epoch", "iterator"]


def test_steps_that_lightning_does_not_count_are_counted() -> None:
    """Of a module that optimizes by hand: without Lightning's wrapper, and in a hook; its wrapper's only once.

    If it breaks: name checkpoints by batches in a loop by hand.
    """

    class ByHand(Line):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            counted = batch_idx % 2 == 0
            optimizer: Any = self.optimizers(use_pl_optimizer=counted)
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).square().mean())
            if batch_idx == 1:
                with pytest.raises(ZeroDivisionError):
                    optimizer.step(lambda: 1 / 0)  # one that raises is not counted, and those after it are
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    told: list[int] = []
    trainer = plain(max_epochs=1)
    undo = compat.count_steps(trainer, lambda: told.append(trainer.global_step))
    trainer.fit(ByHand(), datamodule=Data())
    undo()
    assert (trainer.global_step, told) == (8, [1])
    trainer = plain(max_epochs=1)
    trainer.fit(ByHand(), datamodule=Data())
    assert trainer.global_step == 4


def test_a_loader_is_asked_for_as_at_another_place() -> None:
    """If it breaks: a loader that is made anew every n epochs cannot be made again on a resume."""
    trainer = plain(max_epochs=1)
    trainer.fit(Line(), datamodule=Data())
    assert (trainer.current_epoch, trainer.global_step) == (1, 8)
    with compat.as_at(trainer, (5, 40)):
        assert (trainer.current_epoch, trainer.global_step) == (5, 40)
    with compat.as_at(trainer, None):
        assert (trainer.current_epoch, trainer.global_step) == (1, 8)
    assert (trainer.current_epoch, trainer.global_step) == (1, 8)


def test_a_compiled_module_is_taken_for_what_it_was_made_of() -> None:
    """If it breaks: refuse such a factory, and advise `module.compile()`."""
    line = Line()
    compiled: Any = torch.compile(line, backend="eager")
    found = compat.uncompiled(compiled)
    assert found is line
    assert found._compiled_call_impl is not None
    assert compat.uncompiled(line) is line
