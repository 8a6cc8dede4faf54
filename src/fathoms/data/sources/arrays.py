"""One split of a small data set as arrays of pixels and labels."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from fathoms.data.errors import DataError
from fathoms.data.sources.left_out import LeftOut
from fathoms.files.untrusted import check_names

# Arrays are unpacked into memory; this bounds what an untrusted archive can take.
MAX_BYTES = 8 << 30
# A small archive may unpack to this much, whatever its size.
SMALL = 1 << 28


class ArraySource:
    """One split as uint8 pixels (N, H, W, 3) and labels; small enough to live on the device.

    Args:
        kind: The name of the reader.
        split: The name of the split.
        images: The pixels.
        labels: A class number for each image.
        classes: The names of the classes.
        where: The file, as error messages name it; default: the kind.
        left_out: What the reader did not take.
    """

    def __init__(
        self,
        kind: str,
        split: str,
        images: UInt8[np.ndarray, "N H W 3"],
        labels: np.ndarray,
        classes: Sequence[str],
        where: str | None = None,
        left_out: LeftOut | None = None,
    ) -> None:
        where = where or kind
        if not len(images):
            raise DataError(f"{where}: split {split!r} holds no images; add some or remove the split")
        if not images.size:
            raise DataError(f"{where}: images of split {split!r} are {images.shape[1:]}: they have no pixels")
        if len(images) != len(labels):
            raise DataError(
                f"{where}: {len(images)} images for {len(labels)} labels; the files do not belong together"
            )
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            raise DataError(
                f"{where}: labels are {labels.dtype} of shape {labels.shape}; whole numbers are expected"
            )
        labels = labels.astype(np.int64)
        classes = check_names(list(classes), f"{where}: classes", DataError)
        if twice := sorted(name for name, count in Counter(classes).items() if count > 1):
            raise DataError(f"{where}: two classes are called {twice[0]!r}; give each a name of its own")
        if labels.min() < 0 or labels.max() >= len(classes):
            raise DataError(
                f"{where}: labels run to {labels.max()} for {len(classes)} classes; check the files"
            )
        self.kind, self.split = kind, split
        self.images, self.labels, self.classes = images, labels, classes
        self.left_out = left_out or LeftOut()
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.images)

    def where(self, index: int) -> str:
        """SPLIT[INDEX]."""
        return f"{self.split}[{index}]"

    def fingerprint(self) -> str:
        """Hash of all pixels, labels and class names, computed once."""
        if self._fingerprint is None:
            digest = hashlib.sha256(np.ascontiguousarray(self.images).data)
            digest.update(self.labels.tobytes())
            digest.update("\n".join(self.classes).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def as_rgb(images: np.ndarray, where: str) -> UInt8[np.ndarray, "N H W 3"]:
    """Convert (N,H,W), (N,H,W,1), (N,H,W,3) or (N,3,H,W) uint8 pixels to (N,H,W,3)."""
    if images.dtype != np.uint8:
        raise DataError(
            f"{where}: images are {images.dtype}, not uint8; scale them to 0..255 and store uint8"
        )
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim == 4 and images.shape[1] == 3 and images.shape[3] != 3:
        images = images.transpose(0, 2, 3, 1)
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        raise DataError(f"{where}: images have shape {images.shape}; (N, H, W) or (N, H, W, 3) is expected")
    return np.ascontiguousarray(np.broadcast_to(images, (*images.shape[:3], 3)))
