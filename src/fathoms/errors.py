"""Errors a user can cause. Each message is one line: where, what is wrong, what to do."""

from __future__ import annotations


class FathomsError(Exception):
    """Something the caller can put right; the message says how."""


class UnknownNameError(FathomsError):
    """A name that is in no registry."""


class ConfigError(FathomsError):
    """Options that contradict each other, or a value out of range."""


class ShapeError(FathomsError):
    """A tensor whose shape the model cannot take."""


class WeightsError(FathomsError):
    """A weights file that does not fit the model, or that must not be opened."""


class BackendError(FathomsError):
    """A kernel that was asked for by name and cannot run here."""
