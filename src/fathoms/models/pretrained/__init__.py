"""Models saved to a folder or the Hub with their card, and built again from there."""
