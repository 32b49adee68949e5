"""A training script that nobody changed, as a trial: run as `__main__` in the rank, its engine watched.

`run` is the way in; `session` holds what the trial wants and what it saw; `hooks` stands between the script and
DeepSpeed, with a module for each kind of script; `guard` keeps what the script would write out of the user's folders.
"""
