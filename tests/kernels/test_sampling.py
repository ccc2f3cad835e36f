"""Sampling kernels against a plain float64 oracle, on every instruction set and in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.kernels import HAS_EXT, SAMPLING_ROW, STATUS_INVALID, STATUS_OK, reference_sampling
from llmserve.kernels.reference_sampling import STATUS_EMPTY, RowLogprobs

if HAS_EXT:
    from llmserve import _cpu_kernels
    from llmserve.kernels import sampling

VOCAB_SIZES = [1, 7, 64, 65, 1000, 5003]
# Tokens whose place relative to a limit hangs on less than this may fall on either side.
MARGIN = 1e-5


@dataclass(frozen=True)
class Backend:
    sample: Callable[[torch.Tensor, Any], Any]
    logprobs: Callable[[torch.Tensor, Any, Any, int], RowLogprobs]
    philox: Callable[[list[int], list[int]], list[int]]
    instruction_set: str | None = None

    def sample_rows(self, logits: np.ndarray, params: np.ndarray) -> Any:
        self.select()
        return self.sample(torch.from_numpy(logits), params)

    def logprob_rows(self, logits: np.ndarray, token_ids: np.ndarray, top_k: int) -> RowLogprobs:
        self.select()
        row_ids = np.arange(len(logits), dtype=np.int32)
        return self.logprobs(torch.from_numpy(logits), row_ids, token_ids.astype(np.int32), top_k)

    def select(self) -> None:
        if self.instruction_set is not None:
            _cpu_kernels.set_instruction_set(self.instruction_set)


REFERENCE = Backend(
    reference_sampling.sample_rows, reference_sampling.logprob_rows, reference_sampling.philox4x32
)
BACKENDS = {"reference": REFERENCE}
if HAS_EXT:
    BACKENDS |= {
        name: Backend(sampling.sample_rows, sampling.logprob_rows, _cpu_kernels.philox4x32, name)
        for name in _cpu_kernels.available_instruction_sets()
        if "avx512" not in name
    }
COMPILED = [name for name in BACKENDS if name != "reference"]
needs_ext = pytest.mark.skipif(not HAS_EXT, reason="needs the compiled kernels")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    yield BACKENDS[request.param]
    if HAS_EXT:
        _cpu_kernels.set_instruction_set(_cpu_kernels.available_instruction_sets()[-1])


def make_params(num_rows: int, **values: Any) -> np.ndarray:
    params = np.zeros(num_rows, SAMPLING_ROW)
    params["temperature"], params["top_p"] = 1.0, 1.0
    for name, value in values.items():
        params[name] = value
    return params


def make_logits(num_rows: int, vocab_size: int, *, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(0, scale, (num_rows, vocab_size)).astype(np.float32)


def kept_ids(row: np.ndarray, sampled: Any) -> set[int]:
    ids = np.arange(len(row))
    is_tie_kept = (row == sampled["threshold"]) & (ids <= sampled["last_tie_id"])
    return set(ids[(row > sampled["threshold"]) | is_tie_kept].tolist())


def oracle(
    row: np.ndarray, *, temperature: float, min_p: float, top_k: int, top_p: float, slack: float
) -> set[int]:
    """The kept tokens by the rules' own words; slack > 0 keeps those near a limit, < 0 drops."""
    scaled = [float(x) / temperature for x in row]
    best = max(scaled)
    ranking = sorted(range(len(row)), key=lambda i: (-scaled[i], i))
    ranking = [i for i in ranking if math.exp(scaled[i] - best) >= min_p * (1 - slack)]
    if 0 < top_k < len(ranking):
        kth = scaled[ranking[top_k - 1]]
        ranking = [i for i in ranking if scaled[i] >= kth]
    total = math.fsum(math.exp(scaled[i] - best) for i in ranking)
    kept: set[int] = set()
    mass = 0.0
    for i in ranking:
        if kept and top_p < 1 and mass / total >= top_p + slack:
            break
        kept.add(i)
        mass += math.exp(scaled[i] - best)
    return kept


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 1},
        {"top_k": 10},
        {"top_k": 600},
        {"top_p": 0.05},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 0.999999},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 20, "min_p": 0.1},
        {"top_p": 0.7, "min_p": 0.05},
        {"top_k": 5, "top_p": 0.7, "min_p": 0.02},
    ],
    ids=str,
)
def test_kept_tokens_are_those_of_the_rules(
    backend: Backend, vocab_size: int, filters: dict[str, Any]
) -> None:
    temperatures = [0.3, 1.0, 1.7]
    logits = make_logits(3, vocab_size, seed=vocab_size)

    sampled = backend.sample_rows(logits, make_params(3, temperature=temperatures, **filters))

    rules = {"min_p": 0.0, "top_k": 0, "top_p": 1.0} | filters
    for row, result, temperature in zip(logits, sampled, temperatures, strict=True):
        kept = kept_ids(row, result)
        least = oracle(row, temperature=temperature, slack=-1e-7, **rules)
        most = oracle(row, temperature=temperature, slack=1e-7, **rules)
        assert least <= kept <= most
        assert result["status"] == STATUS_OK
        assert result["token_id"] in kept


@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.9, 0.99])
def test_top_p_finds_the_nucleus_of_a_long_tailed_row(backend: Backend, top_p: float) -> None:
    ranked = -1.5 * np.log(np.arange(1, 20_001))
    row = np.random.default_rng(2).permutation(ranked).astype(np.float32)

    sampled = backend.sample_rows(row[None], make_params(1, top_p=top_p))[0]

    kept = kept_ids(row, sampled)
    rules = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": top_p}
    assert oracle(row, slack=-1e-7, **rules) <= kept <= oracle(row, slack=1e-7, **rules)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=80, deadline=None)
@given(
    row=st.lists(st.integers(-40, 40), min_size=1, max_size=150),
    divisor=st.sampled_from([1.0, 3.0, 16.0]),
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
    top_k=st.integers(0, 20),
    top_p=st.sampled_from([0.013, 0.31, 0.77, 0.951, 1.0]),
    min_p=st.sampled_from([0.0, 0.003, 0.17, 0.7]),
    seed=st.integers(0, 2**64 - 1),
)
def test_kept_tokens_are_those_of_the_rules_with_many_ties(
    name: str,
    row: list[int],
    divisor: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    logits = (np.array([row], np.float64) / divisor).astype(np.float32)
    rules = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}

    sampled = BACKENDS[name].sample_rows(logits, make_params(1, seed=seed, **rules))[0]

    kept = kept_ids(logits[0], sampled)
    assert oracle(logits[0], slack=-MARGIN, **rules) <= kept
    assert kept <= oracle(logits[0], slack=MARGIN, **rules)
    assert sampled["token_id"] in kept


def test_top_p_keeps_equal_logits_with_lower_ids(backend: Backend) -> None:
    logits = np.zeros((1, 200), np.float32)

    sampled = backend.sample_rows(logits, make_params(1, top_p=0.495))[0]

    assert kept_ids(logits[0], sampled) == set(range(99))


def test_top_k_keeps_all_that_equal_the_kth(backend: Backend) -> None:
    logits = np.array([[3, 2, 1, 2, 2, 0]], np.float32)

    sampled = backend.sample_rows(logits, make_params(1, top_k=2))[0]

    assert kept_ids(logits[0], sampled) == {0, 1, 3, 4}


def test_greedy_takes_the_lowest_id_of_the_best(backend: Backend) -> None:
    for vocab_size in (5, 64, 1000):
        logits = make_logits(2, vocab_size)
        best = logits.max() + 1
        logits[0, [2, 3, vocab_size - 1]] = best
        logits[1, vocab_size - 1] = best

        sampled = backend.sample_rows(logits, make_params(2, temperature=0, top_k=3, top_p=0.1))

        assert sampled["token_id"].tolist() == [2, vocab_size - 1]


def test_masked_tokens_are_never_drawn(backend: Backend) -> None:
    logits = np.full((64, 300), -np.inf, np.float32)
    logits[:, [7, 290]] = 0.0

    sampled = backend.sample_rows(logits, make_params(64, counter=np.arange(64)))

    assert set(sampled["token_id"].tolist()) == {7, 290}


@pytest.mark.parametrize("vocab_size", [3, 64, 100])
def test_bad_rows_are_reported_and_leave_the_others_alone(
    backend: Backend, vocab_size: int
) -> None:
    logits = make_logits(8, vocab_size)
    clean = backend.sample_rows(logits, make_params(8, seed=5))
    logits[1, 2], logits[2, vocab_size - 1], logits[3] = np.nan, np.inf, -np.inf
    logits[5, 0] = np.nan

    sampled = backend.sample_rows(logits, make_params(8, seed=5))

    bad = {1: STATUS_INVALID, 2: STATUS_INVALID, 3: STATUS_EMPTY, 5: STATUS_INVALID}
    assert sampled["status"].tolist() == [bad.get(i, STATUS_OK) for i in range(8)]
    for i in set(range(8)) - set(bad):
        assert sampled[i] == clean[i]


@pytest.mark.parametrize("num_dropped", [0, 50])
def test_draws_follow_the_probabilities(backend: Backend, num_dropped: int) -> None:
    num_draws, num_kept = 20_000, 10
    row = np.full(400, -20.0, np.float32)
    ids = np.arange(num_kept) * 37 + 3
    row[1 : 1 + num_dropped * 3 : 3] = -2.5
    row[ids] = np.linspace(-2, 1, num_kept)
    logits = np.ascontiguousarray(np.broadcast_to(row, (num_draws, len(row))))
    top_k = num_kept if num_dropped else 0

    sampled = backend.sample_rows(
        logits, make_params(num_draws, top_k=top_k, seed=11, counter=np.arange(num_draws))
    )

    weights = np.exp(row[ids].astype(np.float64))
    expected = num_draws * weights / weights.sum()
    observed = np.array([(sampled["token_id"] == i).sum() for i in ids])
    assert observed.sum() == num_draws
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 33.7  # 9 degrees of freedom: exceeded once in 10,000


def test_a_draw_is_the_inverse_of_the_cumulative_probability(backend: Backend) -> None:
    logits = make_logits(200, 777, scale=1.5)
    counters = np.arange(200) + 2**33

    sampled = backend.sample_rows(logits, make_params(200, top_p=0.9, seed=3, counter=counters))

    for row, result, counter in zip(logits, sampled, counters.tolist(), strict=True):
        kept = sorted(kept_ids(row, result))
        weights = np.exp(row[kept].astype(np.float64))
        sums = np.cumsum(weights) / weights.sum()
        uniform = reference_sampling.uniform_at(3, counter)
        place = kept.index(result["token_id"])
        assert sums[place] > uniform - MARGIN
        assert place == 0 or sums[place - 1] < uniform + MARGIN


def test_philox_gives_the_known_answers(backend: Backend) -> None:
    # Random123, tests/kat_vectors, rows "philox4x32 10": counter, key, answer.
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    ones = [0xFFFFFFFF] * 6
    zeros = [0] * 6

    answers = [list(backend.philox(words[:4], words[4:])) for words in (zeros, ones, pi)]

    assert answers == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


def test_a_seed_and_its_counter_choose_the_token(backend: Backend) -> None:
    logits = np.zeros((500, 4096), np.float32)
    counters = np.arange(500)

    first = backend.sample_rows(logits, make_params(500, seed=1, counter=counters))["token_id"]
    again = backend.sample_rows(logits, make_params(500, seed=1, counter=counters))["token_id"]
    other = backend.sample_rows(logits, make_params(500, seed=2**40, counter=counters))["token_id"]

    assert (first == again).all()
    assert (first == other).sum() < 10
    assert len(set(first.tolist())) > 400


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_logprobs_are_those_of_a_float64_log_softmax(backend: Backend, vocab_size: int) -> None:
    logits = make_logits(20, vocab_size, scale=5)
    logits[10:] = np.round(logits[10:])  # ties
    logits[0, vocab_size // 2] = -np.inf if vocab_size > 1 else 0.0
    token_ids = np.random.default_rng(1).integers(0, vocab_size, 20)
    top_k = min(6, vocab_size)

    values = backend.logprob_rows(logits, token_ids, top_k)

    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    rankings = np.argsort(-expected, axis=1, kind="stable")
    for i, token_id in enumerate(token_ids):
        assert values.logprobs[i] == pytest.approx(expected[i, token_id], rel=0, abs=1e-6)
        assert values.ranks[i] == rankings[i].tolist().index(token_id) + 1
        assert values.top_ids[i].tolist() == rankings[i, :top_k].tolist()
        np.testing.assert_allclose(
            values.top_logprobs[i], expected[i, rankings[i, :top_k]], rtol=0, atol=1e-6
        )


def test_logprobs_of_a_large_vocabulary_are_accurate(backend: Backend) -> None:
    logits = make_logits(2, 262_144, scale=0.01) + np.float32(30)
    token_ids = np.array([0, 262_143])

    values = backend.logprob_rows(logits, token_ids, 3)

    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    np.testing.assert_allclose(
        values.logprobs, expected[np.arange(2), token_ids], rtol=0, atol=1e-6
    )


def test_logprobs_of_a_bad_row_are_nan(backend: Backend) -> None:
    logits = make_logits(3, 100)
    logits[1, 50] = np.nan

    values = backend.logprob_rows(logits, np.array([1, 2, 3]), 4)

    assert np.isnan(values.logprobs).tolist() == [False, True, False]
    assert np.isnan(values.top_logprobs[1]).all()


@needs_ext
@pytest.mark.parametrize("vocab_size", [100, 5003])
def test_a_row_gives_the_same_bits_alone_and_among_others_on_any_number_of_threads(
    vocab_size: int,
) -> None:
    num_rows = 24
    logits = make_logits(num_rows, vocab_size)
    rng = np.random.default_rng(9)
    params = make_params(
        num_rows,
        temperature=rng.choice([0.0, 0.7, 1.0], num_rows),
        top_k=rng.choice([0, 5, 50], num_rows),
        top_p=rng.choice([1.0, 0.9], num_rows),
        min_p=rng.choice([0.0, 0.01], num_rows),
        seed=np.arange(num_rows),
        counter=rng.integers(0, 100, num_rows),
    )
    token_ids = rng.integers(0, vocab_size, num_rows)
    backend = BACKENDS[COMPILED[-1]]
    num_threads = _cpu_kernels.get_num_threads()
    results = []

    try:
        for threads in (1, 2):
            _cpu_kernels.set_num_threads(threads)
            for step in (1, 5, num_rows):
                parts = [slice(start, start + step) for start in range(0, num_rows, step)]
                sampled = [backend.sample_rows(logits[part], params[part]) for part in parts]
                logprobs = [backend.logprob_rows(logits[p], token_ids[p], 5) for p in parts]
                columns = [np.concatenate(column) for column in zip(*logprobs, strict=True)]
                results.append(
                    [np.concatenate(sampled).tolist(), *(column.tobytes() for column in columns)]
                )
    finally:
        _cpu_kernels.set_num_threads(num_threads)

    assert all(result == results[0] for result in results)


@needs_ext
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_kernels_and_reference_draw_the_same_tokens(name: str) -> None:
    logits = make_logits(300, 1000)
    params = make_params(300, top_k=40, top_p=0.95, seed=8, counter=np.arange(300))

    compiled = BACKENDS[name].sample_rows(logits, params)["token_id"]
    reference = REFERENCE.sample_rows(logits, params)["token_id"]

    assert (compiled != reference).sum() <= 1


@needs_ext
def test_rows_may_be_apart() -> None:
    logits = make_logits(4, 100)
    params = make_params(4, seed=1)
    apart = torch.from_numpy(np.concatenate([logits, np.full_like(logits, np.nan)], 1))[:, :100]

    sampled = sampling.sample_rows(apart, params)

    assert (sampled == sampling.sample_rows(torch.from_numpy(logits), params)).all()


@needs_ext
@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(2, 5, dtype=torch.float64),
        torch.zeros(10),
        torch.zeros(5, 2).T,
        torch.zeros(2, 0),
    ],
    ids=["float64", "1-d", "transposed", "no vocabulary"],
)
def test_wrong_logits_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="logits must be float32"):
        sampling.sample_rows(logits, make_params(2))


@needs_ext
def test_wrong_parameters_are_refused() -> None:
    logits = torch.zeros(2, 5)
    ids = np.zeros(2, np.int32)

    with pytest.raises(ValueError, match="params must be"):
        sampling.sample_rows(logits, make_params(3))
    with pytest.raises(ValueError, match="token_ids must be"):
        sampling.logprob_rows(logits, ids, ids.astype(np.int64), 1)
    with pytest.raises(IndexError, match=r"token_ids must lie in \[0, 5\)"):
        sampling.logprob_rows(logits, ids, ids + np.int32(5), 1)
    with pytest.raises(IndexError, match="row_ids"):
        sampling.logprob_rows(logits, ids - np.int32(1), ids, 1)
