"""Records the statistics of every residual connection while a batch runs forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fathoms.parts.attentions.attention import ClassAttention, SelfAttention
from fathoms.parts.block import Block
from fathoms.parts.mlp import BiasedGelu
from fathoms.parts.norms.dyt import Derf, DyT
from fathoms.probes.attention_statistics import attention_statistics, own_logits
from fathoms.probes.stream_tracer import StreamTracer, is_foreign_dyt, output_of
from fathoms.probes.tensor_statistics import (
    Values,
    dead_share,
    join_statistics,
    largest,
    norm,
    rms,
    saturated_share,
    token_statistics,
)

Hook = Callable[..., Any]

# The branch that a statistic belongs to.
_TOLD_BY = {"logit": "attention", "hidden_max": "MLP"}


class Recorder:
    """Statistics by (block, branch), each a tensor on the model's device until `read`.

    Args:
        model: The model that will run.
        blocks: Its blocks by name.
        light: Leave out what looks at every pair of tokens: entropy, logits and distance of attention.
    """

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module], light: bool = False) -> None:
        self.model, self.blocks, self.light = model, blocks, light
        self.sites: dict[tuple[str, str], Values] = {}
        self.pending: Values = {}
        self.unseen: list[str] = []
        self.recording = True
        self.first_layer: tuple[str, nn.Module] | None = None
        self.block = ""
        self.prefix = _prefix_tokens(model)
        self.tracer = StreamTracer(self._join_foreign, self._attended, self._activated)

    def install(self) -> list[RemovableHandle]:
        """Put the hooks on the model."""
        handles = [
            module.register_forward_pre_hook(self._runner(name))
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d)
        ]
        for name, block in self.blocks.items():
            handles.append(block.register_forward_pre_hook(self._opener(name), with_kwargs=True))
            handles.append(block.register_forward_hook(self._closer(name)))
            for module in block.modules():
                handles += self._watch(module)
            if isinstance(block, Block):
                for branch, join in (("attn", block.attn_join), ("mlp", block.mlp_join)):
                    handles += self._watch_join(name, branch, join)
        return handles

    def stop(self) -> None:
        """The forward pass is over; a block that is computed again for the backward pass is not measured again."""
        self.recording = False

    def read(self) -> dict[tuple[str, str], dict[str, float]]:
        """All numbers, fetched from the device in one transfer."""
        places = [(site, name) for site, values in self.sites.items() for name in values]
        numbers = [self.sites[site][name].double() for site, name in places]
        found: dict[tuple[str, str], dict[str, float]] = {site: {} for site in self.sites}
        for (site, name), number in zip(
            places, torch.stack(numbers).tolist() if numbers else [], strict=True
        ):
            found[site][name] = number
        return found

    def _runner(self, name: str) -> Hook:
        def runs(layer: nn.Module, _inputs: Any) -> None:
            # Before the first block, a layer is of the stem.
            if self.first_layer is None and not self.block:
                self.first_layer = (name, layer)

        return runs

    def _opener(self, name: str) -> Hook:
        def opened(block: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
            if self.recording:
                self.block, self.pending = name, {}
                if not isinstance(block, Block):
                    self.tracer.enter((*inputs, *named.values()))

        return opened

    def _closer(self, name: str) -> Hook:
        def closed(_block: nn.Module, inputs: Any, output: Any) -> None:
            if not self.recording:
                return
            self.tracer.leave()
            stream, after = output_of(inputs), output_of(output)
            if any(block == name for block, _ in self.sites):
                # These statistics are of a branch that no addition has taken.
                left = [branch for key, branch in _TOLD_BY.items() if key in self.pending]
                self.unseen += [f"{name}: the addition of its {branch} was not seen" for branch in left]
                return
            # No residual connection was seen, as in a block that is one kernel: its own is measured.
            if stream is not None and after is not None and after.shape == stream.shape:
                self.unseen.append(f"{name}: no addition was seen; its row is of the whole block")
                self._joined((name, "block"), stream, after.detach() - stream.detach(), after)
            else:
                self.unseen.append(f"{name}: no addition was seen, and it has no row")

        return closed

    def _watch_join(self, name: str, branch: str, join: nn.Module) -> list[RemovableHandle]:
        seen: dict[str, Tensor] = {}

        def keeper(term: str) -> Hook:
            def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
                seen[term] = output.detach()

            return keep

        def keep_join(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if self.recording:
                self._joined((name, branch), inputs[0], seen.pop("added"), output, seen.pop("skip"))

        drop_path: Any = join.drop_path
        enlarge: Any = join.enlarge
        return [
            drop_path.register_forward_hook(keeper("added")),
            enlarge.register_forward_hook(keeper("skip")),
            join.register_forward_hook(keep_join),
        ]

    def _watch(self, module: nn.Module) -> list[RemovableHandle]:
        """Hooks on the modules whose inside no torch function shows."""
        if isinstance(module, SelfAttention | ClassAttention):
            return [module.register_forward_pre_hook(self._look_at_attention)]
        if isinstance(module, DyT | Derf) or is_foreign_dyt(module):
            return [module.register_forward_pre_hook(self._look_at_curve)]
        if isinstance(module, BiasedGelu):
            return [module.register_forward_pre_hook(self._look_at_gelu)]
        if isinstance(module, nn.GELU):
            return [module.register_forward_pre_hook(lambda _m, inputs: self._activated(inputs[0], "gelu"))]
        if isinstance(module, nn.SiLU):
            return [module.register_forward_pre_hook(lambda _m, inputs: self._activated(inputs[0], "silu"))]
        return []

    @torch.no_grad()
    def _look_at_attention(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if self.recording and not self.light:
            self._attended(own_logits(module, inputs))

    @torch.no_grad()
    def _look_at_curve(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        shift = getattr(module, "shift", None)
        if self.recording:
            curve = inputs[0].detach() * module.alpha
            self.pending["saturated"] = saturated_share(curve if shift is None else curve + shift)

    @torch.no_grad()
    def _look_at_gelu(self, module: BiasedGelu, inputs: tuple[Tensor, ...]) -> None:
        self._activated(inputs[0] + module.bias, "gelu")

    @torch.no_grad()
    def _attended(self, logits: Tensor) -> None:
        if self.recording and not self.light:
            with torch.autocast(logits.device.type, enabled=False):
                self.pending |= attention_statistics(logits, self.prefix)

    @torch.no_grad()
    def _activated(self, x: Tensor, kind: str) -> None:
        if self.recording:
            self.pending |= {"dead": dead_share(x, kind), "hidden_max": largest(x)}

    def _join_foreign(self, stream: Tensor, added: Tensor, output: Tensor, skip: Tensor) -> None:
        branch = "attn" if "logit" in self.pending or not self._has(self.block, "attn") else "mlp"
        if self._has(self.block, branch):
            count = sum(block == self.block for block, _ in self.sites)
            branch = f"{branch}{count}"
        self._joined((self.block, branch), stream, added, output, skip)

    def _has(self, block: str, branch: str) -> bool:
        return (block, branch) in self.sites

    def _joined(
        self, site: tuple[str, str], stream: Tensor, added: Tensor, output: Tensor, skip: Tensor | None = None
    ) -> None:
        with torch.no_grad(), torch.autocast(stream.device.type, enabled=False):
            values = join_statistics(stream, added, skip) | token_statistics(output)
        values |= self.pending
        self.pending = {}
        sizes = [
            values[name] for name in ("stream_max", "added_max", "hidden_max", "logit") if name in values
        ]
        values["largest"] = torch.stack([size.double() for size in sizes]).max()
        self.sites[site] = values

        @torch.no_grad()
        def keep_gradient(gradient: Tensor) -> None:
            values.update(gradient=norm(gradient), gradient_rms=rms(gradient))

        if output.requires_grad:
            output.register_hook(keep_gradient)


def _prefix_tokens(model: nn.Module) -> int | None:
    """Tokens in front of the patches, where the model says so."""
    count = getattr(model, "num_prefix_tokens", None)
    return count if isinstance(count, int) else None
