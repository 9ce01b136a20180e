"""``python -m minisgl``: the same as the ``minisgl`` command."""

import sys

from minisgl.cli import main

sys.exit(main())
