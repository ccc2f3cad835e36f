"""The arithmetic of bench/perplexity.py: chunks, what counts, log-probabilities, the result."""

from __future__ import annotations

import math

import pytest
import torch

from bench.perplexity import (
    MIN_WORDS,
    TEXT,
    counted_positions,
    negative_log_likelihoods,
    parse_llama_perplexity,
    perplexity,
    split_chunks,
)

BOS = 99


def test_chunks_are_full_and_begin_with_bos_in_place_of_a_token() -> None:
    assert split_chunks(range(11), 4, BOS) == [[BOS, 1, 2, 3], [BOS, 5, 6, 7]]
    assert split_chunks(range(8), 4, BOS) == [[BOS, 1, 2, 3], [BOS, 5, 6, 7]]


def test_chunks_of_a_model_without_bos_are_the_text() -> None:
    assert split_chunks(range(9), 4, None) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_second_half_counts_but_for_the_last_position_which_has_no_target() -> None:
    assert list(counted_positions(8)) == [4, 5, 6]
    assert len(counted_positions(512)) == 255


def test_perplexity_of_equal_logits_is_the_size_of_the_vocabulary() -> None:
    losses = negative_log_likelihoods(torch.full((3, 50), 7.0), [0, 20, 49])

    assert perplexity(losses) == pytest.approx(50, rel=1e-12)


def test_losses_are_those_of_each_rows_target_in_float64() -> None:
    logits = torch.tensor([[0.0, 1.0, 30.0], [2.0, 2.0, -1e4]])

    losses = negative_log_likelihoods(logits, [2, 1])

    # In float32 the first would be 0: 1 + e^-29 has no such neighbour of 1.
    first = math.log1p(math.exp(-30) + math.exp(-29))
    assert losses == pytest.approx([first, math.log(2)], rel=1e-2)
    assert losses[0] > 0


def test_perplexity_is_the_geometric_mean_of_inverse_probabilities() -> None:
    assert perplexity([math.log(2), math.log(8)]) == pytest.approx(4)


def test_result_of_llama_perplexity_is_read() -> None:
    output = (
        "perplexity: calculating perplexity over 8 chunks, n_ctx=512, batch_size=512, n_seq=1\n"
        "[1]30.1000,[2]24.1416,\nFinal estimate: PPL = 24.1416 +/- 0.80000\n"
    )

    result = parse_llama_perplexity(output)

    assert (result.perplexity, result.num_chunks, result.num_counted) == (24.1416, 8, 2040)


def test_output_without_a_result_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no result: you need at least 1024 tokens"):
        parse_llama_perplexity("you need at least 1024 tokens")


def test_text_is_long_enough() -> None:
    assert len(TEXT.read_text().split()) >= MIN_WORDS
