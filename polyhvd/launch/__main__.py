"""``python -m polyhvd.launch`` is ``polyhvdrun``."""

import sys

from polyhvd.launch.cli import main

sys.exit(main())
