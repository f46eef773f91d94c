"""Try the models of a run in a page of the browser, served to this machine alone.

`facts` is what the page shows, `desk` answers questions in one thread, `server` is HTTP; `page/` is what the browser
loads: no framework, nothing from elsewhere.
"""

from msa_lite.web.server import WebPage, open_page
