"""``python -m polyhvd.launch`` is ``polyhvdrun``."""

import sys

from polyhvd.launch.cli.main import main

sys.exit(main())
