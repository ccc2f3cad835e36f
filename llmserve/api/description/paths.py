"""Where the description is found."""

from __future__ import annotations

DOCUMENT = "/openapi.json"
PAGE = "/docs"
PAGE_FILES = ("swagger-ui.css", "swagger-ui-bundle.js")

# The description alone; what its page calls needs an API key all the same.
OPEN_PATHS = frozenset({DOCUMENT, PAGE, *(f"{PAGE}/{name}" for name in PAGE_FILES)})
