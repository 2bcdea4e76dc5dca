"""Each way to split a model, as its example's reader would try it: trained, or refused with the reason."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fairlead.install import install_line
from fairlead.plugins import PluginManager
from integration_tests.jobs import LIMIT_S, fairlead, start

pytestmark = [pytest.mark.slow, pytest.mark.full]  # some 40 trainings; `test_compatibility.py` has their settings in CI

ROOT = Path(__file__).parents[1]
LITERALS = sorted(PluginManager().names("strategy"))


@pytest.mark.parametrize("strategy", LITERALS)
def test_each_literal_trains_the_gpt_or_is_refused(strategy: str, tmp_path: Path) -> None:
    settings = [f"trainer.strategy.name={strategy}"]
    settings += ["trainer.devices=1"] if strategy.startswith("single") else []
    settings += [f"trainer.strategy.nvme_path={tmp_path}"] if "nvme" in strategy else []
    job = str(ROOT / "examples" / "gpt" / "tiny.yaml")
    running = start("fit", job, *(word for one in settings for word in ("--set", one)), cwd=tmp_path)
    call = running.end(3 * LIMIT_S)  # DeepSpeed compiles, and a build that is ended leaves a lock for the next
    if "xla" in strategy or "tpu" in strategy:
        assert call.code == 2, call.text
        assert "needs torch-xla" in call.err
        assert install_line("xla") in call.err
        return
    assert call.code == 0, call.text
    losses = validation(tmp_path / "runs" / "gpt-tiny")
    assert len(losses) == 2
    assert losses[1] < losses[0] < 6


def validation(run: Path) -> list[float]:
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]]


ALIKE = {1: ("tensor", "context", "pipeline"), 2: ("ddp", "fsdp", "hybrid", "deepspeed"), 4: ("fsdp2", "hsdp")}
"""The examples that train on the batches of so many processes; that with experts, of another model, of two."""


def test_the_examples_that_see_the_same_batches_end_with_the_same_loss(tmp_path: Path) -> None:
    jobs = {job.stem: job for job in ROOT.glob("examples/split/*.yaml")}
    assert sorted(jobs) == sorted(["experts", *(name for names in ALIKE.values() for name in names)])
    two = ("--set", "trainer.strategy=ddp", "--set", "trainer.devices=2")
    whole = ended(jobs["experts"], tmp_path / "copies", *two)
    assert ended(jobs["experts"], tmp_path / "experts") == pytest.approx(whole, rel=1e-4)
    for copies, names in ALIKE.items():
        strategy = "ddp" if copies > 1 else "auto"
        plain = [
            "--set",
            f"trainer.strategy={strategy}",
            "--set",
            f"trainer.devices={copies}",
            "--set",
            "run.name=plain",
        ]
        wanted = ended(jobs["ddp"], tmp_path / str(copies), *plain)
        for name in names:
            assert ended(jobs[name], tmp_path / name) == pytest.approx(wanted, rel=1e-4), name


def ended(job: Path, cwd: Path, *words: str) -> float:
    """Trains it; the validation loss after its last step."""
    cwd.mkdir()
    call = fairlead("fit", str(job), *words, cwd=cwd)
    assert call.code == 0, call.text
    (run,) = (cwd / "runs").iterdir()
    return validation(run)[-1]
