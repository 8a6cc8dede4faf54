"""The page and the figures of a comparison, or of a set of runs: arms, strips, curves, maps, cost, provenance."""
