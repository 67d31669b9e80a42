"""What users see of an error: a sentence that names the thing at fault and the remedy."""


class VatError(Exception):
    """Wrong use or unreadable input. The command line prints its message and exits with code 2."""


class DoesNotFit(VatError):  # noqa: N818  it reads as what happened
    """A configuration or a batch that the memory cannot hold; `needed` is the estimate in bytes, where there is one."""

    def __init__(self, sentence: str, needed: int | None = None) -> None:
        super().__init__(sentence)
        self.needed = needed
