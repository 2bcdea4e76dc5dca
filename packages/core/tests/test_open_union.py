"""A field that accepts any installed plugin, decided when a value is validated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import ValidationError

from fairlead import CheckpointIOConfigBase, CheckpointIOPlugin, OpenUnion, PluginManager, StrategyConfigBase
from fairlead.cli.installation import job_schema
from fairlead.config import TrainerConfig
from fairlead.config_bases import ConfigModel
from fairlead.open_union import parse_backend
from fairlead.testing import FakeDist, stand_ins

LATE = """
    from typing import Literal
    from pydantic import BaseModel, Field
    from fairlead import StrategyConfigBase, StrategyPlugin
    from fairlead.config_bases import ConfigModel

    class Offload(ConfigModel):
        path: str = "/tmp"

    class LateStrategyConfig(StrategyConfigBase):
        '''Installed late.'''
        name: Literal["late"] = "late"
        stage: int = Field(default=1, ge=0, le=3)
        '''The stage.'''
        offload: Offload = Offload()

    class Late(StrategyPlugin):
        config = LateStrategyConfig

    late = Late()
    late_2 = Late(stage=2)
"""
POINTS = {"strategy.late": "late_plugin:late", "strategy.late_2": "late_plugin:late_2"}


@pytest.fixture
def late(fake_dist: Callable[..., FakeDist], fairlead_plugins: Callable[..., PluginManager]) -> PluginManager:
    """A manager that knows of a plugin that nobody knew of when `TrainerConfig` was built."""
    return fairlead_plugins(stand_ins(), fake_dist("late", entry_points=POINTS, files={"late_plugin.py": LATE}))


def test_a_package_installed_later_needs_no_rebuild(
    fake_dist: Callable[..., FakeDist], fairlead_plugins: Callable[..., PluginManager]
) -> None:
    """The union is open: `TrainerConfig` is used before and after the package is there."""
    with pytest.raises(ValidationError, match="unknown strategy 'late'"):
        TrainerConfig(strategy="late")
    fairlead_plugins(fake_dist("late", entry_points=POINTS, files={"late_plugin.py": LATE}))
    assert TrainerConfig(strategy="late").model_dump()["strategy"] == {
        "name": "late",
        "stage": 1,
        "offload": {"path": "/tmp"},
    }


@pytest.mark.parametrize(
    ("value", "stage"),
    [("late", 1), ({"name": "late", "stage": 3}, 3), ("late_2", 2), ({"name": "late_2", "stage": 0}, 0)],
)
def test_a_tag_a_mapping_and_a_preset(late: PluginManager, value: Any, stage: int) -> None:
    config = TrainerConfig(strategy=value)
    assert isinstance(config.strategy, StrategyConfigBase)
    assert (config.strategy.name, config.strategy.stage) == ("late", stage)  # type: ignore[attr-defined]  # a plugin's
    assert TrainerConfig(strategy=config.strategy) == config


def test_subclass_fields_survive_serialization(late: PluginManager) -> None:
    """JSON gives back the same config, with every field of the plugin."""
    config = TrainerConfig(strategy={"name": "late", "stage": 3, "offload": {"path": "/nvme"}})  # type: ignore[arg-type]  # a plugin is known by its tag
    assert '"path":"/nvme"' in config.model_dump_json()
    assert TrainerConfig.model_validate_json(config.model_dump_json()) == config


def test_an_error_in_a_plugins_field_has_its_whole_path(late: PluginManager) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(strategy={"name": "late", "stage": 9, "offload": {"pth": "/x"}})  # type: ignore[arg-type]  # a plugin is known by its tag
    assert [error["loc"] for error in caught.value.errors()] == [("strategy", "stage"), ("strategy", "offload", "pth")]


@pytest.mark.parametrize("value", [True, 1.5, ["late"], {"stage": 1}, {"name": None}, {"name": "auto"}, None])
def test_what_is_no_plugin(late: PluginManager, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(strategy=value)
    assert [(e["type"], e["loc"]) for e in caught.value.errors()] == [("wrong-type", ("strategy",))]


def test_a_config_of_another_axis_is_refused(late: PluginManager) -> None:
    with pytest.raises(ValidationError, match="a config of the axis 'strategy' is not a precision"):
        TrainerConfig(precision=TrainerConfig(strategy="late").strategy)  # type: ignore[arg-type]  # what is tested


def test_a_number_is_a_tag(late: PluginManager) -> None:
    """Lightning takes `precision=32`."""
    with pytest.raises(ValidationError, match="the precision '32' is not installed"):
        TrainerConfig(precision=32)  # type: ignore[arg-type]  # what is tested


def test_validation_uses_the_manager_it_is_given(late: PluginManager) -> None:
    nothing = PluginManager([])
    with pytest.raises(ValidationError, match="unknown strategy 'late'"):
        TrainerConfig.model_validate({"strategy": "late"}, context={"plugins": nothing})
    assert parse_backend("strategy", "late", late).name == "late"


def test_the_schema_lists_what_is_installed(late: PluginManager) -> None:
    schema = job_schema()
    strategy = schema["$defs"]["TrainerConfig"]["properties"]["strategy"]
    words, *objects = strategy["anyOf"]
    assert words["enum"] == ["auto", "ddp", "late", "late_2", "single_device"]
    by_names = {tuple(o["properties"]["name"]["enum"]): o for o in objects}
    late_schema = by_names["late", "late_2"]
    assert late_schema["properties"]["stage"]["maximum"] == 3
    assert late_schema["required"] == ["name"]
    assert strategy["default"] == "auto"


def test_every_reference_of_the_schema_leads_somewhere(late: PluginManager) -> None:
    schema = job_schema()

    def references(node: Any) -> set[str]:
        children = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
        own = {node["$ref"]} if isinstance(node, dict) and isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, children))

    assert "#/$defs/RunConfig" in references(schema)
    assert {r.removeprefix("#/$defs/") for r in references(schema)} <= schema["$defs"].keys()


class WrapperCheckpointIOConfig(CheckpointIOConfigBase):
    """Writes through another one."""

    name: Literal["wrapper"] = "wrapper"
    inner: Annotated[CheckpointIOConfigBase | Literal["auto"], OpenUnion("checkpoint_io", literals=("auto",))] = "auto"


class Wrapper(CheckpointIOPlugin):
    """Writes through another one."""

    config = WrapperCheckpointIOConfig


def test_a_plugin_may_hold_another_of_its_axis(fairlead_plugins: Callable[..., PluginManager]) -> None:
    """As asynchronous saving does; validation, serialization and the schema all end."""
    fairlead_plugins(stand_ins(), Wrapper())
    config = TrainerConfig(checkpoint_io={"name": "wrapper", "inner": {"name": "wrapper", "inner": "torch"}})  # type: ignore[arg-type]  # a plugin is known by its tag
    assert config.model_dump(mode="json")["checkpoint_io"] == {
        "name": "wrapper",
        "inner": {"name": "wrapper", "inner": {"name": "torch"}},
    }
    assert TrainerConfig.model_validate_json(config.model_dump_json()) == config
    assert "WrapperCheckpointIOConfig" in str(job_schema())


def test_a_field_of_ones_own_model_may_be_open(late: PluginManager) -> None:
    class Mine(ConfigModel):
        inner: Annotated[StrategyConfigBase, OpenUnion("strategy")]

    assert Mine(inner="late").inner.name == "late"  # type: ignore[arg-type]  # a tag
