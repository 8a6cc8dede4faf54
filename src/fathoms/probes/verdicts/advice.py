"""Advice on findings of the probe: what usually helps, without what the model has already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any] | None
"""Fields of ViTConfig; None for a model that is not fathoms' own, which takes none of its flags."""

SCALED = ("layerscale", "rezero", "rezero_shared", "skipinit")
"""Values of --residual with a learned scale, small unless --residual-init says otherwise."""
QUIET = (*SCALED, "fixup", "prores")
"""Values of --residual whose branches may add nothing at first."""
_PRE = ("pre", "pre_post", "keel")
_LARGE = 0.1


def against_explosion(config: Config) -> str:
    """A gradient that explodes."""
    return _joined(_norm(config), _scale(config)) or "a lower --lr, or fewer blocks"


def against_vanishing(config: Config) -> str:
    """A gradient that vanishes."""
    post = config is not None and "post" in _placements(config)
    deepnorm = "--residual deepnorm" if post and config["residual"] == "none" else None
    return _joined(_norm(config), deepnorm) or "fewer blocks"


def against_divergence(config: Config) -> str:
    """A loss or a stream that rises."""
    return _joined("a lower --lr", "a warm-up", _scale(config))


def against_stalling(config: Config) -> str:
    """Tokens that become alike, a stream that is overwritten."""
    return _joined("a lower --lr", _norm(config), _scale(config))


def against_growth(config: Config) -> str:
    """A stream that grows fast with depth."""
    placed = config is not None and "pre_post" in _placements(config)
    return _joined(_scale(config), None if placed else "pre_post norms") or "fewer blocks"


def against_logits(config: Config) -> str:
    """Attention logits out of range."""
    if config is None:
        return "a norm on queries and keys"
    return "--qk-norm rmsnorm" if config["qk_norm"] == "none" else "a lower --lr"


def against_silence(config: Config) -> str:
    """Branches that add nothing, although no scale says so."""
    return _joined(_norm(config), "a larger initialisation")


def _placements(config: Mapping[str, Any]) -> tuple[str, str]:
    return config["attn_placement"], config["mlp_placement"]


def _norm(config: Config) -> str | None:
    if config is None:
        return "a norm before each branch"
    if config["norm"] == "none":
        return "--norm layernorm"
    if all(placement in _PRE for placement in _placements(config)):
        return None
    return "pre-norm (--attn-placement pre --mlp-placement pre)"


def _scale(config: Config) -> str | None:
    if config is None:
        return "a residual scale that starts small"
    if config["residual"] in SCALED:
        return "a smaller --residual-init" if (config["residual_init"] or 0.0) >= _LARGE else None
    if config["residual"] != "none" or "keel" in _placements(config):
        return None
    return "a residual scale that starts small (--residual layerscale)"


def _joined(*pieces: str | None) -> str:
    """The pieces there are, as a list of alternatives."""
    found = [piece for piece in pieces if piece is not None]
    if len(found) < 3:
        return ", or ".join(found)
    return f"{', '.join(found[:-1])}, or {found[-1]}"
