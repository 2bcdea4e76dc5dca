"""Small jobs that run on any machine: see README.md."""
