"""The comparison folder's locks, its checkpoints, and the plan's estimate."""

import json
import shutil
import sys
import threading

import numpy as np
import pytest

from fathoms.comparing import dry_run, worker
from fathoms.comparing.comparison import Options
from fathoms.comparing.folder import ComparisonFolder
from fathoms.comparing.progress import Progress
from fathoms.comparing.results import as_table, gather, judged, load_results, row_of, write_results
from fathoms.comparing.runner import Worker
from fathoms.comparing.slurm import JobBook
from fathoms.comparing.tuning import tuning_file, tuning_lines
from fathoms.comparing.worker import ResidentData
from fathoms.errors import ConfigError

NORMS = ("--axis", "norm=layernorm,dyt", "--seeds", "5")


def refused(folder, *shard):
    with pytest.raises(ConfigError, match="another comparison holds this folder"), folder.locked(*shard):
        pass


def test_shards_share_a_folder_and_nobody_else_does(tmp_path):
    folder = ComparisonFolder(tmp_path)
    with folder.locked((1, 3)), folder.locked((2, 3)):
        refused(folder)
        refused(folder, (2, 3))
    with folder.locked():
        refused(folder)
        refused(folder, (1, 3))


def test_the_shards_are_all_cells_once_whatever_is_missing(comparisons):
    comparison = comparisons.make(*NORMS)
    cells, found = comparison.cells(), []
    for share in (1, 2, 3):
        comparison.options = Options(command=(), shard=(share, 3))
        all_of_it, part = comparison._share(cells, cells), comparison._share(cells[5:], cells)
        assert part == [cell for cell in all_of_it if cell in cells[5:]]
        found += all_of_it
    assert sorted(cell.folder.name for cell in found) == sorted(cell.folder.name for cell in cells)


@pytest.mark.parametrize(
    ("keep", "left"), [("none", []), ("last", ["last"]), ("all", ["best", "last", "previous"])]
)
def test_only_the_checkpoints_that_were_asked_for_stay(comparisons, keep, left):
    comparison = comparisons.make(*NORMS)
    cell = comparison.cells()[0]
    for name in ("last", "previous", "best"):
        (cell.folder / "checkpoints" / name).mkdir(parents=True)
        (cell.folder / "checkpoints" / name / "state.json").write_text("{}")
    comparison.folder.prune(cell, keep)
    assert sorted(path.name for path in (cell.folder / "checkpoints").iterdir()) == left


def test_a_failure_is_kept_until_the_cell_ends(comparisons):
    comparison = comparisons.make(*NORMS)
    folder, cell = comparison.folder, comparison.cells()[0]
    folder.note_failure(cell, "no reason")
    assert folder.status(cell) == {"status": "failed", "reason": "no reason"}
    (cell.folder / "summary.json").write_text('{"status": "interrupted"}')
    assert folder.status(cell)["status"] == "failed"
    (cell.folder / "summary.json").write_text('{"status": "done"}')
    assert folder.status(cell)["status"] == "done"


def test_a_dry_run_times_each_architecture_and_writes_nothing(comparisons, capsys):
    assert comparisons.run("--axis", "depth=1,2", "--seeds", "3", "--dry-run") == 0
    out, err = (" ".join(text.split()) for text in capsys.readouterr())
    assert "6 runs missing: about" in out
    assert "MB of checkpoints kept" in out
    assert "timing a few updates of 2 architectures; --no-pilot leaves this out" in err
    assert not comparisons.root.exists()


def test_a_plan_has_the_words_that_the_command_was_given(comparisons, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["notebook", "x", "--unrelated"])
    assert comparisons.make(*NORMS).plan()["command"] == []
    plans = []
    monkeypatch.setattr(dry_run, "describe", lambda made, **_: plans.append(made.plan()) or "")
    assert comparisons.run(*NORMS, "--dry-run", "--no-pilot") == 0
    capsys.readouterr()
    assert plans[0]["command"] == ["compare", *comparisons.words(*NORMS, "--dry-run", "--no-pilot")]
    assert comparisons.make(*NORMS).plan()["command"] == [], "the command has ended"


def test_the_expected_time_follows_the_epochs(comparisons):
    each = {"start": 1.0, "epoch": 2.0}
    job = comparisons.make(*NORMS, "--epochs", "10").cells()[0].job
    assert dry_run.seconds_of(job, each) == 21.0
    more = ("--warmup-epochs", "3", "--warmup-prefix", "--cooldown-epochs", "1.5")
    job = comparisons.make(*NORMS, "--epochs", "10", *more, name="longer").cells()[0].job
    assert dry_run.seconds_of(job, each) == 1 + 2.0 * 15


def test_a_pilot_lasts_two_epochs_and_one_of_slow_updates_ends_after_two_of_them(comparisons, monkeypatch):
    trainers, make = [], worker.make_trainer
    monkeypatch.setattr(worker, "make_trainer", lambda *given: trainers.append(make(*given)) or trainers[-1])
    cell = comparisons.make(*NORMS, "--epochs", "5").cells()[0]
    roles = ResidentData().roles(cell.job, cell.fingerprint, cell.test)
    for patience, updates in ((1e9, 2 * 14 + 1), (0.0, 2)):
        monkeypatch.setattr(worker, "PATIENCE", patience)
        assert worker.time_updates(cell.job, roles)["epoch"] > 0
        assert trainers[-1].loop.state.updates == updates


def test_runs_share_the_gpus_that_are_visible(comparisons, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    comparison = comparisons.make(*NORMS, "--per-gpu", "4", "--device", "cuda")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in comparison.slots()] == ["3"] * 4 + ["5"] * 4


def test_runs_on_one_of_several_gpus_see_it_alone(comparisons, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    comparison = comparisons.make(*NORMS, "--device", "cuda:1")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in comparison.slots()] == ["5"]
    assert {cell.job.run.device for cell in comparison.cells()} == {"cuda"}
    names = {cell.folder.name for cell in comparison.cells()}
    assert {cell.folder.name for cell in comparisons.make(*NORMS).cells()} == names
    with pytest.raises(ConfigError, match="--device cuda:2: there are 2 GPUs, numbered from 0"):
        comparisons.make(*NORMS, "--device", "cuda:2")


def test_workers_for_devices_that_the_runs_are_not_on_are_refused(comparisons, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(
        ConfigError, match="--per-gpu 2 would not be used: the runs are on the CPU; use --jobs"
    ):
        comparisons.make(*NORMS, "--per-gpu", "2")
    with pytest.raises(ConfigError, match="--jobs 2 would not be used: the runs are on GPUs; use --per-gpu"):
        comparisons.make(*NORMS, "--jobs", "2", "--device", "auto")


def test_a_line_that_a_kill_has_torn_is_left_out_of_curves_and_rates(comparisons):
    comparison = comparisons.make(*NORMS, "--tune", "lr=1e-3,1e-4")
    trial = comparison.trials()[0]
    trial.cell.folder.mkdir(parents=True)
    rows = [
        {"version": 2, "epoch": 1, "split": split, "top1": 9.0, "loss": 2.0} for split in ("train", "val")
    ]
    whole = "".join(json.dumps(row | {"images_per_second": 7.0}) + "\n" for row in rows)
    (trial.cell.folder / "metrics.jsonl").write_text(whole + '{"epoch": 2, "spl')
    (trial.cell.folder / "summary.json").write_text('{"status": "diverged"}')
    (arm, _) = comparison.tuning.choose(comparison.trials(), comparison.folder)
    assert arm["trials"][0]["curve"] == [{"epoch": 1, "top1": 9.0, "loss": 2.0}]
    progress = Progress(comparison.folder, 1, "none", print, str)
    progress.close()
    (row,) = json.loads(progress.timings([trial.cell])).values()
    assert row["images_per_second"] == 7.0


def test_the_results_of_given_rows_count_divergence_and_show_new_images(comparisons):
    comparison = comparisons.make(*NORMS)
    plan, rng = comparison.plan(), np.random.default_rng(0)
    rows = []
    for cell in comparison.cells():
        cell.folder.mkdir(parents=True)
        bits = rng.uniform(0, 1, plan["images"]) < (0.9 if "dyt" in cell.arm else 0.6)
        (cell.folder / "correct.bits").write_bytes(np.packbits(bits).tobytes())
        lost = "layernorm" in cell.arm and cell.seed == 4
        summary = {"status": "diverged" if lost else "done", "reason": None}
        if lost:
            summary["last"] = {"top1": 11.0, "loss": 9.0}
        else:
            summary["test"] = {"top1": 100 * float(bits.mean()), "loss": 1.0}
        rows.append(row_of(cell, summary, comparison.folder, plan))
    # The digits have a test set, which a run that diverged never came to.
    assert {row["split"] for row in rows} == {"test"}
    assert [row["top1"] for row in rows if row["status"] == "diverged"] == [None]
    results = judged(rows, plan, comparison.folder.path)
    (verdict,) = results["verdicts"]
    assert verdict["new_images"] is True
    assert verdict["low"] < verdict["difference"] < verdict["high"] < 0
    table = as_table(results)
    assert "| 1 (4% to 62%) |" in table
    assert "Intervals hold for new images as well as new seeds." in table
    # Bits that do not fit the held-out set are not used.
    (comparison.cells()[0].folder / "correct.bits").write_bytes(b"12")
    assert judged(rows, plan, comparison.folder.path)["verdicts"][0]["new_images"] is False


def test_a_run_whose_loss_is_not_a_number_counts_as_diverged_by_loss(comparisons):
    comparison = comparisons.make(*NORMS, "--metric", "loss", "--smallest-difference", "0.1")
    plan, rows = comparison.plan(), []
    for cell in comparison.cells():
        loss = None if (cell.arm, cell.seed) == ("norm=dyt", 0) else 0.5 + 0.01 * cell.seed
        summary = {"status": "done", "reason": None, "test": {"top1": 80.0, "loss": loss}}
        rows.append(row_of(cell, summary, comparison.folder, plan))
    results = judged(rows, plan)
    arms = {arm["name"]: (arm["seeds"], arm["diverged"]) for arm in results["arms"]}
    assert arms == {"norm=layernorm": (5, 0), "norm=dyt": (4, 1)}
    assert [row["reason"] for row in rows if row["status"] == "diverged"] == ["loss is not a finite number"]


def test_stalled_and_failed_runs_stand_under_their_names(comparisons):
    comparison = comparisons.make(*NORMS)
    plan, rows = comparison.plan(), []
    for cell in comparison.cells():
        top1 = 10.1 if cell.seed < 2 else 80.0
        summary = {"status": "done", "reason": None, "test": {"top1": top1, "loss": 1.0}}
        summary = {"status": "failed", "reason": "x"} if cell.seed == 4 else summary
        rows.append(row_of(cell, summary, comparison.folder, plan))
    lines = as_table(judged(rows, plan)).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines]
    (head,), found = (
        [row for row in cells if row[0] == "arm"],
        [row for row in cells if row[0] in comparison.arms],
    )
    assert [(row[head.index("stalled")], row[head.index("failed")]) for row in found] == [("2", "1")] * 2


def test_the_answer_says_so_far_until_every_run_has_ended(comparisons):
    comparison = comparisons.make(*NORMS)
    plan = comparison.plan()
    done = {"status": "done", "reason": None, "test": {"top1": 80.0, "loss": 0.5}}
    rows = [row_of(cell, done, comparison.folder, plan) for cell in comparison.cells()]
    assert judged(rows, plan)["answer"].startswith("no winner: norm=")
    rows[0] = row_of(comparison.cells()[0], {}, comparison.folder, plan)
    assert judged(rows, plan)["answer"].startswith("so far: no winner: norm=")


def test_a_plan_of_an_earlier_version_learns_the_split_that_scores_are_measured_on(comparisons):
    comparison = comparisons.make(*NORMS)
    comparison.folder.path.mkdir(parents=True)
    now = comparison.plan()
    assert now["split"] == "test"
    comparison.folder.begin({key: value for key, value in now.items() if key != "split"})
    assert comparison.folder.begin(now) == {**now, "grown": [], "exploratory": False}


def test_results_have_a_column_for_each_tuned_value(comparisons):
    comparison = comparisons.make("--axis", "norm=layernorm,dyt", "--seeds", "1")
    plan, folder = comparison.plan(), comparison.folder
    results = judged(gather(comparison.cells(), folder, plan), plan)
    best = [{"lr": "0.003"}, None]
    results["tuning"] = [
        {"name": row["name"], "best": one, "edge": [], "failed": []}
        for row, one in zip(results["cells"], best, strict=True)
    ]
    folder.path.mkdir(parents=True)
    write_results(folder, results)
    head, first, second = (line.split(",") for line in (folder.path / "results.csv").read_text().splitlines())
    assert head[:4] == ["arm", "norm", "lr", "seed"]
    assert (first[2], second[2]) == ("0.003", "")
    rows = load_results(folder.path)
    assert rows[0]["lr"] == 0.003
    assert "lr" not in rows[1]


def test_a_shard_gathers_and_writes_while_no_other_does(comparisons):
    comparison = comparisons.make(*NORMS)
    comparison.folder.path.mkdir(parents=True)
    comparison.start(comparison.plan(), print)
    comparison.progress.close()
    refresh = threading.Thread(target=comparison.refresh)
    with ComparisonFolder(comparison.folder.path).writing():
        refresh.start()
        refresh.join(0.3)
        assert refresh.is_alive()
        assert not (comparison.folder.path / "results.json").exists()
    refresh.join(60)
    assert (comparison.folder.path / "results.json").is_file()


def test_trials_that_failed_are_named(comparisons):
    comparison = comparisons.make(*NORMS, "--tune", "lr=1e-3,1e-4")
    for trial in comparison.trials():
        trial.cell.folder.mkdir(parents=True)
        if trial.choice["lr"] == "1e-4":
            comparison.folder.note_failure(trial.cell, "out of memory")
        else:
            done = {"status": "done", "last": {"top1": 50.0, "loss": 1.0}}
            (trial.cell.folder / "summary.json").write_text(json.dumps(done))
    found = comparison.tuning.choose(comparison.trials(), comparison.folder)
    assert [arm["failed"] for arm in found] == [[{"lr": "1e-4"}]] * 2
    assert tuning_lines(found)[0].endswith("; tried in vain, since the run failed: lr=1e-4")
    table = json.loads(tuning_file(found, comparison.tuning))
    assert table["arms"][0]["failed"] == [{"lr": "1e-4"}]


def test_trials_of_tuning_are_not_followed_by_an_answer(comparisons):
    comparison = comparisons.make(*NORMS, "--tune", "lr=1e-3,1e-4")
    comparison.folder.path.mkdir(parents=True)
    said = []
    comparison.start(comparison.plan(), said.append)
    comparison.progress.ended(comparison.trials()[0].cell, {"status": "done"})
    assert len(said) == 1
    rest = {"rule": "best", "luck": None, "edge": [], "replaced": [], "failed": []}
    comparison.tuned = [{"name": "norm=dyt", "best": {"lr": "1e-3"}, **rest}]
    comparison.progress.ended(comparison.cells()[0], {"status": "done"})
    comparison.progress.close()
    assert said[-1] == "  so far: no run has ended with a score"


@pytest.mark.parametrize("text", ['{"status": ', '{"status": "done", "seconds": NaN}'], ids=["torn", "NaN"])
def test_a_damaged_file_says_what_to_do_and_that_heals_it(comparisons, text):
    comparison = comparisons.make(*NORMS)
    folder, cell = comparison.folder, comparison.cells()[0]
    cell.folder.mkdir(parents=True)
    summary, plan = cell.folder / "summary.json", folder.path / "plan.json"
    summary.write_text(text)
    with pytest.raises(
        ConfigError, match=r"summary\.json: not readable .*; remove the file, and the command"
    ):
        folder.status(cell)
    summary.unlink()
    assert folder.status(cell) == {}
    plan.write_text(text)
    with pytest.raises(
        ConfigError, match=r"plan\.json: not readable .*; remove the file, and a command with"
    ):
        comparisons.make(*NORMS)
    plan.unlink()
    assert comparisons.make(*NORMS).plan() == comparison.plan()


def contents(path):
    """What is there: a file's text, or the names in a folder."""
    return path.read_text() if path.is_file() else sorted(map(str, path.rglob("*")))


LINKED = ("checkpoints", "cell", "cells", ".lock", ".lock-plan", "logs", "logs/worker-0.log", "slurm")


@pytest.mark.parametrize("linked", LINKED)
def test_nothing_behind_a_link_is_deleted_emptied_or_written(comparisons, tmp_path, linked):
    comparison = comparisons.make(*NORMS, "--seeds", "1", "--keep", "none")
    folder, elsewhere = comparison.folder.path, tmp_path / "elsewhere"
    for cell in comparison.cells():
        (cell.folder / "checkpoints" / "best").mkdir(parents=True)
        done = {"status": "done", "reason": None, "test": {"top1": 50.0, "loss": 1.0}}
        (cell.folder / "summary.json").write_text(json.dumps(done))
    (folder / "plan.json").write_text(json.dumps({**comparison.plan(), "grown": []}))
    cell = comparison.cells()[0].folder
    place = {"checkpoints": cell / "checkpoints", "cell": cell}.get(linked, folder / linked)
    if place.exists():
        shutil.move(place, elsewhere)
    elif linked.startswith(("logs", "slurm")):
        place.parent.mkdir(exist_ok=True)
        elsewhere.mkdir()
    else:
        elsewhere.write_text("mine")
    if linked.endswith(".log"):
        elsewhere.rmdir()
        elsewhere.write_text("mine")
    place.symlink_to(elsewhere)
    before = contents(elsewhere)
    act = {"logs/worker-0.log": lambda: Worker(place, {}), "slurm": lambda: JobBook(comparison.folder)}
    with pytest.raises(ConfigError, match=r": is a link, and .*; remove it"):
        act.get(linked, lambda: comparison.run(print))()
    assert contents(elsewhere) == before


SCORES = ['{"test": 5}', '{"test": {"loss": 1.0}}', '{"test": {"top1": "9", "loss": 1}}', '{"last": "x"}']
SCORES += ['{"test": {"top1": 1e308, "loss": 1}}', f'{{"test": {{"top1": {"9" * 400}, "loss": 1}}}}']


@pytest.mark.parametrize("text", SCORES)
def test_a_summary_without_a_score_in_it_is_one_line(comparisons, text):
    cell = comparisons.make(*NORMS).cells()[0]
    cell.folder.mkdir(parents=True)
    (cell.folder / "summary.json").write_text('{"status": "done", ' + text[1:])
    with pytest.raises(ConfigError, match=r"summary\.json: .* is no score; remove the file"):
        comparisons.make(*NORMS).folder.status(cell)


@pytest.mark.parametrize(
    "change",
    [
        *({"arms": {"\x1b[31mX": {"norm": "dyt"}}}, {"arms": {"a": {"\x1b": "1"}}}, {"arms": {"a": 5}}),
        *({"tune": {"lr": 5}}, {"tune": {"\x1blr": ["1", "2"]}}, {"seeds": 10**9}, {"seeds": None}),
    ],
)
def test_a_stored_plan_is_held_to_what_a_command_may_ask_for(comparisons, change):
    comparison = comparisons.make(*NORMS)
    comparison.folder.path.mkdir(parents=True)
    (comparison.folder.path / "plan.json").write_text(json.dumps({**comparison.plan(), **change}))
    with pytest.raises(ConfigError, match=r"plan\.json: ") as error:
        comparisons.make(*NORMS)
    assert "\x1b" not in str(error.value)


def test_a_pilot_that_takes_too_long_ends_and_says_so(comparisons, monkeypatch):
    monkeypatch.setattr(dry_run, "LIMIT", 0.05)
    said = dry_run.estimate(comparisons.make(*NORMS), print)
    assert "missing: no time is known, since a few updates" in said


def test_a_plan_says_what_each_run_is(comparisons):
    said = dry_run.describe(comparisons.make(*NORMS))
    assert "each trains vit_digits, " in said
    assert " pixels in patches of " in said
