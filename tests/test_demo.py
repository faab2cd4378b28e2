"""The real demo model, SmolLM2-135M-Instruct in float32 on the CPU: transformers' tokens and logits, and sense.

Fetched once into SELFSPEC_HOME. In float32 two tokens may be so close that another order of summation swaps them;
such a tie, and nothing else, excuses a difference.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfspec import Engine
from selfspec.cache.layout import Rows
from selfspec.kernels.constants import PAGE_SIZE
from selfspec.models.linear import expand
from selfspec.models.loading import resolve
from selfspec.profiles.profile import Profile
from selfspec.text import encode

pytestmark = [pytest.mark.demo, pytest.mark.xdist_group("demo")]

NEW_TOKENS = 32  # the shortest prompt has 36 tokens, so every text crosses the end of its first page
# An end that the model never says: every row is as long, past the end of its answer.
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": 0, "pad_token_id": 0}
TIE = 1e-4  # logits closer than this may change places

PROMPTS = [
    "Explain photosynthesis to a child.",
    "A shop sells pens at 3 euros each. What do 17 pens cost?",
    "List five animals that live in the sea.",
    "Write a haiku about autumn.",
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Translate into Spanish: The library opens at nine.",
    "What does HTTP status code 404 mean?",
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("demo", device="cpu", dtype="float32", profile=None)


@pytest.fixture(scope="module")
def profiled(engine, tmp_path_factory) -> Engine:
    """The same model with the profile that comes with selfspec: there is none of anyone's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSPEC_HOME", str(tmp_path_factory.mktemp("home")))
        return Engine(engine.model, engine.tokenizer, engine.generation_config, profile="auto")


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(resolve("demo"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def batch(engine) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two prompts as chats, left-padded."""
    texts = [
        engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in PROMPTS[:2]
    ]
    encoded = engine.tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"]


@pytest.fixture(scope="module")
def expected(reference, batch) -> torch.Tensor:
    ids, mask = batch
    return reference.generate(ids, attention_mask=mask, **GREEDY)


def assert_same_or_tied(ours: list[int], theirs: list[int], reference: PreTrainedModel) -> None:
    """Both are a prompt and as many new tokens."""
    assert len(ours) == len(theirs)
    at = next((index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    if at is not None:
        logits = reference(torch.tensor([theirs[:at]])).logits[0, -1]
        gap = (logits[theirs[at]] - logits[ours[at]]).abs().item()
        assert gap < TIE, f"token {at}: {ours[at]} instead of {theirs[at]}, whose logit is {gap:.2g} away"


@pytest.mark.parametrize(
    ("rows", "speculation"),
    [
        (slice(0, 2), {"speculative_decoding": False}),
        (slice(0, 1), {"speculative_decoding": "force", "exit_layer": 28, "plan": "chain:2"}),
        (slice(1, 2), {"speculative_decoding": "force", "exit_layer": 26, "plan": "nodes:0.0,0.1,1.0"}),
    ],
    ids=["plain", "chain", "tree"],
)
@torch.no_grad()
def test_greedy_tokens_are_transformers(engine, reference, batch, expected, rows, speculation):
    ids, mask = batch[0][rows], batch[1][rows]
    out = engine.generate(ids, mask, return_dict_in_generate=True, **GREEDY, **speculation)
    assert out.sequences.shape == (len(ids), ids.shape[1] + NEW_TOKENS)
    assert mask.sum(1).max() < PAGE_SIZE < mask.sum(1).min() + NEW_TOKENS, "every text crosses the end of a page"
    if "plan" in speculation:
        assert min(stats.accepted for stats in out.stats) > 10, "drafts are accepted, so the tree is walked"
    for ours, theirs, row_mask in zip(out.sequences, expected[rows], mask, strict=True):
        padding = (row_mask == 0).sum()
        assert_same_or_tied(ours[padding:].tolist(), theirs[padding:].tolist(), reference)


@torch.no_grad()
def test_the_shipped_exit_drafts_well_and_changes_no_token(profiled, reference, batch, expected):
    (ids, mask), speculation = batch, {"speculative_decoding": "force", "plan": "tree:3,2,1"}
    out = profiled.generate(ids, mask, return_dict_in_generate=True, **speculation, **GREEDY)
    assert {stats.exit_layer for stats in out.stats} == {1}
    per_step = sum(stats.new_tokens for stats in out.stats) / sum(stats.cycles for stats in out.stats)
    assert per_step > 2.5, "an untrained exit as early gives 1.0 to 1.15"
    for ours, theirs, row_mask in zip(out.sequences, expected, mask, strict=True):
        padding = (row_mask == 0).sum()
        assert_same_or_tied(ours[padding:].tolist(), theirs[padding:].tolist(), reference)


def test_the_shipped_profile_is_of_another_device_so_the_engine_measures_for_itself(profiled):
    assert profiled.profile.device.type == "cuda" and profiled.profile.exits_file.layers() == [1]
    before = profiled.metrics()
    plain, governed = (
        profiled.complete("Once upon a time", max_new_tokens=24, do_sample=False, speculative_decoding=mode)
        for mode in (False, None)
    )
    assert governed.tokens == plain.tokens
    assert governed.stats.exit_layer == 1
    assert profiled.metrics().tokens - before.tokens == 48


def test_the_shipped_profile_knows_the_model_in_any_dtype(profiled, engine):
    half = Engine.from_pretrained("demo", device="cpu", dtype="bfloat16", profile=None)
    profiled.profile.check(half.model)


def test_what_is_shipped_is_small(profiled):
    assert sum(path.stat().st_size for path in profiled.profile.folder.parent.rglob("*")) < 24e6


@pytest.mark.parametrize(
    ("question", "domain"),
    [
        ("Write a C function that returns the larger of two integers, with a comment on every line.", "code"),
        ("Tom has 12 apples. He gives 5 to Ann and buys 8 more. How many apples does Tom have now?", "math"),
        ("Write a short poem about a lighthouse in a storm, with four lines that rhyme.", "write"),
    ],
    ids=["code", "math", "write"],
)
def test_a_clear_case_is_routed_to_its_domain(profiled, question, domain):
    prompt = encode(profiled.tokenizer, [{"role": "user", "content": question}])
    assert profiled.profile.route(profiled.drafters.embed([prompt]).read()) == domain


@torch.inference_mode()
def test_logits_are_transformers(engine, reference):
    tokens = engine.tokenizer(" ".join(PROMPTS[:8]))["input_ids"]
    sequence = engine.cache.open()
    try:
        engine.cache.reserve(sequence, len(tokens))
        causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        rows = Rows([sequence], range(len(tokens)), torch.arange(len(tokens)), causal, engine.model.device)
        hidden = engine.model.embed(torch.tensor([tokens]))
        ours = engine.model.logits(engine.model.run(hidden, 0, engine.model.config.num_layers, rows, engine.cache))
    finally:
        engine.cache.close(sequence)
    theirs = reference(torch.tensor([tokens])).logits
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("question", "word"),
    [("What is the capital of France?", "Paris"), ("What is 2 + 2?", "4")],
    ids=["Paris", "sum"],
)
def test_the_answers_make_sense(engine, question, word):
    answer = engine.complete(
        [{"role": "user", "content": question}], max_new_tokens=32, do_sample=False, speculative_decoding=False
    )
    assert word in answer.text
    assert "<|im" not in answer.text


def test_a_stream_says_what_a_completion_says(engine):
    chat = [{"role": "user", "content": "Name three colours."}]
    settings = {"max_new_tokens": 8, "do_sample": False, "speculative_decoding": "force", "plan": "chain:1"}
    pieces = list(engine.stream(chat, **settings))
    assert len(pieces) > 3
    assert "".join(pieces) == engine.complete(chat, **settings).text


@pytest.fixture(scope="module")
def native() -> Engine:
    return Engine.from_pretrained("demo", device="cpu", dtype="native", profile=None)


def test_the_file_as_it_is_stored_holds_the_expanded_weights(engine, native) -> None:
    """Rounded to bfloat16, as they are expanded, all weights are equal; in memory they take 5 bits each, and scales are
    padded from 576 to 640 columns."""
    for ours, theirs in zip(native.model.layers, engine.model.layers, strict=True):
        for name, weight in theirs.tensors().items():
            assert torch.equal(expand(ours.tensors()[name], torch.bfloat16), weight.bfloat16()), name
    assert torch.equal(expand(native.model.head.weight, torch.bfloat16), engine.model.head.weight.bfloat16())
    assert native.memory()["weights"] < 0.37 * (engine.memory()["weights"] / 2)  # of 16 bits


def test_the_shipped_profile_is_valid_for_the_file_as_it_is_stored(native, profiled, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path))
    found = Profile.find(native.model)
    assert found is not None and found.folder == profiled.profile.folder


def test_the_file_as_it_is_stored_gives_the_expanded_models_greedy_tokens(engine, native, batch) -> None:
    input_ids, mask = (tensor[:1, -40:] for tensor in batch)
    options = {**GREEDY, "max_new_tokens": 3, "attention_mask": mask, "speculative_decoding": False}
    assert torch.equal(native.generate(input_ids, **options), engine.generate(input_ids, **options))
