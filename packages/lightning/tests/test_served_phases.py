"""Signals outside the step loop: a phase that takes too long is ended in time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_job import events

pytestmark = pytest.mark.full

# One process imports everything once and forks a start for each phase. A `grace_s` of 4 leaves 2.7 s for it.
JOB = """
import os, signal, sys, threading, time, warnings
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from tiny_job import Data, Line, make_trainer

root = Path(sys.argv[1])


class Slow(Line):
    resume_attributes = ()
    place, at = "", 0

    def here(self, place):
        if self.place == place and self.trainer.global_step == self.at:
            self.place = ""
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            until = time.monotonic() + 60  # a signal ends a sleep
            while time.monotonic() < until:
                time.sleep(until - time.monotonic())

    def prepare_data(self):
        self.here("data")

    def on_load_checkpoint(self, checkpoint):
        self.here("load")

    def training_step(self, batch, batch_idx):
        self.here("step")
        return super().training_step(batch, batch_idx)

    def on_validation_start(self):
        self.here("validation")


class SlowData(Data):
    model = None

    def train_dataloader(self):
        loader = super().train_dataloader()
        fetch = loader.collate_fn
        loader.collate_fn = lambda rows: (self.model.here("first batch"), fetch(rows))[1]
        return loader


def start(name, place, at=0, **settings):
    child = os.fork()
    if not child:
        os.chdir(root)
        try:
            model, data = Slow(), SlowData()
            data.model, model.place, model.at = model, place, at
            requeue = {"name": "command", "argv": ["sh", "-c", f"echo {name} >> asked"], "grace_s": 4}
            trainer = make_trainer(root, {"name": name}, requeue=requeue, max_epochs=2, **settings)
            trainer.fit(model, datamodule=data)
        except SystemExit as ended:
            os._exit(ended.code)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


first = start("load", "step", at=5, checkpoint={"every_n_steps": 4})
slow = [start(place.replace(" ", "-"), place) for place in ("data", "step", "first batch")]
slow.append(start("validation", "validation", at=8))
codes = [code(child) for child in [first, *slow]]
codes.append(code(start("load", "load", at=0, checkpoint={"every_n_steps": 4})))
print(codes)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """All starts, at once: they sleep."""
    root = tmp_path_factory.mktemp("phases")
    command = [sys.executable, "-W", "ignore", "-c", JOB, str(root), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return root, done


def test_a_phase_that_takes_too_long_is_ended_in_time_and_the_job_started_again(ended: tuple[Path, Any]) -> None:
    """Also before there is anything to save; what was saved before counts."""
    root, done = ended
    assert done.stdout.splitlines()[-1] == f"{[75] * 6}", done.stdout + done.stderr[-3000:]
    names = {
        "data": "preparing its data",
        "step": "in its first batch and step",
        "first-batch": "in its first batch and step",
        "validation": "in its validation",
    }
    for name, at in names.items():
        (stop,) = events(root / name, "stop")
        assert stop["unsaved"] == f"no time is left, and this rank is still {at}"
        assert [event["by"] for event in events(root / name, "requeue")] == ["command"]
        assert not events(root / name, "failed")
    *_, stop = events(root / "load", "stop")
    assert stop["unsaved"] == "no time is left, and this rank is still setting up and loading its checkpoint"
    assert sorted((root / "asked").read_text().split()) == sorted([*names, "load", "load"])
