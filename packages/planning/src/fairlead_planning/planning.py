"""`plan(job, cluster)`: the layouts of a job that fit, ranked by the time of a step, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from fairlead.errors import ConfigError
from fairlead_planning.calibration import Calibration
from fairlead_planning.devices import Machines
from fairlead_planning.goodput import GoodputForecast, goodput_forecast
from fairlead_planning.job import Planned, planned_work
from fairlead_planning.layouts import STRATEGIES, Layout
from fairlead_planning.memory import MemoryUse, as_dict
from fairlead_planning.search import GIB, Candidate, Search, kind, search
from fairlead_planning.step_time import StepTime
from fairlead_planning.trace import Work
from fairlead_runs.checkpoint_interval import Measured

_DAY: Final = 86_400.0
_SHOWN: Final = 5
_TIGHT: Final = 0.95
"""Of a device's memory: what needs more of it may fail by the error of the prediction."""


@dataclass(frozen=True)
class Plan:
    """The layouts of one job on one cluster.

    Attributes:
        job: What was planned.
        machines: On what.
        global_batch: Samples of one optimizer step.
        found: Layouts that fit, the fastest first, and why others do not.
        steps: Optimizer steps of the job; None: it does not say.
        goodput: What failures will cost the fastest; None: it is not known how long it takes.
    """

    job: Planned
    machines: Machines
    global_batch: int
    found: Search
    steps: int | None = None
    goodput: GoodputForecast | None = field(default=None, repr=False)

    @property
    def best(self) -> Candidate:
        """The fastest that fits.

        Raises:
            ConfigError: None fits; the message says what is missing.
        """
        if self.found.candidates:
            return self.found.candidates[0]
        raise self._nothing_fits()

    def _nothing_fits(self) -> ConfigError:
        return ConfigError(
            f"no layout of {self.job.name} fits on {self.machines.count} x {self.machines.cluster.device.name}",
            where="plan",
            why="; ".join(self._refusals()),
            fix=self._what_helps(),
        )

    def _what_helps(self) -> str:
        if not self.found.unfit:
            return "take another number of devices, or of samples: --batch"
        helps = ["take more devices, or such with more memory"]
        if self.job.precision == "32-true":
            helps.append("trainer.precision: bf16-mixed")
        if self.job.divisible.tensor_refusal:
            helps.append("write how layers are split (trainer.strategy.plan)")
        if self.job.divisible.pipeline_refusal:
            helps.append("give the module pipeline_layers()")
        if len(self.job.profile.units) < 2:
            helps.append("put the model's layers into a ModuleList, so that they can be gathered one by one")
        return "; ".join(helps)

    def days(self, one: Candidate) -> float | None:
        """Days of training to the end of the job, if nothing fails; None: the job does not say how many steps."""
        return None if self.steps is None else self.steps * one.time.seconds / _DAY

    def reason(self, one: Candidate) -> str:
        """Why a layout stands where it stands, in one sentence."""
        first = self.best
        if one is first:
            fit = self.found.tried - self.found.unfit
            text = f"fastest of {fit:,} layouts that fit" if fit > 1 else "the only layout that fits"
            if any(other.time.seconds < one.time.seconds for other in self.found.candidates):
                text = f"the simplest of those that are as fast, of {self.found.tried - self.found.unfit:,} that fit"
            largest, seconds = max(_terms(one.time).items(), key=lambda term: term[1])
            text += f": {seconds / one.time.seconds:.0%} of the step is {largest}"
            if one.layout.checkpointing == "full":
                text += "; activations are recomputed, or it would not fit or be slower"
            return text
        here, there = dict(_terms(one.time)), dict(_terms(first.time))
        more = {name: here.get(name, 0.0) - there.get(name, 0.0) for name in here | there}
        largest = max(more, key=lambda name: more[name])
        slower = one.time.seconds / first.time.seconds - 1
        if slower < 0.005:
            return f"as fast: {-slower:.1%} faster, which is within the error of a plan, and not as simple"
        return f"{slower:.0%} slower: {more[largest]:.3g} s more of {largest}"

    def _refusals(self) -> Iterator[str]:
        found = self.found
        if found.unfit and found.nearest is not None:
            layout, lacking = found.nearest
            nearest = f"the nearest, {title(layout)}, lacks {lacking / GIB:.3g} GiB"
            yield f"{found.unfit:,} layouts need more memory: {nearest}"
        yield from (reason for reason, _ in found.refused.most_common(4))

    def lines(self, shown: int = _SHOWN) -> Iterator[str]:
        """What a person reads."""
        job, cluster = self.job, self.machines.cluster
        device = cluster.device
        where = f"{self.machines.count:,} x {device.name} ({self.found.limit / GIB:.3g} GiB)"
        if self.machines.nodes > 1:
            where += f" in {self.machines.nodes:,} nodes of {cluster.node}, {cluster.between.name} between them"
        formats = job.precision + (f" with products in {job.products}" if job.products else "")
        yield f"{job.name}: {_count(job.profile.parameters)} parameters, {formats}, on {where}"
        length = job.divisible.length
        tokens = f" of {length:,} tokens" if length > 1 else ""
        held, states = job.profile.parameter_bytes, job.profile.optimizer_bytes
        sizes = f"parameters {_bytes(held)}, states of the optimizer {_bytes(states)}"
        yield f"{sizes}, before they are shared out"
        yield f"a step: {self.global_batch:,} samples{tokens}" + (
            f"; {self.steps:,} steps in all" if self.steps is not None else ""
        )
        yield ""
        if not self.found.candidates:
            raise self._nothing_fits()
        for number, one in enumerate(self.found.candidates[:shown], 1):
            yield from self._candidate(number, one, length)
            yield ""
        yield from self._kinds()
        left = len(self.found.candidates) - shown
        if left > 0:
            yield f"{left:,} slower ones fit too: --top N shows more"
        for text in self._refusals():
            yield f"not: {text}"
        if self.goodput is not None:
            yield ""
            yield from self.goodput.lines()

    def kinds(self) -> dict[str, Candidate | float]:
        """Of each kind of layout the fastest; of one of which none fits, how many bytes are missing."""
        found: dict[str, Candidate | float] = {}
        for one in self.found.candidates:
            found.setdefault(kind(one.layout), one)
        return found | {name: size for name, size in self.found.lacking.items() if name not in found}

    def _kinds(self) -> Iterator[str]:
        kinds = self.kinds()
        wide = max(map(len, kinds), default=0)
        yield f"{'the best of each kind':<{max(wide, 21)}}  {'step':>8}  {'GiB':>6}  communication, not hidden"
        for name, one in kinds.items():
            if isinstance(one, float):
                yield f"{name:<{max(wide, 21)}}  does not fit: lacks {one / GIB:.3g} GiB"
            else:
                sent = ", ".join(f"{what} {_seconds(value)}" for what, value in one.time.communication.items() if value)
                step, memory = _seconds(one.time.seconds), f"{one.fullest.total / GIB:.3g}"
                yield f"{name:<{max(wide, 21)}}  {step:>8}  {memory:>6}  {sent or 'none'}"
        yield ""

    def _candidate(self, number: int, one: Candidate, length: int) -> Iterator[str]:
        time, use = one.time, one.fullest
        yield f"{number}. {title(one.layout)}"
        yield f"   {self.reason(one)}"
        speed = f"{time.tokens_per_second:,.0f} tokens/s a device, " if length > 1 else ""
        yield f"   step {_seconds(time.seconds)}: {speed}{time.samples_per_second:,.3g} samples/s in all, " + (
            f"{time.tflops:.0f} TFLOP/s, {time.mfu:.0%} of peak"
        )
        parts = [f"{name} {_seconds(value)}" for name, value in _terms(time).items() if value >= 0.001 * time.seconds]
        yield f"   of it {', '.join(parts)}"
        tight = ", tight" if use.total > _TIGHT * self.found.limit else ""
        yield f"   memory {use.total / GIB:.3g} GiB{tight}: {_memory(use)}"
        if one.layout.offload:
            yield f"   host memory {self._on_hosts() / GIB:,.0f} GiB of each node, for what is not on its devices"
        if len(one.memory) > 1:
            yield f"   stages {', '.join(f'{stage.total / GIB:.3g}' for stage in one.memory)} GiB"
        days = self.days(one)
        if days is not None:
            energy = time.joules * (self.steps or 0) / 3.6e6
            text = f"   {_days(days)} to the end without failures"
            yield text + (f", {_energy(energy)} at the devices' rated power" if energy >= 0.01 else "")

    def _on_hosts(self) -> float:
        """Bytes of parameters, gradients and states on each node, where they are offloaded."""
        profile = self.job.profile
        return (2 * profile.parameter_bytes + profile.optimizer_bytes) / self.machines.nodes

    def figures(self, one: Candidate | None = None) -> dict[str, Any]:
        """What is predicted of a layout, as a report compares it with what was measured."""
        one = one or self.best
        time = one.time
        return {
            "step_s": time.seconds,
            "compute_s": time.compute,
            "exposed_communication_s": time.exposed,
            "bubble_s": time.bubble,
            "optimizer_s": time.optimizer,
            "host_s": time.host,
            "samples_s": time.samples_per_second,
            "tokens_s": time.tokens_per_second * self.machines.count if self.job.divisible.length > 1 else None,
            "memory_bytes": one.fullest.allocated,  # as torch.cuda.max_memory_allocated measures it
            "goodput": self.goodput.effective if self.goodput is not None else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON; times in seconds, memory in bytes."""
        cluster = self.machines.cluster
        return {
            "job": self.job.name,
            "parameters": self.job.profile.parameters,
            "precision": self.job.precision,
            "device": cluster.device.name,
            "devices": self.machines.count,
            "nodes": self.machines.nodes,
            "global_batch": self.global_batch,
            "tokens_per_sample": self.job.divisible.length,
            "steps": self.steps,
            "tried": self.found.tried,
            "too_large": self.found.unfit,
            "refused": dict(self.found.refused),
            "layouts": [
                {
                    "title": title(one.layout),
                    "why": self.reason(one),
                    "settings": settings_of(one.layout, self),
                    "memory": [as_dict(use) for use in one.memory],
                    "time": asdict(one.time),
                    "days": self.days(one),
                }
                for one in self.found.candidates
            ],
            "goodput": None if self.goodput is None else self.goodput.to_dict(),
        }


def plan(
    job: Planned | Work,
    machines: Machines | str,
    *,
    global_batch: int | None = None,
    steps: int | None = None,
    calibration: Calibration | None = None,
    memory_gib: float | None = None,
    strategies: tuple[str, ...] = STRATEGIES,
    measured: Measured | None = None,
    interval_s: float | None = None,
    failures: float | None = None,
) -> Plan:
    """The layouts of a job that fit on a cluster, ranked by the predicted time of a step.

    Args:
        job: A traced job (`planned_job`), or a model, a batch and a loss.
        machines: `64xh100`, or more precisely.
        global_batch: Samples of one optimizer step; None: what the job says for each device, times the devices.
        steps: Optimizer steps of the training; None: as many as the job says.
        calibration: How fast devices are; None: the shipped one.
        memory_gib: Of one device; None: all that it has.
        strategies: Those that may be chosen.
        measured: What histories of earlier runs say of failures and saves.
        interval_s: Seconds of training between two saves; None: the best.
        failures: Of 1,000 nodes in a day; None: measured, or assumed.

    Raises:
        ConfigError: The job cannot be traced, or a device is unknown.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> work = Work(lambda: nn.Linear(4096, 4096), torch.zeros(8, 4096), lambda model, x: model(x).sum())
        >>> found = plan(work, "8xh100", global_batch=4096)
        >>> found.best.layout.strategy, round(found.best.fullest.parameters / 2**20)
        ('ddp', 64)
    """
    if isinstance(machines, str):
        machines = Machines.of(machines)
    if isinstance(job, Work):
        job = planned_work(job)
    if global_batch is None:
        config = job.settings.trainer if job.settings is not None else None
        total = config is not None and config.batch_size == "global"
        global_batch = job.samples if total else job.samples * machines.count
    found = search(
        job,
        machines.cluster,
        machines.count,
        global_batch,
        calibration=calibration,
        memory_gib=memory_gib,
        strategies=strategies,
    )
    count = steps if steps is not None else job.steps(global_batch)
    made = Plan(job, machines, global_batch, found, count)
    days = made.days(made.best) if found.candidates else None
    if days is None or days <= 0:
        return made
    state, writers = _checkpoint(job, made.best.layout, machines)
    io = job.settings.trainer.checkpoint_io if job.settings is not None else None
    forecast = goodput_forecast(
        machines.nodes,
        days,
        interval_s=interval_s,
        measured=measured,
        failures=failures,
        state_bytes=state,
        writers=writers,
        asynchronous="async" in (io, getattr(io, "name", None)),
    )
    return Plan(job, machines, global_batch, found, count, forecast)


def _checkpoint(job: Planned, layout: Layout, machines: Machines) -> tuple[float, int]:
    """The bytes of a checkpoint, and how many nodes write it: of copies one does."""
    state = job.profile.parameter_bytes + job.profile.optimizer_bytes
    shards = layout.mesh.shard if layout.sharding != "none" else 1
    each = max(1, machines.count // machines.nodes)
    return state, min(machines.nodes, -(-layout.mesh.pipeline * layout.mesh.tensor * shards // each))


def title(layout: Layout) -> str:
    """A layout in one line."""
    mesh = str(layout.mesh) if layout.strategy == "hybrid" else ""
    text = layout.strategy + (f" {mesh}" if mesh else "")
    if layout.sequence:
        text += ", sequence parallel"
    if layout.offload and layout.strategy == "fsdp2":
        text += ", shards on the host"
    if layout.sharding == "gradients" and layout.strategy == "fsdp2":
        text += ", parameters stay gathered"
    text += f", micro-batch {layout.micro_batch}"
    if layout.accumulation > 1:
        text += f" x {layout.accumulation}"
    if layout.checkpointing == "full":
        text += ", activations recomputed"
    return text + (", cast to 16 bits when gathered" if layout.cast else "")


def settings_of(layout: Layout, made: Plan) -> dict[str, Any]:
    """The settings of a job file that make this layout."""
    strategy: dict[str, Any] = {"name": layout.strategy}
    mesh = layout.mesh
    if layout.strategy == "hybrid":
        names = ("pipeline", "replicate", "shard", "context", "tensor", "expert")
        strategy |= {name: size for name in names if (size := getattr(mesh, name)) > 1}
        strategy["shard"] = mesh.shard
        strategy |= {"sequence_parallel": True} if layout.sequence else {}
        strategy |= {"micro_batches": layout.accumulation, "schedule": layout.schedule} if mesh.pipeline > 1 else {}
    own = made.job.settings.trainer.strategy if made.job.settings is not None else None
    words: Any = getattr(own, "plan", "auto")
    if mesh.tensor > 1 and words != "auto":
        strategy["plan"] = dict(words)
    if layout.strategy == "fsdp2" and layout.sharding == "gradients":
        strategy["reshard_after_forward"] = False
    if layout.strategy == "fsdp2" and layout.offload:
        strategy["cpu_offload"] = True
    if layout.checkpointing == "full":
        strategy["activation_checkpointing"] = list(made.job.divisible.layer_classes)
    precision = made.job.precision
    if layout.cast:
        strategy["mixed_precision"] = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
        precision = "32-true"
    pipelined = mesh.pipeline > 1
    batch = layout.micro_batch * (layout.accumulation if pipelined else 1)
    config = made.job.settings.trainer if made.job.settings is not None else None
    path = config.batch_size_from if config is not None else "data.args.batch_size"
    if config is not None and config.batch_size == "global":
        batch = made.global_batch
    found = {
        path: batch,
        "trainer.accelerator": "cpu" if made.machines.cluster.device.model == "" else "cuda",
        "trainer.devices": min(made.machines.count, made.machines.cluster.node),
        "trainer.num_nodes": made.machines.nodes,
        "trainer.strategy": layout.strategy if len(strategy) == 1 else strategy,
        "trainer.precision": precision,
        "trainer.accumulate_grad_batches": 1 if pipelined else layout.accumulation,
    }
    if made.job.products is not None:
        del found["trainer.precision"]  # the job's own, with its settings
    return found


def _terms(time: StepTime) -> Mapping[str, float]:
    """The parts of a step, that add up to it."""
    found = {"compute": time.compute - time.recomputation, "recomputation": time.recomputation}
    found |= {f"{name} communication": value for name, value in time.communication.items()}
    found |= {"bubble": time.bubble, "optimizer": time.optimizer, "host": time.host}
    found["waiting for the slowest"] = time.waiting
    return {name: value for name, value in found.items() if value > 0}


def _memory(use: MemoryUse) -> str:
    names = {
        "parameters": use.parameters,
        "gradients": use.gradients,
        "optimizer": use.optimizer,
        "activations": use.activations,
        "buffers": use.buffers,
        "gathered and sent": use.communication,
        "margin": use.margin,
    }
    return ", ".join(f"{name} {value / GIB:.3g}" for name, value in names.items() if value >= 0.001 * use.total)


def _count(number: int) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _bytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.3g} MB"


def _energy(kwh: float) -> str:
    return f"{kwh / 1000:,.3g} MWh" if kwh >= 1000 else f"{kwh:.3g} kWh"


def _days(days: float) -> str:
    if days < 2 / 24:
        return f"{days * 1440:.3g} minutes" if days * 1440 >= 2 else f"{days * _DAY:.3g} seconds"
    return f"{days * 24:.3g} hours" if days < 2 else f"{days:.3g} days"
