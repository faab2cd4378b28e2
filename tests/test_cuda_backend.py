"""The CUDA backend in Triton's interpreter: every sequence gets the tokens that it gets alone and with plain steps."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec import Engine
from selfspec.backends.cuda import exit as exit_module
from selfspec.backends.cuda import prompt_scoring, torch_prefill
from selfspec.backends.cuda.backend import CudaBackend
from selfspec.backends.torch_backend import TorchBackend
from selfspec.cache.kv_cache import Cache, CacheFull, flat_slot
from selfspec.drafters import Drafter
from selfspec.governor.acceptance import Skill
from selfspec.governor.rules import Policy, Rules
from selfspec.grammar import Grammars
from selfspec.profiles.profile import Spread
from selfspec.profiles.router import Router, prompt_embeddings
from selfspec.sampling import SamplingParams
from selfspec.sequence import Sequence
from selfspec.speculation.plan import NONE, Plan
from tests.interpreted import (
    LAYER,
    ONLY_INTERPRETED,
    SLOTS,
    ScriptedBatch,
    accurate_exit,
    cuda_backend,
    decoder,
    exit_keys,
    new_graphs,
    plain_tokens,
    prompt_of,
    sequence_of,
    torch_backend,
    trained_exit,
)
from tests.profiles import choice_of, profile_of, random_exit
from tests.tiny_tokenizer import tiny_tokenizer

pytestmark = ONLY_INTERPRETED

END = 8  # positions of a prompt's end that are scored: fewer than in use, since interpreted kernels are slow
PLANS = [Plan.parse(plan) for plan in ("none", "none", "copy:3", "beam:2,2", "tree:2,1+copy:2")]
PARAMS: list[dict[str, Any]] = [
    {},
    {"stop_token_ids": (3, 5, 8, 13, 21, 34, 55, 89)},
    {"stop_token_ids": tuple(range(30)), "min_new_tokens": 4},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {7: 3.0, 9: -2.0}, "banned_token_ids": (11, 12)},
    {"do_sample": True, "temperature": 0.8},
    {"do_sample": True, "temperature": 0.7, "top_k": 7, "presence_penalty": 1.0},
    {"do_sample": True, "temperature": 1.2, "top_p": 0.8},
    {"do_sample": True, "temperature": 1.2, "min_p": 0.1, "allowed_token_ids": tuple(range(20, 90))},
]


class RandomBatch:
    """A batch in which sequences join, leave and swap at random before each step, by a seed."""

    def __init__(self, seed: int, overlaps: bool) -> None:
        self.dice, self.graphs, self.exit = random.Random(seed), new_graphs(), accurate_exit()
        self.batch = ScriptedBatch(cuda_backend(self.graphs, overlaps), self.exit)
        self.sequences: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.swaps = 0

    @property
    def cache(self) -> Cache:
        return self.graphs.cache

    def change_members(self) -> None:
        free = SLOTS - len(self.batch.running)
        event = self.dice.random()
        if self.swapped and free:
            self.swap_in()
        elif event < 0.5 and free:
            self.admit(self.dice.randint(1, min(free, 2)))
        elif event < 0.6 and self.batch.running:
            self.batch.dismiss(self.dice.choice(self.batch.running))
        elif event < 0.75 and len(self.batch.running) > 1:
            self.swap_out()
            if self.swapped and self.dice.random() < 0.5:
                self.swap_in()  # before any step of the others

    def admit(self, count: int) -> None:
        """Admits new sequences. About one in four is not drafted for; some prompts end close to the end of a page."""
        made = []
        for _ in range(count):
            number = len(self.sequences) + len(made)
            prompt = prompt_of(self.dice.choice([1, 5, 61]), number)
            params = SamplingParams(**PARAMS[number % len(PARAMS)])
            mode = self.dice.choice(["force", "force", "force", False])
            made.append(sequence_of(prompt, self.dice.randint(2, 8), params, seed=number, exit=self.exit, mode=mode))
        self.sequences += made
        self.batch.admit(made)

    def swap_out(self) -> None:
        """Swaps out the newest sequence, as the scheduler does when no pages are free."""
        self.batch.drain()
        self.batch.dismiss_finished()
        if self.batch.running:
            newest = self.batch.running[-1]
            self.batch.backend.suspend(newest)
            self.batch.leave([newest])
            newest.swapped = self.cache.swap_out(newest.kv)
            self.swapped.append(newest)
            self.swaps += 1

    def swap_in(self) -> None:
        sequence = self.swapped.pop()
        assert sequence.swapped is not None
        self.cache.swap_in(sequence.kv, sequence.swapped)
        self.batch.join([sequence])

    def step(self) -> None:
        self.batch.plan = self.dice.choice(PLANS)
        self.batch.step()
        for sequence in self.batch.running:
            if sequence.is_finished and sequence.request.drafter is not None:
                self.check_exit_keys(sequence)
        self.batch.dismiss_finished()

    def check_exit_keys(self, sequence: Sequence) -> None:
        """Compares the exit block's keys with those of a prompt of the same tokens: they do not depend on the plans."""
        filled = min(sequence.kv.length, len(sequence.tokens) - 1) - self.batch.backend._unfilled.get(sequence, 0)
        text = sequence_of([*sequence.tokens, 0], 1, exit=self.exit)
        reference = torch_backend()
        reference.prefill([text], self.exit)
        expected = exit_keys(reference.cache, text, filled)
        torch.testing.assert_close(exit_keys(self.cache, sequence, filled), expected, atol=5e-4, rtol=5e-4)


@torch.inference_mode()
def test_sequences_that_join_leave_and_swap_get_the_tokens_they_get_alone() -> None:
    random_batch = RandomBatch(seed=12, overlaps=True)
    for _ in range(10):
        random_batch.change_members()
        if random_batch.batch.running:
            random_batch.step()
    while random_batch.batch.running or random_batch.swapped:
        if random_batch.swapped and len(random_batch.batch.running) < SLOTS:
            random_batch.swap_in()
        random_batch.step()
    for sequence in random_batch.sequences:
        expected = plain_tokens(sequence)
        got = sequence.tokens
        if sequence.finish_reason == "cancelled":
            expected = expected[: len(got)]
        assert got == expected, sequence.params
        if sequence.request.drafter is None and sequence.history.steps:
            assert (sequence.history.drafted, sequence.disabled_reason) == (0, "request")
    assert sum(sequence.history.accepted for sequence in random_batch.sequences) > 0 and random_batch.swaps > 0
    assert "stop" in {sequence.finish_reason for sequence in random_batch.sequences}
    assert len(random_batch.sequences) >= len(PARAMS), "every entry of PARAMS is used"
    random_batch.batch.drain()
    placement = random_batch.batch.backend._placement
    assert random_batch.cache.free_pages == random_batch.cache.num_pages - 1  # idle slots keep a page to write to
    assert not placement.slot_of and len(placement._free) == SLOTS


# Callables


def penalise_last(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Depends on the newest token: makes it unlikely, and another token likelier."""
    newest = prefix[:, -1:]
    return scores.scatter(1, newest, -50.0).scatter_add(1, (newest * 7 + 3) % 101, torch.full_like(newest, 2.0) * 1.0)


@torch.inference_mode()
def test_text_that_repeats_is_copied_without_an_exit() -> None:
    """The first steps are plain: the text that is copied from then on was written before and after the sequence joined.
    A second sequence joins while a step is in flight."""
    whole = plain_tokens(sequence_of(prompt_of(3, 0), 24))  # from its 14th token on it repeats one token
    first, second = sequence_of(whole[:13], 10), sequence_of(prompt_of(5, 7), 5)
    for sequence in (first, second):
        sequence.request.drafter = Drafter(None)
    batch = ScriptedBatch(cuda_backend(new_graphs(), overlaps=True), None)
    batch.admit([first])
    for plan in (NONE, NONE, Plan.parse("copy:3")):
        batch.plan = plan
        batch.step()
    batch.admit([second])
    batch.run([Plan.parse("copy:3")])
    assert first.tokens == whole[:23] and second.tokens == plain_tokens(second)
    assert first.history.accepted >= 5


@torch.inference_mode()
@pytest.mark.parametrize("plan", ["none", "beam:2,2+copy:2"])
def test_sequences_with_and_without_callables_share_a_batch(plan: str) -> None:
    """Built-in processing comes before the callables."""
    exit = accurate_exit()
    with_callables = [
        sequence_of(prompt_of(5, 1), 4, exit=exit, processors=[penalise_last]),
        sequence_of(
            prompt_of(5, 2), 4, SamplingParams(do_sample=True, temperature=0.8, repetition_penalty=1.4), seed=2,
            exit=exit, processors=[penalise_last],
        ),
    ]  # fmt: skip
    penalised = sequence_of(prompt_of(5, 3), 4, SamplingParams(frequency_penalty=0.7), exit=exit)
    graphs = new_graphs()
    batch = ScriptedBatch(cuda_backend(graphs, overlaps=True), exit)
    batch.admit([*with_callables, penalised])
    batch.run([Plan.parse(plan)])
    assert penalised.tokens == plain_tokens(penalised)
    for sequence in with_callables:
        assert sequence.tokens == plain_tokens(sequence, processors=[penalise_last])
    assert sum(sequence.history.accepted for sequence in with_callables) > 0 or plan == "none"
    assert graphs.cache.free_pages == graphs.cache.num_pages - 1


# Grammars


def follow(sequence: Sequence, regex: str) -> Sequence:
    """Gives a sequence the grammar of a regex."""
    grammar = Grammars(101).compile({"type": "regex", "regex": regex}, tiny_tokenizer(), (2,))
    assert grammar is not None
    sequence.grammar, sequence.request.uses_host = grammar.at_start(len(sequence.prompt)), True
    return sequence


@torch.inference_mode()
def test_sequences_with_and_without_a_grammar_share_a_batch() -> None:
    """They join and leave at different steps; plain steps and drafting steps alternate, so that steps with open masks
    are followed by passes that fill the exit's KV."""
    exit = accurate_exit()

    def sequence(seed: int, regex: str | None, **params: Any) -> Sequence:
        made = sequence_of(prompt_of(5, seed), 5, SamplingParams(stop_token_ids=(2,), **params), seed=seed, exit=exit)
        return made if regex is None else follow(made, regex)

    def sequences() -> list[Sequence]:
        return [
            sequence(1, "[a-m]{3}"),
            sequence(2, "((one|two|three) ?)+", do_sample=True, temperature=1.5, top_p=0.9),
            sequence(3, None, do_sample=True, temperature=0.8),
            sequence(4, "[0-9]*x", repetition_penalty=1.5, frequency_penalty=0.5),
        ]

    graphs, plans = new_graphs(), [Plan.parse(plan) for plan in ("beam:2,2", "none", "tree:2+copy:2", "none")]
    batch, made = ScriptedBatch(cuda_backend(graphs, overlaps=True), exit), sequences()
    waiting, steps = list(made), 0
    while batch.running or waiting:
        if waiting and len(batch.running) < SLOTS:
            batch.admit([waiting.pop(0)])
        batch.plan = plans[steps % len(plans)]
        batch.step()
        batch.dismiss_finished()
        steps += 1
    for got, alone in zip(made, sequences(), strict=True):
        reference = ScriptedBatch(torch_backend(), None)
        reference.admit([alone])
        reference.run()
        assert got.request.error is None and got.tokens == alone.tokens
    assert sum(sequence.history.accepted for sequence in made) > 0 and made[0].finish_reason == "stop"
    assert graphs.cache.free_pages == graphs.cache.num_pages - 1


@torch.inference_mode()
@pytest.mark.parametrize("plan", ["chain:1+copy:3", "copy:3"])
def test_forced_tokens_are_accepted_in_one_step(plan: str) -> None:
    """Beside a sequence that copies; 9 tokens, the end token included, come in steps of 4, 4 and 1."""
    exit = accurate_exit() if "chain" in plan else None

    def sequence(regex: str) -> Sequence:
        return follow(sequence_of(prompt_of(5, 1), 9, SamplingParams(stop_token_ids=(2,)), exit=exit), regex)

    batch = ScriptedBatch(cuda_backend(new_graphs(), overlaps=True), exit)
    forced, copying = sequence("defghijk"), sequence("[x-z]{2,20}")
    batch.admit([forced, copying])
    batch.run([Plan.parse(plan)])
    assert tiny_tokenizer().decode(forced.tokens[5:-1]) == "defghijk" and forced.finish_reason == "stop"
    assert forced.history.steps == 3 and forced.history.accepted == 6
    alone, reference = sequence("[x-z]{2,20}"), ScriptedBatch(torch_backend(), None)
    reference.admit([alone])
    reference.run()
    assert copying.tokens == alone.tokens


@torch.inference_mode()
def test_a_rule_that_changes_after_a_launch_does_not_change_the_masks_of_the_step() -> None:
    """The third sequence joins while a step that drafts is in flight, and forbids drafting from the next step on."""
    exit = accurate_exit()

    def sequence(seed: int) -> Sequence:
        made = sequence_of(prompt_of(5, seed), 8, exit=exit)
        made.request.policy = Policy(Rules(max_batch=2), made.params, plan=Plan.parse("chain:2"))
        return follow(made, "[a-m]{30}")

    batch, made = ScriptedBatch(cuda_backend(new_graphs(), overlaps=True), exit), [sequence(seed) for seed in (1, 2, 3)]
    batch.plan = Plan.parse("chain:2")
    batch.admit(made[:2])
    batch.step()
    batch.admit(made[2:])
    batch.run()
    for got, alone in zip(made, map(sequence, (1, 2, 3)), strict=True):
        reference = ScriptedBatch(torch_backend(), None)
        reference.admit([alone])
        reference.run()
        assert got.request.error is None and got.tokens == alone.tokens
    assert made[0].history.accepted and "batch" in {record.reason for record in made[0].history.records}


@torch.inference_mode()
def test_the_time_of_a_step_with_a_grammar_is_not_typical_if_a_prompt_is_prefilled_between_its_parts() -> None:
    backend = cuda_backend(new_graphs(), overlaps=True)
    batch = ScriptedBatch(backend, None)
    batch.plan = Plan.parse("copy:1")
    batch.admit([follow(sequence_of(prompt_of(5, 1), 8), "[a-m]{30}")])
    batch.step()
    batch.step()
    (in_flight,) = batch.unread
    assert in_flight.is_cost_sample
    backend.prefill([sequence_of(prompt_of(5, 2), 1)], None)
    assert not in_flight.is_cost_sample


# Failures


def raise_out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("on purpose")


@torch.inference_mode()
def test_too_little_memory_for_log_probabilities_fails_the_request_that_wants_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = ScriptedBatch(cuda_backend(new_graphs(), overlaps=True), None)
    failing, other = (sequence_of(prompt_of(5, seed), 3) for seed in (1, 2))
    failing.request.logprobs = 0
    monkeypatch.setattr("selfspec.backends.cuda.step.DeviceStep.logprobs", raise_out_of_memory)
    batch.admit([failing, other])
    batch.run()
    assert other.request.error is None and other.tokens == plain_tokens(other)
    assert isinstance(failing.request.error, CacheFull) and "log probabilities" in str(failing.request.error)


@torch.inference_mode()
def test_a_sequence_leaves_its_slot_even_if_its_open_step_cannot_be_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ScriptedBatch(cuda_backend(new_graphs(), overlaps=True), None)
    failing, later = follow(sequence_of(prompt_of(5, 1), 8), "[a-m]{30}"), sequence_of(prompt_of(5, 2), 2)
    batch.plan = Plan.parse("copy:1")
    batch.admit([failing])
    batch.step()
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr("selfspec.backends.cuda.masking.Masking.complete", raise_out_of_memory)
        batch.dismiss(failing)
    batch.unread = []
    batch.admit([later])
    batch.run()
    assert later.tokens == plain_tokens(later)


def break_after(count: int) -> Any:
    def process(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if prefix.shape[1] >= count:
            raise RuntimeError("broken on purpose")
        return scores

    return process


def nan_after(count: int) -> Any:
    return lambda prefix, scores: scores * float("nan" if prefix.shape[1] > count else "1")


@torch.inference_mode()
def test_a_request_without_a_possible_token_fails_alone() -> None:
    """Because all tokens are banned, a callable returns NaN, or a callable raises."""
    exit, banned = accurate_exit(), SamplingParams(allowed_token_ids=(5,), banned_token_ids=(5,))
    failing = {
        "not finite (all banned)": sequence_of(prompt_of(5, 1), 4, banned, exit=exit),
        "not finite (NaN)": sequence_of(prompt_of(5, 1), 4, exit=exit, processors=[nan_after(5)]),
        "broken on purpose": sequence_of(prompt_of(5, 1), 4, exit=exit, processors=[break_after(6)]),
    }
    beside = sequence_of(prompt_of(5, 2), 4, SamplingParams(do_sample=True, temperature=0.8), seed=2, exit=exit)
    graphs = new_graphs()
    batch = ScriptedBatch(cuda_backend(graphs, overlaps=True), exit)
    batch.admit([*failing.values(), beside])
    batch.run([Plan.parse("chain:1")])
    for message, sequence in failing.items():
        assert sequence.finish_reason == "error"
        assert message.split(" (")[0] in str(sequence.request.error)
    assert beside.request.error is None and beside.tokens == plain_tokens(beside)
    assert graphs.cache.free_pages == graphs.cache.num_pages - 1


# Drafts and scores of the exit


@torch.inference_mode()
@pytest.mark.parametrize(("family", "layer"), [("qwen2", 0), ("gemma3_text", 1)])  # biases; norms, windows
def test_drafts_at_all_depths_are_those_of_the_reference_backend(family: str, layer: int) -> None:
    """Emitted tokens do not depend on drafts, so other tests cannot see wrong ones: greedy ones, sampled ones, and ones
    with penalties, which count the tokens along a node's path."""
    plan, exit = Plan.parse("tree:2,2,1"), trained_exit(family, layer)
    every = [{}, {"do_sample": True, "temperature": 0.8}, {"frequency_penalty": 2.0, "repetition_penalty": 1.5}]
    drafts, tokens = [], []
    graphs = new_graphs(family)
    for backend in (cuda_backend(graphs), torch_backend(family)):
        sequences = [
            sequence_of(prompt_of(5 + i, i), 9, SamplingParams(**params), seed=i, exit=exit)
            for i, params in enumerate(every)
        ]
        batch = ScriptedBatch(backend, exit)
        batch.admit(sequences)
        batch.step()
        batch.drain()
        batch.fill_exit()
        batch.plan = plan
        if isinstance(backend, CudaBackend):
            batch.step()
            made, _ = backend._captured_step(sequences, plan, exit)
            drafts.append(made.metadata.tokens.view(len(plan) + 1, -1)[:, : len(every)].T.tolist())
        else:
            drafts.append(backend.draft(sequences, plan, exit).tokens.tolist())
            batch.step()
        tokens.append([sequence.tokens for sequence in sequences])
    assert drafts[0] == drafts[1]
    assert tokens[0] == tokens[1]


@torch.inference_mode()
@pytest.mark.parametrize("kernels", [True, False])
def test_a_step_of_a_beam_is_a_step_of_the_tree_that_it_chose(kernels: bool) -> None:
    """Siblings of a beam have the best ranks of their parent, so the tree can be given as nodes. Each of the sequences
    has its own tree; drafted tokens, emitted tokens, and keys and values of all layers are the same."""
    beam, exit = Plan.parse("beam:3,2+copy:1"), trained_exit()
    every = [{}, {"do_sample": True, "temperature": 0.8, "frequency_penalty": 2.0, "repetition_penalty": 1.5}]

    def drafted(plan: Plan, wanted: range) -> tuple[list[Plan], list[list[int]], list[Sequence], Cache]:
        backend = cuda_backend(new_graphs()) if kernels else torch_backend()
        sequences = [sequence_of(prompt_of(5 + i, i), 9, SamplingParams(**every[i]), seed=i, exit=exit) for i in wanted]
        batch = ScriptedBatch(backend, exit)
        batch.admit(sequences)
        batch.plan = plan
        if isinstance(backend, CudaBackend):
            batch.step()
            made, _ = backend._captured_step(sequences, plan, exit)
            trees = [plan.of_sequence(parents) for _, *parents in made.parents.tolist()[: len(wanted)]]
            tokens = made.metadata.tokens.view(len(plan) + 1, -1)[:, : len(wanted)].T.tolist()
        else:
            draft = backend.draft(sequences, plan, exit)
            trees, tokens = [draft.tree(index) for index in range(len(wanted))], draft.tokens.tolist()
            batch.step()
        batch.drain()
        return trees, tokens, sequences, backend.cache

    trees, tokens, sequences, cache = drafted(beam, range(2))
    assert trees[0] != trees[1]
    for index, tree in enumerate(trees):
        assert [len(level) for level in tree.levels] == [2, 3, 2]
        _, (own_tokens,), (own,), own_cache = drafted(tree, range(index, index + 1))
        assert own_tokens == tokens[index]
        assert own.tokens == sequences[index].tokens and own.kv.length == sequences[index].kv.length
        for layer in range(cache.keys.shape[0]):
            for pages, own_pages in ((cache.keys, own_cache.keys), (cache.values, own_cache.values)):
                of_all, alone = (
                    tensor[layer].flatten(0, 1)[[flat_slot(sequence.kv, slot) for slot in range(own.kv.length)]]
                    for tensor, sequence in ((pages, sequences[index]), (own_pages, own))
                )
                torch.testing.assert_close(of_all, alone, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_plain_steps_are_scored_as_by_the_reference_backend() -> None:
    """Sequences that joined at different times have different numbers of unfilled tokens; the token of a step in flight
    is scored too."""
    exit, found = accurate_exit(), []
    for backend in (cuda_backend(new_graphs(), overlaps=True), torch_backend()):
        sampled = SamplingParams(do_sample=True, temperature=1.5)
        sequences = [
            sequence_of(prompt_of(9 - i, i), 20, sampled if i % 2 else None, seed=i, exit=exit) for i in range(4)
        ]
        batch = ScriptedBatch(backend, exit)
        batch.admit(sequences[:3])
        for _ in range(3):
            batch.step()
        batch.admit(sequences[3:])
        for _ in range(2):
            batch.step()
        batch.fill_exit(score=True)
        batch.step()
        batch.drain()
        keys = [exit_keys(backend.cache, sequence, len(sequence.prompt) + 1) for sequence in sequences]
        found.append(([batch.scores[sequence] for sequence in sequences], keys))
    (ours, our_keys), (theirs, their_keys) = found
    torch.testing.assert_close(our_keys, their_keys, atol=5e-4, rtol=5e-4)
    assert [len(right) for right in theirs] == [5, 5, 5, 2]
    assert [len(right) for right in ours] == [6, 6, 6, 2]
    assert [right[: len(expected)] for right, expected in zip(ours, theirs, strict=True)] == theirs
    assert {is_right for right in theirs for is_right in right} == {False, True}


@torch.inference_mode()
def test_prompts_are_scored_as_by_the_reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch with a prompt of one token, which has no position to score, and with a sequence that decodes
    already."""
    for module in (exit_module, torch_prefill, prompt_scoring):
        monkeypatch.setattr(module, "PROMPT_END", END)
    exit, found = replace(accurate_exit(), head_rows=None), []
    ours = [cuda_backend(new_graphs(), overlaps=True) for _ in range(2)]
    for backend, steps in ((ours[0], 0), (ours[1], 1), (torch_backend(), 0)):  # before or after the first step
        if isinstance(backend, TorchBackend):
            backend._scored_positions = END
        running = sequence_of(prompt_of(4, 0), 9, exit=exit)
        batch = ScriptedBatch(backend, exit)
        batch.admit([running])
        batch.step()
        joining = [sequence_of(prompt_of(length, length), 3, exit=exit) for length in (1, 12, 6)]
        batch.admit(joining)
        for _ in range(steps):
            batch.step()
        backend.score_prompts(joining, exit)
        scores = backend.prompt_scores()
        found.append([scores.get(sequence) for sequence in joining])
        batch.run()
        assert [sequence.tokens for sequence in (running, *joining)] == [
            plain_tokens(sequence) for sequence in (running, *joining)
        ]
    *both, (_, *theirs) = found
    assert both == [[None, *((pytest.approx(share), positions) for share, positions in theirs)]] * 2
    assert [positions for _, positions in theirs] == [END, 5] and 0 < theirs[0][0] < 1


def test_domains_are_found_and_prompts_scored_behind_steps_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests together get the tokens of plain decoding and their own domains."""
    for module in (exit_module, torch_prefill, prompt_scoring):
        monkeypatch.setattr(module, "PROMPT_END", END)
    model, texts = decoder(), [prompt_of(9, 1), prompt_of(7, 2)]
    ranks, agreement = {"0": [[0.6, 0.1], [0.5]]}, Spread(mean=0.5, deviation=0.1)
    embeddings = prompt_embeddings(model, new_graphs().cache, texts, 1)
    directions = Router.fit([torch.stack((embedding, 1.01 * embedding)) for embedding in embeddings])
    domains = {
        name: choice_of(
            LAYER, "chain:2", ranks=ranks, prompt_agreement=agreement, centroid=directions.centroids[index].tolist(),
            direction=directions.directions[index].tolist(), offset=float(directions.offsets[index]),
        )
        for index, name in enumerate(("one", "two"))
    }  # fmt: skip
    exit = random_exit(model, LAYER, scale=0.01)
    profile = profile_of(model, domains, router_layer=1).save(tmp_path, [exit])
    rules = Rules(max_step=math.inf, budget=50, budget_refill=1)
    engine = Engine(model, profile=profile, rules=rules, max_batch=SLOTS, kernels=True)
    graphs = engine._graphs
    assert graphs is not None
    engine.scheduler._new_backend = lambda rejection: cuda_backend(graphs, overlaps=True)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    requests = [engine.build_request(text, **options) for text in texts]
    engine.scheduler.waiting.extend(sequence for request in requests for sequence in request.sequences)
    while engine.scheduler.step():
        pass
    for request, name in zip(requests, domains, strict=True):
        (sequence,) = request.sequences
        assert sequence.tokens == plain_tokens(sequence) and sequence.history.drafted
        assert request.drafter is not None and request.policy is not None and request.drafter.reroute is None
        found = engine.drafters.candidates(name, domains[name], request.policy)
        assert request.drafter.candidates is found, "not its own domain"
        assert sequence.skill.expected != Skill().expected, "its prompt was not scored"


# Times


@torch.inference_mode()
def test_a_steps_time_is_a_cost_sample_only_if_it_was_launched_right_after_another_one() -> None:
    exit, steps = accurate_exit(), []
    backend = cuda_backend(new_graphs(), overlaps=True)
    batch, launch = ScriptedBatch(backend, exit), backend.launch

    def recorded(*args: Any) -> Any:
        step = launch(*args)
        steps.append(("drafting" if len(step.record.plan) else "plain", step.is_cost_sample))
        return step

    backend.launch = recorded  # type: ignore[method-assign]
    batch.admit([sequence_of(prompt_of(4, 1), 30, exit=exit)])
    batch.step()  # launches two steps: the second one while the first is in flight
    batch.step()
    batch.admit([sequence_of(prompt_of(4, 2), 30, exit=exit)])
    batch.step()
    batch.plan = Plan.parse("chain:1")
    batch.step()  # fills the exit's KV first, which is part of the cost of drafting
    batch.plan = NONE
    batch.step()
    batch.fill_exit()  # not part of the cost of a plain step
    batch.step()

    def capture(_: Any, launches: Any) -> Any:
        backend.graphs.captured.captures += 1
        return launches

    backend.graphs.captured._capture = capture  # type: ignore[method-assign]
    batch.plan = Plan.parse("copy:1")
    batch.step()  # as on a GPU: captures its graphs first
    batch.step()
    assert steps == [
        ("plain", False), ("plain", True), ("plain", True), ("plain", False), ("drafting", True), ("plain", True),
        ("plain", False), ("drafting", False), ("drafting", True),
    ]  # fmt: skip


@torch.inference_mode()
def test_the_time_of_a_capture_is_told_for_exactly_the_steps_that_are_captured_next() -> None:
    """While sequences of different options and lengths, with grammars or processors, join, before they have a slot, and
    leave."""
    backend, dice, told = cuda_backend(new_graphs(), overlaps=True), random.Random(1), []
    captured, exit = backend.graphs.captured, accurate_exit()
    batch = ScriptedBatch(backend, exit)

    def capture(_: Any, launches: Any) -> Any:  # as on a GPU
        captured.captures += 1
        return launches

    def launch(step: Any, *args: Any) -> Any:
        steps, seconds = captured_steps(), backend.capture_s(step, args[0].plan, args[1])
        launched = launches(step, *args)
        told.append((seconds > 0, captured_steps() - steps))
        return launched

    def captured_steps() -> int:
        return sum(key[0] == "step" for key in captured.entries)

    captured._capture, launches = capture, backend.launch  # type: ignore[method-assign]
    backend.launch = launch  # type: ignore[method-assign]
    for number in range(12):
        event, kind = dice.random(), dice.choice(["plain", "plain", "grammar", "processor"])
        if len(batch.running) < 2 or (event < 0.4 and len(batch.running) < SLOTS):
            processors = [penalise_last] if kind == "processor" else []
            params, length = SamplingParams(**dice.choice(PARAMS)), dice.choice([30, 120])
            sequence = sequence_of(prompt_of(4, number), length, params, exit=exit, processors=processors)
            batch.admit([follow(sequence, "[a-z]+") if kind == "grammar" else sequence])
        elif event < 0.7:
            batch.drain()
            batch.dismiss(dice.choice(batch.running))
        batch.plan = Plan.parse(dice.choice(["none", "chain:1", "copy:1"]))
        batch.step()
        batch.dismiss_finished()
    assert told[0] == (False, 1)  # the first capture: how long one takes is not known yet
    assert set(told[1:]) == {(False, 0), (True, 1)}


def test_steps_are_timed_by_what_they_compute_to_choose_tokens() -> None:
    """A captured step that truncates in any way has costs of its own; it stays in use when those that need it leave."""
    batch = ScriptedBatch(cuda_backend(new_graphs()), accurate_exit())
    settings: list[dict[str, Any]] = [{}, {"do_sample": True, "top_k": 50}, {"do_sample": True, "top_p": 0.9}]
    made = [sequence_of(prompt_of(5, n), 8, SamplingParams(**each), seed=n) for n, each in enumerate(settings)]
    kinds = []
    for sequence in made:
        batch.admit([sequence])
        kinds.append(batch._cost_kind())
        batch.step()
    batch.dismiss(made[2])
    assert len({*kinds}) == 3 and batch._cost_kind() == kinds[2]
