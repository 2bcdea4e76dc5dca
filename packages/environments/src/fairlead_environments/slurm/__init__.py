"""The environment `slurm`."""
