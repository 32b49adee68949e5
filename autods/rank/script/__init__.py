"""An unmodified training script as a trial: a rank runs it as `__main__` and watches its engine.

`run` starts the script and `session` measures it. `engine_hooks` stands between the script and DeepSpeed, with a module
in `adapters` for each library that calls the engine. `sandbox` keeps the script's writes out of the user's folders.
"""
