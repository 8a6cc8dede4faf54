"""The page of one run: its files read, its curves, heat maps, last evaluation and origin."""
