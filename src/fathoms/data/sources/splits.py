"""Training and held-out splits of a data set: one rule for training, validation and export."""

from __future__ import annotations

from fathoms.data.sources.base import SPLIT_NAMES
from fathoms.data.sources.detect import AnySource, list_splits, open_source
from fathoms.data.sources.digits import digit_sources
from fathoms.errors import ConfigError

_TRAIN = SPLIT_NAMES["train"]
_WHOLE = SPLIT_NAMES["all"]


def open_splits(path: str | None) -> tuple[AnySource, AnySource]:
    """The training and the held-out split of a data set; None means the built-in digits.

    Data without splits cannot be held out from itself, so it is refused.
    """
    if path is None:
        return digit_sources()
    splits = list_splits(path)
    held_out = next((split for split in splits if split not in _TRAIN + _WHOLE), None)
    if held_out is None:
        raise ConfigError(
            f"{path}: has no held-out split (val, validation or test); it has {', '.join(splits)}"
        )
    return open_source(path, "train"), open_source(path, held_out)


def open_held_out(path: str, split: str | None = None) -> AnySource:
    """The split to measure: `split`, else the held-out one, else data without splits; "digits" are built in."""
    if path == "digits":
        return digit_sources()[1]
    held_out = next((name for name in list_splits(path) if name not in _TRAIN), "all")
    return open_source(path, split or held_out)
