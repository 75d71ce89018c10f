"""``python -m polyhvd.bench`` is ``polyhvd bench``."""

import sys

from polyhvd.bench.command import main

sys.exit(main())
