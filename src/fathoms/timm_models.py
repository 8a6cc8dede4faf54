"""fathoms' models in timm's registry: `import fathoms.timm_models`, then `timm.create_model("fathoms_cait_s24_224")`.

Every name of the zoo is registered under `fathoms_NAME`, for timm's own training script and whatever else builds
models through timm. timm's words are taken (`img_size`, `in_chans`, `drop_path_rate`), and any field of ViTConfig.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fathoms.errors import ConfigError
from fathoms.models.param_groups import layer_of, why_no_decay
from fathoms.models.vit import ViT
from fathoms.models.zoo import list_models, model_config

try:
    from timm.models import register_model
except ImportError as _error:
    raise ConfigError("timm is not installed; pip install 'fathoms[timm]'") from _error

PREFIX = "fathoms_"
# timm's words for fields of ViTConfig.
_FIELDS = {"img_size": "image_size", "in_chans": "in_channels", "drop_path_rate": "drop_path"}
# What timm's script passes to every model, and the value that asks for nothing.
_NEUTRAL = {"drop_rate": 0.0, "drop_block_rate": 0.0, "scriptable": False, "cache_dir": None}
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "interpolation": "bicubic"}

__all__ = ["PREFIX", "TimmViT"]


class TimmViT(ViT):
    """A ViT with the methods that timm's optimizers and data pipeline ask a model for."""

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """Input size and preprocessing, where timm looks for them; there are no pretrained weights."""
        size = (self.config.in_channels, self.config.image_size, self.config.image_size)
        own = {"architecture": f"{PREFIX}vit", "num_classes": self.config.num_classes, "input_size": size}
        return {**own, **_IMAGENET, "crop_pct": 0.9, "first_conv": "stem.proj", "classifier": "head"}

    default_cfg = pretrained_cfg

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that take no weight decay whatever their shape."""
        return {name for name, parameter in self.named_parameters() if why_no_decay(parameter) is not None}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """The layer of a parameter, for timm's layer decay: that of `fathoms.param_groups`."""
        del coarse
        return lambda name: layer_of(self, name)


def _entrypoint(name: str) -> Callable[..., TimmViT]:
    """The function that timm calls to build a model."""

    def build(pretrained: bool = False, **options: Any) -> TimmViT:
        if pretrained:
            raise ConfigError(
                f'{PREFIX}{name}: has no pretrained weights; fathoms.create_model takes weights="timm/..."'
            )
        for word in ("pretrained_cfg", "pretrained_cfg_overlay"):
            options.pop(word, None)
        for word, neutral in _NEUTRAL.items():
            if options.pop(word, neutral) != neutral:
                raise ConfigError(f"{PREFIX}{name}: {word} has no part in this model; leave it out")
        fields = {_FIELDS.get(word, word): value for word, value in options.items()}
        if isinstance(fields.get("image_size"), tuple | list):
            height, width = fields["image_size"]
            if height != width:
                raise ConfigError(f"{PREFIX}{name}: img_size={height}x{width} is not square")
            fields["image_size"] = height
        return TimmViT(model_config(name, **fields))

    build.__name__ = build.__qualname__ = PREFIX + name
    build.__doc__ = f"{name} of fathoms."
    return build


for _name in list_models():
    globals()[PREFIX + _name] = register_model(_entrypoint(_name))
