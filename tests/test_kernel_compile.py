"""Every kernel compiles for a GPU, which the interpreter does not show and CI has no GPU to show."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_kernels_of_a_training_step_compile(tmp_path):
    tests = Path(__file__).parent
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(tests / "compile_kernels.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    files = {f.stem for f in (tests.parent / "src" / "vat" / "kernels").glob("*_triton.py")}
    compiled = {line.split(".")[2] for line in done.stdout.splitlines() if line.startswith("vat.kernels.")}
    assert compiled == files
