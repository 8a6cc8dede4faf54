"""Training: `Trainer(job, world).run()` in run.py trains a model from a `Job` to the summary in its run folder."""
