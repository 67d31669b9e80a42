"""One case in a process of its own, so that its peak memory is its own: `python -m vat.bench.worker < case.json`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import torch

from vat.bench.cases import Case, Result, run_case
from vat.config import from_dict
from vat.errors import VatError
from vat.plugins import run_plugins


def run_apart(case: Case, threads: int) -> Result:
    """Measure a CPU case in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "vat.bench.worker", str(threads)],
        input=json.dumps(asdict(case)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 2:
        raise VatError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        return Result(case, error="out of memory" if done.returncode in (-9, 137) else done.stderr.strip()[-200:])
    values = json.loads(done.stdout.splitlines()[-1])
    return Result(case, **{k: v for k, v in values.items() if k != "case"})


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    content = json.load(sys.stdin)
    overrides = content.pop("overrides")
    try:
        run_plugins()
        case = from_dict(Case, content | {"overrides": {}})
        object.__setattr__(case, "overrides", overrides)
        print(json.dumps(asdict(run_case(case))))
    except VatError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
