"""The environment `mpi`."""
