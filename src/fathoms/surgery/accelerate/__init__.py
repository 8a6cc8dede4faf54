"""Replace modules of other libraries by fused ones with the same parameters."""
