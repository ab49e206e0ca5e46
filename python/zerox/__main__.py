"""python -m zerox."""

import sys

from zerox.cli import main

sys.exit(main())
