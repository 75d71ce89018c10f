"""``python -m polyhvd`` is the ``polyhvd`` command."""

import sys

from polyhvd.cli import main

sys.exit(main())
