"""A loaded model measured on every image of a source, prepared as in its training."""

from __future__ import annotations

import torch

from fathoms.data import ArraySource, LoaderOptions, Source
from fathoms.evaluating.load import LoadedModel
from fathoms.evaluating.metrics import Evaluation, FewerChannels, evaluate
from fathoms.evaluating.preprocessing import eval_loader
from fathoms.evaluating.results import match_classes


def measure(
    loaded: LoadedModel, source: Source | ArraySource, batch_size: int, device: torch.device
) -> Evaluation:
    """Metrics of a model in full precision; classes are matched by name or number where it knows their names."""
    known = None if loaded.classes is None else match_classes(source.classes, loaded.classes, source.split)
    options = LoaderOptions(grey=loaded.in_channels == 1)
    loader = eval_loader(
        source, loaded.image_size, batch_size, loaded.preprocessing, options=options, device=device
    )
    seen = FewerChannels(loaded.model.to(device), loaded.in_channels)
    return evaluate(seen, loader.epoch(0), len(source.classes), device=device, label_map=known)
