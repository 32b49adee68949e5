"""The results of the commands as values, one module a command. Nothing here runs, prints or decides."""
