"""`touch runs/x/SAVE` and `touch runs/x/STOP`, in a Trainer, with the callback and in a loop of one's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_job import Data, Line, events, fit, latest, plain

from fairlead import Fairlead, Run, RunConfig, TrainerConfig, fabric

AGAIN = {"name": "command", "argv": ["sh", "-c", "echo again >> asked"]}


class Touched(Line):
    """A person makes switch files while it trains: each in its place, and waits until it is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.plan: dict[tuple[str, int], str] = {}
        self.run = Path()

    def _here(self, place: str) -> None:
        if (name := self.plan.pop((place, self.trainer.global_step), None)) is not None:
            seen = len(events(self.run, "switch"))
            (self.run / name).touch()
            until = time.monotonic() + 30
            while len(events(self.run, "switch")) == seen:
                assert time.monotonic() < until
                time.sleep(0.02)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._here("step")

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._here("validation")


def touched(run: Path, **plan: dict[int, str]) -> Touched:
    """Not by arguments: a start without them belongs to the same run."""
    model = Touched()
    model.run = run
    model.plan = {(place, step): name for place, steps in plan.items() for step, name in steps.items()}
    return model


def test_a_fit_saves_and_goes_on_and_stops_and_the_next_start_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an epoch, behind its last batch, and in a validation: at the next step that can be saved."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    settings: dict[str, Any] = {"max_epochs": 5, "requeue": AGAIN}
    model = touched(run, step={2: "SAVE", 15: "SAVE", 25: "STOP"}, validation={8: "SAVE"})
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, model=model, **settings)
    assert ended.value.code == 143
    assert not Path("asked").exists()  # a person's STOP wants no other start
    saved = [event["step"] for event in events(run, "checkpoint") if event["reason"] == "asked"]
    assert saved == [3, 9]
    assert 16 in [event["step"] for event in events(run, "checkpoint")]  # at the epoch's end, where it was due anyway
    (stop,) = events(run, "stop")
    by = events(run, "switch")[-1]["by"]
    assert (stop["reason"], stop["step"], latest(run).step) == ("cancelled", 26, 26)
    assert stop["evidence"].startswith(f"{by} requested it by the file STOP")
    assert [event["file"] for event in events(run, "switch")] == ["SAVE", "SAVE", "SAVE", "STOP"]
    assert not {"SAVE", "STOP"} & {path.name for path in run.iterdir()}
    again = fit(tmp_path, model=touched(run), **settings)
    undisturbed = fit(tmp_path / "whole", model=touched(run), **settings)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), undisturbed.parameters(), strict=True))


def test_the_callback_does_the_same_and_a_stop_from_before_the_start_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody does not want the queued job to train; the start after that one does."""
    run = tmp_path / "run"

    def start(model: Touched) -> None:
        callback = Fairlead(RunConfig(name="run", dir=str(tmp_path)))
        plain(max_steps=20, callbacks=[callback]).fit(model, datamodule=Data())

    run.mkdir()
    (run / "STOP").touch()
    model = touched(run)
    with pytest.raises(SystemExit) as ended:
        start(model)
    assert (ended.value.code, model.seen) == (143, [])
    assert "stopped at step 0" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        start(touched(run, step={5: "STOP"}))
    assert (ended.value.code, latest(run).step) == (143, 6)
    start(touched(run))
    assert latest(run).step == 20


def loop_of_fabric(run_path: Path) -> None:
    """A Fabric's loop, in the same `Run` as any other."""
    fab, until = fabric(TrainerConfig(accelerator="cpu", devices=1)), time.monotonic() + 30
    fab.launch()
    net = torch.nn.Linear(1, 1)
    model, optimizer = fab.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with Run(run_path, model=model, optimizer=optimizer, environ={}) as run:
        run.restore()
        while time.monotonic() < until:
            if run.steps == 3:
                (run_path / "SAVE").touch()
            if events(run_path, "checkpoint"):
                (run_path / "STOP").touch()
            optimizer.zero_grad()
            fab.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            run.step()
            time.sleep(0.02)


def test_a_custom_training_loop_heeds_them(tmp_path: Path) -> None:
    run = tmp_path / "own"
    with pytest.raises(SystemExit) as ended:
        loop_of_fabric(run)
    assert ended.value.code == 143
    assert [event["file"] for event in events(run, "switch")] == ["SAVE", "STOP"]
    assert len(events(run, "checkpoint")) == 2
    (stop,) = events(run, "stop")
    assert stop["reason"] == "cancelled"
    assert latest(run).step == stop["step"]
