"""A section of calls, each between a marker and another; each call stands for itself."""

from __future__ import annotations

import abc

from llmserve.tool_parsers.scanning import ScanningParser
from llmserve.tool_parsers.source import Steps


class SectionParser(ScanningParser):
    """`markers` are the one that begins a section and `call_begin`: a call may lack its section.
    The end of the section is dropped where it follows a call, and may be missing."""

    section_end: str
    call_begin: str
    needs_special_tokens = True

    @abc.abstractmethod
    def read_call(self) -> Steps[None]:
        """Reads a call behind its first marker."""

    def read_calls(self, marker: str) -> Steps[None]:
        source = self.source
        if marker != self.call_begin:
            yield from source.skip_space()
            yield from source.expect(self.call_begin)
        yield from self.read_call()
        self.commit()
        while True:
            end = source.pos
            yield from source.skip_space()
            found = yield from source.accept(self.call_begin, self.section_end)
            if found == self.call_begin:
                yield from self.read_call()
                self.commit()
                continue
            is_cut = source.is_ended and self.section_end.startswith(source.text[source.pos :])
            if not found:
                source.pos = len(source.text) if is_cut else end
            if found or is_cut:
                self.commit()
            return
