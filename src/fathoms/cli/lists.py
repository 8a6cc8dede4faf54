"""Commands that list or describe: models, parts, recipes, a data set."""

from __future__ import annotations

import functools
import json as json_format
from dataclasses import dataclass
from typing import Any

import tyro

from fathoms.errors import FathomsError, flag_of, printable
from fathoms.text_table import aligned, wrapped


def describe(name: str) -> dict[str, Any]:
    """Config, parameters and multiplications of a model, built on the meta device."""
    import torch

    from fathoms.models.vit import ViT
    from fathoms.models.zoo import model_config

    with torch.device("meta"):
        model = ViT(model_config(name))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "name": name,
        "parameters": parameters,
        "multiplications": model.flop_count(),
        "config": model.config.to_dict(),
    }


def shapes(names: list[str]) -> list[tuple[str, ...]]:
    """Blocks, width, pixels, patch and parameters of models; every block has as many parameters as the second."""
    import torch

    from fathoms.models.config import ViTConfig
    from fathoms.models.vit import ViT
    from fathoms.models.zoo import model_config

    @functools.cache
    def parameters(config: ViTConfig) -> int:
        return sum(each.numel() for each in ViT(config).parameters())

    rows: list[tuple[str, ...]] = []
    for name in names:
        config = model_config(name)
        with torch.device("meta"):
            one, two = (parameters(config.replace(depth=depth)) for depth in (1, 2))
        count = f"{(one + (config.depth - 1) * (two - one)) / 1e6:.1f} M"
        size = (config.depth, config.dim, config.image_size, config.patch_size)
        rows.append((*map(str, size), count, name))
    return rows


class Models:
    """List the named models, or show the config of one."""

    EXAMPLES = """
fathoms models
fathoms models 'cait_*'
fathoms models cait_s24_224 --json
"""

    @dataclass(frozen=True)
    class Args:
        """Options of `fathoms models`."""

        pattern: tyro.conf.Positional[str] = "*"
        """A model's name, or a shell pattern such as 'cait_*'."""
        json: bool = False
        """Print one JSON object."""

    @staticmethod
    def run(args: Args) -> int:
        from fathoms.models.zoo import list_models, model_config

        names = list_models(args.pattern)
        if not names:
            if any(character in args.pattern for character in "*?["):
                raise FathomsError(f"no model matches {args.pattern!r}; see `fathoms models`")
            model_config(args.pattern)
        if len(names) > 1:
            head = ("blocks", "width", "pixels", "patch", "params", "model")
            print(json_format.dumps({"models": names}) if args.json else aligned(head, shapes(names)))
            return 0
        about = describe(names[0])
        if args.json:
            print(json_format.dumps(about))
            return 0
        print(
            f"{about['name']}: {about['parameters'] / 1e6:.2f} M parameters, "
            f"{about['multiplications'] / 1e9:.2f} G multiplications"
        )
        for field, value in about["config"].items():
            print(f"  {field:<24}{'' if value is None else value}".rstrip())
        return 0


class Parts:
    """List the parts that each option of a model can name."""

    EXAMPLES = """
fathoms parts
fathoms parts residual
fathoms parts --json
"""

    @dataclass(frozen=True)
    class Args:
        """Options of `fathoms parts`."""

        family: tyro.conf.Positional[str | None] = None
        """One family, for example norm. Default: all."""
        json: bool = False
        """Print one JSON object."""

    @staticmethod
    def run(args: Args) -> int:
        from fathoms.parts import families
        from fathoms.registry import check_name

        known = families()
        chosen = list(known) if args.family is None else [check_name(args.family, known, "family")]
        listing = {family: {name: known[family].summary(name) for name in known[family]} for family in chosen}
        if args.json:
            print(json_format.dumps(listing))
            return 0
        for family, parts in listing.items():
            print(flag_of(family))
            for name, summary in parts.items():
                print("\n".join(wrapped(f"  {name:<20}{summary}", 22)))
        return 0


class Recipes:
    """List the training recipes, or show one as TOML."""

    EXAMPLES = """
fathoms recipes
fathoms recipes cait_400
fathoms recipes cait_400 > mine.toml
"""

    @dataclass(frozen=True)
    class Args:
        """Options of `fathoms recipes`."""

        name: tyro.conf.Positional[str | None] = None
        """A recipe, or a TOML file. Default: list all recipes."""
        json: bool = False
        """Print one JSON object."""

    @staticmethod
    def run(args: Args) -> int:
        from fathoms.training.recipe import read_recipe, recipe_names
        from fathoms.training.run_folder import to_toml

        if args.name is not None:
            table = read_recipe(args.name)
            print(json_format.dumps(table) if args.json else to_toml(table), end="\n" if args.json else "")
            return 0
        about = {name: read_recipe(name)["about"] for name in recipe_names()}
        if args.json:
            print(json_format.dumps(about))
            return 0
        for name, text in about.items():
            print("\n".join(wrapped(f"{name:<22}{text}", 22)))
        return 0


class DataInfo:
    """Describe a data set: its kind, splits, classes and sizes, without decoding it.

    Exit status: 0, or 2 if it could not be opened.
    """

    EXAMPLES = """\
fathoms data info photos/
fathoms data info packed/ --json
fathoms data info cifar-10-batches-bin/
"""

    @dataclass(frozen=True)
    class Args:
        """Data set to describe."""

        path: tyro.conf.Positional[str]
        """Folder, .tar, folder of shards, pack, .npz, IDX or CIFAR folder, or hfds/NAME."""
        json: bool = False
        """Print one JSON object on the last line."""

    @staticmethod
    def run(args: Args) -> int:
        from fathoms.data import ArraySource, choose_decoder, list_splits, open_source
        from fathoms.data.readiness import notices
        from fathoms.data.sources.source import left_out_of
        from fathoms.data.sources.splits import detect

        kind, decoder = detect(args.path), choose_decoder("auto")
        splits: dict[str, Any] = {}
        sources = [open_source(args.path, name, kind) for name in list_splits(args.path, kind)]
        for source in sources:
            facts: dict[str, Any] = {
                "images": len(source),
                "classes": list(source.classes),
                "fingerprint": source.fingerprint(),
            }
            if isinstance(source, ArraySource):
                facts["shape"] = list(source.images.shape[1:])
                facts["bytes"] = source.images.nbytes
            else:
                facts["bytes"] = sum(source.size(i) for i in range(len(source)))
            splits[source.split] = facts
        print(printable(f"{args.path}: {kind}"))
        for name, facts in splits.items():
            shown = ", ".join(repr(c) for c in facts["classes"][:5]) + (
                ", …" if len(facts["classes"]) > 5 else ""
            )
            shape = f", {'x'.join(map(str, facts['shape']))} pixels" if "shape" in facts else ""
            print(
                f"  {printable(name)}: {facts['images']} images{shape}, {facts['bytes'] / 1e6:.1f} MB, "
                f"{len(facts['classes'])} classes ({shown}), fingerprint {facts['fingerprint'][:12]}"
            )
        lines = notices(sources)
        for line in lines:
            print(printable(line))
        print(f"decoder in use: {decoder.name} ({decoder.reason})")
        if args.json:
            result = {"path": args.path, "kind": kind, "splits": splits, "notices": lines}
            result |= {"left_out": left_out_of(*sources).to_json()}
            print(json_format.dumps({**result, "decoder": decoder.name, "decoder_reason": decoder.reason}))
        return 0
