"""Pixels on their way to a device, beside what it computes meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor


class Sender:
    """Sends parts of a batch and joins them; a GPU copies on a stream of its own, so that training need not wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.sent: torch.cuda.Event | None = None
        """What the device comes to when it has read all that was given to it so far; None on a CPU."""

    def asked(self) -> torch.cuda.Event | None:
        """What a GPU comes to when it has done all that it was asked for until now; None on a CPU, which has."""
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
        # Its memory belongs to the other stream, which must not use it again too soon.
        joined.record_stream(using)
        return joined
