"""The decoding loop: whatever arrives, waits, is swapped out, fails or is cancelled beside it, every sequence gets the
tokens it gets alone, and every page comes back.

Float64 models, so that no rounding tie hides or fakes a fault.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from selfspec import Engine, Rules
from selfspec import scheduler as scheduler_module
from selfspec.backends import torch_backend
from selfspec.backends.torch_backend import TorchBackend
from selfspec.batch import Batch
from selfspec.cache.kv_cache import PAGE_SIZE, CacheFull, page_nbytes
from selfspec.models.config import ModelConfig
from selfspec.request import SpeculationRequest, read_settings
from selfspec.sequence import Progress, Request
from tests.profiles import choice_of, profile_of, random_exit
from tests.scripted import IRREGULAR, endless, random_prompt, silence
from tests.stepping import enqueue, finish
from tests.tiny import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

PLAIN: dict[str, Any] = {"speculative_decoding": False}
TREE: dict[str, Any] = {"exit_layer": 2, "plan": "tree:3,2,1", "speculative_decoding": "force"}
RANKS = {"0": [[0.6, 0.1, 0.05], [0.6, 0.1], [0.5]]}  # how often drafts were right: makes requests governed
LEAST_PAGES = 5  # room for one text of a page


@cache
def hf_model() -> PreTrainedModel:
    return endless(tiny_model("llama", num_hidden_layers=3))


@cache
def profile() -> Any:
    """One domain with an exit after 2 layers, which the governor may draft with."""
    model = Engine.from_model(hf_model()).model
    return profile_of(model, {"text": choice_of(2, "chain:2", ranks=RANKS)})


def new_engine(pages: int | None = None, max_batch: int | None = None, **options: Any) -> Engine:
    """An engine whose governor drafts with a random exit; `pages` of its cache, if they shall be few."""
    model = options.pop("model", None) or hf_model()
    gigabytes = None
    if pages is not None:
        gigabytes = (pages + 0.5) * page_nbytes(ModelConfig.from_hf(model.config), model.dtype) / 1e9
    options = {"profile": profile(), "prefix_reuse": True, "max_batch": max_batch, "kv_cache_gb": gigabytes, **options}
    engine = Engine.from_model(model, tiny_tokenizer(), **options)
    assert pages is None or engine.cache.num_pages == pages
    (choice,) = options["profile"].domains.values()
    engine.drafters.exits[choice.exit_layer] = random_exit(engine.model, choice.exit_layer)
    return engine


@cache
def plain_engine() -> Engine:
    return Engine.from_model(hf_model(), tiny_tokenizer())


def request_of(engine: Engine, prompts: list[list[int]], **options: Any) -> Request:
    """A request as `generate` builds it, not submitted."""
    options = dict(options)
    names = ("logits_processor", "stopping_criteria", "seed")
    processors, criteria, seed = (options.pop(name, None) for name in names)
    wishes = SpeculationRequest(
        **{name: options.pop(name) for name in list(options) if name in SpeculationRequest.__dataclass_fields__}
    )
    settings = read_settings(engine.generation_config, None, options)
    return engine._requests.build(prompts, max(map(len, prompts)), settings, seed, processors, criteria, wishes)


def tokens_of(request: Request) -> list[list[int]]:
    return [sequence.tokens[len(sequence.prompt) :] for sequence in request.sequences]


def generate(engine: Engine, prompt: list[int], **options: Any) -> list[list[int]]:
    """New tokens of every returned sequence."""
    request = request_of(engine, [prompt], **options)
    engine.scheduler.submit(request)
    engine.scheduler.wait(request)
    return tokens_of(request)


def assert_all_pages_free(engine: Engine) -> None:
    """At once, or as soon as a request that was dropped has been noticed; but for the page that idle slots write to."""
    deadline, pages = time.monotonic() + 20, engine.cache.num_pages - engine.has_kernels
    while engine.cache.free_pages < pages and time.monotonic() < deadline:
        time.sleep(0.001)
    assert engine.cache.free_pages == pages
    assert not engine.scheduler.waiting and not engine.scheduler.prefilling


SAMPLINGS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.4},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "temperature": 1.2, "top_k": 7},
    {"do_sample": True, "top_k": 0, "top_p": 0.8},
    {"do_sample": True, "top_k": 0, "min_p": 0.05, "presence_penalty": 0.6},
    {"do_sample": True, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"do_sample": True, "logit_bias": {7: 3.0, 50: -4.0, 9: -float("inf")}},
    {"do_sample": True, "suppress_tokens": [11, 12, 13]},
    {"do_sample": False, "allowed_token_ids": list(range(20, 60))},
]
SPECULATIONS: list[dict[str, Any]] = [
    {},
    PLAIN,
    {"speculative_decoding": "force"},
    TREE,
    {"exit_layer": 1, "plan": "chain:4"},
    {"exit_layer": 2, "plan": IRREGULAR},
    {"plan": "chain:2"},
]
PROMPTS = [random_prompt(length) for length in (1, 2, 40, 60, 63, 64, 100, 110)]


def test_two_sequences_that_do_not_fit_together_take_turns_by_swapping() -> None:
    """Seven pages; each text grows to four, and drafts past its end."""
    engine = new_engine(pages=LEAST_PAGES + 2)
    prompts = [random_prompt(60, seed) for seed in (1, 2)]
    swaps, swap_in = [], engine.cache.swap_in

    def counted(kv: Any, swapped: Any) -> None:
        swaps.append(swapped.length)
        swap_in(kv, swapped)

    engine.cache.swap_in = counted  # type: ignore[method-assign]
    request = request_of(engine, prompts, do_sample=False, max_new_tokens=130, **TREE)
    engine.scheduler.submit(request)
    engine.scheduler.wait(request)
    plain = [generate(plain_engine(), prompt, do_sample=False, max_new_tokens=130, **PLAIN)[0] for prompt in prompts]
    assert tokens_of(request) == plain
    assert swaps, "nothing was swapped"
    assert_all_pages_free(engine)


def test_a_swapped_sample_shares_the_prompt_pages_that_are_held_for_waiting_ones() -> None:
    """Each of three samples grows to 10 of 14 pages, 6 of them its prompt's; two decode at a time."""
    model = endless(tiny_model("llama", num_hidden_layers=3, max_position_embeddings=1024))
    engine, prompt = new_engine(pages=14, max_batch=2, model=model), random_prompt(360)
    options: dict[str, Any] = {"do_sample": True, "seed": 3, "num_return_sequences": 3, "max_new_tokens": 278}
    tokens = generate(engine, prompt, **options, **PLAIN)
    assert tokens == generate(new_engine(model=model), prompt, **options, **PLAIN)
    assert_all_pages_free(engine)


def test_requests_whose_prompts_end_in_one_pass_join_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, join, joined = TorchBackend.prefill, Batch.join, []
    monkeypatch.setattr(TorchBackend, "prefill", lambda *args: [prefill(args[0], [s], args[2])[0] for s in args[1]])
    monkeypatch.setattr(Batch, "join", lambda batch, sequences: (joined.append(len(sequences)), join(batch, sequences)))
    engine = plain_engine()
    sampled = {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 2}
    requests = [enqueue(engine, [[5 + index, 6]], seed=index, **sampled) for index in range(3)]
    finish(engine)
    assert joined == [6]
    alone = [generate(engine, [5 + index, 6], seed=index, speculative_decoding=False, **sampled) for index in range(3)]
    assert list(map(tokens_of, requests)) == alone


@pytest.mark.parametrize("how", [PLAIN, TREE])
def test_a_long_text_gets_the_pages_of_a_prompt_that_is_held_for_waiting_samples(how: dict[str, Any]) -> None:
    """It grows to 8 of 14 pages beside a prompt of 7, one sample of which was swapped out and one waits."""
    engine, plain = new_engine(pages=14, max_batch=2), {"do_sample": False, "max_new_tokens": 200, **PLAIN}
    sampling = {"do_sample": True, "seed": 3, "num_return_sequences": 2, "max_new_tokens": 100}
    calls = [(random_prompt(300), plain), (random_prompt(400), {**sampling, **how})]
    requests = [request_of(engine, [prompt], **options) for prompt, options in calls]
    for request in requests:
        engine.scheduler.waiting.extend(request.sequences)
    while engine.scheduler.step():
        pass
    assert [request.error for request in requests] == [None, None]
    expected = [generate(plain_engine(), prompt, **{**options, **PLAIN}) for prompt, options in calls]
    assert [tokens_of(request) for request in requests] == expected
    assert_all_pages_free(engine)


def test_a_swapped_sequence_takes_the_exits_kv_of_plainly_decoded_tokens_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_STEP_POSITIONS", 1)
    engine, swaps = new_engine(pages=LEAST_PAGES + 2, rules=Rules(budget=0)), []  # no budget: all steps are plain
    swap_out = engine.cache.swap_out

    def remember(kv: Any) -> Any:
        swaps.append(swap_out(kv))
        return swaps[-1]

    engine.cache.swap_out = remember  # type: ignore[method-assign]
    request = request_of(engine, [random_prompt(60, seed) for seed in range(3)], do_sample=False, max_new_tokens=130)
    engine.scheduler.submit(request)
    engine.scheduler.wait(request)
    keys = swaps[0].keys[-1].flatten(0, 1)[: swaps[0].length]
    assert len(keys) > 60 and bool(keys.flatten(1).any(-1).all())


def test_a_prompt_waits_for_pages_that_running_sequences_have_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five texts of a page each are about to need another; a prompt of two pages is prefilled meanwhile."""
    monkeypatch.setattr(scheduler_module, "_STEP_POSITIONS", 1)
    monkeypatch.setattr(torch_backend, "PREFILL_CHUNK", 16)
    engine, prefill, refused = new_engine(pages=LEAST_PAGES + 2), TorchBackend.prefill, []

    def counted(*args: Any) -> Any:
        try:
            return prefill(*args)
        except CacheFull:
            refused.append(args)
            raise

    monkeypatch.setattr(TorchBackend, "prefill", counted)
    prompts = [*(random_prompt(60, seed) for seed in range(5)), random_prompt(110)]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, **PLAIN}
    requests = [request_of(engine, [prompt], **options) for prompt in prompts]
    for request in requests:
        engine.scheduler.waiting.extend(request.sequences)
    while engine.scheduler.step():
        pass
    expected = [generate(plain_engine(), prompt, **options) for prompt in prompts]
    assert [tokens_of(request) for request in requests] == expected
    assert refused, "there were pages enough"
    assert_all_pages_free(engine)


@pytest.mark.parametrize("how", [PLAIN, TREE], ids=["plain", "tree"])
def test_a_long_prompt_lets_running_texts_take_a_step_after_each_of_its_chunks(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "PREFILL_CHUNK", 16)
    prefill, step, events, engine = TorchBackend.prefill, Batch.step, [], new_engine()
    monkeypatch.setattr(TorchBackend, "prefill", lambda *args: (events.append("chunk"), prefill(*args))[1])
    monkeypatch.setattr(Batch, "step", lambda batch: (events.append("step"), step(batch)))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60, **how}
    running = [request_of(engine, [random_prompt(5, seed)], **options) for seed in range(2)]
    engine.scheduler.waiting.extend(request.sequences[0] for request in running)
    while not all(request.sequences[0].new_tokens for request in running):
        engine.scheduler.step()
    joining = request_of(engine, [random_prompt(100)], **options)
    engine.scheduler.waiting.extend(joining.sequences)
    events.clear()
    while not joining.sequences[0].new_tokens:
        engine.scheduler.step()
    assert events == ["step", *["chunk", "step"] * 7], "99 tokens in chunks of 16"
    finish(engine)
    assert tokens_of(joining) == generate(plain_engine(), random_prompt(100), **{**options, **PLAIN})


def test_a_sequence_that_needs_the_pages_of_prefilling_prompts_is_swapped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the only one that decodes, and needs its third page when two prompts hold the other six."""
    monkeypatch.setattr(scheduler_module, "_STEP_POSITIONS", 1)
    monkeypatch.setattr(torch_backend, "PREFILL_CHUNK", 16)
    engine, options = new_engine(pages=8), {"do_sample": False, "max_new_tokens": 20}
    prompts = [random_prompt(length) for length in (118, 170, 171)]
    speculations = [PLAIN, PLAIN, {"exit_layer": 1, "plan": "chain:2"}]
    requests = [
        request_of(engine, [prompt], **options, **how) for prompt, how in zip(prompts, speculations, strict=True)
    ]
    text = requests[0].sequences[0]
    engine.scheduler.waiting.append(text)
    while not text.new_tokens:
        engine.scheduler.step()
    engine.scheduler.waiting.extend(request.sequences[0] for request in requests[1:])
    while text.swapped is None and not text.is_finished:
        engine.scheduler.step()
    assert text.swapped is not None and len(engine.scheduler.prefilling) == 2
    while engine.scheduler.step():
        pass
    expected = [generate(plain_engine(), prompt, **options, **PLAIN) for prompt in prompts]
    assert [tokens_of(request) for request in requests] == expected
    assert_all_pages_free(engine)


def test_waiting_samples_do_not_keep_the_pages_of_ended_ones() -> None:
    engine = new_engine(pages=LEAST_PAGES + 1, max_batch=2)
    prompts = [random_prompt(70, seed) for seed in range(6)]
    options: dict[str, Any] = {"do_sample": True, "seed": 3, "max_new_tokens": 5, "num_return_sequences": 3}
    request = request_of(engine, prompts, **options, **TREE)
    engine.scheduler.submit(request)
    engine.scheduler.wait(request)
    expected = [tokens for prompt in prompts for tokens in generate(plain_engine(), prompt, **options, **PLAIN)]
    assert tokens_of(request) == expected
    assert_all_pages_free(engine)


def used_pages(engine: Engine) -> int:
    return engine.cache.num_pages - engine.cache.free_pages


def test_samples_share_the_full_pages_of_their_prompt_and_return_them_one_by_one() -> None:
    """Two full pages, and for each sample one that begins with the prompt's last tokens."""
    engine, used, samples = new_engine(), [], 3

    def look(prefix: torch.Tensor, _: Any) -> torch.Tensor:
        used.append(used_pages(engine))
        return torch.tensor([False])

    prompt = random_prompt(2 * PAGE_SIZE + 3)
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": samples, "seed": 1, "max_new_tokens": 8}
    request = request_of(engine, [prompt], stopping_criteria=[look], **options, **PLAIN)
    for sequence, length in zip(request.sequences, (2, 5, 8), strict=True):
        sequence.max_length = len(prompt) + length
    engine.scheduler.submit(request)
    engine.scheduler.wait(request)
    assert used == [2 + 3] * 6 + [2 + 2] * 6 + [2 + 1] * 3
    whole = generate(plain_engine(), prompt, **options, **PLAIN)
    assert tokens_of(request) == [tokens[:length] for tokens, length in zip(whole, (2, 5, 8), strict=True)]


def test_a_sequence_too_long_for_an_empty_cache_fails_alone() -> None:
    engine = new_engine(pages=LEAST_PAGES)
    for sequence in (long := request_of(engine, [random_prompt(40)], **PLAIN)).sequences:
        sequence.max_length = 10**6  # as if the context had been larger than the cache
    engine.scheduler.submit(long)
    with pytest.raises(CacheFull, match="KV cache is full"):
        engine.scheduler.wait(long)
    assert_all_pages_free(engine)
    assert_serves(engine)


def test_a_plain_request_gets_its_tokens_beside_others_whose_drafts_may_be_rejected() -> None:
    """The classical acceptance rule draws otherwise where there is a draft."""
    engine = new_engine()
    options: dict[str, Any] = {"do_sample": True, "acceptance": "rejection", "max_new_tokens": 12}
    drafting = request_of(engine, [PROMPTS[3]], seed=1, **options, **TREE)
    plain = [request_of(engine, [PROMPTS[2]], seed=seed, **options, **PLAIN) for seed in range(3)]
    for request in (drafting, *plain):
        engine.scheduler.waiting.extend(request.sequences)
    while engine.scheduler.step():
        pass
    assert drafting.sequences[0].history.drafted > 0
    expected = [generate(plain_engine(), PROMPTS[2], seed=seed, **options, **PLAIN) for seed in range(3)]
    assert [tokens_of(request) for request in plain] == expected


# Threads


def work(engine: Engine, index: int) -> Any:
    """One call of any kind, with settings of its own."""
    prompt, sampling = PROMPTS[index % 5], SAMPLINGS[index % len(SAMPLINGS)]
    speculation = SPECULATIONS[index % len(SPECULATIONS)]
    options = {**sampling, "seed": index, "max_new_tokens": 1 + index % 7}
    if index % 3 == 0 and sampling["do_sample"]:
        options["num_return_sequences"] = 2
    kind = index % 4
    if kind == 0:
        return engine.generate(torch.tensor([prompt]), **options, **speculation).tolist()  # type: ignore[union-attr]
    options.pop("num_return_sequences", None)
    if kind == 1:
        return engine.complete("abc" * (index % 4 + 1), **options, **speculation).tokens  # type: ignore[union-attr]
    if kind == 2:
        return "".join(engine.stream("abc" * (index % 4 + 1), **options, **speculation))
    processor = [lambda ids, logits: logits.roll(1, -1)]
    return engine.generate(torch.tensor([prompt]), logits_processor=processor, **options, **speculation).tolist()  # type: ignore[union-attr]


def test_calls_from_eight_threads_get_the_tokens_of_calls_one_after_another() -> None:
    engine, calls = new_engine(pages=16, max_batch=6), range(8 * 25)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda index: work(engine, index), calls))
    assert_all_pages_free(engine)
    sequential = Engine.from_model(hf_model(), tiny_tokenizer(), profile=profile())
    assert got == [work(sequential, index) for index in calls]
    assert engine.metrics().requests == len(calls)


# Calls that do not come to their end


def serves(engine: Engine) -> list[list[int]]:
    return generate(engine, PROMPTS[2], do_sample=False, max_new_tokens=9, **TREE)


@cache
def served() -> list[list[int]]:
    return generate(plain_engine(), PROMPTS[2], do_sample=False, max_new_tokens=9, **PLAIN)


def assert_serves(engine: Engine) -> None:
    assert serves(engine) == served()
    assert_all_pages_free(engine)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine that has lost no page, and still gives the right tokens, when the test is over."""
    engine = new_engine()
    yield engine
    assert_all_pages_free(engine)
    assert_serves(engine)


class Accident(Exception):
    pass


class FailsAt:
    """Fails at its n-th call, from 0; before that it changes nothing. A processor, a criterion and a streamer."""

    def __init__(self, call: int, error: Callable[[], BaseException] = Accident) -> None:
        self.call, self.error, self.calls = call, error, 0

    def count(self) -> None:
        self.calls += 1
        if self.calls > self.call:
            raise self.error()

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self.count()
        return torch.tensor([False]) if scores is None else scores

    def put(self, value: torch.Tensor) -> None:
        self.count()

    def end(self) -> None:
        self.count()


class Beside:
    """A request of two samples that decodes while other things happen, and that must not notice."""

    options: dict[str, Any] = {"do_sample": True, "seed": 5, "num_return_sequences": 2, "max_new_tokens": 60}

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.request = request_of(engine, [PROMPTS[3]], **self.options, **TREE)

    def __enter__(self) -> None:
        self.engine.scheduler.submit(self.request)

    def __exit__(self, *_: object) -> None:
        self.engine.scheduler.wait(self.request)
        assert tokens_of(self.request) == self.expected()

    @staticmethod
    @cache
    def expected() -> list[list[int]]:
        return generate(plain_engine(), PROMPTS[3], **Beside.options, **PLAIN)


@pytest.mark.parametrize(
    ("call", "samples", "what", "error"),  # all pairs of call, callable and error
    [
        (0, 1, "logits_processor", Accident),
        (0, 1, "stopping_criteria", SystemExit),
        (1, 3, "logits_processor", SystemExit),
        (1, 3, "stopping_criteria", Accident),
        (13, 3, "logits_processor", Accident),
        (13, 3, "stopping_criteria", SystemExit),
    ],
)
def test_a_failing_callable_reaches_its_own_caller_only(
    engine: Engine, what: str, call: int, samples: int, error: Any
) -> None:
    options = {"do_sample": True, "num_return_sequences": samples, "max_new_tokens": 30, **TREE}
    with Beside(engine), pytest.raises(error):
        engine.generate(torch.tensor([PROMPTS[2]]), **{what: [FailsAt(call, error)]}, **options)


@pytest.mark.parametrize("call", [0, 1, 4, 10], ids=["prompt", "first", "fourth", "end"])
def test_a_failing_streamer_cancels_its_request(engine: Engine, call: int) -> None:
    with Beside(engine), pytest.raises(Accident):
        engine.generate(torch.tensor([PROMPTS[2]]), streamer=FailsAt(call), max_new_tokens=9, **TREE)


def test_a_streamer_sees_no_token_that_a_failing_processor_has_not_seen(engine: Engine) -> None:
    shown: list[int] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            shown.extend(value.flatten().tolist())

        def end(self) -> None: ...

    processor = FailsAt(4)
    with pytest.raises(Accident):
        engine.generate(torch.tensor([[5]]), streamer=Streamer(), logits_processor=[processor], **PLAIN)
    assert len(shown) == 1 + 4, "the prompt and the tokens before the failure"


@pytest.mark.parametrize("pieces", [0, 5])
@pytest.mark.parametrize("how", ["close", "drop", "error"])
def test_a_stream_that_is_left_returns_its_pages(engine: Engine, pieces: int, how: str) -> None:
    with Beside(engine):
        stream = engine.stream("abcdef", max_new_tokens=400, do_sample=False, **TREE)
        for _ in range(pieces):
            next(stream)
        if how == "close":
            stream.close()
            assert stream._request.progress.is_over or not pieces, "closing waits until the pages are free"
            stream.close()
            assert list(stream) == [] and stream.completion is None
        elif how == "error":
            with pytest.raises(Accident), stream:
                raise Accident
        del stream
    assert_all_pages_free(engine)


def test_a_stream_can_be_dropped_by_a_thread_that_holds_a_lock_of_the_loop(engine: Engine) -> None:
    """As the garbage collector may do it, at any moment."""
    options: dict[str, Any] = {"max_new_tokens": 400, "do_sample": False, **TREE}
    streams, other = [engine.stream("abcdef", **options)], engine.stream("abcdef", **options)
    next(streams[0]), next(other)

    def drop() -> None:
        with engine._metrics._lock:
            streams.clear()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for the loop, which waits for it"
    other.close()


def test_a_request_waits_for_the_page_that_its_router_needs(engine: Engine) -> None:
    first, second = (request_of(engine, [PROMPTS[2]], do_sample=False, max_new_tokens=9, **TREE) for _ in range(2))
    find, attempts = second.find_drafter, []

    def full_at_first() -> Any:
        attempts.append(len(engine.scheduler.batches))
        if len(attempts) < 3:
            raise CacheFull
        assert find is not None
        return find()

    second.find_drafter = full_at_first
    for request in (first, second):
        engine.scheduler.waiting.extend(request.sequences)
    while engine.scheduler.step():
        pass
    assert tokens_of(first) == tokens_of(second) == served()
    assert len(attempts) == 3


def test_a_request_is_cancelled_while_waiting_prefilling_and_decoding(engine: Engine) -> None:
    """Waiting, in the middle of its prompt, and while it decodes."""
    for steps in range(6):
        request = request_of(engine, [PROMPTS[7], PROMPTS[3]], max_new_tokens=300, **TREE)
        engine.scheduler.waiting.extend(request.sequences)
        for _ in range(steps):
            engine.scheduler.step()
        engine.scheduler._cancel(request)
        engine.scheduler.step()
        assert request.progress.is_over
        assert {sequence.finish_reason for sequence in request.sequences} == {"cancelled"}
        assert engine.cache.free_pages == engine.cache.num_pages


def test_an_interrupt_while_waiting_cancels_the_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the first, second ... wait of the caller's thread."""
    left = [0]

    class Interrupted(SimpleQueue):
        def get(self, block: bool = True, timeout: float | None = None) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return super().get(block, timeout)

    for waits in (1, 2, 3):
        options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "stopping_criteria": [Sleeps(0.005)]}
        with Beside(engine), monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("selfspec.sequence.SimpleQueue", Interrupted)
            left[0] = waits
            "".join(engine.stream("abcdef", **options, **PLAIN))
        assert_all_pages_free(engine)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_interrupts_at_any_moment_lose_no_page(engine: Engine) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ids, seen = torch.tensor([PROMPTS[3]]), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for attempt in range(30):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0011 * attempt)
                engine.generate(ids, max_new_tokens=400, do_sample=False, **TREE)
            except KeyboardInterrupt:
                seen += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen > 10
    assert_all_pages_free(engine)


def test_an_interrupt_at_any_line_of_the_callers_thread_loses_no_page(engine: Engine) -> None:
    """At every 25th of the lines that a call runs there, the standard library's included."""
    ids, left, interrupted = torch.tensor([PROMPTS[3]]), [0], 0

    def trace(*_: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return trace

    def run_until(line: int) -> None:
        left[0] = line
        sys.settrace(trace)
        try:
            engine.generate(ids, max_new_tokens=3, do_sample=False, **TREE)
        finally:
            sys.settrace(None)

    run_until(10**9)
    lines = 10**9 - left[0]
    for line in range(1, lines, 25):
        with suppress(KeyboardInterrupt):
            run_until(line)
        interrupted += left[0] <= 0
        assert_all_pages_free(engine)
    assert interrupted > 25


@pytest.mark.parametrize("call", ["generate", "stream", "open stream"])
def test_a_callable_that_generates_with_its_own_engine_is_refused(engine: Engine, call: str) -> None:
    """The loop cannot wait for itself."""
    ids, opened = torch.tensor([[5, 6]]), engine.stream("abc", max_new_tokens=400, do_sample=False, **PLAIN)
    next(opened)

    def generates(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if call == "generate":
            engine.generate(ids, max_new_tokens=1, **PLAIN)
        else:
            next(engine.stream("abc", max_new_tokens=1, **PLAIN) if call == "stream" else opened)
        return scores

    with pytest.raises(RuntimeError, match="use another engine"):
        engine.generate(ids, max_new_tokens=3, logits_processor=[generates], **PLAIN)
    opened.close()


def test_a_callable_may_generate_with_another_engine_and_ask_for_metrics(engine: Engine) -> None:
    ids, inner = torch.tensor([[5, 6]]), []

    def generates(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        inner.append(plain_engine().generate(ids, max_new_tokens=2, **PLAIN).tolist())  # type: ignore[union-attr]
        engine.memory(), engine.metrics()
        return scores

    engine.generate(ids, max_new_tokens=3, logits_processor=[generates], **PLAIN)
    assert inner == [plain_engine().generate(ids, max_new_tokens=2, **PLAIN).tolist()] * 3  # type: ignore[union-attr]


def test_a_step_that_fails_fails_its_batch_and_the_loop_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, left = engine.model.run, [20]

    def failing(*args: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("out of memory")
        return run(*args)

    monkeypatch.setattr(engine.model, "run", failing)
    with pytest.raises(CacheFull, match="smaller kv_cache_gb"):
        engine.generate(torch.tensor([PROMPTS[2]]), max_new_tokens=60, **TREE)


def test_a_fault_of_the_device_is_not_reported_as_missing_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="illegal memory access") as raised:
        patch.setattr(engine.model, "run", fault)
        engine.generate(torch.tensor([PROMPTS[2]]), max_new_tokens=6, **TREE)
    assert not isinstance(raised.value, CacheFull) and "kv_cache_gb" not in str(raised.value)


def test_python_processors_are_warned_of_once_by_name_where_they_slow_decoding_down(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels; a processor of a known type runs on the device, and there is no warning of it."""

    def mine(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    monkeypatch.setattr(engine._requests, "has_kernels", True)
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        for _ in range(2):
            request_of(engine, [[5]], logits_processor=[RepetitionPenaltyLogitsProcessor(1.3)], **PLAIN)
            request_of(engine, [[5]], logits_processor=[mine, FailsAt(9)], **PLAIN)
    (text,) = [str(warning.message) for warning in issued]
    assert "mine, FailsAt are Python callables" in text and "RepetitionPenalty" not in text


def test_a_loop_that_fails_leaves_no_caller_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise Accident

    with monkeypatch.context() as patch, pytest.raises(Accident):
        patch.setattr(engine.scheduler, "_admit", broken)
        engine.generate(torch.tensor([PROMPTS[2]]), max_new_tokens=2, **PLAIN)


# Time in the user's own code

DELAY = 0.05  # seconds, many times what a step takes


class Sleeps(FailsAt):
    def __init__(self, seconds: float = DELAY) -> None:
        super().__init__(0)
        self.seconds = seconds

    def count(self) -> None:
        time.sleep(self.seconds)


@pytest.mark.parametrize("what", ["logits_processor", "stopping_criteria", "streamer"])
def test_time_in_callables_and_streamers_is_charged_to_no_step(engine: Engine, what: str) -> None:
    count, slow = 10, Sleeps()
    callables = {what: slow if what == "streamer" else [slow]}
    options = {"max_new_tokens": count, "return_dict_in_generate": True, "do_sample": False}
    started = time.perf_counter()
    (stats,) = engine.generate(torch.tensor([PROMPTS[0]]), **callables, **options, **PLAIN).stats  # type: ignore[union-attr]
    took = time.perf_counter() - started
    without_callables = took - 0.9 * count * DELAY  # whatever else the machine did meanwhile
    assert stats.elapsed_s < without_callables
    assert engine.metrics().seconds < without_callables
    assert engine.metrics().gap.p50 < DELAY


# Values that are not finite

BAD = 77  # the token whose embedding is not a number


@cache
def broken_model() -> PreTrainedModel:
    """Says nothing of layers from 1 on: an exit there drafts just what the model says next."""
    model = silence(endless(tiny_model("llama", num_hidden_layers=3, seed=4)), 1)
    with torch.no_grad():
        model.model.embed_tokens.weight[BAD] = float("nan")
    return model


@cache
def healthy_prompts() -> list[list[int]]:
    """Of 20 tokens, whose greedy texts of 20 tokens do not contain the bad one."""
    engine, found, seed = Engine.from_model(broken_model()), [], 0
    while len(found) < 3:
        prompt, seed = random_prompt(20, seed), seed + 1
        request = request_of(engine, [prompt], do_sample=False, max_new_tokens=20, **PLAIN)
        engine.scheduler.submit(request)
        with suppress(ValueError):
            engine.scheduler.wait(request)
        if request.error is None and BAD not in tokens_of(request)[0]:
            found.append(prompt)
    return found


@pytest.mark.parametrize("place", [0, 10, 19], ids=["first", "middle", "last"])
def test_a_token_that_is_not_finite_fails_its_own_request_only(place: int) -> None:
    engine = Engine.from_model(broken_model())
    drafting = {"exit_layer": 2, "plan": "tree:8,4", "speculative_decoding": "force"}
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    prompts = healthy_prompts()
    expected = [generate(engine, prompt, **options, **PLAIN) for prompt in prompts]
    bad = list(prompts[0])
    bad[place] = BAD
    for speculation in (drafting, PLAIN):
        requests = [request_of(engine, [prompt], **options, **speculation) for prompt in [*prompts[:2], bad]]
        sequences = [sequence for request in requests for sequence in request.sequences]
        engine.scheduler.call(partial(engine.scheduler.waiting.extend, sequences))  # so that all join in one step
        for request in requests[:2]:
            engine.scheduler.wait(request)
        with pytest.raises(ValueError, match="not finite"):
            engine.scheduler.wait(requests[2])
        assert [tokens_of(request) for request in requests[:2]] == expected[:2]
        for prompt, tokens in zip(prompts, expected, strict=True):  # on pages that the failed request had
            assert generate(engine, prompt, **options, **speculation) == tokens
    assert_all_pages_free(engine)


def test_drafting_a_token_that_is_not_finite_changes_nothing() -> None:
    """The exit offers 40 tokens at each of the nodes, the bad one among them."""
    engine = Engine.from_model(broken_model())
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    drafted: list[int] = []
    embed = engine.model.embed

    def remember(tokens: torch.Tensor) -> torch.Tensor:
        drafted.extend(tokens.flatten().tolist())
        return embed(tokens)

    engine.model.embed = remember  # type: ignore[method-assign]
    prompts = healthy_prompts()
    expected = [generate(engine, prompt, **options, **PLAIN) for prompt in prompts]
    drafted.clear()
    for plan in ("tree:40", "tree:20,2"):
        request = request_of(engine, prompts, exit_layer=2, plan=plan, speculative_decoding="force", **options)
        engine.scheduler.submit(request)
        engine.scheduler.wait(request)
        assert [[tokens] for tokens in tokens_of(request)] == expected
    assert BAD in drafted, "the bad token was never drafted"
    assert_all_pages_free(engine)


def test_a_temperature_that_overflows_is_refused(engine: Engine) -> None:
    with Beside(engine), pytest.raises(ValueError, match="not finite.*temperature"):
        generate(engine, PROMPTS[2], do_sample=True, temperature=1e-38, max_new_tokens=3, seed=1, **TREE)


# The world around


@pytest.mark.parametrize("convert", [lambda hf: hf.to(torch.float32), lambda hf: hf.half()], ids=["float32", "half"])
def test_a_model_that_was_converted_after_from_model_is_refused(convert: Callable[[Any], Any]) -> None:
    hf = endless(tiny_model("llama", num_hidden_layers=2))
    engine = Engine.from_model(hf, tiny_tokenizer())
    engine.generate(torch.tensor([[5, 6]]), max_new_tokens=2, **PLAIN)
    convert(hf)
    with pytest.raises(ValueError, match="moved or converted.*new Engine.from_model"):
        engine.generate(torch.tensor([[5, 6]]), max_new_tokens=2, **PLAIN)
    with pytest.raises(ValueError, match="moved or converted"):
        engine.complete("abc", max_new_tokens=2, **PLAIN)


def test_autocast_around_a_call_changes_no_token(engine: Engine) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert serves(engine) == served()
        options: dict[str, Any] = {"do_sample": True, "seed": 1, "repetition_penalty": 1.3, "max_new_tokens": 9}
        within = engine.generate(torch.tensor([PROMPTS[2]]), **options, **TREE)
    assert torch.equal(within, engine.generate(torch.tensor([PROMPTS[2]]), **options, **TREE))  # type: ignore[arg-type]


def test_a_dropped_engine_frees_its_thread_and_memory() -> None:
    threads = set(threading.enumerate())
    engine = new_engine()
    assert_serves(engine)
    (thread,) = [thread for thread in threading.enumerate() if thread not in threads]
    references = [weakref.ref(held) for held in (engine, engine.scheduler, engine.cache.keys, engine.model)]
    stream = engine.stream("abc", max_new_tokens=400, do_sample=False, **TREE)
    next(stream)
    del engine
    gc.collect()
    assert next(stream), "who follows a stream still gets its pieces"
    del stream
    thread_is_over(thread)
    assert not thread.is_alive()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def thread_is_over(thread: threading.Thread) -> None:
    """Waits until it is; finalizers of what it kept alive may need a collection."""
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:
        gc.collect()
        thread.join(timeout=0.01)


def test_calls_between_steps_run_on_the_loops_thread(engine: Engine) -> None:
    with Beside(engine):
        assert engine.scheduler.call(lambda: threading.current_thread().name) == "selfspec-loop"
        with pytest.raises(Accident):
            engine.scheduler.call(lambda: (_ for _ in ()).throw(Accident))


def test_progress_wakes_threads_that_follow_every_step() -> None:
    progress, seen = Progress(), []
    follower = threading.Thread(target=lambda: seen.extend(progress.follow(every_step=True)), daemon=True)
    follower.start()
    while not progress._every_step:
        time.sleep(0.001)
    progress.update(3)
    progress.end(7)
    follower.join(20)
    assert seen in ([3, 7], [7])
