from __future__ import annotations

import errno
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from autods.rank.training_run import checkpoints
from autods.rank.training_run.checkpoints import (
    MARK,
    Layout,
    Manifest,
    SavedCheckpoint,
    can_load_directly,
    checkpoint_folder,
    find_damage,
    find_obstacle,
    list_checkpoints,
    list_files,
    remove_old,
    remove_torn,
    write_manifest,
)

ZERO2 = Layout(stage=2, world_size=2)


def save(run, step, *, complete=True):
    folder = checkpoint_folder(run, step)
    (folder / "state").mkdir(parents=True)
    (folder / "ranks").mkdir()
    (folder / "state" / "weights.pt").write_bytes(b"w" * 100)
    (folder / "ranks" / "rank00000.pt").write_bytes(b"r" * 10)
    if complete:
        write_manifest(folder, make_manifest(step, list_files(folder)))
    return folder


def make_manifest(step=10, files=None, **changes):
    values = {"layout": ZERO2, "optimizer": "AdamW"} | changes
    return Manifest(step=step, samples=8 * step, global_batch=8, seed=0, files=files or {}, **values)


def test_files_that_the_run_does_not_need_may_go(tmp_path):
    folder = save(tmp_path, 5)
    needed = {"ranks/rank00000.pt": 10}
    write_manifest(folder, make_manifest(5, needed, others={"state/weights.pt": 100}))
    (folder / "state" / "weights.pt").unlink()
    assert list_checkpoints(tmp_path).latest.size_bytes == 110


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert list_checkpoints(tmp_path / "missing").latest is None


def test_complete_checkpoints_are_sorted_by_step(tmp_path):
    for step in (20, 5, 100_000_000):
        save(tmp_path, step)
    listed = list_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in listed.complete] == [5, 20, 100_000_000]
    assert listed.latest.size_bytes == 110
    assert not listed.torn


def lose_file(folder):
    (folder / "state" / "weights.pt").unlink()


def shorten_file(folder):
    (folder / "state" / "weights.pt").write_bytes(b"w" * 99)


def lose_mark(folder):
    (folder / MARK).unlink()


def cut_mark(folder):
    (folder / MARK).write_text((folder / MARK).read_text()[:-20])


def change_mark(folder):
    (folder / MARK).write_text(json.dumps({"step": 10}))


@pytest.mark.parametrize(
    ("tear", "reason"),
    [
        (lose_file, "weights.pt cannot be read: No such file"),
        (shorten_file, "weights.pt has 99 bytes instead of 100"),
        (lose_mark, "not saved to its end"),
        (cut_mark, "cannot be read"),
        (change_mark, "lacks"),
    ],
)
def test_a_torn_checkpoint_is_left_out_with_its_reason(tmp_path, tear, reason):
    save(tmp_path, 5)
    tear(save(tmp_path, 10))
    listed = list_checkpoints(tmp_path)
    assert listed.latest.step == 5
    assert [torn.path.name for torn in listed.torn] == ["step-00000010"]
    assert reason in listed.torn[0].reason


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data, None),
        (lambda data: data.replace(b"tensor", b"tensxr"), "ranks/a.pt has other bytes than were written, in data/0"),
        (lambda data: data[:-30] + bytes(30), "ranks/a.pt cannot be read: File is not a zip file"),
    ],
)
def test_damage_is_found_in_files_of_the_right_size(tmp_path, damage, text):
    folder = save(tmp_path, 10, complete=False)
    (folder / "state" / "weights.pt").rename(folder / "state" / "weights.json")
    (folder / "ranks" / "rank00000.pt").unlink()
    with zipfile.ZipFile(folder / "ranks" / "a.pt", "w") as archive:
        archive.writestr("data/0", "tensor")
    write_manifest(folder, make_manifest(10, list_files(folder)))
    (folder / "ranks" / "a.pt").write_bytes(damage((folder / "ranks" / "a.pt").read_bytes()))
    [checkpoint] = list_checkpoints(tmp_path).complete
    assert find_damage(checkpoint) == text


def test_torn_checkpoints_are_removed_and_whole_ones_stay(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 10, complete=False)
    assert [torn.path.name for torn in remove_torn(tmp_path)] == ["step-00000010"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_mark_that_another_machine_just_made_is_seen(tmp_path, monkeypatch):
    """On NFS the mark is missing for a while to whoever has missed it, until its folder is opened."""
    folder, opened, exists, read = save(tmp_path, 10), set(), os.path.exists, Path.read_text
    open_folder = os.open

    def note(path, *more, **options):
        opened.add(str(path))
        return open_folder(path, *more, **options)

    def check(original):
        def see(path, *more):
            if str(path).endswith(MARK) and str(folder) not in opened:
                raise FileNotFoundError(path)
            return original(path, *more)

        return see

    monkeypatch.setattr(os, "open", note)
    monkeypatch.setattr(os.path, "exists", check(exists))
    monkeypatch.setattr(Path, "read_text", check(read))
    assert remove_torn(tmp_path) == []
    assert list_checkpoints(tmp_path).latest.step == 10


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_checkpoint_that_cannot_be_read_now_is_not_removed(tmp_path, monkeypatch, number):
    folder, read = save(tmp_path, 10), checkpoints.read_checkpoint
    save(tmp_path, 5)

    def fail(path):
        if path == folder:
            raise OSError(number, os.strerror(number))
        return read(path)

    monkeypatch.setattr(checkpoints, "read_checkpoint", fail)
    assert list_checkpoints(tmp_path).latest.step == 5
    assert remove_torn(tmp_path) == []
    monkeypatch.undo()
    assert list_checkpoints(tmp_path).latest.step == 10


def test_old_checkpoints_go_but_torn_ones_do_not_count(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    save(tmp_path, 20, complete=False)
    remove_old(tmp_path, keep=2)
    listed = list_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in listed.complete] == [10, 15]
    assert len(listed.torn) == 1


def test_a_half_removed_checkpoint_counts_as_torn(tmp_path, monkeypatch):
    save(tmp_path, 5)
    save(tmp_path, 10)

    def fail(folder):
        raise OSError("busy")

    monkeypatch.setattr("shutil.rmtree", fail)
    remove_old(tmp_path, keep=1)
    listed = list_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in listed.complete] == [10]
    assert len(listed.torn) == 1


def test_a_checkpoint_may_go_while_the_driver_lists_it(tmp_path, monkeypatch):
    old, last = save(tmp_path, 5), save(tmp_path, 10)
    read = checkpoints.read_checkpoint

    def read_and_remove(folder):
        checkpoint = read(folder)
        (old / MARK).unlink(missing_ok=True)  # as the ranks do once the next one is saved
        return checkpoint

    monkeypatch.setattr(checkpoints, "read_checkpoint", read_and_remove)
    assert list_checkpoints(tmp_path).latest.path == last


def test_a_layout_is_read_from_a_config():
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "sub_group_size": 5000, "offload_optimizer": {"device": "cpu"}},
    }
    expected = Layout(stage=3, world_size=4, offload_optimizer="cpu", precision="bf16", sub_group_size=5000)
    assert Layout.from_config(config, 4) == expected


@pytest.mark.parametrize(
    ("saved", "loaded", "optimizer", "direct"),
    [
        (ZERO2, ZERO2, "AdamW", True),
        (ZERO2, replace(ZERO2, stage=1), "AdamW", True),
        (ZERO2, ZERO2, "DeepSpeedCPUAdam", False),
        (ZERO2, replace(ZERO2, world_size=1), "AdamW", False),
        (ZERO2, replace(ZERO2, stage=3), "AdamW", False),
        (ZERO2, replace(ZERO2, round_robin=True), "AdamW", False),
        (ZERO2, replace(ZERO2, divided=True), "AdamW", True),
        (Layout(stage=0, world_size=2), Layout(stage=0, world_size=8), "AdamW", True),
        (Layout(stage=3, world_size=2, sub_group_size=10), Layout(stage=3, world_size=2), "AdamW", False),
    ],
)
def test_deepspeed_loads_what_is_laid_out_alike(saved, loaded, optimizer, direct):
    assert can_load_directly(make_manifest(layout=saved), loaded, optimizer) is direct


@pytest.mark.parametrize(
    ("saved", "loaded", "obstacle"),
    [
        (ZERO2, Layout(stage=3, world_size=1, offload_param="cpu"), None),
        (replace(ZERO2, divided=True), ZERO2, None),
        (replace(ZERO2, divided=True), Layout(stage=1, world_size=2), "divided"),
        (ZERO2, Layout(stage=1, world_size=2, divided=True), "divided"),
        (Layout(stage=3, world_size=2, offload_optimizer="nvme"), Layout(stage=3, world_size=1), "NVMe"),
    ],
)
def test_an_obstacle_is_known_before_a_rung_is_chosen(tmp_path, saved, loaded, obstacle):
    found = find_obstacle(SavedCheckpoint(tmp_path, make_manifest(layout=saved)), loaded)
    assert found is None if obstacle is None else obstacle in found
