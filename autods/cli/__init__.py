"""The commands, one file each: ask a use case, show how it ended. What they share is in `calls`."""
