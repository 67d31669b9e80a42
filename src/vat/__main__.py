"""`python -m vat` is the command `vat`."""

from vat.cli import main

if __name__ == "__main__":
    main()
