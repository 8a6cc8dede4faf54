"""Decoding workers: threads or processes with shared memory."""
