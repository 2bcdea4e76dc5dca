"""The file `metrics.csv`, which is written in any case."""
