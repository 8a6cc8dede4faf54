"""Errors about data: a bad image, a refused archive, a loader that lost a worker."""

from __future__ import annotations

from fathoms.errors import FathomsError


class DataError(FathomsError):
    """A data set that cannot be used as asked; the message says what to do."""


class BadImageError(DataError):
    """One image that cannot be decoded, or must not be."""


class ArchiveError(DataError):
    """An archive that is damaged or tries something an image archive has no need for."""


class LoaderError(DataError):
    """A loader worker that died or hung; the message names it and the file it held."""
