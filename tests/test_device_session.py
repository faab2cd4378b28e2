"""Sessions on the device's kernels, in Triton's interpreter: the tokens and accounts of PyTorch sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import islice, product
from typing import Any
from unittest import mock

import pytest
import torch

from selfspec import Engine, Rules
from selfspec.backends import torch_backend as runtime
from selfspec.backends.cuda import exit_scoring as device_shadow
from selfspec.backends.cuda import graphs as machine_module
from selfspec.backends.cuda import prefill as device_prefill
from selfspec.backends.cuda import prompt_scoring as device_judge
from selfspec.backends.cuda import session as device_session
from selfspec.backends.cuda import short_prefill as device_prompts
from selfspec.backends.cuda.decoder import Seats
from selfspec.backends.cuda.graphs import head_capacity
from selfspec.backends.cuda.slot_move import Move
from selfspec.backends.cuda.step import Cycle, Drawing
from selfspec.backends.torch_backend import Session
from selfspec.cache.kv_cache import flat_slot
from selfspec.governor.acceptance import Acceptance
from selfspec.governor.candidates import Ladder
from selfspec.governor.costs import Costs, guessed_cost
from selfspec.governor.governor import MEASURING, Governor, Watch
from selfspec.governor.rules import Policy
from selfspec.kernels import final_norm as know
from selfspec.kernels.final_norm import places_for
from selfspec.profiles.router import marks_of
from selfspec.sampling import Sampling
from selfspec.sequence import Row
from selfspec.speculation import exit_scoring as shadow
from selfspec.speculation.draft_tree import Draft
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import NONE, Plan
from tests.profiles import random_exit, random_rows
from tests.scripted import endless
from tests.tiny import FAMILIES, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter, where there is no GPU")

LAYER = 1
CONTEXT, LONG_CONTEXT = 256, 600  # the shorter one where texts are short: fewer programs are interpreted
GREEDY = {"do_sample": False, "pad_token_id": 0}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 4, "pad_token_id": 0}


@pytest.fixture(autouse=True, scope="module")
def _few_places_wait() -> Iterator[None]:
    """Passes over what waits are interpreted here, and take as long as there are places."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (know, device_shadow, device_session):
            patch.setattr(module, "places_for", lambda sequences: 8)
        yield


@cache
def engines(family: str, context: int = CONTEXT) -> tuple[Engine, Engine]:
    """One model behind kernels and behind PyTorch, with an exit that has everything an exit can have."""
    model = endless(
        tiny_model(family, dtype=torch.float32, num_hidden_layers=2, head_dim=16, max_position_embeddings=context)
    )
    pair = Engine.from_model(model, kernels=True), Engine.from_model(model)
    trained = random_exit(pair[0].model, LAYER)
    trimmed = replace(trained, head_rows=random_rows(40))
    for engine in pair:
        engine.drafters.exits = {LAYER: Exit(trimmed.model, LAYER, trimmed.norm, trimmed.block, trimmed.head_rows)}
    return pair


def prompts(count: int) -> torch.Tensor:
    return torch.randint(3, 100, (count, 5), generator=torch.Generator().manual_seed(7))


def generate(engine: Engine, plan: str, batch: int, count: int, **settings: Any) -> Any:
    return engine.generate(
        prompts(batch), speculative_decoding="force", plan=plan, exit_layer=LAYER, max_new_tokens=count,
        return_dict_in_generate=True, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafting", [False, True])
def test_prompts_of_any_length_leave_what_pytorch_leaves(family: str, drafting: bool) -> None:
    settings = {"speculative_decoding": "force" if drafting else False, "plan": "chain:1" if drafting else None}
    for length in (2, 33, 34, 200, 520):
        prompt = torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        found = []
        for engine in engines(family, LONG_CONTEXT):
            session = open_session(engine, prompt, {**settings, "exit_layer": LAYER, "max_length": 512 + 16})
            session.prefill()
            row = session.rows[0]
            flat = engine.cache.keys.flatten(1, 2), engine.cache.values.flatten(1, 2)
            slots = [flat_slot(row.sequence, slot) for slot in range(length - 1)]
            layers = slice(None) if drafting else slice(engine.model.config.num_layers)
            found.append([*(tensor[layers, slots] for tensor in flat), *([row.known] if drafting else [])])
            session.close()
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


def test_marks_are_those_of_routing_and_leave_the_cache_as_it_was() -> None:
    engine, _ = engines("llama", LONG_CONTEXT)
    machine = engine._machine
    assert machine is not None
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in (300, 1, 31, 33, 100, 32)]
    held = engine.cache.num_pages - engine.cache.free_pages
    found = machine.marks(texts, LAYER)
    torch.testing.assert_close(found, marks_of(engine.model, engine.cache, texts, LAYER), atol=1e-5, rtol=1e-5)
    assert engine.cache.num_pages - engine.cache.free_pages == held


def test_sequences_take_the_first_seats_and_the_others_are_nobodys() -> None:
    seats = Seats(4, 3, torch.device("cpu"))
    sampling = Sampling(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    seats.bases.fill_(3)
    seats.seat([2**40 + 1, 7], [10, 20], [30, 40], [0, 1], sampling)
    fields = {name: getattr(seats, name).tolist() for name in ("seeds", "lengths", "pending", "copies", "active")}
    assert fields == {
        "seeds": [2**40 + 1, 7, 0, 0],
        "lengths": [10, 20, 0, 0],
        "pending": [30, 40, 0, 0],
        "copies": [0, 1, 0, 0],
        "active": [1, 1, 0, 0],
    }
    numbers = [getattr(seats, name).item() for name in ("temperature", "top_k", "top_p", "min_p")]
    assert numbers == pytest.approx([0.7, 5, 0.9, 0.1])
    for count in (1, 2, 3, 16):  # one compiled kernel for all: Triton asks whether addresses are multiples of 16
        fields = [field for field in vars(Seats(count, 3, torch.device("cpu"))).values() if torch.is_tensor(field)]
        assert len(fields) == 13 and not any(field.data_ptr() % 16 for field in fields)
    seats.empty(0, idle_page=1)
    assert (seats.active.tolist(), seats.lengths.tolist(), seats.seeds[1].item()) == ([0, 1, 0, 0], [0, 20, 0, 0], 7)
    assert seats.page_table.tolist() == [[1, 1, 1], *[[0, 0, 0]] * 3]
    seats.seat([1, 2, 3], [10, 20, 30], [40, 50, 60], [0, 1, 2], sampling)
    for place, left in ((1, [10, 0, 30, 0]), (0, [0, 0, 30, 0])):  # another one, and one that was emptied before
        seats.empty(place, idle_page=2)
        assert seats.lengths.tolist() == left
    assert seats.page_table.tolist() == [[2, 2, 2], [2, 2, 2], [0, 0, 0], [0, 0, 0]]
    seats.vacate(2)
    assert not seats.active.any() and not seats.lengths.any() and (seats.page_table == 2).all()
    assert seats.temperature.item() == pytest.approx(0.7)


def test_who_moves_takes_along_where_it_stands_and_how_it_draws() -> None:
    before, after = (Seats(count, 3, torch.device("cpu")) for count in (8, 4))
    before.seat([2**40 + 1, 2, 3], [10, 20, 30], [11, 21, 31], [0, 1, 2], Sampling(do_sample=True, temperature=0.7))
    before.waiting[2] = 5
    before.page_table[:3] = torch.tensor([[4, 5, 6], [7, 8, 9], [10, 11, 12]])
    after.lengths.fill_(99)  # of whoever sat there before
    for seats in (after, before):  # to other seats, then up on the same ones
        move = Move(before, seats, None, None, idle_page=3)
        move.load([2, 0, 1])
        move.load([2, 0])  # only what was loaded last counts
        move.launch()
        names = ("seeds", "lengths", "pending", "copies", "active", "waiting")
        taken = [getattr(seats, name)[:2].tolist() for name in names]
        assert taken == [[3, 2**40 + 1], [30, 10], [31, 11], [2, 0], [1, 1], [5, 0]]
        assert not any(getattr(seats, name)[2:].any() for name in names)
        assert seats.page_table.tolist() == [[10, 11, 12], [4, 5, 6], *[[3, 3, 3]] * (seats.count - 2)]
        assert seats.temperature.item() == pytest.approx(0.7)


def test_warming_up_prepares_every_size_that_a_batch_may_shrink_to() -> None:
    ours, theirs = engines("llama")
    assert (ours.warmup(3), ours.warmup(1), theirs.warmup(3)) == (3, 1, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_gives_the_tokens_of_pytorch(family: str) -> None:
    ours, theirs = engines(family)
    expected = generate(theirs, "tree:2,1", 1, 2, **GREEDY)
    assert torch.equal(generate(ours, "tree:2,1", 1, 2, **GREEDY).sequences, expected.sequences)


def test_a_stream_tells_of_every_token_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as it is there."""
    engine, _ = engines("llama")
    monkeypatch.setattr(engine, "tokenizer", tiny_tokenizer())
    settings = {"speculative_decoding": "force", "plan": "chain:1", "exit_layer": LAYER, "max_new_tokens": 3, **GREEDY}
    with engine.stream("the x and", **settings) as stream:
        origins = [origin for _, origin in stream.marked()]
    assert origins == engine.complete("the x and", **settings).origins
    assert len(origins) == 3


@pytest.mark.parametrize("plan", ["none", "tree:2,1"])
def test_a_batch_draws_the_tokens_of_pytorch(plan: str) -> None:
    """Three rows on four seats, sampled."""
    ours, theirs = engines("llama")
    expected = generate(theirs, plan, 3, 2, **SAMPLED)
    assert torch.equal(generate(ours, plan, 3, 2, **SAMPLED).sequences, expected.sequences)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 2, "eos_token_id": 5},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_cuts_and_penalties_draw_the_tokens_of_pytorch(settings: dict[str, Any]) -> None:
    ours, theirs = engines("llama")
    expected = generate(theirs, "chain:1", 1, 3, **SAMPLED | settings)
    assert torch.equal(generate(ours, "chain:1", 1, 3, **SAMPLED | settings).sequences, expected.sequences)


def test_accounts_are_those_of_pytorch() -> None:
    ours, theirs = engines("llama")
    rows = [generate(engine, "tree:3", 1, 4, **GREEDY).stats[0] for engine in (ours, theirs)]
    assert [row.new_tokens for row in rows] == [4, 4]
    told = ("cycles", "plan", "accepted", "accepted_by_depth", "changes")
    assert [getattr(rows[0], name) for name in told] == [getattr(rows[1], name) for name in told]
    assert rows[0].plan == "tree:3" and rows[0].drafted > 0


def test_rows_that_end_leave_their_seats_and_all_pages_come_back() -> None:
    ours, theirs = engines("llama")
    ids = prompts(3)
    plain: Any = theirs.generate(ids, max_new_tokens=4, speculative_decoding=False, **GREEDY)
    end = int(plain[1, ids.shape[1]])  # the second row ends with its first token
    settings = {"eos_token_id": end, "max_new_tokens": 4, **GREEDY}
    expected = theirs.generate(ids, speculative_decoding=False, **settings)
    assert torch.equal(ours.generate(ids, speculative_decoding=False, **settings), expected)
    assert ours.cache.free_pages == ours.cache.num_pages - 1  # empty seats keep a page to write to


@pytest.mark.parametrize("count, moved", [(2, [(2, 1)]), (4, [(4, 2)])])
def test_rows_go_on_behind_cycles_in_flight_and_draft_what_pytorch_drafts(
    count: int, moved: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two rows ends, and the other moves up before anybody has looked. Of four, three stay where they are when
    the first has ended, and two move up when the second has; meanwhile they need more pages. Tokens do not depend on
    what an exit recalls, but drafts do; plain cycles are among them."""
    monkeypatch.setattr(device_session, "AHEAD", 0)
    plans = [Plan.parse(plan) for plan in ("chain:1", "none", "chain:1", "none", "chain:1")]
    monkeypatch.setattr(Session, "choose_plan", lambda self, *_, **__: (plans[min(self.turn, len(plans) - 1)], None))
    monkeypatch.setattr(Session, "turn", 0, raising=False)
    moves: list[tuple[int, int]] = []
    move_up = device_session.DeviceSession._move_up
    monkeypatch.setattr(
        device_session.DeviceSession,
        "_move_up",
        lambda self, seats, rows: (moves.append((len(self._seated), seats.count)), move_up(self, seats, rows)),
    )
    ours, theirs = engines("llama")
    assert ours._machine is not None
    with torch.inference_mode():  # what others have left there is of no use to whoever moves up
        for (seats, _), head in ours._machine._heads.items():
            if seats < count:
                head.tokens.zero_()
                head.count.fill_(1)
    free = followed(theirs, count, (), len(plans), monkeypatch)
    ends = [own_token(free, row=0)]
    expected, found = (followed(engine, count, ends, len(plans), monkeypatch) for engine in (theirs, ours))
    assert [row.finish_reason for row in expected] == {2: ["stop", None], 4: ["stop", "length", None, None]}[count]
    assert moves == moved
    for one, other in zip(found, expected, strict=True):
        # Launched ahead, a cycle may have drafted for a text that had ended.
        assert one.drafts[: len(other.drafts)] == other.drafts
        assert (one.tokens, one.origins, one.outcomes) == (other.tokens, other.origins, other.outcomes)
        torch.testing.assert_close(one.exit_keys, other.exit_keys, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("disturbed", [False, True])
def test_what_an_exit_did_not_see_of_plain_cycles_is_there_when_it_drafts(
    disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More plain cycles than can wait, few, and one; others may need the seats meanwhile."""
    monkeypatch.setattr(device_session, "places_for", lambda sequences: 3)
    plans = [Plan.parse(plan) for plan in ["none"] * 5 + ["chain:1", "none", "none", "chain:1", "none", "chain:1"]]
    monkeypatch.setattr(Session, "choose_plan", lambda self, *_, **__: (plans[min(self.turn, len(plans) - 1)], None))
    monkeypatch.setattr(Session, "turn", 0, raising=False)

    def disturb(engine: Engine) -> None:
        if disturbed and engine._machine is not None:
            with torch.inference_mode():
                engine._machine.vacate(engine._machine.seats(2))

    ours, theirs = engines("llama")
    expected, found = (followed(engine, 2, (), len(plans), monkeypatch, disturb) for engine in (theirs, ours))
    for one, other in zip(found, expected, strict=True):
        assert one.drafts[: len(other.drafts)] == other.drafts
        assert one.tokens == other.tokens
        torch.testing.assert_close(one.exit_keys, other.exit_keys, atol=2e-4, rtol=2e-4)


def exit_keys(engine: Engine, row: Row) -> torch.Tensor:
    slots = [flat_slot(row.sequence, slot) for slot in range(row.sequence.length)]
    return engine.cache.keys[engine.cache.exit_layer_index].flatten(0, 1)[slots]


def plain_session(engine: Engine, rows: list[Row], **sampling: Any) -> Session:
    """One with an exit that drafts nothing."""
    drawn = Sampling(do_sample=True, temperature=0.8, **sampling)
    policy = Policy(Rules(), drawn, mode="force", plan=Plan.parse("chain:2"))
    return engine.open(rows, drawn, policy, engine.drafters.exits[LAYER])


def plain_rows(count: int, seed: int = 1) -> list[Row]:
    return [Row(prompt, seed=seed, copy=0, max_length=100) for prompt in prompts(count).repeat(1, 12).tolist()]


def test_where_the_host_chooses_others_on_the_same_seats_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an exit recalls is a text's own, whatever the buffers that it was found in are used for next."""
    monkeypatch.setattr(Session, "choose_plan", lambda *_, **__: (Plan(), None))
    engine, _ = engines("llama")
    keys = []
    for interleaved in (False, True):
        sessions = [plain_session(engine, plain_rows(1, seed), repetition_penalty=1.3) for seed in (1, 2)]
        sessions[1].rows[0].prompt[:] = [token % 90 + 5 for token in sessions[1].rows[0].prompt]
        sessions[1].rows[0].tokens[:] = sessions[1].rows[0].prompt
        one, other = (session.run() for session in sessions)
        for _ in range(3):
            next(one)
            if interleaved:
                next(other)
        keys.append(exit_keys(engine, sessions[0].rows[0]).clone())
        one.close(), other.close()
    torch.testing.assert_close(keys[0], keys[1])


def test_where_pages_ahead_cannot_be_had_those_needed_now_are_enough() -> None:
    ours, theirs = engines("llama")
    settings = {"speculative_decoding": False, "max_new_tokens": 6, **GREEDY}
    prompt = torch.randint(3, 100, (1, 60), generator=torch.Generator().manual_seed(3))
    tight = Engine(ours.model, kernels=True, max_length=384, max_batch=1)
    assert tight.cache.max_pages is not None
    tight.cache.reserve(tight.cache.open(), (tight.cache.max_pages - 3) * 64)  # leaves two, and one for empty seats
    assert torch.equal(tight.generate(prompt, **settings), theirs.generate(prompt, **settings))


def test_where_the_host_chooses_an_exit_misses_nothing_of_plain_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "choose_plan", lambda *_, **__: (Plan(), None))
    found = []
    for engine in engines("llama"):
        rows = plain_rows(1)
        session = plain_session(engine, rows, repetition_penalty=1.3)
        running = session.run()
        for _ in range(4):
            next(running)
        if engine._machine is None:
            with torch.inference_mode():
                session.catch_up(rows, score=False)
        found.append(exit_keys(engine, rows[0]).clone())
        running.close()
    torch.testing.assert_close(*found, atol=2e-4, rtol=2e-4)


def test_seats_that_nobody_sits_on_write_to_no_page_of_anybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "choose_plan", lambda *_, **__: (Plan(), None))
    engine = Engine(engines("llama")[0].model, kernels=True)
    engine.drafters.exits = engines("llama")[0].drafters.exits
    other = engine.cache.open()
    engine.cache.reserve(other, 64)
    assert engine._machine is not None and engine._machine.idle_page() == other.pages[0] + 1
    engine.cache.keys[:, other.pages[0]] = 5.0
    session = plain_session(engine, plain_rows(3))
    running = session.run()
    for _ in range(3):
        next(running)
    assert isinstance(session, device_session.DeviceSession) and session._waiting
    with torch.inference_mode():
        session.rise()
    running.close()
    assert (engine.cache.keys[:, other.pages[0]] == 5.0).all()


def test_preparing_cycles_leaves_alone_what_waits_for_another_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "choose_plan", lambda *_, **__: (Plan(), None))
    engine, found = engines("llama")[0], []
    exit = engine.drafters.exits[LAYER]
    assert exit.block is not None and exit.block.recall is not None and engine._machine is not None
    recall = 3 * exit.block.recall + 1
    other = Exit(engine.model, LAYER, exit.norm, replace(exit.block, recall=recall), exit.head_rows)
    for disturbed in (False, True):
        rows = plain_rows(1)
        session = plain_session(engine, rows)
        engine._machine.prepare(1, Plan(), other, session.sampling, 100)
        running = session.run()
        for _ in range(3):
            next(running)
        if disturbed:
            engine._machine.prepare(1, Plan(), other, session.sampling, 100)
        assert isinstance(session, device_session.DeviceSession)
        with torch.inference_mode():
            session.rise()
        found.append(exit_keys(engine, rows[0]).clone())
        running.close()
    assert torch.equal(*found)


class Followed(Row):
    """A row of which more is kept: its drafted trees, root first, and the keys of the exit's block."""

    drafts: list[list[int]]
    exit_keys: torch.Tensor


def followed(
    engine: Engine,
    count: int,
    ends: Any,
    cycles: int,
    monkeypatch: pytest.MonkeyPatch,
    between: Callable[[Engine], None] = lambda engine: None,
) -> list[Followed]:
    """Some rows after some cycles."""
    sampling = Sampling(do_sample=True, temperature=0.8, eos_token_ids=tuple(ends))
    long = prompts(count).repeat(1, 12).tolist()  # almost a page
    ends_at = [100, 65 if count > 2 else 100, 100, 100]
    rows = [Followed(prompt, seed=i + 1, copy=0, max_length=ends_at[i]) for i, prompt in enumerate(long)]
    for row in rows:
        row.drafts = []
    policy = Policy(Rules(), sampling, mode="force", plan=Plan.parse("chain:2"))
    exit = engine.drafters.exits[LAYER]
    session = engine.open(rows, sampling, policy, exit)
    if engine._machine is not None:  # what has to be captured first is not sent ahead
        for seats, plan in product((count, count // 2), ("none", "chain:1")):
            engine._machine.prepare(seats, Plan.parse(plan), exit, sampling, 100)
    of_pytorch, of_kernels = Session.draft, Cycle.draft

    def drafting(self: Session, rows: list[Row], plan: Plan) -> Draft:
        made = of_pytorch(self, rows, plan)
        note({row.seed - 1: tree for row, tree in zip(rows, made.tokens.tolist(), strict=True)})
        return made

    def drafting_by_kernels(cycle: Cycle) -> None:
        of_kernels(cycle)
        sitting = zip(cycle.seats.active.tolist(), cycle.seats.seeds.tolist(), strict=True)
        trees = cycle.places.tokens.view(-1, cycle.seats.count).T.tolist()
        note({seed - 1: tree for (active, seed), tree in zip(sitting, trees, strict=True) if active})

    def note(trees: dict[int, list[int]]) -> None:
        session.turn += 1  # type: ignore[attr-defined]
        for row, tree in trees.items():
            rows[row].drafts.append(tree)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "draft", drafting)
        patch.setattr(Cycle, "draft", drafting_by_kernels)
        running = session.run()
        for _ in range(cycles):
            next(running)
            between(engine)
        for row in rows:
            row.exit_keys = exit_keys(engine, row)
        running.close()
    return rows


def own_token(rows: list[Followed], row: int) -> int:
    """A new token of one row that no other has."""
    new = [of.tokens[len(of.prompt) :] for of in rows]
    elsewhere = {token for other, tokens in enumerate(new) for token in tokens if other != row}
    return next(token for token in new[row] if token not in elsewhere)


def test_a_cache_that_moves_while_a_cycle_is_in_flight_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = engines("llama")
    monkeypatch.setattr(device_session, "AHEAD", 0)
    prompt = torch.randint(3, 100, (1, 60), generator=torch.Generator().manual_seed(3))
    settings = {"speculative_decoding": False, "max_new_tokens": 6, **GREEDY}
    session = open_session(ours, prompt[0].tolist(), settings)
    running, storages, hoard = session.run(), set(), ours.cache.open()
    next(running)
    ours.cache.reserve(hoard, ours.cache.free_pages * 64)  # the next page must come from a larger cache
    storages.add(ours.cache.keys.data_ptr())
    for _ in running:
        storages.add(ours.cache.keys.data_ptr())
    ours.cache.close(hoard)
    assert len(storages) > 1
    assert session.rows[0].tokens == theirs.generate(prompt, **settings)[0].tolist()


def test_a_batch_that_shrank_is_not_disturbed_by_who_takes_its_old_seats() -> None:
    """Three rows on four seats become two on two; then others sit down on the four, with a cycle in flight."""
    ours, theirs = engines("llama")
    ids = prompts(3)
    plain: Any = theirs.generate(ids, max_new_tokens=6, speculative_decoding=False, **GREEDY)
    settings = {"speculative_decoding": False, "max_new_tokens": 6, "eos_token_id": int(plain[1, 5]), **GREEDY}
    expected: Any = theirs.generate(ids, **settings)
    first, second = open_session(ours, ids.tolist(), settings), open_session(ours, prompts(4).tolist(), settings)
    running, others = first.run(), second.run()
    for _ in range(3):
        next(running)
    next(others)
    for _ in running:
        pass
    others.close()
    for row, tokens in zip(first.rows, expected.tolist(), strict=True):
        assert row.tokens == tokens[: len(row.tokens)]


@torch.inference_mode()
def test_a_cycle_can_be_captured_before_anyone_sits() -> None:
    ours, _ = engines("llama")
    machine, plan, exit = ours._machine, Plan.parse("tree:2,1"), ours.drafters.exits[LAYER]
    assert machine is not None
    machine.vacate(machine.seats(1))  # whoever was there before
    machine.prepare(1, plan, exit, Sampling(), 64)
    _, cycle = machine.cycle(machine.seats(1), plan, exit, Drawing(), 64)
    cycle.launch()
    assert (cycle.places.tokens >= 0).all()
    assert not cycle.report[:, 0].any()


def test_two_streams_take_turns_on_the_same_seats() -> None:
    ours, theirs = engines("llama")
    settings = {"speculative_decoding": "force", "plan": "chain:1", "exit_layer": LAYER, "max_new_tokens": 4, **GREEDY}
    both = prompts(2)
    expected = [theirs.generate(both[i : i + 1], **settings)[0] for i in range(2)]
    sessions = [open_session(ours, both[i].tolist(), settings) for i in range(2)]
    running = [session.run() for session in sessions]
    while running:
        running = [run for run in running if next(run, "over") != "over"]
    assert [session.rows[0].tokens for session in sessions] == [tokens.tolist() for tokens in expected]


def open_session(engine: Engine, prompt: list[int] | list[list[int]], settings: dict[str, Any]) -> Session:
    """A session of `generate` that the caller runs."""
    sessions: list[Session] = []
    build = engine._session

    def keep(*args: Any) -> Session:
        sessions.append(build(*args))
        raise StopIteration

    with mock.patch.object(engine, "_session", keep), pytest.raises(StopIteration):
        engine.generate(torch.tensor(prompt).view(-1, torch.tensor(prompt).shape[-1]), **settings)
    return sessions[0]


def test_a_model_the_kernels_cannot_run_is_refused_where_they_are_asked_for() -> None:
    with pytest.raises(ValueError, match="kernels need"):
        Engine.from_model(tiny_model("llama"), kernels=True)  # float64


# Under a governor


def governed(engine: Engine, prompts: list[list[int]], new_tokens: int, settings: dict[str, Any]) -> Session:
    """A session with a governor that has its exit scored after every three tokens."""
    sampling = Sampling(**{"do_sample": False, **settings})
    guess = guessed_cost(LAYER, 2)
    ladder = Ladder(Acceptance([[0.5, 0.1]]), {16: guess}, LAYER, 4, widest=40)
    rules = Rules(shadow_tokens=3 if len(prompts) == 1 else 6)  # of a few rows half as many
    governor = Governor(ladder, Costs(), rules, usual_agreement=(0.5, 0.1))
    rows = [Row(prompt, seed=4, copy=0, max_length=len(prompt) + new_tokens) for prompt in prompts]
    policy = Policy(Rules(), sampling)
    return engine.open(rows, sampling, policy, engine.drafters.exits[LAYER], governor=governor)


@pytest.mark.parametrize(("seats", "places"), [(1, 32), (2, 32), (4, 16), (8, 8), (16, 4), (32, 4)])
def test_of_many_texts_some_places_are_scored(seats: int, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_shadow, "places_for", places_for)
    assert device_shadow.scored_places(seats) == places


def scores_told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What governors are told: the ranks in one text, and of how many drafts."""
    scores: list[tuple[int, ...]] = []

    def remember(self: Governor, watches: list[Watch], ranks: list[list[int]], offered: int) -> None:
        assert len(watches) == len(ranks)
        scores.extend((*of_text, offered) for of_text in ranks)

    monkeypatch.setattr(Governor, "scored", remember)
    return scores


def test_what_has_not_led_to_drafting_is_looked_at_less_often_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "SELDOM", 6)
    engine, _ = engines("llama")
    session = governed(engine, [random_rows(9, seed=3).tolist()], 40, {})

    def choose(
        self: Governor, watches: object, context: int, in_flight: object, left: object
    ) -> tuple[Plan, str | None]:
        cycle = len(session.rows[0].turns) + (in_flight is not None)
        return (Plan.parse("chain:1"), None) if cycle == 10 else (Plan(), "goodput")

    monkeypatch.setattr(Governor, "choose", choose)
    seen: list[int] = []
    monkeypatch.setattr(session, "_learn_scores", lambda scores: seen.append(len(session.rows[0].turns)))
    for _ in islice(session.run(), 15):
        pass
    assert [place - 3 for place in seen] == [0, 6, 11], "after three cycles, six more, and three again"


@pytest.mark.parametrize("enough", [64, 8])
def test_plain_cycles_score_the_exit_as_pytorch_does(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At all places or, where fewer rows are enough, at the oldest of each text; one seat is nobody's."""
    monkeypatch.setattr(Governor, "choose", lambda *_: (Plan(), "goodput"))
    monkeypatch.setattr(device_shadow, "_FEWEST", 1)
    monkeypatch.setattr(device_shadow, "_ENOUGH", enough)
    monkeypatch.setattr(runtime, "SELDOM", 3)
    monkeypatch.setattr(runtime.Session, "ease", 1)
    scores = scores_told(monkeypatch)
    texts, found = [random_rows(9, seed=seed).tolist() for seed in (1, 2, 3)], []
    ours, theirs = engines("llama")
    fresh = Engine(ours.model, kernels=True)  # which has not thought of shadows yet
    fresh.drafters.exits = ours.drafters.exits
    for engine in (fresh, theirs):
        scores.clear()
        session = governed(engine, texts, 8, {"do_sample": True, "temperature": 0.8})
        keys = []
        for _ in session.run():
            if session.rows[0].new_tokens == 7:  # six of them waited, and have been seen
                keys = [exit_keys(engine, row)[:14].clone() for row in session.rows]
        found.append((list(scores), [row.tokens for row in session.rows], keys))
    (of_kernels, our_tokens, our_keys), (of_pytorch, their_tokens, their_keys) = found
    assert our_tokens == their_tokens
    assert [len(ranks) for *ranks, _ in of_pytorch] == [3] * 6  # twice for each text
    count = min(3, enough // 4)
    assert of_kernels == [(*(int(rank > 0) for rank in ranks[:count]), 1) for *ranks, _ in of_pytorch]
    torch.testing.assert_close(our_keys, their_keys, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("short", "chunk", "trained"), [(24, 512, True), (0, 16, True), (0, 512, False)])
def test_prompts_are_judged_as_pytorch_judges_them(
    short: int, chunk: int, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way they went, in however many chunks, and whoever sits beside them."""
    monkeypatch.setattr(Governor, "would_draft", lambda *_: True)
    monkeypatch.setattr(shadow, "FEW", 12)
    monkeypatch.setattr(runtime, "PREFILL_CHUNK", chunk)
    for name in ("STRETCH", "SHORTEST"):  # interpreted, longer ones take long
        monkeypatch.setattr(device_prompts, name, 8)
    for module in (shadow, device_judge, device_prefill, device_prompts, device_session):
        monkeypatch.setattr(module, "PROMPT_END", 12)
    shares: dict[int, tuple[float, int]] = {}
    monkeypatch.setattr(
        Watch, "learn_prompt", lambda self, share, places, *_: shares.update({id(self): (share, places)})
    )
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in (33, 2, 20)]
    texts = texts[1:] if short else texts
    ours, theirs = engines("llama")
    found, fresh = [], Engine(ours.model, kernels=True)
    assert fresh._machine is not None
    fresh._machine.short_prompt = short
    exit = ours.drafters.exits[LAYER]
    whole = Exit(exit.model, LAYER, exit.norm, exit.block) if trained else Exit(exit.model, LAYER)
    for engine, batches in ((fresh, [texts, texts[::-1]]), (theirs, [[text] for text in texts])):
        with mock.patch.dict(engine.drafters.exits, {LAYER: whole}):
            for batch in batches:
                shares.clear()
                session = governed(engine, batch, 2, {})
                session.prefill()
                if isinstance(session, device_session.DeviceSession):
                    session._learn_prompts()  # as the first cycle would
                session.close()
                found.append([shares[id(row.watch)] for row in session.rows])
    together, backwards, *of_pytorch = found
    expected = [share for (share,) in of_pytorch]
    assert [places for _, places in expected][-2:] == [1, 12] and len({share for share, _ in expected}) > 1
    assert together == backwards[::-1] == [pytest.approx(share) for share in expected]


def test_what_judges_prompts_is_captured_for_each_exit_and_reach_before_the_first_request() -> None:
    ours, _ = engines("llama", LONG_CONTEXT)
    engine = Engine(ours.model, kernels=True)
    machine, exit = engine._machine, ours.drafters.exits[LAYER]
    assert machine is not None
    other = random_exit(engine.model, LAYER)
    with mock.patch.object(machine_module, "SHORTEST_REACH", 64):
        machine.prepare(1, NONE, exit, Sampling(do_sample=False), 100, judged=True)
        held = len(machine._passes)
        judge, seats = machine.judge(machine.seats(1), exit, 100), machine.seats(1)
        assert len(machine._passes) == held, "captured before"
        assert judge[0] is machine.judge(seats, replace(exit, head_rows=None), 100)[0]
        assert judge[0].fused.ranges != machine.judge(seats, exit, 600)[0].fused.ranges
        assert judge[0] is not machine.judge(seats, other, 100)[0]
        assert judge[0] is not machine.judge(machine.seats(2), exit, 100)[0]


def test_judging_prompts_stores_nothing() -> None:
    engine, _ = engines("llama")
    session = governed(engine, [random_rows(20, seed=1).tolist()] * 2, 9, {})
    kept: list[torch.Tensor] = []
    judge = device_session.DeviceSession._judge

    def noting(self: Any, seats: Seats) -> None:
        kept.extend(tensor.clone() for tensor in (engine.cache.keys, engine.cache.values))
        judge(self, seats)

    with mock.patch.object(device_session.DeviceSession, "_judge", noting):
        session.prefill()
    assert torch.equal(engine.cache.keys, kept[0]) and torch.equal(engine.cache.values, kept[1])
    session.close()


def test_a_governed_request_gives_the_tokens_of_pytorch() -> None:
    """It measures, drafts, and goes off and on as the interpreter's clock will have it."""
    ours, theirs = engines("llama")
    tokens = []
    for engine in (ours, theirs):
        session = governed(engine, [random_rows(9, seed=3).tolist()], 7, {})
        for _ in session.run():
            pass
        tokens.append([row.tokens for row in session.rows])
    assert tokens[0] == tokens[1]


def test_a_session_closed_with_a_cycle_in_flight_leaves_nothing_behind() -> None:
    engine, _ = engines("llama")
    machine = engine._machine
    assert machine is not None
    mails = [mail for free in machine._mails.values() for mail in free]
    session = open_session(engine, [5, 6, 7, 8], {"speculative_decoding": False, "max_length": 40})
    steps = session.run()
    next(steps)
    assert isinstance(session, device_session.DeviceSession) and session._flight is not None
    steps.close()
    assert session._flight is None and not machine.owners
    assert engine.cache.free_pages == engine.cache.num_pages - 1  # but for the idle one
    assert set(map(id, mails)) <= {id(mail) for free in machine._mails.values() for mail in free}
    again = open_session(engine, [5, 6, 7, 8], {"speculative_decoding": False, "max_length": 8})
    for _ in again.run():
        pass
    assert again.rows[0].tokens[:5] == session.rows[0].tokens[:5]


def test_a_requests_own_tokens_do_not_make_cycles_be_captured_anew() -> None:
    assert [head_capacity(4000 + own, own) for own in (0, 1, 1024)] == [8192] * 3
    assert [head_capacity(3000 + own, own) for own in (0, 1096)] == [4096] * 2, "domains share capacities"
    assert head_capacity(3000 + 1097, 1097) == 8192


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_drafts_of_all_depths_are_those_of_pytorch(family: str, sampled: bool) -> None:
    """Tokens of a text do not depend on them, so nothing else would tell."""
    plan, sampling = Plan.parse("tree:3,2,1,1"), Sampling(do_sample=sampled, temperature=0.8 if sampled else 1.0)
    drafts, reads = [], []
    for engine in engines(family):
        rows = [Row(prompt, seed=1, copy=0, max_length=100) for prompt in prompts(2).tolist()]
        policy = Policy(Rules(), sampling, mode="force", plan=plan)
        session = engine.open(rows, sampling, policy, engine.drafters.exits[LAYER])
        with torch.inference_mode():
            session.prefill()
            made = session.draft(rows, plan)
            drafts.append(made.tokens.clone())
            if isinstance(session, device_session.DeviceSession):
                assert session._cycle is not None
                scaled, squares = vars(session._cycle.reads).values()
                factors = torch.rsqrt(
                    squares.mean(1) * squares.shape[1] / scaled.shape[1] + engine.model.config.norm_eps
                )
                whole = session._of_rows(scaled * factors[:, None], rows)
                reads.append(whole[:, : plan.levels[-1].start])  # the deepest are not asked for drafts
            else:
                reads.append(torch.cat(made.reads, dim=1))
        session.close()
    assert torch.equal(*drafts)
    torch.testing.assert_close(*reads, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("far", [False, True])
def test_only_a_prompt_unlike_any_other_is_judged_before_anything_is_drafted(far: bool) -> None:
    engine, _ = engines("llama")
    session = governed(engine, [random_rows(20, seed=1).tolist()], 9, {})
    (row,) = session.rows
    row.watch = Watch.of_prompt(far)
    before, seen = list(row.watch.belief.weights), []
    session.prefill()
    next_plan = device_session.DeviceSession._next_plan

    def noting(self: Any, *args: Any) -> Any:
        chosen = next_plan(self, *args)
        seen.append((row.watch.belief.weights != before, chosen[1]))
        return chosen

    plan = Plan.tree((1,))
    with (
        mock.patch.object(device_session.DeviceSession, "_next_plan", noting),
        mock.patch.object(Governor, "choose", lambda *_, **__: (plan, None)),
    ):
        for _ in range(2):
            session.cycle()
    session.close()
    late = [(False, None), (False, None), (True, None)]
    assert seen[:3] == ([(False, MEASURING), (True, None), (True, None)] if far else late)


def test_a_host_that_chooses_waits_for_what_the_prompt_tells() -> None:
    session = governed(engines("llama")[0], [random_rows(20, seed=1).tolist()], 9, {"repetition_penalty": 1.1})
    (row,) = session.rows
    before = list(row.watch.belief.weights)
    session.prefill()
    session.close()
    assert row.watch.belief.weights != before


def test_all_rows_of_one_prompt_learn_how_it_was_judged() -> None:
    engine, _ = engines("llama")
    session = governed(engine, [random_rows(20, seed=1).tolist()] * 2, 9, {"do_sample": True})
    session.rows[1].copy = 1
    session.prefill()
    with mock.patch.object(Governor, "observe"):
        session.cycle()
        session.close()
    first, second = (row.watch.belief for row in session.rows)
    assert first.weights == second.weights != list(first.home)


@pytest.mark.parametrize(("rows", "judged"), [(4, True), (5, False)])
def test_prompts_of_batches_too_large_for_trees_are_not_judged(rows: int, judged: bool) -> None:
    session = governed(engines("llama")[0], [random_rows(20, seed=1).tolist()] * rows, 4, {})
    session.prefill()
    assert (session._shares is not None) == judged
    session.close()


def test_what_is_captured_is_replayed_at_once_so_that_no_request_waits_for_the_first_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = engines("llama")[0]._machine
    assert machine is not None
    done: list[str] = []
    monkeypatch.setattr(machine, "_on_gpu", True)
    monkeypatch.setattr(machine, "_captured", lambda launch: lambda: done.append("replayed"))
    replay = machine._rehearsed(lambda: done.append("launched"))
    assert done == ["launched", "replayed"]
    replay()
    assert done[2:] == ["replayed"]


def test_what_catches_up_and_moves_is_replayed_before_a_request_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engines("llama")
    machine, exit = engine._machine, Exit(engine.model, 1)
    assert machine is not None
    replayed: list[str] = []

    def captured(launch: Any) -> Any:
        return lambda: replayed.append(type(launch.__self__).__name__)

    monkeypatch.setattr(machine, "_captured", captured)
    monkeypatch.setattr(machine, "_replays", {})
    monkeypatch.setattr(machine, "_on_gpu", True)
    monkeypatch.setattr(machine, "_took_memory", True)
    monkeypatch.setattr(machine, "current", nullcontext)
    machine.prepare(4, NONE, exit, Sampling(do_sample=False), 100)
    assert sorted(replayed) == ["Cycle", "Move", "Move", "Shadow", "Shadow"]
