"""`python -m kvcs` is the `kvcs` command."""

import sys

from kvcs.cli import main

sys.exit(main())
