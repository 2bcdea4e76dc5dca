"""Training on XLA devices of PJRT on the CPU: one, and four in one process; nothing of torch_xla is a stand-in."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integration_tests.jobs import fairlead, names
from integration_tests.xla.small import LAYOUTS, newest, repository, run, same, state, tensors

# On XLA torch_xla's running variance of batch norm is the biased one, of n instead of n - 1 samples.
ALIKE = ("model.args.dropout=0.0", "model.args.norm=LayerNorm")


def losses(path: Path, column: str = "train/loss") -> list[float]:
    with (path / "metrics.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one plain process on the CPU, without torch_xla having a part in it."""
    cwd = tmp_path_factory.mktemp("plain")
    repository(cwd)
    words = ["trainer.strategy=single_device", "trainer.accelerator=cpu", *ALIKE]
    call = fairlead(
        "fit", "job.yaml", *(word for one in words for word in ("--set", one)), cwd=cwd, environ={}, fresh=True
    )
    assert call.code == 0, call.text
    return cwd / "runs" / "small"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_are_those_of_one_plain_process(layout: str, plain: Path, tmp_path: Path) -> None:
    """Losses, weights and moments of the optimizer."""
    devices, settings = LAYOUTS[layout]
    repository(tmp_path)
    call = run(tmp_path, *settings, *ALIKE, devices=devices)
    assert call.code == 0, call.text
    path = tmp_path / "runs" / "small"
    for column in ("train/loss", "val/loss"):
        assert losses(path, column) == pytest.approx(losses(plain, column), rel=2e-4), call.text
    ours, theirs = (tensors(state(newest(one))) for one in (path, plain))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.device.type == "cpu"
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-5, msg=name)
    split = "6 12" if layout == "fully sharded" else "0 0"
    assert f"SPLIT {split} of 6 12" in call.out
    if devices > 1:
        assert "1 rank with 4 devices on 1 node, xla on xla" in call.text
        assert "batch 8 per process of 4 devices" in call.text


BF16 = "trainer.precision=bf16-true"
TWICE = "trainer.accumulate_grad_batches=2"
MANUAL = "model.class=mine.model:Manual"
CASES = [
    *((name, ()) for name in LAYOUTS),
    ("one device", (TWICE,)),
    ("data parallel", (MANUAL, "trainer.gradient_clip_val=null")),
    ("fully sharded", (BF16,)),
]


@pytest.mark.parametrize(("layout", "more"), CASES)
def test_stopped_and_killed_it_ends_with_the_bits_of_an_undisturbed_run(
    layout: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    """A SIGTERM, which saves, then a SIGKILL, after which what was not saved is trained again; with dropout."""
    devices, settings = LAYOUTS[layout]
    settings = (*settings, *more)
    for name in ("undisturbed", "disturbed"):
        repository(tmp_path / name)
    whole, cut = (tmp_path / name / "runs" / "small" for name in ("undisturbed", "disturbed"))
    call = run(tmp_path / "undisturbed", *settings, devices=devices)
    assert call.code == 0, call.text

    call = run(tmp_path / "disturbed", *settings, devices=devices, STOP="SIGTERM:4")
    assert call.code == 75, call.text
    saved = sorted(path.name for path in cut.glob("checkpoints/step-*"))
    # A loop by hand is saved behind any batch: here one that ends without a step, at a step that was saved before.
    assert saved[-1] == ("step-00000004.2" if MANUAL in more else "step-00000005"), call.text
    call = run(tmp_path / "disturbed", *settings, devices=devices, STOP="SIGKILL:10")
    assert call.code == -9, call.text
    call = run(tmp_path / "disturbed", *settings, devices=devices)
    assert call.code == 0, call.text
    assert "resume is not" not in call.text  # `exact` needs no word
    assert names(cut).count("start") == 3

    assert same(newest(whole), newest(cut)) == []
    assert (whole / "metrics.csv").read_text() == (cut / "metrics.csv").read_text()
    # Where torch_xla is not imported, as on a laptop, all of it can be read.
    plain = "import sys, torch; [torch.load(name, weights_only=True) for name in sys.argv[1:]]"
    files = [str(newest(cut) / name) for name in ("state.ckpt", "rank-00000.pt")]
    subprocess.run(
        [sys.executable, "-c", plain, *files], check=True, env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    )
    if BF16 in more:
        weights = state(newest(cut))["state_dict"]
        assert {one.dtype for name, one in weights.items() if name.endswith("weight")} == {torch.bfloat16}
        assert losses(whole)[-1] < losses(whole)[0]
