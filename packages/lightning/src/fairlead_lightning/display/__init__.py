"""What a fit shows: progress, throughput, a summary."""
