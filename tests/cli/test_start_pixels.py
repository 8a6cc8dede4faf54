"""A run that starts from another evaluates with the pixels of that one, its crop among them, and says so."""

from __future__ import annotations

import tomllib

from fathoms.cli.main import main

TINY = ["--model", "vit_tiny_patch16_224", "--depth", "1", "--dim", "24", "--image-size", "32"]
QUICK = ["--epochs", "1", "--batch-size", "24", "--device", "cpu", "--workers", "1", "--lr", "1e-9"]


def test_the_crop_of_the_start_is_taken_and_said(photos, tmp_path, capsys):
    """Mean, std and filter came from the record, the crop from the model's name."""

    def train(name, *words):
        capsys.readouterr()
        line = ["train", photos, *QUICK, "--output", tmp_path, "--experiment", name, *words]
        assert main([str(word) for word in line]) == 0, capsys.readouterr().err
        printed = capsys.readouterr()
        said = " ".join((printed.err + printed.out).split()).partition("preprocessing: ")[2]
        table = tomllib.loads((tmp_path / name / "config.toml").read_text())
        return table["preprocessing"], said

    pixels = ["--mean", "0.2", "0.3", "0.4", "--std", "0.3", "0.4", "0.5", "--crop-pct", "0.5"]
    before, said = train("first", *TINY, *pixels)
    assert "by the recipe or a flag" in said
    start = ["--initial-checkpoint", tmp_path / "first"]
    after, said = train("second", *start)
    assert after == before
    assert f"as recorded by {tmp_path / 'first'}, the start; " in said
    other, said = train("third", *start, "--crop-pct", "0.75")
    assert other == {**before, "crop_pct": 0.75}
    assert f"{tmp_path / 'first'}, the start (interpolation, mean, std); " in said
    # Digits are arrays, which are evaluated whole whatever the start was.
    line = ["train", *QUICK, "--batch-size", "1024", *start, "--initial-head", "new"]
    line += ["--in-channels", "3", "--output", tmp_path, "--experiment", "digits"]
    assert main([str(word) for word in line]) == 0, capsys.readouterr().err
    assert (
        tomllib.loads((tmp_path / "digits" / "config.toml").read_text())["preprocessing"]["crop_pct"] == 1.0
    )
