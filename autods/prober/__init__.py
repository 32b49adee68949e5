"""`autods probe`: experiments and capacity as tables, from real trials."""
