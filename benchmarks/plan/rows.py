"""Published rows: the model, the layout, the machine and the software of each, as a plan takes them."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.plan.published_models import Config, Decoder, config_of, plan_of
from fairlead_planning.devices import Cluster
from fairlead_planning.layouts import Checkpointing, Layout
from fairlead_planning.profile import Kernel, Profile, Unit
from fairlead_planning.trace import Work, trace
from fairlead_planning.variants import checkpointed
from fairlead_strategies.layout import Layout as Mesh

PUBLISHED = Path(__file__).with_name("published.csv")


@dataclass(frozen=True)
class Row:
    """One published run."""

    name: str
    model: str
    source: str
    """Rows of one source were measured by the same people with the same software on the same machines."""
    family: str
    """The device."""
    config: Config
    sequence: int
    layout: Layout
    cluster: Cluster
    stack: str
    products: str | None
    ring: bool
    """Context parallelism by torch's ring attention."""
    tokens_per_second: float | None
    """A device, as published."""
    tflops: float
    """A device, as published; 0: not published."""
    memory_gib: float | None

    @property
    def profile(self) -> Profile:
        """The traced step."""
        one = self.layout
        return traced(self.config, one.micro_batch, self.sequence, one.checkpointing, "bf16-cast")


def source_of(text: str) -> str:
    """A short name of a source; two releases of one software are one source."""
    known = {"llm-foundry": "llm-foundry", "torchtitan": "torchtitan", "Megatron-Bridge": "Megatron-Bridge"}
    short = next((name for key, name in known.items() if key in text), text.split("[")[0].strip()[:40])
    if short == "llm-foundry":
        short += " A100 40GB" if "A100 40GB" in text else " A100 80GB" if "A100 80GB" in text else " H100"
    return short


def stack_of(one: dict[str, str]) -> str:
    """Which kernels a run used, by who published it, and on what; whoever splits layers has Megatron's."""
    source, words, device = one["source"], one["precision"], one["gpu"].lower()
    if "llm-foundry" in source:
        return "triton"
    split = any(float(one[column] or 1) > 1 for column in ("tp", "pp"))
    known = re.search(r"megatron|nemo|neox|deepspeed", source, re.IGNORECASE)
    if known or (split and "torchtitan" not in source and "FSDP" not in words):
        if re.match(r"a100|v100|tesla|nvidia a100", device):
            return "megatron 2023"
        # Megatron-Bridge's recipes capture CUDA graphs on the machines with Grace hosts (scripts/performance).
        return "megatron graphs" if device in ("gb200", "gb300") else "megatron"
    return "compile" if "compile" in words else "eager"


def checkpointing_of(text: str, stack: str) -> Checkpointing:
    """What a row says of activation checkpointing; Megatron's `selective` is what flash attention does anyway."""
    if re.search(r"full|block|true|yes", text, re.IGNORECASE):
        return "full"
    return "selective" if "selective" in text and not stack.startswith("megatron") else "none"


def read(path: Path = PUBLISHED) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: A row does not say what its model is.
    """
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(one) for one in csv.DictReader(file)]


def _row(one: dict[str, str]) -> Row:
    words = one["precision"]

    def size(letters: str) -> int:
        found = re.search(rf"\b{letters}(\d+)", words)
        return int(found[1]) if found else 1

    def number(column: str) -> int:
        return int(float(one[column] or 1))

    stack = stack_of(one)
    sharding = "full"
    if zero := re.search(r"zero[- ]?([123])", words, re.IGNORECASE):
        sharding = {"1": "optimizer", "2": "gradients", "3": "full"}[zero[1]]
    elif "SHARD_GRAD_OP" in words:
        sharding = "gradients"
    elif re.search(r"\bDDP\b", words):
        sharding = "none"
    elif stack.startswith("megatron") and not re.search(r"\bFSDP", words):
        sharding = "optimizer"
    checkpointing = checkpointing_of(one["act_ckpt"], stack)
    tensor, data = number("tp"), number("dp")
    micro = number("mbs")
    layout = Layout(
        strategy="hybrid",
        mesh=Mesh(number("pp"), 1, data, number("cp"), tensor, size("EP")),
        micro_batch=micro,
        accumulation=max(1, round(number("gbs") / (micro * data))),
        checkpointing=checkpointing,
        sharding=sharding,  # type: ignore[arg-type]
        sequence=tensor > 1,
        schedule="interleaved_1f1b" if size("VP") > 1 else "1f1b",
        stages_per_rank=size("VP"),
        cast=True,
    )
    low = words.lower()
    products = "float4" if "fp4" in low else "float8" if "fp8" in low or "float8" in low else None
    cluster = Cluster.of(one["gpu"], "roce 1600" if "1600 Gbps" in one["source"] else None)
    memory = one.get("mem_gib")
    peak = cluster.device.peak_of("bfloat16")
    tflops = float(one["tflops_gpu"] or 0) or float(one["mfu"] or 0) / 100 * peak
    split = "".join(f" {key}{number(key)}" for key in ("tp", "pp", "cp") if number(key) > 1)
    return Row(
        f"{one['model']} {one['gpu']} x {number('gpus')}{split}, {words}, {one['seq']} positions, "
        f"micro-batch {micro}" + (f", checkpointing {one['act_ckpt']}" if one["act_ckpt"] not in ("", "none") else ""),
        one["model"],
        source_of(one["source"]),
        cluster.device.name,
        config_of(one),
        number("seq"),
        layout,
        cluster,
        stack,
        products,
        not stack.startswith("megatron"),
        float(one["tok_s_gpu"]) if one["tok_s_gpu"] else None,
        tflops,
        float(memory) if memory else None,
    )


@cache
def traced(config: Config, rows: int, sequence: int, checkpointing: Checkpointing, precision: str) -> Profile:
    """A step of a decoder, traced with one layer of each kind, and repeated for all of its layers."""
    kinds = config.kinds() + (config.kinds()[-1] if config.predicted else "")
    each = "".join(dict.fromkeys(kinds))
    tokens = torch.zeros(rows, sequence, dtype=torch.long)
    small = trace(
        Work(
            lambda: Decoder(config, each),
            (tokens, tokens),
            lambda model, batch: model(*batch),
            precision=precision,
            plan=plan_of,
        )
    )
    full = checkpointed(small, "none" if checkpointing == "none" else "full")
    if checkpointing == "selective":
        full = every_second_product_kept(full)
    return repeated(full, [each.index(kind) + 1 for kind in kinds], heads=1 + config.predicted)


def every_second_product_kept(full: Profile) -> Profile:
    """torchtitan's selective checkpointing of operators: attention and every second product are not computed again."""
    kernels, products = [], 0
    for one in full.kernels:
        products += one.recomputed and one.kind == "matmul"
        if not (one.recomputed and (one.kind == "attention" or (one.kind == "matmul" and products % 2))):
            kernels.append(one)
    return replace(full, kernels=tuple(kernels), storages=(), checkpointing="selective")


def repeated(profile: Profile, order: list[int], heads: int = 1) -> Profile:
    """The profile of a model whose units are those of `profile` in another order, some of them several times.

    Storages are left out: what is repeated are kernels. `heads` is how often what lies behind the units is passed.
    """
    forward: dict[int, list[Kernel]] = {}
    backward: dict[int, list[Kernel]] = {}
    front: dict[str, list[Kernel]] = {"forward": [], "backward": []}
    back: dict[str, list[Kernel]] = {"forward": [], "backward": []}
    inside = {"forward": False, "backward": False}
    optimizer: list[Kernel] = []
    for kernel in profile.kernels:
        if kernel.phase == "optimizer":
            optimizer.append(kernel)
        elif kernel.unit:
            inside[kernel.phase] = True
            (forward if kernel.phase == "forward" else backward).setdefault(kernel.unit, []).append(kernel)
        else:
            ahead = inside[kernel.phase] == (kernel.phase == "backward")
            (front if ahead else back)[kernel.phase].append(kernel)
    kernels = list(front["forward"])
    for place, unit in enumerate(order, 1):
        kernels += [replace(one, unit=place) for one in forward[unit]]
    kernels += back["forward"] * heads + back["backward"] * heads
    for place, unit in reversed(list(enumerate(order, 1))):
        kernels += [replace(one, unit=place) for one in backward[unit]]
    kernels += front["backward"]
    units = (profile.units[0], *(replace(profile.units[unit], name=f"layers.{at}") for at, unit in enumerate(order)))
    grown = _parameters(units) / max(1, _parameters(profile.units))
    kernels += [replace(one, bytes=one.bytes * grown, flops=one.flops * grown) for one in optimizer]
    return replace(profile, units=units, kernels=tuple(kernels), storages=())


def _parameters(units: Iterable[Unit]) -> int:
    return sum(one.parameters + one.expert_parameters for one in units)
