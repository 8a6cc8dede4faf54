"""Names that people bring from timm, Lightning, transformers and Keras, and what is meant by them here."""

from __future__ import annotations

from collections.abc import Iterable

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
