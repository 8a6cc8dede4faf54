"""Registries: families of parts picked by name; an unknown name is an error that offers the nearest."""

from __future__ import annotations

import difflib
import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast, overload

from fathoms.errors import ConfigError, FathomsError, UnknownNameError

T = TypeVar("T")
M = TypeVar("M")
# No name is longer; a megabyte out of a file is not compared with every option.
_LONGEST = 80
_SHORT = 4
_LISTED = 8
Entry = TypeVar("Entry", bound=Callable[..., Any])


def nearest(name: str, options: Iterable[str]) -> str:
    """The option closest to `name`; "" if none is close.

    The same but for case, the one that other libraries call so, one that begins with it, or the most alike.

    >>> nearest("cosin", ["step", "cosine"]), nearest("banana", ["step", "cosine"])
    ('cosine', '')
    """
    options, name = list(options), name[:_LONGEST]
    same = [option for option in options if option.lower() == name.lower()]
    brought = [found] if (found := meant_by(name, options)) else []
    longer = [option for option in options if name and option.lower().startswith(name.lower())]
    # Of a short name few letters are right when one is wrong.
    cutoff = 0.4 if len(name) <= _SHORT else 0.55
    alike = difflib.get_close_matches(name.lower(), options, n=1, cutoff=cutoff)
    return next(iter(same or brought or longer or alike), "")


def hint(name: str, options: Iterable[str]) -> str:
    """Advice for a name that is not among the options: the nearest one, or all of a few, or how to list them.

    >>> hint("cosin", ["step", "cosine"]), hint("banana", ["step", "cosine"])
    ("did you mean 'cosine'?", "use 'step' or 'cosine'")
    """
    options = list(options)
    near = nearest(name, options)
    if near:
        return f"did you mean {near!r}?"
    shown = [repr(option) for option in options[:_LISTED]]
    if len(options) > _LISTED:
        return f"use one such as {', '.join(shown[: _LISTED // 2])}"
    return f"use {', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else f"use {''.join(shown)}"


def check_name(name: str, options: Iterable[str], kind: str, where: str = "") -> str:
    """Return `name` if it is one of `options`; otherwise raise with the nearest one."""
    options = list(options)
    if isinstance(name, str) and name in options:
        return name
    place = f"{where}: " if where else ""
    # A table or a list out of a file, shortened.
    shown = repr(name[:_LONGEST]) if isinstance(name, str) else reprlib.repr(name)
    advice = hint(name if isinstance(name, str) else "", options)
    raise UnknownNameError(f"{place}no {kind} is called {shown}; {advice}")


class Registry(Generic[T, M]):
    """One family of parts T, each registered under a name with metadata of type M.

    Args:
        kind: The family's name in errors, such as "norm".
        default: The metadata of a part that is registered without any.

    >>> SHAPES: Registry[float, int] = Registry("shape", default=2)
    >>> @SHAPES.add("square")
    ... def square(side: float) -> float:
    ...     return side * side
    >>> SHAPES.build("square", 3), SHAPES.metadata("square")
    (9, 2)
    """

    @overload
    def __init__(self: Registry[Any, None], kind: str) -> None: ...
    @overload
    def __init__(self, kind: str, default: M) -> None: ...
    def __init__(self, kind: str, default: Any = None) -> None:
        self.kind = kind
        self._default = cast(M, default)
        self._entries: dict[str, Callable[..., T]] = {}
        self._metadata: dict[str, M] = {}
        self._summaries: dict[str, str] = {}

    def add(self, name: str, metadata: M | None = None, summary: str = "") -> Callable[[Entry], Entry]:
        """Register the decorated class or function.

        Args:
            name: The name users write.
            metadata: What a builder must know besides the class; the family's default if not given.
            summary: One line for listings; the first line of the docstring if not given.
        """

        def register(entry: Entry) -> Entry:
            if name in self._entries:
                raise FathomsError(f"{self.kind} {name!r} is registered already; choose another name")
            self._entries[name] = entry
            self._metadata[name] = self._default if metadata is None else metadata
            self._summaries[name] = summary or (inspect.getdoc(entry) or "").partition("\n")[0]
            return entry

        return register

    def __getitem__(self, name: str) -> Callable[..., T]:
        return self._entries[check_name(name, self._entries, self.kind)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def check(self, name: str, where: str = "") -> str:
        """Return `name`, or raise with the nearest valid name; `where` names the field."""
        return check_name(name, self._entries, self.kind, where)

    def metadata(self, name: str) -> M:
        """The metadata the part was registered with, or the family's default."""
        return self._metadata[self.check(name)]

    def summary(self, name: str) -> str:
        """One line on the part, for listings."""
        return self._summaries[self.check(name)]

    def build(self, name: str, *args: Any, **options: Any) -> T:
        """Build the part; an option of `None` keeps the part's own default, one that it does not take is refused."""
        entry = self[name]
        given = {key: value for key, value in options.items() if value is not None}
        for key in given:
            if not self.takes(name, key):
                raise ConfigError(f"{self.kind} {name!r} takes no {key}; leave it out")
        return entry(*args, **given)

    def takes(self, name: str, option: str) -> bool:
        """Whether the part is built with an option of this name."""
        parameters = inspect.signature(self[name]).parameters
        return option in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


# Each option under the words that others use for it. An option of a command comes before one of another.
_BROUGHT = {
    "lr": "learning_rate base_lr lr_base blr base_learning_rate",
    "min_lr": "min_learning_rate end_lr lr_min eta_min",
    "warmup_lr": "warmup_lr_init lr_warmup",
    "warmup_epochs": "warmup warmup_epoch num_warmup_epochs warmup_steps warmup_iters",
    "epochs": "epoch num_epochs max_epochs n_epochs nb_epochs num_train_epochs total_epochs",
    "batch_size": "bs batch batchsize train_batch_size per_device_train_batch_size b",
    "grad_accum_steps": "accumulate_grad_batches gradient_accumulation_steps accum_iter accum_steps grad_accum",
    "opt": "optimizer optim",
    "opt_betas": "betas adam_betas",
    "opt_eps": "eps adam_epsilon",
    "weight_decay": "wd l2",
    "layer_decay": "layerwise_lr_decay llrd",
    "clip_grad": "gradient_clip_val max_grad_norm grad_clip clip_grad_norm gradient_clip clipnorm grad_norm_clip",
    "sched": "scheduler lr_scheduler lr_scheduler_type lr_schedule schedule",
    "smoothing": "label_smoothing label_smoothing_factor",
    "mixup": "mixup_alpha",
    "cutmix": "cutmix_alpha",
    "aa": "auto_augment autoaugment randaugment rand_augment augment",
    "reprob": "random_erasing random_erase re_prob erasing",
    "aug_repeats": "repeated_aug repeated_augmentation reps",
    "hflip": "flip horizontal_flip",
    "model_ema": "ema use_ema",
    "model_ema_decay": "ema_decay",
    "amp": "fp16 bf16 mixed_precision use_amp native_amp",
    "torchcompile": "compile torch_compile",
    "grad_checkpointing": "gradient_checkpointing grad_checkpoint checkpointing",
    "val_share": "val_split validation_split val_ratio val_size val_fraction",
    "teacher": "teacher_model teacher_path",
    "initial_checkpoint": "pretrained finetune init_checkpoint pretrained_path load_from weights",
    "weights": "pretrained checkpoint_path pretrained_cfg",
    "resume": "resume_from resume_from_checkpoint auto_resume continue",
    "checkpoint": "ckpt ckpt_path model_path checkpoint_path weights run",
    "checkpoint_hist": "save_total_limit save_top_k",
    "output": "output_dir out out_dir outdir save_dir default_root_dir log_dir logdir results_dir o",
    "experiment": "run_name exp_name experiment_name exp",
    "workers": "num_workers dataloader_num_workers n_workers",
    "device": "gpus gpu accelerator cuda devices",
    "seed": "random_seed manual_seed seed_everything random_state",
    "seeds": "seed num_seeds n_seeds repeats",
    "log": "logger log_wandb wandb report_to tensorboard use_wandb",
    "recipe": "config cfg config_file",
    "model": "model_name arch architecture a",
    "data": "data_dir data_path dataset root train_dir data_root",
    "images": "input image",
    "dim": "embed_dim hidden_size width hidden_dim d_model",
    "heads": "num_heads num_attention_heads n_heads nhead",
    "depth": "num_layers layers num_hidden_layers n_layers blocks",
    "image_size": "img_size input_size resolution",
    "patch_size": "patch",
    "in_channels": "in_chans num_channels channels",
    "num_classes": "nb_classes n_classes classes",
    "drop_path": "drop_path_rate stochastic_depth drop_path_prob",
    "residual_init": "init_values layer_scale_init_value layerscale_init layer_scale_init",
    "readout": "global_pool pool pooling",
    "registers": "reg_tokens num_registers num_reg_tokens",
    "norm": "norm_layer",
    "top": "topk top_k",
    "jobs": "parallel n_jobs",
}

BROUGHT: dict[str, list[str]] = {}
"""The options that a word may mean, by the word."""
for _option, _words in _BROUGHT.items():
    for _word in _words.split():
        BROUGHT.setdefault(_word, []).append(_option)


def meant_by(word: str, options: Iterable[str]) -> str:
    """The option that is meant by a word of another library, if it is among `options`; else "".

    >>> meant_by("learning_rate", ["lr", "epochs"]), meant_by("learning_rate", ["norm"])
    ('lr', '')
    """
    known = set(options)
    found = BROUGHT.get(word.lower().replace("-", "_"), [])
    return next((option for option in found if option in known), "")
