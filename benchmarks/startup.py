"""How long a start takes: `import fairlead`, and a whole `fairlead check` with all plugins installed.

Each measurement is a fresh process.  Two clocks are read:

- An import is timed inside its process.  The interpreter's own start, the same on both sides, would pull the ratio
  towards 1.
- A check is timed from outside, start of the interpreter to exit, on both sides: it is what a person waits for.

Two more are whole fits, from the start of the process to the first step: of four ranks, forked from one process
that has imported once, and of one rank.

`import fairlead` imports little, since each name comes when it is first used; so that this hides nothing, the raw
figures also tell what `from fairlead import JobConfig` takes, which needs all of the core's models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import options, paired_ratio, report, take_turns

ROOT = Path(__file__).resolve().parents[1]
JOB = "examples/gpt/job.yaml"
FAIRLEAD = str(Path(sysconfig.get_path("scripts"), "fairlead"))
TIMED = "import time; began = time.perf_counter(); {code}; print(time.perf_counter() - began)"
CHECK_IN_PROCESS = f"from fairlead.cli import main; code = main(['check', {JOB!r}]); assert code == 0, code"
HEAVY = ("torch", "lightning", "numpy")


NET = """
import time
from pathlib import Path

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, *_):
        if self.global_rank == 0 and self.trainer.global_step == 1:
            Path("first").write_text(str(time.time()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(64, 8)), batch_size=2)
"""


def first_step(ranks: int) -> float:
    """Seconds from the start of `fairlead fit` to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        trainer = {"accelerator": "cpu", "devices": ranks, "max_steps": 1, "enable_progress_bar": False}
        job = {"model": {"class": "net:Net"}, "data": {"class": "net:Data"}, "trainer": trainer}
        (cwd / "job.yaml").write_text(json.dumps(job))
        (cwd / "net.py").write_text(NET)
        (cwd / "pyproject.toml").touch()
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        began = time.time()
        subprocess.run([FAIRLEAD, "fit", "job.yaml"], cwd=cwd, env=environ, capture_output=True, check=True)
        return float((cwd / "first").read_text()) - began


def run(*command: str) -> str:
    """What a command printed; an error when it failed."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def inside(code: str) -> float:
    """Seconds that code takes in a fresh interpreter, told by itself."""
    return float(run(sys.executable, "-c", TIMED.format(code=code)))


def whole(*command: str) -> float:
    """Seconds from the start of a process to its end."""
    began = time.perf_counter()
    run(*command)
    return time.perf_counter() - began


def imported(code: str) -> list[str]:
    """Which of the heavy packages code brings into a fresh interpreter."""
    found = run(sys.executable, "-c", f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))")
    modules = set(json.loads(found.splitlines()[-1]))
    return [name for name in HEAVY if name in modules]


def main() -> None:
    given = options(__doc__, rounds=15)
    for code in ("import fairlead", CHECK_IN_PROCESS):
        heavy = imported(code)
        if heavy:
            raise SystemExit(f"imports {', '.join(heavy)}: {code}")
    sides: dict[str, Callable[[], float]] = {
        "import fairlead": partial(inside, "import fairlead"),
        "import pydantic, pluggy, yaml": partial(inside, "import pydantic, pluggy, yaml"),
        "from fairlead import JobConfig": partial(inside, "from fairlead import JobConfig"),
        "fairlead check": partial(whole, FAIRLEAD, "check", JOB),
        "python -c 'import lightning.pytorch'": partial(whole, sys.executable, "-c", "import lightning.pytorch"),
        "fairlead --help": partial(whole, FAIRLEAD, "--help"),
        "python -c ''": partial(whole, sys.executable, "-c", ""),
        "from fairlead import Run": partial(inside, "from fairlead import Run"),
        "import torch": partial(inside, "import torch"),
        "fit with 4 ranks, to the first step": partial(first_step, 4),
        "fit with 1 rank, to the first step": partial(first_step, 1),
    }
    seconds = take_turns(sides, given.rounds)
    deps = seconds["import pydantic, pluggy, yaml"]
    lightning = seconds["python -c 'import lightning.pytorch'"]
    ratios = {
        "import_vs_deps": paired_ratio(seconds["import fairlead"], deps, bound=1.5),
        "check_vs_lightning_import": paired_ratio(seconds["fairlead check"], lightning, bound=0.25),
        "run_vs_torch_import": paired_ratio(seconds["from fairlead import Run"], seconds["import torch"]),
        "ranks4_vs_rank1": paired_ratio(
            seconds["fit with 4 ranks, to the first step"], seconds["fit with 1 rank, to the first step"], bound=1.3
        ),
    }
    report(
        "startup",
        ratios,
        seconds,
        given,
        plugins=len(entry_points(group="fairlead")),
        job_config_vs_deps=round(paired_ratio(seconds["from fairlead import JobConfig"], deps).median, 3),
        help_vs_bare_python=round(paired_ratio(seconds["fairlead --help"], seconds["python -c ''"]).median, 3),
        imported_by_check="none of " + ", ".join(HEAVY),
    )


if __name__ == "__main__":
    main()
