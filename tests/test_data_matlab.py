"""Our reader of MATLAB files agrees with SciPy's on numeric arrays."""

import struct

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from vat.data.matlab import read_mat
from vat.errors import VatError


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["f8", "f4", "u1", "i2", "u4", "i8"])
@pytest.mark.parametrize("shape", [(10, 2), (1, 4), (3, 1), (0, 2), (2, 3, 4)])
def test_arrays_come_back_as_they_were_written(tmp_path, packed, dtype, shape):
    values = (np.random.default_rng(0).random(shape) * 100).astype(dtype)
    others = {"text": "a word", "cell": np.array([[1, "x"]], dtype=object), "z": 1 + 2j}
    savemat(tmp_path / "a.mat", {**others, "kps": values}, do_compression=packed)
    found = read_mat(tmp_path / "a.mat", "kps")
    assert np.array_equal(found, values)
    assert np.array_equal(found, loadmat(tmp_path / "a.mat")["kps"])


def test_what_is_not_there_or_not_numbers_gets_a_sentence(tmp_path):
    savemat(tmp_path / "a.mat", {"text": "a word"})
    for key in ("kps", "text"):
        with pytest.raises(VatError, match="no numeric array"):
            read_mat(tmp_path / "a.mat", key)
    with pytest.raises(VatError, match="There is no annotation"):
        read_mat(tmp_path / "b.mat", "kps")
    (tmp_path / "c.mat").write_bytes(b"x" * 200)
    with pytest.raises(VatError, match="damaged or no MATLAB file"):
        read_mat(tmp_path / "c.mat", "kps")


def test_an_array_without_its_parts_is_damaged(tmp_path):
    header = b" " * 124 + bytes([0, 1]) + b"IM"
    (tmp_path / "a.mat").write_bytes(header + struct.pack("<II", 14, 8) + struct.pack("<II", 6, 0))
    with pytest.raises(VatError, match="damaged"):
        read_mat(tmp_path / "a.mat", "kps")
