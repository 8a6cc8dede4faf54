"""Pages that show what a run folder holds; nothing but files is read, and nothing remote is loaded."""
