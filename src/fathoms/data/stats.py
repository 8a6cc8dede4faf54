"""Loader statistics: time spent waiting for data, bad images by name, and advice on both."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field

from fathoms.data.errors import DataError

PACK_SHARE = 0.2
"""Share of waiting from which on re-encoding a whole data set is worth its time."""


@dataclass
class LoaderStats:
    """Counts and times of one loader, over all epochs so far."""

    images: int = 0
    waited: float = 0.0
    """Seconds the consumer waited for data; with a GPU, those in which the GPU was idle."""
    elapsed: float = 0.0
    """Seconds since the first batch was requested, waiting and working."""
    bad: dict[str, str] = field(default_factory=dict)
    """Name of each bad image and the reason."""
    replaced: int = 0
    """Times a bad image was replaced (or marked, in evaluation)."""
    accidents: list[str] = field(default_factory=list)
    """Workers that died or hung and were replaced."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def wait_share(self) -> float:
        """Share of the time spent waiting for data, 0 to 1."""
        return self.waited / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def images_per_second(self) -> float:
        """Images delivered per second of elapsed time."""
        return self.images / self.elapsed if self.elapsed > 0 else 0.0

    def note_bad(self, name: str, reason: str, allowed: int) -> None:
        """Count a bad image; too many different ones stop the run, naming the first few."""
        with self._lock:
            self.replaced += 1
            self.bad.setdefault(name, reason)
            if len(self.bad) <= allowed:
                return
            listed = "; ".join(f"{n} ({r})" for n, r in list(self.bad.items())[:3])
        raise DataError(
            f"data: {len(self.bad)} bad images are more than the {allowed} allowed: {listed}; "
            "remove what `fathoms data check` names, or raise --max-bad"
        )

    def note_accident(self, what: str) -> None:
        """Keep and report that a worker was replaced."""
        self.accidents.append(what)
        warnings.warn(what, RuntimeWarning, stacklevel=2)

    def advice(self, decoder: str = "", kind: str = "", workers: int = 0, cores: int = 0) -> str:
        """One sentence on what to do when the consumer waits; empty when it does not."""
        if self.wait_share < 0.05:
            return ""
        share = f"{self.wait_share:.0%} of the time is spent waiting for data"
        if cores and workers < cores:
            return f"{share}; use more workers (--workers {cores}; now {workers})"
        if decoder in ("simplejpeg", "pillow"):
            return f"{share}; install crop decoding (pip install turbojpeg; now {decoder})"
        if self.wait_share < PACK_SHARE:
            return ""
        if kind and kind != "pack":
            return f"{share}; re-encode once with `fathoms data pack`"
        return f"{share}; decoding is the limit: pack with --short-side 256, or use more CPU cores"
