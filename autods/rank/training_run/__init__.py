"""A real training run inside a rank: its checkpoints, its samples and its loop.

`checkpoints` is read by the driver, too, and loads no torch. `session` is the hook of a user's script.
"""
