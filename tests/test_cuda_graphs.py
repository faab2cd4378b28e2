"""Captured graphs and slot buffers: which are kept, used again, and unchanged by a step of idle slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from selfspec.backends.cuda import graphs as graphs_module
from selfspec.backends.cuda.exit import draft_head_capacity
from selfspec.backends.cuda.graphs import Graphs
from selfspec.backends.cuda.slots import SlotBuffers, StepOptions, bucket
from selfspec.backends.cuda.step import DeviceStep
from selfspec.backends.cuda.warmup import ExpectedStep, WarmUp
from selfspec.drafters import Drafters
from selfspec.models import loading
from selfspec.sampling import SamplingParams
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import NONE, Plan
from tests.interpreted import (
    CONTEXT,
    ONLY_INTERPRETED,
    ScriptedBatch,
    accurate_exit,
    cuda_backend,
    decoder,
    new_graphs,
    prompt_of,
    sequence_of,
    trained_exit,
)
from tests.profiles import choice_of, profile_of, random_exit
from tests.tiny import tiny_model

pytestmark = ONLY_INTERPRETED

CHAIN, TREE = Plan.parse("chain:1"), Plan.parse("tree:2,1")


def test_the_least_recently_used_step_is_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 2)
    graphs, exit = new_graphs(), trained_exit()
    buffers = graphs.take_buffers()

    def step(plan: Plan) -> object:
        return graphs.step(buffers, 1, plan, exit, StepOptions(), CONTEXT)[0]

    plain, chain = step(NONE), step(CHAIN)
    assert step(NONE) is plain
    tree = step(TREE)
    assert len(graphs.captured.entries) == 2
    assert step(NONE) is plain and step(TREE) is tree
    assert step(CHAIN) is not chain
    assert len(graphs.captured.entries) == 2


def test_steps_with_different_kernels_or_buffers_are_captured_separately() -> None:
    graphs, exit = new_graphs(), trained_exit()
    first, second = graphs.take_buffers(), graphs.take_buffers()
    other = replace(exit, block=replace(exit.block, affine_bias=exit.block.affine_bias + 1))
    same = replace(exit, head_rows=exit.head_rows[:-3])
    reference = (first, 2, CHAIN, exit, StepOptions(), CONTEXT)
    made = graphs.step(*reference)[0]
    assert graphs.step(first, 2, CHAIN, same, StepOptions(), 5)[0] is made, "the head's rows are in a buffer"
    for index, value in enumerate((second, 1, TREE, other, StepOptions(samples=True))):
        different = [*reference[:index], value, *reference[index + 1 :]]
        assert graphs.step(*different)[0] is not made
    assert graphs.step(*reference, *DeviceStep.PARTS)[0] is not made


def test_buffers_that_are_given_back_are_idle_and_used_again() -> None:
    graphs, exit = new_graphs(), accurate_exit()
    with torch.inference_mode():
        batch = ScriptedBatch(cuda_backend(graphs), exit)
        batch.admit([sequence_of(prompt_of(5, 1), 4, exit=exit)])
        batch.step()
        buffers = batch.backend._buffers
        assert buffers.slots.first(1).active.item() and graphs.take_buffers() is not buffers
        batch.backend.close()
    view = buffers.slots.first(graphs.capacity)
    assert not view.active.any() and not view.lengths.any() and not view.unfilled.any()
    assert (view.page_table == graphs.idle_page).all()
    assert graphs.take_buffers() is buffers


def batch_state(graphs: Graphs, buffers: SlotBuffers) -> list[torch.Tensor]:
    """Copies of the tensors that a batch needs between two steps: slots, features, and all pages but the idle one."""
    own = [tensor for tensor in buffers.tensors if tensor is not buffers.features]
    cached = [tensor[:, [page for page in range(tensor.shape[1]) if page != graphs.idle_page]] for tensor in
              (graphs.cache.keys, graphs.cache.values)]  # fmt: skip
    return [tensor.clone() for tensor in (*own, buffers.features[: buffers.slots.capacity], *cached)]


@torch.inference_mode()
def test_the_first_buffers_are_used_again_before_others() -> None:
    """Most steps are captured for them."""
    graphs = new_graphs()
    first, second = graphs.take_buffers(), graphs.take_buffers()
    for buffers in (first, second):
        graphs.give_back(buffers)
    assert [graphs.take_buffers(), graphs.take_buffers()] == [first, second]


@pytest.mark.parametrize("plan", [NONE, TREE], ids=str)
def test_a_step_of_idle_slots_changes_only_what_was_saved(plan: Plan) -> None:
    """Capturing runs a step with all slots idle while a batch is running."""
    graphs, exit = new_graphs(), trained_exit()
    batch = ScriptedBatch(cuda_backend(graphs), exit)
    params = SamplingParams(do_sample=True, repetition_penalty=1.3, stop_token_ids=(5,))
    batch.admit([sequence_of(prompt_of(5, i), 20, params, exit=exit) for i in range(2)])
    batch.step()
    batch.step()
    buffers = batch.backend._buffers
    step, launch = graphs.step(buffers, 2, plan, exit, StepOptions(samples=True, processes=True), CONTEXT)
    before = batch_state(graphs, buffers)
    saved = buffers.save_and_idle()
    assert not buffers.slots.first(4).active.any()
    launch()
    assert not step.report[:, 0].any()
    for tensor, copy in saved:
        tensor.copy_(copy)
    after = batch_state(graphs, buffers)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert any(one.any() for one in before[-2:])


def test_the_prompts_own_tokens_do_not_change_the_captured_size_of_the_draft_head() -> None:
    model = decoder()
    large = replace(model.config, vocab_size=100_000)

    class Large:
        config = large

    def capacity(rows: int, prompt_tokens: int) -> int:
        exit = Exit(model, 1).with_head_rows(torch.arange(rows), [range(rows, rows + prompt_tokens)])
        return draft_head_capacity(exit, Large())  # type: ignore[arg-type]

    assert [capacity(4000, own) for own in (0, 1, 1024)] == [8192] * 3
    assert [capacity(3000, own) for own in (0, 1096)] == [4096] * 2, "domains share capacities"


def test_batches_of_one_domain_and_of_several_share_a_captured_size_of_the_draft_head(tmp_path: Path) -> None:
    model = loading.adopt(tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, vocab_size=20_000))
    heads = {"chat": torch.arange(3000), "code": torch.arange(2000, 9000)}
    profile = profile_of(model, {name: choice_of(1, "chain:2", head_rows=len(rows)) for name, rows in heads.items()})
    saved = profile.save(tmp_path, [random_exit(model, 1)], heads)
    drafters = Drafters(model, saved, embed=lambda prompts, layer: torch.zeros(len(prompts), 1))
    rows = [drafters.head_rows_of(domain) for domain in ("chat", "code", None)]
    assert [len(ids) for ids in rows if ids is not None] == [3000, 7000, 9000]
    exits = [drafters.exit(1).with_head_rows(ids, []) for ids in rows]
    assert {draft_head_capacity(exit, model) for exit in exits} == {12_288}


def test_steps_are_captured_for_powers_of_two_of_slots() -> None:
    assert [bucket(count) for count in (1, 2, 3, 4, 5, 64)] == [1, 2, 4, 4, 8, 64]


@torch.inference_mode()
def test_steps_that_were_prepared_are_not_captured_again() -> None:
    graphs, exit = new_graphs(), accurate_exit()
    warm_up = WarmUp(graphs, CONTEXT, max_scored_batch=4)
    for plan in (NONE, CHAIN):
        warm_up.prepare(ExpectedStep(2, plan, exit, SamplingParams()))
    held = set(graphs.captured.entries)
    assert {key[0] for key in held} == {"step", "fill", "prompt score"}
    batch = ScriptedBatch(cuda_backend(graphs, overlaps=True), exit)
    batch.admit([sequence_of(prompt_of(1, i), 4, exit=exit) for i in range(2)])
    batch.step()
    batch.plan = CHAIN
    batch.step()
    assert set(graphs.captured.entries) == held
