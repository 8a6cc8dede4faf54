"""Surgery held against the field: small models of timm, torchvision and transformers, swapped, folded, accelerated.

    python benchmarks/zoo.py [--only GLOB] [--seconds 300] [--jobs 2] [--again]

One member of each of timm's model files, torchvision's classifiers and two detectors, and families of transformers,
with random weights. Each is one process of one thread with a limit of processor time; what it finds is kept in
results/zoo.json, so a second call goes on where the first ended (`--again` repeats those that failed or were cut off).
results/zoo.md is the table. Every swapped norm is held against gain * x + shift, written here apart from the library,
in the whole network; every fold and acceleration against the outputs of the original.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import importlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fathoms
from fathoms.errors import FathomsError
from fathoms.surgery.inputs import REFUSALS, Inputs, difference, known_inputs, mapped, run, tensors

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
# Larger differences are wrong; between 1e-5 and this, rounding of deep random networks is possible and listed.
WRONG = 1e-3

TORCHVISION = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vgg11_bn",
    "vit_b_32",
    "wide_resnet50_2",
    "lraspp_mobilenet_v3_large",
    "deeplabv3_mobilenet_v3_large",
    "fcn_resnet50",
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "ssdlite320_mobilenet_v3_large",
]

# Classes of transformers, the smallest first.
TRANSFORMERS = [
    "BertModel",
    "RobertaModel",
    "DistilBertModel",
    "ElectraModel",
    "GPT2Model",
    "GPTNeoXModel",
    "OPTModel",
    "BloomModel",
    "LlamaModel",
    "MistralModel",
    "Qwen2Model",
    "Qwen3Model",
    "GemmaModel",
    "Gemma2Model",
    "Gemma3TextModel",
    "PhiModel",
    "T5Model",
    "T5EncoderModel",
    "BartModel",
    "MambaModel",
    "Mamba2Model",
    "Wav2Vec2Model",
    "HubertModel",
    "Olmo2Model",
    "CohereModel",
    "FalconModel",
    "GlmModel",
    "ViTModel",
    "DeiTModel",
    "BeitModel",
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "DINOv3ViTModel",
    "IJepaModel",
    "ViTMSNModel",
    "ViTMAEModel",
    "VitDetModel",
    "YolosModel",
    "PvtModel",
    "PvtV2Model",
    "SegformerModel",
    "SwinModel",
    "Swinv2Model",
    "ConvNextModel",
    "ConvNextV2Model",
    "ResNetModel",
    "RegNetModel",
    "MobileNetV1Model",
    "MobileNetV2Model",
    "MobileViTModel",
    "MobileViTV2Model",
    "PoolFormerModel",
    "LevitModel",
    "EfficientNetModel",
    "BitModel",
    "FocalNetModel",
    "HieraModel",
    "CLIPVisionModel",
    "SiglipVisionModel",
    "CLIPModel",
]

SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 99,
    "image_size": 64,
    "patch_size": 8,
    "pad_token_id": 0,
}
# Where these sizes contradict each other, or do not make the network small.
SMALLER: dict[str, dict[str, Any]] = {
    "Mamba2Model": {"num_heads": 8, "head_dim": 12, "n_groups": 1, "state_size": 16, "chunk_size": 8},
    "GlmModel": {"head_dim": 12},
    "EfficientNetModel": {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640},
}
# Bytes that the process of one model may have: a default configuration of transformers may be one of 9 B parameters.
MEMORY = 16 << 30


def timm_names() -> list[str]:
    """The smallest member of each of timm's model files, by the size in its name and its parameters on no device."""
    import timm

    chosen = []
    for module in timm.list_modules():
        names = [name for name in timm.list_models(module=module) if "test_" not in name]
        sizes = {}
        for name in names[:12] + names[-4:]:
            try:
                with torch.device("meta"):
                    sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
            except REFUSALS:
                continue
        if sizes or names:
            chosen.append(min(sizes, key=lambda n: sizes[n]) if sizes else names[0])
    return chosen


def models() -> list[str]:
    """Every model as LIBRARY NAME; timm's choice is stored, since finding it takes minutes."""
    path = RESULTS / "zoo_models.json"
    if not path.exists():
        path.write_text(json.dumps(timm_names(), indent=0) + "\n")
    return [
        *[f"transformers {name}" for name in TRANSFORMERS],
        *[f"timm {name}" for name in json.loads(path.read_text())],
        *[f"torchvision {name}" for name in TORCHVISION],
    ]


def build(name: str) -> tuple[nn.Module, Inputs]:
    """A model with random weights off their start, and a batch of two that it takes."""
    library, _, key = name.partition(" ")
    torch.manual_seed(0)
    model, inputs = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}[library](key)
    with torch.no_grad():
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "running_var" in path:
                tensor.copy_(0.5 + torch.rand_like(tensor))
            elif "running_mean" in path or (path.endswith("bias") and isinstance(tensor, nn.Parameter)):
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
            elif tensor.ndim == 1 and isinstance(tensor, nn.Parameter):
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return model.eval(), inputs


def _takes(model: nn.Module, inputs: Inputs) -> bool:
    try:
        return bool(run(model, inputs))
    except REFUSALS:
        return False


def _timm(key: str) -> tuple[nn.Module, Inputs]:
    import timm

    for options in ({"img_size": 64}, {"img_size": 128}, {}, {"img_size": 224}):
        try:
            model = timm.create_model(key, num_classes=10, **options).eval()
        except REFUSALS:
            continue
        size = options.get("img_size")
        channels = (model.pretrained_cfg.get("input_size") or (3,))[0]
        own = model.pretrained_cfg.get("input_size", (3, 224, 224))[-1]
        for side in [size] if size else [64, 96, 128, own]:
            images = torch.randn(2, channels, side, side)
            if _takes(model, images):
                return model, images
    raise FathomsError("no batch was found that it takes")


def _torchvision(key: str) -> tuple[nn.Module, Inputs]:
    import torchvision

    options: dict[str, Any] = {"weights": None}
    if key.startswith(("lraspp", "deeplab", "fcn", "faster", "ssd")):
        options["weights_backbone"] = None
    if key.startswith(("googlenet", "inception")):
        options |= {"init_weights": False}
    model = torchvision.models.get_model(key, **options).eval()
    for side in (64, 96, 128, 224, 299):
        images = torch.randn(2, 3, side, side)
        if _takes(model, images):
            return model, images
    raise FathomsError("no batch was found that it takes")


def _transformers(key: str) -> tuple[nn.Module, Inputs]:
    import transformers

    kind = getattr(transformers, key)
    usual = vars(kind.config_class())
    # A field that is a list by default takes nothing else.
    own = {name: size for name, size in SMALL.items() if isinstance(usual.get(name), int)}
    own |= SMALLER.get(key, {})
    own |= {name: [64, 64] for name in ("image_size",) if isinstance(usual.get(name), list | tuple)}
    few = {name: own[name] for name in ("num_hidden_layers", "vocab_size", "image_size") if name in own}
    for sizes in (own, few, {}):
        try:
            model = kind(kind.config_class(**sizes)).eval()
        except Exception:  # noqa: BLE001 - configurations of transformers raise errors of their own kinds
            continue
        for inputs in _guesses(model):
            if _takes(model, inputs):
                return model, inputs
    raise FathomsError("no small configuration was found that runs")


def _guesses(model: nn.Module) -> list[Inputs]:
    """Batches that a model of transformers may take."""
    guesses: list[Inputs] = []
    known = known_inputs(model)
    if known is not None:
        guesses.append(known)
    guesses += [{"pixel_values": torch.randn(2, 3, side, side)} for side in (64, 224)]
    guesses.append({"input_values": torch.randn(2, 2000)})
    return guesses


class Kept(nn.Module):
    """gain * x + shift along one axis, then an activation: a swapped norm written apart from the library."""

    def __init__(self, gain: Tensor, shift: Tensor, axis: int, act: nn.Module | None) -> None:
        super().__init__()
        self.register_buffer("gain", gain)
        self.register_buffer("shift", shift)
        self.axis, self.act = axis, act

    def forward(self, x: Tensor) -> Tensor:
        """The formula."""
        shape = [1] * x.ndim
        shape[self.axis] = -1
        y = x * self.gain.view(shape) + self.shift.view(shape)
        return y if self.act is None else self.act(y)


@torch.no_grad()
def by_formula(old: nn.Module, x: Tensor) -> Kept:
    """The formula of a norm, found by moving its vectors on its real input: no names but weight, bias and running_*."""
    inside = next((name for name in ("act", "activation") if getattr(old, name, None) is not None), "act")
    act = getattr(old, inside, None)
    bare = copy.deepcopy(old).double().eval()
    if act is not None:
        setattr(bare, inside, nn.Identity())
    x = x.double()
    width = next((t.numel() for t in (*bare.parameters(), *bare.buffers()) if t.ndim and t.numel() > 1), 0)
    axes = [k for k in range(1, x.ndim) if x.shape[k] == width] or [x.ndim - 1]
    axis = axes[0]
    if len(axes) > 1:
        moved = copy.deepcopy(bare)
        vector = next(t for t in (*moved.parameters(), *moved.buffers()) if t.ndim and t.numel() == width)
        vector.flatten()[0] += 1.0
        apart = (moved(x) - bare(x)).abs()
        axis = max(axes, key=lambda k: float(apart.select(k, 0).sum() / apart.sum().clamp_min(1e-30)))
    width = x.shape[axis]
    weight, bias = getattr(bare, "weight", None), getattr(bare, "bias", None)
    gain = torch.ones(width).double() if weight is None else weight.flatten().expand(width)
    shift = torch.zeros(width).double() if bias is None else bias.flatten().expand(width)
    if weight is not None and getattr(bare, "running_var", None) is None:
        nothing = copy.deepcopy(bare)
        nothing.weight.zero_()
        if bias is not None:
            nothing.bias.zero_()
        # A weight of zeros that lets something through is added to one.
        gain = gain + 1 if float(nothing(x).abs().max()) > 0 else gain
    if getattr(bare, "running_var", None) is not None:
        eps = next((v for n, v in vars(bare).items() if n == "eps"), 1e-5)
        scale = gain / (bare.running_var + eps).sqrt()
        gain, shift = scale, shift - bare.running_mean * scale
    return Kept(gain, shift, axis, copy.deepcopy(act))


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a module under every path that it has."""
    old = model.get_submodule(name)
    for parent in model.modules():
        for key, child in list(parent._modules.items()):
            if child is old:
                parent._modules[key] = module


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """What a model returns; of a detector, what its head says of every anchor: a choice of boxes jumps at rounding."""
    head = getattr(getattr(model, "rpn", model), "head", None) if hasattr(model, "transform") else None
    if head is None:
        return run(model, inputs)
    said: list[Tensor] = []
    hook = head.register_forward_hook(lambda _module, _args, out: said.extend(tensors(out)))
    run(model, inputs)
    hook.remove()
    return said


def swap(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Swap to LearnableScaler, against the formula at every site, the whole network in float64, and as training."""
    swapped, formula = copy.deepcopy(model), copy.deepcopy(model)
    report = fathoms.swap_norms(swapped, "learnable_scaler", how="keep", calibrate=[inputs])
    given: dict[str, Tensor] = {}
    hooks = [
        formula.get_submodule(row.name).register_forward_pre_hook(_keeper(given, row.name), with_kwargs=True)
        for row in report
    ]
    run(formula, inputs)
    for hook in hooks:
        hook.remove()
    for row in report:
        # An auxiliary head of training has no input here, and no part in the output.
        if row.name in given:
            put(formula, row.name, by_formula(formula.get_submodule(row.name), given[row.name]))
    exact = mapped(inputs, lambda t: t.double() if t.is_floating_point() else t)
    wanted, got = outputs(formula.double(), exact), outputs(swapped.double(), exact)
    finite = all(bool(t.isfinite().all()) for t in wanted)
    gap = difference(wanted, got) if finite else None
    return {
        "swapped": len(report),
        "left": [list(pair) for pair in report.left],
        "gap": gap,
        "finite": finite,
    }


def _keeper(given: dict[str, Tensor], name: str) -> Callable[..., None]:
    def keep(_module: nn.Module, args: Any, kwargs: Any) -> None:
        given.setdefault(name, next(iter((*args, *kwargs.values()))).detach())

    return keep


def swap_to(to: str) -> Callable[[nn.Module, Inputs], dict[str, Any]]:
    """Swap to another norm; the swap itself runs the model in inference and in training."""

    def step(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
        swapped = copy.deepcopy(model)
        report = fathoms.swap_norms(swapped, to, how="keep", calibrate=[inputs])
        return {"swapped": len(report), "left": len(report.left), "change": report.output_change}

    return step


def calibrate(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Fit, against keep: a norm that a line represents must fit to rounding, and no site may fit worse than zero."""
    lines = {site.name for site in fathoms.norms(model, images=inputs) if site.kind == "batchnorm"}
    names = [site.name for site in fathoms.norms(model, images=inputs)][:4]
    fitted = copy.deepcopy(model)
    report = fathoms.swap_norms(fitted, "learnable_scaler", calibrate=[inputs], only=names)
    exact = [row.fit_error for row in report if row.name in lines]
    others = [row.fit_error for row in report if row.name not in lines]
    found = {"sites": len(report), "line": max(exact, default=None), "worst": max(others, default=None)}
    found["gap"] = None if others else difference(outputs(model, inputs), outputs(fitted, inputs))
    return found


# One process is one model: its fold serves two steps.
_folds: list[tuple[nn.Module, Any]] = []


def folded_once(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Any]:
    """The folded model and its report."""
    if not _folds:
        _folds.append(fathoms.fold(model, images=inputs))
    return _folds[0]


def fold(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Fold, and again at a batch of 3; folding it again folds nothing."""
    folded, report = folded_once(model, inputs)
    batch = mapped(inputs, lambda t: torch.cat([t, t[:1]]) if t.ndim and len(t) == 2 else t)
    gap = max(report.difference or 0.0, difference(run(model, batch), run(folded, batch)))
    again = len(fathoms.fold(folded, images=inputs, verify=False)[1])
    return {
        "folded": len(report),
        "left": len(report.left),
        "again": again,
        "gap": gap,
        "sizes": list(report.sizes),
        "notes": list(report.notes),
    }


def sizes(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The folded model at sizes that neither the fold nor its verification has seen."""
    # Some models keep what another size made of them.
    folded, report = copy.deepcopy(folded_once(model, inputs))
    model = copy.deepcopy(model)
    images = tensors(inputs)[0]
    gaps = {}
    if images.ndim == 4:
        side = images.shape[-1]
        for other in (side - 8, side + 12, side + 28, side * 2):
            batch = mapped(
                inputs, lambda t, other=other: torch.randn(*t.shape[:2], other, other) if t.ndim == 4 else t
            )
            if _takes(model, batch):
                gaps[other] = difference(run(model, batch), run(folded, batch))
    elif not images.is_floating_point():
        for other in (5, 13):
            batch = mapped(inputs, lambda t, other=other: t.new_tensor(range(2 * other)).view(2, other) % 9)
            if _takes(model, batch):
                gaps[other] = difference(run(model, batch), run(folded, batch))
    said = [note for note in report.notes if "differs at" in note]
    return {"sizes": gaps, "gap": max(gaps.values(), default=None), "said": said}


def swap_fold(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """BatchNorms to scalers, then folded away: the function stays."""
    lines = [site.name for site in fathoms.norms(model, images=inputs) if site.kind == "batchnorm"]
    if not lines:
        return {"nothing": "no BatchNorm"}
    swapped = copy.deepcopy(model)
    fathoms.swap_norms(swapped, "learnable_scaler", only=lines)
    folded, report = fathoms.fold(swapped, images=inputs)
    gap = difference(run(model, inputs), run(folded, inputs))
    return {"batchnorms": len(lines), "folded": len(report), "left": len(report.left), "gap": gap}


def accelerate(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Accelerate, against the outputs before."""
    changed = copy.deepcopy(model)
    report = fathoms.accelerate(changed, images=inputs)
    gap = difference(run(model, inputs), run(changed, inputs)) if len(report) else None
    return {"modules": len(report), "gap": gap}


CALLS: dict[str, Callable[[nn.Module, Inputs], dict[str, Any]]] = {
    "swap": swap,
    "rmsnorm": swap_to("rmsnorm"),
    "dyt": swap_to("dyt"),
    "calibrate": calibrate,
    "fold": fold,
    "sizes": sizes,
    "swap, fold": swap_fold,
    "accelerate": accelerate,
}


def one(name: str, path: Path) -> None:
    """Every step of one model; what is found is written after each, so that a limit loses one step only."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"steps": {}}
    start = time.process_time()
    try:
        model, inputs = build(name)
    except Exception as error:  # noqa: BLE001 - the row says so
        found["not built"] = f"{type(error).__name__}: {error}"[:300]
        path.write_text(json.dumps(found))
        return
    found["shapes"] = [list(t.shape) for t in tensors(inputs)]
    found["versions"] = versions()
    found["parameters"] = sum(p.numel() for p in model.parameters())
    for step, work in CALLS.items():
        try:
            found["steps"][step] = work(model, inputs)
        except FathomsError as error:
            found["steps"][step] = {"refused": str(error)}
        except Exception as error:  # noqa: BLE001 - the row says so
            found["steps"][step] = {"traceback": f"{type(error).__name__}: {error}"[:300]}
        found["seconds"] = round(time.process_time() - start, 1)
        path.write_text(json.dumps(found))


def versions() -> str:
    """The libraries, as the page and each row name them."""
    names = ("torch", "timm", "torchvision", "transformers")
    return ", ".join(
        f"{name} {importlib.import_module(name).__version__.partition('+')[0]}" for name in names
    )


def verdict(step: str, cell: dict[str, Any] | None) -> str:
    """One word for one cell of the table."""
    if cell is None:
        return "not reached"
    for word in ("refused", "traceback", "nothing"):
        if word in cell:
            return word
    if step == "calibrate" and (cell["line"] or 0.0) > 1e-5:
        return "wrong"
    if (cell.get("gap") or 0.0) > WRONG:
        return "said" if cell.get("said") else "wrong"
    return "ok"


def page(rows: dict[str, Any]) -> str:
    """results/zoo.md."""
    built = {name: row for name, row in rows.items() if "not built" not in row}
    with_which = Counter(row["versions"] for row in built.values())
    made = "; ".join(f"{number} models with {which}" for which, number in with_which.most_common())
    lines = [
        "# Surgery held against the field",
        "",
        f"`python benchmarks/zoo.py`: {made}; ",
    ]
    lines[-1] += (
        "CPU, one thread, random weights. `swap`: every norm to LearnableScaler, the whole network in float64 against "
        "gain · x + shift written apart; `rmsnorm`, `dyt`: swapped, then run in inference and training; `calibrate`: "
        "the first 4 norms fitted, BatchNorms to 1e-5; `fold`: also at a batch of 3; `sizes`: the folded model "
        f"at up to four sizes of my own. Wrong: the output is more than {WRONG:g} of its largest value away, in "
        "silence. Not reached: cut off by the limit of one process."
    )
    words = ("ok", "refused", "wrong", "said", "traceback", "nothing", "not reached")
    lines += ["", f"| {len(built)} models | {' | '.join(words)} | worst difference |", "|---" * 9 + "|"]
    cells = {step: {n: row.get("steps", {}).get(step) for n, row in built.items()} for step in CALLS}
    for step, column in cells.items():
        counts = Counter(verdict(step, cell) for cell in column.values())
        worst = max(
            (cell["gap"] for cell in column.values() if cell and cell.get("gap") is not None), default=None
        )
        shown = "" if worst is None else f"{worst:.1e}"
        lines.append(f"| {step} | {' | '.join(str(counts[word]) for word in words)} | {shown} |")
    norms = sum((cell or {}).get("swapped", 0) for cell in cells["swap"].values())
    left = [
        (n, place, why) for n, cell in cells["swap"].items() for place, why in (cell or {}).get("left", [])
    ]
    lines += ["", f"Swapped: {norms} norms. Left, with the reason: {len(left)}.", ""]
    for word, title in (
        ("wrong", "Wrong"),
        ("traceback", "Tracebacks"),
        ("said", "Said"),
        ("refused", "Refused"),
    ):
        lines += [f"## {title}", ""]
        found = [
            (n, step, cell)
            for step, column in cells.items()
            for n, cell in column.items()
            if verdict(step, cell) == word
        ]
        lines += [f"- {n}, {step}: {_reason(cell)}" for n, step, cell in found] or ["None."]
        lines.append("")
    lines += ["## Left", ""]
    groups = Counter((n, why) for n, _, why in left)
    lines += [f"- {n}: {count} × {why}" for (n, why), count in groups.items()] or ["None."]
    lines += ["", "## Not built, not reached", ""]
    lines += [f"- {n}: {row['not built']}" for n, row in rows.items() if "not built" in row]
    for n, row in built.items():
        missing = [step for step in CALLS if step not in row.get("steps", {})]
        if missing:
            lines.append(f"- {n}: {', '.join(missing)} ({row.get('ended', '')})")
    waiting = [name for name in models() if name not in rows]
    if waiting:
        lines += [
            "",
            f"## Not run yet: {len(waiting)} of {len(waiting) + len(rows)}",
            "",
            ", ".join(waiting) + ".",
        ]
    return "\n".join([*lines, ""])


def _reason(cell: dict[str, Any]) -> str:
    for word in ("refused", "traceback"):
        if word in cell:
            return cell[word].replace("\n", " ")
    return json.dumps({key: value for key, value in cell.items() if key != "left"})


def in_processes(names: Iterable[str], folder: Path, seconds: float, jobs: int) -> Iterator[tuple[str, dict]]:
    """The rows of models as they end; each is a process of its own with a limit of processor time."""
    names, running = iter(names), {}
    # A fork has the three libraries imported already.
    make = multiprocessing.get_context("fork").Process
    while True:
        for name in itertools.islice(names, jobs - len(running)):
            part = folder / f"{name.replace('/', '.')}.json"
            process = make(target=_limited, args=(name, part, seconds))
            process.start()
            running[process.sentinel] = name, part, process
        if not running:
            return
        for ended in multiprocessing.connection.wait(running):
            name, part, process = running.pop(ended)
            process.join()
            cut = process.exitcode == -signal.SIGXCPU
            how = f"cut off after {seconds:g} s" if cut else f"exit {process.exitcode}"
            yield (
                name,
                (json.loads(part.read_text()) if part.exists() else {"not built": how}) | {"ended": how},
            )


def _limited(name: str, path: Path, seconds: float) -> None:
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(seconds), used + int(seconds) + 5))
    one(name, path)


def main() -> None:
    """Run what is missing, then write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="shell pattern over the names, such as 'timm vit_*'")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of one model, of processor time")
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    parser.add_argument(
        "--again", action="store_true", help="repeat models with a wrong, failed or missing cell"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for library in ("timm", "torchvision", "transformers"):
        importlib.import_module(library)
    store = RESULTS / "zoo.json"
    rows: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    wanted = [
        name
        for name in models()
        if fnmatch.fnmatch(name, arguments.only)
        and (name not in rows or _repeat(rows[name], arguments.again))
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, row in in_processes(wanted, Path(folder), arguments.seconds, arguments.jobs):
            rows[name] = row
            steps = row.get("steps", {})
            print(
                name, {step: verdict(step, steps.get(step)) for step in CALLS}, row.get("seconds"), flush=True
            )
            rows = {name: rows[name] for name in models() if name in rows}
            store.write_text(json.dumps(rows, indent=1) + "\n")
            (RESULTS / "zoo.md").write_text(page(rows))


def _repeat(row: dict[str, Any], again: bool) -> bool:
    words = {verdict(step, row.get("steps", {}).get(step)) for step in CALLS}
    return again and bool(words & {"wrong", "traceback", "not reached"})


if __name__ == "__main__":
    main()
