"""Pages of the part families, docs/families/*.md: formula, start, paper, signal by depth, evidence, when to use."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

from doc_format import Read, table
from fathoms.parts import families
from fathoms.parts.residuals import RESIDUALS
from part_evidence import evidence, signal_table
from part_facts import formula, linked, paper, paragraphs, start

# Family, page, title, and what the family decides.
PAGES = {
    "norm": (
        "norms",
        "Norms",
        "What normalises the tokens at each place of a norm. `final_norm` and `norm_by_depth` choose for the last norm "
        "and for ranges of blocks.",
    ),
    "residual": (
        "residuals",
        "Residual rules",
        "How the output of a branch, attention or MLP, joins the residual stream. Each brings the weight init of its "
        "paper.",
    ),
    "attn_placement": (
        "placements",
        "Placements",
        "Where the norms of a branch stand. `--attn-placement` and `--mlp-placement` are chosen apart, "
        "`--placement-by-depth` for ranges of blocks. x is the stream, F the branch, N a norm, s the residual scale.",
    ),
    "stem": ("stems", "Stems", "How pixels become tokens."),
    "stem_norm": ("stem_norms", "Patch norms", "Norms around the patch projection."),
    "attention": (
        "attention",
        "Attention",
        "How tokens read each other. `qk_norm` adds a norm to queries and keys: none, rmsnorm, layernorm.",
    ),
    "attn_gate": ("gates", "Attention gates", "What multiplies the heads' output before its projection."),
    "position": (
        "positions",
        "Positions",
        "How the model knows where a patch was. `registers` adds tokens without a place.",
    ),
    "readout": ("readouts", "Read-outs", "How tokens become one vector for the classifier."),
    "mlp": ("mlps", "MLPs", "The second branch of a block."),
}
ROOT = Path(__file__).parents[1]
SIGNAL = (
    "The residual stream of an untrained model: how much its root mean square grows from the first block to the last · "
    "how large the loss's gradient is at the first block against the last. Both near 1 means that depth changes "
    "nothing at the start. It says little about training: see [the verdict](../probe.md#the-verdict)."
)


def pages(read: Read) -> dict[str, str]:
    """The text of each page, by its file name under docs/."""
    when = tomllib.loads((ROOT / "website" / "when_to_use.toml").read_text())
    made = {
        f"families/{page}.md": _page(read, family, when.get(family, {}))
        for family, (page, _, _) in PAGES.items()
    }
    return {"families/index.md": _index(), **made}


def _index() -> str:
    rows = []
    for family, (page, title, _) in PAGES.items():
        shown = "attn_placement`, `mlp_placement" if family == "attn_placement" else family
        names = ", ".join(f"[{name}]({page}.md#{name})" for name in families()[family])
        rows.append([f"[{title}]({page}.md)", f"`{shown}`", names])
    return (
        "# Every switch, every value\n\n"
        "Each row is an option of `fathoms.create_model` and a flag of the command line. `fathoms parts` prints the "
        "same list. A choice that contradicts another is refused with the reason, a misspelt one with the nearest "
        "valid name, and zero means zero.\n\n" + table(["family", "option", "values"], rows) + "\n\n"
        "[Which to use](../what_to_use.md) says what has been measured. [Parts in depth](../parts.md) has the newer "
        "ones at length.\n"
    )


def _page(read: Read, family: str, when: dict[str, str]) -> str:
    _, title, about = PAGES[family]
    flag = family.replace("_", "-")
    command = "benchmarks/signal_at_init.py" if family == "residual" else "benchmarks/signal_by_part.py"
    lines = [
        f"# {title}",
        "",
        f"{about} Chosen by `--{flag}`, or `fathoms.create_model(NAME, {family}=...)`.",
        "",
        "<!-- written by website/generate.py from the registry and results/ -->",
        "",
    ]
    for name in families()[family]:
        lines += _part(read, family, name, when.get(name, "Not known here."))
    source = f"`python {command}` measures it on the narrow ViT of `fathoms probe`, one seed."
    lines += ["## Signal by depth", "", SIGNAL, "", signal_table(read, family), "", source, ""]
    return "\n".join(lines)


def _part(read: Read, family: str, name: str, when: str) -> list[str]:
    lines = [f"## {name}", "", linked(formula(family, name)), ""]
    for text in paragraphs(family, name):
        lines += [linked(text), ""]
    rows = [
        ["starts at", start(family, name)],
        ["paper", paper(family, name)],
        ["code", _code(family, name)],
    ]
    if family == "residual" and (why := RESIDUALS.metadata(name).why):
        allowed = ", ".join(f"`{each}`" for each in RESIDUALS.metadata(name).placements)
        rows.append(["allowed with", f"placements {allowed}: {why}"])
    rows += [["evidence here", "<br>".join(evidence(read, family, name))], ["when to use it", when]]
    return [*lines, table(["", ""], rows), ""]


def _code(family: str, name: str) -> str:
    entry = families()[family][name]
    path = inspect.getsourcefile(inspect.unwrap(entry)) or ""
    place = Path(path).resolve().relative_to(ROOT)
    shown = entry.__name__ if inspect.isclass(entry) else place.stem
    return f"[{shown}](../../{place})"
