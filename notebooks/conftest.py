"""Lets a plain `pytest` run the notebooks too, where nbmake is installed; without it they are left alone."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the bundled model is too small to gain from threads
    if hasattr(config.option, "nbmake"):
        config.option.nbmake = True
        config.option.nbmake_kernel = "python3"
        config.option.nbmake_timeout = min(config.option.nbmake_timeout, 120)  # seconds for a cell
