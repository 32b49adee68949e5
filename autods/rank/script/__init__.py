"""An unmodified training script in a rank, which runs it as `__main__`, for a trial, a forecast or a real run.

`inject` has what every script gets, `policy` what differs between a trial and a run, `trial_policy` that of a trial.
`adapters` has a module for each library that calls the engine. `sandbox` keeps a trial's writes in.
"""
