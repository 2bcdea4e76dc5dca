"""A job under DeepSpeed by `fairlead fit`: what its ranks write is committed, and a killed run goes on from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_tests.jobs import JOB, changed, events, fairlead, repository

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.full]

STRATEGY = {"name": "deepspeed_stage_3", "stage3_param_persistence_threshold": 0}
"""Else every rank keeps weights as few as these whole."""
TRUST = (
    *("--trust", "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    *("--trust", "deepspeed.runtime.zero.config.ZeroStageEnum"),
    *("--trust", "deepspeed.utils.tensor_fragment.fragment_address"),
)
"""What DeepSpeed puts into its files beside tensors and plain data."""


def fit(folder: Path, *words: str, **environ: str) -> Path:
    """Runs the job, with Adam and learning rates for a global batch of 4 instead of 8; its run directory."""
    trainer = {"strategy": STRATEGY, "base_batch_size": 4, "gradient_clip_val": 0.5}
    data = {"args": {"workers": 0}}
    job = repository(folder / "repo", job=changed(JOB, trainer=trainer, data=data))
    model = folder / "repo" / "mine" / "model.py"
    model.write_text(
        model.read_text()
        .replace("torch.optim.SGD", "torch.optim.Adam")
        .replace("def __init__(self, workers=0)", "def __init__(self, workers=0, batch_size=4)")
    )
    return start(folder, job, *words, **environ)


def start(folder: Path, job: Path, *words: str, **environ: str) -> Path:
    ended = fairlead("fit", str(job), "--set", "data.args.batch_size=4", *words, cwd=folder, environ=environ)
    assert ended.code == 0, ended.text
    assert "not known" not in ended.text
    return folder / "runs" / "small"


def parts(run: Path, step: int) -> dict[str, dict[str, Any]]:
    """What each rank wrote: its part of the weights in float32, and of the moments."""
    (folder,) = run.glob(f"checkpoints/step-{step:08d}/**/checkpoint")
    files = sorted(folder.glob("*_optim_states.pt"))
    return {file.name: torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files}


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [found for one in inside for found in tensors(one)]


def vectors(part: dict[str, Any]) -> list[torch.Tensor]:
    """A rank's weights in float32, and its part of both moments."""
    return [tensor for tensor in tensors(part) if tensor.numel() > 1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("undisturbed"))


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, undisturbed: Path) -> None:
    """A rank is killed after step 5, and the job begins again at 4; every rank's part is the same in the end.

    The learning rate has followed the global batch once, not again in the resumed start.
    """
    run = fit(tmp_path, "--max-restarts", "1", FAIL="once:1:5")
    assert [event["step"] for event in events(run) if event["event"] == "training"] == [0, 4]
    straight, resumed = parts(undisturbed, 8), parts(run, 8)
    assert len(straight) == 2
    assert straight.keys() == resumed.keys()
    for name in straight:
        a, b = tensors(straight[name]), tensors(resumed[name])
        assert len(a) == len(b) >= 3  # weights and both moments
        assert all(map(torch.equal, a, b))
        rates = [group["lr"] for group in resumed[name]["optimizer_state_dict"]["param_groups"]]
        assert rates == [0.2]
        assert all(tensor.abs().sum() > 0 for tensor in a)  # it has trained


def test_a_killed_run_goes_on_on_another_number_of_ranks(tmp_path: Path, undisturbed: Path) -> None:
    """What two ranks had saved at step 6 is gone on with by one, which steps with as many samples."""
    folder = tmp_path / "killed"
    shutil.copytree(undisturbed.parent.parent, folder)
    run = folder / "runs" / "small"
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    kept = [event for event in events(run) if event.get("step", 0) <= 6]
    (run / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))
    words = ("--set", "trainer.devices=1", "--set", "trainer.batch_policy=keep_global")
    start(folder, folder / "repo" / "jobs" / "job.yaml", *words)
    assert [event["step"] for event in events(run) if event["event"] == "training"] == [0, 6]
    (alone,) = parts(run, 8).values()
    halves = [vectors(part) for part in parts(undisturbed, 8).values()]
    assert len(vectors(alone)) == 3
    for whole, first, second in zip(vectors(alone), *halves, strict=True):
        expected = torch.cat([first[:8], second[:8], first[8:], second[8:]])  # of the weight, then of the bias
        assert whole.abs().sum() > 0
        assert torch.allclose(whole, expected, rtol=0, atol=1e-6)


@pytest.mark.full
def test_what_deepspeed_wrote_becomes_one_file(tmp_path: Path, undisturbed: Path) -> None:
    """The weights of both ranks together, of each of which a rank has half."""
    (folder,) = undisturbed.glob("checkpoints/step-00000008")
    words = ("checkpoint", "consolidate", str(folder), "-o", str(tmp_path / "whole.ckpt"), *TRUST)
    done = fairlead(*words, cwd=tmp_path)
    assert done.code == 0, done.text
    weights = torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]
    first, second = (torch.cat(part["fp32_flat_groups"]) for part in parts(undisturbed, 8).values())
    assert weights.keys() == {"layer.weight", "layer.bias"}
    assert torch.equal(weights["layer.weight"].flatten(), torch.cat([first[:8], second[:8]]))
    assert torch.equal(weights["layer.bias"], torch.cat([first[8:10], second[8:10]]))
