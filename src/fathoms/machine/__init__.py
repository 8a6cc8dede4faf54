"""The machine that a process runs on: its cores, its devices, and whether it reaches the Hub."""
