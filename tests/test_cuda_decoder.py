"""The decoder's layers as kernels, in Triton's interpreter: every norm gets its input scaled by its own weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from selfspec.backends.cuda.decoder import FusedDecoder, Residual, Scratch
from selfspec.kernels import triton_compat
from selfspec.kernels.norm import scaled_reference, squares_reference
from selfspec.models.decoder import Layer
from selfspec.speculation.plan import NONE, Plan
from tests.interpreted import (
    ONLY_INTERPRETED,
    ScriptedBatch,
    cuda_backend,
    new_graphs,
    plain_tokens,
    prompt_of,
    sequence_of,
    trained_exit,
)

pytestmark = ONLY_INTERPRETED


@torch.inference_mode()
@pytest.mark.parametrize(("family", "has_block"), [("llama", True), ("llama", False), ("gemma3_text", True)])
def test_every_layer_reads_states_scaled_by_the_weights_of_its_first_norm(family: str, has_block: bool) -> None:
    graphs, trained = new_graphs(family), trained_exit(family)
    exit = trained if has_block else replace(trained, block=None)
    offset, read, store = graphs.model.config.norm_offset, set(), FusedDecoder.write_kv

    def checked(self: FusedDecoder, layer: Layer, spec: Any, cache_layer: int, source: Residual, *rest: Any) -> None:
        read.add(cache_layer)
        torch.testing.assert_close(source.squares, squares_reference(source.states))
        assert torch.equal(source.scaled, scaled_reference(source.states, layer.attention_norm, offset))
        store(self, layer, spec, cache_layer, source, *rest)

    batch, sequence = ScriptedBatch(cuda_backend(graphs), exit), sequence_of(prompt_of(4, 1), 3, exit=exit)
    with mock.patch.object(FusedDecoder, "write_kv", checked):
        batch.admit([sequence])
        batch.run([NONE, Plan.parse("chain:1")])
    assert read == ({0, 1, graphs.cache.exit_layer_index} if has_block else {0, 1})
    assert sequence.tokens == plain_tokens(sequence, family)


def test_kernels_are_not_used_where_triton_cannot_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCompiler:
        @property
        def active(self) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton_compat, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=NoCompiler())))
    triton_compat.can_launch.cache_clear()
    with pytest.warns(UserWarning, match="Failed to find C compiler"):
        assert not triton_compat.can_launch()
    triton_compat.can_launch.cache_clear()


def test_a_scratch_buffer_that_grew_is_kept_for_graphs_captured_before() -> None:
    scratch = Scratch(torch.device("cpu"))
    small = scratch.take("x", 2, 3, dtype=torch.float32)
    assert scratch.take("x", 3, dtype=torch.float32).data_ptr() == small.data_ptr()
    large = scratch.take("x", 100, dtype=torch.float32)
    assert scratch.take("x", 2, 3, dtype=torch.float32).data_ptr() == large.data_ptr() != small.data_ptr()
    assert scratch.nbytes == 4 * (6 + 100)
