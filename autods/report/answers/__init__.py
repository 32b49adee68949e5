"""What the commands answer: of each result a document, made once for all renderers."""
