"""How a result shows itself in Python: by its headline in a shell, by its page in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import import_module

from .. import document as doc

# Answers read results, so they are found by name when a result is first shown.
_ANSWERS: Mapping[str, tuple[str, str]] = {
    "FitReport": ("fit", "make_fit_document"),
    "RunReport": ("run", "make_run_document"),
    "PlanReport": ("plan", "make_plan_document"),
    "ProbeReport": ("probe", "make_probe_document"),
    "Checkup": ("problems", "make_doctor_document"),
    "Explanation": ("problems", "make_explain_document"),
}


class Shown:
    """A result that has an answer."""

    __slots__ = ()

    def __repr__(self) -> str:
        """'<FitReport: zero1, micro batch 8: 41 samples/s>'. A value that lacks what its answer needs has its name."""
        name = type(self).__name__
        try:
            document = self._make_document()
        except Exception:  # of any kind: a debugger shows values in the making
            return f"<{name}>"
        headlines = [part.words for part in document.parts if isinstance(part, doc.Headline)]
        answer = "".join(map(str, doc.list_pieces(headlines[0]))) if headlines else document.title
        return f"<{name}: {answer}>"

    def _repr_html_(self) -> str:
        """The page in a frame, so that its style stays in it. Notebooks call this."""
        from ..render_html import to_page

        page = escape(to_page(self._make_document()), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def _make_document(self) -> doc.Document:
        module, maker = _ANSWERS[type(self).__name__]
        document: doc.Document = getattr(import_module(f"...answers.{module}", __name__), maker)(self)
        return document
