"""Measurements of another machine, for a page that cannot make them itself: files of `book/results/` and their source.

Chapter 4 shows them beside what the reader's own machine measures. What was not recorded is said in one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minisgl.figures.drawing import Drawing
from minisgl.figures.marks import WIDTH, text

Report = Mapping[str, Any]


def recorded(name: str, folder: str | Path | None = None) -> Report | None:
    """What ``book/results/NAME.json`` holds, or None if there is no such file. Prints its source, or that it misses.

    Args:
        name: of the file, without its ending.
        folder: where it lies; by default `book/results` of the checkout around the working directory.
    """
    places = (
        [Path(folder)] if folder is not None else [d / "book" / "results" for d in (Path.cwd(), *Path.cwd().parents)]
    )
    path = next((place / f"{name}.json" for place in places if (place / f"{name}.json").is_file()), None)
    if path is None:
        print(f"{name}: not recorded yet")
        return None
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    print(source_line(report))
    return report


def source_line(report: Report) -> str:
    """Device, date and command of a measurement."""
    return ", ".join(str(report[key]) for key in ("device", "date", "command") if report.get(key))


def missing(what: str) -> Drawing:
    """A picture of what was not recorded yet."""
    words = f"{what}: not recorded yet"
    return Drawing(text(0, 18, words), WIDTH, 26, words)


def rows_of(report: Report | None, key: str = "rows", **wanted: Any) -> list[Mapping[str, Any]]:
    """The entries of a report's table whose columns have the wanted values; none of a report that is missing.

    Args:
        key: name of the table.
        wanted: column -> value.
    """
    rows: Sequence[Mapping[str, Any]] = (report or {}).get(key, ())
    return [row for row in rows if all(row.get(column) == value for column, value in wanted.items())]
