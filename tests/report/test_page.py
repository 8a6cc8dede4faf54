"""The page of a run: it shows what the folder holds, and untrusted text stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from fathoms import FathomsError
from fathoms.cli.main import main
from fathoms.plotting.style import to_svg
from fathoms.report.figures import MOST_COLUMNS, norm_map, norms_figure
from fathoms.report.html import embedded
from fathoms.report.page import write_report
from fathoms.report.records import count, duration, file_size, read_run
from fathoms.report.run_page import run_plot
from fathoms.training.run_folder import to_toml

HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=alert(1)>\"'{{7*7}}&"


class Page(HTMLParser):
    """Elements with their attributes, and the text of each kind."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open, self.joined = [], {}, [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        # A place to break a line, or an isolated direction, does not end a text.
        self.joined = tag in ("wbr", "bdi")
        if tag not in ("meta", "img", "input", "wbr", "bdi"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag == "bdi":
            return
        self.joined = False
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if not self.open:
            return
        texts = self.texts.setdefault(self.open[-1], [])
        if self.joined and texts:
            texts[-1] += data
        else:
            texts.append(data)
        self.joined = True

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag):
        return " ".join(" ".join(self.texts.get(tag, [])).split())


def sites(step):
    return [
        {"block": f"blocks.{i // 2}", "branch": ("attn", "mlp")[i % 2], "stream": 1.0 + i, "added": 0.5}
        | {"ratio": 0.1 * step, "gradient": 10.0**-i, "weights": None if i == 3 else 0.2}
        for i in range(6)
    ]


@pytest.fixture
def folder(tmp_path):
    """A run folder as `fathoms train` leaves it, small."""
    run = tmp_path / "runs" / "deep one"
    (run / "checkpoints" / "last").mkdir(parents=True)
    (run / "checkpoints" / "last" / "model.safetensors").write_bytes(b"x" * 2500)
    config = {"data": "photos", "seed": 42, "classes": ["cat", HOSTILE], "model": {"name": "vit", "depth": 3}}
    config |= {"recipe": {"lr": 0.003, "amp": False}, "run": {"output": "runs"}}
    (run / "config.toml").write_text(to_toml(config))
    (run / "environment.json").write_text(
        json.dumps({"python": "3.11", "versions": {"torch": "2.15"}, "gpu": None})
    )
    rows = []
    for epoch in range(5):
        rows.append({"epoch": epoch + 1, "step": 10 * epoch, "split": "train", "loss": 2.0 / (epoch + 1)})
        rows[-1] |= {"top1": 10.0 * epoch, "top5": 50.0, "lr": 1e-3, "images_per_second": 900.0}
        rows.append(
            {"epoch": epoch + 1, "step": 10 * epoch, "split": "val", "loss": 1.8, "top1": 12.0 * epoch}
        )
        rows[-1] |= {"top5": 60.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    probes = [{"epoch": 0, "step": step, "sites": sites(step)} for step in range(1, 5)]
    (run / "probe.jsonl").write_text("".join(json.dumps(row) + "\n" for row in probes))
    summary = {"status": "done", "reason": None, "best": {"top1": 48.0, "epoch": 4, "loss": 1.8}, "epoch": 5}
    summary |= {"last": {"top1": 48.0, "loss": 1.8, "images": 16}, "seconds": 75.0, "parameters": 21_500_000}
    (run / "summary.json").write_text(json.dumps(summary | {"updates": 50, "peak_memory": None}))
    return run


def page(folder):
    return Page(write_report(folder).read_text())


def test_the_page_shows_the_numbers_the_settings_and_the_files(folder):
    made = page(folder)
    assert made.text("h1") == "deep one"
    for value in ("48.00 %", "1.8000", "21.5 M", "75 s"):
        assert value in made.text("dd")
    for setting in ("lr", "depth", "seed", "torch"):
        assert setting in made.texts["th"]
    assert {"0.003", "42", "no", "2.15"} <= set(made.texts["td"])
    assert {"href": "./checkpoints/last/model.safetensors"} in made.named("a")
    assert "2.5 kB" in made.texts["td"]
    assert not made.open


def floats(text):
    return np.frombuffer(base64.b64decode(text), "<f4").tolist()


def test_curves_pass_through_the_metrics(folder):
    group = json.loads("".join(page(folder).texts["script"][:1]))["epoch"]
    assert [arm["name"] for arm in group["arms"]] == ["train", "val", "val top-5"]
    titles = [chart["title"] for chart in group["charts"]]
    assert titles == ["Loss", "Accuracy", "Learning rate", "Images per second"]
    assert group["epochs"] == [1, 2, 3, 4, 5]
    accuracy = group["charts"][1]["lines"]
    assert floats(accuracy[1]) == [12.0 * epoch for epoch in range(5)]
    assert [line is None for line in group["charts"][2]["lines"]] == [False, True, True]


def test_the_figure_of_a_run_has_the_curves_of_its_page(folder):
    figure = run_plot(read_run(folder))
    assert [axes.get_title("left") for axes in figure.axes] == [
        *("Loss", "Accuracy, %", "Learning rate", "Images per second")
    ]
    assert figure.axes[1].lines[1].get_ydata().tolist() == [12.0 * epoch for epoch in range(5)]


@pytest.mark.parametrize("losses", [(0, 5e-324), (-1e300, 1e300), (10**16, 10**16 + 2), (10**400, 1), (3, 3)])
def test_numbers_at_the_ends_of_arithmetic_are_drawn_or_left_out(folder, losses):
    rows = [{"epoch": epoch, "split": "train", "loss": loss} for epoch, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not page(folder).open
    assert to_svg(run_plot(read_run(folder))).startswith("<svg")


def test_the_heat_map_has_a_cell_for_every_site_and_measurement(folder):
    run = read_run(folder)
    made = norm_map("gradients", run.probes, "gradient")
    np.testing.assert_allclose(made.values, np.tile(10.0 ** -np.arange(6.0)[:, None], 4))
    assert (made.rows[1], made.columns) == ("0 mlp", ["1", "2", "3", "4"])
    image = norms_figure([made]).axes[0].images[0]
    assert (image.norm.vmin, image.norm.vmax) == pytest.approx((1e-5, 1.0))
    assert np.isnan(norm_map("w", run.probes, "weights").values).sum() == 4
    assert norm_map("g", run.probes * 100, "gradient").values.shape == (6, MOST_COLUMNS)
    assert norm_map("g", run.probes, "dead") is None
    assert page(folder).text("h2").startswith("Curves Norms by layer")


def test_hostile_names_stay_text(folder):
    named = folder.parent / "<b onclick=x>'&amp;"
    shutil.copytree(folder, named)
    (named / "<i>.txt").write_text("")
    summary = json.loads((named / "summary.json").read_text()) | {"status": HOSTILE, "reason": HOSTILE}
    (named / "summary.json").write_text(json.dumps(summary))
    with (named / "probe.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": HOSTILE, "sites": [{"block": HOSTILE, "branch": HOSTILE, "stream": "x"}]})
            + "\n"
        )
    made = page(named)
    assert not made.open
    assert len(made.named("script")) == 2
    assert not {"img", "b", "i", "iframe", "object", "form"} & {tag for tag, _ in made.elements}
    assert not [name for _, attributes in made.elements for name in attributes if name.startswith("on")]
    assert HOSTILE in made.texts["span"]
    assert made.text("h1") == "<b onclick=x>'&amp;"
    assert "49" not in made.text("span"), "a template in a name is not carried out"


def test_nothing_is_loaded_from_anywhere_and_the_policy_fits_the_page(folder):
    text = write_report(folder).read_text()
    made = Page(text)
    assert not re.search(r"https?:|url\((?!#)|@import", text.replace("https://github.com/leeoniya/uPlot", ""))
    assert not [attributes for _, attributes in made.elements if "src" in attributes]
    assert all(link["href"].startswith("./") for link in made.named("a"))
    policy = made.named("meta")[1]["content"]
    assert policy.startswith("default-src 'none'")
    for tag, element in (("style", r"<style>(.*?)</style>"), ("script", r"<script>(.*?)</script>")):
        inside = re.search(element, text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not [attributes for _, attributes in made.elements if "style" in attributes]


def test_embedded_json_cannot_leave_its_element():
    text = embedded({"a": HOSTILE})
    assert "<" not in text
    assert json.loads(text) == {"a": HOSTILE}


def test_a_diverged_run_is_marked_as_such(folder):
    summary = json.loads((folder / "summary.json").read_text())
    reason = "epoch 3, step 4: not a finite number, first in the output of blocks.1.mlp"
    (folder / "summary.json").write_text(json.dumps(summary | {"status": "diverged", "reason": reason}))
    made = page(folder)
    assert {"class": "status bad"} in made.named("p")
    assert "This run diverged" in made.text("h2")
    assert reason in made.text("p")
    assert "alert" in [attributes.get("role") for attributes in made.named("section")]


def test_a_run_that_has_just_begun_has_a_page(folder):
    for name in ("summary.json", "metrics.jsonl", "probe.jsonl", "environment.json"):
        (folder / name).unlink()
    made = page(folder)
    assert {"class": "status open"} in made.named("p")
    assert not made.named("svg")
    assert "Curves" not in made.text("h2")


def test_a_line_being_written_is_left_out_and_a_damaged_one_is_named(folder, capsys):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 5, "spl')
    assert len(read_run(folder).metrics) == 10
    (folder / "metrics.jsonl").write_text('{"epoch": 0}\nnonsense\n')
    assert main(["report", str(folder)]) == 2
    assert "metrics.jsonl: line 2: not readable as JSON" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(FathomsError, match="line 1: is not a JSON object"):
        read_run(folder)


def test_numbers_of_the_wrong_kind_are_left_out(folder):
    rows = [{"epoch": "x", "split": "train", "loss": "y", "top1": True, "lr": None}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"status": 3, "best": [], "last": "x", "seconds": {}}))
    (folder / "environment.json").write_text(json.dumps({"versions": "none"}))
    (folder / "config.toml").write_text('model = "vit"\nclasses = "many"')
    assert not page(folder).open


def test_the_command_writes_the_page_and_says_where(folder, tmp_path, capsys):
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "page.html"), "unreadable": []}
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    again = ["report", str(folder), "--output", str(tmp_path / "page.html")]
    assert main(again) == 2
    assert "is there already" in capsys.readouterr().err
    assert main([*again, "--overwrite"]) == 0
    for wrong, message in (
        (tmp_path, "it has no config.toml"),
        (tmp_path / "none", "no such file or folder"),
    ):
        assert main(["report", str(wrong)]) == 2
        assert message in capsys.readouterr().err
    assert main(["report", str(folder), "--output", "/proc/nothing/page.html"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_quantities_are_said_as_people_say_them():
    assert [duration(value) for value in (3.0, 119.0, 600.0, 9000.0)] == [
        "3 s",
        "119 s",
        "10 min",
        "2 h 30 min",
    ]
    assert [count(value) for value in (12.0, 9_500.0, 21.5e6, 1.2e9)] == ["12", "9.5 k", "21.5 M", "1.2 G"]
    assert [file_size(value) for value in (12.0, 9_500.0, 21.5e6, 3e9)] == [
        "12 B",
        "9.5 kB",
        "21.5 MB",
        "3.0 GB",
    ]


def test_training_leaves_the_page_in_the_run_folder(tmp_path):
    words = ["--depth", "1", "--dim", "16", "--heads", "2", "--epochs", "1", "--batch-size", "400"]
    words += ["--probe-interval", "1", "--device", "cpu", "--output", str(tmp_path), "--experiment", "run"]
    assert main(["train", *words]) == 0
    made = Page((tmp_path / "run" / "report.html").read_text())
    assert made.text("h1") == "run"
    assert "Norms by layer" in made.text("h2")


def test_a_browser_runs_our_script_and_not_an_untrusted_one(folder):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    named = folder.parent / "<script>document.title='pwned'<"
    shutil.copytree(folder, named)
    target = write_report(named, folder.parent / "page.html")
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", target.as_uri()]
    seen = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert len(re.findall(r"data-ready=\"\"", seen.stdout)) == 5, "the page and its four charts"
    assert "<title>pwned" not in seen.stdout
    assert "Content Security Policy" not in seen.stderr
