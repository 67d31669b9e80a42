"""Mutated files for every reader. `python -m fuzz --cases 5000` from the folder tests; a short run is in the suite."""
