"""fathoms' models in timm's registry: `import fathoms.timm_models`, then `timm.create_model("fathoms_cait_s24_224")`.

Every name of the zoo is registered under `fathoms_NAME`, for timm's own training script and whatever else builds
models through timm. timm's words are taken (`img_size`, `in_chans`, `drop_path_rate`), and any field of ViTConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

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
# timm's words for read-outs.
_POOLS = {"cls": "token", "mean": "avg"}
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "interpolation": "bicubic"}

__all__ = ["PREFIX", "TimmViT"]


class TimmViT(ViT):
    """A ViT with the methods that timm's optimizers and data pipeline ask a model for."""

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """Input size and preprocessing, where timm looks for them; there are no pretrained weights."""
        size = (self.config.in_channels, self.config.image_size, self.config.image_size)
        own = {"architecture": self.architecture, "num_classes": self.config.num_classes, "input_size": size}
        return {**own, **_IMAGENET, "crop_pct": 0.9, "first_conv": "stem.proj", "classifier": "head"}

    default_cfg = pretrained_cfg
    architecture = f"{PREFIX}vit"
    """The name that it was created by."""

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; the pooling is the read-out of the config and cannot change."""
        readout = self.config.readout
        if global_pool not in (None, _POOLS.get(readout)):
            raise ConfigError(
                f"reset_classifier: global_pool={global_pool!r} is not the read-out {readout!r} of this model; "
                "leave it out, or create the model with another readout"
            )
        super().reset_classifier(num_classes)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resize the positions for images of another size."""
        self.set_image_size(_square(img_size, self.architecture))

    def get_intermediate_layers(
        self, x: Tensor, n: int | Sequence[int] = 1, reshape: bool = False, norm: bool = False
    ) -> list[Tensor]:
        """Patches after the last n blocks or after chosen ones, as sequences or, reshaped, as maps."""
        form = "NCHW" if reshape else "NLC"
        return self.forward_intermediates(x, n, norm=norm, output_fmt=form, intermediates_only=True)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that take no weight decay whatever their shape."""
        return {name for name, parameter in self.named_parameters() if why_no_decay(parameter) is not None}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """The layer of a parameter, for timm's layer decay: that of `fathoms.param_groups`."""
        del coarse
        return lambda name: layer_of(self, name)


def _square(size: int | Sequence[int], name: str) -> int:
    """The side of square images, given as one number or as two."""
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) != 1:
        raise ConfigError(f"{name}: img_size={'x'.join(map(str, cast(Sequence[int], size)))} is not square")
    return sides.pop()


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
        if options.pop("features_only", False):
            raise ConfigError(
                f"{PREFIX}{name}: features_only is not supported; call forward_intermediates of the model"
            )
        fields = {_FIELDS.get(word, word): value for word, value in options.items()}
        if fields.get("image_size") is not None:
            fields["image_size"] = _square(fields["image_size"], PREFIX + name)
        model = TimmViT(model_config(name, **fields))
        model.architecture = PREFIX + name
        return model

    build.__name__ = build.__qualname__ = PREFIX + name
    build.__doc__ = f"{name} of fathoms."
    return build


for _name in list_models():
    globals()[PREFIX + _name] = register_model(_entrypoint(_name))
