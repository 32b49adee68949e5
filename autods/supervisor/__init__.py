"""`autods run`: train for real, and keep the run alive when memory runs out or ranks are lost."""
