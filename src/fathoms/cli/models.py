"""List the named models, or show the config of one."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from typing import Any

import tyro

from fathoms.errors import FathomsError

EXAMPLES = """
fathoms models
fathoms models 'cait_*'
fathoms models cait_s24_224 --json
"""


@dataclass(frozen=True)
class Args:
    """Options of `fathoms models`."""

    pattern: tyro.conf.Positional[str] = "*"
    """A model's name, or a shell pattern such as 'cait_*'."""
    json: bool = False
    """Print one JSON object."""


def describe(name: str) -> dict[str, Any]:
    """Config, parameters and multiplications of a model, built on the meta device."""
    import torch

    from fathoms.models.vit import ViT
    from fathoms.models.zoo import model_config

    with torch.device("meta"):
        model = ViT(model_config(name))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "name": name,
        "parameters": parameters,
        "multiplications": model.flop_count(),
        "config": model.config.to_dict(),
    }


def run(args: Args) -> int:
    """Print the names that match, or the details of a single match."""
    from fathoms.models.zoo import list_models, model_config

    names = list_models(args.pattern)
    if not names:
        if any(character in args.pattern for character in "*?["):
            raise FathomsError(f"no model matches {args.pattern!r}; see `fathoms models`")
        model_config(args.pattern)
    if len(names) > 1:
        print(json_format.dumps({"models": names}) if args.json else "\n".join(names))
        return 0
    about = describe(names[0])
    if args.json:
        print(json_format.dumps(about))
        return 0
    print(
        f"{about['name']}: {about['parameters'] / 1e6:.2f} M parameters, "
        f"{about['multiplications'] / 1e9:.2f} G multiplications"
    )
    for field, value in about["config"].items():
        print(f"  {field:<24}{'' if value is None else value}".rstrip())
    return 0
