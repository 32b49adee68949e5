"""From evidence to a verdict. The only room that reads messages."""

from .blame import input_error
from .evidence import Evidence, from_end
from .verdict import outcome_of

__all__ = ["Evidence", "from_end", "input_error", "outcome_of"]
