"""The vocabulary that both planes share, and the interfaces of every hook. Standard library only."""
