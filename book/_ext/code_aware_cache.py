"""Keys the notebooks' execution cache on the package: a change in `minisgl/` runs every notebook again.

The cache that comes with MyST-NB looks at a notebook's cells only, so old outputs would be published silently. The
package is the one of this checkout, whatever else is installed.
"""

import os
import shutil
import sys
from pathlib import Path

from sphinx.errors import ExtensionError


def on_config(app, config):
    root = Path(app.srcdir).resolve()
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    # Progress bars look for a widget library that the book does without, and say so in the first cell.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")
    from minisgl import book

    if Path(book.__file__).resolve() != root / "minisgl" / "book.py":
        raise ExtensionError(f"the book of {root} would show the package of {book.__file__}")
    config.minisgl_digest = book.source_digest(root)
    caches = root / "_build" / ".jupyter_cache"
    config.nb_execution_cache_path = str(caches / config.minisgl_digest)
    for old in caches.glob("*"):
        if old.name != config.minisgl_digest:
            shutil.rmtree(old, ignore_errors=True)


def setup(app):
    app.add_config_value("minisgl_digest", "", "env")
    app.connect("config-inited", on_config, priority=100)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
