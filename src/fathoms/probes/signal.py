"""Signal propagation through the depth: activations forward, gradients backward, of any Vision Transformer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import Optimizer

from fathoms.files import finite
from fathoms.probes.blocks import main_stack
from fathoms.probes.verdict import Verdict, judged, not_judged
from fathoms.text_table import aligned, as_html, plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Site:
    """One residual connection: what one branch of one block adds to the stream. None: it has no such number.

    Args:
        block: Name of the block, such as "blocks.3".
        branch: "attn" or "mlp"; "block" where a block shows no branches.
        stream: Root mean square of the residual stream before the addition.
        added: Root mean square of the branch's output, norm and scale included.
        ratio: `added` over what it is added to: the stream, times the skip's factor in DeepNorm and KEEL.
        gradient: Norm of the loss's gradient on the stream after the addition.
        weights: Norm of the loss's gradient on the parameters of the branch.
        gradient_rms: Root mean square of the gradient on the stream.
        weights_rms: Root mean square of the gradient on the parameters.
        stream_max: Largest |value| of the stream.
        added_max: Largest |value| of what is added.
        hidden_max: Largest |value| that enters the MLP's activation.
        largest: Largest |value| of stream, branch, hidden units and attention logits.
        parallel: Part of `ratio` along the stream, token by token; parallel² + orthogonal² = ratio².
        orthogonal: Part of `ratio` across the stream.
        alignment: Mean cosine between the stream and what is added.
        token_cosine: Mean cosine between two tokens of an image, after the addition; 1: all tokens are the same.
        token_mean: Share of the stream's energy in the mean over the tokens, after the addition.
        entropy: Entropy of the attention over its maximum; 1: uniform, 0: one token.
        logit: Largest |attention logit|.
        distance: Mean distance between a patch and the patches it looks at, in patches.
        dead: Share of hidden units whose activation is flat for the whole batch.
        saturated: Share of values on the flat parts of DyT's or Derf's curve.
        float16: Share of values of stream and branch that float16 cannot hold.
        bfloat16: Share of values within a factor of 256 of bfloat16's largest.
        gamma_mean: Mean |scale| of the branch (LayerScale, ReZero, SkipInit); with gamma_min and gamma_max.
        gamma_min: Smallest |scale|.
        gamma_max: Largest |scale|.
        norm_mean: Mean |weight| of the branch's norms (LearnableScaler's `a` too); with norm_min and norm_max.
        norm_min: Smallest |weight|.
        norm_max: Largest |weight|.
        update: Norm of the next update over the norm of the weights, from the optimizer's state.
    """

    block: str
    branch: str
    stream: float
    added: float
    ratio: float
    gradient: float
    weights: float
    gradient_rms: float = 0.0
    weights_rms: float = 0.0
    stream_max: float = 0.0
    added_max: float = 0.0
    hidden_max: float | None = None
    largest: float = 0.0
    parallel: float = 0.0
    orthogonal: float = 0.0
    alignment: float = 0.0
    token_cosine: float | None = None
    token_mean: float = 0.0
    entropy: float | None = None
    logit: float | None = None
    distance: float | None = None
    dead: float | None = None
    saturated: float | None = None
    float16: float = 0.0
    bfloat16: float = 0.0
    gamma_mean: float | None = None
    gamma_min: float | None = None
    gamma_max: float | None = None
    norm_mean: float | None = None
    norm_min: float | None = None
    norm_max: float | None = None
    update: float | None = None


@dataclass(frozen=True)
class Projection:
    """The layer that reads the pixels: a ViT's patch projection, or the first convolution of a conv stem.

    Args:
        layer: Its name.
        weights: Norm of the loss's gradient on its parameters.
        weights_rms: Root mean square of that gradient.
        update: Norm of its next update over the norm of its weights, from the optimizer's state; None without one.
    """

    layer: str
    weights: float
    weights_rms: float
    update: float | None = None


COLUMNS = tuple(field.name for field in fields(Site) if field.name not in ("block", "branch"))


BRIEF = ("stream", "ratio", "gradient_rms", "weights_rms", "entropy", "logit", "token_cosine", "largest")
"""Numbers of a site that a terminal or a cell of a notebook has room for."""


@dataclass(frozen=True)
class FirstSteps:
    """The result of the first steps.

    Args:
        losses: The loss before each step.
        after: The signal after the last step; None where the weights did not stay finite.
        guess: The loss of a guess by the shares of the classes.
        opt: Name of the optimizer.
        lr: Its learning rate.
    """

    losses: list[float]
    after: Signal | None
    guess: float
    opt: str = "adamw"
    lr: float = 1e-3


class Signal(list[Site]):
    """The sites of a model from the first block to the last, with the loss and what goes in and comes out."""

    loss: float = math.nan
    logits: float = math.nan
    """Root mean square of the model's output."""
    classes: int = 0
    unseen: tuple[str, ...] = ()
    """Blocks in which a branch ran whose addition was not seen, one sentence each."""
    config: dict[str, Any] | None = None
    """Fields of ViTConfig; None for a model that is not fathoms' own."""
    projection: Projection | None = None
    """None where no linear layer or convolution runs before the first block."""
    first_steps: FirstSteps | None = None
    """What the start is judged by, if steps were taken."""
    drift: Verdict | None = None
    """The trend over a run's own measurements, if it has enough of them."""

    @property
    def growth(self) -> float:
        """Ratio of the stream at the last site to that at the first."""
        stack = self.main()
        return _quotient(stack[-1].stream, stack[0].stream)

    @property
    def gradient_ratio(self) -> float:
        """Gradient at the first site over gradient at the last: near 0 it vanishes, far above 1 it explodes."""
        stack = self.main()
        return _quotient(stack[0].gradient, stack[-1].gradient)

    @property
    def projection_ratio(self) -> float | None:
        """Gradient on a weight of the patch projection over that on a weight of the median branch."""
        if self.projection is None:
            return None
        return _quotient(self.projection.weights_rms, median(site.weights_rms for site in self.main()))

    def main(self) -> list[Site]:
        """The sites of the longest stack, without blocks of class attention at its end."""
        names = main_stack([site.block for site in self])
        return [site for site in self if site.block in names]

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len({site.block for site in self})

    def column(self, name: str, branch: str | None = None) -> list[float | None]:
        """One number of every site, or of the sites of one branch."""
        return [getattr(site, name) for site in self if branch is None or site.branch == branch]

    def to_json(self) -> dict[str, Any]:
        """All sites and the summaries as plain values; JSON has no infinity, so None stands for it."""
        return {
            "growth": finite(self.growth),
            "gradient_ratio": finite(self.gradient_ratio),
            "loss": finite(self.loss),
            "logits": finite(self.logits),
            "unseen": list(self.unseen),
            "projection": None if self.projection is None else _plain(self.projection),
            "projection_ratio": finite(self.projection_ratio),
            "sites": [_plain(site) for site in self],
        }

    def table(self, columns: tuple[str, ...] = COLUMNS) -> str:
        """One line per site, for a terminal; columns without a number are left out."""
        filled = [name for name in columns if any(value is not None for value in self.column(name))]
        rows = [
            (site.block, site.branch, *(_shown(getattr(site, column)) for column in filled)) for site in self
        ]
        return aligned(("block", "branch", *filled), rows)

    def verdict(self, steps: FirstSteps | None = None) -> Verdict:
        """Will this model train, from the optimizer steps that were taken on a copy; or does a trained run drift?

        Without steps the initialisation is described and not judged: it misleads.
        """
        if self.drift is not None and steps is None:
            return self.drift
        sites, steps = self.to_json()["sites"], steps or self.first_steps
        if steps is None:
            return not_judged(sites, self.config)
        later = None if steps.after is None else steps.after.to_json()["sites"]
        return judged(sites, later, self.config, steps.losses, steps.guess, f"{steps.opt} at lr {steps.lr:g}")

    def plot(self, title: str = "Signal and gradient by depth") -> Figure:
        """Signal and gradient by depth."""
        from fathoms.probes.probe_figures import profile_figure

        return profile_figure({"": self.to_json()["sites"]}, title)

    def __str__(self) -> str:
        return f"{self!r}\n{self.table(BRIEF)}"

    def __repr__(self) -> str:
        numbers = f"stream x {_shown(self.growth)}, gradient first / last {_shown(self.gradient_ratio)}"
        return f"Signal({plural(self.depth, 'block')}, loss {_shown(self.loss)}, {numbers})"

    def _repr_html_(self) -> str:
        said = "" if self.first_steps is None and self.drift is None else f"{self.verdict()}\n\n"
        return as_html(repr(self), said + self.table(BRIEF))


def _quotient(a: float, b: float) -> float:
    """The quotient; NaN for 0 / 0, infinity for x / 0."""
    return a / b if b else math.nan if a == 0.0 else math.inf


def _plain(row: Site | Projection) -> dict[str, Any]:
    return {name: finite(value) for name, value in asdict(row).items()}


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def probe(
    model: nn.Module,
    images: Float[Tensor, "B C H W"],
    labels: Int[Tensor, " B"] | None = None,
    *,
    optimizer: Optimizer | None = None,
    light: bool = False,
) -> Signal:
    """Run one batch forward and backward, and measure the signal at every residual connection.

    The model is left unchanged: its mode, its parameters, their gradients, its hooks, and torch's random numbers.
    Models of timm, torchvision and transformers are measured as fathoms' own are.

    Args:
        model: Any module with transformer blocks, also compiled or inside DDP.
        images: A batch.
        labels: Its classes; None draws them at random with a fixed seed.
        optimizer: The optimizer that trains the model, for the update-to-weight ratio.
        light: Leave out the statistics of attention, the costliest.

    >>> import torch
    >>> from fathoms import ViT, ViTConfig
    >>> vit = ViT(ViTConfig(image_size=8, patch_size=2, dim=32, heads=2, depth=4, num_classes=10))
    >>> signal = probe(vit, torch.randn(8, 3, 8, 8))
    >>> [site.branch for site in signal[:2]]
    ['attn', 'mlp']
    """
    from fathoms.probes.measure import measure

    found = measure(model, images, labels, optimizer, light)
    signal = Signal(Site(block, branch, **values) for (block, branch), values in found.sites.items())
    signal.loss, signal.logits, signal.classes = found.loss, found.logits, found.classes
    signal.unseen, signal.config = found.unseen, found.config
    signal.projection = None if found.projection is None else Projection(**found.projection)
    return signal
