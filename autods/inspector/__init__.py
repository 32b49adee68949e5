"""`autods doctor`: does this machine have what DeepSpeed and autods need, and what mends what is missing."""
