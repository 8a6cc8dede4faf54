"""Names and values that a user writes: registries, names of other libraries, types of settings."""
