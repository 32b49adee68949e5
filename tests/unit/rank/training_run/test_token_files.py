from __future__ import annotations

import numpy
import pytest

from autods.rank.training_run.token_files import TokenDataset
from autods.workload.protocol import WorkloadError


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_a_bin_file_is_read_by_the_width_of_its_tokens(tmp_path, dtype):
    tokens = numpy.arange(1000, 1103).astype(dtype)
    tokens.tofile(tmp_path / "tokens.bin")
    dataset = TokenDataset(str(tmp_path / "tokens.bin"), 10, 2000)
    assert len(dataset) == 10
    assert dataset[3]["input_ids"].tolist() == list(range(1030, 1040))
    assert dataset[3]["labels"].tolist() == list(range(1030, 1040))


def test_rows_of_an_array_are_joined(tmp_path):
    numpy.save(tmp_path / "tokens.npy", numpy.arange(24).reshape(4, 6))
    assert TokenDataset(str(tmp_path / "tokens.npy"), 8, 24)[1]["input_ids"].tolist() == list(range(8, 16))


def write_text(folder):
    (folder / "a.txt").write_text("once upon a time")
    return "a.txt"


def write_floats(folder):
    numpy.save(folder / "a.npy", numpy.ones(50))
    return "a.npy"


def write_few(folder):
    numpy.save(folder / "a.npy", numpy.arange(5))
    return "a.npy"


def write_foreign(folder):
    numpy.save(folder / "a.npy", numpy.arange(90, 140))
    return "a.npy"


def write_odd(folder):
    (folder / "a.bin").write_bytes(b"123")
    return "a.bin"


def write_broken(folder):
    (folder / "a.npy").write_bytes(b"no array")
    return "a.npy"


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (write_text, "is not a file of tokens"),
        (write_floats, "float64"),
        (write_few, "fewer than one sample of 10"),
        (write_foreign, "token 139"),
        (write_odd, "odd number of bytes"),
        (write_broken, "is not a file of tokens"),
        (lambda folder: "missing.npy", "No such file"),
        (lambda folder: "", "it is a folder"),
    ],
)
def test_a_file_that_holds_no_tokens_of_the_model_is_refused(tmp_path, write, problem):
    with pytest.raises(WorkloadError, match=problem):
        TokenDataset(str(tmp_path / write(tmp_path)), 10, 100)
