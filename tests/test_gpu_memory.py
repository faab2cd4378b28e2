"""Memory on a GPU: the cost of a trained exit, memory bounds, and running out while loading and while decoding.

Running out while a step is captured is tested in `test_gpu_backend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.modes import release
from bench.synthetic import synthetic
from selfspec import Engine, Profile, plan_memory
from selfspec.memory import free_device_bytes, limit_memory, memory_limit
from selfspec.models.decoder import Decoder
from tests.profiles import choice_of, profile_of, random_exit
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXIT_LAYER = 2
MIB = 2**20
# 127 MB in bfloat16. What is fused of an MLP, 32 MiB, finds no place in what is left of torch's segments of 20 MiB.
WIDE = {
    "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 16,
    "vocab_size": 4096, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _all_memory_afterwards() -> Iterator[None]:
    yield
    allow_everything()
    release()


def allow_more(nbytes: int) -> None:
    """Allows this process to allocate `nbytes` more of the GPU's memory than it holds."""
    release()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + nbytes) / total))


def use_up() -> list[torch.Tensor]:
    """Allocates all memory that is left, also between tensors that earlier tests still hold."""
    held: list[torch.Tensor] = []
    with suppress(torch.OutOfMemoryError):
        while True:
            held.append(torch.empty(MIB, dtype=torch.int8, device="cuda"))
    return held


def allow_everything() -> None:
    torch.cuda.set_per_process_memory_fraction(1.0)


def generate(engine: Engine, batch: int, length: int, count: int, **settings: Any) -> Any:
    """`count` greedy tokens after random prompts."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, engine.model.config.vocab_size, (batch, length), generator=generator)
    return engine.generate(
        ids.to(engine.model.device), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Decoder:
    """The shape of the demo model; the exit after 2 layers is often right."""
    release()  # otherwise it might share a segment with memory of an earlier test, which then stays reserved
    return synthetic("smollm2-135m", "cuda", torch.bfloat16, EXIT_LAYER, damping=0.2)


@pytest.fixture(scope="module")
def trained(small: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """A profile of a random exit with a block, over a part of the head."""
    plans = {"1": "tree:4,2,2,1", "2-4": "chain:4", "5-16": "none"}
    profile = profile_of(small, {"all": choice_of(EXIT_LAYER, plans)})
    folder = tmp_path_factory.mktemp("profile")
    return profile.save(folder, [random_exit(small, EXIT_LAYER)], {"all": torch.arange(8192)})


@dataclass(frozen=True)
class Held:
    """Bytes that an engine held on the device, weights included, and what it generated."""

    peak: int
    after: int  # when all was generated
    reported: dict[str, int]  # by `Engine.memory`
    tokens: torch.Tensor
    drafted: int


def held_by(model: Decoder, profile: Profile | None, batch: int, length: int, plan: str) -> Held:
    """Builds an engine, generates with the plan if there is a profile, and measures its memory, loading and capturing
    included."""
    release()
    others = torch.cuda.memory_allocated() - model.nbytes
    torch.cuda.reset_peak_memory_stats()
    engine = Engine(model, profile=profile, kernels=True, max_length=512, max_batch=batch)
    drafting = {"speculative_decoding": "force", "plan": plan, "exit_layer": EXIT_LAYER}
    out = generate(engine, batch, length, 48, **(drafting if profile else {"speculative_decoding": False}))
    peak, after = torch.cuda.max_memory_allocated() - others, torch.cuda.memory_allocated() - others
    drafted = sum(stats.drafted for stats in out.stats)
    return Held(peak, after, engine.memory(), out.sequences.cpu(), drafted)


@pytest.mark.parametrize(("batch", "length", "plan"), [(1, 150, "tree:4,2,2,1"), (4, 60, "chain:4")])
def test_a_trained_exit_costs_its_weights_its_cache_and_two_per_cent(
    small: Decoder, trained: Profile, batch: int, length: int, plan: str
) -> None:
    """Prompts fill a pass of four segments in both cases. The cache has a layer for the exit also without one, so its
    share of the bound is a margin."""
    exit_weights = trained.exits_file.exit(small, EXIT_LAYER).nbytes
    off, on = held_by(small, None, batch, length, plan), held_by(small, trained, batch, length, plan)
    assert torch.equal(on.tokens, off.tokens)
    assert on.drafted > 0 == off.drafted
    assert on.reported["weights"] == off.reported["weights"] and on.reported["cache"] == off.reported["cache"]
    exit_cache = on.reported["cache"] // (small.config.num_layers + 1)
    assert on.peak - off.peak <= exit_weights + exit_cache + 0.02 * off.peak
    for held in (off, on):
        own = sum(held.reported[name] for name in ("weights", "cache", "exits", "graphs"))
        assert held.after == pytest.approx(own, rel=0.02)


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_the_memory_plan_is_within_5_per_cent_of_what_is_allocated(folder: Path, quantize: str | None) -> None:
    """After a warm-up, which captures what the plan counts; CUDA's own memory is not PyTorch's."""
    limits: dict[str, Any] = {"device": "cuda", "max_length": 2048, "max_batch": 4, "quantize": quantize}
    release()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plan = plan_memory(folder, profile=None, dtype="bfloat16", **limits)[0]
    allowed = (before + plan.total) / 1e9  # the limit counts what other tests hold
    engine = Engine.from_pretrained(folder, profile=None, dtype="bfloat16", memory_gb=allowed, **limits)
    engine.warmup(batch=4, max_length=2048)
    generate(engine, 4, 1500, 8)
    allocated = torch.cuda.max_memory_allocated() - before
    assert plan.total - plan.cuda == pytest.approx(allocated, rel=0.05)
    memory = engine.memory()
    assert (plan.weights, plan.cache) == (memory["weights"], memory["cache"])


def test_a_memory_bound_holds_and_memory_below_it_can_be_allocated() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    release()
    bound = torch.cuda.memory_reserved() + 512 * MIB
    limit_memory(bound / 1e9, device)
    assert memory_limit(device) == pytest.approx(bound, rel=0.01)
    free = free_device_bytes(device)
    assert 400 * MIB < free == pytest.approx(bound - torch.cuda.memory_allocated(), rel=0.01)
    torch.empty(400 * MIB, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free + 64 * MIB, dtype=torch.uint8, device=device)


def test_quantized_weights_that_the_kernels_do_not_support_are_warned_of(tmp_path: Path) -> None:
    tiny_model("llama", torch.bfloat16, head_dim=8).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="quantized weights run on PyTorch's operations.*heads of 8.*on sm_"):
        Engine.from_pretrained(tmp_path, device="cuda", quantize="int8", profile=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    tiny_model("llama", torch.bfloat16, **WIDE).save_pretrained(folder)
    return folder


def load(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, device="cuda", dtype="bfloat16", profile=None, kernels=False)


def test_weights_that_do_not_fit_raise_an_error_and_leave_no_memory_allocated(folder: Path) -> None:
    allow_more(24 * MIB)  # for the first few of them
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match=r"weights need 0\.1 GB in torch\.bfloat16.*cuda:0.*device='cpu'"):
        load(folder)
    release()
    assert torch.cuda.memory_allocated() == before
    allow_everything()
    assert generate(load(folder), 1, 8, 4, speculative_decoding=False).sequences.shape == (1, 12)


def test_a_live_model_that_cannot_be_fused_for_want_of_memory_says_so_and_stays_usable(folder: Path) -> None:
    hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    hf = hf.cuda()
    allow_more(MIB)
    held = use_up()
    with pytest.raises(torch.OutOfMemoryError, match=r"fusing model\.layers\.0\..* MB, more than.*cuda:0.*usable"):
        Engine.from_model(hf, kernels=False)
    held.clear()
    allow_everything()
    engine, expected = Engine.from_model(hf, kernels=False), load(folder)
    for ours, theirs in zip(engine.model.layers, expected.model.layers, strict=True):
        assert torch.equal(ours.qkv.weight, theirs.qkv.weight)
        assert torch.equal(ours.gate_up.weight, theirs.gate_up.weight)
    assert generate(engine, 1, 8, 4, speculative_decoding=False).sequences.shape == (1, 12)


@pytest.mark.parametrize("plan", ["none", "chain:4"])
def test_sequences_that_do_not_fit_together_are_swapped_and_get_the_same_tokens(small: Decoder, plan: str) -> None:
    drafting = {"speculative_decoding": "force", "plan": plan, "exit_layer": EXIT_LAYER}
    settings: dict[str, Any] = {"speculative_decoding": False} if plan == "none" else drafting
    roomy = Engine(small, kernels=True, max_length=1024, max_batch=4)
    expected = generate(roomy, 4, 100, 400, **settings).sequences
    page = roomy.cache.nbytes // roomy.cache.num_pages
    tight = Engine(small, kernels=True, max_length=1024, kv_cache_gb=22 * page / 1e9)  # each text needs eight or nine
    assert torch.equal(generate(tight, 4, 100, 400, **settings).sequences, expected)
    assert tight.cache.free_pages == tight.cache.num_pages - 1  # but for the page of idle slots
