"""Predictions as a Parquet file, for whoever reads them without torch."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fairlead.errors import ConfigError, MissingDependencyError

_GROUP: Final = 8192
"""Samples in a row group, which is what is in memory at a time."""
_SINGLE: Final = "prediction"


def write_parquet(loaders: Sequence[Iterable[tuple[int, Any]]], path: Path) -> None:
    """Writes (index, record) of each loader; see `Predictions.to_parquet`."""
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingDependencyError(
            "to_parquet needs the package pyarrow, which is not installed", why=str(error), fix="pip install pyarrow"
        ) from error
    writer: Any = None
    part = path.with_name(f".{path.name}.part")
    try:
        for rows in _groups(loaders):
            try:
                plain = [{name: _cell(value) for name, value in row.items()} for row in rows]
                if writer is None:
                    writer = parquet.ParquetWriter(part, _schema(arrow, rows, plain))
                writer.write_table(arrow.Table.from_pylist(plain, schema=writer.schema))
            except (arrow.ArrowInvalid, arrow.ArrowTypeError, arrow.ArrowNotImplementedError) as error:
                raise ConfigError(
                    "these predictions do not fit into a Parquet file",
                    where=str(path),
                    why=str(error),
                    fix="records of the same kind for all samples, or read them with Predictions",
                ) from error
        if writer is None:
            parquet.write_table(arrow.table({"index": arrow.array([], arrow.int64())}), part)
        else:
            writer.close()
        part.replace(path)
    finally:
        if writer is not None:
            writer.close()
        part.unlink(missing_ok=True)


def _schema(arrow: Any, rows: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> Any:
    """The columns of the first sample; a tensor keeps its dtype, which a list of Python's numbers has not."""
    types = {name: _type(arrow, value) for name, value in rows[0].items()}
    return arrow.schema(
        [
            (name, found if found is not None else arrow.infer_type([row.get(name) for row in plain]))
            for name, found in types.items()
        ]
    )


def _type(arrow: Any, value: Any) -> Any:
    """The type of a tensor's or an array's cells; None: of something else."""
    if isinstance(value, Tensor):
        value = _known(value).cpu().numpy()
    if not (hasattr(value, "dtype") and hasattr(value, "ndim")) or value.dtype.kind not in "biuf":
        return None
    found = arrow.from_numpy_dtype(value.dtype)
    for _ in range(value.ndim):
        found = arrow.list_(found)
    return found


def _known(value: Tensor) -> Tensor:
    """Numbers that Parquet has, too: of eight and sixteen bits, and complex ones, it has none."""
    value = value.float() if value.dtype.is_floating_point and value.dtype.itemsize < 4 else value
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _groups(loaders: Sequence[Iterable[tuple[int, Any]]]) -> Iterator[list[dict[str, Any]]]:
    rows = (
        {**({"loader": number} if len(loaders) > 1 else {}), "index": index, **dict(_cells(record, ""))}
        for number, loader in enumerate(loaders)
        for index, record in loader
    )
    while group := list(itertools.islice(rows, _GROUP)):
        yield group


def _cells(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    named = getattr(value, "_asdict", None)
    if callable(named):
        value = named()
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor):
        value = vars(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _cells(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from _cells(item, f"{path}.{number}" if path else str(number))
    else:
        yield path or _SINGLE, value


def _cell(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _known(value).tolist()
    if isinstance(value, list):
        return [_cell(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
