"""How much memory each rung will need on every tier, said before anything runs on a GPU."""
