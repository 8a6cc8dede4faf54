"""Every option of a recipe changes of a training what it says, and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from fathoms.training.recipe import RECIPE_FIELDS
from tiny_runs import TinyRuns

TINY = [
    *("--model", "vit_tiny_patch16_224", "--depth", "2", "--dim", "24", "--heads", "2", "--image-size", "32"),
    *("--epochs", "6", "--batch-size", "8", "--device", "cpu", "--opt", "adamw", "--experiment", "run"),
]
CHANGES = {
    "epochs rates": """
        --epochs 7
        --warmup-epochs 3 | --warmup-prefix
        --cooldown-epochs 2
    """,
    "batch evaluated gradient loss": """
        --batch-size 7
        --mean 0.1 0.1 0.1
        --std 0.1 0.1 0.1
    """,
    "updates": """
        --grad-accum-steps 2
    """,
    "optimizer": """
        --opt lamb
        --weight-decay 0.5
        --opt-eps 1e-5
        --opt-betas 0.8 0.9
        --opt sgd | --momentum 0.8
        --layer-decay 0.8
    """,
    "rates": """
        --lr 0.5
        --sched wsd
        --warmup-epochs 3
        --warmup-epochs 3 | --warmup-lr 1e-4
        --min-lr 1e-6
        --sched step | --decay-epochs 3
        --sched step --decay-epochs 2 | --decay-rate 0.3
        --sched custom | --epoch-factor 0.5
        --sched custom | --epoch-threshold 0.8
        --sched-on-updates
    """,
    "gradient": """
        --clip-grad 0.1
    """,
    "gradient loss": """
        --smoothing 0.2
        --bce-loss
        --bce-loss | --bce-sum
        --bce-loss | --bce-target-thresh 0.2
        --attn-extra-loss 0.1 --attn-extra-loss-layers 1 | --attn-extra-loss-layers 2
        --attn-extra-loss-layers 1 --attn-extra-loss 0.1 | --attn-extra-loss 0.5
    """,
    "batch gradient loss": """
        --mixup 0.8
        --cutmix 1
        --mixup 0.8 | --mixup-prob 0.01
        --mixup 0.8 | --mixup-mode elem
        --aa rand-m9
        --color-jitter 0.3
        --reprob 0.9
        --reprob 0.9 | --remode const
        --reprob 0.9 | --recount 3
        --aug-repeats 3
        --crop whole
        --crop pad | --crop-padding 2
        --scale 0.5 1
        --ratio 0.9 1.1
        --hflip 1
        --train-interpolation bicubic
    """,
    "batch": """
        --mixup 0.8 --cutmix 1 | --mixup-switch-prob 0.01
    """,
    "batch evaluated gradient images loss updates": """
        --val-share 0.2
    """,
    "evaluated": """
        --interpolation bilinear
        --crop-pct 0.8
    """,
    "average": """
        --model-ema
        --model-ema | --model-ema-decay 0.9
        --model-ema | --model-ema-warmup
    """,
    "gradient loss speed": """
        --amp
        --amp | --amp-dtype float16
        --precision autocast
    """,
    "forwards": """
        --grad-checkpointing
    """,
    "gradient optimizer": """
        --freeze stem*
    """,
    "batch gradient loss start": """
        --seed 7
    """,
    "gradient loss optimizer start": """
        --swap-norms dyt
    """,
}
"""What changes, and by which flags; those before a bar are given with and without those behind it."""
ELSEWHERE = {
    "teacher distillation_type distillation_alpha distillation_tau": "test_distillation.py",
    "progressive_size": "test_image_sizes.py",
    "torchcompile compile_scope launch": "test_compile.py, test_cuda_graph.py",
    "train_feature_decay": "test_penalties.py: small features cost nothing",
}
"""Options whose effect cannot be seen in one batch of a tiny model."""
ROWS = {
    line.strip(): set(names.split())
    for names, lines in CHANGES.items()
    for line in lines.strip().splitlines()
}


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def observe(photos, tmp_path_factory):
    """What a training is, by aspect; built once for each command line."""
    known = {}

    def observed(words):
        if words not in known:
            runs = TinyRuns(tmp_path_factory.mktemp("runs"), TINY, photos)
            known[words] = aspects(runs.trainer(*words.split()))
        return known[words]

    return observed


def aspects(trainer):
    stepper, learner, data, ran = trainer.loop.stepper, trainer.learner, trainer.context.data, []
    trainer.model.blocks[0].attn.qkv.register_forward_hook(lambda *_: ran.append(1))
    batches = list(itertools.islice(data.train.epoch(0), 2))
    start = [bits(weight) for weight in learner.model.state_dict().values()]
    stepper.accumulate(batches[0], parts=1, first=True)
    loss = float(stepper.pending[0])
    stepper.gradient_norm()
    kept = [
        {k: v for k, v in group.items() if k not in ("params", "lr")}
        for group in learner.optimizer.param_groups
    ]
    schedule, ema = trainer.loop.schedule, learner.ema
    return {
        "start": start,
        "optimizer": (type(learner.optimizer).__name__, kept),
        "rates": [schedule.lr(quarter / 4) for quarter in range(4 * trainer.loop.epochs)],
        "epochs": trainer.loop.epochs,
        "updates": trainer.context.updates_per_epoch,
        "batch": [
            (bits(b.images), None if b.targets is None else bits(b.targets), b.ids.tolist()) for b in batches
        ],
        "evaluated": bits(next(iter(data.val.epoch(0))).images) if data.val is not None else None,
        "images": (len(data.train.source), data.val and len(data.val.source)),
        "loss": loss,
        "gradient": [None if p.grad is None else bits(p.grad) for p in learner.model.parameters()],
        "average": ema and [ema.decay_at(updates) for updates in range(1, 9)],
        "speed": (learner.speed, stepper.amp_dtype),
        "forwards": len(ran),
    }


@pytest.mark.parametrize("row", ROWS)
def test_a_flag_changes_what_it_says_and_nothing_else(row, observe):
    base, _, flag = row.rpartition("|")
    before, after = observe(base.strip()), observe(f"{base.strip()} {flag.strip()}".strip())
    assert {name for name in before if before[name] != after[name]} == ROWS[row]


def test_every_option_of_a_recipe_is_in_the_table():
    flags = {word for row in ROWS for word in row.rpartition("|")[2].split() if word.startswith("--")}
    named = {flag.removeprefix("--").replace("-", "_") for flag in flags} | set(" ".join(ELSEWHERE).split())
    assert set(RECIPE_FIELDS) - named == set()
