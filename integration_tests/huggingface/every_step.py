"""A Trainer that is stopped, killed or asked for a checkpoint at every step in turn: `python every_step.py CASE`.

Each training is a forked process, so that its imports cost nothing. Prints what differs from an undisturbed one.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from fairlead.plugins import PluginManager
from fairlead_huggingface import Fairlead

EPOCHS: Final = {"eval_strategy": "epoch", "metric_for_best_model": "loss"}
BEST: Final = {**EPOCHS, "save_strategy": "epoch", "load_best_model_at_end": True}
PLATEAU: Final = {"patience": 0, "threshold": 100.0, "threshold_mode": "abs"}
CASES: Final[dict[str, dict[str, Any]]] = {
    "steps": {"max_steps": 9, "save_steps": 4, "max_grad_norm": 0.1, "warmup_steps": 4, "lr_scheduler_type": "cosine"},
    "best of epochs": {**BEST, "num_train_epochs": 2, "save_total_limit": 1},
    "best alone": {**BEST, "num_train_epochs": 2, "save_strategy": "best"},
    "evaluated by epochs, saved by steps": {**EPOCHS, "num_train_epochs": 2, "save_steps": 7},
    "a rate by evaluations": {
        **EPOCHS,
        "num_train_epochs": 3,
        "save_strategy": "no",
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": PLATEAU,
    },
    "accumulated": {**EPOCHS, "num_train_epochs": 2, "gradient_accumulation_steps": 3, "save_steps": 2},
    "early stopping": {**BEST, "num_train_epochs": 9, "early": 2},
    "workers": {"max_steps": 9, "save_steps": 20, "dataloader_num_workers": 1},
    "stream": {"max_steps": 9, "save_steps": 4, "stream": True},
}


class Line(torch.nn.Module):
    """A small model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, and the outputs."""
        found = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


class Stream(IterableDataset[Any]):
    """The samples, without a length."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Disturbs(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Disturbs the training behind one step."""

    def __init__(self, how: str, step: int) -> None:
        self.how, self.step = how, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A signal to this process, or the file that asks for a checkpoint."""
        if state.global_step == self.step and self.how == "stopped":
            os.kill(os.getpid(), signal.SIGUSR1)
        if state.global_step == self.step and self.how == "saved and killed":
            Path("runs/line/SAVE").touch()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """The process ends when the training is over, and not yet recorded as finished."""
        if self.how == "killed at its end" and "train_loss" in logs:
            os._exit(9)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The process ends at once."""
        if state.global_step == self.step and "killed" in self.how and self.step:
            os._exit(9)


def train(case: str, how: str, step: int) -> dict[str, Any]:
    """Trains, or continues; everything that a resume has to restore."""
    arguments: dict[str, Any] = {"learning_rate": 0.05, "logging_steps": 2, "disable_tqdm": True, **CASES[case]}
    early, stream = arguments.pop("early", None), arguments.pop("stream", False)
    set_seed(1)
    samples = [{"x": x, "labels": x.sum()[None]} for x in torch.randn(20, 8)]
    args = TrainingArguments("out", per_device_train_batch_size=4, use_cpu=True, report_to="none", seed=1, **arguments)
    callbacks = [Disturbs(how, step), *([EarlyStoppingCallback(early, 100.0)] if early else []), Fairlead("runs/line")]
    data: Any = Stream(samples) if stream else samples
    trainer = Trainer(Line(), args, train_dataset=data, eval_dataset=samples[:8], callbacks=callbacks)
    trainer.train()
    state = trainer.state
    logged = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss")
    best = state.best_model_checkpoint
    return {
        "step": state.global_step,
        "best": (state.best_metric, best and best.rpartition("/checkpoints/")[2]),
        "logged": [
            {name: value for name, value in one.items() if name in logged}
            for one in state.log_history
            if "train_runtime" not in one
        ],
        "weights": [one.tolist() for one in trainer.model.parameters()],
    }


def forked(folder: Path, case: str, how: str = "", step: int = 0) -> int:
    """Its exit code; what it trained is in `result.json`, and its output in `log`."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code: Any = 1
    try:
        os.chdir(folder)
        log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        Path("result.json").write_text(json.dumps(train(case, how, step)))
        code = 0
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def result(folder: Path) -> dict[str, Any]:
    """What was trained, with the rows of metrics.csv but for what the clock decides."""
    with (folder / "runs/line/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    clocks = ("runtime", "per_second", "train_loss", "total_flos")
    rows = [{name: value for name, value in row.items() if not any(one in name for one in clocks)} for row in rows]
    return {**json.loads((folder / "result.json").read_text()), "rows": rows}


def main(case: str) -> int:
    """How many of its trainings ended otherwise than the undisturbed one."""
    undisturbed = Path("undisturbed")
    if forked(undisturbed, case) != 0:
        sys.exit((undisturbed / "log").read_text())
    expected, wrong = result(undisturbed), 0
    for how in ("stopped", "killed", "saved and killed", "killed at its end"):
        for step in range(1, expected["step"] + 1) if how != "killed at its end" else [0]:
            folder = Path(f"{how} {step}")
            code, starts = forked(folder, case, how, step), 1
            while code != 0 and starts < 3:
                code, starts = forked(folder, case), starts + 1
            found = result(folder) if code == 0 else {}
            differs = [name for name in expected if found.get(name) != expected[name]]
            if differs:
                wrong += 1
                print(
                    f"{case}, {how} at step {step}: {', '.join(differs)}",
                    (folder / "log").read_text()[-1000:],
                    sep="\n",
                )
            else:
                shutil.rmtree(folder)
    print(f"{case}: {expected['step']} steps, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    PluginManager().records(load=True)  # imported once, before the processes are forked
    sys.exit(min(1, main(sys.argv[1])))
