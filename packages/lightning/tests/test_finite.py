"""A loss or a weight that is no number ends a run as failed, and is never its result."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from tiny_job import Data, Line, checkpoints, events, fit, latest, make_trainer, plain
from torch import Tensor

from fairlead import Fairlead
from fairlead.config import CheckpointConfig
from fairlead.errors import RunFailedError
from fairlead_distributed.run.silent_faults import non_finite_weights
from fairlead_distributed.testing import run_ranks


class Diverges(Line):
    """Its loss is no number at some of its steps."""

    def __init__(self, *at: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.at = set(at)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if self.trainer.global_step in self.at else loss


class Skips(Diverges):
    """A user's own way to survive it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if any(not p.grad.isfinite().all() for p in self.parameters() if p.grad is not None):
            optimizer.zero_grad()


def found(run: Path) -> list[tuple[int, str]]:
    return [(event["step"], event["why"]) for event in events(run) if event["event"] == "not-finite"]


def test_a_loss_that_is_no_number_ends_the_run_at_its_step(tmp_path: Path) -> None:
    every: dict[str, Any] = {"checkpoint": {"every_n_steps": 1, "keep_last": 1}, "max_steps": 24}
    with pytest.raises(RunFailedError, match=r"at step 12 the weights are not finite") as failed:
        fit(tmp_path, model=Diverges(*range(11, 24)), **every)
    assert failed.value.exit_code == 1
    step, why = found(tmp_path / "run")[0]
    assert step == 11
    assert "finite before it" in why
    assert "the weight net.weight is not finite, and 1 more" in why
    assert latest(tmp_path / "run").step == 11
    assert "newest checkpoint is of before, of step 11" in str(failed.value)
    assert events(tmp_path / "run")[-1]["event"] == "failed"


def test_so_many_in_a_row_end_it(tmp_path: Path) -> None:
    model = Skips(2, 3, 4, 9, *range(12, 24))
    with pytest.raises(RunFailedError, match="in 5 batches in a row, since step 12"):
        fit(tmp_path, model=model, max_steps=24, max_non_finite=5)
    assert [step for step, _ in found(tmp_path / "run")] == [2, 9, 12]
    assert model.seen[-1] == 16


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    class Overflows(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 7:
                self.net.bias.data.fill_(math.inf)

    with pytest.raises(RunFailedError):
        fit(tmp_path, model=Overflows(), max_steps=24)
    assert found(tmp_path / "run")[0] == (7, "the weight net.bias is not finite before it")


def test_few_steps_are_not_finished_either(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="weights are not finite"):
        fit(tmp_path, model=Diverges(2), max_steps=3, enable_checkpointing=False)
    assert events(tmp_path / "run")[-1]["event"] == "failed"


def test_early_stopping_on_it_is_not_finished(tmp_path: Path) -> None:
    class Logs(Line):
        def on_train_epoch_end(self) -> None:
            self.log("bad", torch.tensor(math.nan))

    trainer = make_trainer(tmp_path, max_epochs=3)
    stopping = EarlyStopping("bad", check_on_train_epoch_end=True)
    vars(trainer)["callbacks"].append(stopping)
    with pytest.raises(RunFailedError, match="early stopping has ended the training at step 8: bad is not finite"):
        trainer.fit(Logs(), datamodule=Data())


def test_it_goes_on_where_it_is_told_to_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    often = CheckpointConfig(every_n_steps=1, every_n_epochs=None, on_validation=False, keep_last=1)
    trainer = plain(max_steps=20, callbacks=[Fairlead(run=tmp_path / "run", checkpoint=often, max_non_finite=None)])
    trainer.fit(Diverges(5), datamodule=Data())
    assert [kept.step for kept in checkpoints(tmp_path / "run")] == [5, 20]
    assert events(tmp_path / "run")[-1]["event"] == "finished"


def test_what_counts_as_a_weight() -> None:
    model: Any = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.BatchNorm1d(2)})
    model["frozen"] = torch.nn.Linear(1, 1).requires_grad_(False)
    model.register_buffer("mask", torch.full((2,), -math.inf))
    model["frozen"].bias.data.fill_(math.nan)
    model.register_parameter("none", torch.nn.Parameter(torch.empty(0)))
    assert non_finite_weights(model) == []
    model["a"].weight.data[1, 1] = -math.inf
    model["b"].weight.data[0] = math.nan
    assert non_finite_weights(model) == ["a.weight", "b.weight"]
    assert non_finite_weights(model.half()) == ["a.weight", "b.weight"]


def one_rank_diverges(rank: int, root: Path) -> str:
    """Rank 1 alone has the batch; what its gradients have made of the weights, both have."""
    trainer = make_trainer(root, devices=2, strategy="ddp", max_steps=16, log_every_n_steps=3, max_non_finite=2)
    try:
        trainer.fit(Diverges(*([4] if rank else [])), datamodule=Data())
    except RunFailedError as error:
        return str(error)
    return "trained on"


def test_all_ranks_end_together_and_say_the_same(tmp_path: Path) -> None:
    said = run_ranks(one_rank_diverges, 2, tmp_path)
    assert said[0] == said[1]
    assert "the loss was not finite in 2 batches in a row, since step 4" in said[0]
    assert [step for step, _ in found(tmp_path / "run")] == [4]


class Bends(Line):
    """Its gradient is no number where its loss is: sqrt of 0, in some batches, on one rank."""

    def __init__(self, *at: int, rank: int = 0) -> None:
        super().__init__()
        self.at, self.rank = set(at), rank
        self.free = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) + 0 * self.free.sum()
        if self.trainer.global_step in self.at and self.trainer.global_rank == self.rank:
            loss = loss + (self.net(batch[0]) * 0).sum().sqrt()
        return loss


def test_a_gradient_that_is_no_number_is_said_with_its_weight_step_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailedError) as failed:
        fit(tmp_path, model=Bends(6), max_steps=24)
    assert [event["step"] for event in events(tmp_path / "run", "not-finite")] == [6, 7, 8]
    said = capsys.readouterr().out
    assert "warning[gradient-not-finite]: the gradient of net.weight is not finite at step 6\n" in said
    assert "the loss of this step was finite" in said
    assert "a smaller learning rate (it is 0.05: try 0.005), trainer.gradient_clip_val: 1.0, or other data" in said
    assert "the gradient of net.weight was not finite at step 6" in str(failed.value.why)
    assert "try 0.0" in str(failed.value.fix)


def test_a_gradient_that_is_skipped_is_said_and_the_training_goes_on(tmp_path: Path) -> None:
    class Careful(Bends):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if any(not p.grad.isfinite().all() for p in self.parameters() if p.grad is not None):
                optimizer.zero_grad()

    fit(tmp_path, model=Careful(6, 12), max_steps=24, gradient_clip_val=0.5)
    assert [event["step"] for event in events(tmp_path / "run", "not-finite")] == [6, 12]
    assert events(tmp_path / "run")[-1]["event"] == "finished"


def one_rank_bends(rank: int, root: Path) -> str:
    trainer = make_trainer(root, devices=2, strategy="ddp", max_steps=16, log_every_n_steps=2)
    try:
        trainer.fit(Bends(4, rank=1), datamodule=Data())
    except RunFailedError as error:
        return str(error)
    return "trained on"


def test_the_rank_whose_batch_it_was_is_named(tmp_path: Path) -> None:
    """After the average all ranks have it."""
    said = run_ranks(one_rank_bends, 2, tmp_path)
    assert said[0] == said[1]
    assert "the gradient of net.weight was not finite at step 4 on rank 1" in said[0]
    first = events(tmp_path / "run", "not-finite")[0]
    assert first["what"] == "the gradient of net.weight is not finite at step 4 on rank 1"


def test_large_gradients_are_looked_at_where_small_ones_are_bad_or_it_is_asked_for() -> None:
    from fairlead_lightning.checkpoint.finite import FEW, GradientWatch

    model = torch.nn.Sequential(torch.nn.Linear(2, FEW), torch.nn.LayerNorm(FEW), torch.nn.Linear(FEW, 1))
    watch = GradientWatch()
    watch.begin(model)
    for step, (name, at_all, expected) in enumerate(
        [("", False, None), ("2.weight", False, None), ("2.weight", True, "2.weight"), ("2.bias", False, "2.bias")]
    ):
        watch.begin(model)
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        if name:
            model.get_parameter(name).grad = torch.full_like(model.get_parameter(name), math.nan)
        watch.look(step, at_all=at_all)
        assert watch.found(scaled=False) == (None if expected is None else (expected, step, False))
    model(torch.ones(1, 2) * math.inf).sum().backward()  # it reaches all layers, and the first of them is named
    watch.begin(model)
    watch.look(9, at_all=False)
    assert watch.found(scaled=False) == ("0.weight", 9, False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_the_watch_sees(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the way of an accelerator, which counts where the gradients are; here it is made to."""
    from fairlead_lightning.checkpoint import finite as gradients

    if device == "meta":
        monkeypatch.setattr(gradients, "_on_host", lambda grad: False)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    model[2].requires_grad_(False)
    watch = gradients.GradientWatch()
    watch.begin(model)
    bad = torch.tensor([0.0, math.inf])
    for step, value in enumerate([None, bad, bad, None, torch.tensor([math.nan, 0.0])]):
        model(torch.ones(1, 2)).sum().backward()
        if value is not None:
            model[0].bias.grad = value
        if step == 2:
            model[0].weight.grad = None  # the first of a row is what counts
        watch.look(step)
        model.zero_grad()
        expected = {1: 1, 2: 1, 4: 4}.get(step)
        assert watch.found(scaled=False) == (None if expected is None else ("0.bias", expected, False))
        assert watch.found(scaled=True) is None
    for step in range(5, 30):
        model[1].weight.grad = torch.full((1, 2), math.nan)
        watch.look(step)
    assert watch.found(scaled=True) == ("0.bias", 4, False)
