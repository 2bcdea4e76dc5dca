"""A job of two ranks trains, saves, and resumes to the same bits: the least that a version of torch has to do.

`python -m integration_tests.isolated.smoke`, with the `fairlead` of the Python that runs it; `nox -s smoke_oldest`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from integration_tests.isolated.tutorial import write_tutorial

STRATEGIES = ("ddp", "fsdp2")


def fairlead(*words: str, cwd: Path) -> str:
    """What a command prints; an exit with its output where it fails."""
    done = subprocess.run([sys.executable, "-m", "fairlead", *words], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"fairlead {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def train(work: Path, name: str, strategy: str, steps: int) -> Path:
    """Trains from where the run stands up to this step; the checkpoint of the end."""
    settings = [f"run.name={name}", f"trainer.strategy={strategy}", f"trainer.max_steps={steps}"]
    said = fairlead("fit", "job.yaml", *(part for one in settings for part in ("--set", one)), cwd=work)
    checkpoints = work / "runs" / name / "checkpoints"
    newest = checkpoints / (checkpoints / "latest").read_text(encoding="utf-8").strip()
    if not newest.name.startswith(f"step-{steps:08d}"):
        raise SystemExit(f"{name}: the newest checkpoint is {newest.name}, not of step {steps}\n{said}")
    return newest


def main() -> int:
    """0, or an exit with what went wrong."""
    with tempfile.TemporaryDirectory(prefix="fairlead-smoke-") as folder:
        work = Path(folder)
        write_tutorial(work)
        for strategy in STRATEGIES:
            whole = train(work, f"{strategy}-whole", strategy, 40)
            train(work, f"{strategy}-resumed", strategy, 25)
            resumed = train(work, f"{strategy}-resumed", strategy, 40)
            fairlead("checkpoint", "verify", str(resumed), cwd=work)
            fairlead("checkpoint", "diff", "--weights", str(whole), str(resumed), cwd=work)
            print(f"{strategy}: two ranks trained 40 steps; resumed at step 25, they end with the same bits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
