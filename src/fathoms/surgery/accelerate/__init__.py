"""Replace modules of timm and DeiT by faster ones with the same parameters."""

from fathoms.surgery.accelerate.accelerate import AccelerateReport, accelerate

__all__ = ["AccelerateReport", "accelerate"]
