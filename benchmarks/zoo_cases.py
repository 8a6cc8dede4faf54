"""Surgery on code that it was wrong about, now and before: `python benchmarks/zoo_cases.py`, in results/zoo_cases.md.

Each case is a few lines of somebody's code at which commit cf1a1fe was wrong in silence (S), raised a traceback (T) or
gave advice that does not help (A). `--before SRC` runs them on the package of another checkout and stores what it said.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fathoms
from fathoms.errors import FathomsError

RESULTS = Path(__file__).parents[1] / "results"
TEXT = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99}


def library(name: str, key: str, **options: object) -> nn.Module:
    """A model of timm, or of transformers by its class, in inference."""
    torch.manual_seed(0)
    found = importlib.import_module(name)
    if name == "timm":
        return found.create_model(key, **options).eval()
    return getattr(found, key)(
        getattr(found, key.replace("Model", "Config").replace("Encoder", ""))(**options)
    ).eval()


def change(model: Callable[[Tensor], Tensor], before: Tensor, x: Tensor) -> str:
    """The largest difference of the output over its largest value."""
    return f"{float((model(x) - before).abs().max() / before.abs().max()):.1e}"


def swapped(model: nn.Module, to: str = "learnable_scaler", **options: object) -> str:
    """How many norms were swapped, and which stayed with which reason."""
    report = fathoms.swap_norms(model, to, **options)
    left = [f"{name}: {why}" for name, why in getattr(report, "left", ())]
    return f"{len(report)} swapped, {len(left)} left" + (f" ({'; '.join(left)})" if left else "")


def folded(model: nn.Module, images: object = None) -> str:
    """How many parts were folded, and how far the output moved."""
    report = fathoms.fold(model, images=images)[1]
    return f"{len(report)} folded, {len(report.left)} left, difference {report.difference:.1e}"


def fused_activation() -> str:
    """S1: calibrate on a norm with its activation inside."""
    x, model = torch.randn(8, 3, 64, 64), library("timm", "mobilenetv3_small_050")
    before = model(x)
    report = fathoms.swap_norms(model, "learnable_scaler", calibrate=x)
    return f"fit error {report.rows[0].fit_error:.1e}, output moves by {change(model, before, x)}"


def lost_activation() -> str:
    """S2: RmsNormAct2d."""
    model = nn.Sequential(importlib.import_module("timm.layers.norm_act").RmsNormAct2d(8))
    fathoms.swap_norms(model, "learnable_scaler")
    return f"least output {float(model(torch.randn(2, 8, 4, 4)).detach().min()):.2g}"


def sequences() -> str:
    """S3: GroupNorm of a sequence, a batch of one."""
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.GroupNorm(2, 8))
    fathoms.swap_norms(model, "learnable_scaler")
    return f"output of shape {tuple(model(torch.randn(1, 3, 10)).shape)}"


def volumes() -> str:
    """S3: SyncBatchNorm of volumes."""
    model, x = nn.Sequential(nn.Conv3d(3, 8, 1), nn.SyncBatchNorm(8)).eval(), torch.randn(2, 3, 2, 3, 4)
    norm = model[1]
    before = F.batch_norm(model[0](x), norm.running_mean, norm.running_var, norm.weight, norm.bias).detach()
    fathoms.swap_norms(model, "learnable_scaler")
    return f"output moves by {change(model, before, x)}"


def one_plus_weight() -> str:
    """S4: an untrained Gemma2, whose gains are one plus a weight."""
    more = {"num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 96}
    model = library("transformers", "Gemma2Model", **TEXT, **more)
    fathoms.swap_norms(model, "learnable_scaler")
    return f"largest output {float(model(torch.arange(8)[None]).last_hidden_state.detach().abs().max()):.2g}"


class PadsWhereItMust(nn.Module):
    """A normed sequence that is padded to a multiple of four."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        nn.init.ones_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Pad between norm and linear."""
        more = -x.shape[1] % 4
        return self.linear(F.pad(self.norm(x), (0, 0, 0, more)) if more else self.norm(x)).mean(1)


def other_sizes() -> str:
    """S5: a fold that holds at one size only."""
    model, report = fathoms.fold(PadsWhereItMust(), images=torch.randn(2, 8, 8))
    del model
    said = [note for note in getattr(report, "notes", ()) if "differs at" in note]
    return said[0] if said else "nothing is said"


def frozen_norms() -> str:
    """S6: ResNet after timm.utils.freeze."""
    model = library("timm", "resnet18")
    importlib.import_module("timm.utils").freeze(model)
    return swapped(model)


def t5() -> str:
    """S6: T5's encoder."""
    return swapped(
        library("transformers", "T5EncoderModel", d_model=32, d_kv=8, d_ff=64, num_layers=2, vocab_size=99)
    )


def other_norms() -> str:
    """S6: norms that compute something else."""
    layers = importlib.import_module("timm.layers")
    return swapped(
        nn.Sequential(nn.BatchNorm2d(8), layers.EvoNorm2dS0(8), layers.FilterResponseNormTlu2d(8)).eval()
    )


def a_norm_itself() -> str:
    """S7: a model that is itself a norm."""
    model = nn.LayerNorm(8)
    return f"{swapped(model, 'dyt')}, still {type(model).__name__}"


def encoder(**options: object) -> nn.Module:
    """An encoder of torch, whose fused path reads the weights of its norms."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)  # type: ignore[arg-type]
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for module in [m for m in model.modules() if isinstance(m, nn.LayerNorm)]:
        nn.init.normal_(module.weight)
    return model


def encoder_folded() -> str:
    """T1: fold of nn.TransformerEncoder."""
    return folded(encoder(norm_first=True), torch.randn(2, 5, 32))


def encoder_swapped() -> str:
    """T1: nn.TransformerEncoder in inference after a swap."""
    model = encoder()
    fathoms.swap_norms(model, "dyt")
    with torch.no_grad():
        return f"runs, output of shape {tuple(model(torch.randn(2, 5, 32)).shape)}"


def no_norm() -> str:
    """T2: a model without norms at another image size."""
    return swapped(library("timm", "resmlp_12_224", img_size=64), "dyt")


class TwoInputs(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the second at the end."""
        return self.linear(self.norm(x)) + y


def two_inputs() -> str:
    """T3: a model of two inputs, given as a tuple."""
    return folded(TwoInputs(), (torch.randn(2, 4, 8), torch.randn(2, 4, 8)))


def one_of_two() -> str:
    """T3: the same, given one."""
    return folded(TwoInputs(), torch.randn(2, 4, 8))


def gated() -> str:
    """T4: Mamba2, whose blocks read the dtype of their norm's weight."""
    more = {"num_heads": 8, "head_dim": 12, "n_groups": 1, "state_size": 16, "chunk_size": 8}
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "vocab_size": 99}
    model = library("transformers", "Mamba2Model", **sizes, **more)
    return f"{swapped(model)}; then {tuple(model(torch.arange(8)[None]).last_hidden_state.shape)}"


def left_out() -> str:
    """A: a LayerNorm over two axes, left out by only=."""
    return swapped(nn.Sequential(nn.LayerNorm((4, 8)), nn.LayerNorm(8)), "dyt", only="1")


def standardised() -> str:
    """A: NFNet's weight standardisation."""
    return swapped(library("timm", "nf_resnet26"), "dyt")


def batchnorms() -> str:
    """A: RegNet, swapped and folded."""
    model, x = library("timm", "regnetx_002"), torch.randn(2, 3, 64, 64)
    fathoms.swap_norms(model, "learnable_scaler")
    return folded(model, x)


CASES = [
    fused_activation,
    lost_activation,
    sequences,
    volumes,
    one_plus_weight,
    other_sizes,
    frozen_norms,
    t5,
]
CASES += [other_norms, a_norm_itself, encoder_folded, encoder_swapped, no_norm, two_inputs, one_of_two, gated]
CASES += [left_out, standardised, batchnorms]


def outcome(case: Callable[[], str]) -> str:
    """What a case gives: its words, our refusal, or a traceback."""
    torch.manual_seed(0)
    try:
        return case()
    except FathomsError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - the row says so
        return f"traceback: {type(error).__name__}: {str(error)[:120]}"


def main() -> None:
    """Run every case and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--before", type=Path, help="src folder of an older checkout, whose outcomes are stored"
    )
    parser.add_argument("--print", action="store_true", help="print the outcomes as JSON, and write nothing")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    store = RESULTS / "zoo_cases.json"
    known = json.loads(store.read_text()) if store.exists() else {}
    if arguments.before is not None:
        command = [sys.executable, __file__, "--print"]
        printed = subprocess.run(
            command, env={"PYTHONPATH": str(arguments.before)}, capture_output=True, text=True
        )
        known = {name: {"before": said} for name, said in json.loads(printed.stdout.splitlines()[-1]).items()}
    found = {case.__name__: outcome(copy.copy(case)) for case in CASES}
    if arguments.print:
        print(json.dumps(found))
        return
    rows = {name: {**known.get(name, {}), "now": said} for name, said in found.items()}
    store.write_text(json.dumps(rows, indent=1) + "\n")
    lines = [
        "# What surgery was wrong about",
        "",
        "`python benchmarks/zoo_cases.py`; before: commit cf1a1fe.",
        "",
    ]
    lines += ["| case | before | now |", "|---|---|---|"]
    for case in CASES:
        cells = [" ".join(rows[case.__name__].get(when, "").split()) for when in ("before", "now")]
        lines.append(f"| {(case.__doc__ or '').rstrip('.')} | {' | '.join(cells)} |")
    store.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
