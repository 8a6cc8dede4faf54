"""The terminal: streams that never fail, progress, a live table."""
