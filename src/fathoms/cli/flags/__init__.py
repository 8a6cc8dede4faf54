"""Flags of the commands: parsed, checked before torch is imported, mistakes told in one line."""
