"""`Trainer(config, run=...)` in one process: what a run directory holds, how a run goes on, what stays untouched."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from tiny_job import (
    Data,
    Line,
    apart,
    checkpoints,
    contents,
    events,
    fit,
    latest,
    loader,
    make_trainer,
    manifest,
    metric_rows,
    plain,
    samples,
)
from torch.utils.data import DataLoader

from fairlead import FairleadError, RunConfig, Trainer, fabric
from fairlead.errors import CheckpointError, ConfigError, FingerprintError, RunFailedError
from fairlead_runs.commit import verify


def test_a_run_directory_holds_what_happened(tmp_path: Path) -> None:
    """One checkpoint directory per step, complete, with what it is of."""
    model = fit(tmp_path, max_steps=10)
    run = tmp_path / "run"
    assert {p.name for p in run.iterdir()} >= {"job.yaml", "starts", "history.jsonl", "metrics.csv", "checkpoints"}
    assert [e["event"] for e in events(run)] == ["start", "training", "batch", "checkpoint", "checkpoint", "finished"]
    assert [c.step for c in checkpoints(run)] == [8, 10]  # eight batches an epoch: its end, and the end of training
    newest = latest(run)
    assert verify(newest.path, deep=True) == []
    assert sorted(manifest(newest)["files"]) == ["rank-00000.pt", "state.ckpt"]
    said = newest.metadata
    assert (said["step"], said["epoch"], said["world_size"], said["start"]) == (10, 1, 1, 1)
    assert said["hyperparameters"] == {"lr": 0.05, "width": 3}
    assert said["metrics"]["train/loss"] == pytest.approx(float(metric_rows(run)[9]["train/loss"]))
    assert model.seen == list(range(10))


def test_settings_as_a_mapping_hold(tmp_path: Path) -> None:
    """As those of a job file; the one callback that Lightning takes without a list is taken as well."""
    stopping = EarlyStopping("train/loss")
    settings = {"max_steps": 10, "accelerator": "cpu", "checkpoint": {"every_n_steps": 5}}
    trainer = Trainer(settings, run={"name": "run", "dir": str(tmp_path)}, callbacks=stopping)
    assert (trainer.max_steps, trainer.run_config) == (10, RunConfig(name="run", dir=str(tmp_path)))
    assert trainer.fairlead_config.checkpoint.every_n_steps == 5
    assert stopping in trainer.early_stopping_callbacks
    assert fabric({"accelerator": "cpu", "devices": 1, "precision": "bf16-true"})._precision.precision == "bf16-true"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Trainer("job.yaml"), r"(?s)'job.yaml' is no TrainerConfig.*Trainer.*mapping of its fields"),  # type: ignore[arg-type]
        (lambda: Trainer(RunConfig(name="x")), r"RunConfig\(name='x'.* is no TrainerConfig"),  # type: ignore[arg-type]
        (lambda: Trainer({"max_epoch": 7}), r"(?s)unknown field 'max_epoch'.*did you mean 'max_epochs'"),
        (lambda: Trainer(run="x"), r"(?s)'x' is no RunConfig.*Trainer, run"),  # type: ignore[arg-type]
        (lambda: Trainer(callbacks=[EarlyStopping]), "is no callback of Lightning's"),  # type: ignore[list-item]
        (lambda: fabric("job.yaml"), "'job.yaml' is no TrainerConfig"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_config_is_refused(make: Callable[[], object], message: str) -> None:
    """It was taken for no settings at all: the training had the defaults."""
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("file", ["state.ckpt", "rank-00000.pt"])
def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_used(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said loudly, and nothing is lost: what was done since is done again."""
    undisturbed = fit(tmp_path / "a", max_steps=12)
    often = {"every_n_steps": 3, "keep_last": 3}
    fit(tmp_path / "b", max_steps=9, checkpoint=often)
    run = tmp_path / "b" / "run"
    damaged = latest(run).path / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        fit(tmp_path / "c", {"resume": str(damaged.parent)}, max_steps=12)
    capsys.readouterr()
    again = fit(tmp_path / "b", max_steps=12, checkpoint=often)
    assert f"step-00000009/{file}: its xxh3_128 checksum is wrong" in capsys.readouterr().out
    assert events(run, "start")[-1]["resumed_from"].endswith("step-00000008/state.ckpt")
    assert apart(again, undisturbed) == 0
    assert [row["step"] for row in metric_rows(run)] == [row["step"] for row in metric_rows(tmp_path / "a" / "run")]


def test_metrics_in_a_manifest_are_of_that_state(tmp_path: Path) -> None:
    """What an earlier validation measured does not make a later state the best one."""
    fit(tmp_path, max_steps=11, val_check_interval=4, checkpoint={"every_n_steps": 1, "keep_last": 99})
    run = tmp_path / "run"
    newest = {c.step: c for c in checkpoints(run)}
    with_value = [step for step, c in sorted(newest.items()) if "val/loss" in c.metadata["metrics"]]
    assert with_value == [4, 8]
    assert sorted(newest) == list(range(1, 12))
    losses = {r["step"]: r["val/loss"] for r in metric_rows(run) if r["val/loss"]}
    assert [newest[4].metadata["metrics"]["val/loss"], newest[8].metadata["metrics"]["val/loss"]] == [
        pytest.approx(float(v)) for v in losses.values()
    ]


def test_plain_lightning_reads_our_checkpoints(tmp_path: Path) -> None:
    """A checkpoint is not bound to Fairlead."""
    model = fit(tmp_path, max_steps=8)
    file = latest(tmp_path / "run").path / "state.ckpt"
    loaded = Line.load_from_checkpoint(file)
    assert apart(loaded, model) == 0
    again = Line()
    plain(max_steps=12).fit(again, datamodule=Data(), ckpt_path=str(file))
    assert again.seen == [8, 9, 10, 11]


def test_a_plain_checkpoint_is_resumed(tmp_path: Path) -> None:
    first = plain(max_steps=8)
    first.fit(Line(), datamodule=Data())
    first.save_checkpoint(tmp_path / "plain.ckpt")
    model = Line()
    trainer = make_trainer(tmp_path, max_steps=12)
    trainer.fit(model, datamodule=Data(), ckpt_path=tmp_path / "plain.ckpt")
    assert model.seen == [8, 9, 10, 11]
    # The run has checkpoints of its own now, and those count.
    more = Line()
    make_trainer(tmp_path, max_steps=14).fit(more, datamodule=Data(), ckpt_path=tmp_path / "plain.ckpt")
    assert more.seen == [12, 13]


def test_a_plain_checkpoint_at_the_limit_still_becomes_the_runs_own(tmp_path: Path) -> None:
    first = plain(max_steps=8)
    first.fit(Line(), datamodule=Data())
    first.save_checkpoint(tmp_path / "plain.ckpt")
    make_trainer(tmp_path, max_steps=8).fit(Line(), datamodule=Data(), ckpt_path=tmp_path / "plain.ckpt")
    assert [e["event"] for e in events(tmp_path / "run")][-1] == "finished"


class Ends(Line):
    """Is asked to stop after some step."""

    after: int | None = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """Four epochs without a stop."""
    return fit(tmp_path_factory.mktemp("whole"), max_epochs=4)


SAVES: dict[str, dict[str, Any]] = {
    "default": {},
    "steps": {"checkpoint": {"every_n_steps": 2, "on_validation": False, "every_n_epochs": None}},
    "validation inside the epoch": {"val_check_interval": 4},
}
FIRST: dict[str, tuple[dict[str, Any], int | None, int]] = {
    "max_steps at the end of an epoch": ({"max_steps": 8}, None, 8),
    "max_epochs": ({"max_epochs": 1}, None, 8),
    "max_steps inside an epoch": ({"max_steps": 11}, None, 11),
    "SIGTERM after the last batch of an epoch": ({"max_epochs": 9}, 8, 8),
    "SIGTERM inside an epoch": ({"max_epochs": 9}, 11, 11),
}


@pytest.mark.parametrize(
    "limit", [{"max_steps": 32}, pytest.param({"max_epochs": 4}, marks=pytest.mark.full)], ids=["steps", "epochs"]
)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize(
    "saves", ["steps", *(pytest.param(one, marks=pytest.mark.full) for one in SAVES if one != "steps")]
)
def test_a_run_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, whole: Line, saves: str, first: str, limit: dict[str, Any]
) -> None:
    """Steps, epochs, optimizer and schedule go on; between two epochs equal to the last bit.

    Lightning itself would count one epoch too many after most of these stops.
    """
    settings, after, stopped = FIRST[first]
    model = Ends()
    model.after = after
    with contextlib.suppress(SystemExit):
        make_trainer(tmp_path, **settings, **SAVES[saves]).fit(model, datamodule=Data())
    assert latest(tmp_path / "run").step == stopped
    second = Ends()
    trainer = make_trainer(tmp_path, **limit, **SAVES[saves])
    trainer.fit(second, datamodule=Data())
    assert second.seen == list(range(stopped, 32))
    assert trainer.current_epoch == 4
    assert [int(row["step"]) for row in metric_rows(tmp_path / "run") if row["train/loss"]] == list(range(32))
    if stopped == 8:
        assert apart(second, whole) == 0
    starts = events(tmp_path / "run", "start")
    assert [start["start"] for start in starts] == [1, 2]
    assert f"step-{stopped:08d}" in str(starts[1]["resumed_from"])


def test_the_checkpoint_of_an_epoch_is_the_same_when_training_went_on(tmp_path: Path, whole: Line) -> None:
    """What a kill in the second epoch leaves: the checkpoint that was saved as that epoch began."""
    fit(tmp_path, max_epochs=2, checkpoint={"keep_last": 9})
    early = tmp_path / "run" / "checkpoints" / "step-00000008"
    second = Line()
    trainer = make_trainer(tmp_path / "other", {"resume": str(early)}, max_steps=32)
    trainer.fit(second, datamodule=Data())
    assert second.seen == list(range(8, 32))
    assert trainer.current_epoch == 4
    assert apart(second, whole) == 0


def test_a_finished_run_says_so_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, max_steps=8)
    before = contents(tmp_path / "run")
    again = fit(tmp_path, max_steps=8)
    assert again.seen == []
    assert contents(tmp_path / "run") == before
    assert "is finished" in capsys.readouterr().out


@pytest.mark.parametrize("stopped_early", [False, True])
def test_what_follows_a_finished_fit_finds_what_it_would_have_found(tmp_path: Path, stopped_early: bool) -> None:
    """A script that is started again behind its fit tests the same weights, the best ones too, and reports the same."""

    stopping = {
        "class": "lightning.pytorch.callbacks:EarlyStopping",
        "args": {"monitor": "val/loss", "patience": 1, "min_delta": 1e9},
    }

    def once() -> tuple[Line, Any, str]:
        trainer = make_trainer(tmp_path, max_epochs=4, callbacks=[stopping] if stopped_early else [])
        model = Line()
        trainer.fit(model, datamodule=Data())
        saved = trainer.checkpoint_callback
        assert saved is not None
        return model, dict(trainer.callback_metrics), str(vars(saved)["best_model_path"])

    first, metrics, best = once()
    before = contents(tmp_path / "run")
    again, metrics_again, best_again = once()
    assert len(first.seen) == (16 if stopped_early else 32)
    assert again.seen == []
    assert apart(again, first) == 0
    assert metrics_again == metrics
    assert "val/loss" in metrics
    assert best_again == best
    assert Path(best).exists()
    assert contents(tmp_path / "run") == before


def test_a_second_fit_of_one_trainer_is_a_second_start_of_its_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=1)
    model = Line()
    trainer.fit(model, datamodule=Data())
    trainer.fit(model, datamodule=Data())
    assert model.seen == list(range(8))  # finished: nothing more to do
    with pytest.raises(FingerprintError, match="other settings"):
        trainer.fit(Line(lr=0.01), datamodule=Data())
    assert len(events(tmp_path / "run", "start")) == 1


def test_never_makes_a_sibling(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=4)
    before = contents(tmp_path / "run")
    model = fit(tmp_path, {"resume": "never"}, max_steps=4)
    assert model.seen == [0, 1, 2, 3]
    assert latest(tmp_path / "run-2").step == 4
    assert contents(tmp_path / "run") == before


def test_resume_takes_the_path_of_a_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=10, checkpoint={"every_n_steps": 4, "keep_last": 9})
    early = tmp_path / "run" / "checkpoints" / "step-00000004"
    model = fit(tmp_path, {"resume": str(early)}, max_steps=12)
    assert model.seen == [4, 5, 6, 7, 8, 9, 10, 11]
    assert [int(r["step"]) for r in metric_rows(tmp_path / "run")] == sorted(
        {int(r["step"]) for r in metric_rows(tmp_path / "run")}
    )


def test_a_checkpoint_that_does_not_exist_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        fit(tmp_path, {"ckpt_path": str(tmp_path / "no.ckpt")}, max_steps=4)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    other = plain(max_steps=2)
    other.fit(Line(width=5), loader(width=5), loader(width=5))
    other.save_checkpoint(tmp_path / "wide.ckpt")
    with pytest.raises(CheckpointError, match="another model than Line") as caught:
        fit(tmp_path, {"ckpt_path": str(tmp_path / "wide.ckpt")}, max_steps=4)
    assert "net.weight" in str(caught.value)
    assert "wide.ckpt" in str(caught.value)
    assert events(tmp_path / "run")[-1]["event"] == "failed"


def test_enable_checkpointing_false_writes_none(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=8, enable_checkpointing=False)
    assert checkpoints(tmp_path / "run") == []
    assert len(metric_rows(tmp_path / "run")) == 8


@pytest.mark.parametrize("setting", ["fast_dev_run", "barebones"])
@pytest.mark.filterwarnings("ignore:You are running in `Trainer\\(barebones=True\\)`")
def test_trials_keep_no_records(tmp_path: Path, setting: str) -> None:
    """A run directory of a trial would refuse the real job, whose settings are others."""
    model = Line()
    if setting == "barebones":
        model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # Lightning warns of it here
    config: dict[str, Any] = {setting: True, "log_every_n_steps": None}
    trainer = make_trainer(tmp_path, max_steps=2, **config)
    trainer.fit(model, datamodule=Data())
    assert len(model.seen) == (1 if setting == "fast_dev_run" else 2)
    assert list(tmp_path.iterdir()) == []


def test_evaluation_takes_the_weights_of_its_run_and_writes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = Line()
    make_trainer(tmp_path, max_steps=8).fit(trained, datamodule=Data())
    before = contents(tmp_path)
    references = [plain().validate(model, loader(), verbose=False) for model in (trained, Line())]
    trainer = make_trainer(tmp_path, max_steps=8)
    capfd.readouterr()
    assert trainer.validate(Line(), loader(), verbose=False) == references[0] != references[1]
    assert re.match(r"weights +\S*step-00000008, the best by val/loss \(", capfd.readouterr().out)
    for named in ("last", tmp_path / "run"):
        assert trainer.validate(Line(), loader(), named, verbose=False) == references[0]
    assert trainer.validate(Line(), loader(), ckpt_path="never", verbose=False) == references[1]
    trainer.test(Line(), loader(), verbose=False)
    trainer.predict(Line(), loader())
    assert contents(tmp_path) == before


def test_evaluation_without_trained_weights_is_an_error(tmp_path: Path) -> None:
    """Freshly initialised weights are evaluated only where they are asked for."""
    trainer = make_trainer(tmp_path, max_steps=8)
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        with pytest.raises(CheckpointError, match="no trained weights"):
            evaluate(Line(), loader())
    trainer.validate(Line(), loader(), ckpt_path="never", verbose=False)


def test_evaluation_after_a_fit_writes_nothing_either(tmp_path: Path) -> None:
    """Also not into metrics.csv or the heartbeats of the run that was just trained."""
    trainer = make_trainer(tmp_path, max_steps=8)
    model = Line()
    trainer.fit(model, datamodule=Data())
    before = contents(tmp_path)
    trainer.validate(model, loader(), verbose=False)
    trainer.test(model, loader(), verbose=False)
    trainer.predict(model, loader())
    assert contents(tmp_path) == before


def test_sigterm_saves_before_it_stops(tmp_path: Path) -> None:
    class Stopped(Line):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, model=Stopped(), max_steps=20)
    assert ended.value.code == 143
    run = tmp_path / "run"
    assert [e["event"] for e in events(run)][-3:] == ["signal", "checkpoint", "stop"]
    assert events(run, "signal")[-1]["signals"] == ["SIGTERM"]
    assert events(run, "checkpoint")[-1]["reason"] == "stop"
    saved = latest(run).step
    assert saved == 5
    again = Stopped()
    make_trainer(tmp_path, max_steps=saved + 3).fit(again, datamodule=Data())
    assert again.seen == [saved, saved + 1, saved + 2]


def test_what_the_users_code_raises_is_in_the_history(tmp_path: Path) -> None:
    class Breaks(Line):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.trainer.global_step == 5:
                raise ZeroDivisionError("the user's own")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, model=Breaks(), max_steps=8)
    failed = events(tmp_path / "run")[-1]
    assert (failed["event"], failed["step"], failed["error"]) == ("failed", 5, "ZeroDivisionError: the user's own")
    # The lock is free again: the next start is not refused.
    model = fit(tmp_path, {"resume": "never"}, max_steps=2)
    assert model.seen == [0, 1]


def test_the_state_of_other_callbacks_is_as_new_as_the_weights(tmp_path: Path) -> None:
    stopping = EarlyStopping("val/loss", patience=50, min_delta=1e9)
    config = make_trainer(tmp_path, max_epochs=3).fairlead_config
    Trainer(config, run=RunConfig(name="run", dir=str(tmp_path)), callbacks=[stopping]).fit(Line(), datamodule=Data())
    state = torch.load(latest(tmp_path / "run").path / "state.ckpt", weights_only=True)
    (kept,) = [s for key, s in state["callbacks"].items() if "EarlyStopping" in key]
    assert kept["wait_count"] == stopping.wait_count == 2


@pytest.mark.parametrize("reload", [0, 1])
def test_a_schedule_of_accumulation_is_no_change_of_the_world(tmp_path: Path, reload: int) -> None:
    """What Lightning's scheduler makes of the accumulation later is not what the run was started with."""
    for epochs in (3, 4):
        more: dict[str, Any] = {"max_epochs": epochs, "reload_dataloaders_every_n_epochs": reload}
        config = make_trainer(tmp_path, **more).fairlead_config
        model = Line()
        schedule = GradientAccumulationScheduler({1: 4})
        trainer = Trainer(config, run=RunConfig(name="run", dir=str(tmp_path)), callbacks=[schedule])
        trainer.fit(model, datamodule=Data())
    assert trainer.global_step == 8 + 2 + 2 + 2


def test_settings_that_lightning_refuses_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Lightning refuses"):
        make_trainer(tmp_path, lightning_kwargs={"no_such_argument": 1})
    with pytest.raises(ConfigError, match="log_every_n_steps"):
        make_trainer(tmp_path, barebones=True)


def test_the_root_directory_is_the_run_directory_only_while_it_is_trained(tmp_path: Path) -> None:
    places: list[str | None] = []

    class Asks(Line):
        def on_train_start(self) -> None:
            places.extend([self.trainer.default_root_dir, self.trainer.log_dir])

    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.fit(Asks(), datamodule=Data())
    assert places == [str(tmp_path / "run")] * 2
    assert trainer.default_root_dir == str(tmp_path)


def test_a_job_from_python_is_recorded(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=2)
    text = (tmp_path / "run" / "job.yaml").read_text()
    assert "tiny_job:Line" in text
    assert "tiny_job:Data" in text
    resolution = json.loads((tmp_path / "run" / "starts" / "1" / "resolution.json").read_text())
    assert "trainer.devices" in json.dumps(resolution)


def test_an_error_is_one_of_ours(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(FairleadError) as caught:
        fit(tmp_path, max_steps=2)
    assert str(tmp_path / "run") in str(caught.value)


def test_a_datamodule_may_be_the_second_argument(tmp_path: Path) -> None:
    """As in Lightning."""
    model = Line()
    make_trainer(tmp_path, max_steps=2).fit(model, Data())
    assert model.seen == [0, 1]
    assert isinstance(make_trainer(tmp_path, max_steps=2), L.Trainer)


def ends_in_a_step(model: Line) -> None:
    """As `next(iterator)` does behind the last item; Lightning takes it for the end of the data."""

    def training_step(batch: Any, batch_idx: int) -> Any:
        raise StopIteration

    vars(model)["training_step"] = training_step


@pytest.mark.filterwarnings("ignore:Total length of")
@pytest.mark.parametrize("empty", [True, False], ids=["no batches", "StopIteration"])
def test_what_ends_short_of_its_limits_without_a_reason_is_not_finished(tmp_path: Path, empty: bool) -> None:
    model = Line()
    if not empty:
        ends_in_a_step(model)
    trainer = make_trainer(tmp_path, max_steps=50)
    with pytest.raises(FairleadError, match="short of its limits" if empty else "ended in its batch 0") as failed:
        trainer.fit(model, DataLoader(samples(0 if empty else 32), 4), loader())
    assert failed.value.exit_code == 1
    assert [e["event"] for e in events(tmp_path / "run")][-1] == "failed"


def test_a_finished_run_says_what_ended_it(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=3)
    assert events(tmp_path / "run")[-1]["reason"] == "max_steps 3"


def test_a_schedule_that_is_over_says_what_to_change(tmp_path: Path) -> None:
    class Short(Line):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    fit(tmp_path, model=Short(), max_steps=8)
    with pytest.raises(RunFailedError, match="made for 8 steps") as raised:
        fit(tmp_path, model=Short(), max_steps=12)
    assert "estimated_stepping_batches" in str(raised.value.fix)


def test_another_jobs_directory_is_refused_in_the_words_of_a_script(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=2)
    with pytest.raises(FingerprintError) as raised:
        fit(tmp_path, model=Line(lr=0.3), max_steps=2)
    assert "RunConfig(accept=['model.args.lr'])" in str(raised.value.fix)
    assert "--" not in str(raised.value.fix)
