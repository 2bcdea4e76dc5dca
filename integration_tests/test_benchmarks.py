"""The benchmarks run, and print what `nox -s bench` and the documentation read; no speed is asserted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks._stats import Ratio, paired_ratio, take_turns

ROOT = Path(__file__).parents[1]
RATIOS = {
    "activation_memory": {
        f"{what}_{kind}"
        for what in ("activations", "peak", "seconds")
        for kind in ("half", "all", "all_but_products", "scope")
    },
    "strategies": {f"{name}_vs_raw" for name in ("ddp", "fsdp2", "tensor_parallel", "pipeline_parallel", "hsdp")},
    "startup": {"import_vs_deps", "check_vs_lightning_import", "ranks4_vs_rank1", "run_vs_torch_import"},
    "run": {"run_vs_loop", "run_vs_loop_two_ranks"},
    "step": {"step_times_of_a_step", "trainer_vs_lightning", "trainer_vs_loop"},
    "ddp": {"trainer_vs_loop", "trainer_vs_lightning"},
    "hostlist": {"seconds_100k", "seconds_resolve_16k", "expand_vs_simple"},
    "simulated_ranks": {f"{name}_requests_of_a_rank" for name in ("meet", "save", "stop")},
    "recovery": {"first_restart_share", "seconds_beyond_load", "median_vs_torchrun"},
    "scaling": {"speedup_vs_raw_ddp", "speedup", "communication_share"},
    "predict": {"speed_vs_bare", "bytes_vs_tensors", "memory_growth"},
    "preempt": {"steps_lost", "seconds_vs_step_plus_save", "seconds_vs_lightning"},
    "checkpoint": {
        *("block_vs_memcpy", "durable_vs_raw_write", "save_vs_raw_write", "load_vs_torch_load"),
        *("block_vs_lightning_async", "block_vs_dcp_async", "step_slowdown_while_saving"),
        *("step_slowdown_of_a_process", "step_slowdown_of_lightning", "step_slowdown_of_dcp"),
    },
    "exact_reduction": {
        "exact_vs_ddp_3_ranks",
        "ddp_vs_nothing_sent_3_ranks",
        "exact_vs_ddp_4_ranks",
        "ddp_vs_nothing_sent_4_ranks",
    },
    "plan_errors": {
        *("speed_median", "speed_p90", "speed_median_vs_constant", "best_layout_lost"),
        *("source_left_out_median", "source_left_out_p90"),
    },
    "zero_stages": {"stage_1_vs_ddp", "stage_2_vs_stage_1", "stage_3_vs_stage_2"},
}


BY_NAME = {
    "checkpoint",
    "ddp",
    "exact_reduction",
    "plan_errors",
    "predict",
    "preempt",
    "recovery",
    "run",
    "scaling",
    "simulated_ranks",
    "startup",
    "strategies",
    "zero_stages",
}  # a minute each; `nox -s full`


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.full) if one in BY_NAME else one for one in RATIOS]
)
def test_a_benchmark_prints_its_document(name: str, tmp_path: Path) -> None:
    """From any folder, on standard output, and nothing besides; the table can be made of it."""
    script = ROOT / "benchmarks" / f"{name}.py"
    command = [sys.executable, str(script), "--quick", "--rounds", "1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document.keys() == {"name", "ratios", "raw", "machine"}
    assert document["name"] == name
    assert document["ratios"].keys() == RATIOS[name]
    for ratio in document["ratios"].values():
        assert 0 <= ratio["low"] <= ratio["median"] <= ratio["high"]
    assert list(tmp_path.iterdir()) == [], "a benchmark leaves files where it was started"

    results = tmp_path / "results"
    results.mkdir()
    (results / f"{name}.json").write_text(done.stdout, encoding="utf-8")
    page = tmp_path / "measured.md"
    table = [sys.executable, str(ROOT / "benchmarks" / "_table.py"), str(results), str(page)]
    subprocess.run(table, check=True, stdout=subprocess.DEVNULL)
    rows = [
        line.split(" | ") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}")
    ]
    assert {row[1] for row in rows} == RATIOS[name]


def test_the_benchmarks_that_the_pages_name_exist() -> None:
    """By their files, as rows of the table, and as `fairlead bench WHAT`."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    rows = (ROOT / "docs" / "reference" / "measured.md").read_text(encoding="utf-8")
    named = {*re.findall(r"benchmarks/(\w+)\.py", text), *re.findall(r"^\| `(\w+)[ `]", rows, re.MULTILINE)}
    assert len(named) > 10
    assert named - {"NAME"} - set(RATIOS) == set()
    assert set(re.findall(r"fairlead bench (\w+)", text)) == {"comm", "gemm", "scaling", "threads"}


def test_the_figures_of_the_readme_are_the_measured_ones() -> None:
    measured = (ROOT / "docs" / "reference" / "measured.md").read_text(encoding="utf-8")
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Measured\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .* \| (\S+) \| .* \| `([^`]+)` (\w+) \|$", text, re.MULTILINE)
    assert len(rows) > 5
    assert [row for row in rows if f"| `{row[1]}` | {row[2]} | {row[0]} |" not in measured] == []


def written(folder: Path, name: str, commit: str, **ratios: dict[str, float]) -> str:
    """What `_table.py` prints when it adds such a result to the page in the folder."""
    results = folder / "results"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    document = {"name": name, "ratios": ratios, "raw": {}, "machine": {"cpu": "C", "commit": commit}}
    (results / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    table = [sys.executable, str(ROOT / "benchmarks" / "_table.py"), str(results), str(folder / "measured.md")]
    return subprocess.run(table, check=True, capture_output=True, text=True).stdout


def test_the_page_keeps_what_was_not_run_and_says_what_became_slower(tmp_path: Path) -> None:
    written(tmp_path, "step", "abc", trainer={"median": 1.0, "low": 0.98, "high": 1.02, "bound": 1.1})
    written(tmp_path, "predict", "abc", speed_vs_bare={"median": 0.9, "low": 0.8, "high": 0.95})
    slower = written(tmp_path, "step", "def", trainer={"median": 1.1, "low": 1.03, "high": 1.2, "bound": 1.1})
    assert "SLOWER     step trainer: 1.1 [1.03, 1.2], was 1 [0.98, 1.02]" in slower
    assert "predict" not in slower
    assert "as before" in written(
        tmp_path, "step", "def", trainer={"median": 1.1, "low": 1.1, "high": 1.2, "bound": 1.1}
    )
    assert "faster" in written(tmp_path, "step", "ghi", trainer={"median": 0.9, "low": 0.8, "high": 0.95, "bound": 1.1})
    assert "SLOWER" in written(tmp_path, "predict", "ghi", speed_vs_bare={"median": 0.6, "low": 0.5, "high": 0.7})
    page = (tmp_path / "measured.md").read_text(encoding="utf-8")
    assert "| `predict` | speed_vs_bare | 0.6 | 0.5 to 0.7 |  | ghi |" in page
    assert "| `step` | trainer | 0.9 | 0.8 to 0.95 | 1.1 | ghi |" in page
    assert "\n- `ghi`: cpu C\n" in page
    assert "`def`" not in page, "no line is left of it"


def test_a_ratio_is_formed_turn_by_turn() -> None:
    """A machine that gets ten times slower half-way changes both sides, and not their ratio; bounds are strict."""
    found = paired_ratio([2.0, 2.2, 20.0, 22.0], [1.0, 1.1, 10.0, 11.0], bound=2.5)
    assert (found.low, found.median, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert found.holds is True
    assert paired_ratio([1.0, 1.0, 4.0], [1.0, 1.0, 1.0], bound=2.0).holds is False, "the interval reaches above"
    assert Ratio(1.005, 0.99, 1.02, 1.0).holds is True
    assert Ratio(1.015, 1.01, 1.02, 1.0).holds is False, "slower for sure"
    assert Ratio(1.0, 0.9, 1.1, 1.0).holds is False, "too uncertain to say"
    assert Ratio(3.0, 2.0, 4.0).holds is None
    assert Ratio(0.97, 0.96, 0.99, 0.95, at_least=True).holds is True, "a speed"
    assert Ratio(0.97, 0.94, 0.99, 0.95, at_least=True).holds is False, "the interval reaches below"
    assert Ratio(1.01, 0.98, 1.02, 1.0, at_least=True).holds is True
    assert Ratio(1.01, 0.9, 1.02, 1.0, at_least=True).holds is False, "too uncertain to say"


def test_sides_take_turns_in_changing_order() -> None:
    """A B B A A B, the first of them discarded."""
    order: list[str] = []

    def turn(side: str) -> float:
        order.append(side)
        return float(len(order))

    taken = take_turns({"A": partial(turn, "A"), "B": partial(turn, "B")}, 2, warm_up=1)
    assert order == ["A", "B", "B", "A", "A", "B"]
    assert taken == {"A": [4.0, 5.0], "B": [3.0, 6.0]}
