"""Where metrics go besides `metrics.csv`."""
