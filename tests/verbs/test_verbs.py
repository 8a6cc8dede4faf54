"""The verbs in Python: the command's bits, arrays, data sets, modules, and one line for each mistake."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from fathoms import coordinate_check, create_model
from fathoms.cli.main import main
from fathoms.errors import FathomsError
from fathoms.models.config import ViTConfig
from fathoms.training.build import module_hash
from fathoms.training.checkpoint_files import newest
from fathoms.verbs import Run, evaluate, export, predict, train

SMALL = {"epochs": 2, "warmup_epochs": 0, "depth": 1, "dim": 16, "heads": 2, "device": "cpu", "show": False}
LABELS = np.arange(80) % 4
IMAGES = (
    np.random.default_rng(0).integers(0, 255, (80, 16, 16), dtype=np.uint8) // 4
    + (LABELS * 40).astype(np.uint8)[:, None, None]
)
VIT = {"image_size": 16, "patch_size": 4}


class Net(nn.Module):
    """A module whose activation is a plain attribute."""

    def __init__(self, act, classes=4):
        super().__init__()
        torch.manual_seed(0)
        self.act, self.inner, self.head = act, nn.Linear(768, 8), nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.act(self.inner(x.flatten(1))))


def weights(run):
    return load_file(run.path / "checkpoints" / "last" / "model.safetensors")


def same(one, other):
    return all(torch.equal(weights(one)[name], tensor) for name, tensor in weights(other).items())


def flags(settings):
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if name != "show"]


def test_function_and_command_give_the_same_bits_and_resume_each_other(tmp_path, capsys):
    mine = train(**SMALL, output=str(tmp_path / "python"))
    assert main(["train", *flags(SMALL), f"--output={tmp_path / 'command'}"]) == 0
    assert same(mine, Run(tmp_path / "command" / mine.path.name))
    assert main(["train", *flags(SMALL), f"--output={tmp_path / 'python'}"]) == 0
    assert "nothing is left to train" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_killed_in_python_resumes_on_the_command_line_with_the_same_bits(tmp_path, capsys):
    longer = {**SMALL, "epochs": 12, "recovery_interval": 3, "output": str(tmp_path / "killed")}
    code = f"import fathoms; fathoms.train(**{longer!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 300
    while not any(newest(run / "checkpoints") for run in (tmp_path / "killed").glob("*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    (folder,) = (tmp_path / "killed").iterdir()
    assert not Run(folder).summary
    assert main(["train", *flags(longer)]) == 0
    assert "resumes in epoch" in capsys.readouterr().err
    whole = train(**{**longer, "output": str(tmp_path / "whole")})
    assert same(whole, Run(folder))


def test_a_run_shows_its_history_summary_model_and_predictions(tmp_path):
    run = train(**SMALL, output=str(tmp_path))
    assert run.summary["status"] == "done"
    rows = run.history if isinstance(run.history, list) else run.history.to_dict("records")
    assert [row["split"] for row in rows] == ["train", "val", "train", "val", "test"]
    assert not run.model.training
    Image.fromarray(IMAGES[0]).save(tmp_path / "image.png")
    found = run.predict(tmp_path / "image.png", top=3)
    assert len(found) == 3
    assert found[0][1] >= found[1][1]
    assert run.plot().axes
    assert "val accuracy" in repr(run)
    assert run._repr_html_().startswith(f"<p><b>{run.path}</b></p><pre>status: done")


class Items:
    """A map-style data set of images and labels."""

    classes = ("north", "east", "south", "west")

    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        return Image.fromarray(IMAGES[index]), int(LABELS[index])


def test_arrays_tensors_and_data_sets_are_the_same_data(tmp_path):
    runs = [
        train(data, **SMALL, **VIT, output=str(tmp_path / str(number)))
        for number, data in enumerate(
            [(IMAGES, LABELS), (torch.tensor(IMAGES), torch.tensor(LABELS)), {"train": (IMAGES, LABELS)}]
        )
    ]
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])
    named = train(Items(), **SMALL, **VIT, output=str(tmp_path / "named"))
    assert same(runs[0], named)
    assert named.loaded.classes == Items.classes
    tested = train(
        {"train": (IMAGES, LABELS), "test": (IMAGES[:8], LABELS[:8])}, **SMALL, **VIT, output=str(tmp_path)
    )
    assert tested.summary["test"]["images"] == 8


def test_a_config_is_the_model_it_describes(tmp_path):
    settings = {name: value for name, value in SMALL.items() if name not in ("depth", "dim", "heads")}
    config = ViTConfig(depth=1, dim=16, heads=2, **VIT)
    run = train((IMAGES, LABELS), model=config, **settings, output=str(tmp_path))
    assert run.loaded.config == config.replace(num_classes=4)


def test_a_module_of_your_own_is_trained_and_resumes_only_as_itself(tmp_path):
    settings = {"epochs": 2, "device": "cpu", "show": False, "output": str(tmp_path)}

    def module(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(128, 4))

    own = module(0)
    before = own[0].weight.clone()
    run = train((IMAGES, LABELS), model=own, **settings)
    assert run.model is own
    assert not torch.equal(own[0].weight, before)
    again, other = (train((IMAGES, LABELS), model=module(seed), **settings) for seed in (0, 1))
    assert again.path == run.path
    assert torch.equal(again.model[0].weight, own[0].weight)
    assert other.path != run.path


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (None, {"learning_rate": 1}, "train: no setting is called 'learning_rate'; did you mean 'lr'?"),
        (None, {"epochs": 0}, "--epochs 0: use 1 or more"),
        (None, {"model": "vit_digit"}, "did you mean 'vit_digits'?"),
        ({"tset": (IMAGES, LABELS)}, {}, "data: no split is called 'tset'; did you mean 'test'?"),
        ({"test": (IMAGES, LABELS)}, {}, "no split is called 'train'"),
        ((IMAGES / 255, LABELS), {}, "data: train: images are float64, not uint8"),
        ((IMAGES, LABELS[:3]), {}, "80 images for 3 labels"),
        (3, {}, "a pair of images and labels is expected"),
        (None, {"model": nn.Linear(1, 1)}, "image_size: give the side of the images that your module takes"),
        ((IMAGES, LABELS), {"model": nn.Linear(1, 1), "norm": "dyt"}, "--norm: a module has no such switch"),
        (
            (IMAGES, LABELS),
            {"model": nn.Linear(1, 1)},
            "Linear: fails on images of shape (2, 3, 16, 16) (",
        ),
        (
            (IMAGES, LABELS),
            {"model": Net(torch.relu, 7)},
            "Net: gives (2, 7) for 2 images, not the logits of 4",
        ),
        (
            (IMAGES, LABELS),
            {"model": Net(torch.relu).double()},
            "Net: has parameters of float64; training wants",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path, data, settings, message):
    with pytest.raises(FathomsError) as error:
        train(data, **{"show": False, "output": str(tmp_path), **settings})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_is_evaluated_classifies_and_is_exported_as_by_the_commands(tmp_path):
    data = {"train": (IMAGES, LABELS), "test": (IMAGES[:24], LABELS[:24])}
    run = train(data, **SMALL, **VIT, output=str(tmp_path))
    found = evaluate(run, data["test"])
    assert (found.images, found.top1) == (24, pytest.approx(run.summary["test"]["top1"]))
    assert evaluate(run.path, Items()).images == 80
    with pytest.raises(FathomsError, match="give data"):
        evaluate(run)
    for number in range(3):
        Image.fromarray(IMAGES[number]).save(tmp_path / f"{number}.png")
    rows = predict(run, [tmp_path / f"{number}.png" for number in range(3)], top=2)
    assert [len(row.classes) for row in rows] == [2, 2, 2]
    assert rows[0].probabilities[0] == run.predict(tmp_path / "0.png")[0][1]
    made = export(run, tmp_path / "model.safetensors", "safetensors")
    assert max(made.differences.values()) < 1e-5
    again = evaluate(tmp_path / "model.safetensors", data["test"])
    assert again.top1 == pytest.approx(found.top1)
    small = create_model("vit_digits", depth=1, dim=16, heads=2)
    assert export(small, tmp_path / "own.safetensors", "safetensors").differences


class Named:
    """A data set whose classes have names, as torchvision's have."""

    def __init__(self, classes, labels):
        self.classes, self.labels = classes, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index]
        return np.full((8, 8, 3), 80 * (ord(self.classes[label]) - 97) % 256, np.uint8), label


def test_labels_of_a_data_set_mean_its_own_class_names(tmp_path):
    whole, part = Named(["a", "b", "c"], [0, 1, 2] * 20), Named(["b", "c"], [0, 1] * 10)
    small = {"output": tmp_path, "image_size": 8, "patch_size": 4, "dim": 16, "heads": 2, "depth": 1}
    small |= {"epochs": 12, "batch_size": 10, "val_share": 0.2, "lr": 3e-3, "warmup_epochs": 0, "hflip": 0.0}
    run = train({"train": whole, "test": part}, model="vit_digits", crop="whole", show=False, **small)
    assert run.summary["test"]["top1"] == 100.0
    assert evaluate(run, part).top1 == 100.0
    assert evaluate(run, {"test": part}).top1 == 100.0
    with pytest.raises(FathomsError, match="give data"):
        evaluate(run)
    with pytest.raises(FathomsError, match="a class 'z' that the others do not have"):
        train({"train": whole, "test": Named(["z"], [0])}, show=False, **small)


@pytest.mark.parametrize(
    "data",
    [[1, 2, 3], (1, 2, 3), Named(["a", "b"], [0.5]), Named(["a"], ["a"])],
    ids=["list", "three", "halves", "words"],
)
@pytest.mark.plain
def test_data_of_another_form_are_refused_in_one_line(data, tmp_path):
    with pytest.raises(FathomsError, match="data: train: "):
        train(data, output=str(tmp_path), show=False)


def test_modules_of_equal_weights_and_other_activations_are_other_runs():
    def net(activation):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), activation, torch.nn.Linear(4, 2))

    assert module_hash(net(torch.nn.ReLU())) == module_hash(net(torch.nn.ReLU()))
    assert module_hash(net(torch.nn.ReLU())) != module_hash(net(torch.nn.Tanh()))
    assert module_hash(net(torch.nn.Dropout(0.1))) != module_hash(net(torch.nn.Dropout(0.2)))


def test_modules_that_differ_in_attributes_closures_or_what_trains_are_other_runs():
    def scaled(factor):
        return lambda x: factor * x.relu()

    frozen = Net(torch.relu)
    frozen.head.bias.requires_grad_(False)
    nets = [Net(torch.relu), Net(torch.sin), Net(scaled(1.0)), Net(scaled(2.0)), frozen]
    assert len({module_hash(net) for net in nets}) == 5
    assert module_hash(Net(scaled(2.0))) == module_hash(nets[3])
    script = f"""if True:
        import sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
        from test_verbs import Net, module_hash, torch
        print(module_hash(Net(torch.relu)))
    """
    elsewhere = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    here = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert elsewhere.stdout == here.stdout


def test_a_module_with_averaged_weights_is_what_was_measured(tmp_path):
    data = {"train": (IMAGES, LABELS), "test": (IMAGES[:24], LABELS[:24])}
    options = {"epochs": 3, "warmup_epochs": 0, "device": "cpu", "show": False, "output": str(tmp_path)}
    run = train(data, model=Net(torch.relu), model_ema=True, model_ema_decay=0.5, lr=0.01, **options)
    measured = run.summary["test"]
    for model in (
        run,
        train(data, model=Net(torch.relu), model_ema=True, model_ema_decay=0.5, lr=0.01, **options),
    ):
        assert evaluate(model, data["test"]).loss == pytest.approx(measured["loss"], rel=1e-6)


def test_a_run_that_is_interrupted_ends_a_loop_of_runs_and_goes_on(tmp_path, monkeypatch):
    step = Net.forward
    seen = []

    def interrupted(self, x):
        seen.append(len(x))
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self, x)

    options = {"epochs": 2, "device": "cpu", "show": False, "output": str(tmp_path)}
    net = Net(torch.relu)
    monkeypatch.setattr(Net, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train((IMAGES, LABELS), model=net, **options)
    assert train((IMAGES, LABELS), model=Net(torch.relu), **options).summary["status"] == "done"


@pytest.mark.plain
def test_what_is_no_model_and_an_unknown_option_are_one_line(tmp_path):
    with pytest.raises(FathomsError, match="is no name, ViTConfig or module"):
        train(model=Net, show=False)
    with pytest.raises(FathomsError, match="export: no option is called 'fold'; did you mean 'folded'?"):
        export(create_model("vit_digits", depth=1), tmp_path / "m.onnx", fold=True)
    with pytest.raises(FathomsError, match="one seed or more"):
        coordinate_check(
            lambda depth: create_model("vit_digits", depth=depth), (1, 2), torch.ones(2, 1, 8, 8), seeds=()
        )


def test_one_image_file_is_predicted_by_its_name(tmp_path):
    run = train(**SMALL, output=str(tmp_path))
    Image.fromarray(IMAGES[0]).save(tmp_path / "one.png")
    assert [each.file for each in predict(run, str(tmp_path / "one.png"))] == [str(tmp_path / "one.png")]
