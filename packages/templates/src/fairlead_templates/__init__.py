"""Templates: what an author of a plugin, or of a first job, begins with."""

__all__: list[str] = []
