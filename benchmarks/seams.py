"""Other people's tools on models of every family: `python benchmarks/seams.py --install`, in results/seams.md.

A cell is one tool on one configuration, with parameters off their start: it works (and equals the plain model where
that can be asked), is refused in one line of ours, or fails. peft, torchao, opacus, accelerate, captum and torchinfo
are installed into a temporary folder, without their dependencies; what is not there is skipped, and the page says so.
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import io
import json
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fathoms
from fathoms import FathomsError, ViT, ViTConfig
from fathoms.errors import reason
from fathoms.models.param_groups import undecayed
from fathoms.parts import LEAVES

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "results" / "seams.json"
EXTRAS = ("peft", "torchao", "opacus", "accelerate", "captum", "torchinfo")
SIZES = {"image_size": 16, "patch_size": 4, "dim": 48, "heads": 4, "depth": 2, "num_classes": 5}
CAIT = {"attention": "talking_heads", "residual": "layerscale", "readout": "class_attention"}
CONFIGS: dict[str, dict] = {
    "plain": {},
    "layerscale": {"residual": "layerscale"},
    "vit5": {"norm": "rmsnorm", "qk_norm": "rmsnorm", "position": "learned_rope", "registers": 4},
    "sincos, mean": {"position": "sincos", "readout": "mean"},
    "rope, mean_cls": {"position": "rope", "readout": "mean_cls"},
    "cait": CAIT,
    "cait, early distillation": {**CAIT, "distill_token": True, "distill_early": True},
    "cct": {"stem": "conv", "stem_layers": 2, "readout": "seqpool"},
    "distilled": {"distill_token": True},
    "late class token": {"class_token_block": 1},
    "dual stem": {"stem_norm": "dual"},
    "drop-path": {"drop_path": 0.3},
    "swiglu, gates": {"mlp": "swiglu", "attn_gate": "channel"},
    "keel": {"attn_placement": "keel", "mlp_placement": "keel"},
    "deepnorm, post": {"residual": "deepnorm", "attn_placement": "post", "mlp_placement": "post"},
    "scaler, rezero_shared": {"norm": "learnable_scaler", "residual": "rezero_shared"},
    "dyt, skipinit": {"norm": "dyt", "residual": "skipinit"},
    "derf, fixup": {"norm": "derf", "residual": "fixup"},
    "scalenorm, tfixup": {"norm": "scalenorm", "residual": "tfixup"},
    "completep": {"residual": "completep", "base_depth": 1, "base_dim": 24},
    **{rule: {"residual": rule} for rule in ("layernorm_scaling", "orthogonal", "mv_split", "prores")},
}
SURGERY: dict[str, Callable[[nn.Module], nn.Module]] = {
    "swapped": lambda model: fathoms.swap_norms(model, "dyt") and model,
    "folded": lambda model: fathoms.fold(model, images=images())[0],
    "accelerated": lambda model: fathoms.accelerate(model, images=images()) and model,
}
CHANGED = (
    "cait, swapped",
    "cait, folded",
    "timm's deit3, swapped",
    "timm's deit3, folded",
    "timm's cait, accelerated",
)
"""What surgery leaves behind passes the same table."""


def build(name: str) -> nn.Module:
    """A model in inference whose parameters are off their start."""
    torch.manual_seed(0)
    base, _, how = name.rpartition(", ") if name in CHANGED else (name, "", "")
    if base.startswith("timm's"):
        named = {"timm's deit3": "deit3_small_patch16_224", "timm's cait": "cait_xxs24_224"}[base]
        sizes = {
            "img_size": 16,
            "patch_size": 4,
            "embed_dim": 48,
            "num_heads": 4,
            "depth": 2,
            "num_classes": 5,
        }
        model = importlib.import_module("timm").create_model(named, **sizes)
    else:
        model = ViT(ViTConfig(**SIZES | CONFIGS[base]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval()
    return SURGERY[how](model).eval() if how else model


def images(batch: int = 2) -> Tensor:
    """The same images in every cell."""
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def near(found: Tensor, wanted: Tensor, tolerance: float = 1e-4) -> None:
    """Refuse outputs that differ by more than rounding."""
    gap = (found - wanted).abs().max().item() / wanted.abs().max().item()
    if not gap < tolerance:
        raise AssertionError(f"the output differs by {gap:.1e}")


def copies(model: nn.Module) -> None:
    """Copies, pickles and averages compute the same and spare the same parameters from decay."""
    others = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.optim.swa_utils.AveragedModel(model).module.eval(),
    )
    for other in others:
        near(other(images()), model(images()))
        assert undecayed(other) == undecayed(model)


def meta_then_weights(model: nn.Module) -> None:
    """Built without memory, filled by a strict load."""
    with torch.device("meta"):
        empty = copy.deepcopy(model).to("meta")
    empty.to_empty(device="cpu")
    for tensor in [*empty.parameters(), *empty.buffers()]:
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else -1)
    empty.load_state_dict(model.state_dict())
    near(empty.eval()(images()), model(images()))


def dtypes(model: nn.Module) -> None:
    """Another size, then another dtype."""
    size = 32 if isinstance(model, ViT) else 16
    if size == 32:
        model.set_image_size(size)
    large = torch.randn(2, 3, size, size)
    for dtype in (torch.bfloat16, torch.float64):
        assert copy.deepcopy(model).to(dtype)(large.to(dtype)).isfinite().all()


def functional(model: nn.Module) -> None:
    """functional_call, gradients per sample, and the model as it was afterwards."""
    own = dict(model.named_parameters())
    near(functional_call(model, {n: p.detach() for n, p in own.items()}, (images(),)), model(images()))
    assert dict(model.named_parameters()).keys() == own.keys()

    def loss(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(model, parameters, (image[None],)).square().sum()

    gradients = vmap(grad(loss), (None, 0))({n: p.detach() for n, p in own.items()}, images())
    assert all(value.shape[0] == 2 for value in gradients.values())


def called(model: nn.Module) -> None:
    """A hook on every module with parameters fires."""
    fired = set()
    for path, module in model.named_modules():
        module.register_forward_hook(lambda *_, path=path: fired.add(path))
    model(images())
    with_parameters = {
        p for p, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None
    }
    heads = {"head_dist"} & with_parameters
    if missing := with_parameters - fired - heads:
        raise AssertionError(f"never called: {', '.join(sorted(missing)[:4])}")


def fx_graph(model: nn.Module) -> None:
    """Build torchvision's feature extractor with blocks and stages as leaves."""
    extractor = importlib.import_module("torchvision.models.feature_extraction").create_feature_extractor
    graph = extractor(model, {"head": "head"}, tracer_kwargs={"leaf_modules": list(LEAVES)})
    whole = isinstance(model, ViT)
    wanted = model.forward_heads(model.forward_features(images()))[0] if whole else model(images())
    near(graph(images())["head"], wanted)


def exported(model: nn.Module) -> None:
    """torch.export with a free batch."""
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: batch},))
    near(program.module()(images(5)), model(images(5)))


def older_onnx(model: nn.Module) -> None:
    """Export with torch's older exporter and a free batch."""
    file = io.BytesIO()
    options = {"dynamo": False, "input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    torch.onnx.export(model, (images(),), file, **options)
    runtime = importlib.import_module("onnxruntime")
    (found,) = runtime.InferenceSession(file.getvalue()).run(None, {"x": images(5).numpy()})
    near(torch.from_numpy(found), model(images(5)).detach(), 1e-3)


def compiled(model: nn.Module) -> None:
    """torch.compile without a break, by the eager backend."""
    torch._dynamo.reset()
    near(torch.compile(model, fullgraph=True, backend="eager")(images()), model(images()))


def scripted(model: nn.Module) -> None:
    """torch.jit.script."""
    torch.jit.script(model)


def traced(model: nn.Module) -> None:
    """torch.jit.trace, in inference."""
    with torch.no_grad():
        near(torch.jit.trace(model, images())(images()), model(images()))


def quantised(model: nn.Module) -> None:
    """torch.ao's dynamic quantisation of all linears."""
    quantize = importlib.import_module("torch.ao.quantization").quantize_dynamic
    near(quantize(copy.deepcopy(model), {nn.Linear}, torch.qint8)(images()), model(images()), 0.3)


def pruned(model: nn.Module) -> None:
    """Pruning of all linears acts and keeps gradients."""
    prune = importlib.import_module("torch.nn.utils.prune")
    before = model(images())
    for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        prune.random_unstructured(module, "weight", 0.5)
    model.train()
    model(images()).square().sum().backward()
    lost = [n for n, p in model.named_parameters() if n.endswith("weight_orig") and p.grad is None]
    lost = [name for name in lost if not name.startswith("head_dist")]
    assert not lost, f"no gradient: {', '.join(lost[:3])}"
    assert not torch.equal(model.eval()(images()), before)


def lora(model: nn.Module) -> None:
    """LoRA of peft on all linears: gradients everywhere, and an exact merge."""
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    out = adapted(images())
    out.sum().backward()
    lost = [n for n, p in adapted.named_parameters() if "lora_" in n and p.grad is None]
    assert not lost, f"no gradient: {', '.join(lost[:3])}"
    near(adapted.merge_and_unload()(images()), out.detach())


def torchao_int8(model: nn.Module) -> None:
    """Weights in int8 by torchao."""
    quantization = importlib.import_module("torchao.quantization")
    other = copy.deepcopy(model)
    quantization.quantize_(other, quantization.Int8WeightOnlyConfig())
    near(other(images()), model(images()), 0.3)


def opacus_samples(model: nn.Module) -> None:
    """opacus: a gradient per sample for every parameter."""
    wrap = importlib.import_module("opacus.grad_sample").GradSampleModule
    module = wrap(model.eval().requires_grad_(), strict=False, loss_reduction="sum")
    for part in module.modules():
        # In training stochastic depth would drop others in the second pass; opacus records nothing in inference.
        part.training = not part._get_name().startswith("Drop")
    module(images()).sum().backward()
    used = {n: p for n, p in module.named_parameters() if p.grad is not None}
    lost = [n for n, p in used.items() if getattr(p, "grad_sample", None) is None]
    assert not lost, f"no grad_sample: {', '.join(lost[:3])}"
    near(
        *(
            torch.cat([g.flatten() for g in each])
            for each in zip(*(_sums(p) for p in used.values()), strict=True)
        )
    )


def _sums(parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """The gradients of each sample, summed, and the gradient."""
    return parameter.grad_sample.sum(0), parameter.grad


def offloaded(model: nn.Module) -> None:
    """Offloading by accelerate's cpu_offload."""
    wanted = model(images())
    accelerate = importlib.import_module("accelerate")
    accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True)
    near(model(images()), wanted)


def captum_layers(model: nn.Module) -> None:
    """LayerActivation of captum on the read-out and the last block."""
    attr = importlib.import_module("captum.attr")
    for layer in (*([model.readout] if isinstance(model, ViT) else []), model.blocks[-1]):
        attr.LayerActivation(model, layer).attribute(images())


def counted(model: nn.Module, **inputs: Tensor) -> None:
    """The total of torchinfo is that of the parameters."""
    found = importlib.import_module("torchinfo").summary(model, verbose=0, **inputs).total_params
    wanted = sum(parameter.numel() for parameter in model.parameters())
    assert found == wanted, f"{found:,} parameters for {wanted:,}"


def counted_running(model: nn.Module) -> None:
    """The same, of a forward pass."""
    counted(model, input_data=images())


NOTES = {
    "opacus": "it differentiates a module in one tensor at a time, and refuses buffers: registers lie on the model "
    "beside RoPE's tables, CaiT's read-out puts an early token in front in a call of its own, and MV-Split reads "
    "branch and stream. `torch.func` gives the gradients of each image in all",
    "torchinfo, of a forward pass": "it takes what runs until the next module of the same depth for the children of a "
    "module, and a branch runs within its join: a scale or norm behind the branch is counted for both. Without inputs "
    "it counts rightly",
    "torch.jit.script": "torch has deprecated TorchScript, whose compiler reads no modern annotations; torch.export, "
    "`fathoms export` and, without gradients, torch.jit.trace take all of them",
}
"""Why a tool that is not ours fails, where that is its own limit."""

TOOLS: dict[str, Callable[[nn.Module], None]] = {
    "copies, pickle, averages": copies,
    "meta, to_empty, strict load": meta_then_weights,
    "another size, then bfloat16, double": dtypes,
    "torch.func": functional,
    "forward hooks": called,
    "torch.fx, leaves": fx_graph,
    "torch.export, free batch": exported,
    "ONNX, older exporter, free batch": older_onnx,
    "torch.compile, full graph": compiled,
    "torch.jit.script": scripted,
    "torch.jit.trace, without gradients": traced,
    "quantize_dynamic": quantised,
    "prune": pruned,
    "peft LoRA, merge": lora,
    "torchao int8": torchao_int8,
    "opacus": opacus_samples,
    "accelerate cpu_offload": offloaded,
    "captum layers": captum_layers,
    "torchinfo": counted,
    "torchinfo, of a forward pass": counted_running,
}


def cell(tool: Callable[[nn.Module], None], name: str) -> tuple[str, str]:
    """The state of one cell, and one line where it is not "works"."""
    try:
        tool(build(name))
    except FathomsError as error:
        return "refused", str(error)
    except ImportError as error:
        return "not installed", str(error)
    # Whatever a tool raises is the cell.
    except Exception as error:  # noqa: BLE001
        return "fails", f"{type(error).__name__}: {reason(error)}"
    return "works", ""


def page(cells: Mapping[str, Mapping[str, tuple[str, str]]]) -> str:
    """The table, and below it every cell that does not work, by its reason."""
    columns = [*CONFIGS, *CHANGED]
    lines = [
        "# Other people's tools",
        "",
        f"`python benchmarks/seams.py --install`, torch {torch.__version__}, CPU. {len(columns)} configurations: "
        f"{'; '.join(columns)}.",
        "",
        "| tool | works | refused in one line | fails | not installed |",
        "|---|---|---|---|---|",
    ]
    states = ("works", "refused", "fails", "not installed")
    for tool, row in cells.items():
        counts = collections.Counter(state for state, _ in row.values())
        lines.append(f"| {tool} | {' | '.join(str(counts[state]) for state in states)} |")
    lines += ["", "## Cells that do not work", ""]
    for tool, row in cells.items():
        if tool in NOTES and any(state != "works" for state, _ in row.values()):
            lines.append(f"- {tool}: {NOTES[tool]}.")
        by_reason: dict[tuple[str, str], list[str]] = {}
        for name, found in row.items():
            if found[0] != "works":
                by_reason.setdefault(found, []).append(name)
        for (state, why), names in by_reason.items():
            where = "all" if len(names) == len(row) else ", ".join(names)
            lines.append(f"- {tool}, {where}: {state}: {' '.join(why.split())[:240]}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run every cell and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="install the tools into a temporary folder")
    parser.add_argument("--packages", type=Path, help="a folder that holds them already")
    parser.add_argument(
        "--tool", choices=TOOLS, action="append", help="only this one, printed instead of written"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.install:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
            for extra in EXTRAS:
                subprocess.run([*pip, extra], check=False)
        # Behind what is installed, so that they bring no other torch.
        sys.path.append(str(arguments.packages or folder))
        for tool in arguments.tool or TOOLS:
            row = {name: cell(TOOLS[tool], name) for name in [*CONFIGS, *CHANGED]}
            print(tool, dict(collections.Counter(state for state, _ in row.values())), flush=True)
            # Read anew, as another process may have added its rows.
            known = json.loads(ROWS.read_text()) if ROWS.exists() else {}
            known[tool] = row
            ROWS.write_text(
                json.dumps({name: known[name] for name in TOOLS if name in known}, indent=1) + "\n"
            )
    rows = {tool: {name: (state, why) for name, (state, why) in row.items()} for tool, row in known.items()}
    ROWS.with_suffix(".md").write_text(page({name: rows[name] for name in TOOLS if name in rows}))


if __name__ == "__main__":
    main()
