"""Write notebooks in their one canonical form: no outputs, no counts, stable ids, sorted keys.

Run as `python book/strip.py notebooks/*.ipynb`.
"""

import json
import sys
from pathlib import Path
from typing import Any

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def canonical(notebook: dict[str, Any]) -> str:
    """The text of ``notebook`` as it is committed. Cells keep a valid id; others get one from their position."""
    cells = []
    for index, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"]).rstrip()
        kept = {key: cell["metadata"][key] for key in ("mystnb", "tags") if cell["metadata"].get(key)}
        new = {"cell_type": cell["cell_type"], "id": cell.get("id", f"cell-{index}"), "metadata": kept}
        new["source"] = source.splitlines(keepends=True)
        if cell["cell_type"] == "code":
            new |= {"execution_count": None, "outputs": []}
        cells.append(new)
    whole = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(canonical(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
