"""The command line. `main` parses, `commands` has the commands, `ending` shows how one ends."""
