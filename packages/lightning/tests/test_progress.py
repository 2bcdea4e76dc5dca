"""Progress: plain lines without a terminal, bars on one, and a summary."""

from __future__ import annotations

import io
import os
import pickle
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

from fairlead_distributed.batch_sizes import batch_size
from fairlead_lightning.display.progress import Progress
from fairlead_lightning.display.summary import Throughput
from fairlead_runs.commit import checkpoint_name, publish, stage, write_file

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")


class Model(L.LightningModule):
    log_loss = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean() * 0 + 2.5 + 0 * self.layer.weight.sum()
        if self.log_loss:
            self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", 1.25, batch_size=2)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.print(f"testing {batch_idx}")

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return batch[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)


def trainer(directory: Path, progress: Progress, **arguments: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        default_root_dir=directory,
        callbacks=[progress],
        **{"max_epochs": 2, **arguments},
    )


def lines(interval: float) -> tuple[Progress, io.StringIO]:
    text = io.StringIO()
    return Progress(interval, Console(file=text)), text


def test_without_a_terminal_there_are_lines(tmp_path: Path) -> None:
    progress, text = lines(0.0)
    model = trainer(tmp_path, progress)
    model.fit(Model(), loader(), loader())
    found = text.getvalue().splitlines()
    steps = [line for line in found if line.startswith("step") and "epoch" in line]
    assert [line.split()[1] for line in steps] == [f"{n}/8" for n in range(1, 9)]
    assert all("loss 2.5" in line for line in steps)
    assert re.search(r"samples/s \d\S*  left \d\S*s", steps[2])
    assert [line for line in found if "val/loss" in line] == ["step 4  val/loss 1.25", "step 8  val/loss 1.25"]
    assert "\x1b" not in text.getvalue()


def test_a_long_interval_shows_the_first_step_and_the_last(tmp_path: Path) -> None:
    progress, text = lines(3600.0)
    trainer(tmp_path, progress).fit(Model(), loader(), loader())
    assert [line.split()[1] for line in text.getvalue().splitlines() if "epoch" in line] == ["1/8", "8/8"]


def test_accumulated_steps_are_counted_as_optimizer_steps_and_the_loss_is_not_divided(tmp_path: Path) -> None:
    progress, text = lines(0.0)
    model = Model()
    model.log_loss = False
    trainer(tmp_path, progress, accumulate_grad_batches=2).fit(model, loader(), loader())
    assert "step 4/4  epoch 1  loss 2.5  samples/s" in text.getvalue()


def test_validate_test_and_predict_show_their_batches(tmp_path: Path) -> None:
    progress, text = lines(0.0)
    runner = trainer(tmp_path, progress)
    runner.validate(Model(), loader(), verbose=False)
    runner.test(Model(), loader(), verbose=False)
    runner.predict(Model(), loader())
    assert re.findall(r"^(\w+) 4/4$", text.getvalue(), re.MULTILINE) == ["validation", "test", "prediction"]
    assert "testing 3\n" in text.getvalue(), "LightningModule.print goes through the display"


def test_values_are_read_only_when_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read waits for the device; at every step that would serialise it with the host."""
    progress, _ = lines(3600.0)
    reads: list[int] = []

    def read(self: Progress, trainer: L.Trainer, outputs: object) -> list[str]:
        reads.append(trainer.global_step)
        return []

    monkeypatch.setattr(Progress, "_metrics", read)
    trainer(tmp_path, progress, max_epochs=5).fit(Model(), loader(), loader())
    assert reads == [1, 20]


def test_other_ranks_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    progress, text = lines(1.0)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    progress.say("hello")
    assert text.getvalue() == ""
    assert not progress.is_enabled
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    progress.say("hello [not markup]")
    assert text.getvalue() == "hello [not markup]\n"


def test_it_can_be_sent_to_spawned_ranks() -> None:
    progress = pickle.loads(pickle.dumps(Progress(1.0)))
    assert progress.display.interval == 1.0


@pytest.mark.parametrize("ci", ["", "true"])
def test_on_a_terminal_there_are_bars_and_other_output_stays_whole(tmp_path: Path, ci: str) -> None:
    """The display is closed before a callback prints at the end; under CI a terminal gets lines."""
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, time, warnings
        warnings.simplefilter("ignore")
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import lightning.pytorch as L
        import test_progress as t
        from fairlead_lightning.display import displays
        displays.REFRESH_S = 0.0

        class Loud(L.Callback):
            def on_train_batch_end(self, trainer, *rest):
                if trainer.global_step == 3:
                    print("a user's line")
            def on_fit_end(self, trainer, module):
                print("the end")

        progress = t.Progress(0.0)
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
                            max_epochs=2, callbacks=[Loud(), progress], default_root_dir={str(tmp_path)!r})
        trainer.fit(t.Model(), t.loader(), t.loader())
        progress.summary(trainer)
        """)
    )
    main, other = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "CI": ci, "PYTHONPATH": ""}
    with subprocess.Popen([sys.executable, script], stdout=other, stderr=subprocess.STDOUT, env=environ) as process:
        os.close(other)
        output = b""
        while True:
            try:
                chunk = os.read(main, 65536)
            except OSError:  # the terminal is closed
                break
            if not chunk:
                break
            output += chunk
    os.close(main)
    text = output.decode()
    assert process.returncode == 0, text
    assert ("\x1b[" in text and "━" in text) is not bool(ci), text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    whole = [line.rstrip() for line in plain.splitlines()]
    for expected in ("a user's line", "step 4  val/loss 1.25", "step 8  val/loss 1.25", "the end"):
        assert expected in whole, plain
    assert "8/8  epoch 1  loss 2.5" in plain
    end = plain.index("the end")
    assert "/8  epoch" not in plain[end:], "the bars were closed before"
    assert "done        8 steps, 2 epochs" in plain[end:]


def test_the_summary_names_steps_speed_best_and_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/first"
    for step, loss in ((4, 0.5), (8, 0.75)):
        staged = stage(run / "checkpoints", checkpoint_name(step), token="t")
        write_file(staged / "state.ckpt", b"x")
        metadata = {"step": step, "start": 1, "monitor": "val/loss", "mode": "min", "metrics": {"val/loss": loss}}
        publish(staged, metadata)
    progress, text = lines(3600.0)
    runner = trainer(tmp_path, progress)
    runner.fit(Model(), loader(), loader())
    text.truncate(0)
    progress.summary(runner, run)
    found = dict(re.findall(r"^\x00*(\w+) {2,}(.*)$", text.getvalue(), re.MULTILINE))
    assert found["done"].startswith("8 steps, 2 epochs in ")
    assert re.fullmatch(r"\S+ samples/s, \S+ steps/s while training", found["speed"])
    assert found["best"] == "val/loss 0.5 at step 4: runs/first/checkpoints/step-00000004"
    assert found["checkpoint"] == "runs/first/checkpoints/step-00000008"
    assert found["run"] == "runs/first"


def test_validation_does_not_count_as_training_time() -> None:
    speed = Throughput(100, 0.0)
    for _ in range(10):
        speed.add(32)
    assert speed.mark(110, 10.0) is None
    speed.pause(10.0)
    speed.resume(40.0)
    speed.add(32)
    assert speed.mark(111, 42.0) == (16.0, 0.5)
    assert speed.trained_s(42.0) == 12.0
    assert speed.left_s(111, 211, 0.5, 42.0) == 200 * 42 / 12, "validation takes its share of what is left"


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(4, 2), 4),
        ([torch.zeros(3), torch.zeros(3)], 3),
        ({"ids": torch.zeros(5, 7)}, 5),
        (({"x": torch.zeros(6)}, ["a"]), 6),
        (["a", "b"], 2),
        (torch.tensor(1.0), 1),
        (None, 1),
        ([], 1),
    ],
)
def test_the_size_of_a_batch_is_inferred(batch: Any, size: int) -> None:
    assert batch_size(batch) == size
