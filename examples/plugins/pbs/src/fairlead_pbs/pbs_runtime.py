"""What Lightning asks for the ranks; imported only when a run is built."""

from __future__ import annotations

from lightning.fabric.plugins.environments import ClusterEnvironment

from fairlead import BuildContext
from fairlead_pbs.pbs import PBSEnvironmentConfig


class PBSEnvironment(ClusterEnvironment):
    """Answers Lightning's questions from the resolution.

    Args:
        config: The settings.
        context: Holds the resolution.
    """

    def __init__(self, config: PBSEnvironmentConfig, context: BuildContext) -> None:
        super().__init__()
        self._resolution = context.resolution

    @property
    def creates_processes_externally(self) -> bool:
        """Pbsdsh has started every rank."""
        return True

    @property
    def main_address(self) -> str:
        """The first host."""
        return str(self._resolution.value("main_address"))

    @property
    def main_port(self) -> int:
        """The port on it."""
        return int(self._resolution.value("main_port"))

    @staticmethod
    def detect() -> bool:
        """Fairlead has chosen already."""
        return False

    def world_size(self) -> int:
        """Ranks in all."""
        return self._resolution.world_size

    def set_world_size(self, size: int) -> None:
        """Fairlead has resolved it already."""

    def global_rank(self) -> int:
        """This rank."""
        return int(self._resolution.value("global_rank"))

    def set_global_rank(self, rank: int) -> None:
        """Fairlead has resolved it already."""

    def local_rank(self) -> int:
        """This rank on its host."""
        return int(self._resolution.value("local_rank"))

    def node_rank(self) -> int:
        """This host."""
        return int(self._resolution.value("node_rank"))
