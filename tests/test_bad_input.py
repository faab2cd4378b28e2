"""Bad input is refused with a ValueError that names the fault and the remedy, before any work starts.

`assert_refuses` checks every case of these tables: the message contains the case's words, no layer has run, no page was
taken, and afterwards the engine still generates transformers' tokens. Values of one setting are tested with its own
module."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, GPT2Config, TextStreamer

from selfspec import Engine, Plan
from selfspec.cache.kv_cache import Cache
from selfspec.models.decoder import Decoder
from selfspec.speculation.exit import Exit
from tests.calibrated import chat_tokenizer
from tests.profiles import choice_of, edit_profile, profile_of, random_exit, random_rows
from tests.tiny import VOCABULARY, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

CONTEXT = 80
LAYERS = 4
PROMPT = torch.tensor([[1, 5, 9, 33]])
BATCH = torch.tensor([[1, 5, 9, 33], [4, 8, 15, 16]])

pytestmark = pytest.mark.filterwarnings("ignore:drafting only")

AssertRefuses = Callable[..., None]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", eos_token_id=None, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def answer(model) -> list[list[int]]:
    return model.generate(PROMPT, max_new_tokens=4).tolist()


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine.from_model(model)


@pytest.fixture(scope="module")
def speaking(model) -> Engine:
    """An engine with a tokenizer that has no chat template."""
    return Engine.from_model(model, tokenizer=tiny_tokenizer())


@contextmanager
def no_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if a layer runs or pages are reserved within."""
    work: list[str] = []

    def record(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            work.append(f"{owner.__name__}.{name}")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)

    record(Decoder, "run")
    record(Decoder, "embed")
    record(Cache, "reserve")
    yield
    monkeypatch.undo()
    assert not work, f"work was done before the refusal: {work}"


@pytest.fixture
def assert_refuses(monkeypatch, answer) -> AssertRefuses:
    """Checks one refusal: `assert_refuses(engine, call, *words)`."""

    def check(engine: Engine, call: Callable[[], Any], *words: str) -> None:
        pages = engine.cache.num_pages
        with no_work(monkeypatch), pytest.raises(ValueError) as caught:
            call()
        message = str(caught.value)
        assert all(word in message for word in words), f"{words} expected in: {message}"
        assert engine.cache.num_pages == pages and engine.cache.free_pages == pages
        assert engine.generate(PROMPT, max_new_tokens=4, speculative_decoding=False).tolist() == answer

    return check


def test_no_work_fails_for_a_request_that_runs(monkeypatch, engine):
    """Otherwise `assert_refuses` could not fail."""
    with pytest.raises(AssertionError, match="work was done"), no_work(monkeypatch):
        engine.generate(PROMPT, max_new_tokens=1)


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.long)


# input_ids, the words of the message, and further arguments.
PROMPTS: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "no-tokens": (torch.empty(1, 0, dtype=torch.long), ("prompt 0 is empty", "at least one token"), {}),
    "no-rows": (torch.empty(0, 3, dtype=torch.long), ("no rows", "at least one prompt"), {}),
    "prompt-fully-masked": (
        BATCH,
        ("prompt 1 is empty", "at least one token"),
        {"attention_mask": ids([1, 1, 1, 1], [0, 0, 0, 0])},
    ),
    "prompt-of-padding-only": (ids([5, 9], [0, 0]), ("prompt 1 is empty", "at least one token"), {"pad_token_id": 0}),
    "id-just-outside": (ids([1, VOCABULARY]), ("prompt 0", "101", "vocabulary", "0 to 100", "tokenizer"), {}),
    "id-negative": (ids([1, 5], [-1, 7]), ("prompt 1", "-1", "vocabulary", "0 to 100"), {}),
    "ids-int32": (PROMPT.int(), ("input_ids", "LongTensor", "int32"), {}),
    "ids-flat": (PROMPT[0], ("input_ids", "[batch, length]", "[4]"), {}),
    "ids-list": (PROMPT.tolist(), ("input_ids", "LongTensor", "list"), {}),
    "ids-none": (None, ("input_ids", "LongTensor", "NoneType"), {}),
    "mask-too-short": (
        PROMPT,
        ("attention_mask [1, 3]", "input_ids [1, 4]", "shape"),
        {"attention_mask": ids([1, 1, 1])},
    ),
    "mask-list": (PROMPT, ("attention_mask", "tensor"), {"attention_mask": [[1, 1, 1, 1]]}),
    "mask-padded-on-the-right": (
        BATCH,
        ("row 1", "attention_mask", "left-padded", "padding_side='left'"),
        {"attention_mask": ids([1, 1, 1, 1], [1, 1, 0, 0])},
    ),
    "mask-with-a-hole": (
        PROMPT,
        ("row 0", "attention_mask", "left-padded"),
        {"attention_mask": ids([1, 0, 1, 1])},
    ),
    "padded-on-the-right-without-a-mask": (
        ids([5, 9, 0, 0]),
        ("row 0", "left-padded", "padding_side='left'"),
        {"pad_token_id": 0},
    ),
    "prompt-at-the-context": (
        torch.ones(1, CONTEXT, dtype=torch.long),
        ("prompt 0", f"{CONTEXT} tokens", f"holds {CONTEXT}", "shorten"),
        {},
    ),
}


@pytest.mark.parametrize("case", PROMPTS.values(), ids=PROMPTS.keys())
def test_prompt_is_refused(case, engine, assert_refuses):
    input_ids, words, kwargs = case
    assert_refuses(engine, lambda: engine.generate(input_ids, **kwargs), *words)


def test_one_token_fits_before_the_context(model, engine):
    prompt = torch.full((1, CONTEXT - 1), 7)
    out = engine.generate(prompt, max_new_tokens=5, return_dict_in_generate=True)
    assert out.sequences.tolist() == model.generate(prompt, max_new_tokens=1).tolist()
    assert out.stats[0].finish_reason == "length"


def test_huge_max_new_tokens_stops_at_the_context(model, engine):
    out = engine.generate(
        PROMPT, max_new_tokens=2**80, plan="tree:3,2", speculative_decoding="force", return_dict_in_generate=True
    )
    expected = model.generate(PROMPT, max_new_tokens=CONTEXT - PROMPT.shape[1])
    assert out.sequences.tolist() == expected.tolist()
    assert out.stats[0].finish_reason == "length"


def test_padding_does_not_count_towards_the_context(engine):
    """A sequence with a shorter prompt gets more new tokens."""
    padded, mask = ids([0, 0, 7, 8], [1, 5, 9, 33]), ids([0, 0, 1, 1], [1, 1, 1, 1])
    out = engine.generate(padded, mask, max_new_tokens=10**6, return_dict_in_generate=True)
    assert [stats.new_tokens for stats in out.stats] == [CONTEXT - 2, CONTEXT - 4]
    assert [stats.finish_reason for stats in out.stats] == ["length", "length"]


MANY_NODES = [(0, rank) for rank in range(64)]
NAMES_OF_FORMS = ("'none'", "'chain:4'", "'tree:4,2,2,1'", "nodes")

ARGUMENTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "max_new_tokens-0": ({"max_new_tokens": 0}, ("max_new_tokens=0", "at least 1")),
    "max_new_tokens-float": ({"max_new_tokens": 5.0}, ("max_new_tokens=5.0", "integer")),
    "max_length-0": ({"max_length": 0}, ("max_length=0", "at least 1")),
    "max_length-is-the-prompt's": (
        {"max_length": 4},
        ("max_length=4", "4 tokens", "raise max_length", "max_new_tokens"),
    ),
    "min_new_tokens-negative": ({"min_new_tokens": -1}, ("min_new_tokens=-1", "at least 0")),
    "exit-layer-minus-1": ({"exit_layer": -1}, ("exit_layer=-1", "4 layers", "0 to 3")),
    "exit-layer-last": ({"exit_layer": LAYERS}, ("exit_layer=4", "4 layers", "0 to 3")),
    "exit-layer-bad-though-switched-off": (
        {"exit_layer": 30, "speculative_decoding": False},
        ("exit_layer=30", "4 layers", "0 to 3"),
    ),
    "plan-of-no-kind": ({"plan": "spline:3"}, ("'spline:3'", "malformed", *NAMES_OF_FORMS)),
    "plan-chain-of-0": ({"plan": "chain:0"}, ("at least one node", *NAMES_OF_FORMS)),
    "plan-not-pairs": ({"plan": [0, 1]}, ("pairs (parent, rank)", *NAMES_OF_FORMS)),
    "nodes-64-listed": ({"plan": MANY_NODES}, ("64 nodes", "63")),
    "rank-beyond-the-vocabulary": ({"plan": [(0, 0), (0, VOCABULARY)]}, ("rank 101", "101 tokens")),
    "argument-num_beams": ({"num_beams": 4}, ("num_beams=4", "not supported", "top_p")),
    "argument-invented": ({"invented": 1}, ("'invented'", "max_new_tokens", "top_p")),
    "argument-invented-none": ({"invented": None}, ("'invented'", "max_new_tokens", "top_p")),
    "argument-assistant_model": ({"assistant_model": "x"}, ("assistant_model", "supported", "top_p")),
    "bad_words_ids-flat": ({"bad_words_ids": [4]}, ("bad_words_ids", "list of lists")),
    "sequence_bias-of-no-sequence": ({"sequence_bias": {4: 1.0}}, ("sequence_bias", "tuples")),
    "sequence_bias-outside": ({"sequence_bias": {(VOCABULARY,): 1.0}}, ("sequence_bias", "101", "0 to 100")),
    "suppress_tokens-text": ({"suppress_tokens": "4"}, ("suppress_tokens='4'", "token id")),
    "logit_bias-outside": ({"logit_bias": {VOCABULARY: 1.0}}, ("logit_bias", "101", "0 to 100")),
    "allowed_token_ids-outside": ({"allowed_token_ids": [4, 900]}, ("allowed_token_ids", "900", "0 to 100")),
    "logits_processor-alone": ({"logits_processor": lambda ids, scores: scores}, ("logits_processor", "list")),
    "stopping_criteria-alone": ({"stopping_criteria": lambda ids, scores: False}, ("stopping_criteria", "list")),
    "inputs-and-input_ids": ({"inputs": PROMPT}, ("inputs", "input_ids", "one of them")),
    **{
        f"{name}-returned": ({name: True, "return_dict_in_generate": True}, (f"{name}=True", "not supported"))
        for name in ("output_scores", "output_attentions")
    },
    "config-num_beams": ({"generation_config": GenerationConfig(num_beams=4)}, ("num_beams=4", "not supported")),
    "config-invented": ({"generation_config": GenerationConfig(invented=3)}, ("invented=3", "not supported")),
    "config-top_k": (
        {"generation_config": GenerationConfig(do_sample=True, top_k=-1)},
        ("top_k=-1", "at least 0"),
    ),
    "config-dict": ({"generation_config": {"max_new_tokens": 3}}, ("generation_config", "GenerationConfig", "dict")),
    "mode-zero": ({"speculative_decoding": 0}, ("speculative_decoding=0", "False", "'force'")),
    "mode-word": ({"speculative_decoding": "on"}, ("speculative_decoding='on'", "False", "'force'")),
    "acceptance-word": ({"acceptance": "always"}, ("acceptance='always'", "'coupled'", "'rejection'")),
    "rules-dict": ({"rules": {"max_batch": 4}}, ("rules", "Rules")),
    "seed-float": ({"seed": 1.5}, ("seed", "1.5", "integer")),
    "seed-of-65-bits": ({"seed": 2**63}, ("seed", str(2**63), "64 bits")),
    "seed-for-two-prompts": ({"seed": [1, 2]}, ("seed", "2 entries", "1 prompts", "one per prompt")),
    "temperature-0": ({"do_sample": True, "temperature": 0.0}, ("temperature=0.0", "above 0", "do_sample=False")),
    "top_k-negative": ({"do_sample": True, "top_k": -1}, ("top_k=-1", "at least 0", "0 switches it off")),
    "top_p-0": ({"do_sample": True, "top_p": 0.0}, ("top_p=0.0", "above 0", "at most 1")),
    "min_p-negative": ({"do_sample": True, "min_p": -0.1}, ("min_p=-0.1", "between 0 and 1")),
    "repetition_penalty-0": ({"repetition_penalty": 0.0}, ("repetition_penalty=0.0", "above 0", "1 switches it off")),
    "eos-text": ({"eos_token_id": "</s>"}, ("eos_token_id", "'</s>'")),
    **{
        f"{name}-of-65-bits": ({name: value, "min_new_tokens": 2}, (f"{name}={value} is not possible", "token id"))
        for name in ("pad_token_id", "eos_token_id", "stop_token_ids", "suppress_tokens")
        for value in (2**63, -(2**63) - 1)
    },
    "pad-text": ({"pad_token_id": "<pad>"}, ("pad_token_id", "'<pad>'")),
    "sequences-0": ({"num_return_sequences": 0, "do_sample": True}, ("num_return_sequences=0", "at least 1")),
    "sequences-while-greedy": (
        {"num_return_sequences": 2},
        ("num_return_sequences=2", "do_sample=True", "num_return_sequences=1"),
    ),
    "stop_strings-without-a-tokenizer": ({"stop_strings": ["."]}, ("stop_strings", "tokenizer", "Engine.from_model")),
    "stop_strings-a-number": ({"stop_strings": 5}, ("stop_strings", "5")),
}


@pytest.mark.parametrize("case", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_argument_is_refused(case, engine, assert_refuses):
    kwargs, words = case
    assert_refuses(engine, lambda: engine.generate(PROMPT, **kwargs), *words)


def test_a_plan_of_63_nodes_is_accepted(engine, answer):
    plan = [(0, rank) for rank in range(63)]
    out = engine.generate(PROMPT, max_new_tokens=4, plan=plan, return_dict_in_generate=True)
    assert out.sequences.tolist() == answer
    assert out.stats[0].plan == str(Plan.parse(plan))


def test_the_last_rank_of_the_vocabulary_is_accepted(engine, answer):
    out = engine.generate(PROMPT, max_new_tokens=4, plan=[(0, VOCABULARY - 1)], return_dict_in_generate=True)
    assert out.sequences.tolist() == answer
    assert out.stats[0].plan == f"nodes:0.{VOCABULARY - 1}"


@pytest.mark.parametrize(
    ("prompt", "kwargs"),
    [(BATCH, {}), (PROMPT, {"do_sample": True, "num_return_sequences": 2})],
    ids=["two-prompts", "two-sequences"],
)
def test_a_streamer_for_several_sequences_is_refused(speaking, assert_refuses, prompt, kwargs):
    streamer = TextStreamer(speaking.tokenizer)
    words = ("streamer", "one prompt", "num_return_sequences=1")
    assert_refuses(speaking, lambda: speaking.generate(prompt, streamer=streamer, **kwargs), *words)


class TestText:
    @pytest.mark.parametrize("method", ["complete", "stream"])
    def test_text_needs_a_tokenizer(self, engine, assert_refuses, method):
        assert_refuses(engine, lambda: getattr(engine, method)("Hello"), "tokenizer", "Engine.from_model", "generate()")

    @pytest.mark.parametrize("method", ["complete", "stream"])
    def test_an_empty_text_is_refused(self, speaking, assert_refuses, method):
        assert_refuses(speaking, lambda: getattr(speaking, method)(""), "prompt 0 is empty", "at least one token")

    def test_an_empty_text_among_others_is_named(self, speaking, assert_refuses):
        assert_refuses(speaking, lambda: speaking.complete(["a", "", "b"]), "prompt 1 is empty")

    @pytest.mark.parametrize("method", ["complete", "stream"])
    def test_messages_need_a_chat_template(self, speaking, assert_refuses, method):
        chat = [{"role": "user", "content": "a"}]
        assert_refuses(speaking, lambda: getattr(speaking, method)(chat), "chat template", "one string")

    @pytest.mark.parametrize(
        "message", [{"role": "user"}, {"content": "a"}, "a"], ids=["no-content", "no-role", "no-message"]
    )
    def test_a_message_needs_role_and_content(self, speaking, assert_refuses, message):
        chat = [{"role": "user", "content": "a"}, message]
        assert_refuses(speaking, lambda: speaking.complete(chat), "'role'", "'content'", repr(message))

    @pytest.mark.parametrize("prompt", [5, None, [5], [["a"]]], ids=str)
    def test_a_prompt_of_another_type_is_refused(self, speaking, assert_refuses, prompt):
        assert_refuses(speaking, lambda: speaking.complete(prompt), "prompt", "string", "messages")

    def test_a_stream_of_several_sequences_is_refused(self, speaking, assert_refuses):
        call = lambda: speaking.stream("a", do_sample=True, num_return_sequences=2)  # noqa: E731
        assert_refuses(speaking, call, "stream()", "one prompt", "num_return_sequences=1")

    @pytest.mark.parametrize("name", ["input_ids", "attention_mask", "streamer"])
    def test_an_argument_of_generate_alone_is_refused(self, speaking, assert_refuses, name):
        assert_refuses(speaking, lambda: speaking.complete("a", **{name: None}), name, "generate()", "stream()")

    def test_an_unknown_option_is_named(self, speaking, assert_refuses):
        assert_refuses(speaking, lambda: speaking.complete("a", invented=1), "'invented'", "max_new_tokens")

    def test_a_text_longer_than_the_context_is_refused(self, speaking, assert_refuses):
        assert_refuses(speaking, lambda: speaking.complete("a" * CONTEXT), "prompt 0", f"holds {CONTEXT}", "shorten")


class TestEngineArguments:
    @pytest.mark.parametrize(("name", "value"), [("max_length", 0), ("max_batch", 2.5)])
    def test_a_limit_must_be_a_positive_integer(self, model, name, value):
        with pytest.raises(ValueError, match=f"{name}=.*at least 1"):
            Engine.from_model(model, **{name: value})

    @pytest.mark.parametrize("wrong", [{"batch": 0}, {"max_length": "long"}, {"bach": 2}], ids=str)
    def test_a_warm_up_without_kernels_refuses_what_one_with_kernels_would(self, model, wrong):
        with pytest.raises(ValueError, match="at least 1|did you mean batch"):
            Engine.from_model(model).warmup(**wrong)

    def test_rules_must_be_rules(self, model):
        with pytest.raises(ValueError, match="rules=.*selfspec.Rules"):
            Engine.from_model(model, rules={"max_batch": 4})

    def test_a_prompt_at_the_engines_max_length_is_refused(self, model, assert_refuses):
        engine = Engine.from_model(model, max_length=12)
        assert_refuses(
            engine, lambda: engine.generate(torch.ones(1, 12, dtype=torch.long)), "12 tokens", "holds 12", "shorten"
        )

    @pytest.mark.parametrize("value", [0, "8", True, 1e-9], ids=str)
    def test_a_cache_must_hold_a_sequence_of_64_positions(self, model, value):
        with pytest.raises(ValueError, match="kv_cache_gb=.*(above 0|or more)"):
            Engine.from_model(model, kv_cache_gb=value)


QUANTIZED = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama", torch.float32).save_pretrained(folder)
    return folder


class TestModelFolder:
    """Refusals of `Engine.from_pretrained` before a weight is loaded."""

    @pytest.fixture
    def folder(self, saved, tmp_path) -> Path:
        return Path(shutil.copytree(saved, tmp_path / "model"))

    @pytest.fixture
    def assert_refuses_to_load(self, monkeypatch) -> AssertRefuses:
        def check(folder: Path, *words: str, but_not: str | None = None, **kwargs: Any) -> None:
            def never(*_: Any, **__: Any) -> None:
                raise AssertionError("weights were loaded before the refusal")

            monkeypatch.setattr("selfspec.models.shards.safe_open", never)
            monkeypatch.setattr("selfspec.models.decoder.Decoder.__init__", never)
            with pytest.raises(ValueError) as caught:
                Engine.from_pretrained(folder, **{"device": "cpu", "profile": None, **kwargs})
            message = str(caught.value)
            assert all(word in message for word in words), f"{words} expected in: {message}"
            assert but_not is None or but_not not in message

        return check

    def edit_config(self, folder: Path, **entries: Any) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    def test_the_unchanged_folder_loads(self, folder):
        engine = Engine.from_pretrained(folder, device="cpu", profile=None)
        expected = tiny_model("llama", torch.float32).generate(PROMPT, max_new_tokens=4)
        assert engine.generate(PROMPT, max_new_tokens=4, speculative_decoding=False).tolist() == expected.tolist()

    def test_unsupported_model_type(self, tmp_path, assert_refuses_to_load):
        GPT2Config(n_layer=2).save_pretrained(tmp_path)
        families = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
        assert_refuses_to_load(tmp_path, "'gpt2'", "not supported", *families)

    def test_unknown_model_type(self, folder, assert_refuses_to_load):
        self.edit_config(folder, model_type="invented")
        assert_refuses_to_load(folder, "'invented'", "not supported", "llama")

    def test_quantized_checkpoint(self, folder, assert_refuses_to_load):
        self.edit_config(folder, quantization_config=QUANTIZED)
        assert_refuses_to_load(
            folder, "model.layers.0.self_attn.q_proj has 32 columns", "group_size=128", "config.json"
        )

    @pytest.mark.parametrize(
        ("file", "auto_map"),
        [
            ("tokenizer_config.json", {"AutoTokenizer": ["own.Tokenizer", None]}),
            ("tokenizer_config.json", ["own.Tokenizer", None]),
            ("config.json", {"AutoConfig": "own.Tokenizer", "AutoModelForCausalLM": "own.Tokenizer"}),
            ("config.4.0.0.json", {"AutoConfig": "own.Tokenizer"}),
        ],
        ids=["tokenizer", "tokenizer-as-a-list", "config", "config-of-a-version"],
    )
    def test_code_of_a_checkpoint_never_runs(
        self, folder, assert_refuses_to_load, monkeypatch, tmp_path, file, auto_map
    ):
        """Not even if standard input answers yes to transformers' question."""
        chat_tokenizer().save_pretrained(folder)
        ran = tmp_path / "ran"
        (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n\nclass Tokenizer:\n    pass\n")
        path = folder / file
        if not path.exists():
            shutil.copy(folder / "config.json", path)
            self.edit_config(folder, configuration_files=[file])
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map, "tokenizer_class": "Own"}))
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
        monkeypatch.setattr("builtins.input", lambda *_: "y")
        assert_refuses_to_load(folder, str(path), "auto_map", "code", "delete", but_not="trust_remote_code")
        assert not ran.exists()

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("config.json", "{"),
            ("config.json", "[]"),
            ("config.json", '{"a":' * 100_000),
            ("tokenizer_config.json", "{"),
            ("tokenizer.json", "{"),
            ("tokenizer.json", "[" * 100_000),
            ("generation_config.json", "{"),
            ("generation_config.json", "[" * 100_000),
        ],
        ids=lambda text: text[:22],
    )
    def test_a_damaged_file(self, folder, assert_refuses_to_load, file, content):
        chat_tokenizer().save_pretrained(folder)
        (folder / file).write_text(content)
        assert_refuses_to_load(folder, str(folder), file.split(".")[0].split("_")[0], "again")

    def test_pickled_weights_only(self, folder, assert_refuses_to_load):
        (folder / "model.safetensors").unlink()
        torch.save({}, folder / "pytorch_model.bin")
        assert_refuses_to_load(folder, "pickled", "pytorch_model.bin", "safetensors", "save_pretrained")

    def test_no_weights_at_all(self, folder, assert_refuses_to_load):
        (folder / "model.safetensors").unlink()
        assert_refuses_to_load(folder, "no weights", "model.safetensors", "again")

    def test_truncated_safetensors(self, folder, assert_refuses_to_load):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        assert_refuses_to_load(folder, "model.safetensors", "bytes", "again")

    def test_missing_shard(self, tmp_path, assert_refuses_to_load):
        tiny_model("llama", torch.float32).save_pretrained(tmp_path, max_shard_size="40KB")
        shards = sorted(tmp_path.glob("model-*.safetensors"))
        assert len(shards) > 2
        shards[1].unlink()
        assert_refuses_to_load(tmp_path, shards[1].name, f"{len(shards)} files", "download")

    def test_missing_config(self, folder, assert_refuses_to_load):
        (folder / "config.json").unlink()
        assert_refuses_to_load(folder, "no config.json", "save_pretrained")

    def test_missing_folder(self, tmp_path, assert_refuses_to_load):
        assert_refuses_to_load(tmp_path / "nowhere", "nowhere", "does not exist", "folder")

    def test_weights_of_another_shape(self, folder, assert_refuses_to_load):
        self.edit_config(folder, intermediate_size=64)
        assert_refuses_to_load(folder, "[48, 32] instead of [64, 32]", "same checkpoint")

    @pytest.mark.parametrize(
        ("kwargs", "words"),
        [
            ({"device": "tpu"}, ("device='tpu'", "'cpu'")),
            ({"dtype": "int4"}, ("dtype='int4'", "'bfloat16'")),
            ({"max_length": 0}, ("max_length=0", "at least 1")),
            ({"max_batch": -1}, ("max_batch=-1", "at least 1")),
            ({"profile": "nowhere"}, ("no profile at nowhere", "calibrate")),
        ],
        ids=["device", "dtype", "max_length", "max_batch", "profile"],
    )
    def test_bad_argument(self, folder, assert_refuses_to_load, kwargs, words):
        assert_refuses_to_load(folder, *words, **kwargs)

    def test_a_live_quantized_model(self):
        model = tiny_model("llama", torch.float32)
        model.config.quantization_config = QUANTIZED
        with pytest.raises(ValueError, match="(?s)quantized.*gptq.*unquantized"):
            Engine.from_model(model)

    def test_a_live_model_of_another_type(self):
        model = tiny_model("llama", torch.float32)
        model.config = GPT2Config(n_layer=2)
        with pytest.raises(ValueError, match="'gpt2' is not supported.*llama.*gemma3_text"):
            Engine.from_model(model)


class TestProfile:
    @pytest.fixture
    def folder(self, engine, tmp_path) -> Path:
        domains = {"chat": choice_of(2, "chain:2"), "code": choice_of(1, "tree:2")}
        exits = [random_exit(engine.model, 2), Exit(engine.model, 1)]
        profile_of(engine.model, domains).save(tmp_path / "profile", exits, {"chat": random_rows(40)})
        return tmp_path / "profile"

    def test_the_unchanged_profile_loads(self, model, folder, answer):
        engine = Engine.from_model(model, profile=folder)
        out = engine.generate(PROMPT, max_new_tokens=4, return_dict_in_generate=True)
        assert out.sequences.tolist() == answer and out.stats[0].exit_layer == 2

    @pytest.mark.parametrize("other", [{"seed": 1}, {"num_hidden_layers": 3}], ids=["values", "layers"])
    def test_made_for_other_weights(self, folder, assert_refuses, engine, other):
        other_model = tiny_model("llama", **other)
        call = lambda: Engine.from_model(other_model, profile=folder)  # noqa: E731
        assert_refuses(engine, call, str(folder), "other weights", "calibrate", "profile=None")

    def test_made_for_weights_that_differ_a_little(self, folder, assert_refuses, engine, model):
        """A fine-tuned copy: every weight moved by a few per cent."""
        tuned = tiny_model("llama")
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter += 0.05 * parameter.std() * torch.randn_like(parameter) if parameter.ndim > 1 else 0
        call = lambda: Engine.from_model(tuned, profile=folder)  # noqa: E731
        assert_refuses(engine, call, "other weights", "calibrate")

    @pytest.mark.parametrize("version", [1, None], ids=["other", "missing"])
    def test_of_another_schema(self, folder, assert_refuses, engine, model, version):
        edit_profile(folder, schema_version=version)
        call = lambda: Engine.from_model(model, profile=folder)  # noqa: E731
        assert_refuses(engine, call, "profile.json", f"schema version {version}", "reads 2", "calibrate")

    @pytest.mark.parametrize("content", ["{", "[]", "\x00\xff"], ids=repr)
    def test_corrupt_profile_json(self, folder, assert_refuses, engine, model, content):
        (folder / "profile.json").write_text(content, encoding="latin-1")
        assert_refuses(engine, lambda: Engine.from_model(model, profile=folder), "profile.json", "calibrate")

    @pytest.mark.parametrize(
        ("entries", "word"),
        [
            ({"domains": {}}, "domain"),
            ({"domains": {"chat": {"exit_layer": 2}}}, "plan"),
            ({"domains": {"chat": choice_of(2, "chain:x").model_dump()}}, "plan 'chain:x' is malformed"),
            ({"surprise": 1}, "surprise"),
            ({"model": None}, "model"),
        ],
        ids=["no-domain", "no-plan", "malformed-plan", "unknown-entry", "no-model"],
    )
    def test_invalid_profile_json(self, folder, assert_refuses, engine, model, entries, word):
        edit_profile(folder, **entries)
        assert_refuses(engine, lambda: Engine.from_model(model, profile=folder), "profile.json", word, "calibrate")

    def test_missing_profile(self, tmp_path, assert_refuses, engine, model):
        call = lambda: Engine.from_model(model, profile=tmp_path / "nowhere")  # noqa: E731
        assert_refuses(engine, call, "nowhere", "no profile", "calibrate")

    def test_an_exit_the_model_does_not_have(self, folder, assert_refuses, engine, model):
        edit_profile(folder, domains={"chat": choice_of(9, "chain:2").model_dump()})
        call = lambda: Engine.from_model(model, profile=folder).generate(PROMPT)  # noqa: E731
        assert_refuses(engine, call, "profile", "9", "4 layers", "0 to 3")

    @pytest.mark.parametrize(
        "damage",
        ["truncated", "tensor-missing", "tensor-misshapen", "recall-misshapen", "rows-descending"],
    )
    def test_corrupt_exits(self, folder, assert_refuses, engine, model, answer, damage):
        """Refused when the engine is built or when an exit is first needed; plain decoding needs none."""
        file = folder / "exits.safetensors"
        tensors, content = load_file(file), file.read_bytes()
        if damage == "tensor-missing":
            del tensors["2.block.qkv"]
            save_file(tensors, file)
        elif damage == "tensor-misshapen":
            save_file({**tensors, "2.affine_weight": torch.zeros(3, 5)}, file)
        elif damage == "recall-misshapen":
            save_file({**tensors, "2.recall": torch.zeros(3, 5)}, file)
        elif damage == "rows-descending":
            save_file({**tensors, "head_rows.chat": tensors["head_rows.chat"].flip(0).contiguous()}, file)
        else:
            file.write_bytes(content[:-10])
        call = lambda: Engine.from_model(model, profile=folder).generate(PROMPT)  # noqa: E731
        assert_refuses(engine, call, "exits.safetensors", "python -m selfspec.calibrate")
        plain = Engine.from_model(model, profile=folder)
        assert plain.generate(PROMPT, max_new_tokens=4, speculative_decoding=False).tolist() == answer

    def test_unknown_domain(self, folder, assert_refuses, model):
        engine = Engine.from_model(model, profile=folder)
        assert_refuses(engine, lambda: engine.generate(PROMPT, domain="law"), "domain='law'", "chat, code", "'auto'")
