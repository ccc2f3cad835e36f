"""Frames of server-sent events."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmserve.api.sse import frame

# No lone surrogates: the detokenizer cannot produce them.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_frame_is_one_line_of_json_whatever_the_text(text: str) -> None:
    event: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": text}}]}

    data = frame(event)

    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert not re.search(rb"[\r\n]", data[:-2])
    assert json.loads(data[6:]) == event


@given(st.lists(TEXT, max_size=5))
def test_frames_are_read_back_by_the_rules_of_the_specification(texts: list[str]) -> None:
    """Lines end at CR, LF or CRLF; a blank line ends an event (WHATWG HTML 9.2.6)."""
    wire = b"".join(frame({"text": text}) for text in texts).decode()

    events, data = [], []
    for line in re.split(r"\r\n|\r|\n", wire):
        if line:
            field, _, value = line.partition(":")
            assert field == "data"
            data.append(value.removeprefix(" "))
        elif data:
            events.append("\n".join(data))
            data = []
    assert [json.loads(event)["text"] for event in events] == texts
