"""Callbacks in real runs of Lightning and of Hugging Face's Trainer, and in a plain loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fathoms import create_model
from fathoms.errors import FathomsError
from fathoms.integrations import Probe
from fathoms.integrations.probe import labels_in
from fathoms.training.guard import DivergedError

SMALL = {"depth": 3, "dim": 16, "heads": 2, "num_classes": 10}


def batches(number=8):
    torch.manual_seed(0)
    return [(torch.randn(4, 1, 8, 8), torch.randint(10, (4,))) for _ in range(number)]


class Breaks(nn.Module):
    """Passes what it is given, and from some call on infinity."""

    def __init__(self, inner, after):
        super().__init__()
        self.inner, self.after, self.calls = inner, after, 0

    def forward(self, *args, **kwargs):
        self.calls += self.training
        found = self.inner(*args, **kwargs)
        return found * float("inf") if self.training and self.calls > self.after else found


def vit(breaks_after=None):
    torch.manual_seed(0)
    model = create_model("vit_digits", **SMALL)
    if breaks_after is not None:
        model.blocks[1].mlp.fc1 = Breaks(model.blocks[1].mlp.fc1, breaks_after)
    return model


def loop(model, watch, data):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for images, labels in data:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        watch.before_step()
        optimizer.step()
        watch.after_step(optimizer, labels)


def test_a_plain_loop_is_measured_without_a_change_to_what_it_trains():
    watched, alone = vit(), vit()
    watch = Probe(every=2).attach(watched)
    loop(watched, watch, batches())
    loop(alone, Probe(every=0), batches())
    assert [row["step"] for row in watch.rows] == [2, 4, 6, 8]
    assert watch.verdict().outcome in ("steady", "drifts")
    assert watch.signal[0].update > 0
    for one, other in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)
    watch.detach()
    assert not any(module._forward_hooks for module in watched.modules())


def test_a_plain_loop_that_diverges_stops_before_the_weights_are_touched_with_the_layer():
    model = vit(breaks_after=3)
    with pytest.raises(DivergedError, match=r"update 4: .* first in the output of blocks\.1\.mlp\.fc1;"):
        loop(model, Probe().attach(model), batches())
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_gradient_that_is_not_finite_is_named_where_the_outputs_are():
    model = vit()
    watch = Probe().attach(model)
    # The gradient of a root at zero is infinite.
    (model(torch.randn(2, 1, 8, 8)) * 0).abs().sum().sqrt().backward()
    with pytest.raises(DivergedError, match=r"first in the gradient of head\."):
        watch.before_step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("breaks_after", [None, 5])
def test_lightning(tmp_path, breaks_after):
    lightning = pytest.importorskip("lightning.pytorch", reason="needs pip install -e .[dev]")
    from fathoms.integrations.lightning import Probe

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = vit(breaks_after)

        def training_step(self, batch, _index):
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    watch, module = Probe(every=2, module="model"), Module()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[watch], default_root_dir=tmp_path, **quiet
    )
    if breaks_after is None:
        trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
        assert [row["step"] for row in watch.watch.rows] == [2, 4, 6, 8]
        assert watch.verdict().outcome in ("steady", "drifts")
        # The last update is made at a rate above 0, and measured so.
        assert all(site.update > 0 for site in watch.watch.signal)
        return
    with pytest.raises(DivergedError, match=r"update 6: .* first in the output of blocks\.1\.mlp\.fc1;"):
        trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    assert not any(each._forward_hooks for each in module.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("breaks_after", [None, 5])
def test_the_trainer_of_transformers(tmp_path, breaks_after):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="needs pip install -e .[dev]")
    from fathoms.integrations.transformers import Probe

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, image_size=8,
        patch_size=2, num_channels=1, num_labels=10,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    if breaks_after is not None:
        name, layer = next((n, m) for n, m in model.named_modules() if n.endswith("1.layernorm_after"))
        model.set_submodule(name, Breaks(layer, breaks_after))
    rows = [{"pixel_values": x, "labels": y} for xs, ys in batches() for x, y in zip(xs, ys, strict=True)]
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=4, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    watch = Probe(every=2)
    trainer = transformers.Trainer(model=model, args=options, train_dataset=rows, callbacks=[watch])
    if breaks_after is None:
        trainer.train()
        assert [row["step"] for row in watch.watch.rows] == [2, 4, 6, 8]
        assert watch.verdict().outcome in ("steady", "drifts")
        # The last update is made at a rate above 0, and measured so.
        assert all(site.update > 0 for site in watch.watch.signal)
        return
    with pytest.raises(DivergedError, match=r"update 6: .* first in the output of .*1\.layernorm_after;"):
        trainer.train()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_updates_of_lightning_are_the_trainers_own_with_accumulation_resumed_and_fitted_again(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="needs pip install -e .[dev]")
    from fathoms.integrations.lightning import Probe

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = vit()

        def training_step(self, batch, _index):
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    def fit(watch, epochs, checkpoint=None):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", accumulate_grad_batches=4, callbacks=[watch],
            default_root_dir=tmp_path, **quiet,
        )  # fmt: skip
        data = torch.utils.data.DataLoader(batches(16), batch_size=None)
        trainer.fit(Module(), data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return [row["step"] for row in watch.watch.rows]

    watch = Probe(every=2, module="model")
    assert fit(watch, 1) == [2, 4]
    # From the start with the same callback, then on from a checkpoint with a new one.
    assert fit(watch, 1) == [2, 4]
    other = Probe(every=2, module="model")
    assert (fit(other, 2, tmp_path / "last.ckpt"), other.watch.updates) == ([6, 8], 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_updates_of_a_resumed_trainer_of_transformers_are_its_own(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="needs pip install -e .[dev]")
    from fathoms.integrations.transformers import Probe

    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, image_size=8,
        patch_size=2, num_channels=1, num_labels=10,
    )  # fmt: skip
    rows = [{"pixel_values": x, "labels": y} for xs, ys in batches() for x, y in zip(xs, ys, strict=True)]
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=4, use_cpu=True,
        report_to=[], save_steps=4, disable_tqdm=True,
    )  # fmt: skip
    found = []
    for start in (None, str(tmp_path / "checkpoint-4")):
        watch, model = Probe(every=2), transformers.ViTForImageClassification(config)
        trainer = transformers.Trainer(model=model, args=options, train_dataset=rows, callbacks=[watch])
        trainer.train(resume_from_checkpoint=start)
        found.append([row["step"] for row in watch.watch.rows])
    assert found == [[2, 4, 6, 8], [6, 8]]


def test_the_classes_of_a_batch_are_those_of_a_usual_key_or_are_said_to_be_drawn():
    images, labels = batches(1)[0]
    for key in ("labels", "label", "y", "targets"):
        assert labels_in({"image": images, "index": labels + 1, key: labels}) is labels
    assert labels_in([images, labels]) is labels
    assert labels_in({"pixels": images, "kind": labels}) is None
    assert labels_in((images, labels + 1, labels)) is None
    model = vit()
    watch = Probe(every=1).attach(model)
    model(images).square().mean().backward()
    with pytest.warns(UserWarning, match="labels are drawn"):
        watch.after_step()
    # A second warning would be an error.
    assert watch.after_step() is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_measures_the_classes_of_a_dict(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="needs pip install -e .[dev]")
    from fathoms.integrations.lightning import Probe

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = vit()

        def training_step(self, batch, _index):
            pair = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch
            return F.cross_entropy(self.model(pair[0]), pair[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    losses = []
    for pairs in (batches(2), [{"image": x, "label": y} for x, y in batches(2)]):
        watch = Probe(every=1, module="model")
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", callbacks=[watch], default_root_dir=tmp_path, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader(pairs, batch_size=None))
        losses.append([row["loss"] for row in watch.watch.rows])
    assert losses[0] == losses[1]


@pytest.mark.plain
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Probe(1.5), "every=1.5: use a whole number, 0 or more"),
        (lambda: Probe(-1), "every=-1: use a whole number, 0 or more"),
        (lambda: Probe(1).attach(None), "Probe: a NoneType is not a model; give an nn.Module"),
    ],
)
def test_a_mistake_is_one_line(call, message):
    with pytest.raises(FathomsError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_an_evaluation_before_the_measurement_is_not_what_is_measured():
    (images, labels), (other, _) = batches(2)
    watch, model = Probe(every=1), vit()
    watch.attach(model)
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    model.eval()
    model(other[:2])
    model.train()
    assert watch.after_step(labels=labels) is not None
    assert watch._images is images


def test_a_model_that_is_not_called_itself_is_said_to_be_unmeasured():
    outer = torch.nn.Sequential(vit())
    watch = Probe(every=1).attach(outer)
    outer[0](batches(1)[0][0]).mean().backward()
    with pytest.warns(
        UserWarning, match="nothing is measured, since Sequential itself is not called with images"
    ):
        assert watch.after_step() is None
