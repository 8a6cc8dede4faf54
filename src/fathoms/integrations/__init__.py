"""fathoms in other people's training loops: `Probe` for any of them, `lightning.Probe` and `transformers.Probe`."""

from fathoms.integrations.probe import Probe as Probe

__all__ = ["Probe"]
