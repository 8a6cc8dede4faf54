"""Worker processes of a comparison: what runs in one, how its parent sees it, and the pilot that times it."""
