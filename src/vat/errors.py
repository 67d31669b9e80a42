"""The one exception that users see: a sentence that names the thing at fault and the remedy."""


class VatError(Exception):
    """Wrong use or unreadable input. The command line prints its message and exits with code 2."""
