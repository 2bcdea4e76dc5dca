"""A state as it is now, in host memory, in a form that gives the same bytes each time.

`pickle` refers back to an object that it has seen before, by identity, so two equal states give different bytes when
one holds a string twice and the other two equal strings, as before and after a resume.  So strings are made one object
per value, tuples one for each time they occur; lists, dicts and tensors that are shared stay so: that has a meaning.

Copies from GPUs continue while the next step computes.

Only the states of optimizers are copied so, most of what Adam's checkpoints hold: nothing but the step of their
optimizer changes them, so that one hook is enough.  Weights and buffers are copied before the GPU computes on.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fairlead.errors import CheckpointError


class OverlappedCopies:
    """A second stream for each GPU; an optimizer that would overwrite what is being copied is held.

    It learns of an optimizer when that makes a step, so the first save knows none.  The host is never held: the
    GPU waits, in front of the update, behind the forward and backward of the step.
    """

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._own: set[int] = set()
        self._copies: list[torch.cuda.Event] = []
        self._hook: RemovableHandle | None = None

    def begin(self) -> None:
        """A save begins: looks which memory belongs to optimizers, and watches their steps from now on."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        self.watch()
        self._own = {address for optimizer in self._optimizers for address in storages_of(optimizer)}
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def watch(self) -> None:
        """Learns of optimizers by their steps, and holds those steps, until `end`."""
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)

    def stream(self, source: torch.UntypedStorage) -> torch.cuda.Stream | None:
        """The stream to copy a GPU's memory in; None: the one that computes."""
        if source.data_ptr() not in self._own:
            return None
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(source.device))
        return stream

    def hold(self, event: torch.cuda.Event) -> None:
        """No optimizer updates anything before this event."""
        self._copies.append(event)

    def end(self) -> None:
        """Watches no steps any more; those that come wait for nothing."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A closure computes before it is updated, as Lightning's does: only the update is held."""
        self._optimizers.add(optimizer)
        if not self._copies:
            return None
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._then_held(kwargs["closure"])}
        if len(args) > 1 and args[1] is not None:  # args[0] is the optimizer
            return (args[0], self._then_held(args[1]), *args[2:]), kwargs
        self._wait()
        return None

    def _then_held(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def held() -> Any:
            result = closure()
            self._wait()
            return result

        return held

    def _wait(self) -> None:
        copies, self._copies = self._copies, []
        for event in copies:
            torch.cuda.current_stream(event.device).wait_event(event)


def storages_of(optimizer: Optimizer, device_type: str = "cuda") -> set[int]:
    """The addresses of the memory that only this optimizer's step changes: its state, not its parameters."""
    leaves = tree_leaves(list(optimizer.state.values()))
    state = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == device_type]
    shared = {_address(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    return {_address(tensor) for tensor in state} - shared


def _address(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


_HUGE: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_LIBC: Final = ctypes.CDLL(None)


class Arena:
    """The buffers of one save, by exact size; page-locked ones (`pin`) are faster, but slow to allocate."""

    def __init__(self, *, pin: bool, overlap: OverlappedCopies | None = None) -> None:
        self._pin = pin
        self._overlap = overlap
        self._free: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}
        self._used: list[tuple[tuple[int, bool], torch.UntypedStorage]] = []
        self._streams: set[torch.cuda.Stream] = set()
        self._copies: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """A save begins."""
        if self._overlap is not None:
            self._overlap.begin()

    def copy(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """The bytes of a CPU or CUDA storage in a buffer; valid after `synchronize`."""
        on_gpu = source.device.type == "cuda"
        key = (source.nbytes(), on_gpu and self._pin)
        idle = self._free.get(key)
        target = idle.pop() if idle else _allocate(*key)
        self._used.append((key, target))
        if on_gpu:
            self._from_gpu(_as_bytes(target), source)
        elif key[0]:
            _as_bytes(target).copy_(_as_bytes(source))
        return target

    def seal(self) -> None:
        """All copies have been begun; lets go of buffers that the state has no more use for."""
        for stream in self._streams:
            event = stream.record_event()
            self._copies.append(event)
            if self._overlap is not None:
                self._overlap.hold(event)
        self._streams.clear()
        self._free.clear()

    def synchronize(self) -> None:
        """Waits for copies from GPUs, in whichever thread needs the bytes."""
        for event in self._copies:
            event.synchronize()
        self._copies.clear()

    def release(self) -> None:
        """Makes the buffers free for the next save; what was copied into them is no longer valid."""
        self.seal()
        self.synchronize()
        for key, buffer in self._used:
            self._free.setdefault(key, []).append(buffer)
        self._used.clear()

    def _from_gpu(self, target: torch.Tensor, source: torch.UntypedStorage) -> None:
        side = self._overlap.stream(source) if self._overlap is not None else None
        stream = side or torch.cuda.current_stream(source.device)
        memory = _as_bytes(source)
        with torch.cuda.stream(stream):
            target.copy_(memory, non_blocking=True)
        if side is not None:
            memory.record_stream(side)  # the state may be freed before it is copied
        self._streams.add(stream)


def _allocate(nbytes: int, pinned: bool) -> torch.UntypedStorage:
    storage = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
    if not pinned:
        use_huge_pages(storage.data_ptr(), nbytes)
    return storage


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def use_huge_pages(address: int, nbytes: int) -> None:
    """Asks Linux to back memory by pages of 2 MiB, as most of the cost of its first use are page faults."""
    begin, end = -(-address // _HUGE) * _HUGE, (address + nbytes) // _HUGE * _HUGE
    if begin < end and sys.platform == "linux":
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)


_ATOMS = frozenset({type(None), bool, int, float, complex, torch.dtype, torch.device, torch.Size, torch.layout})
_STRINGS = frozenset({str, bytes})


class Snapshot(NamedTuple):
    """A copy, and whether there is anything in it besides tensors, plain data and plain containers."""

    state: dict[str, Any]
    foreign: bool


def on_host(state: dict[str, Any]) -> Snapshot:
    """For a save that ends before the loop continues: what is on a device is copied, the rest is shared."""
    arena = Arena(pin=False)
    snapshot = _run(_Copier(arena, everything=False), state)
    arena.synchronize()
    return snapshot


def copied(state: dict[str, Any], arena: Arena) -> Snapshot:
    """For a save that runs while the loop does; the bytes from GPUs are there after `arena.synchronize()`."""
    return _run(_Copier(arena, everything=True), state)


def _run(copier: _Copier, state: dict[str, Any]) -> Snapshot:
    copier.arena.begin()
    with torch.inference_mode(False), torch.no_grad():
        result = copier.copy(state)
    copier.arena.seal()
    return Snapshot(result, foreign=copier.foreign)


class _Copier:
    def __init__(self, arena: Arena, *, everything: bool) -> None:
        self.arena = arena
        self.foreign = False
        self._everything = everything
        self._strings: dict[tuple[type, str | bytes], str | bytes] = {}
        self._memo: dict[int, Any] = {}
        self._keep: list[Any] = []  # an id is only an identity while its object lives
        self._deep: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind in _STRINGS:
            return self._strings.setdefault((kind, value), value)
        if kind is tuple:
            return tuple([self.copy(item) for item in value])
        if id(value) in self._memo:
            return self._memo[id(value)]
        if kind is list:
            items: list[Any] = self._remember(value, [])
            items.extend([self.copy(item) for item in value])
            return items
        if kind in (dict, OrderedDict, defaultdict):
            return self._mapping(value)
        if kind in (set, frozenset):
            return self._remember(value, kind(self.copy(item) for item in value))
        if isinstance(value, torch.Tensor):
            return self._remember(value, self._tensor(value))
        self.foreign = True
        return self._remember(value, self._other(value)) if self._everything else value

    def _remember(self, old: Any, new: Any) -> Any:
        self._keep.append(old)
        self._memo[id(old)] = new
        return new

    def _mapping(self, value: Any) -> Any:
        new: Any = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        self._remember(value, new)
        for key, item in value.items():
            new[self.copy(key)] = self.copy(item)
        # A state_dict carries its modules' versions in the attribute `_metadata`.
        for name, attribute in getattr(value, "__dict__", {}).items():
            setattr(new, name, self.copy(attribute))
        return new

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        lazy = value.is_conj() or value.is_neg()  # a view that says "conjugated" or "negated": stored as its values
        source = value.detach().resolve_conj().resolve_neg().requires_grad_(value.requires_grad) if lazy else value
        if source.device.type == "meta" or (source.device.type == "cpu" and not self._everything):
            return source
        if _is_plain(source):
            new = self._strided(source)
        else:
            new = source.detach().clone() if source.device.type == "cpu" else source.detach().cpu()
        if isinstance(value, torch.nn.Parameter) and not isinstance(new, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=value.requires_grad)
        elif value.requires_grad:
            new.requires_grad_()
        for name, attribute in value.__dict__.items():
            setattr(new, name, self.copy(attribute))
        return new

    def _strided(self, value: torch.Tensor) -> torch.Tensor:
        """Copies the storage, not the view, so that views of one storage still are, and bytes are as without."""
        storage = value.untyped_storage()
        key = storage._cdata  # torch.save tells storages apart by the same number
        host = self._memo.get(-key)  # ids are positive: no clash
        if host is None:
            self._keep.append(storage)
            host = self._memo[-key] = self.arena.copy(storage)
        return torch.empty(0, dtype=value.dtype).set_(host, value.storage_offset(), value.size(), value.stride())

    def _other(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self._deep)
        except Exception as error:  # an object's own __deepcopy__ or __reduce__ may raise anything
            raise CheckpointError(
                f"an object of {type(value).__module__}.{type(value).__qualname__} in the checkpoint cannot be copied",
                why=f"{type(error).__name__}: {error}",
                fix="keep it out of the state (state_dict, on_save_checkpoint), or use `checkpoint_io: torch`",
            ) from error


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is fully described by its storage, shape and strides."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type in ("cpu", "cuda")
        and value.layout is torch.strided
        and not value.is_quantized
    )
