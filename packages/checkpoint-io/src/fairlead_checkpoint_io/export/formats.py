"""The formats of `fairlead export`: how each is written, read back, run and compared with Python."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fairlead.errors import ConfigError, FairleadError, RunFailedError, UserCodeError
from fairlead.user_code import CodeRoot, user_frames
from fairlead_checkpoint_io.commands.states import read_safetensors, write_weights
from fairlead_checkpoint_io.export.interface import Interface, listed
from fairlead_checkpoint_io.export.model import silent

KEY: Final = "fairlead"
"""The metadata of ONNX and safetensors with what is known of the model."""
DOCUMENT: Final = f"{KEY}.json"
"""The same as an extra file in TorchScript and torch.export."""
_ONNX_BYTES: Final = 2**31 - 2**20
_SHOWN: Final = 3
_PLACES: Final = re.compile(r'File "([^"]+\.py)", line (\d+)|(\S+\.py)\((\d+)\)|\((\S+\.py):(\d+) in ')
"""How the messages of torch quote a line."""

_JIT: Final[Any] = torch.jit  # has no types

Loaded = Callable[[Sequence[Tensor]], list[Tensor]]
"""An exported file, read back: from the inputs to the outputs, in their order."""


@dataclass
class Export:
    """One model on its way into a file; `document` is what is embedded, `notes` what a tracer has warned of."""

    interface: Interface
    document: str
    root: CodeRoot
    to: str
    notes: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Writes the file; `UserCodeError` where the model cannot be exported, with the line."""
        try:
            self._noted(lambda: _FORMATS[self.to][0](self, path))
        except FairleadError:
            raise
        except Exception as error:  # an exporter raises whatever the model's code, or its own, has met
            raise self._refused(error) from error

    def _noted(self, write: Callable[[], object]) -> None:
        """Calls an exporter, keeps what a tracer warns of, and prints nothing else."""
        with silent() as caught:
            write()
        of_a_trace = [one for one in caught if issubclass(one.category, torch.jit.TracerWarning)]
        warnings_of_trace = (f"{one.filename}:{one.lineno}: {str(one.message).split('. ')[0]}" for one in of_a_trace)
        self.notes += dict.fromkeys(warnings_of_trace)

    def read(self, path: Path) -> tuple[Loaded, str]:
        """The file as a function, and the document in it."""
        with silent():
            return _FORMATS[self.to][1](self, path)

    def _refused(self, error: Exception) -> UserCodeError:
        cause: BaseException = error
        text = str(error)
        while cause.__cause__ is not None:
            cause = cause.__cause__
            text += f"\n{cause}"
        lines = [line.rstrip() for line in str(cause).splitlines() if line.strip()] or [""]
        return UserCodeError(
            f"the model cannot be exported to {self.to}",
            where=self._location(cause, text),
            why="\n".join([f"{type(cause).__name__}: {lines[0]}", *lines[1:_SHOWN]]),
            fix="change that line, export a part without it (--part NAME), or use another format; --fixed-batch where "
            "the batch size is a constant",
        )

    def _location(self, error: BaseException, text: str) -> str | None:
        """The user's line that an exporter was at: of the traceback, or what its message quotes."""
        frame = user_frames(error, self.root)[-1:]
        if frame and self.is_users(frame[0].filename):
            return f"{frame[0].filename}:{frame[0].lineno}, in {frame[0].name}: {frame[0].line}"
        quoted = [[part for part in at if part] for at in _PLACES.findall(text)]
        return next((f"{file}:{line}" for file, line in reversed(quoted) if self.is_users(file)), None)

    def is_users(self, file: str) -> bool:
        """Whether a file is the user's own code."""
        return "site-packages" not in file and any(Path(file).is_relative_to(one) for one in self.root.folders)


def _traced(export: Export) -> Any:
    """Not under `no_grad`: torch would take operators that have no derivative."""
    sample = tuple(export.interface.sample)
    return _JIT.trace(export.interface.module, sample, strict=False, check_trace=False)


def _write_torchscript(export: Export, path: Path) -> None:
    _JIT.save(_traced(export), str(path), _extra_files={DOCUMENT: export.document})


def _read_torchscript(export: Export, path: Path) -> tuple[Loaded, str]:
    files: dict[str, Any] = {DOCUMENT: ""}
    module = _JIT.load(str(path), map_location="cpu", _extra_files=files)
    return lambda inputs: listed(module(*inputs)), _text(files[DOCUMENT])


def _program(export: Export) -> torch.export.ExportedProgram:
    """The model by torch.export, for any batch size."""
    interface = export.interface
    batch = torch.export.Dim("batch", min=1)
    shapes: Any = tuple({0: batch} if has else None for has in interface.batched)
    return torch.export.export(
        interface.module,
        tuple(interface.sample),
        dynamic_shapes=shapes if any(interface.batched) else None,
    )


def _write_program(export: Export, path: Path) -> None:
    torch.export.save(_program(export), str(path), extra_files={DOCUMENT: export.document})


def _read_program(export: Export, path: Path) -> tuple[Loaded, str]:
    files: dict[str, Any] = {DOCUMENT: ""}
    module = torch.export.load(str(path), extra_files=files).module()
    return lambda inputs: listed(module(*inputs)), _text(files[DOCUMENT])


def _write_onnx(export: Export, path: Path) -> None:
    size = sum(one.nbytes for one in export.interface.module.state_dict().values())
    if size > _ONNX_BYTES:
        raise ConfigError(
            f"an ONNX file holds 2 GiB at most, and the weights have {size / 2**30:.1f}",
            where="--to onnx",
            fix="export a part (--part NAME), or use --to torch-export",
        )
    made: Any = torch.onnx.export(
        _program(export),
        dynamo=True,
        verbose=False,
        input_names=[one.name for one in export.interface.inputs],
        output_names=[one.name for one in export.interface.outputs],
    )
    made.model.metadata_props[KEY] = export.document
    made.save(str(path), external_data=False)


def _read_onnx(export: Export, path: Path) -> tuple[Loaded, str]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in export.interface.inputs]
    known = {one.name for one in session.get_inputs()}  # without those that nothing depends on

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        given = {name: one.numpy() for name, one in zip(names, inputs, strict=True) if name in known}
        return [torch.from_numpy(one) for one in session.run(None, given)]

    return run, session.get_modelmeta().custom_metadata_map[KEY]


def _write_safetensors(export: Export, path: Path) -> None:
    write_weights(export.interface.part.state_dict(), path, {KEY: export.document})


def _read_safetensors(export: Export, path: Path) -> tuple[Loaded, str]:
    from safetensors import safe_open

    module = export.interface.part
    module.load_state_dict(read_safetensors(path)["state_dict"])
    with safe_open(path, framework="pt") as file:
        return export.interface.run, file.metadata()[KEY]


def _text(content: str | bytes) -> str:
    return content.decode() if isinstance(content, bytes) else content


_FORMATS: Final[dict[str, tuple[Callable[[Export, Path], None], Callable[[Export, Path], tuple[Loaded, str]]]]] = {
    "torchscript": (_write_torchscript, _read_torchscript),
    "torch-export": (_write_program, _read_program),
    "onnx": (_write_onnx, _read_onnx),
    "safetensors": (_write_safetensors, _read_safetensors),
}


# -- what a file computes


def compare(export: Export, path: Path, tolerance: float) -> dict[str, Any]:
    """The largest difference from Python's outputs, of which output it is, and the batches that were tried.

    `RunFailedError`: it is above `tolerance` times the output's largest value (or 1), or the file cannot run a batch.
    """
    interface = export.interface
    batches = (2, 1, 3) if any(interface.batched) else ()
    inputs = [(f"a batch of {rows}", interface.sample_of(rows)) for rows in batches]
    inputs = inputs or [("the sample", interface.sample)]
    expected = [interface.run(one) for _, one in inputs]  # before a file of weights is loaded into the model
    for one, other in zip(interface.run(inputs[0][1]), expected[0], strict=True):
        if _difference(one, other)[0] > tolerance:
            what = "the model gives other outputs in each call, in Python: nothing can be compared"
            raise RunFailedError(what, where="forward", fix="have it draw no random numbers in evaluation mode")
    left_out = list(interface.left_out)
    for what, given in interface.others():
        try:
            wanted = interface.run(given)
        except Exception as error:  # the user's model may refuse such values, in Python too
            left_out.append(f"not compared with {what}: in Python the model raises {type(error).__name__}")
            continue
        if all(one.isfinite().all() for one in wanted):
            inputs.append((what, given))
            expected.append(wanted)
        else:  # formats differ in what they make of NaN
            left_out.append(f"not compared with {what}: in Python the outputs are not finite")
    function, document = export.read(path)
    if document != export.document:
        raise RunFailedError("the file does not hold what was embedded", where=str(path))
    largest, name = 0.0, interface.outputs[0].name
    for (where, given), wanted in zip(inputs, expected, strict=True):
        try:
            with torch.no_grad():
                found = function(given)
        except Exception as error:  # onnxruntime and TorchScript raise their own errors
            why = str(error).strip().splitlines()[-1]
            raise _refused(export, f"the exported model cannot run {where}", where, why) from error
        for value, one, other in zip(interface.outputs, found, wanted, strict=True):
            if one.shape != other.shape or one.dtype != other.dtype:
                why = f"{value.name}: {list(one.shape)} {one.dtype}, in Python {list(other.shape)} {other.dtype}"
                raise _refused(export, "the exported model gives another shape or dtype than Python's", where, why)
            difference, scale = _difference(one, other)
            if difference > tolerance * scale:
                why = f"{value.name} differs by {difference:.3g}; allowed: {tolerance:g} of {scale:.3g}"
                raise _refused(export, "the exported model does not compute what Python's does", where, why)
            if difference > largest:
                largest, name = difference, value.name
    notes = [note for note in export.notes if export.is_users(note.partition(":")[0])]
    if others := [note for note in export.notes if note not in notes]:
        notes.append(f"the same at {len(others)} lines of libraries, the first is {others[0]}")
    notes += left_out
    return {"difference": largest, "output": name, "batches": list(batches), "notes": notes}


def _difference(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The largest absolute difference, and the largest absolute value if that is above 1; equal NaNs are equal."""
    if not one.numel():
        return 0.0, 1.0
    wide = torch.complex128 if other.is_complex() else torch.float64
    one, other = one.detach().to(wide), other.detach().to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf)
    return float(apart.max()), max(1.0, float(other.abs().nan_to_num(nan=0.0, posinf=0.0).max()))


def _refused(export: Export, what: str, where: str, why: str) -> RunFailedError:
    if export.notes:
        why = "\n".join([why, "the trace may have taken for a constant:", *export.notes])
    fix = "--to torch-export refuses what depends on values or on the batch size, with its line; change that, or use "
    return RunFailedError(what, where=where, why=why, fix=f"{fix}--fixed-batch; if it is rounding: --tolerance")
