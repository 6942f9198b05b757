"""The command line. Parses, loads the configuration, sets up logs and metrics, then calls the command."""

from control_plane.cli.commands import main

__all__ = ["main"]
