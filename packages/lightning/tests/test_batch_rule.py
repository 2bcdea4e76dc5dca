"""A training's learning rates follow its global batch, from the first start on; told with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from tiny_job import Data, Line, fit, loader, make_trainer, plain, weights
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from fairlead import ClassSpec, Fairlead, JobConfig, RunConfig, Trainer
from fairlead.errors import ConfigError

TWO: dict[str, Any] = {"accumulate_grad_batches": 2, "base_batch_size": 2}


def test_a_run_has_the_scaled_learning_rate_from_its_first_step_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches of 4, two to a step: 8 / 2 = 4 times 0.05, as if the model had said 0.2; also over a second start."""
    said = []
    for steps in (4, 12):  # the first epoch ends behind step 4, where the schedule takes 0.7 of it
        model = fit(tmp_path, max_steps=steps, **TWO)
        said.append(capsys.readouterr().out)
    assert "learning rate 0.05 -> 0.2: x 4, lr_rule linear: global batch 8 / base_batch_size 2" in said[0]
    assert "(4 per device x 2 batches)" in said[0]
    assert "learning rate" not in said[1]
    by_hand = fit(tmp_path, {"name": "by hand"}, model=Line(lr=0.2), max_steps=12, accumulate_grad_batches=2)
    assert torch.equal(weights(model), weights(by_hand))
    fit(tmp_path, {"name": "none"}, max_steps=4, lr_rule="none", **TWO)
    assert "learning rate" not in capsys.readouterr().out


def test_a_script_with_the_callback_has_it_too(tmp_path: Path) -> None:
    ours = Fairlead(RunConfig(name="run", dir=str(tmp_path)), base_batch_size=1, lr_rule="sqrt")
    model, by_hand = Line(), Line(lr=0.1)
    plain(max_steps=4, callbacks=[ours], default_root_dir=tmp_path).fit(model, loader(), loader())
    plain(max_steps=4, default_root_dir=tmp_path).fit(by_hand, loader(), loader())
    assert torch.equal(weights(model), weights(by_hand))


class Own(LRScheduler):
    """A schedule that nobody knows."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return list(self.base_lrs)


class WithOwn(Line):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [Own(optimizer)]


def test_what_cannot_follow_is_refused_before_a_step_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the schedule Own is not known"):
        fit(tmp_path, model=WithOwn(), max_steps=4, base_batch_size=2)
    trainer = make_trainer(tmp_path, max_steps=4, base_batch_size=2)
    vars(trainer)["callbacks"].append(GradientAccumulationScheduler({0: 1, 1: 2}))
    with pytest.raises(ConfigError, match="does not go together with GradientAccumulationScheduler"):
        trainer.fit(Line(), datamodule=Data())
    streamed = DataLoader(loader().dataset, batch_size=None)
    with pytest.raises(ConfigError, match="the global batch is not known") as caught:
        make_trainer(tmp_path, max_steps=4, base_batch_size=2).fit(Line(), streamed, loader())
    assert "its loader has no batch_size" in str(caught.value)
    with pytest.raises(ConfigError, match="no job says a batch size"):
        make_trainer(tmp_path, batch_size="global")


def test_a_global_batch_that_the_loaders_do_not_give_is_an_error(tmp_path: Path) -> None:
    """The job says 16 for all; a datamodule that a script has made itself takes something else."""
    config = make_trainer(tmp_path, max_steps=4).fairlead_config.model_copy(update={"batch_size": "global"})
    job = JobConfig(
        run=RunConfig(name="run", dir=str(tmp_path)),
        model=ClassSpec(class_="tiny_job:Line"),
        data=ClassSpec(class_="tiny_job:Data", args={"batch_size": 16}),
        trainer=config,
    )
    with pytest.raises(ConfigError, match="asks for 16 samples to an optimizer step, and the loaders give 4"):
        Trainer(job).fit(Line(), datamodule=Data())
    Trainer(job).fit(Line(), datamodule=Data(batch_size=16))


class StartedError(Exception):
    """The training would begin now."""


class Stop(L.Callback):
    """Ends it there."""

    def on_train_start(self, *_: Any) -> None:
        raise StartedError


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_many_workers_are_told_of_where_the_loader_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    many: DataLoader[Any] = DataLoader(loader().dataset, batch_size=4, num_workers=5)
    trainer = make_trainer(tmp_path, max_steps=4)
    vars(trainer)["callbacks"].append(Stop())
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(StartedError):
        trainer.fit(Line(), many, loader())
    said = capsys.readouterr().out
    assert "warning[workers-too-many]: 5 workers would load data on each node, which has 2 CPUs for them" in said
    assert "where: training loader 0" in said
