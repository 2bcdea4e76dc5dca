"""The command `checkpoint`: one module a subcommand. `ls` and `verify` import no torch."""
