"""The page of `vat serve`: `build_page(service)` makes it, `mount_page(app, service)` hangs it into an application.

`session`, `photos`, `views`, `samples` and `archive` know nothing of Gradio, which is imported only for the page.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vat.web.page import build_page, mount_page

__all__ = ["build_page", "mount_page"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vat.web import page

    return getattr(page, name)
