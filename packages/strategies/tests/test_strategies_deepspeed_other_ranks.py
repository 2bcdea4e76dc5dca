"""What DeepSpeed saved on two ranks goes on on one and on four, with the moments of its optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairlead_distributed.testing import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.full]

CLOSE = 1e-6
"""Largest difference of a weight, moment or loss: the order of float32 additions differs."""
CASES = ("1", "2", "2_offload", "3", "3_offload")
SIXTEEN_BITS = ("1_bf16", "2_bf16")
SAMPLES = torch.randn(40, 6, generator=torch.Generator().manual_seed(7))
"""Those of `deepspeed_runs.DATA`."""
LAUNCHER = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
"""What torchrun sets besides."""
Did = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks save."""
    return tmp_path_factory.mktemp("other_ranks")


@pytest.fixture(scope="module")
def did(folder: Path) -> Iterator[Did]:
    """What came out, by the number of ranks; those of two save, and what they saved stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import deepspeed_other_ranks  # type: ignore[import-not-found, unused-ignore]

        def on(ranks: int, *names: str) -> list[dict[str, Any]]:
            found: Any = run_ranks(deepspeed_other_ranks.doing, ranks, str(folder), names, timeout=240, env=LAUNCHER)
            return found  # type: ignore[no-any-return]

        two = on(2, "save", "evaluate", "refused stage as many")
        before = digests(folder)
        yield {2: two, 1: on(1, "alone", "go on", "evaluate", "forget", "refused"), 4: on(4, "go on", "evaluate")}
        assert {path: now for path, now in digests(folder).items() if "refused" not in path} == before


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def of(did: Did, ranks: int, name: str) -> dict[str, Any]:
    for found in did[ranks]:
        assert "failed" not in found[name], found[name]["failed"]
    first: dict[str, Any] = did[ranks][0][name]
    return first


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("case", [*CASES, *SIXTEEN_BITS])
def test_another_number_of_ranks_begins_with_the_same_bits(did: Did, case: str, ranks: int) -> None:
    """The float32 weights, both moments, the steps and the rates; and what is frozen."""
    saved, found = of(did, 2, f"save {case}"), of(did, ranks, f"go on {case}")
    for what in ("steps", "rates"):
        assert found["begin"][what] == saved["saved"][what]
    assert found["begin"]["steps"] == {5.0}
    assert apart(found["begin"]["tensors"], saved["saved"]["tensors"]) == 0
    assert len(found["begin"]["tensors"]) == 3 * 4
    if "3" not in case:  # which has let its part go
        assert torch.equal(found["frozen"], saved["frozen"].float())
    assert torch.equal(found["frozen"], of(did, 2, "save 2")["frozen"].to(saved["frozen"].dtype).float())


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_another_number_of_ranks_ends_as_one_process(did: Did, case: str, ranks: int) -> None:
    whole, found = of(did, 1, "alone"), of(did, ranks, f"go on {case}")
    assert apart(found["end"]["tensors"], whole["end"]["tensors"]) < CLOSE
    assert apart(found["begin"]["tensors"], whole["end"]["tensors"]) > 0.01
    assert found["end"]["steps"] == whole["end"]["steps"] == {10.0}
    assert found["end"]["rates"] == whole["end"]["rates"]
    losses = [one[f"go on {case}"]["losses"] for one in did[ranks]]
    assert [sum(parts) / ranks for parts in zip(*losses, strict=True)] == pytest.approx(whole["losses"][5:], abs=CLOSE)


def test_without_the_moments_it_would_end_elsewhere(did: Did) -> None:
    """The same start, whose moments and steps are set to zero before its first step: 0.038 away."""
    whole, found = of(did, 1, "alone")["end"]["tensors"], of(did, 1, "forget")["end"]["tensors"]
    weights = [name for name in whole if name.endswith(" 0")]
    assert apart({n: whole[n] for n in weights}, {n: found[n] for n in weights}) > 0.01


def test_a_loop_of_ones_own_goes_on_too(did: Did) -> None:
    """Under Fabric: one rank and four end alike, and not where two had stopped."""
    one, four = (of(did, ranks, "go on fabric")["weights"] for ranks in (1, 4))
    assert apart(one, four) < CLOSE
    assert apart(one, of(did, 2, "save fabric")["weights"]) > 0.01


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", ["2", "3", "3_offload"])
def test_saved_weights_are_evaluated_without_a_fit(did: Did, case: str, ranks: int) -> None:
    """On any number of ranks, in stage 3 too, where DeepSpeed's engine then has no optimizer."""
    saved = {name.removesuffix(" 0"): one for name, one in of(did, 2, f"save {case}")["saved"]["tensors"].items()}
    frozen = of(did, 2, "save 2")["frozen"]
    bias = of(did, 2, "save 2")["frozen_bias"]
    linear = torch.nn.functional.linear
    hidden = linear(linear(SAMPLES, saved["inlet.weight"], saved["inlet.bias"]), frozen, bias).tanh()
    expected = linear(hidden, saved["head.weight"], saved["head.bias"])
    assert apart({"": of(did, ranks, f"evaluate {case}")["outputs"]}, {"": expected}) < CLOSE


@pytest.mark.parametrize(("ranks", "what"), [(1, "stage"), (2, "stage as many")])
def test_another_stage_is_refused(did: Did, ranks: int, what: str) -> None:
    said = of(did, ranks, f"refused {what}")["error"]
    assert "stage 1 or 2 of ZeRO wrote DeepSpeed's checkpoint, which this run's cannot read" in said
    assert "take the stage that wrote it" in said


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("optimizer", "the optimizer's `absmax` is neither a number for each element nor one for all ranks"),
        ("elastic", "it was written with `elastic_checkpoint`"),
        ("experts", "not all ranks share all parameters: experts, or MiCS"),
        ("model parallel", "its files are not one for each rank of ZeRO"),
        ("nvme", "what is offloaded to NVMe is saved as files of that disk"),
        ("parameters", "frozen.bias is not trained in it, and [12] in group 0 in this run"),
    ],
)
def test_what_cannot_be_shared_anew_is_refused_with_what_works(did: Did, what: str, why: str) -> None:
    said = of(did, 1, f"refused {what}")["error"]
    assert "DeepSpeed's checkpoint is of 2 ranks, and this run has 1" in said
    assert why in said
    assert "resume on 2 ranks, or begin with its weights" in said
