"""`fairlead export`: each format computes what Python does, holds what is known of the model, or says what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from fairlead.cli import main
from fairlead.plugins import PluginManager

JIT: Any = torch.jit  # has no types
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")
ALL = ("torchscript", "torch-export", "onnx", "safetensors")
SUFFIX = {"torchscript": "ts", "torch-export": "pt2", "onnx": "onnx", "safetensors": "safetensors"}
NETS = '''
import lightning.pytorch as L
import torch
from torch import nn


class Plain(nn.Module):
    normalization = {"x": {"mean": torch.tensor([1.0, 2.0, 3.0]), "std": (0.5, 0.5, 0.25)}, "output": {"std": 4}}

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.net(x)


class Several(nn.Module):
    """Two inputs, one of them by name only, one nested, one that is no tensor; outputs in a dict and a tuple."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 4)

    def forward(self, x, side, *, table, twice=False):
        y = self.net(x) * (2 if twice else 1) + side["bias"] @ table
        return {"y": y, "parts": (y[:, :1], None, y.argmax(dim=1)), "unit": "K"}


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x):
        if x.sum() > 4.0:
            return self.net(x)
        return -self.net(x)


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x):
        return self.net(x).view(2, 2)


class Length(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x):
        rows = len(x)
        return self.net(x).reshape(rows, 2)


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, grad):
        return grad


class Roots(nn.Module):
    def forward(self, x):
        return x.sqrt()


class OfPython(nn.Module):
    def forward(self, x):
        return Half.apply(x)


class Attends(nn.Module):
    """torch computes it by one operator without a derivative where no gradient is asked for."""

    def __init__(self):
        super().__init__()
        self.normalization = nn.LayerNorm(8)  # no constants of ours
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.layer(self.normalization(x))


class Draws(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Sharded(L.LightningModule):
    def configure_model(self):
        assert self.trainer.strategy.name == "single_device"
        self.device_mesh["data_parallel"]


class Lit(L.LightningModule):
    """Its validation step calls `forward` directly, or only a part of it."""

    def __init__(self, width=4, part=False):
        super().__init__()
        self.save_hyperparameters()
        self.part = part
        self.width = width

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = torch.compile(nn.Linear(3, self.width), backend="eager")

    def forward(self, values, flag=None):
        return self.net(values).exp()

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(30.0).reshape(10, 3) / 30, batch_size=5)

    def validation_step(self, batch, index):
        self.log("val/loss", (self.net(batch) if self.part else self.forward(batch)).mean())
'''


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a user's module, which is imported once."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "nets.py").write_text(NETS)
    yield folder
    sys.modules.pop("nets", None)


class Nets:
    """The user's classes, and one call of `fairlead export` with them."""

    def __init__(self, folder: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.target, self.capsys = folder, target, capsys
        self.code, self.out, self.err = 0, "", ""

    def make(self, name: str, sample: Any, **state: Any) -> Any:
        """A model with weights of its own, in a checkpoint and with a sample."""
        sys.path.insert(0, str(self.folder))
        try:
            model = getattr(__import__("nets"), name)()
        finally:
            sys.path.remove(str(self.folder))
        torch.manual_seed(3)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
        torch.save({"state_dict": model.state_dict(), "global_step": 7, **state}, self.folder / "last.ckpt")
        torch.save(sample, self.folder / "sample.pt")
        return model.eval()

    def export(self, name: str, to: str, *words: str) -> Any:
        """The document that it prints, if it succeeds."""
        target = self.target / f"model.{SUFFIX[to]}"
        given = ["--model", f"nets:{name}", "--sample", "sample.pt", "--to", to, "-o", str(target), "--json"]
        self.code = main(["export", "last.ckpt", *given, *words], plugins=PluginManager(), environ={}, cwd=self.folder)
        self.out, self.err = self.capsys.readouterr()
        assert target.exists() == (self.code == 0)
        assert len(list(self.target.iterdir())) == (self.code == 0)  # nothing else is left there
        return json.loads(self.out) if self.code == 0 else None

    def line(self, text: str) -> str:
        """Where the user's code says this."""
        lines = NETS.splitlines()
        return f"{self.folder / 'nets.py'}:{next(n for n, line in enumerate(lines, 1) if text in line)}"


@pytest.fixture
def nets(user: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Nets:
    return Nets(user, tmp_path, capsys)


def read(path: Path, names: list[str]) -> tuple[Any, Any]:
    """A file as its own library reads it: a function of tensors in order, and the embedded document."""
    files: dict[str, Any] = {"fairlead.json": ""}
    if path.suffix == ".ts":
        module = JIT.load(str(path), _extra_files=files)
        return module, json.loads(files["fairlead.json"])
    if path.suffix == ".pt2":
        module = torch.export.load(path, extra_files=files).module()
        return module, json.loads(files["fairlead.json"])
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))

    def call(*tensors: Tensor) -> Any:
        found = session.run(None, dict(zip(names, (one.numpy() for one in tensors), strict=True)))
        outputs = tuple(map(torch.from_numpy, found))
        return outputs[0] if len(outputs) == 1 else outputs

    return call, json.loads(session.get_modelmeta().custom_metadata_map["fairlead"])


@pytest.mark.parametrize("to", ALL[:3])
def test_a_file_computes_the_same_at_any_batch_size(nets: Nets, to: str) -> None:
    model = nets.make("Plain", torch.rand(4, 3))
    said = nets.export("Plain", to)
    function, document = read(nets.target / f"model.{SUFFIX[to]}", ["x"])
    for rows in (1, 5):
        x = torch.rand(rows, 3)
        torch.testing.assert_close(function(x), model(x), rtol=1e-5, atol=1e-6)
    assert document["inputs"] == [{"name": "x", "shape": ["batch", 3], "dtype": "float32"}]
    assert document["outputs"] == [{"name": "output", "shape": ["batch", 2], "dtype": "float32"}]
    assert document["normalization"] == {
        "x": {"mean": [1.0, 2.0, 3.0], "std": [0.5, 0.5, 0.25]},
        "output": {"std": 4},
    }
    assert (document["step"], document["model"], document["torch"]) == (7, "nets:Plain", torch.__version__)
    assert said["batches"] == [2, 1, 3]
    assert said["difference"] <= 1e-6


@pytest.mark.parametrize("to", ALL[:3])
def test_several_inputs_and_nested_outputs(nets: Nets, to: str) -> None:
    """In the order of the embedded names; what is no tensor is a constant, and no input has to be a batch."""
    sample = {"x": torch.rand(4, 3), "side": {"bias": torch.rand(4, 5)}, "table": torch.rand(5, 4), "twice": True}
    model = nets.make("Several", sample)
    said = nets.export("Several", to)
    names = ["x", "side.bias", "table"]
    function, document = read(nets.target / f"model.{SUFFIX[to]}", names)
    assert [(one["name"], one["shape"]) for one in document["inputs"]] == [
        ("x", ["batch", 3]),
        ("side.bias", ["batch", 5]),
        ("table", [5, 4]),
    ]
    assert [(one["name"], one["shape"], one["dtype"]) for one in document["outputs"]] == [
        ("y", ["batch", 4], "float32"),
        ("parts.0", ["batch", 1], "float32"),
        ("parts.2", ["batch"], "int64"),
    ]
    x, bias, table = torch.rand(6, 3), torch.rand(6, 5), torch.rand(5, 4)
    wanted = model(x, {"bias": bias}, table=table, twice=True)
    given = function(x, bias, table)
    torch.testing.assert_close(given, (wanted["y"], wanted["parts"][0], wanted["parts"][2]), rtol=1e-5, atol=1e-6)
    assert said["output"] in {"y", "parts.0"}
    assert "unit is a str, not a tensor: the file does not return it" in said["notes"]


def test_safetensors_hold_the_weights_and_the_document(nets: Nets) -> None:
    model = nets.make("Plain", torch.rand(2, 3))
    said = nets.export("Plain", "safetensors")
    with safe_open(nets.target / "model.safetensors", framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        assert json.loads(file.metadata()["fairlead"])["inputs"] == said["inputs"]
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert weights.keys() == model.state_dict().keys()


def test_what_training_wraps_around_a_model_is_removed(nets: Nets) -> None:
    """A script's file of a compiled model in DistributedDataParallel."""
    model = nets.make("Plain", torch.rand(2, 3))
    wrapped = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": wrapped}, nets.folder / "last.ckpt")
    nets.export("Plain", "torchscript")
    module = JIT.load(str(nets.target / "model.ts"))
    assert set(module.state_dict()) == set(model.state_dict())


def test_a_function_may_make_one_module_of_a_checkpoint(nets: Nets) -> None:
    """As a `Run` saves several; their average is one of them."""
    model = nets.make("Plain", torch.rand(2, 3))
    zeros = {f"ema.module.{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}
    both = {f"model.{name}": value for name, value in model.state_dict().items()} | zeros
    torch.save({"state_dict": both | {"ema.n_averaged": torch.tensor(2)}}, nets.folder / "last.ckpt")
    nets.export("Plain", "torchscript")
    x = torch.rand(4, 3)
    torch.testing.assert_close(JIT.load(str(nets.target / "model.ts"))(x), model(x))
    nets.target = nets.target / "average"
    nets.target.mkdir()
    assert nets.export("Plain", "torchscript", "--ema")["average"] == "ema"
    assert not JIT.load(str(nets.target / "model.ts"))(x).any()
    nets.target = nets.target / "another"
    nets.target.mkdir()
    nets.export("Branch", "safetensors")
    assert "name what makes the model that it was written with" in nets.err


def averages(model: torch.nn.Module, kind: str) -> dict[str, Any]:
    """A checkpoint with the model's weights and an average: all ones."""
    ones = {name: torch.ones_like(one) for name, one in model.state_dict().items()}
    average = {"n_averaged": torch.tensor(3), **{f"module.{name}": one for name, one in ones.items()}}
    if kind == "lightning":
        return {"state_dict": ones, "current_model_state": model.state_dict(), "averaging_state": {"n_averaged": 3}}
    if kind == "registered":
        return {"state_dict": model.state_dict(), "ema": average}
    return {"state_dict": model.state_dict(), "callbacks": {"Ema": {"shadow": ones, "decay": 0.9}}}


@pytest.mark.parametrize("kind", ["lightning", "registered", "callback"])
def test_averaged_weights_on_request(nets: Nets, kind: str) -> None:
    model = nets.make("Plain", torch.rand(2, 3))
    torch.save(averages(model, kind), nets.folder / "last.ckpt")
    said = nets.export("Plain", "safetensors", "--ema")
    assert {"lightning": "WeightAveraging", "registered": "ema", "callback": "callbacks.Ema.shadow"}[kind] == (
        said["average"]
    )
    with safe_open(nets.target / "model.safetensors", framework="pt") as file:
        assert all(torch.equal(value, torch.ones_like(value)) for value in map(file.get_tensor, model.state_dict()))


def test_an_average_that_is_not_there_is_an_error(nets: Nets) -> None:
    model = nets.make("Plain", torch.rand(2, 3))
    nets.export("Plain", "safetensors", "--ema")
    assert (nets.code, "the checkpoint has no averaged weights" in nets.err) == (2, True)
    several = {**averages(model, "registered"), **averages(model, "callback")}
    torch.save(several, nets.folder / "last.ckpt")
    nets.export("Plain", "safetensors", "--ema")
    assert "there are: ema, callbacks.Ema.shadow" in nets.err
    assert nets.export("Plain", "safetensors", "--ema", "shadow")["average"] == "callbacks.Ema.shadow"


def test_an_averaged_model_within_the_model() -> None:
    from fairlead_checkpoint_io.export.model import averaged

    weights = {"net.weight": 1, "head.weight": 2, "head.bias": 3, "ema.n_averaged": 4, "ema.module.weight": 5}
    found = averaged({"state_dict": weights}, weights, "", "here")
    assert found == ({**weights, "net.weight": 5}, "ema")


@pytest.mark.parametrize(
    ("to", "name", "text"),
    [
        ("torch-export", "Branch", "if x.sum() > 4.0"),
        ("onnx", "Branch", "if x.sum() > 4.0"),
        ("torchscript", "OfPython", "return Half.apply(x)"),
    ],
)
def test_what_cannot_be_exported_is_named_with_its_line(nets: Nets, to: str, name: str, text: str) -> None:
    nets.make(name, torch.rand(2, 3))
    nets.export(name, to)
    assert nets.code == 2, nets.err
    assert f"the model cannot be exported to {to}" in nets.err
    assert nets.line(text) in nets.err
    assert nets.err.startswith("error: ")  # nothing of the exporter's own


@pytest.mark.parametrize(
    ("name", "what", "text"),
    [
        ("Branch", "does not compute what Python's does", "if x.sum() > 4.0"),
        ("Length", "cannot run a batch of 1", "rows = len(x)"),
    ],
)
def test_a_trace_that_took_a_value_for_constant_is_found(nets: Nets, name: str, what: str, text: str) -> None:
    """One row of the sample is another case than two."""
    nets.make(name, torch.tensor([[2.0, 1.0, 1.0], [2.0, 1.0, 1.0]]))
    nets.export(name, "torchscript")
    assert nets.code == 1, nets.err
    assert what in nets.err
    assert nets.line(text) in nets.err
    fixed = nets.export(name, "torchscript", "--fixed-batch")
    if name == "Length":
        assert fixed["batches"] == []
    else:  # whatever the batch, the sample negated takes the other branch
        assert "where: the sample negated" in nets.err


@pytest.mark.parametrize("to", ALL)
def test_a_model_of_one_batch_size(nets: Nets, to: str) -> None:
    nets.make("Fixed", torch.rand(2, 3))
    nets.export("Fixed", to)
    assert nets.code == 2
    assert "the model cannot run a batch of 3" in nets.err
    assert "in forward\n" in nets.err
    assert "--fixed-batch" in nets.err
    assert nets.export("Fixed", to, "--fixed-batch")["inputs"][0]["shape"] == [2, 3]


def test_names_and_constants_are_given_by_options(nets: Nets) -> None:
    nets.make("Plain", torch.rand(2, 3))
    (nets.folder / "constants.json").write_text('{"temperature": {"mean": 280}}')
    (nets.folder / "nan.json").write_text('{"x": {"mean": NaN}}')
    constants = ("--constants", "constants.json")
    said = nets.export("Plain", "torchscript", "--inputs", "state", "--outputs", "temperature", *constants)
    assert [said["inputs"][0]["name"], said["outputs"][0]["name"]] == ["state", "temperature"]
    assert said["normalization"] == {"temperature": {"mean": 280}}
    for words, told in (
        (constants, "'temperature' is neither an input nor an output"),
        (("--outputs", "a,b"), "--outputs needs 1 name: the model's only output is output"),
        (("--outputs", "x"), "an input and an output are both named 'x'"),
        (("--constants", "nan.json"), "constants must be finite"),
        (("--part", "nett"), "did you mean 'net'?"),
        (("--sample", "nets.py"), "the sample cannot be read"),
    ):
        nets.target = nets.target / "next"
        nets.target.mkdir()
        nets.export("Plain", "torchscript", *words)
        assert (nets.code, told in nets.err) == (2, True), nets.err


@pytest.mark.parametrize("to", ["torchscript", "torch-export"])
def test_an_exported_model_can_be_differentiated(nets: Nets, to: str) -> None:
    model = nets.make("Attends", torch.rand(4, 5, 8))
    nets.export("Attends", to)
    function, _ = read(nets.target / f"model.{SUFFIX[to]}", ["x"])
    x = torch.rand(3, 5, 8, requires_grad=True)
    gradients = [torch.autograd.grad(one(x).square().sum(), x)[0] for one in (function, model)]
    torch.testing.assert_close(*gradients)


def test_values_outside_of_a_models_range_are_not_compared(nets: Nets) -> None:
    nets.make("Roots", torch.rand(2, 3))
    said = nets.export("Roots", "torchscript")
    assert said["notes"] == ["not compared with the sample negated: in Python the outputs are not finite"]


def test_a_model_that_draws_numbers_cannot_be_compared(nets: Nets) -> None:
    nets.make("Draws", torch.rand(2, 3))
    nets.export("Draws", "torchscript")
    assert nets.code == 1
    assert "the model gives other outputs in each call" in nets.err


def test_a_model_that_shards_itself_in_one_process(nets: Nets) -> None:
    nets.make("Sharded", torch.rand(2, 3))
    nets.export("Sharded", "onnx")
    assert nets.code == 2
    assert "configure_model failed, in one process" in nets.err
    assert 'self.device_mesh["data_parallel"]' in nets.err


def test_a_sample_that_forward_does_not_take(nets: Nets) -> None:
    nets.make("Plain", (torch.rand(2, 3), torch.rand(2, 3)))
    nets.export("Plain", "onnx")
    assert nets.code == 2
    assert "forward(x) does not take this sample" in nets.err


def test_a_checkpoint_without_a_class(nets: Nets, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights can be had; for more it takes what makes the model."""
    nets.make("Plain", torch.rand(2, 3))
    words = ("export", "last.ckpt", "-o", str(nets.target / "weights"), "--to")
    calls = [main([*words, to], plugins=PluginManager(), environ={}, cwd=nets.folder) for to in ("onnx", "safetensors")]
    said = capsys.readouterr()
    assert calls == [2, 0]
    assert "--model module:factory" in said.err
    with safe_open(nets.target / "weights", framework="pt") as file:
        assert json.loads(file.metadata()["fairlead"])["step"] == 7


def test_the_sample_is_what_forward_gets_in_validation(nets: Nets) -> None:
    """Of a plain Lightning checkpoint, with its hyperparameters, and layers that a hook makes."""
    weights = {"net.weight": torch.rand(5, 3), "net.bias": torch.rand(5)}
    nets.make("Lit", None, state_dict=weights, hyper_parameters={"width": 5, "part": False, "lr": 0.1})

    def export(*words: str) -> str:
        given = ["--model", "nets:Lit", "--to", "torchscript", "-o", str(nets.target / "lit.ts"), "--overwrite"]
        code = main(["export", "last.ckpt", *given, *words], plugins=PluginManager(), environ={}, cwd=nets.folder)
        out, err = nets.capsys.readouterr()
        return out if code == 0 else err

    assert "input       values [batch, 3] float32\noutput      output [batch, 5] float32" in export()
    x = torch.rand(7, 3)
    wanted = (x @ weights["net.weight"].T + weights["net.bias"]).exp()
    torch.testing.assert_close(JIT.load(str(nets.target / "lit.ts"))(x), wanted)
    nets.make("Lit", None, state_dict=weights, hyper_parameters={"width": 5, "part": True})
    assert "export the part that it calls: --part net" in export()
    assert "input       input [batch, 3] float32" in export("--part", "net")
    torch.testing.assert_close(JIT.load(str(nets.target / "lit.ts"))(x), wanted.log())
