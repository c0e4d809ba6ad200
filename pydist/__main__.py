"""Makes `python -m pydist` the command `pydist`."""

import sys

from pydist._cli import main

sys.exit(main())
