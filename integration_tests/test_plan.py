"""`fairlead plan` as a user meets it: the page's commands, the file that it writes, errors, and measured memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.plan.predict_memory import LAYOUTS, predict
from integration_tests.jobs import fairlead

ROOT = Path(__file__).parent.parent
EXAMPLE = str(ROOT / "examples" / "gpt" / "job.yaml")
PAGE = ROOT / "docs" / "how-to" / "plan.md"


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    """But for figures, which a new calibration moves."""
    done = fairlead("plan", str(ROOT / "examples/gpt/7b.yaml"), "--top", "2", cwd=tmp_path)
    assert done.code == 0, done.err
    shown = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]

    def shape(text: str) -> set[str]:
        return {" ".join(re.findall(r"[a-z]{4,}", line)) for line in text.splitlines() if not line.startswith("not:")}

    first, again = shape(shown), shape(done.out)
    assert len(first & again) >= 0.7 * len(first), again - first


def test_a_written_job_is_checked_and_remembers_what_was_predicted(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    data = yaml.safe_load(Path(EXAMPLE).read_text(encoding="utf-8"))
    data["run"] |= {"dir": str(tmp_path / "runs"), "code": str(ROOT)}
    job.write_text(yaml.safe_dump(data), encoding="utf-8")
    target = tmp_path / "planned.yaml"
    words = ["--batch", "64", "--json", "--write", str(target)]
    done = fairlead("plan", str(job), "--gpus", "16xh100", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    best = json.loads(done.out)["layouts"][0]
    written = yaml.safe_load(target.read_text(encoding="utf-8"))
    assert written["trainer"]["num_nodes"] * written["trainer"]["devices"] == 16
    assert written["data"]["args"]["batch_size"] == best["settings"]["data.args.batch_size"]
    assert written["model"]["args"]["layers"] == data["model"]["args"]["layers"]
    predicted = json.loads((tmp_path / "runs" / "gpt" / "plan.json").read_text(encoding="utf-8"))
    assert predicted["predicted"]["step_s"] == best["time"]["seconds"]
    checked = fairlead("check", str(target), cwd=tmp_path)
    assert checked.code == 0, checked.text
    again = fairlead("plan", str(job), "--gpus", "16xh100", "--write", str(target), cwd=tmp_path)
    assert again.code == 2
    assert "is there already" in again.err


def test_a_batch_of_the_whole_step_is_taken_as_it_is(tmp_path: Path) -> None:
    words = ["--gpus", "8xh100", "--json", "--set", "trainer.batch_size=global", "--set", "data.args.batch_size=64"]
    done = fairlead("plan", EXAMPLE, *words, "--set", "trainer.accumulate_grad_batches=2", cwd=tmp_path)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["global_batch"] == 64
    assert found["layouts"][0]["settings"]["data.args.batch_size"] == 64


BROKEN: dict[str, tuple[list[str], list[str]]] = {
    "no devices": ([EXAMPLE], ["the devices are not given", "--gpus 64xh100"]),
    "no number": ([EXAMPLE, "--gpus", "h100"], ["says no number of devices", "64xh100"]),
    "unknown device": ([EXAMPLE, "--gpus", "8xh900"], ["unknown device 'h900'", "known are", "a100"]),
    "unknown network": (
        [EXAMPLE, "--gpus", "16xh100", "--network", "pigeons"],
        ["unknown network 'pigeons'", "infiniband ndr"],
    ),
    "unknown strategy": (
        [EXAMPLE, "--gpus", "8xh100", "--strategy", "zero"],
        ["'zero' is no strategy that can be planned", "fsdp2"],
    ),
    "too large": (
        [str(ROOT / "examples/gpt/70b.yaml"), "--gpus", "1xl4"],
        ["no layout of gpt-70b fits", "lacks", "GiB"],
    ),
    "no memory": ([EXAMPLE, "--gpus", "8xh100", "--memory", "0"], ["'0' is no number above 0"]),
    "fewer than no failures": (
        [EXAMPLE, "--gpus", "8xh100", "--failures=-1"],
        ["'-1' is no number from 0 on"],
    ),
    "no folder": (
        [EXAMPLE, "--gpus", "8xh100", "--write", "missing/planned.yaml"],
        ["the folder of missing/planned.yaml does not exist", "mkdir -p"],
    ),
    "half a node": (
        [EXAMPLE, "--gpus", "12xh100"],
        ["do not fill nodes of 8", "--nodes 2 --gpus 6xh100"],
    ),
    "no calibration": (
        [EXAMPLE, "--gpus", "8xh100", "--calibration", "nothing.json"],
        ["nothing.json is no calibration", "fairlead bench gemm"],
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_planned_is_said(what: str, tmp_path: Path) -> None:
    words, expected = BROKEN[what]
    done = fairlead("plan", *words, cwd=tmp_path)
    assert done.code == 2, done.out
    for text in expected:
        assert text in done.err
    assert "Traceback" not in done.err


MODEL = """
import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)
        {build}

    def training_step(self, batch, _):
        out = self.net(batch)
        {step}
        self.log("loss", out.sum())
        return out.sum()

    def train_dataloader(self):
        return DataLoader(torch.zeros(8, 8), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
CODE = {
    "in a step": ("pass", "rows = out[out.sum(-1) > 0].tolist()", "net.py:"),
    "when it is built": ("self.first = self.net.weight.detach().numpy()", "pass", 'net.py"'),
    "without a loss": ("pass", "return {'nothing': out}", "training_step gave NoneType, no loss"),
    "by hand": ("self.automatic_optimization = False", "pass", "optimizes by hand"),
}


@pytest.mark.parametrize("where", CODE)
def test_code_that_asks_for_numbers_is_named_by_its_line(where: str, tmp_path: Path) -> None:
    build, step, expected = CODE[where]
    (tmp_path / "net.py").write_text(MODEL.replace("{build}", build).replace("{step}", step), encoding="utf-8")
    (tmp_path / "job.yaml").write_text("model: {class: 'net:Net'}\n", encoding="utf-8")
    done = fairlead("plan", "job.yaml", "--gpus", "8xh100", cwd=tmp_path)
    assert done.code != 0
    assert expected in done.err
    assert "do:" in done.err
    assert "defect in Fairlead" not in done.err


def measured(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The peaks of real steps of four processes, counted by a dispatch mode."""
    script = str(ROOT / "benchmarks" / "plan" / "measure_memory.py")
    done = fairlead("launch", "--nproc", "4", script, "--json", str(folder / "peaks.json"), *words, cwd=folder)
    assert done.code == 0, done.out[-3000:] + done.err[-3000:]
    found: list[dict[str, Any]] = json.loads((folder / "peaks.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.full
def test_predicted_memory_is_what_real_ranks_take(tmp_path: Path) -> None:
    strategies = ["fsdp2 checkpointed", "sequence", "pipeline"]
    found = measured(tmp_path, "--model", "example", "--strategy", *strategies)
    assert [one["strategy"] for one in found] == strategies
    for one in found:
        uses = predict("example", one["strategy"], one["rows"], "32-true")
        for use, peak in zip(uses, [one["ranks"][0], one["ranks"][-1]], strict=False):
            assert use.total == pytest.approx(peak, rel=0.03), one["strategy"]


@pytest.mark.full
def test_the_committed_peaks_are_those_of_this_machine(tmp_path: Path) -> None:
    kept = json.loads((ROOT / "benchmarks/plan/measured_memory.json").read_text(encoding="utf-8"))
    there = {(one["model"], one["strategy"]): one["ranks"] for one in kept if one["precision"] == "32-true"}
    for one in measured(tmp_path, "--model", "gpt", "--strategy", *list(LAYOUTS)[:6]):
        assert one["ranks"] == pytest.approx(there[one["model"], one["strategy"]], rel=0.002)
