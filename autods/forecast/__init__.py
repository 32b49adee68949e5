"""Forecasts of each rung's memory on every tier, before anything runs on a GPU."""
