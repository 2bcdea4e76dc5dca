"""The kinds of devices that Lightning drives, and how each is found without importing torch."""
