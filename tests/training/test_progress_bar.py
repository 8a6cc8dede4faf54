"""The progress of a run: whole at any width, never silent for long, and clear on how to go on."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from fathoms.cli.main import main
from fathoms.training import progress_bar
from fathoms.training.progress_bar import Progress, clock, fit
from tiny_runs import stop_after_update

NUMBERS = {"epoch": "100/300", "loss": "2.345", "top1": "45.6", "images/s": "123,456", "data wait": "12%"}


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_line_fits_and_the_time_left_is_whole(width):
    bar, text = fit(width, 0.123, clock(100 * 3600 - 1), NUMBERS)
    assert text.startswith(" 12%  99:59:59 left")
    assert (bar + 1 if bar else 0) + len(text) <= width
    shown = [name for name in NUMBERS if f"  {name} {NUMBERS[name]}" in text]
    assert shown == list(NUMBERS)[: len(shown)]
    assert len(shown) == {40: 1, 60: 3, 80: 4, 120: 5, 200: 5}[width]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [60, 80])
def test_a_terminal_shows_one_line_with_the_time_left(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    batches = iter([0])
    progress = Progress(100, True, lambda: next(batches, 25), lambda: NUMBERS)
    drawn = progress._render(columns).plain
    progress.close()
    assert len(drawn) < columns
    assert "#" not in drawn + screen.getvalue(), (
        "the bar is drawn the same way from the first line to the last"
    )
    # A busy machine may take a second over this.
    assert re.search(r" 25%  0:\d\d left  epoch 100/300  loss 2\.345  top1 45\.6", drawn)
    assert "…" not in screen.getvalue()


def test_without_a_terminal_a_line_comes_whenever_it_has_been_silent(capsys):
    done, numbers = [10], {}
    progress = Progress(100, True, lambda: done[-1], lambda: dict(numbers), every=0.05)
    time.sleep(0.15)
    done.append(40)
    numbers.update(epoch="1/3", update="40")
    time.sleep(0.15)
    progress.activity = "evaluating"
    time.sleep(0.15)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "10%  -:-- left  no update yet, 0:00 since the start"
    assert any(re.fullmatch(r"40%  0:0\d left  epoch 1/3  update 40", line) for line in lines)
    assert re.fullmatch(r"40%  0:0\d left  epoch 1/3  update 40  evaluating", lines[-1])
    time.sleep(0.15)
    assert capsys.readouterr().err == ""


@pytest.mark.plain
def test_a_long_epoch_prints_lines_between(digit_runs, capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "EVERY", 0.001)
    digit_runs.train("--epochs", "1", "--probe-interval", "4", show=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if " left  epoch 1/1  update " in line]
    assert lines
    assert any("loss 2." in line and "images/s" in line for line in lines)
    assert any(re.search(r"  grad norm [\d.]+", line) for line in lines)
    assert max(map(len, lines)) <= 80


def test_interruption_and_restart_say_how_and_from_where_it_goes_on(digit_runs, capsys):
    trainer = digit_runs.trainer(show=True)
    stop_after_update(trainer, 17)
    assert trainer.run().code == 143
    assert "the same command resumes" in capsys.readouterr().err
    assert main(["train", *digit_runs.words()]) == 0
    assert "resumes in epoch 2 of 2, after update 17\n" in capsys.readouterr().err
    assert main(["train", *digit_runs.words()]) == 0
    assert "holds this run, done after 2 epochs; nothing is left to train" in capsys.readouterr().err


def test_the_first_lines_are_short_and_name_threads_and_folder(digit_runs, capsys):
    digit_runs.train("--epochs", "1", show=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "model: vit_digits, 2 blocks x 16, 8 px, patch 2, 0.00713 M parameters"
    assert lines[1].startswith("training: 1 epoch x 14 updates of 96 images, adamw 0.002 cosine,")
    assert lines[2].startswith("  ")
    assert re.fullmatch(
        r"cost: about [\d.]+ GB of memory, [\d.]+ GB are free; time: after a few updates", lines[3]
    )
    assert lines[4].startswith("run folder:")
    assert any(line.startswith("device: cpu, 1 thread on ") for line in lines[:9])
    assert all(len(line) <= 80 for line in lines if not line.startswith("run folder: "))


def test_images_that_are_enlarged_are_said_to_be(digit_runs, capsys):
    digit_runs.train("--epochs", "1", "--image-size", "16", show=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "images are enlarged: half of them have a side of 8 pixels or fewer, the model takes 16; " in said
    digit_runs.train("--epochs", "1", name="own", show=True)
    assert "images are enlarged" not in capsys.readouterr().err
