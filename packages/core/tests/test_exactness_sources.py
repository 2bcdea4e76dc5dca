"""What the sources say of an exact resume: every kind of loader, and nothing inexact is ever called exact. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from fairlead.config import JobConfig
from fairlead.exactness import Reading, Verdict, source_reasons, verdict
from fairlead.user_code import code_root

HEAD = '''
import random
import lightning.pytorch as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

class Noisy(Dataset):
    """Draws from the global generators, which the trainer seeds or restores."""
    def __init__(self, n=8): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return torch.randn(4) + np.random.rand() + random.random()

class Stream(IterableDataset):
    def __iter__(self): yield torch.zeros(4)
class Tracked(Stream):
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
class Bare(Sampler):
    def __iter__(self): return iter(range(8))
class Kept(Bare):
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
'''

Read = Callable[..., Reading]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads a job whose module `app` is `HEAD` and what is given."""

    def _read(
        source: str,
        *,
        files: Mapping[str, str] | None = None,
        data: str | None = "app:Data",
        args: Mapping[str, Any] | None = None,
        model: str = "app:Net",
        callbacks: list[Any] | None = None,
        ranks: int = 1,
        **trainer: Any,
    ) -> Reading:
        for name, text in {"app.py": HEAD + dedent(source), **(files or {})}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(dedent(text) if name != "app.py" else text)
        given: dict[str, Any] = {"model": model, "trainer": {**trainer, "callbacks": callbacks or []}}
        if data is not None:
            given["data"] = {"class": data, "args": dict(args or {})}
        root = code_root(None, code=None, cwd=tmp_path, sys_path=[])
        return source_reasons(JobConfig.model_validate(given), root, ranks=ranks)

    return _read


def data(loader: str, *, setup: str = "pass", more: str = "", before: str = "") -> str:
    """A datamodule with this `train_dataloader`."""
    init = "def __init__(self, n=8, **options):\n    super().__init__()\n    self.n = n\n    self.options = options\n"
    methods = [
        init,
        f"def setup(self, stage=None):\n{indent(dedent(setup).strip(), '    ')}\n",
        f"def train_dataloader(self):\n{indent(dedent(loader).strip(), '    ')}\n",
        dedent(more),
    ]
    return f"{dedent(before)}\nclass Data(L.LightningDataModule):\n{indent(chr(10).join(methods), '    ')}\n"


PLAIN = data("return DataLoader(Noisy(), batch_size=2, shuffle=True)")

LOADERS: list[tuple[str, Verdict, str]] = [
    ("a plain loader", "exact", PLAIN),
    ("workers and random augmentation", "exact", data("return DataLoader(Noisy(), 2, num_workers=2)")),
    ("made in setup", "exact", data("return self.loader", setup="self.loader = DataLoader(Noisy(self.n), 2)")),
    (
        "a seeded split",
        "exact",
        data(
            "return DataLoader(self.train, 2)",
            setup="""
            parts = torch.utils.data.random_split(Noisy(), [6, 2], generator=torch.Generator().manual_seed(3))
            self.train, self.val = parts
            """,
        ),
    ),
    (
        "a dataset that replaces itself",
        "exact",
        data("return DataLoader(self.d, 2)", setup="self.d = Noisy()\nself.d = Subset(self.d, range(4))"),
    ),
    ("a tensor", "exact", data("return DataLoader(TensorDataset(torch.randn(8, 4)), 2)")),
    ("a list", "exact", data("return DataLoader([1, 2, 3], 2)")),
    ("two datasets", "exact", data("return DataLoader(Noisy() + Noisy(), 2)")),
    ("several loaders", "exact", data("return [DataLoader(Noisy(), 2) for _ in range(3)]")),
    ("a batch size from the hyperparameters", "exact", data("return DataLoader(Noisy(), batch_size=self.hparams.n)")),
    # Streams.
    ("an IterableDataset", "not exact", data("return DataLoader(Stream(), 2)")),
    ("in one branch only", "not exact", data("d = Stream() if self.n > 3 else Noisy()\nreturn DataLoader(d, 2)")),
    (
        "in one case only",
        "not exact",
        data("match self.n:\n    case 1: d = Noisy()\n    case _: d = Stream()\nreturn DataLoader(d, 2)"),
    ),
    (
        "in a property",
        "not exact",
        data("return DataLoader(self.d, 2)", more="@property\ndef d(self): return Stream()"),
    ),
    (
        "inside another dataset",
        "not exact",
        data("return DataLoader(torch.utils.data.ConcatDataset([Noisy(), Stream()]), 2)"),
    ),
    (
        "in one of two loaders",
        "not exact",
        data("return {'a': DataLoader(Noisy(), 2), 'b': DataLoader(Stream(), 2)}"),
    ),
    (
        "in a combined loader",
        "not exact",
        data(
            "from lightning.pytorch.utilities import CombinedLoader\n"
            "return CombinedLoader([DataLoader(Noisy(), 2), DataLoader(Stream(), 2)], 'min_size')"
        ),
    ),
    ("by a walrus", "not exact", data("return (loader := DataLoader(Stream(), 2))")),
    ("by *args", "not exact", data("given = (Stream(), 2)\nreturn DataLoader(*given)")),
    ("in a loop", "not exact", data("for d in (Noisy(), Stream()):\n    loader = DataLoader(d, 2)\nreturn loader")),
    (
        "appended",
        "not exact",
        data("loaders = []\nfor _ in [1, 2]:\n    loaders.append(DataLoader(Stream(), 2))\nreturn loaders"),
    ),
    # Samplers.
    ("torch's samplers", "exact", data("return DataLoader(Noisy(), 2, sampler=RandomSampler(Noisy()))")),
    (
        "torch's, by another name",
        "exact",
        data(
            "from torch.utils.data.sampler import WeightedRandomSampler as W\n"
            "return DataLoader(Noisy(), 2, sampler=W([1., 2.], 8))"
        ),
    ),
    (
        "torch's BatchSampler",
        "exact",
        data(
            "return DataLoader(Noisy(), batch_sampler=torch.utils.data.BatchSampler(RandomSampler(Noisy()), 2, True))"
        ),
    ),
    ("a sampler without a state", "not exact", data("return DataLoader(Noisy(), 2, sampler=Bare())")),
    ("a sampler with a state", "exact", data("return DataLoader(Noisy(), 2, sampler=Kept())")),
    ("a batch sampler without a state", "not exact", data("return DataLoader(Noisy(), batch_sampler=Bare())")),
    ("a batch sampler with a state", "exact", data("return DataLoader(Noisy(), batch_sampler=Kept())")),
    ("under an alias", "not exact", data("return DataLoader(Noisy(), 2, sampler=Order())", before="Order = Bare")),
    (
        "derived from DistributedSampler",
        "not exact",
        data(
            "return DataLoader(Noisy(), 2, sampler=Mine(Noisy()))",
            before="""
            from torch.utils.data.distributed import DistributedSampler
            class Mine(DistributedSampler):
                def __iter__(self): return iter([1])
            """,
        ),
    ),
    # Arguments of the loader.
    ("a mapping of options", "exact", data("kw = dict(batch_size=2, shuffle=True)\nreturn DataLoader(Noisy(), **kw)")),
    (
        "an option that is added",
        "not exact",
        data("kw = {'batch_size': 2}\nif self.n:\n    kw['sampler'] = Bare()\nreturn DataLoader(Noisy(), **kw)"),
    ),
    (
        "an option that is updated",
        "not exact",
        data("kw = {'batch_size': 2}\nkw.update(sampler=Bare())\nreturn DataLoader(Noisy(), **kw)"),
    ),
    ("options from the job", "exact", data("return DataLoader(Noisy(), **self.options)")),
    ("options that are computed", "not known", data("return DataLoader(Noisy(), **read_options())")),
    ("no batches", "not exact", data("return DataLoader(Noisy(), batch_size=None)")),
    ("batches out of order", "not exact", data("return DataLoader(Noisy(), 2, num_workers=2, in_order=False)")),
    # What is no DataLoader of torch's.
    (
        "a StatefulDataLoader",
        "exact",
        data("from torchdata.stateful_dataloader import StatefulDataLoader as S\nreturn S(Tracked(), 2)"),
    ),
    (
        "a StatefulDataLoader over a stream without a state",
        "not known",
        data("from torchdata.stateful_dataloader import StatefulDataLoader\nreturn StatefulDataLoader(Stream(), 2)"),
    ),
    (
        "a StatefulDataLoader whose workers draw random numbers",
        "not known",
        data(
            "from torchdata.stateful_dataloader import StatefulDataLoader\n"
            "return StatefulDataLoader(Noisy(), 2, num_workers=2)"
        ),
    ),
    (
        "one of two classes, as installed",
        "not known",
        data(
            "return Loader(Noisy(), 2, num_workers=1)",
            before="""
            try:
                from torchdata.stateful_dataloader import StatefulDataLoader as Loader
            except ImportError:
                from torch.utils.data import DataLoader as Loader
            """,
        ),
    ),
    ("a loader of a package", "not known", data("import webdataset\nreturn webdataset.WebLoader('x').batched(2)")),
    (
        "another DataLoader of the same name",
        "not known",
        data("from torch_geometric.loader import DataLoader\nreturn DataLoader(Noisy(), 2)"),
    ),
    ("a generator", "not exact", data("yield torch.zeros(3)")),
    ("islice", "not exact", data("import itertools\nreturn itertools.islice(DataLoader(Noisy(), 2), 5)")),
    ("a subclass", "exact", data("return Mine(Noisy(), 2)", before="class Mine(DataLoader): pass")),
    (
        "a subclass with an __init__",
        "not exact",
        data(
            "return Mine(Stream())",
            before="class Mine(DataLoader):\n    def __init__(self, d): super().__init__(d, batch_size=2)",
        ),
    ),
    (
        "a subclass that iterates in its own way",
        "not known",
        data("return Mine(Noisy(), 2)", before="class Mine(DataLoader):\n    def __iter__(self): yield 1"),
    ),
    (
        "a loader of one's own",
        "not exact",
        data("return Mine()", before="class Mine:\n    def __iter__(self): yield 1"),
    ),
    (
        "a loader of one's own with a state",
        "exact",
        data(
            "return Mine()",
            before="""
            class Mine:
                def __iter__(self): yield 1
                def state_dict(self): return {}
                def load_state_dict(self, state): pass
            """,
        ),
    ),
    ("None", "not known", data("return None")),
    # Ways to make one.
    ("a lambda", "exact", data("make = lambda d: DataLoader(d, 2)\nreturn make(Noisy())")),
    ("a lambda over a stream", "not exact", data("make = lambda d: DataLoader(d, 2)\nreturn make(Stream())")),
    (
        "one function, called twice",
        "not exact",
        data(
            "return [build(Noisy()), build(Stream())]",
            before="def build(d, **kw):\n    return DataLoader(d, batch_size=2, **kw)",
        ),
    ),
    (
        "a method",
        "exact",
        data("return self._make(Noisy(), True)", more="def _make(self, d, s): return DataLoader(d, 2, shuffle=s)"),
    ),
    (
        "a partial",
        "not exact",
        data("from functools import partial\nreturn partial(DataLoader, batch_size=2, sampler=Bare())(Noisy())"),
    ),
    (
        "getattr",
        "not exact",
        data("return getattr(self, 'make')()", more="def make(self): return DataLoader(Stream(), 2)"),
    ),
    ("getattr of a computed name", "not known", data("return getattr(self, f'make_{self.n}')()")),
    ("eval", "not known", data("return eval('DataLoader')(Noisy())")),
    ("importlib", "not known", data("import importlib\nreturn importlib.import_module('x').make()")),
    ("a class made by type()", "not known", data("return DataLoader(type('X', (Stream,), {})(), 2)")),
    ("a pickle", "not known", data("import pickle\nreturn DataLoader(pickle.load(open('x', 'rb')), 2)")),
    ("torch.load", "not known", data("return DataLoader(torch.load('x'), 2)")),
    (
        "a dataset of a package",
        "not known",
        data("from datasets import load_dataset\nreturn DataLoader(load_dataset('x'), 2)"),
    ),
    ("a dataset that is nowhere set", "not known", data("return DataLoader(self.d, 2)", setup="self.d = None")),
    ("setattr", "not known", data("return self.d", setup="setattr(self, 'd', DataLoader(Stream(), 2))")),
    (
        "a decorator of one's own",
        "not known",
        data("return make()", before="def deco(f): return f\n@deco\ndef make(): return DataLoader(Noisy(), 2)"),
    ),
    ("a decorated class", "not known", data("return DataLoader(Noisy(), 2)", before="def deco(c): return c\n@deco")),
    (
        "a name that a function sets",
        "not known",
        data(
            "return DataLoader(Noisy(), 2, sampler=order)",
            before="order = None\ndef choose():\n    global order\n    order = Bare()",
        ),
    ),
    (
        "an attribute that is set from outside",
        "not known",
        data("return DataLoader(Noisy(), 2, sampler=self.order)", setup="self.order = None").replace("Data(", "Inner(")
        + "def Data():\n    made = Inner()\n    made.order = Bare()\n    return made\n",
    ),
    ("no end", "not known", data("return self.again(1)", more="def again(self, k): return self.again(k + 1)")),
    ("asynchronous", "not known", data("return 1").replace("def train_data", "async def train_data")),
    (
        "an overridden method of a base class",
        "not exact",
        """
        class Base(L.LightningDataModule):
            def train_dataloader(self): return DataLoader(self.make(), 2)
            def make(self): return Noisy()
        class Data(Base):
            def make(self): return Stream()
        """,
    ),
    (
        "super()",
        "not exact",
        """
        class Base(L.LightningDataModule):
            def train_dataloader(self): return DataLoader(Stream(), 2)
        class Data(Base):
            def train_dataloader(self): return super().train_dataloader()
        """,
    ),
    ("no train_dataloader", "not known", "class Data(L.LightningDataModule): pass"),
    (
        "a base class of a package",
        "not known",
        "import nowhere\n" + PLAIN.replace("L.LightningDataModule", "nowhere.Data"),
    ),
    # Other loaders than that of the training.
    ("a stream in the validation", "exact", PLAIN + "    def val_dataloader(self): return DataLoader(Stream(), 2)"),
    ("a stream in the test", "exact", PLAIN + "    def test_dataloader(self): return DataLoader(Stream(), 2)"),
    (
        "a validation that cannot be followed",
        "not known",
        PLAIN + "    def val_dataloader(self): return nowhere.make()",
    ),
    (
        "a generator that goes on through validations",
        "not known",
        PLAIN
        + "    def val_dataloader(self): return DataLoader(Noisy(), 2, shuffle=True, generator=torch.Generator())",
    ),
]


@pytest.mark.parametrize(("expected", "source"), [case[1:] for case in LOADERS], ids=[case[0] for case in LOADERS])
def test_every_kind_of_loader(read: Read, expected: Verdict, source: str) -> None:
    """Issue 3: exact, not exact or not known, from the sources alone."""
    reading = read(source)
    assert verdict(reading.reasons) == expected, reading.reasons
    assert all(reason.what and reason.why and reason.fix for reason in reading.reasons)


def dataset(body: str, before: str = "") -> str:
    """A datamodule over a dataset with this body."""
    made = f"{dedent(before)}\nclass Own(Noisy):\n{indent(dedent(body).strip(), '    ')}\n"
    return data("return DataLoader(Own(), 2)", before=made)


RANDOMNESS: list[tuple[str, Verdict, str]] = [
    ("a generator of NumPy's on self", "not exact", dataset("def __init__(self): self.rng = np.random.default_rng(0)")),
    ("of Python's", "not exact", dataset("def __init__(self): self.rng = R(0)", "from random import Random as R")),
    (
        "of torch's",
        "not exact",
        dataset("def __init__(self):\n    g = torch.Generator()\n    g.manual_seed(0)\n    self.g = g"),
    ),
    ("where none is given", "not exact", dataset("def __init__(self, rng=None): self.rng = rng or random.Random(0)")),
    ("in the class body", "not exact", dataset("rng = random.Random(0)")),
    ("of the module", "not exact", dataset("def __getitem__(self, i): return RNG.random()", "RNG = random.Random(0)")),
    ("in a default", "not exact", dataset("def __getitem__(self, i, rng=random.Random(1)): return rng.random()")),
    (
        "in a cached property",
        "not exact",
        dataset(
            "@cached_property\ndef rng(self): return random.Random(0)\ndef __getitem__(self, i): return self.rng",
            "from functools import cached_property",
        ),
    ),
    (
        "made by a helper and kept",
        "not exact",
        dataset("def __init__(self): self.rng = make(1)", "def make(i): return np.random.default_rng((1, i))"),
    ),
    (
        "in a transform",
        "not exact",
        dataset(
            "transform = Turn()",
            "class Turn:\n    def __init__(self): self.rng = random.Random(0)\n    def __call__(self, x): return x",
        ),
    ),
    (
        "in a collate function",
        "not exact",
        data(
            "return DataLoader(Noisy(), 2, collate_fn=Join())",
            before="class Join:\n    def __init__(self): self.rng = random.Random(0)\n    def __call__(self, b): pass",
        ),
    ),
    (
        "in a closure",
        "not known",
        data("rng = random.Random(1)\nreturn DataLoader(Noisy(), 2, collate_fn=lambda b: rng.shuffle(b))"),
    ),
    (
        "put into the workers' datasets",
        "not exact",
        data(
            "return DataLoader(Noisy(), 2, worker_init_fn=begin)",
            before="""
            def begin(number):
                torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(number)
            """,
        ),
    ),
    (
        "given to an object",
        "not known",
        data(
            "return DataLoader(Noisy(), 2, collate_fn=Join(np.random.default_rng(0)))",
            before="class Join:\n    def __init__(self, rng): self.rng = rng",
        ),
    ),
    (
        "the factory of a field",
        "not known",
        dataset(
            "rng: object = field(default_factory=np.random.default_rng)",
            "from dataclasses import dataclass, field\n@dataclass",
        ).replace("@dataclass\n\nclass", "@dataclass\nclass"),
    ),
    ("without a seed", "not exact", dataset("def __getitem__(self, i): return np.random.default_rng().random()")),
    ("the system's", "not exact", dataset("def __getitem__(self, i): return random.SystemRandom().random()")),
    (
        "global, seeded by the system",
        "not exact",
        dataset("def __getitem__(self, i):\n    np.random.seed()\n    return i"),
    ),
    (
        "for one sample",
        "exact",
        dataset(
            """
            def __getitem__(self, i):
                rng = np.random.default_rng(i)
                return self.turn(torch.ones(3), rng)
            def turn(self, x, rng): return x * rng.random()
            """
        ),
    ),
    (
        "for one sample, by a helper",
        "exact",
        dataset(
            "def __getitem__(self, i): return make(i).random()", "def make(i): return np.random.default_rng((1, i))"
        ),
    ),
    (
        "by sample_rng",
        "exact",
        dataset(
            "def __getitem__(self, i): return sample_rng(0, 0, i).numpy.random()",
            "from fairlead_distributed import sample_rng",
        ),
    ),
    ("of the loader", "exact", data("return DataLoader(Noisy(), 2, shuffle=True, generator=torch.Generator())")),
    (
        "of a datamodule, for what each start does alike",
        "exact",
        data(
            "return DataLoader(Noisy(), 2)",
            setup="self.g = torch.Generator().manual_seed(1)\nself.order = torch.randperm(3, generator=self.g)",
        ),
    ),
    (
        "of a datamodule, for what comes later",
        "not exact",
        data(
            "return DataLoader(Subset(Noisy(), torch.randperm(3, generator=self.g)), 2)",
            setup="self.g = torch.Generator().manual_seed(1)",
        ),
    ),
    ("a package that may have its own", "not known", dataset("turn = A.Compose([])", "import albumentations as A")),
    ("a counter in the dataset", "not known", dataset("def __getitem__(self, i):\n    self.n += 1\n    return self.n")),
    ("an iterator in the dataset", "not known", dataset("def __init__(self): self.it = iter([1])")),
]


@pytest.mark.parametrize(("expected", "source"), [c[1:] for c in RANDOMNESS], ids=[c[0] for c in RANDOMNESS])
def test_every_kind_of_randomness(read: Read, expected: Verdict, source: str) -> None:
    """Global generators are the trainer's matter; a generator of one's own is saved by nobody."""
    reading = read(source)
    assert verdict(reading.reasons) == expected, reading.reasons


def model(body: str, init: str = "pass") -> str:
    """Plain data, and a model `Own`."""
    methods = f"def __init__(self):\n    super().__init__()\n{indent(dedent(init), '    ')}\n{dedent(body)}"
    return f"{PLAIN}\nclass Own(Net):\n{indent(methods, '    ')}\n"


MODELS: list[tuple[str, Verdict, str]] = [
    (
        "a generator",
        "not exact",
        model("def training_step(self, b, i): return torch.rand(1, generator=self.g)", "self.g = torch.Generator()"),
    ),
    (
        "a generator that is saved",
        "exact",
        model(
            """
            def on_save_checkpoint(self, c): c["g"] = self.g.get_state()
            def on_load_checkpoint(self, c): self.g.set_state(c["g"])
            """,
            "self.g = torch.Generator()",
        ),
    ),
    ("a generator for predictions", "exact", model("def predict_step(self, b, i): self.rng = random.Random(i)")),
    (
        "a moving average",
        "not known",
        model("def training_step(self, b, i): self.ema = 0.9 * self.ema + 0.1", "self.ema = 0.0"),
    ),
    ("a list", "not known", model("def training_step(self, b, i): self.losses.append(1)", "self.losses = []")),
    (
        "a list of one validation",
        "exact",
        model(
            "def validation_step(self, b, i): self.l.append(1)\ndef on_validation_epoch_end(self): self.l.clear()",
            "self.l = []",
        ),
    ),
    (
        "a buffer",
        "exact",
        model("def training_step(self, b, i): self.ema += 1", "self.register_buffer('ema', torch.zeros(1))"),
    ),
    (
        "a buffer that is not saved",
        "not known",
        model(
            "def training_step(self, b, i): self.ema += 1",
            "self.register_buffer('ema', torch.zeros(1), persistent=False)",
        ),
    ),
    ("a global name", "not known", model("def training_step(self, b, i):\n    global count\n    count = i")),
    (
        "weights that every start changes",
        "not known",
        model("def on_train_start(self): torch.nn.init.zeros_(self.layer.weight)"),
    ),
    ("data that it changes", "not known", model("def on_train_epoch_start(self): self.trainer.datamodule.draw(3)")),
    (
        "data whose epoch it sets",
        "exact",
        model("def on_train_epoch_start(self): self.trainer.train_dataloader.sampler.set_epoch(1)"),
    ),
    ("a step that takes batches itself", "not exact", model("def training_step(self, dataloader_iter): pass")),
    (
        "an optimizer with a count of its own",
        "not known",
        model("def configure_optimizers(self): return Counting(self.parameters())")
        + "class Counting(torch.optim.Optimizer):\n"
        + "    def __init__(self, p):\n        self.count = 0\n"
        + "    def step(self, closure=None):\n        self.count += 1\n",
    ),
]


@pytest.mark.parametrize(("expected", "source"), [c[1:] for c in MODELS], ids=[c[0] for c in MODELS])
def test_models(read: Read, expected: Verdict, source: str) -> None:
    reading = read(source, model="app:Own")
    assert verdict(reading.reasons) == expected, reading.reasons
    of_the_data = (*reading.loaders, *reading.held)
    assert not of_the_data, "a start that sees the loaders does not see this: it is a matter of the code"


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("x[torch.arange(3), y]", "not known"),
        ("x[y]", "not known"),
        ("x[find(y)]", "not known"),
        ("x[[0, 1]]", "not known"),
        ("x[:, 0]", "exact"),
        ("x[..., None, n:]", "exact"),
        ("x[x > 0]", "exact"),
        ("batch['x'][k]", "exact"),
        ("x[x.shape[0] // 2]", "exact"),
    ],
)
def test_a_cpu_adds_the_gradient_of_an_indexed_tensor_in_any_order(read: Read, index: str, expected: Verdict) -> None:
    """Of torch's operations on a CPU the only one: seen with torch 2.13, where `deterministic: true` mends it."""
    body = f"""
    def training_step(self, batch, batch_idx):
        x, y = batch
        n = len(y)
        for k in range(3):
            x = x + self.layer({index}).sum()
        return x
    """
    assert verdict(read(model(body), model="app:Own").reasons) == expected
    for deterministic in (True, "warn"):
        assert verdict(read(model(body), model="app:Own", deterministic=deterministic).reasons) == "exact"


def test_layers_of_a_package_may_index(read: Read) -> None:
    source = "import torchvision\n" + model("def forward(self, x): return torchvision.models.swin_t()(x)")
    assert verdict(read(source, model="app:Own").reasons) == "not known"
    assert verdict(read(source, model="app:Own", deterministic=True).reasons) == "exact"


CALLBACK = (
    "class Own(L.Callback):\n    def __init__(self): self.n = 0\n    def on_train_batch_end(self, *a): self.n += 1\n"
)
SAVES = "    def state_dict(self): return {}\n    def load_state_dict(self, state): pass\n"


@pytest.mark.parametrize(
    ("callback", "source", "expected"),
    [
        ("app:Own", CALLBACK, "not known"),
        ("app:Own", CALLBACK + SAVES, "exact"),
        ("app:Own", "class Own(L.Callback):\n    def __init__(self): self.rng = random.Random(0)\n", "not exact"),
        ("lightning.pytorch.callbacks:EarlyStopping", "", "exact"),
        ("lightning.pytorch.callbacks:StochasticWeightAveraging", "", "not known"),
        ("somewhere.callbacks:Ema", "", "not known"),
    ],
)
def test_callbacks(read: Read, callback: str, source: str, expected: Verdict) -> None:
    assert verdict(read(PLAIN + source, callbacks=[callback]).reasons) == expected


def test_a_model_that_brings_its_own_loaders(read: Read) -> None:
    loader = "class Own(Net):\n    def train_dataloader(self): return DataLoader({}, 2)\n"
    assert verdict(read(loader.format("Noisy()"), data=None, model="app:Own").reasons) == "exact"
    assert verdict(read(loader.format("Stream()"), data=None, model="app:Own").reasons) == "not exact"
    assert verdict(read("", data=None).reasons) == "not known"


def test_what_the_job_gives_is_followed(read: Read) -> None:
    """Arguments of the job reach the loader: numbers, and objects that the job builds."""
    given = data("return DataLoader(self.n, 2)")
    assert verdict(read(given, args={"n": {"class": "app:Stream"}}).reasons) == "not exact"
    assert verdict(read(given, args={"n": {"class": "app:Noisy"}}).reasons) == "exact"
    size = data("return DataLoader(Noisy(), batch_size=self.n)")
    assert verdict(read(size, args={"n": None}).reasons) == "not exact"
    assert verdict(read(size, args={"n": 4}).reasons) == "exact"
    chosen = data("return DataLoader(Stream() if self.n else Noisy(), 2)")
    assert verdict(read(chosen, args={"n": False}).reasons) == "exact"
    options = data("return DataLoader(Noisy(), **self.options)")
    assert verdict(read(options, args={"batch_size": None}).reasons) == "not exact"


def test_a_sharded_sampler_loses_its_state(read: Read) -> None:
    """With several ranks Lightning wraps any sampler that is no DistributedSampler."""
    source = data("return DataLoader(Noisy(), 2, sampler=Kept())")
    assert verdict(read(source, ranks=2).reasons) == "not exact"
    assert verdict(read(source, ranks=2, use_distributed_sampler=False).reasons) == "exact"
    shards = """
    from torch.utils.data import DistributedSampler
    class Shards(DistributedSampler):
        def state_dict(self): return {}
        def load_state_dict(self, state): pass
    """
    source = data("return DataLoader(Noisy(), 2, sampler=Shards(Noisy()))", before=shards)
    assert verdict(read(source, ranks=2).reasons) == "exact"


HELPERS: list[tuple[str, Verdict, str, dict[str, str]]] = [
    (
        "over two modules",
        "not exact",
        "from lib.loaders import build\n" + data("return build(Noisy())"),
        {
            "lib/__init__.py": "",
            "lib/loaders.py": """
            from torch.utils.data import DataLoader
            from .orders import Order as O
            def build(d): return DataLoader(d, 2, sampler=O())
            """,
            "lib/orders.py": "class Order:\n    def __iter__(self): return iter([1])\n",
        },
    ),
    (
        "in a folder that is no package",
        "exact",
        "import lib.loaders as made\n" + data("return made.build(Noisy())"),
        {"lib/loaders.py": "from torch.utils.data import DataLoader\ndef build(d): return DataLoader(d, 2)\n"},
    ),
    (
        "by import *",
        "not exact",
        "from lib import *\n" + data("return build(Stream())"),
        {"lib.py": "from torch.utils.data import DataLoader\ndef build(d): return DataLoader(d, 2)\n"},
    ),
    (
        "modules that import each other",
        "exact",
        "from lib import a\n" + data("return a.build(Noisy())"),
        {
            "lib/__init__.py": "from lib import a\n",
            "lib/a.py": "import lib\nfrom torch.utils.data import DataLoader\ndef build(d): return DataLoader(d, 2)\n",
        },
    ),
    (
        "that does not parse",
        "not known",
        "from lib import build\n" + data("return build(1)"),
        {"lib.py": "def build(:\n"},
    ),
    ("with a null byte", "not known", "from lib import build\n" + data("return build(1)"), {"lib.py": "x = 1\0"}),
    (
        "nested too deeply",
        "not known",
        "from lib import build\n" + data("return build(1)"),
        {"lib.py": f"x = {'(' * 300}1{')' * 300}\ndef build(d): return d\n"},
    ),
    (
        "over too many functions",
        "not known",
        "from lib import f0\n" + data("return f0(DataLoader(Noisy(), 2))"),
        {"lib.py": "".join(f"def f{i}(x): return f{i + 1}(x)\n" for i in range(90)) + "def f90(x): return x\n"},
    ),
    ("that is not installed", "not known", "from lib import build\n" + data("return build(Noisy())"), {}),
]


@pytest.mark.parametrize(("expected", "source", "files"), [c[1:] for c in HELPERS], ids=[c[0] for c in HELPERS])
def test_loaders_that_a_helper_module_makes(read: Read, expected: Verdict, source: str, files: dict[str, str]) -> None:
    reading = read(source, files=files)
    assert verdict(reading.reasons) == expected, reading.reasons


@pytest.mark.parametrize(
    "named", ["app:Nothing", "nowhere:Data", "nowhere.data.Data", "numpy:array", "app:HEAD", "a:b:c"]
)
def test_data_that_cannot_be_read(read: Read, named: str) -> None:
    assert verdict(read(PLAIN, data=named).reasons) == "not known"


def test_a_project_of_many_modules_is_not_read_to_its_end(read: Read) -> None:
    files = {f"lib/m{i}.py": "def f(x): return x\n" for i in range(80)}
    imports = "".join(f"from lib.m{i} import f as f{i}\n" for i in range(80))
    calls = "".join(f"f{i}(1)\n" for i in range(80))
    reading = read(imports + data(f"{calls}return DataLoader(Noisy(), 2)"), files=files)
    assert verdict(reading.reasons) == "not known"
    assert len(reading.files) == 60


def test_a_name_that_is_imported_over_very_many_modules_is_lost(read: Read) -> None:
    files = {f"lib/m{i}.py": f"from lib.m{i + 1} import x\n" for i in range(40)} | {"lib/m40.py": "x = 1\n"}
    source = "from lib.m0 import x\n" + data("return DataLoader(Noisy(x), 2)")
    assert verdict(read(source, files=files).reasons) == "not known"


def test_the_files_that_were_read_are_told(read: Read) -> None:
    """What a start saw holds only as long as none of them is newer."""
    reading = read("from lib import x\n" + PLAIN, files={"lib.py": "x = 1\n", "other.py": "y = 1\n"})
    assert {path.name for path in reading.files} == {"app.py"}, "nothing of lib is used"
    reading = read("from lib import x\n" + data("return DataLoader(Noisy(x), 2)"), files={"lib.py": "x = 1\n"})
    assert {path.name for path in reading.files} == {"app.py", "lib.py"}
