"""The guard against divergence: detect a non-finite or spiking update, skip, roll back or stop, find the layer."""
