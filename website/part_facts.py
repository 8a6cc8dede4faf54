"""Facts about one part, read from its registry and its class: formula, text, paper, and how it starts."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import nn

from fathoms.models.vit import ViT
from fathoms.models.zoo import model_config
from fathoms.parts import families, plain
from fathoms.parts.residuals import RESIDUALS, build_residual

DEPTHS = (12, 24, 48, 96)
ARXIV = re.compile(r"(?:arXiv:)?(\d{4}\.\d{4,5})")
# The patches of CCT's stem are the stride of its convolutions and poolings.
NEEDS: dict[tuple[str, str], dict[str, Any]] = {("stem", "conv"): {"patch_size": 2}}


def linked(text: str) -> str:
    """A text with its arXiv numbers as links.

    >>> linked("Ba et al. 2016, arXiv:1607.06450.")
    'Ba et al. 2016, [arXiv:1607.06450](https://arxiv.org/abs/1607.06450).'
    """
    # Angle brackets of a scalar product would be read as a tag.
    return ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text.replace("<", "&lt;"))


def formula(family: str, name: str) -> str:
    """The part in one line; a paper's number at its end is left to `paper`."""
    return re.sub(r",? arXiv:\d{4}\.\d{4,5}", "", families()[family].summary(name))


def paragraphs(family: str, name: str) -> list[str]:
    """Paragraphs of the docstring after its first line, without arguments, examples and papers."""
    entry = families()[family][name]
    if not inspect.isclass(entry):
        return []
    kept = (inspect.getdoc(entry) or "").split("\n\n")[1:]
    outside = ("Args:", ">>>", "Paper", "From:", "T-Fixup, which")
    return [" ".join(text.split()) for text in kept if not text.startswith(outside)]


def paper(family: str, name: str) -> str:
    """Authors and link; "none named" for what is older than its papers."""
    summary = families()[family].summary(name)
    if found := ARXIV.search(summary):
        return linked(f"arXiv:{found[1]}")
    text = inspect.getdoc(families()[family][name]) or ""
    if name == "tfixup":
        return "Huang et al. 2020, proceedings.mlr.press/v119/huang20f"
    found = re.search(r"^(?:Papers?|From): (.+?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return linked(" ".join(found[1].split()).removesuffix(".")) if found else "none named"


def start(family: str, name: str) -> str:
    """Parameters of the part with their first values."""
    if family == "residual":
        return _residual_start(name)
    if name == "scalenorm":
        return "g sqrt(dim)"
    if "placement" in family:
        return "nothing of its own; its norms start as theirs do"
    torch.manual_seed(0)
    if family == "stem_norm":
        norms = families()[family].build(name, 48, 64)
        sites = [site for site, norm in zip(norms._fields, norms, strict=True) if norm is not None]
        return f"LayerNorm {' and '.join(sites)}: weight 1, bias 0" if sites else "nothing is learned"
    if (family, name) == ("attention", "class_attention"):
        model = ViT(model_config("vit_digits", readout="class_attention"))
    else:
        model = ViT(model_config("vit_digits", **{family: name, **NEEDS.get((family, name), {})}))
    kind = families()[family][name]
    part = next((module for module in model.modules() if type(module) is kind), None)
    return _values(part) if part is not None else "nothing is learned"


def _residual_start(name: str) -> str:
    method = RESIDUALS.metadata(name)
    texts = {}
    for depth in DEPTHS:
        module = build_residual(name, 8, depth=depth, index=0, factor=1.0, prefix=1, warmup=0.2)
        texts[depth] = _values(module)
    if len(set(texts.values())) == 1:
        own = texts[DEPTHS[0]]
    else:
        own = "; ".join(f"{text} at {depth} blocks" for depth, text in texts.items())
    rule = (method.weights.__doc__ or "").partition("\n")[0].removesuffix(".")
    return f"{own}. Linears of a branch: {rule}"


def _values(module: nn.Module) -> str:
    """Name and first value of each parameter; a spread of values as its deviation."""
    listed = []
    for name, value in module.named_parameters():
        flat = value.detach().flatten()
        if bool((flat == flat[0]).all()):
            listed.append(f"{name} {plain(round(float(flat[0]), 8)).removesuffix('.0')}")
        else:
            listed.append(f"{name} random, deviation {float(flat.std()):.1g}")
    return ", ".join(listed) or "nothing is learned"
