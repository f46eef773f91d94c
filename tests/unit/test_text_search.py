"""The search for texts in files: any of them, at any place, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_lite.io.files import search
from msa_lite.io.files.search import SHORTEST, TextSearch

TEXTS = st.text(st.sampled_from('ab é\n"東'), min_size=12, max_size=20).map(str.strip)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(TEXTS, max_size=4), content=st.text(st.sampled_from('ab é\n"東'), max_size=90), data=st.data())
def test_a_file_is_found_if_a_text_stands_in_it(
    texts: list[str], content: str, data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_BLOCK", data.draw(st.integers(1, 50)))
    if texts and data.draw(st.booleans()):
        content += data.draw(
            st.sampled_from([texts[0], json.dumps(texts[0]), json.dumps(texts[0], ensure_ascii=False)])
        )
    (tmp_path / "a").write_text(content + data.draw(st.sampled_from(["", "x"])))
    raw = (tmp_path / "a").read_bytes()
    forms = [f for t in texts for f in (t, json.dumps(t)[1:-1], json.dumps(t, ensure_ascii=False)[1:-1])]
    expected = any(form.encode() in raw for form in forms if len(form.encode()) >= SHORTEST)
    assert TextSearch(texts).is_in(tmp_path / "a") is expected


def test_short_texts_are_not_looked_for(tmp_path: Path) -> None:
    assert not TextSearch(["yes", " " * 20, "elevenbytes"])
    assert TextSearch(["twelve bytes"])
