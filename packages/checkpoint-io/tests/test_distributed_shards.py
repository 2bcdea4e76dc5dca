"""`checkpoint_io: distributed` on real ranks: each tensor once, in any layout, and nothing half-written counts."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fairlead.errors import CheckpointError, ConfigError
from fairlead.interfaces import BuildContext
from fairlead.plugins import PluginManager
from fairlead.testing import minimal_resolution
from fairlead_checkpoint_io import DistributedCheckpointIOConfig, TorchCheckpointIOConfig
from fairlead_checkpoint_io.async_file_runtime import AsyncFileCheckpointIO
from fairlead_checkpoint_io.distributed_shards.runtime import DistributedCheckpointIO, build
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO
from fairlead_distributed.errors import RankFailedError
from fairlead_distributed.testing import run_ranks
from fairlead_runs.checkpoint_io import ShardedLoads, ShardedSaves
from fairlead_runs.commit import FileHash, checkpoint_name, hash_file, newest_complete, publish, stage

NAMES = [["b", "w"]]


def io(**fields: Any) -> DistributedCheckpointIO:
    return DistributedCheckpointIO(DistributedCheckpointIOConfig(**fields))


def plain(scale: float = 1.0, rows: int = 300) -> dict[str, Any]:
    """A state as DDP has it: the same on every rank; its optimizer has the parameters in another order."""
    weights = {"w": scale * torch.arange(rows * 100.0).reshape(rows, 100), "b": scale * torch.arange(30000.0)}
    state = {i: {"step": torch.tensor(scale), "m": weights[name] / 3} for i, name in enumerate(NAMES[0])}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1 * scale, "params": [0, 1]}]}
    return {"state_dict": weights, "optimizer_states": [optimizer], "loops": {"done": scale}}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


# -- what is written


def save_plain(rank: int, folder: str) -> dict[str, FileHash]:
    told: dict[str, FileHash] = {}
    for background in (False, True):
        backend = io(background=background)
        for number in (1, 2):
            path = Path(folder, f"{background}-{number}.ckpt")
            backend.submit_shards(plain(number), path, told.update, names=NAMES)
        backend.wait()
        backend.teardown()
    return told


def test_what_all_ranks_hold_is_written_once_and_spread_over_them(tmp_path: Path) -> None:
    """Bytes on disk are those of one state, each rank writes about as much, and rank 0 knows all checksums."""
    told = run_ranks(save_plain, 3, str(tmp_path))
    tensors = 4 * 30000 * 4
    for path in sorted(tmp_path.iterdir()):
        found = sizes(path)
        assert found.keys() == {".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"}
        assert tensors < sum(found.values()) < 1.1 * tensors
        assert max(found[f"__{rank}_0.distcp"] for rank in range(3)) < 0.55 * tensors
        assert equal(io().load_checkpoint(path), plain(int(path.stem[-1])))
        assert equal(told[0], {name: hash_file(path / name) for name in found}) is (path.stem[-1] == "2")
    assert told[1:] == [{}, {}]


# -- shards in every layout


def sharded(mesh_shape: tuple[int, ...], placements: list[Placement]) -> dict[str, Any]:
    """The state of `plain` with its tensors laid out over the ranks; vectors are never split twice."""
    mesh = init_device_mesh("cpu", mesh_shape)

    def lay_out(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return tensor
        fitting = [Replicate() if isinstance(p, Shard) and p.dim >= tensor.ndim else p for p in placements]
        return distribute_tensor(tensor, mesh, fitting)

    state = plain(rows=301)
    state["state_dict"] = {name: lay_out(value) for name, value in state["state_dict"].items()}
    for entries in state["optimizer_states"][0]["state"].values():
        entries["m"] = lay_out(entries["m"])
    return state


LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "fsdp": ((4,), [Shard(0)]),
    "tp": ((4,), [Shard(1)]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "fsdp+tp": ((2, 2), [Shard(0), Shard(1)]),
    "replicated": ((4,), [Replicate()]),
}


def save_layouts(rank: int, folder: str) -> None:
    for name, layout in LAYOUTS.items():
        backend = io(background=name == "hsdp")
        backend.submit_shards(sharded(*layout), Path(folder, name), lambda hashes: None, names=NAMES)
        backend.teardown()


def load_layouts(rank: int, folder: str) -> list[str]:
    """Reads each into another layout, and gives those that are not what was saved."""
    wrong = []
    for name in LAYOUTS:
        target = sharded((2,), [Shard(0)])
        mine = target["state_dict"] | {
            key: target["optimizer_states"][0]["state"][i]["m"] for i, key in enumerate(["m b", "m w"])
        }
        for tensor in mine.values():
            tensor.to_local().zero_()

        def place(where: Any, size: Any, dtype: Any, mine: dict[str, torch.Tensor] = mine) -> torch.Tensor | None:
            key = where[1] if where[0] == "state_dict" else f"m {where[2]}"
            return mine[key] if len(size) else None

        found = io().load_shards(Path(folder, name), place)
        assert found is not None
        assert found["state_dict"]["w"] is mine["w"]
        for part in (found["state_dict"], *found["optimizer_states"][0]["state"].values()):
            part |= {key: value.full_tensor() for key, value in part.items() if isinstance(value, DTensor)}
        if not equal(found, plain(rows=301)):
            wrong.append(name)
    return wrong


def test_shards_of_any_layout_are_read_whole_and_in_any_other(tmp_path: Path) -> None:
    """4 ranks of FSDP, TP, HSDP and both at once, sizes that do not divide; read by one rank and by two."""
    run_ranks(save_layouts, 4, str(tmp_path))
    for name in LAYOUTS:
        assert equal(io().load_checkpoint(tmp_path / name), plain(rows=301)), name
        tensors = 2 * 4 * (301 * 100 + 30000)
        assert sum(sizes(tmp_path / name).values()) < 1.15 * tensors, name
    assert len([name for name in sizes(tmp_path / "hsdp") if name.endswith(".distcp")]) == 4
    assert run_ranks(load_layouts, 2, str(tmp_path)) == [[], []]
    file = TorchFileCheckpointIO(TorchCheckpointIOConfig())
    assert equal(file.load_checkpoint(tmp_path / "fsdp+tp"), plain(rows=301))


# -- in the background


def mutate(rank: int, folder: str) -> bool:
    """Changes everything while the save waits for rank 1, which waits for the change."""
    state = sharded((2,), [Shard(0)])
    state["optimizer_states"][0]["param_groups"][0]["list"] = [1, 2]
    state["extra"] = {"tensor": torch.ones(3), "list": [1]}
    backend = io(background=True)
    gate = threading.Event()
    inside = _held(backend, gate)
    backend.submit_shards(state, Path(folder, "mutated"), lambda hashes: None, names=NAMES)
    assert inside.wait(60)
    for tensor in (*state["state_dict"].values(), *(s["m"] for s in state["optimizer_states"][0]["state"].values())):
        tensor.to_local().fill_(-1)
    for entries in state["optimizer_states"][0]["state"].values():
        entries["step"].fill_(-1)
    state["optimizer_states"][0]["param_groups"][0].update(lr=-1, params=[])
    state["optimizer_states"][0]["param_groups"][0]["list"].append(3)
    state["extra"]["tensor"].zero_()
    state["extra"]["list"].clear()
    state["loops"]["done"] = None
    gate.set()
    backend.teardown()
    return True


def held_bytes(backend: DistributedCheckpointIO) -> int:
    """Host memory held for the next save."""
    free = [arena._free for arena in backend._background._idle]
    return sum(size * len(buffers) for kinds in free for (size, _), buffers in kinds.items())


def _held(backend: DistributedCheckpointIO, gate: threading.Event) -> threading.Event:
    """Has the thread that writes stop before its first save, and says when it is there."""
    inside = threading.Event()
    backend.meet()
    ranks: Any = backend._ranks
    scatter = ranks.scatter

    def held(*args: Any, writing: bool = False) -> Any:
        if writing:
            inside.set()
            assert gate.wait(60)
        return scatter(*args, writing=writing)

    ranks.scatter = held
    return inside


def one_after_the_other(rank: int, folder: str) -> dict[str, Any]:
    """One start of two ranks serves several tests."""
    tried = (mutate, in_flight, refused, unlike)
    return {one.__name__: one(rank, folder) for one in tried}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_ranks(one_after_the_other, 2, str(folder))


Two = tuple[Path, list[dict[str, Any]]]


def test_nothing_that_is_changed_afterwards_gets_into_the_files(two_ranks: Two) -> None:
    tmp_path, _ = two_ranks
    expected = plain(rows=301)
    expected["optimizer_states"][0]["param_groups"][0]["list"] = [1, 2]
    expected["extra"] = {"tensor": torch.ones(3), "list": [1]}
    assert equal(io().load_checkpoint(tmp_path / "mutated"), expected)


def in_flight(rank: int, folder: str) -> tuple[int, bool, list[str]]:
    """Host memory from save to save, and whether training's own collectives are untouched by those of the saves."""
    backend = io(background=True)
    held, total = [], torch.zeros(1)
    for number in range(4):
        backend.submit_shards(plain(number), Path(folder, str(number)), lambda hashes: None, names=NAMES)
        for _ in range(20):
            one = torch.ones(1)
            dist.all_reduce(one)
            total += one
        backend.wait()
        held.append(held_bytes(backend))
    buffers = sorted(set(held[1:]))
    backend.teardown()
    return len(buffers), 0.3 < held[0] / (4 * 30000 * 4) < 0.7, [str(total.item()), str(held_bytes(backend))]


def test_each_rank_keeps_host_memory_for_its_part_only(two_ranks: Two) -> None:
    """What all ranks hold is copied by the one that writes it; the buffers are used again, and freed at the end."""
    assert [found["in_flight"] for found in two_ranks[1]] == [(1, True, ["160.0", "0"])] * 2


# -- what goes wrong


def commit(root: Path, step: int, folder: Path, hashes: Mapping[str, FileHash]) -> None:
    publish(folder.parent, {"step": step}, hashes={f"{folder.name}/{name}": h for name, h in hashes.items()})


def staged(root: str, step: int) -> Path:
    return stage(Path(root), checkpoint_name(step), token="s1") / "state.ckpt"


def limited_twice(rank: int, root: str) -> list[list[str | None]]:
    return [limited(rank, f"{root}/{background}", background) for background in (False, True)]


def limited(rank: int, root: str, background: bool) -> list[str | None]:
    """Rank 1 may write no more than a few kilobytes into a file in the second save, and as much as it wants again."""
    backend = io(background=background)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    errors: list[str | None] = []
    for step in (1, 2, 3):
        folder = staged(root, step)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if step == 2 else before[0], before[1]))
        try:
            backend.submit_shards(
                plain(step),
                folder,
                lambda hashes, step=step, folder=folder: commit(Path(root), step, folder, hashes),  # type: ignore[misc]
                names=NAMES,
            )
            backend.wait()
            errors.append(None)
        except CheckpointError as error:
            errors.append(error.block())
    backend.teardown()
    return errors


def test_a_disk_error_of_one_rank_is_an_error_of_all_and_no_checkpoint(tmp_path: Path) -> None:
    """A real refusal of the kernel; the checkpoint before it stays, and the next one is written."""
    first, second = run_ranks(limited_twice, 2, str(tmp_path))
    assert first == second
    for name, said in zip(("False", "True"), first, strict=True):
        root = tmp_path / name
        assert [text is None for text in said] == [True, False, True]
        assert "rank 1: cannot write __1_0.distcp: File too large" in str(said[1])
        assert str(root / ".stage-step-00000002.s1" / "state.ckpt") in str(said[1])
        assert sorted(p.name for p in root.glob("step-*")) == ["step-00000001", "step-00000003"]
        assert list((root / ".stage-step-00000002.s1").iterdir()) == []
        newest = newest_complete(root, deep=True)
        assert newest.checkpoint is not None
        assert equal(io().load_checkpoint(newest.checkpoint.path / "state.ckpt"), plain(3))


def refused(rank: int, root: str) -> str | None:
    """Rank 0 cannot commit what all have written."""
    backend = io(background=True)

    def then(hashes: Mapping[str, FileHash]) -> None:
        raise OSError(28, "No space left on device", "manifest.json")

    backend.submit_shards(plain(), Path(root, "refused"), then, names=NAMES)
    try:
        backend.submit_shards(plain(), Path(root, "taken"), lambda hashes: None, names=NAMES)
    except CheckpointError as error:
        backend.teardown()  # said once
        return f"{error.where}: {error.why}"
    return None


def test_a_failed_commit_is_told_to_all_ranks_once_and_the_next_save_is_taken(two_ranks: Two) -> None:
    folder, found = two_ranks
    said = [one["refused"] for one in found]
    assert said[0] == said[1]
    assert said[0].startswith(f"{folder / 'refused'}: a checkpoint was not written: rank 0: OSError: ")
    assert "No space left on device" in said[0]
    assert equal(io().load_checkpoint(folder / "taken"), plain())


def killed(rank: int, root: str) -> None:
    backend = io(background=True)
    folder = staged(root, 1)
    backend.submit_shards(plain(), folder, lambda hashes: commit(Path(root), 1, folder, hashes), names=NAMES)
    backend.wait()
    folder = staged(root, 2)
    if rank == 1:
        backend.meet()
        ranks: Any = backend._ranks
        scatter = ranks.scatter

        def die_writing(*args: Any, writing: bool = False) -> Any:
            if writing:
                os.kill(os.getpid(), signal.SIGKILL)
            return scatter(*args, writing=writing)

        ranks.scatter = die_writing
    backend.submit_shards(plain(2), folder, lambda hashes: commit(Path(root), 2, folder, hashes), names=NAMES)
    try:
        backend.wait()
    except CheckpointError as error:
        Path(root, "said").write_text(error.block())


def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed.*SIGKILL"):
        run_ranks(killed, 2, str(tmp_path))
    newest = newest_complete(tmp_path, deep=True)
    assert newest.checkpoint is not None
    assert newest.checkpoint.name == "step-00000001"
    assert equal(io().load_checkpoint(newest.checkpoint.path / "state.ckpt"), plain())
    assert "rank 0 lost the others" in (tmp_path / "said").read_text()


def slow(rank: int, root: str) -> str:
    """Rank 1 does not come to an end with its part before rank 0 has given up."""
    backend, said = io(background=True, timeout=timedelta(seconds=3)), Path(root, "said")
    if rank == 1:
        gate = threading.Event()
        _held(backend, gate)
        threading.Thread(target=_open, args=(gate, said.exists)).start()
    else:
        backend.meet()
    backend.submit_shards(plain(), Path(root, "x"), lambda hashes: None, names=NAMES)
    try:
        backend.wait()
    except CheckpointError as error:
        said.write_text("x")
        return error.block()
    return ""


def _open(gate: threading.Event, when: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not when() and time.monotonic() < deadline:
        time.sleep(0.05)
    gate.set()


def test_the_ranks_do_not_wait_for_ever(tmp_path: Path) -> None:
    said = run_ranks(slow, 2, str(tmp_path))
    assert "waited for them longer than 0:00:03" in said[0]
    assert "checkpoint_io.timeout" in said[0]
    assert "rank 1 lost the others" in said[1]
    assert not (tmp_path / "x").exists()


def unlike(rank: int, root: str) -> str:
    """Rank 1 has a state that cannot be written, and the ranks differ in what they hold."""
    backend = io()
    state = plain()
    if rank == 1:
        state["state_dict"]["only on 1"] = torch.ones(2)
    backend.submit_shards(state, Path(root, "unlike"), lambda hashes: None, names=NAMES)
    if rank == 1:
        state["optimizer_states"][0]["state"][0] = {3: 4}
    try:
        backend.submit_shards(state, Path(root, "no"), lambda hashes: None, names=NAMES)
    except CheckpointError as error:
        return error.block()
    return ""


def test_ranks_that_hold_different_things_write_all_of_them_or_say_so(two_ranks: Two) -> None:
    folder, made = two_ranks
    said = [one["unlike"] for one in made]
    assert said[0] == said[1]
    assert "rank 1: the state of an optimizer has the key 3" in said[0]
    found = io().load_checkpoint(folder / "unlike")
    assert torch.equal(found["state_dict"].pop("only on 1"), torch.ones(2))
    assert equal(found, plain())


# -- what it is


def test_the_protocols_are_kept() -> None:
    assert isinstance(io(), ShardedSaves)
    files = TorchFileCheckpointIO(TorchCheckpointIOConfig())
    for backend in (io(), files, AsyncFileCheckpointIO(files)):
        assert isinstance(backend, ShardedLoads)
    assert not isinstance(files, ShardedSaves)


def test_fabric_is_told_what_to_take_instead() -> None:
    context = BuildContext(minimal_resolution(PluginManager()), {}, PluginManager(), "fabric")
    with pytest.raises(ConfigError, match="works with the Trainer only"):
        build(DistributedCheckpointIOConfig(), context)
