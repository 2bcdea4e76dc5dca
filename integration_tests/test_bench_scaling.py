"""`validate_scaling()` and `fairlead bench scaling` on a real job, with real ranks. No speed is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fairlead.errors import RunFailedError
from fairlead_diagnostics.bench.scaling import validate_scaling
from integration_tests.jobs import JOB, changed, fairlead, repository, tree

pytestmark = pytest.mark.slow

SMALL = changed(
    JOB,
    data={"class": "mine.model:Data", "args": {"batch_size": 8}},
    trainer={"devices": "auto", "strategy": "auto", "limit_val_batches": 0},
)
"""Its losses follow from the seed: two workers with half of the batch each compute those of one."""


def sized(folder: Path) -> Path:
    """The job, whose loader takes the batch size that it is given."""
    file = repository(folder, job=SMALL)
    model = folder / "mine" / "model.py"
    text = (
        model.read_text()
        .replace("workers=0):", "workers=0, batch_size=4):")
        .replace("self.workers = workers\n", "self.workers, self.batch_size = workers, batch_size\n")
    )
    model.write_text(
        text.replace("DataLoader(Samples(), batch_size=4", "DataLoader(Samples(), batch_size=self.batch_size")
    )
    return file


def test_a_record_of_two_workers_and_an_efficiency_that_is_required(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sized(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(RunFailedError) as raised:
        validate_scaling(file, workers=(1, 2), at_least=9.0, rounds=1, steps=4, cwd=tmp_path)
    assert "2 workers reach" in raised.value.what
    assert "efficiency, and 900% is required" in raised.value.what
    shown = capsys.readouterr().out
    for words in ("Model: Model (20 parameters)", "Batch Size: 8 (total across all workers)", "s/epoch", "efficiency"):
        assert words in shown, shown
    assert tree(tmp_path) == before, "something of the trials is left"


@pytest.mark.full
def test_the_command_writes_the_record(tmp_path: Path) -> None:
    """Strong and weak, the loss curve beside one process, the recovery after a kill, a plot, and the exit code."""
    file = sized(tmp_path)
    words = ("bench", "scaling", str(file), "--workers", "1,2", "--rounds", "2", "--steps", "8")
    done = fairlead(*words, "--json", "--recovery", "--plot", "scaling.png", "--at-least", "0", cwd=tmp_path)
    assert done.code == 0, done.text
    record = json.loads(done.out)
    one, two = record["workers"]
    assert (one["workers"], one["batch_size"], two["workers"], two["batch_size"]) == (1, 8, 2, 4)
    assert one["efficiency"] == 1
    assert two["efficiency"] == two["speedup"]["median"] / 2
    assert two["speedup"]["low"] <= two["speedup"]["median"] <= two["speedup"]["high"]
    assert len(two["samples_per_s"]["rounds"]) == 2
    assert 0 <= two["communication"] < 1
    assert min(one["epoch_s"], two["epoch_s"], one["memory_bytes"], two["memory_bytes"]) > 0
    assert record["model"] == {"class": "Model", "parameters": 20}
    assert record["batch"] == {"constant": "global", "samples": 8}
    curves = record["loss"]["curves"]
    assert min(len(curves["1"]), len(curves["2"])) > 4
    assert curves["1"][0] > 2 * curves["1"][-1], "it learns"
    assert record["loss"]["largest_difference"] < 1e-6
    assert 0 < record["recovery_s"] < 120
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")

    weak = ("--workers", "1,2,4,8", "--rounds", "1", "--steps", "4", "--batch", "per_device", "--at-least", "9")
    done = fairlead("bench", "scaling", str(file), *weak, "--set", "data.args.batch_size=2", cwd=tmp_path)
    assert done.code == 1, done.text
    assert "Scaling of" in done.out
    assert "weak" in done.out
    assert [line.split()[0] for line in done.out.splitlines() if " GiB" in line] == ["1", "2", "4", "8"]
    assert "Batch Size: 2 (of each worker)" in done.out
    assert "Efficiency of at least 900%: NOT reached" in done.out


def test_a_launcher_has_to_be_told_how_many(tmp_path: Path) -> None:
    done = fairlead("bench", "scaling", str(sized(tmp_path)), "--launcher", "srun", cwd=tmp_path)
    assert done.code == 2, done.text
    assert "srun -n {workers}" in done.err
