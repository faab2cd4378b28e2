"""The decoder's passes as kernels, in Triton's interpreter: every norm finds its input scaled by its own weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from selfspec import Engine
from selfspec.backends.cuda import decoder as fused
from selfspec.backends.cuda.decoder import FusedDecoder, Scratch, Stream
from selfspec.kernels.norm import scaled_reference, squares_reference
from selfspec.models.decoder import Decoder, Layer
from selfspec.speculation.exit import Exit
from tests.profiles import random_exit
from tests.scripted import endless
from tests.tiny import tiny_model

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter, where there is no GPU")

LAYER = 1


def exit_of(kind: str, model: Decoder) -> Exit:
    trained = random_exit(model, LAYER)
    assert trained.block is not None
    if kind == "without recall":
        return replace(trained, block=replace(trained.block, recall=None))
    return trained if kind == "trained" else replace(trained, block=None)


@pytest.mark.parametrize(
    ("family", "kind", "plan"),
    [
        ("llama", "trained", "chain:1"),
        ("llama", "without recall", "chain:1"),
        ("llama", "raw", "chain:1"),
        ("llama", "raw", "none"),
        ("gemma3_text", "trained", "chain:1"),
    ],
)
def test_every_layer_reads_a_stream_scaled_for_it(family: str, kind: str, plan: str) -> None:
    model = endless(tiny_model(family, dtype=torch.float32, num_hidden_layers=3, head_dim=16))
    engine = Engine.from_model(model, kernels=True)
    engine.drafters.exits = {LAYER: exit_of(kind, engine.model)}
    offset, read = engine.model.config.norm_offset, []
    store = FusedDecoder.store

    def checked(self: FusedDecoder, layer: Layer, spec: Any, cache_layer: int, source: Stream, *rest: Any) -> None:
        read.append(cache_layer)
        torch.testing.assert_close(source.squares, squares_reference(source.states))
        assert torch.equal(source.scaled, scaled_reference(source.states, layer.attention_norm, offset))
        store(self, layer, spec, cache_layer, source, *rest)

    with mock.patch.object(FusedDecoder, "store", checked):
        engine.generate(
            torch.tensor([[5, 6, 7]]), speculative_decoding="force", plan=plan, exit_layer=LAYER, max_new_tokens=2,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    layers = {0, 1, 2} if plan == "none" or kind == "raw" else {0, 1, 2, engine.cache.exit_layer_index}
    assert set(read) == layers


def test_where_triton_cannot_launch_nothing_is_decoded_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCompiler:
        @property
        def active(self) -> None:
            raise RuntimeError("Failed to find C compiler")

    runtime = SimpleNamespace(driver=NoCompiler())
    monkeypatch.setattr(fused, "triton", SimpleNamespace(runtime=runtime))
    fused.can_launch.cache_clear()
    with pytest.warns(UserWarning, match="Failed to find C compiler"):
        assert not fused.can_launch()
    fused.can_launch.cache_clear()


def test_scratch_that_was_outgrown_is_kept_for_cycles_that_were_captured_with_it() -> None:
    scratch = Scratch(torch.device("cpu"))
    small = scratch.take("x", 2, 3, dtype=torch.float32)
    assert scratch.take("x", 3, dtype=torch.float32).data_ptr() == small.data_ptr()
    large = scratch.take("x", 100, dtype=torch.float32)
    assert scratch.take("x", 2, 3, dtype=torch.float32).data_ptr() == large.data_ptr() != small.data_ptr()
    assert scratch.nbytes == 4 * (6 + 100)
