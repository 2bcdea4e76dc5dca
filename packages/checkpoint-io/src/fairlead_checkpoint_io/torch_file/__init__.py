"""The backend `torch`: one file, written before the save returns."""
