"""From one process to two: the example GPT, one thread each, over gloo, with the same batch for each process.

The speed-up of Fairlead's Trainer is compared with that of a loop by hand around torch's DistributedDataParallel. In
each round the two take turns alone, and then in two processes; the ratio is formed within the round. What a step by
hand takes less when nothing is sent is the share of communication.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import Options, options, paired_ratio, report
from benchmarks._training import Workload
from examples.gpt.data import Windows
from examples.gpt.model import GPT
from fairlead import yaml
from fairlead_distributed.testing import run_ranks

ROOT = Path(__file__).resolve().parents[1]
# Both trainers recognise ranks that an elastic agent has started.
LAUNCHER = {"TORCHELASTIC_RUN_ID": "benchmark", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


def job() -> Mapping[str, Any]:
    """The example's job file."""
    return cast("Mapping[str, Any]", yaml.load_file(ROOT / "examples/gpt/job.yaml").data)


class Plain(GPT):
    """The example's model without its schedule, which a loop by hand would have to be told of."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as in the example."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.99), fused=True)


class GPTWorkload(Workload):
    """The GPT of the example's job file, on windows of random bytes."""

    def _net(self) -> Plain:
        torch.manual_seed(0)
        return Plain(**job()["model"]["args"])

    def _loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def _loader(self) -> DataLoader[Any]:
        context = int(job()["data"]["args"]["context"])
        count = self._total * self.batch_size * dist.get_world_size()
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(256, (count * context + 1,), dtype=torch.uint8, generator=generator)
        return DataLoader(Windows(text, context), batch_size=self.batch_size)


def rank_main(rank: int, folder: str, given: Options, turn: int) -> dict[str, float]:
    """What one rank measures in one round: seconds of a step, by side."""
    ranks = dist.get_world_size()
    work = GPTWorkload(
        Path(folder, f"{turn}-{ranks}"),
        widths=(),  # the model is the example's
        batch_size=int(job()["data"]["args"]["batch_size"]),
        warm_up=2 if given.quick else 5,
        steps=3 if given.quick else 40,
        expected_s=0.04,
        settings={"devices": ranks, **({"strategy": "ddp"} if ranks > 1 else {})},
    )
    several = ranks > 1
    sides = {"by hand": lambda: work.by_hand(distributed=several), "Fairlead": work.fairlead}
    if several:
        sides["by hand, nothing sent"] = lambda: work.by_hand(distributed=True, communicates=False)
    seconds = {}
    for name in sides if turn % 2 == 0 else reversed(list(sides)):
        seconds[name] = sides[name]()
        dist.barrier()
    return {f"{name}, {ranks}": value for name, value in seconds.items()}


def main() -> None:
    given = options(__doc__, rounds=15)
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="fairlead-scaling-") as folder:
        for turn in range(1 + given.rounds):
            for ranks in (1, 2) if turn % 2 == 0 else (2, 1):
                # All ranks wait for each other in every step, so one of them tells the time of all.
                found = run_ranks(rank_main, ranks, folder, given, turn, timeout=3600, env=LAUNCHER)[0]
                for name, seconds in found.items() if turn else ():  # the first round is the warm-up
                    taken.setdefault(name, []).append(seconds)
    hand, ours = ([taken[f"{side}, {ranks}"] for ranks in (1, 2)] for side in ("by hand", "Fairlead"))
    # (ours alone / ours in two) / (by hand alone / by hand in two)
    above, below = ([a * b for a, b in zip(*pair, strict=True)] for pair in ((ours[0], hand[1]), (ours[1], hand[0])))
    sent = [max(0.0, a - b) for a, b in zip(hand[1], taken["by hand, nothing sent, 2"], strict=True)]
    ratios = {
        "speedup_vs_raw_ddp": paired_ratio(above, below, bound=1.0, at_least=True),
        "speedup": paired_ratio([2 * one for one in ours[0]], ours[1]),
        "communication_share": paired_ratio(sent, hand[1]),
    }
    parameters = sum(parameter.numel() for parameter in Plain(**job()["model"]["args"]).parameters())
    report("scaling", ratios, taken, given, parameters=parameters)


if __name__ == "__main__":
    main()
