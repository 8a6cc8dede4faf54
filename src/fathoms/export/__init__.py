"""Take a model out of training: convert strangers' files, export to other runtimes, verify what came out."""
