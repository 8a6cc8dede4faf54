"""Probing while training: within 2 % of the time, on foreign models too, and with a word to the guard."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from fathoms import FathomsError, ViT, ViTConfig
from fathoms.cli.main import main
from fathoms.probes.thresholds import THRESHOLDS
from fathoms.training.measurements import FEWEST, SHARE, Probing

pytestmark = pytest.mark.plain


class Folder:
    """A run folder that keeps its lines."""

    def __init__(self):
        self.rows = []

    def append(self, name, row):
        assert name == "probe.jsonl"
        self.rows.append(json.loads(json.dumps(row)))


def vit():
    torch.manual_seed(0)
    return ViT(ViTConfig(image_size=8, patch_size=4, dim=16, heads=2, depth=2, num_classes=4))


def probing(every=None, updates=10_000, model=None):
    return Probing(Folder(), vit() if model is None else model, every, updates)


def due(given, update, seconds):
    """As the loop asks."""
    return bool(given.spacing) and update % given.spacing == 0 and given.due(seconds)


def test_an_interval_is_obeyed_and_zero_is_never():
    given, never = probing(7), probing(0)
    assert [n for n in range(1, 30) if due(given, n, 0.0)] == [7, 14, 21, 28]
    assert not any(due(never, n, 1e6) for n in range(1, 2000))


@pytest.mark.parametrize("cost", [0.05, 1.0, 30.0])
def test_without_one_probing_stays_within_its_share_of_the_time(cost):
    """A run of 20,000 updates of 50 ms, probes that take `cost` seconds each."""
    chosen = probing(None, 20_000)
    seconds, count = 0.0, 0
    for update in range(1, 20_001):
        seconds += 0.05
        if due(chosen, update, seconds):
            chosen.spent, chosen.longest, count = chosen.spent + cost, cost, count + 1
            seconds += cost
    # One that takes longer than the share of the whole run cannot be known before it has been tried once.
    assert chosen.spent <= max(SHARE * seconds, cost)
    assert count >= 1
    assert count <= 60


def test_short_runs_and_models_without_blocks_are_left_alone():
    short = probing()
    assert not any(due(short, n, 1.0) for n in range(1, 5 * FEWEST))
    foreign = probing(None, model=nn.Linear(2, 2))
    assert not foreign.due(1e6)
    assert foreign.spacing == 0
    with pytest.raises(FathomsError, match="has no transformer blocks"):
        probing(10, model=nn.Linear(2, 2))


def test_a_line_has_every_column_the_update_ratio_and_the_worst_block():
    own = probing(1)
    optimizer = torch.optim.AdamW(own.model.parameters(), lr=1e-3)
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    nn.functional.cross_entropy(own.model(images), labels).backward()
    optimizer.step()
    assert own.measure(images, labels, optimizer, {"epoch": 1, "step": 1}) is None
    (row,) = own.folder.rows
    assert row["step"] == 1
    assert 0 < row["sites"][0]["update"] < 1
    assert " at blocks." in own.live["largest"]
    assert own.remark(3) == ""


def test_a_probe_that_nobody_asked_for_does_not_end_a_run():
    own, asked = probing(None), probing(5)
    images, labels = torch.randn(2, 3, 12, 12), torch.tensor([0, 1])
    optimizer = torch.optim.SGD(own.model.parameters(), lr=0.1)
    warning = own.measure(images, labels, optimizer, {"epoch": 1, "step": 200})
    assert "the blocks are no longer measured (" in warning
    assert not due(own, 400, 1e6)
    with pytest.raises(FathomsError, match="images are 12x12"):
        asked.measure(images, labels, optimizer, {"epoch": 1, "step": 5})


def test_the_guard_is_told_what_the_last_probe_had_shown():
    own = probing(100)
    site = {"block": "blocks.17", "branch": "attn", "logit": 340.0, "largest": 340.0}
    own.last = {"step": 800, "sites": [{**site, "block": "blocks.0", "logit": 2.0, "largest": 3.0}, site]}
    assert own.remark(1000) == "; blocks.17's attention logits had reached 340, 200 updates before"
    own.last["sites"][1] |= {"logit": None, "largest": 5e4}
    assert own.remark(1000) == "; blocks.17's values had reached 5e+04, 200 updates before"


def test_the_remark_begins_at_half_of_what_stops_attention_and_a_hundredth_of_float16():
    own = probing(100)
    for column, limit in (("logit", THRESHOLDS.logit / 2), ("largest", THRESHOLDS.float16 / 100)):
        site = {"block": "blocks.0", "branch": "attn", "logit": 0.0, "largest": 0.0}
        for value, said in ((0.9 * limit, False), (1.1 * limit, True)):
            own.last = {"step": 800, "sites": [{**site, column: value}]}
            assert bool(own.remark(1000)) == said, column


FAST = ("--precision", "bf16", "--torchcompile", "inductor")


@pytest.mark.gpu
@pytest.mark.compile
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_probing_changes_no_bit_of_a_compiled_graphed_and_bf16_copied_run(digit_runs):
    for name, every in (("plain", "0"), ("probed", "3")):
        words = digit_runs.words("--device", "cuda", *FAST, "--probe-interval", every, name=name)
        assert main(["train", *words]) == 0
    assert len(digit_runs.lines("probe.jsonl", "probed")) == 9
    assert digit_runs.same("plain", "probed")
