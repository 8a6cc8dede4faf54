"""The run folder, its metrics and summary, trackers, the progress bar."""
