"""The page of a plan's errors is what its command makes, and what it stands on is as it says."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.plan.fit import PRIORS, SHIPPED
from benchmarks.plan.published_models import Config, Decoder, Experts, plan_of
from benchmarks.plan.rows import PUBLISHED, read, traced
from benchmarks.plan.table import PAGE, main, page
from fairlead_planning.calibration import shipped
from fairlead_planning.devices import Cluster
from fairlead_planning.layouts import Layout
from fairlead_planning.step_time import StepTimer
from fairlead_planning.trace import Work, trace
from fairlead_strategies.layout import Layout as Mesh

SMALL = Config(6, 256, 4, 2, 1024, 4096)


@pytest.mark.full
def test_the_page_is_what_the_command_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `nox -s plan-table`"


def test_the_shipped_numbers_are_those_that_the_fit_knows_with_their_meaning() -> None:
    assert shipped().numbers.keys() == PRIORS.keys()
    assert all(value >= 0 for value in shipped().numbers.values())
    assert f'"written_by": "python {Path("benchmarks/plan/fit.py")}"' in SHIPPED.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "config",
    [SMALL, replace(SMALL, style="gpt", kv_heads=4), replace(SMALL, dense=2, experts=Experts(128, 8, 2))],
    ids=["llama", "gpt", "experts"],
)
@pytest.mark.parametrize(
    "layout",
    [
        Layout("hybrid", Mesh(shard=4), micro_batch=2, sharding="full", cast=True),
        Layout("hybrid", Mesh(pipeline=2, tensor=2), micro_batch=2, accumulation=4, sequence=True),
    ],
    ids=["sharded", "split"],
)
def test_one_layer_of_each_kind_repeated_is_as_fast_as_the_model_traced_as_a_whole(
    config: Config, layout: Layout
) -> None:
    tokens = torch.zeros(2, 128, dtype=torch.long)
    work = Work(
        lambda: Decoder(config),
        (tokens, tokens),
        lambda model, batch: model(*batch),
        precision="bf16-cast",
        plan=plan_of,
    )
    whole, parts = trace(work), traced(config, 2, 128, "none", "bf16-cast")
    assert parts.parameters == whole.parameters
    cluster = Cluster.of("a100")
    seconds = [StepTimer(one, cluster).time(layout).seconds for one in (whole, parts)]
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-3)


@pytest.mark.full
def test_another_file_of_the_same_columns_has_the_same_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    chosen = [row for row in rows if row["model"] == "mpt-125m" and row["gpu"] == "a100_80gb"]
    chosen[0]["tok_s_gpu"] = ""  # its TFLOP/s are enough
    other = tmp_path / "other.csv"
    with other.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(chosen)
    monkeypatch.setattr("sys.argv", ["table.py", str(other)])
    assert main() == 0
    said = capsys.readouterr().out
    assert f"| all | {len(chosen)} |" in said
    other.write_text("model,gpu\n", encoding="utf-8")
    assert main() == 2
    assert "has no column" in capsys.readouterr().err


def test_each_row_has_its_layout_and_its_software() -> None:
    rows = read()
    assert len(rows) == 256
    one = next(row for row in rows if "qwen3-235b" in row.name and "tp2" in row.name)
    assert (one.layout.mesh.pipeline, one.layout.mesh.tensor, one.layout.mesh.expert) == (8, 2, 32)
    assert (one.layout.stages_per_rank, one.layout.sharding, one.stack, one.products) == (
        *(4, "optimizer", "megatron", "float8"),
    )
    assert one.layout.global_batch == 8192
