"""`python -m bpipe` is the `bpipe` command."""

import sys

from bpipe.cli import main

sys.exit(main())
