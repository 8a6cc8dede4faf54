"""The `fathoms` command in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fathoms.cli.main import COMMANDS, main
from fathoms.parts import families

ENVIRONMENT = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}


def fathoms(*words, **options):
    command = [sys.executable, "-m", "fathoms", *words]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, **options)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_shows_an_example_and_imports_no_torch(name):
    words = [*name.split(), "--help"]
    start = f"import sys; from fathoms.cli.main import main\ntry: main({words!r})\n"
    code = start + "finally: print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "examples" in result.stdout
    # The parser writes the usage on one line.
    assert max(len(line) for line in result.stdout.splitlines() if not line.startswith("usage: ")) <= 80
    assert f"fathoms {name}" in result.stdout
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_shows_the_flags_of_use_and_help_all_the_rest(command):
    few, all_ = fathoms(command, "--help").stdout, fathoms(command, "--help-all").stdout
    assert "--epochs" in few
    assert "--spike-score" not in few
    assert "--spike-score" in all_
    assert f"more flags: fathoms {command} --help-all" in few
    assert len(few.splitlines()) < 110 < 300 < len(all_.splitlines())


def test_lines_of_an_unbuffered_process_are_printed_at_once():
    code = (
        "import os, sys; from fathoms.cli.terminal.streams import make_safe; make_safe(); "
        "print('out'); print('err', file=sys.stderr); os._exit(0)"
    )
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


@pytest.mark.parametrize("words", [[], ["data"], ["--version"], ["models"]])
def test_a_reader_that_has_gone_is_no_error(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fathoms", *words]
    result = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=120
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_launcher_makes_a_light_command_no_heavier():
    code = "import sys; from fathoms.cli.main import command\ntry: command()\nfinally: print('torch' in sys.modules)"
    line, environment = (
        [sys.executable, "-c", code, "recipes"],
        {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "2"},
    )
    result = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "False"


def test_help_is_quick():
    """Half a second of the machine's time, whatever else it does; best of three."""
    for command in ("probe", "train"):
        seconds = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            fathoms(command, "--help")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert min(seconds) < 0.5, command


def test_a_mistake_is_one_line_and_exit_code_2():
    """As a process; mistakes.txt has the lines of many more."""
    result = fathoms("probe", "--nrm", "dyt")
    said = "fathoms probe: no option is called '--nrm'; did you mean '--norm'?\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", said)


def test_models_lists_and_shows():
    assert "cait_s24_224" in fathoms("models", "cait_*").stdout.split()
    report = json.loads(fathoms("models", "cait_s24_224", "--json").stdout)
    assert report["parameters"] == pytest.approx(46.9e6, rel=0.01)
    assert "46.92 M parameters" in fathoms("models", "cait_s24_224").stdout
    head, *rows = fathoms("models", "cait_s24_*").stdout.splitlines()
    assert head.split() == ["blocks", "width", "pixels", "patch", "params", "model"]
    assert rows[0].split() == ["24", "384", "224", "16", "46.9", "M", "cait_s24_224"]


def test_recipes_are_listed_and_shown_as_toml_that_can_be_read_again(tmp_path):
    listed = json.loads(fathoms("recipes", "--json").stdout)
    papers = {"learnable_scaler_300", "cait_400", "deit3_800", "rsb_a2", "vit5"}
    assert {*papers, "digits", "cifar", "small_images", "finetune"} == set(listed)
    for name in listed:
        shown = fathoms("recipes", name).stdout
        (tmp_path / f"{name}.toml").write_text(shown)
        assert fathoms("recipes", str(tmp_path / f"{name}.toml")).stdout == shown


def test_parts_lists_every_family():
    report = json.loads(fathoms("parts", "--json").stdout)
    assert set(report) == set(families())
    assert all(summary for parts in report.values() for summary in parts.values())


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m fathoms models | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_version_is_printed():
    import fathoms as package

    assert fathoms("--version").stdout.strip() == package.__version__


@pytest.mark.parametrize(
    "words", [["data"], ["data", "--help"], ["data", "-h"], ["data", "help"]], ids=" ".join
)
def test_a_group_alone_lists_its_commands(words, capsys):
    assert main(words) == 0
    printed = capsys.readouterr()
    assert not printed.err
    assert [line.split()[:3] for line in printed.out.splitlines()[3:]] == [
        ["fathoms", "data", "check"],
        ["fathoms", "data", "pack"],
        ["fathoms", "data", "info"],
    ]


def test_a_mistyped_command_of_a_group_gets_the_nearest_of_it(capsys):
    assert main(["data", "chek", "photos"]) == 2
    assert "no command is called 'data chek'; did you mean 'data check'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["models", "--json"], ["train", "--help"], ["data"]])
def test_output_that_cannot_be_written_is_exit_code_1_and_one_line(words):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fathoms", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "standard output cannot be written (No space left on device)" in done.stderr


def test_a_training_whose_output_cannot_be_written_goes_on_to_its_end(tmp_path):
    words = ["train", "--epochs", "1", "--depth", "1", "--device", "cpu", "--output", str(tmp_path), "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fathoms", *words, "--experiment", "run"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("fathoms train: standard output cannot be written")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"
