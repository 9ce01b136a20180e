"""Numbers on their way from a cell to the prose of the book."""

from __future__ import annotations


def glue(name: str, value: object) -> None:
    """Let the book's prose show ``value`` by its ``name``, with the role ``glue:text``. Silent without MyST-NB."""
    try:
        from myst_nb import glue as to_book
    except ImportError:
        return
    to_book(name, value, display=False)
