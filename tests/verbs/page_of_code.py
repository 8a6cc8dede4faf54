"""A page of code as a user writes it, which mypy and pyright read with what they know of fathoms; it is not run."""

from pathlib import Path
from typing import assert_type

import torch
from torch import nn

import fathoms
from fathoms.integrations import Probe

run = fathoms.train(model="vit_digits", recipe="digits", epochs=2, norm="rmsnorm")
assert_type(run, fathoms.Run)
assert_type(run.model, nn.Module)
assert_type(run.path, Path)
likeliest: list[tuple[str, float]] = run.predict("digit.png")
accuracy: float = fathoms.evaluate(run).top1

own = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
pixels, labels = torch.zeros(20, 8, 8, 3, dtype=torch.uint8), torch.arange(20) % 10
fathoms.train((pixels, labels), model=own, epochs=1)

comparison = fathoms.compare(
    axes={"norm": ["layernorm", "dyt"]}, arms={"mine": lambda: own, "deep": {"depth": 24}}, seeds=(3, 5)
)
assert_type(comparison, fathoms.Comparison)
best: str | None = comparison.best
sentences: list[str] = [verdict.sentence for verdict in comparison.verdicts]
page: Path = comparison.page()

judged = fathoms.judge({"a": [71.2, 71.9, 71.5], "b": [64.8, 65.3, 64.1]}, baseline="a")
told: str = judged.answer + judged.table()

vit = fathoms.create_model("vit_tiny_patch16_224", norm="dyt", depth=6)
assert_type(vit, fathoms.ViT)
signal = fathoms.probe(vit, torch.randn(2, 3, 224, 224))
growth: float = signal.growth
outcome: str = fathoms.probe("vit_digits", depth=48, residual="layerscale").verdict().outcome
table: str = fathoms.cost(vit, batch_size=64).table()

groups = fathoms.param_groups(vit, weight_decay=0.05)
optimizer = torch.optim.AdamW(groups.at(1e-3))
watch = Probe(every=50).attach(vit)
watch.before_step()
watch.after_step(optimizer)

exported = fathoms.export(run, "model.onnx")
loaded = fathoms.load_run(run.path)
names: tuple[str, ...] | None = loaded.classes
