"""`python -m fathoms`, for launchers such as torchrun."""

from fathoms.cli.main import command

command()
