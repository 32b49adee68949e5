"""A real training run inside a rank: its order, its checkpoints, its samples and its loop.

`order` and `checkpoints` are read by the driver, too, and load no torch. `session` is the hook of a user's script.
"""
