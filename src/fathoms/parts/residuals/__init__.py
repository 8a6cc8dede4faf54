"""Residual branches: how they are scaled, joined to the stream, placed around norms, dropped and warmed up."""
