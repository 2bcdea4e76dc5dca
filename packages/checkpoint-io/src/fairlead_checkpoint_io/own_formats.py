"""The formats that this package brings, of torch, Lightning, DeepSpeed, Hugging Face, safetensors. No torch here."""

from __future__ import annotations

from pathlib import Path

from fairlead_checkpoint_io.checkpoint_format import CheckpointFormat
from fairlead_checkpoint_io.files.formats import CONTENTS, LEGACY_MAGIC, TRAINER_STATE, is_deepspeed

_COMMANDS = "fairlead_checkpoint_io.commands"


def _head(path: Path) -> bytes:
    if path.is_dir():
        return b""
    with path.open("rb") as file:
        return file.read(len(LEGACY_MAGIC))


def _is_torch(path: Path) -> bool:
    return _head(path).startswith((b"PK", LEGACY_MAGIC))


def _is_safetensors(path: Path) -> bool:
    head = _head(path)
    size = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and (size <= path.stat().st_size or path.suffix == ".safetensors")


def _is_distributed(path: Path) -> bool:
    return (path / CONTENTS).exists()


torch_file = CheckpointFormat(
    "torch",
    _is_torch,
    read=f"{_COMMANDS}.states:read_file",
    write=f"{_COMMANDS}.states:write_file",
    verify=f"{_COMMANDS}.file_checks:verify_archive",
    entries=f"{_COMMANDS}.diff:entries_of_file",
)
distributed = CheckpointFormat(
    "distributed",
    _is_distributed,
    read=f"{_COMMANDS}.states:read_distributed",
    write=f"{_COMMANDS}.states:write_distributed",
    verify=f"{_COMMANDS}.file_checks:verify_shards",
    entries=f"{_COMMANDS}.diff:entries_of_shards",
    folder=True,
)
deepspeed = CheckpointFormat(
    "deepspeed", is_deepspeed, read=f"{_COMMANDS}.deepspeed_folder:read_deepspeed", folder=True
)
safetensors = CheckpointFormat(
    "safetensors",
    _is_safetensors,
    read=f"{_COMMANDS}.states:read_safetensors",
    write=f"{_COMMANDS}.states:write_safetensors",
    verify=f"{_COMMANDS}.file_checks:verify_safetensors",
    weights_only=True,
)
transformers = CheckpointFormat(
    "transformers",
    lambda path: (path / TRAINER_STATE).is_file(),
    read=f"{_COMMANDS}.transformers_folder:read_transformers",
    folder=True,
)
