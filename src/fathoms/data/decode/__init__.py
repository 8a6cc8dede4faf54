"""Decoding: image headers, JPEG and other formats, samples out of sources."""
