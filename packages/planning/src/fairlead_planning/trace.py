"""One training step of any module, run without data: what it computes, and which tensors live how long."""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fairlead.errors import ConfigError
from fairlead_distributed.activation_checkpointing import find_layers
from fairlead_planning.cuda_operators import CudaOperators
from fairlead_planning.known_values import Finite, KnownValues, UnknownValueError
from fairlead_planning.profile import CAST, Kernel, Kind, Phase, Profile, Storage, Unit

aten = torch.ops.aten
_PRODUCTS: Final = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_CONVOLUTIONS: Final = ("convolution", "_convolution", "convolution_backward")
_RECURRENT: Final = "mkldnn_rnn_layer"
_PRIMES: Final = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103)
_NO_KERNEL: Final = ("detach", "lift_fresh", "alias", "_local_scalar_dense", "empty", "empty_like", "new_empty")


@dataclass(frozen=True)
class Work:
    """What is trained: how the model is built, what a step does with a batch, what updates it.

    Example:
        >>> work = Work(lambda: nn.Linear(4, 4), torch.zeros(2, 4), lambda model, batch: model(batch).sum())
    """

    model: Callable[[], nn.Module] | nn.Module
    """Builds the model; called where tensors have no data. A model that exists is copied without its data."""
    batch: Any
    """Of one micro-batch: tensors in any nesting, whose first dimension counts the rows."""
    loss: Callable[[Any, Any], Any]
    """The loss of the model and a batch."""
    optimizers: Callable[[nn.Module], Iterable[Optimizer]] = lambda model: (torch.optim.AdamW(model.parameters()),)
    precision: str = "32-true"
    """As `trainer.precision`: `bf16-mixed` computes under autocast, `bf16-true` keeps everything in it; `bf16-cast` is
    what FSDP2's `mixed_precision` does: parameters stay as they are and are cast when they are gathered."""
    device: str = "cuda"
    """Whose operators the step calls: `cuda` or `cpu`."""
    plan: Callable[[nn.Module], Mapping[str, str]] = lambda model: {}
    """For tensor parallelism: a word (`colwise`, `rowwise`, `vocab`, ...) for modules by their names."""


def trace(work: Work) -> Profile:
    """The profile of one step; see `trace_rows`."""
    return _trace(work, None)[0]


def trace_rows(work: Work, rows: int) -> tuple[Profile, Profile | None]:
    """The profile of one step, and that of twice as many rows, between which and beyond which sizes lie on a line.

    The step is traced once, with a prime number of rows by which no size of the model can be divided: what that prime
    divides is what grows with the rows. None instead of the second: how many tensors there are, or their sizes, follow
    from the numbers in the batch.

    Args:
        work: What is trained; all tensors of its batch have so many rows.
        rows: How many.

    Raises:
        ConfigError: The step cannot be run without data: it asks for numbers that the weights decide.
        Exception: What the model's code raises.

    Example:
        >>> work = Work(lambda: nn.Linear(4, 4), torch.zeros(2, 4), lambda model, batch: model(batch).sum())
        >>> one, two = trace_rows(work, 2)
        >>> one.parameters, two.rows / one.rows
        (20, 2.0)
    """
    return _trace(work, rows)


def _trace(work: Work, rows: int | None) -> tuple[Profile, Profile | None]:
    # What is compiled is run as it is written: a trace is of its operators.
    with torch.compiler.set_stance("force_eager"), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        values = KnownValues(fake)
        with _Recorder(values), torch.random.fork_rng(devices=()):
            model = _without_data(work.model, fake) if isinstance(work.model, nn.Module) else work.model()
            if not isinstance(model, nn.Module):
                raise ConfigError(f"it made a {type(model).__name__}, no torch.nn.Module")
            low = _low(work.precision)
            if low is not None and work.precision.endswith("-true"):
                _cast(model, low)
            sizes = [p.untyped_storage().nbytes() for p in model.parameters()]  # by the run, if the step casts them
            if low is not None and work.precision.endswith("-cast"):
                _cast(model, low)
            model.train()
            optimizers = list(work.optimizers(model))
            values.forget(model.parameters())
        prime, batch = 0, work.batch
        if rows is not None:
            prime = _prime(model, batch)
        if prime:
            batch = with_samples(batch, rows or 1, prime)
        batch = tree_map(lambda one: _entered(one, fake, values, low, work.precision), batch)
        with _Step(model, values, sizes, work.plan(model), prime) as step:
            with ExitStack() as stack:
                stack.enter_context(Finite())
                if work.device == "cuda":
                    stack.enter_context(CudaOperators())
                if low is not None and work.precision.endswith("-mixed"):
                    stack.enter_context(torch.autocast("cpu", low))
                step.takes(_tensors(batch))
                loss = work.loss(model, batch)
            if not isinstance(loss, Tensor):
                raise ConfigError(f"the step gave {type(loss).__name__}, no loss to differentiate")
            step.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            step.phase = "optimizer"
            for one in optimizers:
                if work.device == "cuda":
                    _as_on_cuda(one)
                one.step()
            return step.profile(optimizers, _tensors(batch))


def _prime(model: nn.Module, batch: Any) -> int:
    """A number of rows that divides no size of the model, nor of a sample; 0: there is none."""
    sizes = {size for p in (*model.parameters(), *model.buffers()) for size in p.shape}
    sizes |= {size for one in _tensors(batch) for size in one.shape[1:]}
    return next((p for p in _PRIMES if all(size % p for size in sizes if size)), 0)


def with_samples(batch: Any, rows: int, wanted: int) -> Any:
    """A batch of `rows` samples with another number of them: its own, over and over."""
    with unset_fake_temporarily():
        index = torch.arange(wanted) % rows
        return tree_map(lambda one: one[index] if isinstance(one, Tensor) and one.ndim else one, batch)


def _low(precision: str) -> torch.dtype | None:
    return {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}.get(precision.partition("-")[0])


def _cast(model: nn.Module, low: torch.dtype) -> None:
    """As `model.to(low)`, which refuses tensors of a trace: something refers to them weakly."""
    memo: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None and one.is_floating_point():
                if id(one) not in memo:
                    memo[id(one)] = nn.Parameter(one.detach().to(low), one.requires_grad)
                    memo[id(memo[id(one)])] = memo[id(one)]
                module._parameters[name] = memo[id(one)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(low)


def _without_data(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """A copy whose tensors have no data; its own take no memory a second time."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = _empty(tensor, fake)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _empty(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    shape = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(fake, shape, torch.device("cpu"))


def _entered(one: Any, fake: FakeTensorMode, values: KnownValues, low: torch.dtype | None, precision: str) -> Any:
    """A tensor of the batch, as the step gets it."""
    if not isinstance(one, Tensor):
        return one
    empty = _empty(one, fake)
    if one.dtype.is_floating_point:
        return empty.to(low) if low is not None and not precision.endswith("-mixed") else empty
    return empty if one.is_meta else values.remember(empty, one)


def _as_on_cuda(optimizer: Optimizer) -> None:
    """Torch's optimizers update all parameters at once on a GPU, unless set otherwise."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_flatten(tree)[0] if isinstance(one, Tensor)]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has operators know the numbers that they can."""

    def __init__(self, values: KnownValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.values.call(func, args, kwargs or {})


@dataclass
class _Life:
    """Of a storage, while the step runs."""

    bytes: int
    doubled: int
    """Its bytes with twice as many rows."""
    born: int
    unit: int
    kind: str
    state: int
    expert: bool
    died: int = -2
    forward: int = -1
    maker: str = ""
    gathered: bool = False
    head: bool = False
    """Of a head whose vocabulary is split, and whose logits are gathered."""


_WHOLE, _SPLIT = 0, 1


class _Step(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of a step, and the storages that they make."""

    def __init__(
        self, model: nn.Module, values: KnownValues, sizes: list[int], plan: Mapping[str, str], prime: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.values, self._prime = model, values, prime
        self.doubled: list[tuple[float, float, tuple[int, int, int, int] | None]] = []
        self.phase: Phase = "forward"
        self.kernels: list[Kernel] = []
        self._layers = find_layers(model)
        self._names = ["", *self._layers]
        self._unit_of = {id(layer): number for number, layer in enumerate(self._layers.values(), 1)}
        self._experts = {id(one) for one in _experts(model)}
        self._stack: list[tuple[int, int, bool]] = []
        self._sequences: list[int] = []
        self._positions: list[tuple[int, bool]] = []
        self._here = (0, False)
        self._lives: dict[int, _Life] = {}
        self._all: list[_Life] = []
        self._sizes = dict(zip(map(id, model.parameters()), sizes, strict=True))
        self._plan = plan
        self._width = 0
        self._parameters = self._note_parameters()

    def _note_parameters(self) -> dict[int, tuple[int, bool, bool]]:
        """Unit, whether it is split, and whether it is an expert's, of each parameter."""
        found: dict[int, tuple[int, bool, bool]] = {}
        inside: dict[int, int] = {}
        for layer in self._layers.values():
            for part in layer.modules():
                inside.setdefault(id(part), self._unit_of[id(layer)])
        used: dict[int, set[int]] = {}
        heads: set[int] = set()
        for name, module in self.model.named_modules():
            split = self._plan.get(name, "").partition(":")[0] in ("colwise", "rowwise", "vocab", "packed")
            expert = id(module) in self._experts
            for p in module._parameters.values():
                if p is None:
                    continue
                unit = inside.get(id(module), 0)
                if self._plan.get(name) == "vocab" and isinstance(module, nn.Linear):
                    heads.add(id(p))
                used.setdefault(id(p), set()).add(unit)
                if id(p) not in found or split:
                    found[id(p)] = (unit, split and (p.ndim > 1 or not self._plan[name].startswith("row")), expert)
        for key, units in used.items():
            if len(units) > 1:  # shared by several: it lies with none of them
                found[key] = (0, *found[key][1:])
        for p in self.model.parameters():
            unit, split, expert = found[id(p)]
            self._live(p, "parameter", unit, _SPLIT if split else _WHOLE, expert)
            self._lives[_key(p)].head = id(p) in heads
        for b in self.model.buffers():
            self._live(b, "buffer", 0, _WHOLE, False)
        return found

    def takes(self, batch: list[Tensor]) -> None:
        """Notes what the step begins with."""
        for tensor in batch:
            self._live(tensor, "input", 0, _WHOLE, False)

    # Who calls

    def __enter__(self) -> _Step:
        self._hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        for one in self._hooks:
            one.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        unit, _, expert = self._stack[-1] if self._stack else (0, 0, False)
        self._stack.append((self._unit_of.get(id(module), unit), id(module), expert or id(module) in self._experts))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack and self._stack[-1][1] == id(module):
            self._stack.pop()
        if id(module) in self._unit_of and self.phase == "forward":
            size = sum(one.numel() * one.element_size() for one in _tensors(output))
            self._width = max(self._width, size)

    def _position(self) -> tuple[int, bool]:
        """The unit whose operator this is, and whether it is an expert's."""
        if self._stack:
            return self._stack[-1][0], self._stack[-1][2]
        if self.phase == "forward":
            return 0, False
        node = torch._C._current_autograd_node() if self.phase == "backward" else None
        if node is None:
            return self._here if self.phase == "backward" else (0, False)
        number = node._sequence_nr()
        if number < (1 << 60):  # not the accumulation of a gradient, which has none
            at = bisect_right(self._sequences, number) - 1
            self._here = self._positions[at] if at >= 0 else (0, False)
        return self._here

    # What is called

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        unit, expert = self._position()
        if self.phase == "forward" and torch.is_grad_enabled():
            number = torch.autograd._get_sequence_nr() - 1
            if not self._sequences or number > self._sequences[-1]:
                self._sequences.append(number)
                self._positions.append((unit, expert))
        try:
            out = self.values.call(func, args, kwargs)
        except (UnknownValueError, DataDependentOutputException, DynamicOutputShapeException) as error:
            if not isinstance(error, UnknownValueError):
                error = UnknownValueError(f"the sizes of what {error.func} gives follow from numbers")
            raise ConfigError(
                f"a step cannot be traced without its data: {error}",
                why="how many tensors or which sizes follow is then not known before the run",
                fix="have the step do that on the batch, or with sizes that do not depend on the weights",
            ) from error
        name = func._schema.name.partition("::")[2]
        ins, outs = _tensors((args, kwargs)), _tensors(out)
        made = [one for one in outs if _key(one) not in self._lives]
        changed = func._schema.is_mutable
        if name in _NO_KERNEL or not (made or changed):
            for one in made:
                self._live(one, "activation", unit, _WHOLE, expert, name)
            return out
        index = len(self.kernels)
        before = [self._lives[key] for one in ins if (key := _key(one)) in self._lives]
        state = self._state(name, before)
        head = any(life.head for life in before)
        if head and self.phase == "forward" and name in _PRODUCTS:
            state = _WHOLE
        if name == "_to_copy" and any(life.kind == "parameter" for life in before):
            name = CAST
        for one in made:
            self._live(one, "activation", unit, state, expert, name)
            if name == CAST:
                self._lives[_key(one)].head = head
        if name == _RECURRENT:  # what it keeps for the backward pass, which a trace does not see: measured on a CPU
            own = self._lives[_key(outs[3])]
            own.bytes = 64 * outs[0].numel()
            own.doubled = own.bytes * (self._times(outs[0].numel()) if self._prime else 1)
        if name == "convolution_backward":  # the library computes a weight's gradient in another layout first
            size = float(max((_bytes(one) for one in ins[2:3]), default=0))
            bare = _Life(int(size), int(size), index, unit, "activation", state, expert, index, maker="workspace")
            self._all.append(bare)
        if self.phase == "forward":
            for life in before:
                life.forward = index
        kind: Kind = "other"
        if name in _PRODUCTS or name in _CONVOLUTIONS:
            kind = "matmul"
            if sum(1 for life in before if life.kind == "parameter" or life.maker == CAST) and state == _SPLIT:
                for life in before:
                    life.gathered = life.gathered or life.state == _WHOLE
        elif "attention" in name:
            kind = "attention"
        elif name.startswith(_RECURRENT):
            kind = "matmul"
        flops, shape = _arithmetic(name, args, outs)
        read = {id(one): one for one in (*ins, *outs)}.values()
        if self._prime:
            twice = float(sum(_bytes(one) * self._times(one.numel()) for one in read))
            larger = None if shape is None else tuple(one * self._times(one) for one in shape)
            work = (
                flops * self._times(prod(shape))
                if shape
                else sum(one.numel() * self._times(one.numel()) for one in outs)
            )
            self.doubled.append((float(work), twice, larger))  # type: ignore[arg-type]
        self.kernels.append(
            Kernel(
                name=name,
                kind=kind,
                phase=self.phase,
                unit=unit,
                dtype=_dtype(ins or outs),
                flops=flops,
                bytes=float(sum(map(_bytes, read))),
                shape=shape,
                split=_SPLIT in (state, *(life.state for life in before)),
                sequence=False,
                expert=expert,
            )
        )
        return out

    def _times(self, size: int) -> int:
        """By how much a size grows with twice as many rows: by two for each time that the prime divides it."""
        times = 1
        while size and size % self._prime == 0:
            size //= self._prime
            times *= 2
        return times

    def _state(self, name: str, before: list[_Life]) -> int:
        """Whether what an operator makes is split among the ranks of tensor parallelism."""
        split = [life for life in before if life.state == _SPLIT]
        if not split:
            return _WHOLE
        if name in ("mm", "addmm") and all(life.state == _SPLIT for life in before[-2:]):
            return _WHOLE  # both factors have a part of the sum: it is added up; a bias is no factor
        if name == "embedding":
            return _WHOLE
        return _SPLIT

    def _live(self, tensor: Tensor, kind: str, unit: int, state: int, expert: bool, maker: str = "") -> None:
        key = _key(tensor)
        if key in self._lives:
            return
        storage = tensor.untyped_storage()
        born = -1 if kind in ("parameter", "buffer", "input") else len(self.kernels)
        size = storage.nbytes()
        doubled = size * self._times(size) if (self._prime and born >= 0) or (kind == "input" and self._prime) else size
        life = self._lives[key] = _Life(size, doubled, born, unit, kind, state, expert, maker=maker)
        self._all.append(life)
        weakref.finalize(storage, self._end, key, life)

    def _end(self, key: int, life: _Life) -> None:
        life.died = max(life.born, len(self.kernels) - 1)
        if self._lives.get(key) is life:
            del self._lives[key]

    # What it was

    def profile(self, optimizers: list[Optimizer], batch: list[Tensor]) -> tuple[Profile, Profile | None]:
        """What was recorded, and that of twice as many rows."""
        for p in self.model.parameters():
            unit, split, expert = self._parameters[id(p)]
            if p.grad is not None and (life := self._lives.get(_key(p.grad))) is not None:
                life.kind, life.unit, life.state, life.expert = "gradient", unit, _SPLIT if split else _WHOLE, expert
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                unit, split, expert = self._parameters.get(id(parameter), (0, False, False))
                for tensor in _tensors(state):
                    if (life := self._lives.get(_key(tensor))) is not None:
                        big = tensor.numel() > 1
                        life.kind, life.unit, life.expert = "optimizer", unit, expert
                        life.state = _SPLIT if split and big else _WHOLE
        end = len(self.kernels)
        one = Profile(
            units=tuple(self._unit(number, name) for number, name in enumerate(self._names)),
            kernels=tuple(self.kernels),
            storages=tuple(
                Storage(
                    bytes=float(one.bytes),
                    born=one.born,
                    died=one.died if one.died != -2 else end,
                    forward=one.forward,
                    maker=one.maker,
                    kind=one.kind,  # type: ignore[arg-type]
                    unit=one.unit,
                    split=one.state == _SPLIT,
                    sequence=one.state == _WHOLE and one.kind == "activation" and one.unit > 0 and not one.gathered,
                    expert=one.expert,
                )
                for one in self._all
            ),
            rows=max((len(one) for one in batch if one.ndim), default=1),
            tokens=self._tokens(batch),
            width_bytes=float(self._width),
        )
        if not self._prime or self.values.decided:
            return one, None
        kernels = tuple(
            replace(k, flops=flops, bytes=size, shape=shape)
            for k, (flops, size, shape) in zip(one.kernels, self.doubled, strict=True)
        )
        storages = tuple(replace(s, bytes=float(life.doubled)) for s, life in zip(one.storages, self._all, strict=True))
        rows, tokens, width = 2 * one.rows, 2 * one.tokens, 2 * one.width_bytes
        return one, replace(one, kernels=kernels, storages=storages, rows=rows, tokens=tokens, width_bytes=width)

    def _tokens(self, batch: list[Tensor]) -> int:
        """Positions that the step computes: those of attention, where a sample has one more for the last target."""
        rows = max((len(one) for one in batch if one.ndim), default=1)
        length = max((one.shape[1] for one in batch if one.ndim == 2 and not one.is_floating_point()), default=1)
        seen = {k.shape[1] for k in self.kernels if k.kind == "attention" and k.shape is not None}
        return rows * (length - 1 if length - 1 in seen and length not in seen else length)

    def _unit(self, number: int, name: str) -> Unit:
        own = [p for p in self.model.parameters() if self._parameters[id(p)][0] == number]
        experts = [p for p in own if self._parameters[id(p)][2]]
        return Unit(
            name=name,
            parameters=sum(p.numel() for p in own) - sum(p.numel() for p in experts),
            expert_parameters=sum(p.numel() for p in experts),
            trainable=sum(p.numel() for p in own if p.requires_grad),
            parameter_bytes=sum(self._sizes[id(p)] for p in own),
            split_parameters=sum(
                p.numel() for p in own if self._parameters[id(p)][1] and not self._parameters[id(p)][2]
            ),
            largest=max((p.numel() for p in own), default=0),
        )


def _experts(model: nn.Module) -> Iterator[nn.Module]:
    """The modules within the experts of mixtures."""
    for module in model.modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module):
            yield from experts.modules()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    """Read or written: of an expanded tensor what there is, of a view what it shows."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _dtype(tensors: list[Tensor]) -> str:
    floats = [one for one in tensors if one.dtype.is_floating_point]
    largest = max(floats or tensors, key=lambda one: one.numel(), default=None)
    return str(largest.dtype).removeprefix("torch.") if largest is not None else "float32"


def _arithmetic(name: str, args: Any, outs: list[Tensor]) -> tuple[float, tuple[int, int, int, int] | None]:
    """FLOPs and shape of a matrix product, a convolution or an attention; otherwise one for each number."""
    if name in _PRODUCTS:
        a, b = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
        batch = a.shape[0] if a.ndim == 3 else 1
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        return 2.0 * batch * m * n * k, (batch, m, n, k)
    if name in _CONVOLUTIONS:
        backward = name.endswith("backward")
        weight, result = (args[2], args[0]) if backward else (args[1], outs[0])
        n, k, positions = weight.shape[0], prod(weight.shape[1:]), result.numel() // max(1, result.shape[1])
        products = sum(args[-1][:2]) if backward else 1  # the requested gradients
        return 2.0 * products * positions * n * k, (products, positions, n, k)
    if name.startswith(_RECURRENT):  # a layer of an LSTM: inputs, and the weights of inputs and of states
        products, positions = 2 if name.endswith("backward") else 1, prod(args[0].shape[:2])
        n, k = args[1].shape[0], args[1].shape[1] + args[2].shape[1]
        return 2.0 * products * positions * n * k, (products, positions, n, k)
    if "attention" in name:
        backward = "backward" in name
        q, key, value = args[1:4] if backward else args[:3]
        heads, causal = prod(q.shape[:-2]), any(one is True for one in args)
        pairs = q.shape[-2] * key.shape[-2] * (0.5 if causal and q.shape[-2] == key.shape[-2] else 1.0)
        # Forward the scores and the sum of values; backward three products of each width, two of the other.
        width, of_value = q.shape[-1], value.shape[-1]
        flops = heads * pairs * (2.0 * (3 * width + 2 * of_value) if backward else 2.0 * (width + of_value))
        return flops, (heads, q.shape[-2], key.shape[-2], q.shape[-1])
    return float(sum(one.numel() for one in outs)), None
