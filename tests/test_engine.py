"""An engine holds one copy of the weights, warns once without a profile, obeys its limits, and completes texts."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from selfspec import Completion, Engine
from tests.engines import PROMPT, prompts, save_profile
from tests.profiles import random_rows
from tests.tiny import FAMILIES, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine.from_model(model)


CHAT = "<s>{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}assistant:{% endif %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """With a chat template that starts with <s>, which plain text gets from the tokenizer: never both."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="module")
def speaking(model, tokenizer) -> Engine:
    return Engine.from_model(model, tokenizer)


def tensors_of(decoder: Any) -> list[torch.Tensor]:
    per_layer = [tensor for layer in decoder.layers for tensor in layer.tensors().values()]
    return [decoder.embedding.weight, decoder.norm, decoder.head.weight, *per_layer]


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes of every storage behind these tensors, by its address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def live_storages() -> dict[int, int]:
    """Every storage in this process that a Python object can reach."""
    gc.collect()
    return storages([thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)])


class TestWeights:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_from_model_shares_the_storage_of_every_parameter(self, family):
        model = tiny_model(family)
        engine = Engine.from_model(model)
        ours = storages(tensors_of(engine.model))
        theirs = storages([parameter.data for parameter in model.parameters()])
        assert ours == theirs

    @pytest.mark.parametrize("family", FAMILIES)
    def test_from_model_leaves_the_model_working(self, family):
        model = tiny_model(family)
        before = model(PROMPT).logits.detach()
        Engine.from_model(model)
        assert torch.equal(model(PROMPT).logits, before)

    def test_a_change_of_the_model_is_a_change_of_the_engine(self):
        model = tiny_model("llama", eos_token_id=None)
        engine = Engine.from_model(model)
        before = engine.generate(PROMPT, speculative_decoding=False).tolist()
        with torch.no_grad():
            model.model.layers[2].self_attn.k_proj.weight.mul_(-1)
        after = engine.generate(PROMPT, speculative_decoding=False).tolist()
        assert after != before
        assert after == model.generate(PROMPT, max_new_tokens=20).tolist()

    @pytest.mark.parametrize("family", ["llama", "gemma3_text"], ids=["untied", "tied"])
    def test_from_pretrained_holds_one_copy_of_each_weight(self, family, tmp_path):
        saved = tiny_model(family, torch.float32)
        saved.save_pretrained(tmp_path)
        parameters = sum(parameter.numel() for parameter in saved.parameters())
        before = live_storages()
        engine = Engine.from_pretrained(tmp_path, device="cpu", dtype="bfloat16", profile=None)
        grown = {address: size for address, size in live_storages().items() if address not in before}
        assert sum(grown.values()) - engine.cache.nbytes == engine.model.nbytes == 2 * parameters
        assert engine.memory()["weights"] == 2 * parameters

    def test_from_model_adds_no_weight(self):
        model = tiny_model("llama")
        before = sum(live_storages().values())
        engine = Engine.from_model(model)
        assert sum(live_storages().values()) - engine.cache.nbytes == before
        assert engine.memory()["weights"] == sum(p.numel() * p.element_size() for p in model.parameters())

    def test_from_pretrained_reads_the_folders_generation_config_and_tokenizer(self, tmp_path, tokenizer):
        saved = tiny_model("llama", torch.float32)
        saved.generation_config.eos_token_id = [7, 8]
        saved.generation_config.max_new_tokens = 3
        saved.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        engine = Engine.from_pretrained(str(tmp_path), device="cpu", profile=None)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert engine.generate(PROMPT, speculative_decoding=False).tolist() == theirs.generate(PROMPT).tolist()
        assert engine.tokenizer.get_vocab() == tokenizer.get_vocab()

    def test_from_pretrained_does_without_a_tokenizer(self, tmp_path):
        tiny_model("llama", torch.float32).save_pretrained(tmp_path)
        assert Engine.from_pretrained(tmp_path, device="cpu", profile=None).tokenizer is None


class TestMemory:
    def test_the_cache_counts_keys_and_values_of_every_layer_and_the_exits(self, model):
        engine, used = Engine.from_model(model), []
        config = engine.model.config
        of_a_page = 2 * 64 * (config.num_layers + 1) * config.num_kv_heads * config.head_dim * 8  # float64

        def record(prefix: torch.Tensor, _: Any) -> torch.Tensor:
            used.append(engine.memory()["cache_used"])
            return torch.tensor([False])

        engine.generate(PROMPT, max_new_tokens=2, stopping_criteria=[record], speculative_decoding=False)
        memory = engine.memory()
        assert memory["cache"] == engine.cache.num_pages * of_a_page > 0
        assert used == [of_a_page] * 2
        assert memory["cache_used"] == memory["exits"] == 0

    def test_a_raw_exit_costs_nothing(self, model):
        engine = Engine.from_model(model)
        engine.generate(PROMPT, max_new_tokens=2, exit_layer=2)
        assert engine.memory()["exits"] == 0

    def test_a_trained_exit_is_counted_and_loaded_once(self, model, tmp_path):
        engine = Engine.from_model(model, profile=save_profile(model, tmp_path, block=True))
        engine.generate(PROMPT, max_new_tokens=2)
        layer = sum(parameter.numel() for parameter in model.model.layers[2].parameters())
        expected = 8 * (layer + 32 * 32 + 32 + 32 * 64 + 32)  # in float64: block, affine with bias, recall, norm
        assert engine.memory()["exits"] == expected
        engine.generate(PROMPT, max_new_tokens=2)
        assert engine.memory()["exits"] == expected

    def test_a_trimmed_head_is_counted_once_and_a_requests_own_rows_while_it_lives(self, model, tokenizer, tmp_path):
        rows = random_rows(40)
        engine = Engine.from_model(model, tokenizer, save_profile(model, tmp_path, block=True, rows=rows))
        before = engine.memory()["exits"]
        engine.generate(PROMPT, max_new_tokens=2)
        between = engine.memory()["exits"]
        (exit,) = engine.drafters.exits.values()
        assert between - before - exit.nbytes == len(rows) * 32 * 8

        def of_heads(*texts: str) -> int:
            offered = [{*rows.tolist(), *tokenizer(text)["input_ids"]} for text in texts]
            return sum(len(tokens) * 8 + (len(tokens) - len(rows)) * 32 * 8 for tokens in offered)  # ids; guests' rows

        with engine.stream("abc", max_new_tokens=400, domain="chat") as stream:
            next(stream)
            assert engine.memory()["exits"] == between + of_heads("abc")
        assert engine.memory()["exits"] == between

    def test_a_trimmed_head_is_dropped_when_its_request_fails(self, model, tmp_path):
        engine = Engine.from_model(model, profile=save_profile(model, tmp_path, block=True, rows=random_rows(40)))
        engine.generate(PROMPT, max_new_tokens=2)
        engine.scheduler.call(gc.collect)  # after the pass that ended the request
        between, seen = engine.memory()["exits"], []

        def fails(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(engine.memory()["exits"])
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            engine.generate(PROMPT, max_new_tokens=2, logits_processor=[fails])
        engine.scheduler.call(gc.collect)  # the traceback held the request
        assert seen[0] > between == engine.memory()["exits"]


class TestNoProfileWarning:
    def test_it_comes_once_and_says_what_to_do(self, model):
        engine = Engine.from_model(model)
        with pytest.warns(UserWarning, match="no profile.*python -m selfspec.calibrate"):
            engine.generate(PROMPT, max_new_tokens=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.generate(PROMPT, max_new_tokens=1)

    def test_every_engine_has_its_own(self, model):
        for engine in (Engine.from_model(model), Engine.from_model(model)):
            with pytest.warns(UserWarning, match="no profile"):
                engine.generate(PROMPT, max_new_tokens=1)

    @pytest.mark.parametrize("method", ["generate", "complete", "stream"])
    def test_it_points_at_the_callers_line(self, model, tokenizer, method):
        engine = Engine.from_model(model, tokenizer)
        with pytest.warns(UserWarning, match="no profile") as caught:
            if method == "generate":
                engine.generate(PROMPT, max_new_tokens=1)
            elif method == "complete":
                engine.complete("a", max_new_tokens=1)
            else:
                engine.stream("a", max_new_tokens=1)
        assert caught[0].filename == __file__

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"speculative_decoding": False},
            {"speculative_decoding": "force"},
            {"exit_layer": 2},
            {"plan": "chain:2"},
            {"plan": "none"},
        ],
        ids=str,
    )
    def test_a_request_that_chooses_gets_none(self, model, kwargs):
        engine = Engine.from_model(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.generate(PROMPT, max_new_tokens=1, **kwargs)


class TestLimits:
    def test_max_length_ends_the_text(self, model):
        engine = Engine.from_model(model, max_length=10)
        out = engine.generate(PROMPT, max_new_tokens=50, exit_layer=2, return_dict_in_generate=True)
        assert out.sequences.tolist() == model.generate(PROMPT, max_length=10).tolist()
        assert out.stats[0].finish_reason == "length"

    def test_max_length_cannot_exceed_the_models_context(self):
        model = tiny_model("llama", eos_token_id=None, max_position_embeddings=16)
        engine = Engine.from_model(model, max_length=1000)
        assert engine.generate(PROMPT, max_new_tokens=50, exit_layer=2).shape == (1, 16)

    def test_a_full_batch_of_full_length_fits(self, model):
        """The pages that the limits allow are enough for the widest tree at the very end of every row."""
        engine = Engine.from_model(model, max_length=70, max_batch=2)
        ids = prompts(2)
        plan = [(0, rank) for rank in range(63)]
        kwargs = {"max_new_tokens": 100, "plan": plan, "exit_layer": 1, "speculative_decoding": "force"}
        assert engine.generate(ids, **kwargs).shape == (2, 70)
        assert engine.cache.free_pages == engine.cache.num_pages


@pytest.mark.filterwarnings("ignore:drafting only")
class TestComplete:
    """Text in, text out; the tokens are those of `generate`."""

    settings = {"max_new_tokens": 8, "speculative_decoding": False}

    def new_tokens(self, engine: Engine, ids: list[int]) -> list[int]:
        return engine.generate(torch.tensor([ids]), **self.settings)[0, len(ids) :].tolist()

    def test_a_string_gives_a_completion(self, speaking, tokenizer):
        completion = speaking.complete("a b c", **self.settings)
        assert isinstance(completion, Completion)
        assert completion.tokens == self.new_tokens(speaking, tokenizer("a b c")["input_ids"])
        assert completion.text == tokenizer.decode(completion.tokens, skip_special_tokens=True)
        assert completion.finish_reason == "length"
        assert completion.stats.new_tokens == 8

    def test_an_end_token_gives_the_reason_stop(self, speaking, tokenizer):
        second = self.new_tokens(speaking, tokenizer("a b c")["input_ids"])[1]
        completion = speaking.complete("a b c", eos_token_id=second, **self.settings)
        assert (completion.tokens[-1], completion.finish_reason) == (second, "stop")
        assert len(completion.tokens) <= 2

    def test_a_list_gives_a_list(self, speaking):
        texts = ["a b c", "d", "e f"]
        completions = speaking.complete(texts, **self.settings)
        assert [c.tokens for c in completions] == [speaking.complete(t, **self.settings).tokens for t in texts]

    def test_a_list_of_one_gives_a_list_of_one(self, speaking):
        completions = speaking.complete(["a b c"], **self.settings)
        assert isinstance(completions, list) and len(completions) == 1

    def test_messages_go_through_the_chat_template(self, speaking, tokenizer):
        chat = [
            {"role": "user", "content": "a b"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ]
        completion = speaking.complete(chat, **self.settings)
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert isinstance(completion, Completion)
        assert completion.tokens == self.new_tokens(speaking, ids)
        assert completion.tokens != speaking.complete("d", **self.settings).tokens

    def test_a_list_of_chats_gives_a_list(self, speaking):
        chats = [[{"role": "user", "content": text}] for text in ("a b", "c")]
        completions = speaking.complete(chats, **self.settings)
        assert [c.tokens for c in completions] == [speaking.complete(chat, **self.settings).tokens for chat in chats]

    @pytest.mark.parametrize("prompt", ["a b c", ["a b c"]], ids=["string", "list"])
    def test_several_copies_give_a_list(self, speaking, tokenizer, prompt):
        copies = speaking.complete(prompt, **self.settings, do_sample=True, num_return_sequences=3, seed=4)
        ids = torch.tensor([tokenizer("a b c")["input_ids"]])
        expected = speaking.generate(ids, **self.settings, do_sample=True, num_return_sequences=3, seed=4)
        assert [copy.tokens for copy in copies] == expected[:, ids.shape[1] :].tolist()

    @pytest.mark.parametrize("method", ["complete", "stream"])
    def test_512_new_tokens_are_the_default(self, tokenizer, method):
        model = tiny_model("llama", eos_token_id=None, num_hidden_layers=2, max_position_embeddings=1024)
        model.model.layers[1].self_attn.o_proj.weight.data.zero_()
        model.model.layers[1].mlp.down_proj.weight.data.zero_()  # an exit after 1 layer is always right: fewer cycles
        engine = Engine.from_model(model, tokenizer)
        drafting = {"exit_layer": 1, "plan": "chain:40"}
        if method == "complete":
            completion = engine.complete("a b c", **drafting)
        else:
            stream = engine.stream("a b c", **drafting)
            assert len("".join(stream)) > 0
            completion = stream.completion
        assert (len(completion.tokens), completion.finish_reason) == (512, "length")

    @pytest.mark.parametrize("kwargs", [{"max_new_tokens": 3}, {"max_length": 7}], ids=str)
    def test_a_length_replaces_the_default(self, speaking, kwargs):
        """The prompt has four tokens: <s>, a, b, c."""
        assert len(speaking.complete("abc", speculative_decoding=False, **kwargs).tokens) == 3
        config = GenerationConfig(**kwargs)
        assert len(speaking.complete("abc", speculative_decoding=False, generation_config=config).tokens) == 3

    def test_speculation_changes_no_token(self, speaking):
        plain = speaking.complete("a b c", max_new_tokens=20, speculative_decoding=False)
        tree = speaking.complete("a b c", max_new_tokens=20, exit_layer=2, plan="tree:3,2")
        assert tree.tokens == plain.tokens and tree.text == plain.text
        assert tree.stats.drafted > 0
