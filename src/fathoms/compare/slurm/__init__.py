"""A comparison as a Slurm job array: submitting it, and one of its tasks."""
