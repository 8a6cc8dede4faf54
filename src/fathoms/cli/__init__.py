"""The command line: one file per command; `fathoms data check` is data/check.py."""
