"""Images: headers, decoders, random crops, pixel buffers, transforms."""
