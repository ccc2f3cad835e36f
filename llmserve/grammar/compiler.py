"""GrammarCompiler: from specifications to grammars over one model's vocabulary."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits

from llmserve.core.grammar import Grammar
from llmserve.grammar.compile_threads import BusyError, CompileThreads, Job, OverrunError
from llmserve.grammar.marker import Marker
from llmserve.grammar.optional import Opening, OptionalGrammar
from llmserve.grammar.probe import probe
from llmserve.grammar.spec import GrammarBusyError, GrammarError, GrammarSpec
from llmserve.grammar.state import CompiledGrammar, DelayedGrammar
from llmserve.grammar.to_lark import guidance_grammar
from llmserve.grammar.vocabulary import Vocabulary, VocabularySource

MAX_SOURCE_CHARS = 1 << 20
_NUM_THREADS = 2
_MAX_OVERRUNS = 2
_CACHE_SIZE = 128
_MAX_MARKERS = 16


class GrammarCompiler:
    """Compiles in threads of its own and keeps what was used last. All methods are thread-safe.

    The vocabulary is prepared once, with the first grammar or by `warm_up`.
    """

    def __init__(
        self,
        source: VocabularySource,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        timeout_s: float = 10.0,
    ) -> None:
        """`vocab_size` is the model's, which may have more ids than the tokenizer.

        timeout_s: longest time for one grammar, and longest wait for its turn.
        """
        self._source = source
        self._num_bytes = (vocab_size + 31) // 32 * 4
        self._eos_token_ids = tuple(i for i in eos_token_ids if i < source.vocab_size)
        self._timeout_s = timeout_s
        # Enough for schemas of a thousand optional properties; a mask takes 20 ms at most.
        self._limits = LLParserLimits(
            max_items_in_row=5_000,
            step_max_items=200_000,
            max_lexer_states=100_000,
            verbose_errors=False,
        )
        self._threads = CompileThreads(_NUM_THREADS, _MAX_OVERRUNS, timeout_s)
        self._lock = threading.Lock()
        # A grammar, or why there is none: an exception would keep all that led to it.
        self._cache: collections.OrderedDict[GrammarSpec, Job[Grammar | str]] = (
            collections.OrderedDict()
        )
        self._markers: dict[str, Marker] = {}
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()

    def cached(self, spec: GrammarSpec) -> Grammar | None:
        """The grammar, if it is there without waiting. Raises GrammarError if it is known bad."""
        with self._lock:
            job = self._cache.get(spec)
            if job is None or not job.future.done():
                return None
            self._cache.move_to_end(spec)
        return _unwrap(job.future.result())

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Blocks. Raises GrammarError for a grammar that cannot be used or takes too long, and
        GrammarBusyError where others keep all threads."""
        if len(spec.source) > MAX_SOURCE_CHARS:
            raise GrammarError(
                f"the grammar has {len(spec.source)} characters; at most {MAX_SOURCE_CHARS} are "
                "allowed"
            )
        try:
            return _unwrap(self._threads.wait(self._job(spec)))
        except BusyError:
            raise GrammarBusyError(
                "the server is busy with other grammars that take long; try again later"
            ) from None
        except OverrunError:
            raise GrammarError(
                f"compiling the grammar takes more than {self._timeout_s:g} s; simplify it"
            ) from None

    def warm_up(self) -> None:
        """Prepares the vocabulary. Blocks, and holds the GIL for most of the time."""
        with self._vocabulary_lock:
            if self._vocabulary is None and self._eos_token_ids:
                self._vocabulary = Vocabulary(self._source, self._eos_token_ids)

    def close(self) -> None:
        """Ends the threads as soon as they are done with what they compile."""
        self._threads.close()

    def _job(self, spec: GrammarSpec) -> Job[Grammar | str]:
        with self._lock:
            job = self._cache.get(spec)
            if job is None:
                job = self._cache[spec] = self._threads.submit(lambda: self._try_build(spec))
                if len(self._cache) > _CACHE_SIZE:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(spec)
            return job

    def _try_build(self, spec: GrammarSpec) -> Grammar | str:
        try:
            return self._build(spec)
        except GrammarError as error:
            return str(error)
        except RecursionError:
            return "the grammar is nested too deeply"

    def _build(self, spec: GrammarSpec) -> Grammar:
        if not self._eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token, so no output could end")
        self.warm_up()
        assert self._vocabulary is not None
        vocabulary = self._vocabulary
        text = guidance_grammar(spec, vocabulary)
        matcher = LLMatcher(vocabulary.guide, text, log_level=0, limits=self._limits)
        probe(matcher, vocabulary)
        body = CompiledGrammar(matcher, vocabulary.guide.vocab_size, self._num_bytes)
        if not spec.starts_after:
            return body
        delayed = DelayedGrammar(self._marker(spec.starts_after, vocabulary), body)
        if not spec.may_start_with:
            return delayed
        opening = Opening(spec.may_start_with, vocabulary, self._num_bytes)
        return OptionalGrammar(opening, delayed, body)

    def _marker(self, text: str, vocabulary: Vocabulary) -> Marker:
        with self._lock:
            marker = self._markers.get(text)
        if marker is None:
            marker = Marker(text, vocabulary, self._num_bytes)
            with self._lock:
                if len(self._markers) >= _MAX_MARKERS:
                    self._markers.clear()
                self._markers[text] = marker
        return marker


def _unwrap(result: Grammar | str) -> Grammar:
    if isinstance(result, str):
        raise GrammarError(result)
    return result
