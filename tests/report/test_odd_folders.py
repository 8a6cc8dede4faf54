"""Run folders with odd or damaged files: names that are not UTF-8, huge integers, a torn summary."""

from __future__ import annotations

import os

import pytest

from fathoms import FathomsError
from fathoms.cli.main import main
from fathoms.evaluate.training_record import record_of_run
from fathoms.report.page import write_report

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
