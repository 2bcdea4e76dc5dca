"""The goodput that is predicted of what one run has cost, against what another one measures, which dies often."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead_planning.goodput import goodput_forecast
from fairlead_runs.checkpoint_interval import measured
from fairlead_runs.goodput import GOOD, LOST, goodput
from integration_tests.made_run import make_run

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "goodput.md"

LOOP = """
import os
import math
import signal
import sys
import threading
import time

import torch

from fairlead import Run
from fairlead_runs.step_times import StepTimes

StepTimes.__init__.__kwdefaults__["interval_s"] = 0.1  # of ten seconds a start as short as these would record nothing
name, every, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
MEAN_S = 5.0
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with Run(f"runs/{name}", model=model, optimizer=optimizer, max_steps=1000) as run:
    run.restore()
    starts = len(os.listdir(f"runs/{name}/starts"))
    share = ((5 * (starts + seed)) % 8 + 0.5) / 8  # eight failures, as those of a constant rate are spread
    dies = -MEAN_S * math.log(1 - share)
    threading.Timer(dies, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while run.steps < 1000:
        time.sleep(0.02)
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        run.step()
        if run.steps % every == 0:
            run.save()
os._exit(0)  # the timer
"""


def trained(folder: Path, name: str, every: int, seed: int) -> Path:
    """A run that is killed some seconds after each start, and started again until it is finished."""
    (folder / "loop.py").write_text(LOOP)
    for _ in range(40):
        words = [sys.executable, "loop.py", name, str(every), str(seed)]
        done = subprocess.run(words, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=60, check=False)
        if done.returncode == 0:
            return folder / "runs" / name
        assert done.returncode == -9
    raise AssertionError("it does not end")


def test_the_page_says_what_its_code_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(first, "first", "exec"), {})
    assert capsys.readouterr().out == printed
    make_run(tmp_path / "runs" / "lm", steps=60_000, ranks=8, starts=6)
    done = subprocess.run([sys.executable, "-c", second], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.search(r"^2 failures; \d+\.\d% of the time will count\nbetween .*; save every \d+ min$", done.stdout)


@pytest.mark.full
def test_the_goodput_of_a_run_is_predicted_from_what_another_one_has_cost(tmp_path: Path) -> None:
    """With three times the interval: lost work is what has to be foretold, within 40 %, and goodput within 0.12.

    How often it is killed is the test's own choice, and how long Python takes to start is that of who else uses the
    machine: both are given.
    """
    before = measured([trained(tmp_path, "before", 25, 0)])
    assert before.failures >= 2
    run = trained(tmp_path, "after", 75, 4)
    went, after = goodput(run), measured([run])
    step_s = sum(went.seconds.get(part, 0.0) for part in GOOD) / 1000
    told = goodput_forecast(
        1,
        1000 * step_s / 86_400,
        measured=before,
        failures=86_400 / 5.0 * 1000,
        queue_s=after.wait_s,
        interval_s=75 * step_s,
    )
    assert went.share is not None
    lost_s, told_s = went.seconds[LOST] / after.failures, told.lost_h * 3600 / told.interruptions[0]
    print(f"goodput {went.share:.3f}, told {told.effective:.3f}; lost at a failure {lost_s:.2f} s, told {told_s:.2f} s")
    assert told.lowest < went.share < told.highest
    assert went.share == pytest.approx(told.effective, abs=0.12)
    assert lost_s == pytest.approx(told_s, rel=0.4)
