"""The backend `distributed`: every rank writes its part, each tensor once, through torch's distributed checkpoints."""
