"""The paper of the method, as cards and reports cite it."""

from __future__ import annotations

PAPER_TITLE = "Revisiting the Past: Data Unlearning with Model State History"
AUTHORS = ("Keivan Rezaei", "Mehrdad Saberi", "Abhilasha Ravichander", "Soheil Feizi")
ARXIV = "2506.20941"
PAPER_URL = f"https://arxiv.org/abs/{ARXIV}"
PAPER = f"{', '.join(AUTHORS)}: {PAPER_TITLE}. arXiv {ARXIV}"
