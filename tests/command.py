"""Running `vat` in tests: in this process by its entry point, and photos and models to run it on."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vat
from small import small
from vat.cli import main

VAT = Path(sys.executable).parent / "vat"


class Command:
    """`run("segment", ...)` is what the shell would do; output and exit code are kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
        self.monkeypatch, self.capfd = monkeypatch, capfd
        self.out = self.err = ""

    def __call__(self, *arguments: Any, code: int = 0) -> str:
        """What was printed: on stdout, and on stderr where the command should fail."""
        self.monkeypatch.setattr(sys, "argv", ["vat", *map(str, arguments)])
        self.capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        self.out, self.err = self.capfd.readouterr()
        assert (ended.value.code or 0) == code, self.err
        assert "Traceback" not in self.err
        return self.err if code else self.out


@pytest.fixture
def run(monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "200")
    return Command(monkeypatch, capfd)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Files of tiny untrained models, by task."""
    folder = tmp_path_factory.mktemp("models")
    files = {}
    for task in ("segmentation", "correspondence"):
        files[task] = folder / f"{task}.safetensors"
        vat.save(small(task=task, backbone="test_resnet").eval(), files[task])
    return files


def photo(path: Path, seed: int = 0, size: tuple[int, int] = (80, 60)) -> Path:
    """A JPEG or PNG of coloured noise; `size` is width, height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path)
    return path


def mask(path: Path, size: tuple[int, int] = (80, 60)) -> Path:
    """The middle of a photo."""
    path.parent.mkdir(parents=True, exist_ok=True)
    inside = np.zeros((size[1], size[0]), np.uint8)
    inside[size[1] // 4 : -size[1] // 4, size[0] // 4 : -size[0] // 4] = 255
    Image.fromarray(inside).save(path)
    return path
