"""`python -m control_plane.cli` is `dihedral`: how `dihedral serve` starts its worker without knowing PATH."""

import sys

from control_plane.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
