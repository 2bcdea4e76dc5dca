"""The environment `torchelastic`."""
