"""The pure parts of bench/compare.py: statistics, the table, floors, parsing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.compare import make_jobs
from bench.peers.floors import Peak, decode_floor, prefill_floor, serving_floor
from bench.peers.http_load import answer_end
from bench.peers.llama_cpp import parse_llama_bench
from bench.peers.models import Cost
from bench.peers.rows import GROUPS
from bench.peers.store import Run
from bench.peers.table import OWN, Row, Samples, best_peer, markdown, number, ratio, summarize
from bench.peers.workloads import Answer, load_figures, read_event

SPEED = Row("job", "speed", "decode", "tokens/s", target=1.5, floor_target=0.8)
LATENCY = Row("job", "ttft", "TTFT p50", "ms", is_higher_better=False, limit=3)


def make_samples() -> Samples:
    samples = Samples()
    for speed, ttft in ((30.0, 20.0), (10.0, 40.0), (20.0, 30.0)):
        samples.add("job", OWN, "", {"speed": speed, "ttft": ttft})
    samples.add("job", "slow", "", {"speed": 2.0, "ttft": 300.0})
    samples.add("job", "fast", "-x", {"speed": 16.0, "ttft": 15.0})
    samples.add("job", "fast", "-y", {"speed": 8.0, "ttft": 10.0})
    return samples


def test_a_summary_has_the_median_and_the_extremes() -> None:
    summary = summarize([4.0, 1.0, 3.0, 2.0])

    assert (summary.median, summary.low, summary.high, summary.num_rounds) == (2.5, 1.0, 4.0, 4)


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, "0.12"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")]
)
def test_numbers_are_written_with_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_ratio_above_one_means_ahead_for_rates_and_for_latencies() -> None:
    assert ratio(30.0, 20.0, is_higher_better=True) == 1.5
    assert ratio(20.0, 30.0, is_higher_better=False) == 1.5


def test_each_row_takes_the_variant_that_is_best_in_it() -> None:
    samples = make_samples()

    speed, latency = samples.best(SPEED, "fast"), samples.best(LATENCY, "fast")

    assert speed is not None
    assert latency is not None
    assert (speed.variant, latency.variant) == ("-x", "-y")


def test_all_variants_are_tried_once_and_the_better_ones_again() -> None:
    samples = make_samples()

    assert samples.to_measure([SPEED, LATENCY], "fast", ["-x", "-y", "-z"]) == ["-z"]
    assert samples.to_measure([SPEED, LATENCY], "fast", ["-x", "-y"]) == ["-x", "-y"]
    assert samples.to_measure([SPEED], "fast", ["-x", "-y"]) == ["-x"]


def test_rows_that_were_not_all_measured_count_no_round() -> None:
    samples = make_samples()
    unmeasured = Row("job", "memory", "memory", "MB")

    assert samples.num_rounds([SPEED, LATENCY], OWN) == 3
    assert samples.num_rounds([SPEED, unmeasured], OWN) == 0


def test_the_best_peer_is_the_one_to_beat() -> None:
    samples = make_samples()

    best = best_peer(samples, LATENCY, ["slow", "fast", "absent"])

    assert best is not None
    assert best[0] == "fast"
    assert best[1].median == 10.0


def test_the_table_shows_medians_floors_ratios_and_options() -> None:
    floors = {("job", "speed"): 25.0}

    text = markdown(make_samples(), [SPEED, LATENCY], ["slow", "fast"], floors)

    assert text.splitlines() == [
        "| work | unit | llmserve | floor | slow | fast | ratio to the best | target |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| decode | tokens/s | 20.0 (10.0 to 30.0, 3 rounds) | 25.0, 80% reached | 2.00 (1 round) "
        "| 16.0 (1 round) | 1.25 (fast) | 1.5x, 80% of the floor |",
        "| TTFT p50 | ms | 30.0 (20.0 to 40.0, 3 rounds) |  | 300 (1 round) | 10.0 (1 round) "
        "| 0.33 (fast) | under 3 ms |",
        "",
        "- fast `-x`: decode",
        "- fast `-y`: TTFT p50",
    ]


def test_a_row_without_an_own_figure_is_left_out() -> None:
    samples = Samples()
    samples.add("job", "fast", "", {"speed": 1.0})

    assert len(markdown(samples, [SPEED], ["fast"], {}).splitlines()) == 2


def test_llama_bench_reports_are_read_by_flash_attention() -> None:
    tests = [
        {"flash_attn": 0, "n_prompt": 512, "n_gen": 0, "samples_ts": [5.0, 1.0, 3.0]},
        {"flash_attn": 0, "n_prompt": 0, "n_gen": 128, "samples_ts": [2.0, 4.0]},
        {"flash_attn": True, "n_prompt": 0, "n_gen": 128, "samples_ts": [7.0]},
    ]

    figures = parse_llama_bench(f"warning: x\n{json.dumps(tests)}\n")

    assert figures == {
        "-fa off": {"prefill_tokens_per_s": 3.0, "decode_tokens_per_s": 3.0},
        "-fa on": {"decode_tokens_per_s": 7.0},
    }


def test_floors_follow_from_bytes_and_multiply_adds() -> None:
    cost = Cost(weight_bytes=100, layer_macs=10, logit_macs=20)
    peak = Peak(1000.0, int8_macs_per_s=400.0, bfloat16_macs_per_s=0.0, float32_macs_per_s=100.0)

    assert decode_floor(cost, peak) == 10.0
    assert prefill_floor(cost, peak, True, 2) == 2 * 400 / 40
    assert prefill_floor(cost, peak, False, 2) == 2 * 100 / 40
    # Prefill 2 * (4 * 10 + 20) / 400 = 0.3 s; a step 2 * 30 / 400 = 0.15 s, above 0.1 s of reads.
    assert serving_floor(cost, peak, True, 2, 4, 3) == pytest.approx(2 * 3 / 0.6)


def test_an_answers_length_is_known_from_its_header_or_its_last_chunk() -> None:
    header = b"HTTP/1.1 200 OK\r\n"

    assert answer_end(header) is None
    assert answer_end(header + b"Content-Length: 2\r\n\r\n{") == len(header) + 21 + 2
    chunked = header + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    assert answer_end(chunked) is None
    assert answer_end(chunked + b"0\r\n\r\n") == len(chunked) + 5


def test_chunks_without_text_are_no_tokens() -> None:
    answer = Answer(start=0.0)

    read_event({"choices": [{"text": ""}]}, answer)
    read_event({"choices": [{"text": "a"}], "usage": None}, answer)
    read_event({"choices": [], "usage": {"completion_tokens": 7}}, answer)

    assert len(answer.chunks) == 1
    assert answer.num_tokens == 7


def test_latencies_are_in_milliseconds() -> None:
    answers = [Answer(0.0, [1.0, 1.5], 2), Answer(1.0, [4.0, 6.0], 2)]

    figures = load_figures(answers, wall_s=8.0)

    assert figures == {
        "output_tokens_per_s": 0.5,
        "ttft_p50_ms": 2000.0,
        "itl_p50_ms": 1250.0,
        "itl_p99_ms": 2000.0,
    }


def test_workloads_of_one_model_share_a_process() -> None:
    jobs = make_jobs([GROUPS["serving-8"], GROUPS["engine-q8_0"], GROUPS["prefix"]])

    assert [job.name for job in jobs] == ["server-q4_k_m", "engine-q8_0"]
    assert jobs[0].workloads == ["serving-8", "prefix"]
    assert len(jobs[0].rows) == 4


def test_samples_survive_the_file_that_they_are_kept_in(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.json", make_samples(), {"job": [Peak(1.0, 2.0, 3.0, 4.0)]}, 3)

    run.save()

    assert Run.load(tmp_path / "run.json") == run
    assert Run.load(tmp_path / "absent.json").num_rounds == 0
