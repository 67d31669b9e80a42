"""`python -m fuzz --cases 5000 [--reader image] [--first 100000]`, from the folder tests."""

import argparse
import sys
import tempfile
from pathlib import Path

from fuzz.harness import run
from fuzz.readers import readers


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutated files for every reader.")
    parser.add_argument("--cases", type=int, default=1000, help="files for each reader")
    parser.add_argument("--reader", help="one reader alone")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    chosen = [r for r in readers(folder / "seeds") if options.reader in (None, r.name)]
    failures = run(chosen, options.cases, folder, options.first)
    for failure in failures[:20]:
        print(f"\n== {failure.reader}, case {failure.seed}, {failure.file}\n{failure.what}")
    print(f"{len(chosen)} readers, {options.cases * len(chosen)} cases, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
