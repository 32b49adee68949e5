"""The command line, one file a command. `options` makes the options of a command, `ending` shows how it ends."""
