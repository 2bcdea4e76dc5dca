"""Lets DeepSpeed load a checkpoint that another number of ranks has written, as if this number had.

Nothing is written: where DeepSpeed's engine asks for the file of its rank, it gets what would be in it. A rank maps the
files of the ranks before and reads its own part only, so that all ranks together read a checkpoint about once.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint import constants as key
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Size, Tensor

from fairlead.errors import CheckpointError
from fairlead_strategies.deepspeed.rank_state import CannotRecutError, Move, RankState, each_by_itself, recut
from fairlead_strategies.deepspeed.settings import uses_nvme

_PART: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


@contextlib.contextmanager
def from_other_ranks(engine: DeepSpeedEngine | None, folder: Path, rank: int, world_size: int) -> Iterator[None]:
    """While it is open, `engine.load_checkpoint` loads what any number of ranks wrote.

    Where as many wrote it as there are now, or none has a part of an optimizer, DeepSpeed loads it by itself.

    Args:
        engine: DeepSpeed's engine; None, where no model is set up.
        folder: Where the ranks wrote their files.
        rank: This rank.
        world_size: How many ranks there are now.

    Raises:
        CheckpointError: Something in it cannot be shared by another number of ranks; here, or when it is loaded.
    """
    written = sorted(folder.glob(f"*{key.OPTIM_FILE_SUFFIX}"))
    if engine is None or len(written) in (0, world_size):
        if engine is not None and written:
            _refuse_other_stage(engine, folder)
        yield
        return
    reader, own = _Reader(engine, folder, written, rank, world_size), engine.checkpoint_engine
    engine.checkpoint_engine = reader
    engine._get_all_ckpt_names = lambda *_: [str(reader.model_file(0))]  # a new rank has no file
    try:
        yield
    finally:
        engine.checkpoint_engine = own
        del engine._get_all_ckpt_names


def _refuse_other_stage(engine: DeepSpeedEngine, folder: Path) -> None:
    split: bool = engine.zero_optimization_partition_weights()
    if not model_file(folder, 0, split).is_file() and model_file(folder, 0, not split).is_file():
        raise CheckpointError(
            f"stage {'1 or 2' if split else '3'} of ZeRO wrote DeepSpeed's checkpoint, which this run's cannot read",
            where=str(folder),
            why="stage 3 cuts weights otherwise than the others, and DeepSpeed reads its own way only",
            fix="take the stage that wrote it, or begin with its weights: fairlead checkpoint consolidate",
        )


def model_file(folder: Path, rank: int, split: bool) -> Path:
    """Where a rank wrote all but the optimizer; in stages 1 and 2 (not `split`) the first wrote it for all."""
    return folder / f"{f'zero_pp_rank_{rank}_' if split else ''}mp_rank_00{key.MODEL_FILE_SUFFIX}"


class _Reader:
    """Replaces DeepSpeed's `CheckpointEngine`: reads what this rank would have written."""

    def __init__(
        self, engine: DeepSpeedEngine, folder: Path, written: Sequence[Path], rank: int, world_size: int
    ) -> None:
        self._engine, self._own, self._folder = engine, engine.checkpoint_engine, folder
        self._rank, self._world, self._ranks = rank, world_size, len(written)
        self._split: bool = engine.zero_optimization_partition_weights()  # stage 3
        self._mapped: dict[Path, Any] = {}
        self._parts = {int(match[1]): path for path in written if (match := _PART.fullmatch(path.name))}
        if self._parts.keys() != set(range(self._ranks)):
            self._refuse("its files are not one for each rank of ZeRO; model parallelism and experts write others")
        _refuse_other_stage(engine, folder)
        if uses_nvme(engine.config) or (folder / "offloaded_tensors").is_dir():
            self._refuse("what is offloaded to NVMe is saved as files of that disk")
        if self._split and (engine.super_offload() or engine.zero_partial_offload() < 1):
            self._refuse("with super_offload or an offload_optimizer_ratio below 1, not all optimizer state is saved")

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """What this rank would have written under this name; it is called as DeepSpeed's own is."""
        if not path.endswith(key.OPTIM_FILE_SUFFIX):
            return self._model_states()
        try:
            return {key.OPTIMIZER_STATE_DICT: self._optimizer_states()}
        except CannotRecutError as error:
            self._refuse(str(error))

    def model_file(self, rank: int) -> Path:
        """See `model_file`."""
        return model_file(self._folder, rank, self._split)

    def _model_states(self) -> dict[str, Any]:
        """Those of the first rank, with this rank's part of what is frozen."""
        own = self._own or TorchCheckpointEngine()  # without an optimizer it has none, and takes this
        states: dict[str, Any] = own.load(str(self.model_file(0)), map_location="cpu")
        states["dp_world_size"] = self._world  # DeepSpeed compares it
        if self._split and states.get(key.FROZEN_PARAM_FRAGMENTS):
            states[key.FROZEN_PARAM_FRAGMENTS] = self._frozen(states[key.FROZEN_PARAM_SHAPES])
        return states

    def _frozen(self, shapes: Mapping[str, Size]) -> dict[str, Tensor]:
        if self._engine.zero_quantized_nontrainable_weights():
            self._refuse(
                "zero_quantized_nontrainable_weights keeps frozen weights in 8 bits, and no file has their scales"
            )
        names, sizes = list(shapes), [{name: shape.numel()} for name, shape in shapes.items()]
        old, new = each_by_itself(sizes, self._ranks), each_by_itself(sizes, self._world)

        def read(rank: int, number: int) -> Tensor:
            fragment: Tensor = self._map(self.model_file(rank))[key.FROZEN_PARAM_FRAGMENTS][names[number]]
            return fragment

        return {name: Move(self._rank, new[name].part, [(old[name], new[name])]).of(read) for name in names}

    def _optimizer_states(self) -> dict[str, Any]:
        engine, loaded = self._engine, dict[int, RankState]()
        shapes = self._map(self.model_file(0))[key.PARAM_SHAPES]

        def before(rank: int) -> RankState:
            if rank not in loaded:
                saved = self._map(self._parts[rank])[key.OPTIMIZER_STATE_DICT]
                loaded[rank] = RankState(saved, shapes, self._ranks)
            return loaded[rank]

        now = RankState(engine.optimizer.state_dict(), engine._get_zero_param_shapes(), self._world)
        return recut(before, now, self._rank)

    def _map(self, path: Path) -> Any:
        """A file whose tensors are read when they are used; in full, where DeepSpeed wrote no zip file."""
        if path not in self._mapped:
            mapped = zipfile.is_zipfile(path)
            self._mapped[path] = torch.load(path, map_location="cpu", mmap=mapped, weights_only=False)  # as DeepSpeed
        return self._mapped[path]

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(
            f"DeepSpeed's checkpoint is of {self._ranks} ranks, and this run has {self._world}",
            where=str(self._folder),
            why=why,
            fix=f"resume on {self._ranks} ranks, or begin with its weights: fairlead checkpoint consolidate",
        )
