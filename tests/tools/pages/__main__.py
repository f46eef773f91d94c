"""Write all pages that are made from the code."""

from tests.tools.pages import PAGES

for path, page in PAGES.items():
    path.write_text(page())
