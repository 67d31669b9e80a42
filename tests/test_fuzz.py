"""A short run of the fuzzer; `cd tests && python -m fuzz --cases 5000` is a long one."""

import pytest

from fuzz.harness import run
from fuzz.readers import Reader, readers
from vat.errors import VatError

CASES = 40


@pytest.fixture(scope="module")
def every_reader(tmp_path_factory):
    return readers(tmp_path_factory.mktemp("seeds"))


@pytest.mark.parametrize("index", range(17))
def test_damaged_files_get_one_sentence(every_reader, index, tmp_path):
    failures = run([every_reader[index]], CASES, tmp_path)
    assert not failures, failures[0]


def test_every_reader_is_covered(every_reader):
    assert len(every_reader) == 17


def test_the_harness_notices_what_it_is_for(tmp_path):
    def crash(path):
        raise KeyError("x")

    def ramble(path):
        raise VatError("Traceback (most recent call last):\n ...")

    def sentence(path):
        raise VatError("The file is not what it should be.")

    outcomes = [len(run([Reader(f.__name__, ".x", [b"abc"], f)], 3, tmp_path)) for f in (crash, ramble, sentence)]
    assert outcomes == [3, 3, 0]
