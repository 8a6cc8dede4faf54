"""`python -m fathoms`, for launchers such as torchrun."""

import sys

from fathoms.cli.main import main

sys.exit(main())
