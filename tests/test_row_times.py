"""What passes over more rows take, by a clock that says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.cache.kv_cache import Cache
from selfspec.models import row_times
from selfspec.models.decoder import Decoder
from selfspec.models.loading import adopt
from selfspec.models.row_times import RowTimes, time_rows
from tests.tiny import tiny_model

TIMED = RowTimes((1, 2, 4), (1.0, 3.0, 3.5))


class Clock:
    """Time goes by only in layers, as fast as they have rows."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds, self.now = seconds, 0.0

    def record(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """Returns the layers and rows that it will have seen."""
        seen, run_layer = [], model.run_layer
        layers = {id(layer): index for index, layer in enumerate(model.layers)}

        def run(layer: Any, spec: Any, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
            seen.append((layers[id(layer)], hidden.shape[1]))
            self.now += self.seconds(hidden.shape[1])
            return run_layer(layer, spec, hidden, *args)

        monkeypatch.setattr(model, "run_layer", run)
        return seen

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def model() -> Decoder:
    return adopt(tiny_model("llama"))


def test_rows_are_timed_with_layers_of_the_model(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(lambda rows: 2.0 if rows == 1 else 5.0 + rows)
    seen = clock.record(model, monkeypatch)
    times = time_rows(model, Cache(model.config, model.device, model.dtype, num_pages=2), clock)
    assert [times(rows) for rows in (1, 2, 8, 16)] == [1.0, 3.5, 6.5, 10.5]
    assert {layer for layer, _ in seen} == set(range(model.config.num_layers)), "not one that stays near"


def test_the_fastest_of_several_passes_counts(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = iter([9.0] * (model.config.num_layers + 2 * len(row_times._COUNTS) - 1))
    clock = Clock(lambda rows: rows * next(slow, 1.0))
    clock.record(model, monkeypatch)
    times = time_rows(model, Cache(model.config, model.device, model.dtype, num_pages=2), clock)
    assert times.seconds == tuple(map(float, row_times._COUNTS))


@pytest.mark.parametrize("fails", [False, True])
def test_the_cache_has_its_pages_back(model: Decoder, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(model.config, model.device, model.dtype, num_pages=2)
    if fails:
        monkeypatch.setattr(model, "project", lambda *args: 1 // 0)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        time_rows(model, cache)
    assert cache.free_pages == cache.num_pages


def test_a_vocabulary_may_be_smaller_than_a_pass() -> None:
    model = adopt(tiny_model("llama", vocab_size=5, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    assert time_rows(model, Cache(model.config, model.device, model.dtype, num_pages=2))(2) >= 1.0


def test_between_the_numbers_timed_it_is_a_straight_line_and_after_them_the_mean_one() -> None:
    assert [TIMED(rows) for rows in (1, 2, 3, 4)] == [1.0, 3.0, 3.25, 3.5]
    assert TIMED(10) == pytest.approx(3.5 + 6 * 2.5 / 3)


@given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3), st.integers(1, 100))
def test_more_rows_never_take_less(seconds: list[float], rows: int) -> None:
    times = RowTimes((1, 2, 4), tuple(seconds))
    assert 1.0 <= times(rows) <= times(rows + 1) + 1e-9
