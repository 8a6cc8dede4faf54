"""Run folders with odd or damaged files: names that are not UTF-8, huge integers, a torn summary."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fathoms import FathomsError
from fathoms.cli.main import main
from fathoms.models.training_record import record_of_run
from fathoms.report.arm_views import packed
from fathoms.report.page import follow, write_report

CONFIG = 'data = "x"\nclasses = ["a", "b"]\n[model]\nname = "vit_digits"\n'


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    return folder


def test_a_file_name_that_is_not_utf_8_is_listed(folder):
    os.close(os.open(os.fsencode(folder) + b"/\xff\xfe.txt", os.O_CREAT))
    page = write_report(folder).read_text()
    assert "%FF%FE.txt" in page
    assert "\\udcff\\udcfe." in page


def test_a_folder_whose_name_is_not_utf_8_is_printed(tmp_path, folder, capsys):
    odd = tmp_path / os.fsdecode(b"r\xff")
    folder.rename(odd)
    assert main(["report", str(odd)]) == 0
    assert "r\\udcff/report.html" in capsys.readouterr().out


@pytest.mark.parametrize("digits", ["0x" + "f" * 50_000, "0o" + "7" * 50_000, "9" * 5_000, "-" + "9" * 40])
def test_a_huge_integer_is_one_line(folder, digits, capsys):
    (folder / "config.toml").write_text(f"x = [{{a = {digits}}}]\n{CONFIG}")
    assert main(["report", str(folder)]) == 2
    (folder / "r.toml").write_text(f"epochs = {digits}\n")
    assert main(["train", "--recipe", str(folder / "r.toml")]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 2
    assert printed.count("not readable as TOML") == 2


def test_a_damaged_summary_says_how_to_go_on(folder):
    (folder / "summary.json").write_text('{"status": ')
    for read in (write_report, record_of_run):
        with pytest.raises(
            FathomsError, match=r"summary.json: not readable as JSON .*; remove the file: the weights"
        ):
            read(folder)
    (folder / "summary.json").unlink()
    assert record_of_run(folder).metrics == {}
    assert write_report(folder).is_file()


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize("words", [["a", "b"], ["."]], ids=["runs", "their folder"])
def test_a_page_of_several_runs_replaces_its_own_kind_and_no_other_file(capsys, words):
    assert main(["report", *words]) == 0
    assert main(["report", *words]) == 0
    Path("report.html").write_text("<!doctype html>mine")
    assert main(["report", *words]) == 2
    assert "report.html: is there already; give another name, or --overwrite" in capsys.readouterr().err
    assert Path("report.html").read_text() == "<!doctype html>mine"
    assert main(["report", *words, "--overwrite"]) == 0
    assert "mine" not in Path("report.html").read_text()[:100]


@pytest.mark.parametrize("text", ['{"status": "done", "seconds": NaN}', '{"status": '], ids=["NaN", "torn"])
@pytest.mark.parametrize("comparison", [False, True], ids=["runs", "comparison"])
def test_a_page_without_a_run_that_cannot_be_read_is_written_and_says_so(two_runs, capsys, text, comparison):
    words = ["a", "b"]
    if comparison:
        (two_runs / "cells").mkdir()
        for name in words:
            (two_runs / name).rename(two_runs / "cells" / name)
        (two_runs / "plan.json").write_text("{}")
        words = ["."]
    damaged = next(two_runs.rglob("b/")) / "summary.json"
    damaged.write_text(text)
    assert main(["report", *words]) == 1
    printed = capsys.readouterr()
    assert "summary.json: not readable as JSON" in printed.err
    assert "remove the file" in printed.err
    assert printed.err.count("\n") == 1
    assert "report.html" in printed.out
    damaged.unlink()
    assert main(["report", *words]) == 0


def test_a_damaged_plan_is_not_said_to_be_of_a_training_command(two_runs, capsys):
    (two_runs / "plan.json").write_text("{")
    assert main(["report", "."]) == 2
    assert "; remove the file, and the command of the comparison writes it again" in capsys.readouterr().err


def test_a_followed_page_is_written_as_a_run_goes_on_and_stops_with_it(folder, monkeypatch):
    seen = []

    def go_on(_seconds):
        seen.append((folder / "report.html").read_text())
        if len(seen) == 2:
            (folder / "summary.json").write_text('{"status": "done"}')
        else:
            (folder / "metrics.jsonl").write_text(
                '{"epoch": 1, "split": "val", "top1": 37.25, "version": 4}\n'
            )

    monkeypatch.setattr("fathoms.report.page.time.sleep", go_on)
    last = follow([folder]).read_text()
    assert [packed([37.25]) in page for page in seen] == [False, True]
    assert all("data-reload" in page.partition("<body")[2].partition(">")[0] for page in seen)
    assert "<body>" in last
