"""Measurements inside a model, block by block."""

from fathoms.probes.attention_maps import attention_maps
from fathoms.probes.coordinates import coordinate_check, take_first_steps
from fathoms.probes.signal import Signal, Site, probe

__all__ = ["Signal", "Site", "attention_maps", "coordinate_check", "probe", "take_first_steps"]
