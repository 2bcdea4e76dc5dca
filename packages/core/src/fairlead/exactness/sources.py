"""What the user's sources say: nothing of theirs is imported or run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairlead.config import ClassSpec, JobConfig
from fairlead.exactness.evaluate import Evaluator
from fairlead.exactness.hooks import changes_at_starts, changes_from_outside
from fairlead.exactness.indexing import indexed_tensors
from fairlead.exactness.kinds import KNOWN_PACKAGES, MODULES
from fairlead.exactness.loaders import Judge, Role, unknown
from fairlead.exactness.names import External, Lost, Meaning, Names, Scope, place
from fairlead.exactness.randomness import Generators, draws_random_numbers
from fairlead.exactness.reach import Reach
from fairlead.exactness.state import unsaved_state
from fairlead.exactness.values import Call, Constant, Frame, Instance, Items, Method, Named, Thunk, Unknown, Values
from fairlead.findings import Inexact
from fairlead.user_code import CodeRoot, is_spec
from fairlead.user_code.symbols import ClassSymbol, FunctionSymbol

__all__ = ["Reading", "source_reasons"]

_DATAMODULE = "a LightningDataModule"


@dataclass(frozen=True)
class Reading:
    """What the sources say.

    Args:
        loaders: Of loaders, samplers and datasets; a start sees those themselves, and knows better.
        held: Of random generators that objects of the data keep; a start looks for them, but not into everything.
        code: Of the code that computes with the batches, which a start does not see either.
        files: The files of the user's that were read.
    """

    loaders: tuple[Inexact, ...]
    held: tuple[Inexact, ...]
    code: tuple[Inexact, ...]
    files: tuple[Path, ...] = ()

    @property
    def reasons(self) -> tuple[Inexact, ...]:
        """All of them."""
        return tuple(dict.fromkeys((*self.loaders, *self.held, *self.code)))


def source_reasons(job: JobConfig, root: CodeRoot, *, ranks: int = 1, accelerator: str = "cpu") -> Reading:
    """Reads the sources of a job's model, data and callbacks for what keeps a resume from being exact.

    Args:
        job: The job.
        root: Where the user's code is found.
        ranks: Ranks in all.
        accelerator: The tag of the device.

    Example:
        >>> reading = source_reasons(job, root)  # doctest: +SKIP
        >>> verdict(reading.reasons)  # doctest: +SKIP
        'exact'
    """
    return _Reader(job, root, ranks, accelerator).read()


class _Reader:
    def __init__(self, job: JobConfig, root: CodeRoot, ranks: int, accelerator: str) -> None:
        self.job, self.ranks, self.accelerator = job, ranks, accelerator
        specs = tuple(dict.fromkeys(_specs([job.model, job.data, *job.trainer.callbacks])))
        self.names = Names(root, specs, KNOWN_PACKAGES)
        self.evaluator = Evaluator(self.names)
        self.reach = Reach(self.names, self.evaluator.classes)

    def read(self) -> Reading:
        try:
            parts = self._parts()
        except RecursionError:
            parts = [unknown("the sources", "they are too deeply nested to follow")], [], []
        loaders, held, code = (tuple(dict.fromkeys(part)) for part in parts)
        return Reading(loaders, held, code, self.names.files)

    def _parts(self) -> tuple[list[Inexact], list[Inexact], list[Inexact]]:
        job = self.job
        code = [*self._follow(job.model, "the model", "model", gives_data=job.data is None)]
        for index, callback in enumerate(job.trainer.callbacks):
            code += self._follow(callback, f"the callback {index + 1}", "model")
        loaders = [*self._follow(job.data, "the data", "data")] if job.data is not None else []
        values = self._made(job.data or job.model)
        judge = Judge(
            self.evaluator,
            ranks=self.ranks,
            shards=job.trainer.use_distributed_sampler,
            draws=draws_random_numbers(self.reach),
        )
        for role, hook in (("training", "train_dataloader"), ("validation", "val_dataloader")):
            if role == "training" or job.trainer.limit_val_batches != 0:
                loaders += self._of_hook(values, hook, role, judge)  # type: ignore[arg-type]  # a Role
        for use in self.reach.strange("data"):
            package = use.name.partition(".")[0]
            loaders.append(unknown(f"the package {package}", "whether it keeps random numbers of its own is not known",
                                   use.unit.where))  # fmt: skip
        held, others = Generators(self.reach, ranks=self.ranks).reasons()
        code += others
        loaders += [unknown(f"the module {name}", why) for name, why in list(self.names.unread.items())[:3]]
        if not self.reach.complete:
            loaders.append(unknown("the sources", "there are more than are looked at"))
        code += self._steps()
        code += [*unsaved_state(self.reach), *changes_at_starts(self.reach), *changes_from_outside(self.reach)]
        if self.accelerator == "cpu" and not job.trainer.deterministic:
            code += indexed_tensors(self.reach)
        return loaders, held, code

    # -- the beginnings

    def _follow(self, spec: ClassSpec, what: str, side: Any, *, gives_data: bool = False) -> Iterator[Inexact]:
        for name in dict.fromkeys(_specs([spec])):
            for meaning in self.names.spec(name):
                self.reach.add(meaning, side, gives_data=gives_data and name == spec.class_)
                if name == spec.class_:
                    yield from self._readable(meaning, what, name)

    def _readable(self, meaning: Meaning, what: str, name: str) -> Iterator[Inexact]:
        """What is said of a class that the job names and that cannot be read."""
        if isinstance(meaning, External):
            if what.startswith("the callback") and meaning.name.startswith(
                ("lightning.pytorch.callbacks.", "fairlead")
            ):
                if meaning.last != "StochasticWeightAveraging":
                    return
                yield Inexact(
                    "StochasticWeightAveraging",
                    why="no test has resumed a run with it",
                    fix="leave it out",
                    certain=False,
                )
                return
            yield unknown(f"{what} {name}", "its source is not read")
        elif isinstance(meaning, Lost):
            yield unknown(f"{what} {name}", meaning.why)
        elif isinstance(meaning, ClassSymbol):
            foreign = self.evaluator.classes.foreign(meaning, _is_lightnings)
            if foreign is not None:
                yield unknown(f"{what} {name}", f"it derives from {foreign}, which is not read")

    def _steps(self) -> Iterator[Inexact]:
        """A step that takes its batches itself."""
        for meaning in self.names.spec(self.job.model.class_):
            found = self.evaluator.classes.find(meaning, "training_step") if isinstance(meaning, ClassSymbol) else []
            for cls, binding in found:
                arguments = getattr(binding.node, "args", None)
                names = [one.arg for one in (*arguments.args, *arguments.kwonlyargs)] if arguments is not None else []
                if "dataloader_iter" in names:
                    yield Inexact(
                        f"training_step(self, dataloader_iter) in {place(cls.module, binding.node)}",
                        why="the step takes its batches itself, and they are not counted",
                        fix="take batch and batch_idx",
                    )

    # -- loaders

    def _made(self, spec: ClassSpec) -> Values:
        """The objects that a spec of the job makes."""
        values: list[Any] = []
        call = Call("the job", (), {name: _given(self._value(value)) for name, value in spec.args.items()})
        for meaning in self.names.spec(spec.class_):
            if isinstance(meaning, ClassSymbol | FunctionSymbol):
                frame = Frame(Scope(meaning.module))
                values += self.evaluator.called(Named(meaning), call, frame, meaning.node)
            elif isinstance(meaning, External):
                values.append(Instance(meaning, call))
            else:
                values.append(Unknown(meaning.why if isinstance(meaning, Lost) else "it is computed"))
        return tuple(values)

    def _value(self, value: object) -> Values:
        """An argument from the job."""
        if is_spec(value) and isinstance(value, Mapping):
            return self._made(ClassSpec.model_validate(value))
        if isinstance(value, Mapping):
            items = tuple(self._value(one) for one in value.values())
            return (Items(items, tuple(value), mapping=True),)
        if isinstance(value, list | tuple):
            return (Items(tuple(self._value(one) for one in value), tuple(range(len(value)))),)
        return (Constant(value),)

    def _of_hook(self, values: Values, hook: str, role: Role, judge: Judge) -> Iterator[Inexact]:
        """What `train_dataloader` or `val_dataloader` of the data, or of the model, may return."""
        for value in values:
            if isinstance(value, Unknown):
                yield unknown("the data", value.why, value.where)
                continue
            if not isinstance(value, Instance) or isinstance(value.kind, External):
                yield unknown(f"the {role} loader", f"what makes {_DATAMODULE} is not read")
                continue
            kind = value.kind
            nothing = Unknown(f"{value.name} has no {hook}")
            for method in self.evaluator.attribute(value, hook, nothing):
                if method is nothing or (isinstance(method, Unknown) and method.where is None):
                    if role == "training" or not _plainly_absent(self.evaluator, kind):
                        yield unknown(f"the {role} loader", f"{value.name} has no {hook} that can be read")
                elif isinstance(method, Method | Named | Instance):
                    frame = Frame(Scope(kind.module))
                    made = tuple(self.evaluator.called(method, Call(hook), frame, kind.node))
                    yield from judge.loaders(made, role)
                else:
                    why = method.why if isinstance(method, Unknown) else f"{hook} is no method"
                    yield unknown(f"the {role} loader", why, method.where if isinstance(method, Unknown) else None)


def _specs(values: Iterable[object]) -> Iterator[str]:
    """Every `module:object` that a job names, in arguments too."""
    for value in values:
        if isinstance(value, ClassSpec):
            yield value.class_
            yield from _specs(value.args.values())
        elif isinstance(value, Mapping):
            if is_spec(value):
                yield str(value["class"])
            yield from _specs(value.values())
        elif isinstance(value, list | tuple):
            yield from _specs(value)


def _is_lightnings(name: str) -> bool:
    """Base classes of models, data and callbacks, which keep nothing that is not saved."""
    return name in MODULES or name.startswith(("lightning.", "pytorch_lightning.", "torch.nn."))


def _plainly_absent(evaluator: Evaluator, kind: ClassSymbol) -> bool:
    """Whether a class without a hook certainly has none: all its bases are its own or Lightning's."""
    return evaluator.classes.foreign(kind, _is_lightnings) is None


def _given(values: Values) -> Thunk:
    return lambda: values
