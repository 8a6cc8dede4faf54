"""Decoding workers: tasks, threads, processes with shared memory, and the watch over both."""
