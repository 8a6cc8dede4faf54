"""Asynchronous copies of pixels to a device, on a stream of their own.

Small arrays travel by `fathoms.data.to_device`, which lies below the rooms because augmentation needs it too.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Sender:
    """Copy the parts of a batch to a device and join them; a GPU copies during training, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.sent: torch.cuda.Event | None = None
        """An event that completes once the device has read everything sent so far; None on a CPU."""

    def queued(self) -> torch.cuda.Event | None:
        """An event that completes once all work queued so far is done; None on a CPU, where work is synchronous."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def send(self, parts: list[Tensor]) -> Tensor:
        """The parts as one tensor on the device; on a CPU a copy, too."""
        if self._stream is None:
            return torch.cat(parts)
        with torch.cuda.stream(self._stream):
            there = [part.to(self.device, non_blocking=True) for part in parts]
            self.sent = torch.cuda.Event()
            self.sent.record()
            joined = torch.cat(there)
        using = torch.cuda.current_stream(self.device)
        using.wait_stream(self._stream)
        # Its memory belongs to the copying stream, which must not use it again too soon.
        joined.record_stream(using)
        return joined
