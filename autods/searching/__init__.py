"""The search of a fit: each step of `autods.search` with this fit's settings, facts, memory and budget."""

from .found import Found, Nothing
from .means import Runner
from .search import Search

__all__ = ["Found", "Nothing", "Runner", "Search"]
