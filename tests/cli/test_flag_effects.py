"""Flags of each command but train: a run with one differs from a run without as it says."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import fathoms
from fathoms.cli.main import main, module_of

TESTS = Path(__file__).parents[1]


@pytest.fixture
def observed(monkeypatch):
    """Runs a command in this process: what it prints, and what models, compiler, threads and processes get to see."""

    def observe(*words):
        seen = SimpleNamespace(images=[], autocast=set(), compiled=[], workers=0, processes=[])

        def forward(module, inputs):
            if isinstance(module, fathoms.ViT):
                seen.images.append(inputs[0].detach().clone())
                active = torch.is_autocast_enabled("cpu")
                seen.autocast.add(torch.get_autocast_dtype("cpu") if active else None)

        def compile_with(model, backend):
            seen.compiled.append(backend)
            return model

        def start(thread):
            seen.workers += thread.name.startswith("data-worker")
            begin(thread)

        def process(command, **options):
            seen.processes.append(command)
            return execute(command, **options)

        begin, execute = threading.Thread.start, subprocess.run
        hook = register_module_forward_pre_hook(forward)
        out, err = io.StringIO(), io.StringIO()
        try:
            with (
                monkeypatch.context() as patch,
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                patch.setattr(torch, "compile", compile_with)
                patch.setattr(threading.Thread, "start", start)
                patch.setattr(subprocess, "run", process)
                seen.code = main([str(word) for word in words])
        finally:
            hook.remove()
        seen.out, seen.err = out.getvalue(), err.getvalue()
        last = seen.out.splitlines()[-1:] or [""]
        seen.json = json.loads(last[0]) if last[0].startswith("{") else {}
        return seen

    return observe


def check_table(command, table, elsewhere):
    """Every flag has a row here, or a test elsewhere, that exists and gives the flag."""
    fields = {field.name for field in dataclasses.fields(module_of(command).Args)} - {
        "run",
        "training",
        "switches",
    }
    assert sorted([*table, *elsewhere]) == sorted(fields)
    for name in elsewhere.values():
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def names(seen):
    return [Path(place).name for place in seen.json["results"]]


def only(seen):
    (value,) = seen.json["results"].values()
    return value


def is_green(seen):
    """Whether the corner of the last image is; the photos of red are green at their rim alone."""
    red, green, _ = seen.images[-1][-1, :, 0, 0]
    return bool(green > red)


def batches(seen):
    return [len(images) for images in seen.images]


PIXELS = {
    "mean": (
        ["--mean", "0.5", "0.3", "0.5"],
        lambda a, b: torch.allclose(
            (b.images[0] - a.images[0]).mean((0, 2, 3)), torch.tensor([0, 0.4, 0]), atol=1e-3
        ),
    ),
    "std": (
        ["--std", "0.25", "0.25", "0.25"],
        lambda a, b: torch.allclose(a.images[0] * 2, b.images[0], atol=1e-3),
    ),
}
VALIDATE = {
    "data": (
        ["{copy}"],
        lambda a, b: [Path(x).name for x in (*a.json["results"], *b.json["results"])] == ["photos", "copy"],
    ),
    "split": (["--split", "train"], lambda a, b: (only(a)["images"], only(b)["images"]) == (12, 24)),
    "batch_size": (["--batch-size", "5"], lambda a, b: (batches(a), batches(b)) == ([12], [5, 5, 2])),
    "workers": (["--workers", "3"], lambda _, b: b.workers == 3),
    "amp": (["--amp"], lambda a, b: (a.autocast, b.autocast) == ({None}, {torch.bfloat16})),
    "amp_dtype": (["--amp", "--amp-dtype", "float16"], lambda _, b: b.autocast == {torch.float16}),
    "torchcompile": (
        ["--torchcompile", "aot_eager"],
        lambda a, b: (a.compiled, b.compiled) == ([], ["aot_eager"]),
    ),
    "image_size": (
        ["--image-size", "48"],
        lambda a, b: (a.images[0].shape[-1], b.images[0].shape[-1]) == (32, 48),
    ),
    "crop_pct": (["--crop-pct", "0.5"], lambda a, b: (is_green(a), is_green(b)) == (True, False)),
    "interpolation": (
        ["--interpolation", "bilinear"],
        lambda a, b: 0 < (a.images[0] - b.images[0]).abs().mean() < 0.2,
    ),
    "robustness": (["--robustness", "{copy}"], lambda _, b: names(b) == ["photos", "copy"]),
    "real_labels": (
        ["--real-labels", "{real}"],
        lambda a, b: (only(a).get("real_top1"), only(b)["real_top1"]) == (None, 100.0),
    ),
    **PIXELS,
    "max_bad": (["{damaged}", "--max-bad", "0.5"], lambda _, b: only(b)["images"] == 11),
}
VALIDATE_ELSEWHERE = {
    "checkpoint": "cli/test_validate.py::test_an_onnx_file_is_measured_as_the_run_it_came_from",
    "model": "cli/test_validate.py::test_mistakes_are_found_before_anything_is_measured",
    "device": "cli/test_validate.py::test_mistakes_are_found_before_anything_is_measured",
    "use_ema": "cli/test_validate.py::test_averaged_weights_are_measured_unless_the_plain_ones_are_asked_for",
    "confusion": "cli/test_validate.py::test_numbers_are_written_as_tables",
    "per_class": "cli/test_validate.py::test_numbers_are_written_as_tables",
    "results_file": "cli/test_validate.py::test_numbers_are_written_as_tables",
    "overwrite": "cli/test_validate.py::test_numbers_are_written_as_tables",
    "json": "cli/test_validate.py::test_a_run_of_any_kind_is_measured_again_with_the_same_result",
}


@pytest.fixture(scope="module")
def places(photos, tmp_path_factory):
    """Other data: a copy, one with an unreadable image, and labels that call every guess right."""
    root = tmp_path_factory.mktemp("places")
    found = {
        "copy": shutil.copytree(photos, root / "copy"),
        "damaged": shutil.copytree(photos, root / "damaged"),
    }
    (root / "damaged" / "val" / "red" / "0.png").write_bytes(b"no image")
    (root / "real.json").write_text(json.dumps([[0, 1]] * 12))
    (root / "names.txt").write_text("one\ntwo\n")
    return {
        name: str(place)
        for name, place in {**found, "real": root / "real.json", "names": root / "names.txt"}.items()
    }


@pytest.fixture
def plain(observed, photos, vit):
    """Without a flag, for each command."""
    line = {
        "validate": ["validate", "--checkpoint", vit, "--device", "cpu", "--json"],
        "predict": ["predict", photos / "val", "--checkpoint", vit, "--device", "cpu", "--json"],
    }
    return lambda command, *words: observed(*line[command], *words)


@pytest.mark.parametrize("field", VALIDATE)
def test_a_flag_of_validate_has_its_effect(field, plain, places):
    words, differs = VALIDATE[field]
    with_it = plain("validate", *(word.format(**places) for word in words))
    assert with_it.code == 0, with_it.err
    assert differs(plain("validate"), with_it)


PREDICT = {
    "classes": (
        ["--classes", "{names}"],
        lambda a, b: (
            [set(x.json["predictions"][0]["classes"]) for x in (a, b)] == [{"blue", "red"}, {"one", "two"}]
        ),
    ),
    "top": (
        ["--top", "1"],
        lambda a, b: [len(x.json["predictions"][0]["classes"]) for x in (a, b)] == [2, 1],
    ),
    "batch_size": (["--batch-size", "5"], lambda a, b: (batches(a), batches(b)) == ([12], [5, 5, 2])),
    "crop_pct": (["--crop-pct", "0.5"], lambda a, b: (is_green(a), is_green(b)) == (True, False)),
    "interpolation": (
        ["--interpolation", "bilinear"],
        lambda a, b: 0 < (a.images[0] - b.images[0]).abs().mean() < 0.2,
    ),
    "image_size": VALIDATE["image_size"],
    **PIXELS,
}
PREDICT_ELSEWHERE = {
    "images": "evaluating/test_predict.py::test_a_folder_is_classified_with_names",
    "checkpoint": "evaluating/test_load.py::test_a_run_a_checkpoint_and_a_weights_file_predict_alike",
    "model": "evaluating/test_predict.py::test_mistakes_are_said",
    "device": "evaluating/test_predict.py::test_mistakes_are_said",
    "attention": "evaluating/test_predict.py::test_overlays_are_written",
    "overwrite": "cli/test_export.py::test_results_and_maps_do_not_replace_a_file",
    "json": "evaluating/test_predict.py::test_json_has_every_image_and_a_bad_one_is_named",
}


@pytest.mark.parametrize("field", PREDICT)
def test_a_flag_of_predict_has_its_effect(field, plain, places):
    words, differs = PREDICT[field]
    with_it = plain("predict", *(word.format(**places) for word in words))
    assert with_it.code == 0, with_it.err
    assert differs(plain("predict"), with_it)


PROBE = {
    "data": (
        ["vit_digits", "{copy}", "--in-channels", "3"],
        lambda a, b: [x.images[0].shape[1] for x in (a, b)] == [1, 3],
    ),
    "batch_size": (["--batch-size", "5"], lambda a, b: {batches(a)[0], batches(b)[0]} == {8, 5}),
    "lr": (["--lr", "0.01"], lambda a, b: (a.json["steps"]["lr"], b.json["steps"]["lr"]) == (1e-3, 1e-2)),
    "opt": (
        ["--opt", "sgd"],
        lambda a, b: (a.json["steps"]["opt"], b.json["steps"]["opt"]) == ("adamw", "sgd"),
    ),
    "steps": (["--steps", "3"], lambda a, b: [len(x.json["steps"]["losses"]) for x in (a, b)] == [2, 3]),
}
PROBE_ELSEWHERE = {
    "target": "cli/test_probe.py::test_a_run_folder_is_judged_by_its_drift",
    "model": "cli/test_mistakes.py::test_the_others_are_refused_too",
    "seed": "cli/test_probe.py::test_another_seed_shows_another_signal_and_the_same_seed_the_same",
    "depths": "cli/test_probe.py::test_a_sweep_prints_a_line_per_depth_and_value",
    "axis": "cli/test_probe.py::test_a_sweep_prints_a_line_per_depth_and_value",
    "coordinates": "cli/test_probe.py::test_the_coordinate_check_has_a_command",
    "full": "cli/test_probe.py::test_the_summary_fits_a_screen_and_full_shows_every_branch",
    "figures": "cli/test_probe.py::test_pictures_and_page_are_written",
    "overwrite": "cli/test_probe.py::test_pictures_and_page_are_written",
    "json": "cli/test_probe.py::test_json_is_one_object_with_switches_verdict_and_steps",
}


@pytest.mark.parametrize("field", PROBE)
def test_a_flag_of_probe_has_its_effect(field, observed, places):
    words, differs = PROBE[field]
    line = [
        "probe",
        "--depth",
        "1",
        "--dim",
        "16",
        "--heads",
        "2",
        "--json",
        "--batch-size",
        "8",
        "--steps",
        "2",
    ]
    without, with_it = observed(*line), observed(*line, *(word.format(**places) for word in words))
    assert with_it.code == 0, with_it.err
    assert differs(without, with_it)
    losses = [seen.json["steps"]["losses"] for seen in (without, with_it)]
    assert losses[0] != losses[1]


EXPORT_ELSEWHERE = {
    "checkpoint": "cli/test_export.py::test_an_export_goes_into_the_run_and_the_run_stays_what_it_was",
    "model": "cli/test_export.py::test_a_timm_checkpoint_becomes_a_folded_onnx_file_in_one_command",
    "format": "cli/test_export.py::test_an_export_goes_into_the_run_and_the_run_stays_what_it_was",
    "output": "cli/test_export.py::test_a_card_tells_the_run_s_config_recipe_metrics_and_classes",
    "overwrite": "cli/test_export.py::test_nothing_is_overwritten_without_a_word",
    **dict.fromkeys(
        ("mean", "std", "crop_pct", "interpolation"),
        "cli/test_export.py::test_the_flags_of_the_images_are_in_the_card",
    ),
    "accelerate": "cli/test_export.py::test_a_timm_checkpoint_becomes_a_folded_onnx_file_in_one_command",
    "fold": "cli/test_export.py::test_a_timm_checkpoint_becomes_a_folded_onnx_file_in_one_command",
    "int8": "exporting/test_quantise.py::test_int8_shows_what_it_saves_and_costs",
    "calibrate": "exporting/test_fastest.py::test_validate_and_predict_take_an_openvino_file_in_float_and_int8",
    "fastest": "exporting/test_fastest.py::test_the_command_writes_the_quickest_file",
    "max_drop": "exporting/test_quantise.py::test_int8_that_costs_too_much_is_not_written",
    "push": "exporting/test_publish.py::test_what_is_pushed_is_loaded_at_its_commit_with_its_card",
    "visibility": "exporting/test_publish.py::test_a_repository_is_private_unless_it_is_to_be_public",
    "json": "cli/test_export.py::test_an_export_goes_into_the_run_and_the_run_stays_what_it_was",
}


@pytest.mark.compile
def test_the_opset_of_export_is_that_of_the_file(observed, digits_run, tmp_path):
    onnx = pytest.importorskip("onnx")
    for words, opset in (([], 18), (["--opset", "19"], 19)):
        target = tmp_path / f"{opset}.onnx"
        assert observed("export", digits_run, "--output", target, *words).code == 0
        assert {entry.version for entry in onnx.load(target).opset_import if not entry.domain} == {opset}


CONVERT = {
    "key": (
        ["--key", "other"],
        lambda a, b: (
            [(x.json["taken"], x.json["parameters"]) for x in (a, b)] == [("model", 300000), ("other", 4)]
        ),
    ),
    "seconds": (
        ["--seconds", "77"],
        lambda a, b: ("300" in a.processes[0], "77" in b.processes[0]) == (True, True),
    ),
    "max_gb": (
        ["--max-gb", "0.001"],
        lambda a, b: (a.code, b.code) == (0, 2) and "more than --max-gb allows" in b.err,
    ),
}
CONVERT_ELSEWHERE = {
    "source": "exporting/test_export.py::test_the_commands_run",
    "target": "exporting/test_export.py::test_the_commands_run",
    "overwrite": "cli/test_export.py::test_converted_weights_do_not_replace_a_file",
    "json": "exporting/test_export.py::test_the_commands_run",
}


def test_flags_of_convert_have_their_effect(observed, tmp_path):
    torch.save({"model": {"a": torch.ones(300000)}, "other": {"b": torch.ones(4)}}, tmp_path / "x.pth")
    line = ["convert", tmp_path / "x.pth", tmp_path / "x.safetensors", "--overwrite", "--json"]
    without = observed(*line)
    assert without.code == 0, without.err
    for words, differs in CONVERT.values():
        assert differs(without, observed(*line, *words)), words


# Of the digits, for a moment: three arms whose runs are there, so that a flag of the results trains nothing.
COMPARED = ["compare", "--axis", "norm=layernorm,dyt,rmsnorm", "--seeds", "3", "--epochs", "1"]
COMPARED += [
    "--depth",
    "1",
    "--dim",
    "16",
    "--heads",
    "2",
    "--batch-size",
    "480",
    "--device",
    "cpu",
    "--json",
]


def pairs(seen):
    return [{row["a"][5:], row["b"][5:]} for row in seen.json["verdicts"]]


def compared(observed, folder, *words):
    seen = observed(*COMPARED, "--output", folder.parent, "--experiment", folder.name, *words)
    assert seen.code == 0, seen.err
    seen.trained = len(list(folder.glob("cells/*/summary.json")))
    return seen


COMPARE = {
    "metric": (
        ["--metric", "loss", "--smallest-difference", "0.1"],
        lambda a, b: (
            (a.json["metric"], b.json["metric"]) == ("top1", "loss")
            and a.json["verdicts"][0]["difference"] != b.json["verdicts"][0]["difference"]
        ),
    ),
    "smallest_difference": (
        ["--smallest-difference", "99"],
        lambda a, b: (
            a.json["margin"] != 99 == b.json["margin"]
            and {row["verdict"] for row in b.json["verdicts"]} == {"no difference"}
        ),
    ),
    "baseline": (
        ["--baseline", "norm=dyt"],
        lambda a, b: (len(pairs(a)), pairs(b)) == (3, [{"dyt", "layernorm"}, {"dyt", "rmsnorm"}]),
    ),
    "paired": (
        ["--paired"],
        lambda a, b: (
            [x.json["verdicts"][0]["test"].partition(",")[0] for x in (a, b)] == ["Welch", "paired t"]
        ),
    ),
    "seeds": (["--seeds", "4"], lambda a, b: (a.trained, b.trained) == (9, 12)),
}


def test_flags_of_compare_have_their_effect(observed, tmp_path):
    assert compared(observed, tmp_path / "one", "--shard", "1/3").trained == 3
    without = compared(observed, tmp_path / "one")
    assert without.trained == 9
    for name, (words, differs) in COMPARE.items():
        # A plan keeps what decides; its runs are those of another as well.
        shutil.copytree(tmp_path / "one" / "cells", tmp_path / name / "cells")
        assert differs(without, compared(observed, tmp_path / name, *words)), words


TUNED = (
    "comparing/test_growing.py::test_each_arm_is_tuned_on_val_with_a_seed_apart_and_its_best_value_is_used"
)
COMPARE_ELSEWHERE = {
    "data": "comparing/test_worker.py::test_the_data_of_a_second_cell_are_those_of_the_first_where_they_are",
    "axis": "cli/test_flag_effects.py::test_flags_of_compare_have_their_effect",
    "arm": "comparing/test_cells_equal_train.py::test_a_cell_equals_train_whatever_its_worker_ran_before",
    "preset": "comparing/test_refused_commands.py::test_every_preset_is_a_plan_that_can_be_built",
    "plan": "comparing/test_plan_file.py::test_settings_under_train_are_those_of_all_runs_and_flags_override_them",
    "budget": (
        "comparing/test_signals.py::"
        "test_workers_end_within_seconds_of_their_parent_and_a_used_up_budget_exits_with_75"
    ),
    "by": "comparing/test_by.py::test_a_comparison_is_planned_for_its_time_and_the_same_command_goes_on_with_the_plan",
    "jobs": TUNED,
    "scores": "comparing/test_scores.py::test_the_command_prints_the_same_table",
    "page": "comparing/test_scores.py::test_a_page_shows_the_verdicts_and_the_picture_and_replaces_nothing",
    "per_gpu": "comparing/test_folder.py::test_runs_share_the_gpus_that_are_visible",
    "robustness": (
        "comparing/test_robustness.py::test_scores_are_those_of_validate_are_kept_and_change_no_verdict"
    ),
    "shard": "cli/test_flag_effects.py::test_flags_of_compare_have_their_effect",
    "slurm": "comparing/test_slurm.py::test_every_key_reaches_sbatch_under_its_own_name",
    "wait": "comparing/test_slurm.py::test_eight_cells_with_a_cancelled_a_killed_and_a_requeued_task_equal_a_local_run",
    "keep": "comparing/test_growing.py::test_a_plan_that_grows_runs_only_what_is_new_and_says_so",
    "keep_arms": "comparing/test_looks.py::test_dropped_arms_have_no_verdict_and_still_count_in_the_family",
    "tune": TUNED,
    "tune_epochs": TUNED,
    "dry_run": "comparing/test_refused_commands.py::test_a_dry_run_prints_the_plan_and_writes_nothing",
    "no_pilot": "comparing/test_folder.py::test_a_dry_run_times_each_architecture_and_writes_nothing",
    "json": "cli/test_flag_effects.py::test_flags_of_compare_have_their_effect",
    "model": "comparing/test_plan_file.py::test_settings_under_train_are_those_of_all_runs_and_flags_override_them",
    "recipe": "comparing/test_plan_file.py::test_settings_under_train_are_those_of_all_runs_and_flags_override_them",
}


@pytest.mark.parametrize(
    ("command", "table", "elsewhere"),
    [
        ("validate", VALIDATE, VALIDATE_ELSEWHERE),
        ("predict", PREDICT, PREDICT_ELSEWHERE),
        ("probe", PROBE, PROBE_ELSEWHERE),
        ("export", ["opset"], EXPORT_ELSEWHERE),
        ("convert", CONVERT, CONVERT_ELSEWHERE),
        ("compare", COMPARE, COMPARE_ELSEWHERE),
    ],
)
def test_every_flag_of_a_command_has_a_test_of_its_effect(command, table, elsewhere):
    check_table(command, table, elsewhere)
