"""fathoms' models in timm's registry: `import fathoms.timm_models`, then `timm.create_model("fathoms_cait_s24_224")`.

Every name of the zoo is registered under `fathoms_NAME`, for timm's own training script and whatever else builds
models through timm. timm's words are taken (`img_size`, `in_chans`, `drop_path_rate`), and any field of ViTConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from fathoms.errors import ConfigError, UnknownNameError
from fathoms.models.config import ViTConfig
from fathoms.models.param_groups import layer_of, undecayed
from fathoms.models.vit import ViT
from fathoms.models.weight_names import State, from_timm, layout_of, resize_positions, unwrap
from fathoms.models.weights import settle_class_token
from fathoms.models.zoo import IMAGENET, data_config, list_models, model_config
from fathoms.parts import LEAVES

try:
    from timm.layers import register_notrace_module
    from timm.models import generate_default_cfgs, load_pretrained, register_model
except ImportError as _error:
    raise ConfigError("timm is not installed; pip install 'fathoms[timm]'") from _error

PREFIX = "fathoms_"
# timm's words for fields of ViTConfig.
_FIELDS = {"img_size": "image_size", "in_chans": "in_channels", "drop_path_rate": "drop_path"}
# What timm's script passes to every model, and the value that asks for nothing.
_NEUTRAL = {"drop_rate": 0.0, "drop_block_rate": 0.0, "scriptable": False}
# Entries of timm's configuration that name weights.
_SOURCES = ("file", "hf_hub_id", "url", "state_dict")
# timm's words for read-outs.
_POOLS = {"cls": "token", "mean": "avg"}
_PIXELS = {**IMAGENET, "crop_pct": 0.9, "interpolation": "bicubic"}

__all__ = ["PREFIX", "TimmViT"]


class TimmViT(ViT):
    """A ViT with the methods that timm's optimizers and data pipeline ask a model for."""

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """Input size and preprocessing, where timm looks for them, and what `create_model` was given."""
        own = _cfg(self.architecture.removeprefix(PREFIX), self.config)
        return {**own, "architecture": self.architecture, **self.given_cfg}

    default_cfg = pretrained_cfg
    architecture = f"{PREFIX}vit"
    """The name that it was created by."""
    given_cfg: Mapping[str, Any] = MappingProxyType({})
    """Entries of timm's configuration that a saved model, `pretrained_cfg` or its overlay brought."""
    pretrained_model_args: Mapping[str, Any] = MappingProxyType({})
    """Arguments that the source of the weights was built with."""

    @property
    def global_pool(self) -> str:
        """The read-out in timm's words."""
        return _POOLS.get(self.config.readout, self.config.readout)

    @property
    def embed_dim(self) -> int:
        """Width of a token."""
        return self.config.dim

    head_hidden_size = embed_dim

    @property
    def in_chans(self) -> int:
        """Channels of the images."""
        return self.config.in_channels

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The module, the channels and the stride of each intermediate."""
        own = {"num_chs": self.config.dim, "reduction": self.config.patch_size}
        return [{"module": f"blocks.{index}", **own} for index in range(self.config.depth)]

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
        return set(undecayed(self))

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """The layer of a parameter, for timm's layer decay: that of `fathoms.param_groups`."""
        del coarse
        return lambda name: layer_of(self, name)


class UnknownArgumentError(UnknownNameError, TypeError):
    """An argument that no model takes, as timm's own models refuse it."""


def _square(size: int | Sequence[int], name: str) -> int:
    """The side of square images, given as one number or as two."""
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) != 1:
        raise ConfigError(f"{name}: img_size={'x'.join(map(str, cast(Sequence[int], size)))} is not square")
    return sides.pop()


def _cfg(name: str, config: ViTConfig) -> dict[str, Any]:
    """What timm's configuration of a model says, by its name."""
    return {
        "num_classes": config.num_classes,
        "input_size": (config.in_channels, config.image_size, config.image_size),
        "fixed_input_size": True,
        **_PIXELS,
        **data_config(name),
        "first_conv": "stem.convs.0" if config.stem == "conv" else "stem.proj",
        "classifier": ("head", "head_dist") if config.distill_token else "head",
    }


def _given_cfg(base: Any, overlay: Mapping[str, Any] | None) -> dict[str, Any]:
    """Entries of timm's configuration that a caller gives; a tag is refused, for no name has one."""
    if isinstance(base, str):
        raise ConfigError(f"pretrained_cfg={base!r}: no model of fathoms has tags; leave it out")
    entries = base if base is None or isinstance(base, Mapping) else base.to_dict()
    return {key: value for key, value in {**(entries or {}), **(overlay or {})}.items() if value is not None}


def _fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that entries of timm's configuration set where a caller leaves them out, as timm's own models do."""
    channels, *size = given.get("input_size", (None,))
    fields = {"num_classes": given.get("num_classes", -1), "in_channels": channels, "image_size": size}
    return {name: value for name, value in fields.items() if value not in (None, -1, [])}


def _renamed(state: Mapping[str, object], model: TimmViT) -> State:
    """Weights of a checkpoint under fathoms' names, their positions on the model's grid."""
    tensors = unwrap(state)
    tensors = from_timm(tensors) if layout_of(tensors) == "timm" else tensors
    own: State = dict(model.named_parameters())
    settle_class_token(own, tensors)
    table = tensors.get("position.table")
    if table is not None and "position.table" in own and table.shape[0] != own["position.table"].shape[0]:
        tensors["position.table"] = resize_positions(table, model.config.grid)
    return tensors


def _entrypoint(name: str) -> Callable[..., TimmViT]:
    """The function that timm calls to build a model."""

    def build(pretrained: bool = False, **options: Any) -> TimmViT:
        given = _given_cfg(options.pop("pretrained_cfg", None), options.pop("pretrained_cfg_overlay", None))
        source_args = options.pop("pretrained_model_args", None) or {}
        cache = options.get("cache_dir")
        options.pop("cache_dir", None)
        if pretrained and not any(given.get(source) for source in _SOURCES):
            raise ConfigError(
                f"{PREFIX}{name}: has no pretrained weights; give timm's pretrained_path, a saved model, or in "
                'fathoms.create_model weights="timm/..."'
            )
        for word, neutral in _NEUTRAL.items():
            if options.pop(word, neutral) != neutral:
                raise ConfigError(f"{PREFIX}{name}: {word} has no part in this model; leave it out")
        if options.pop("features_only", False):
            raise ConfigError(
                f"{PREFIX}{name}: features_only is not supported; call forward_intermediates of the model"
            )
        pool = options.pop("global_pool", None)
        home, dtype = options.pop("device", None), options.pop("dtype", None)
        fields = {**_fields_of(given), **{_FIELDS.get(word, word): v for word, v in options.items()}}
        if fields.get("image_size") is not None:
            fields["image_size"] = _square(fields["image_size"], PREFIX + name)
        try:
            config = model_config(name, **fields)
        except UnknownNameError as error:
            raise UnknownArgumentError(str(error)) from None
        with nullcontext() if home is None else torch.device(home):
            model = TimmViT(config).to(dtype)
        model.architecture = PREFIX + name
        if pool not in (None, model.global_pool):
            raise ConfigError(
                f"{PREFIX}{name}: global_pool={pool!r} is not its read-out {model.config.readout!r}; set readout="
            )
        model.given_cfg, model.pretrained_model_args = given, source_args
        if pretrained:
            sizes = {"num_classes": model.config.num_classes, "in_chans": model.config.in_channels}
            load_pretrained(model, model.pretrained_cfg, **sizes, filter_fn=_renamed, cache_dir=cache)
        # They were of the weights; those of this model follow its config.
        model.given_cfg = {
            key: value for key, value in given.items() if key not in ("num_classes", "input_size")
        }
        return model

    build.__name__ = build.__qualname__ = PREFIX + name
    build.__doc__ = f"{name} of fathoms."
    return build


for _leaf in LEAVES:
    register_notrace_module(_leaf)
_CONFIGS = {name: _cfg(name, model_config(name)) for name in list_models()}
default_cfgs = generate_default_cfgs({f"{PREFIX}{name}": cfg for name, cfg in _CONFIGS.items()})
for _name in list_models():
    globals()[PREFIX + _name] = register_model(_entrypoint(_name))
