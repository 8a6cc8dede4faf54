"""Measurements inside a model, block by block."""

from fathoms.probes.attention_maps import attention_maps
from fathoms.probes.coordinates import coordinate_check
from fathoms.probes.signal import Signal, Site, probe

__all__ = ["Signal", "Site", "attention_maps", "coordinate_check", "probe"]
