"""Data-set tools: check, find duplicates, pack, manifest."""
