"""The page on Hugging Face's Trainer, run as it stands, without Lightning; and a loop of Accelerate."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from fairlead_runs import read_history
from fairlead_runs.commit import list_checkpoints, newest_complete
from fairlead_runs.step_times import read_times

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "hugging-face.md"
LIMIT_S = 300
SLEEP = 0.02  # seconds of each step
PRELUDE = """
import os, pathlib, time
pathlib.Path(f"pid-{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The page's `train.py`, with steps slow enough to be stopped in between."""
    found = re.search(r'```python title="train.py"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    path = tmp_path / "train.py"
    slow = found[1].replace('        return {"loss"', f'        time.sleep({SLEEP})\n        return {{"loss"', 1)
    logger = '{"name": "prometheus", "port": 0, "textfile": "."}'
    path.write_text(PRELUDE + slow.replace('Fairlead("runs/line")', f'Fairlead("runs/line", loggers=[{logger}])'))
    return path


def start(script: Path, cwd: Path, environ: Mapping[str, str] | None = None, ranks: int = 2) -> subprocess.Popen[str]:
    cwd.mkdir(exist_ok=True)
    blocked = cwd / "blocked"
    blocked.mkdir(exist_ok=True)
    for name in ("lightning", "pytorch_lightning", "lightning_fabric"):
        (blocked / f"{name}.py").write_text("raise ImportError('this must work without Lightning')\n")
    by = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    own = {"PYTHONPATH": str(blocked), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, *by, str(script)],
        cwd=cwd,
        env={**os.environ, **own, **(environ or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    return output


def until(process: subprocess.Popen[str], there: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not there():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def weights(cwd: Path) -> bytes:
    return (cwd / "out" / "model" / "model.safetensors").read_bytes()


def events(cwd: Path, name: str) -> list[Mapping[str, object]]:
    return [one for one in read_history(cwd / "runs/line/history.jsonl") if one["event"] == name]


def prom(cwd: Path) -> str:
    """What the node exporter would read."""
    return (cwd / "fairlead-line.prom").read_text()


def rows(cwd: Path) -> list[str]:
    """metrics.csv without what the clock decides."""
    lines = (cwd / "runs/line/metrics.csv").read_text().splitlines()
    names = lines[0].split(",")
    kept = [i for i, name in enumerate(names) if "runtime" not in name and "per_second" not in name]
    # The Trainer's own mean over a training counts from where it was resumed.
    kept = [i for i in kept if names[i] not in ("train_loss", "total_flos")]
    return [",".join(line.split(",")[i] for i in kept) for line in lines]


def test_a_signal_to_one_rank_and_a_kill_of_all_and_nothing_is_lost(script: Path, tmp_path: Path) -> None:
    """Saved at the step of the signal, asked to be started again; killed; the weights of an undisturbed run."""
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    first = start(script, undisturbed)
    output = ended(first)
    assert first.returncode == 0, output
    for one in read_times(undisturbed / "runs/line", 1):
        assert one.steps == 199
        assert set(one.shares) >= {"data", "compute", "optimizer", "logging"}
        assert one.seconds["compute"] >= 199 * SLEEP, "where the model sleeps"
        assert one.facts["comm_bytes"] > 0

    scripts = tmp_path / "scripts"
    second = start(script, stopped, {"NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR": str(scripts), "SLURM_JOB_ID": "17"})
    checkpoints = stopped / "runs/line/checkpoints"
    until(second, lambda: newest_complete(checkpoints).checkpoint is not None)
    os.kill(int((stopped / "pid-1").read_text()), signal.SIGUSR1)
    output = ended(second)
    assert "exitcode  : 75" in output, output
    assert "exec scontrol requeue" in (scripts / "requeue_17.sh").read_text(), output
    newest = newest_complete(checkpoints).checkpoint
    assert newest is not None
    assert 50 < newest.step < 200
    assert newest.step % 50, "saved where it was stopped, not where a save was due"

    third = start(script, stopped)
    until(third, lambda: any(one.step > newest.step for one in list_checkpoints(checkpoints)))
    subprocess.run(["pkill", "-KILL", "-f", str(script)], check=True)
    ended(third)

    fourth = start(script, stopped)
    output = ended(fourth)
    assert fourth.returncode == 0, output
    assert weights(stopped) == weights(undisturbed)
    assert rows(stopped) == rows(undisturbed)
    assert len(events(stopped, "finished")) == 1
    told = dict(re.findall(r"^(fairlead_run_\w+)\{run=\"line\"\} (\S+)$", prom(stopped), re.MULTILINE))
    assert (float(told["fairlead_run_step"]), float(told["fairlead_run_active"])) == (200, 0)
    assert 0 < float(told["fairlead_run_steps_total"]) < 200, "of this start"
    [batch] = {one["samples"] for one in events(stopped, "batch")}
    assert float(told["fairlead_run_samples_total"]) == float(told["fairlead_run_steps_total"]) * int(str(batch))

    fifth = start(script, stopped)
    output = ended(fifth)
    assert fifth.returncode == 0, output
    assert "runs/line is finished: step 200" in output
    assert weights(stopped) == weights(undisturbed)


KEEPS = """
import sys
import torch
from transformers import Trainer, TrainingArguments, set_seed
from fairlead_huggingface import Fairlead

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}

set_seed(1)
data = [{"x": x, "labels": x.sum()[None]} for x in torch.randn(64, 8)]
args = TrainingArguments(
    "out", max_steps=int(sys.argv[1]), per_device_train_batch_size=8, save_steps=5, eval_strategy="steps", eval_steps=5,
    save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="loss", use_cpu=True, report_to="none",
    learning_rate=float(sys.argv[2]),
)
trainer = Trainer(Line(), args, train_dataset=data, eval_dataset=data[:16], callbacks=[Fairlead("runs/line")])
trainer.train()
print("best", trainer.state.best_model_checkpoint)
"""


def test_the_best_is_kept_and_loaded_and_another_learning_rate_is_another_run(tmp_path: Path) -> None:
    script = tmp_path / "keeps.py"
    script.write_text(KEEPS)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(script), *words]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)

    done = run("20", "0.01")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = [one.step for one in list_checkpoints(tmp_path / "runs/line/checkpoints")]
    assert kept == [20]  # the newest is the best here
    best = re.search(r"^best (.*)$", done.stdout, re.MULTILINE)
    assert best is not None
    assert Path(best[1]) == tmp_path / "runs/line/checkpoints/step-00000020/state.ckpt"

    longer = run("30", "0.01")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    assert "resumes from" in longer.stdout
    refused = run("30", "0.02")
    assert refused.returncode != 0
    assert "trainer.learning_rate: 0.01 -> 0.02" in refused.stderr
    assert "Traceback" not in refused.stderr


EPOCHS = """
import os
import signal
import sys
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from fairlead_huggingface import Fairlead

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.passes = 0

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}

class Signals(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == int(os.environ.get("STOP", -1)):
            os.kill(os.getpid(), signal.SIGUSR1)
        if state.global_step == int(os.environ.get("SAVE", -1)):
            control.should_save = True

    def on_log(self, args, state, control, logs=None, **_):
        if "train_loss" in (logs or {}) and os.environ.get("DIE"):
            os._exit(9)

set_seed(1)
data = [{"x": x, "labels": x.sum()[None]} for x in torch.randn(64, 8)]
args = TrainingArguments(
    "out", per_device_train_batch_size=8, eval_strategy="epoch", save_steps=5, metric_for_best_model="loss", seed=1,
    use_cpu=True, report_to="none", lr_scheduler_type="constant", learning_rate=0.01, **eval(sys.argv[1]),
)
stopping = [EarlyStoppingCallback(2, 10.0)] if "early" in sys.argv else []
own = [Signals(), *stopping, Fairlead("runs/line", **eval(os.environ.get("OWN", "{}")))]
trainer = Trainer(Line(), args, train_dataset=data, eval_dataset=data[:16], callbacks=own)
trainer.train()
losses = [round(x["eval_loss"], 6) for x in trainer.state.log_history if "eval_loss" in x]
print("ended", trainer.state.global_step, losses)
print("best", trainer.state.best_global_step, trainer.state.best_model_checkpoint)
print("weights", trainer.model.layer.weight.tolist())
"""


def by_epochs(folder: Path, arguments: str, *words: str, ranks: int = 1, **environ: str) -> tuple[int, str]:
    folder.mkdir(exist_ok=True)
    script = folder / "epochs.py"
    script.write_text(EPOCHS)
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    by = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *by, str(script), arguments, *words]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **own, **environ}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def result(output: str) -> list[str]:
    """The steps, the losses of the evaluations, and the weights."""
    return re.findall(r"^(?:ended|weights) .*", output, re.MULTILINE)


BEST = 'dict(num_train_epochs=3, save_strategy="epoch", load_best_model_at_end=True)'


@pytest.mark.full
def test_the_best_of_evaluations_by_epochs_is_the_last_and_loaded(tmp_path: Path) -> None:
    """Each checkpoint has the evaluation of its epoch, also the last one and one of a stop."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, output = by_epochs(whole, BEST)
    assert code == 0, output
    assert f"best 24 {whole}/runs/line/checkpoints/step-00000024/state.ckpt" in output
    steps = {one.step: one.metadata["metrics"] for one in list_checkpoints(whole / "runs/line/checkpoints")}
    assert list(steps) == [8, 16, 24]
    assert all("eval_loss" in metrics for metrics in steps.values())

    code, resumed = by_epochs(parts, BEST, STOP="16")
    assert code == 143, resumed  # no scheduler restarts it here
    assert "stopped at step 16, on request; everything is saved" in resumed
    newest = newest_complete(parts / "runs/line/checkpoints").checkpoint
    assert newest is not None
    assert "eval_loss" in newest.metadata["metrics"]
    code, resumed = by_epochs(parts, BEST)
    assert result(resumed) == result(output), resumed


def test_early_stopping_by_epochs_ends_the_run(tmp_path: Path) -> None:
    """It is decided in the evaluation behind an epoch, where no save is due: the run is finished all the same."""
    words = ('dict(num_train_epochs=9, save_strategy="no")', "early")
    code, output = by_epochs(tmp_path, *words)
    assert code == 0, output
    assert "ended 24 " in output
    assert "is finished: step 24" in output
    code, output = by_epochs(tmp_path, *words)
    assert (code, "is finished: step 24" in output) == (0, True), output


def test_a_run_that_was_saved_at_its_last_step_takes_no_other(tmp_path: Path) -> None:
    """Killed between its last save and its end, within an epoch."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, output = by_epochs(whole, "dict(max_steps=12)")
    assert code == 0, output
    code, resumed = by_epochs(parts, "dict(max_steps=12)", DIE="1")
    assert code == 9, resumed
    code, resumed = by_epochs(parts, "dict(max_steps=12)")
    assert code == 0, resumed
    assert result(resumed) == result(output), resumed


@pytest.mark.full
def test_another_number_of_ranks_keeps_the_global_batch_or_is_refused(tmp_path: Path) -> None:
    """From two ranks to one, which takes two batches a step then: the same samples, and nearly the same weights."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, output = by_epochs(whole, "dict(max_steps=12)", ranks=2)
    assert code == 0, output
    code, resumed = by_epochs(parts, "dict(max_steps=12)", ranks=2, STOP="5")
    assert "everything is saved" in resumed, resumed
    code, resumed = by_epochs(parts, "dict(max_steps=12)")
    assert code != 0
    assert "the run was trained with 2 ranks and would resume with 1" in resumed
    assert "batch_policy: keep_global" in resumed
    code, resumed = by_epochs(parts, "dict(max_steps=12)", OWN="dict(batch_policy='keep_global')")
    assert code == 0, resumed
    assert "gradient_accumulation_steps is 2 now" in resumed
    [one], [other] = (re.findall(r"^weights \[\[(.*?)\]\]", text, re.MULTILINE)[:1] for text in (output, resumed))
    pairs = zip(one.split(","), other.split(","), strict=True)
    assert all(abs(float(a) - float(b)) < 1e-6 for a, b in pairs)


LATE = """
import torch
from transformers import Trainer, TrainingArguments
from fairlead_huggingface import Fairlead

data = [{"x": x, "labels": x.sum()[None]} for x in torch.randn(8, 8)]
trainer = Trainer(torch.nn.Linear(8, 1), TrainingArguments("out", use_cpu=True, report_to="none"), train_dataset=data)
trainer.add_callback(Fairlead("runs/line"))
trainer.train()
"""


def test_a_callback_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    process = start(script, tmp_path, ranks=1)
    output = ended(process)
    assert process.returncode != 0
    assert "Trainer(..., callbacks=[Fairlead(...)])" in output


REFUSED = """
import torch
from fairlead.errors import CheckpointError, ConfigError
from fairlead_huggingface import Fairlead
from transformers import Trainer, TrainingArguments

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def forward(self, x, labels=None):
        guess = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(guess, labels), "logits": guess}

def trainer(samples, callbacks, **arguments):
    data = [{"x": torch.ones(8) * i, "labels": torch.ones(1)} for i in range(samples)]
    args = TrainingArguments("out", use_cpu=True, report_to=[], disable_tqdm=True, **arguments)
    return Trainer(Line(), args, train_dataset=data, callbacks=callbacks)

def refused(what, error, call):
    try:
        call()
    except error as raised:
        print("REFUSED", what, raised)

refused("model", ConfigError, lambda: trainer(16, [Fairlead("runs/a")], max_steps=2, save_only_model=True).train())
refused("two", ConfigError, lambda: trainer(16, [Fairlead("runs/a"), Fairlead("runs/b")], max_steps=2))
refused("trial", ConfigError, lambda: trainer(16, [Fairlead("runs/a")], max_steps=2).train(trial={"lr": 1}))
trainer(16, [Fairlead("runs/data")], max_steps=2).train()
refused("data", CheckpointError, lambda: trainer(24, [Fairlead("runs/data")], max_steps=4).train())
trainer(16, [Fairlead("runs/data")], max_steps=4).train()
"""


def test_what_would_train_something_else_is_refused(tmp_path: Path) -> None:
    """Checkpoints without the optimizer, other data, trials that would resume each other."""
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    process = start(script, tmp_path, ranks=1)
    output = ended(process)
    assert process.returncode == 0, output
    found = [line.split()[1] for line in output.splitlines() if line.startswith("REFUSED")]
    assert found == ["model", "two", "trial", "data"], output
    assert "REFUSED data train_dataset had 16 samples, now 24" in output
    assert "is finished: step 4" in output


ACCELERATE = """
import os
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from fairlead import Run

accelerator = Accelerator(cpu=True)
torch.manual_seed(1)
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
model, optimizer, scheduler = accelerator.prepare(net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5))
with Run("runs/line", model=model, optimizer=optimizer, scheduler=scheduler, max_epochs=3,
         checkpoint={"every_n_steps": 3}, log_every_n_steps=1) as run:
    run.restore()
    for a, b in run.batches(loader):
        loss = torch.nn.functional.mse_loss(model(a), b)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.step(loss=loss)
        if run.steps == int(os.environ.get("DIE", -1)):
            os._exit(9)
accelerator.wait_for_everyone()
accelerator.end_training()
"""


def test_a_loop_of_accelerate_resumes_with_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(dedent(ACCELERATE))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    output = ended(start(script, whole))
    assert "is finished: step 12" in output, output
    ended(start(script, parts, {"DIE": "7"}))
    output = ended(start(script, parts))
    assert "resumes from" in output, output
    assert rows(parts) == rows(whole)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("", "equal in every bit: 1 rank, killed after step 6, resumed", marks=pytest.mark.full),
        ("self.calls += 1", "not restored: calls of the model Line: 4 became 0"),
    ],
    ids=["as it stands", "a count in the model"],
)
def test_its_resume_is_proven(script: Path, line: str, said: str) -> None:
    """Nothing is left of it, and what the script does after its training is not done."""
    text = script.read_text()
    text = text.replace("        super().__init__()", "        super().__init__()\n        self.calls = 0", 1)
    text = text.replace("        time.sleep(0.02)", f"        {line or 'pass'}", 1)
    script.write_text(text.replace("self.layers(x), labels)", "self.layers(x), labels) * (1 + self.calls)", 1))
    words = [sys.executable, "-m", "fairlead", "launch", "--prove-resume", script.name]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    proof = subprocess.run(
        words, cwd=script.parent, env={**os.environ, **own}, text=True, capture_output=True, timeout=LIMIT_S
    )
    assert said in proof.stdout, proof.stdout + proof.stderr
    assert proof.returncode == (1 if line else 0)
    assert not line or "first: loss" in proof.stdout
    assert not (script.parent / "runs").exists()
    assert not (script.parent / "out" / "model").exists()
