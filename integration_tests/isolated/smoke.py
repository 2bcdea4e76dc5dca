"""Jobs of two ranks train, save, and resume to the same bits: the least that a version of torch has to do.

`python integration_tests/isolated/smoke.py`, with the `fairlead` of the Python that runs it; `nox -s smoke_oldest`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
STRATEGIES = ("ddp", "fsdp2")


def fairlead(*words: str, cwd: Path) -> str:
    """What a command prints; an error with its output where it fails."""
    done = subprocess.run([sys.executable, "-m", "fairlead", *words], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"fairlead {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def train(work: Path, runs: str, strategy: str) -> Path:
    """Trains from where the run stands to its end; the checkpoint of the end."""
    settings = [f"run.dir={runs}", f"trainer.strategy={strategy}", "trainer.callbacks=[]"]
    settings += ["trainer.checkpoint.every_n_steps=3", "trainer.checkpoint.keep_last=9"]
    said = fairlead("fit", "examples/gpt/tiny.yaml", *(part for one in settings for part in ("--set", one)), cwd=work)
    checkpoints = work / runs / "gpt-tiny" / "checkpoints"
    newest = checkpoints / (checkpoints / "latest").read_text(encoding="utf-8").strip()
    if not newest.name.startswith("step-00000006") or not list(checkpoints.glob("step-00000003*")):
        raise SystemExit(f"{strategy}: no checkpoints of the steps 3 and 6\n{said}")
    return newest


def main() -> int:
    """0, or an exit with what went wrong."""
    with tempfile.TemporaryDirectory(prefix="fairlead-smoke-") as folder:
        work = Path(folder)
        shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
        (work / "pyproject.toml").touch()
        for strategy in STRATEGIES:
            whole = train(work, f"{strategy}-whole", strategy)
            shutil.copytree(work / f"{strategy}-whole", work / f"{strategy}-resumed")
            for end in (work / f"{strategy}-resumed" / "gpt-tiny" / "checkpoints").glob("step-00000006*"):
                shutil.rmtree(end)
            resumed = train(work, f"{strategy}-resumed", strategy)
            fairlead("checkpoint", "verify", str(resumed), cwd=work)
            fairlead("checkpoint", "diff", "--weights", str(whole), str(resumed), cwd=work)
            print(f"{strategy}: two ranks trained 6 steps, and resumed from step 3 with the same bits at the end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
