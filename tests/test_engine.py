"""The engine as a user meets it: what it holds, when it speculates and why not, completions, limits and profiles."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from selfspec import Completion, Engine, Profile, Rules, Stats
from selfspec.profiles.profile import Device, DomainChoice, PlanChoice, Run
from selfspec.speculation.exit import Exit
from tests.profiles import choice_of, edit_profile, profile_of, random_exit, random_rows
from tests.tiny import FAMILIES, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

PROMPT = torch.tensor([[1, 5, 9, 33]])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def answer(model) -> list[list[int]]:
    return model.generate(PROMPT, max_new_tokens=4).tolist()


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


def prompts(rows: int, length: int = 3) -> torch.Tensor:
    return torch.arange(3, 3 + rows * length).view(rows, length) % 97


def stats_of(engine: Engine, ids: torch.Tensor = PROMPT, **kwargs: Any) -> list[Stats]:
    return engine.generate(ids, **{"max_new_tokens": 4, "return_dict_in_generate": True, **kwargs}).stats


def tensors_of(decoder: Any) -> list[torch.Tensor]:
    per_layer = [tensor for layer in decoder.layers for tensor in vars(layer).values() if tensor is not None]
    return [decoder.embedding, decoder.norm, decoder.head, *per_layer]


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

        def look(prefix: torch.Tensor, _: Any) -> torch.Tensor:
            used.append(engine.memory()["cache_used"])
            return torch.tensor([False])

        engine.generate(PROMPT, max_new_tokens=2, stopping_criteria=[look], speculative_decoding=False)
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
        between, seen = engine.memory()["exits"], []

        def fails(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(engine.memory()["exits"])
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            engine.generate(PROMPT, max_new_tokens=2, logits_processor=[fails])
        gc.collect()  # the traceback held the request
        assert seen[0] > between == engine.memory()["exits"]


class TestNoProfileWarning:
    def test_it_comes_once_and_says_what_to_do(self, model):
        engine = Engine.from_model(model)
        with pytest.warns(UserWarning, match="no profile.*python -m selfspec.calibrate.*exit_layer=.*plan="):
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
    def test_it_stays_away_from_who_has_chosen(self, model, kwargs):
        engine = Engine.from_model(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.generate(PROMPT, max_new_tokens=1, **kwargs)


SAMPLE = {"do_sample": True, "seed": 1}
DRAFTING = {"exit_layer": 2, "plan": "chain:2"}


@pytest.mark.filterwarnings("ignore:decoding plainly")
class TestRules:
    """Hard rules end to end: what a request gets is told in its statistics."""

    @pytest.mark.parametrize(
        ("kwargs", "reason"),
        [
            ({}, "no_profile"),
            ({"speculative_decoding": True}, "no_profile"),
            ({"speculative_decoding": False}, "request"),
            ({**DRAFTING, "speculative_decoding": False}, "request"),
            ({"plan": "none"}, "request"),
            ({"plan": "none", "speculative_decoding": "force"}, "request"),
            ({**DRAFTING, **SAMPLE, "temperature": 1.6}, "temperature"),
            ({**DRAFTING, **SAMPLE, "top_k": 201}, "top_k"),
            ({**DRAFTING, **SAMPLE, "top_k": 0, "temperature": 1.1}, "top_k"),
            ({**DRAFTING, "stateful_processors": True}, "processor"),
            ({**DRAFTING, "stateful_processors": True, "speculative_decoding": "force"}, "processor"),
            ({**DRAFTING, **SAMPLE, "temperature": 1.6, "speculative_decoding": False}, "request"),
            ({**SAMPLE, "temperature": 1.6}, "no_profile"),
        ],
        ids=lambda value: value if isinstance(value, str) else "+".join(map(str, value.values())) or "nothing",
    )
    def test_switched_off(self, engine, kwargs, reason):
        (stats,) = stats_of(engine, **kwargs)
        assert stats.disabled_reason == reason
        assert (stats.plan, stats.drafted, stats.accepted, stats.exit_layer) == ("none", 0, 0, None)
        assert (stats.cycles, stats.tokens_per_cycle, stats.accept_rate) == (4, 1.0, 0.0)

    @pytest.mark.parametrize(
        "kwargs",
        [
            DRAFTING,
            {**DRAFTING, "speculative_decoding": True},
            {**DRAFTING, **SAMPLE, "temperature": 1.5},
            {**DRAFTING, **SAMPLE, "top_k": 200},
            {**DRAFTING, **SAMPLE, "top_k": 0, "temperature": 1.0},
            {**DRAFTING, "temperature": 1.6},
            {**DRAFTING, "top_k": 500},
            {**DRAFTING, **SAMPLE, "temperature": 1.6, "speculative_decoding": "force"},
            {**DRAFTING, **SAMPLE, "top_k": 500, "speculative_decoding": "force"},
        ],
        ids=lambda value: "+".join(map(str, value.values())),
    )
    def test_left_on(self, engine, kwargs):
        (stats,) = stats_of(engine, **kwargs)
        assert stats.disabled_reason is None
        assert (stats.plan, stats.exit_layer) == ("chain:2", 2)
        assert stats.drafted > 0

    def test_a_request_may_bring_its_own_rules(self, engine):
        kwargs = {**DRAFTING, **SAMPLE, "temperature": 0.9}
        assert stats_of(engine, **kwargs)[0].disabled_reason is None
        assert stats_of(engine, **kwargs, rules=Rules(max_temperature=0.5))[0].disabled_reason == "temperature"

    def test_an_engine_may_have_its_own_rules(self, model):
        strict = Engine.from_model(model, rules=Rules(max_batch=1))
        assert stats_of(strict, **DRAFTING)[0].disabled_reason is None
        assert {stats.disabled_reason for stats in stats_of(strict, prompts(2), **DRAFTING)} == {"batch"}
        assert {stats.disabled_reason for stats in stats_of(strict, prompts(2), **DRAFTING, rules=Rules())} == {None}

    @pytest.mark.parametrize(("rows", "plan"), [(4, "tree:2,2"), (5, "chain:2"), (16, "chain:2"), (17, "none")])
    def test_a_larger_batch_narrows_an_explicit_tree(self, engine, rows, plan):
        every = stats_of(engine, prompts(rows), exit_layer=2, plan="tree:2,2", max_new_tokens=6)
        assert {stats.plan for stats in every} == {plan}
        assert {stats.disabled_reason for stats in every} == {"batch" if rows > 16 else None}

    def test_force_ignores_the_batch(self, engine):
        every = stats_of(
            engine, prompts(17), exit_layer=2, plan="tree:2,2", max_new_tokens=6, speculative_decoding="force"
        )
        assert {(stats.plan, stats.disabled_reason) for stats in every} == {("tree:2,2", None)}

    @pytest.mark.parametrize(("rows", "plan"), [(1, "tree:4,2,2,1"), (4, "tree:4,2,2,1"), (5, "chain:5")])
    def test_an_exit_without_a_plan_gets_the_default_for_its_batch(self, engine, rows, plan):
        every = stats_of(engine, prompts(rows), exit_layer=2, max_new_tokens=24)
        assert {stats.plan for stats in every} == {plan}

    @pytest.mark.parametrize(("layers", "expected"), [(2, 1), (4, 1), (8, 2)])
    def test_a_plan_without_an_exit_drafts_with_a_quarter_of_the_layers(self, layers, expected):
        engine = Engine.from_model(tiny_model("llama", num_hidden_layers=layers))
        assert stats_of(engine, plan="chain:1")[0].exit_layer == expected
        assert stats_of(engine, speculative_decoding="force")[0].exit_layer == expected

    def test_speculation_returns_when_the_batch_has_shrunk(self, engine):
        """17 rows decode plainly; one ends after 3 tokens, and the other 16 draft from there on."""
        ids = prompts(17)
        first = ids[0].tolist()

        def ends_the_first_row(prefix: torch.Tensor, _: Any) -> torch.Tensor:
            return torch.tensor([prefix[0, :3].tolist() == first and prefix.shape[1] >= 6])

        settings = {"max_new_tokens": 20, "stopping_criteria": [ends_the_first_row]}
        stopped, *others = stats_of(engine, ids, **settings, **DRAFTING)
        assert (stopped.new_tokens, stopped.cycles, stopped.drafted) == (3, 3, 0)
        assert {stats.disabled_reason for stats in (stopped, *others)} == {"batch"}, "the first reason stays"
        assert all(stats.drafted > 0 for stats in others)
        assert {stats.plan for stats in others} == {"chain:2"}, "the most used plan"

    def test_rows_of_a_shrinking_batch_keep_their_tokens(self, engine, model):
        ids = prompts(17)
        ends = {"eos_token_id": list(range(40, 60)), "pad_token_id": 0, "max_new_tokens": 12}
        ours = engine.generate(ids, attention_mask=torch.ones_like(ids), **ends, **DRAFTING)
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **ends)
        assert ours.tolist() == theirs.tolist()


class TestStats:
    def test_they_add_up(self, engine):
        (stats,) = stats_of(engine, plan="tree:3,2", exit_layer=3, max_new_tokens=40, speculative_decoding="force")
        assert stats.new_tokens == 40
        assert stats.new_tokens == stats.cycles + stats.accepted
        assert stats.tokens_per_cycle == stats.new_tokens / stats.cycles
        assert 0 < stats.accept_rate < 1
        assert stats.accepted <= 2 * stats.cycles <= stats.drafted <= 9 * stats.cycles
        assert stats.elapsed_s > 0

    def test_plain_decoding_takes_a_cycle_for_every_token(self, engine):
        (stats,) = stats_of(engine, speculative_decoding=False, max_new_tokens=7)
        assert (stats.new_tokens, stats.cycles, stats.drafted, stats.finish_reason) == (7, 7, 0, "length")


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


@pytest.mark.filterwarnings("ignore:decoding plainly")
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
        model.model.layers[1].mlp.down_proj.weight.data.zero_()  # an exit after layer 1 is always right: fewer cycles
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


def save_profile(
    model: PreTrainedModel,
    folder: Path,
    block: bool = False,
    plan: str | dict[str, str] = "chain:3",
    rows: torch.Tensor | None = None,
    **entries: Any,
) -> Path:
    """A profile of two domains, 'chat' with an exit after layer 2 and 'code' with one after layer 3."""
    decoder = Engine.from_model(model).model
    exits = [random_exit(decoder, 2) if block else Exit(decoder, 2), Exit(decoder, 3)]
    domains = {"chat": choice_of(2, plan), "code": choice_of(3, "tree:2,1")}
    profile_of(decoder, domains, **entries).save(folder, exits, {} if rows is None else {"chat": rows})
    return folder


@pytest.fixture(scope="module")
def profile_folder(model, tmp_path_factory) -> Path:
    return save_profile(model, tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def profiled(model, profile_folder) -> Engine:
    return Engine.from_model(model, profile=profile_folder)


class TestProfile:
    """A profile makes speculation the default; a request may overrule it."""

    @pytest.mark.parametrize(
        ("kwargs", "exit_layer", "plan"),
        [
            ({}, 2, "chain:3"),
            ({"speculative_decoding": True}, 2, "chain:3"),
            ({"speculative_decoding": "force"}, 2, "chain:3"),
            ({"domain": "auto"}, 2, "chain:3"),
            ({"domain": "chat"}, 2, "chain:3"),
            ({"domain": "code"}, 3, "tree:2,1"),
            ({"plan": "tree:3,1"}, 2, "tree:3,1"),
            ({"plan": "chain:1", "domain": "code"}, 3, "chain:1"),
            ({"exit_layer": 3, "plan": "chain:2"}, 3, "chain:2"),
            ({"exit_layer": 1}, 1, "tree:4,2,2,1"),
            ({"plan": "none"}, None, "none"),
            ({"speculative_decoding": False}, None, "none"),
        ],
        ids=lambda value: (
            str(value) if not isinstance(value, dict) else "+".join(map(str, value.values())) or "nothing"
        ),
    )
    def test_it_chooses_exit_and_plan(self, profiled, model, kwargs, exit_layer, plan):
        out = profiled.generate(PROMPT, max_new_tokens=24, return_dict_in_generate=True, **kwargs)
        assert (out.stats[0].exit_layer, out.stats[0].plan) == (exit_layer, plan)
        assert out.sequences.tolist() == model.generate(PROMPT, max_new_tokens=24).tolist()

    def test_it_silences_the_warning(self, profiled):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            profiled.generate(PROMPT, max_new_tokens=1)

    def test_the_rules_hold_for_it_too(self, profiled):
        assert stats_of(profiled, **SAMPLE, temperature=1.6)[0].disabled_reason == "temperature"
        assert stats_of(profiled, prompts(17))[0].disabled_reason == "batch"

    def test_it_may_be_given_loaded(self, model, profile_folder):
        engine = Engine.from_model(model, profile=Profile.load(profile_folder))
        assert stats_of(engine)[0].exit_layer == 2

    def test_a_trained_exit_is_used_and_changes_no_token(self, model, tmp_path):
        engine = Engine.from_model(model, profile=save_profile(model, tmp_path, block=True))
        out = engine.generate(PROMPT, max_new_tokens=24, return_dict_in_generate=True)
        raw = stats_of(Engine.from_model(model), max_new_tokens=24, exit_layer=2, plan="chain:3")[0]
        assert out.sequences.tolist() == model.generate(PROMPT, max_new_tokens=24).tolist()
        assert out.stats[0].cycles != raw.cycles, "a block drafts otherwise than none"

    def test_it_serves_the_same_weights_in_another_dtype(self, profile_folder):
        engine = Engine.from_model(tiny_model("llama", torch.bfloat16), profile=profile_folder)
        assert stats_of(engine)[0].exit_layer == 2


ELSEWHERE = Device(type="cuda", name="some GPU", dtype="bfloat16", torch="2.13.0")
HERE = Device(type="cpu", name="some CPU", dtype="float32", torch="2.13.0")


class TestPlans:
    """A profile's plans are for a batch and a temperature, and for the kind of device they were measured on."""

    @pytest.fixture
    def advised(self, model, tmp_path) -> Engine:
        by_batch = {"1": "none", "2-4": "tree:2,1", "5-16": "tree:3,1"}
        return Engine.from_model(model, profile=save_profile(model, tmp_path, block=True, plan=by_batch))

    @pytest.mark.parametrize(
        ("rows", "plan", "reason"),
        [
            (1, "none", "goodput"),
            (2, "tree:2,1", None),
            (4, "tree:2,1", None),
            (5, "chain:2", None),
            (16, "chain:2", None),
            (17, "none", "batch"),
        ],
    )
    def test_each_batch_has_its_own(self, advised, model, rows, plan, reason):
        ids = prompts(rows)
        out = advised.generate(ids, max_new_tokens=6, return_dict_in_generate=True)
        assert {(stats.changes[0].plan, stats.changes[0].reason) for stats in out.stats} == {(plan, reason)}
        assert out.sequences.tolist() == model.generate(ids, max_new_tokens=6).tolist()

    def test_a_batch_that_shrinks_takes_the_next(self, advised, model):
        """Two rows draft; one ends after 3 tokens, and the other goes on plainly."""
        ids = prompts(2)
        first = ids[0].tolist()

        def ends_the_first_row(prefix: torch.Tensor, _: Any) -> torch.Tensor:
            return torch.tensor([prefix[0, :3].tolist() == first and prefix.shape[1] >= 6])

        stopped, other = stats_of(advised, ids, max_new_tokens=24, stopping_criteria=[ends_the_first_row])
        assert (stopped.plan, stopped.disabled_reason) == ("tree:2,1", None)
        assert (other.plan, other.disabled_reason) == ("none", "goodput")
        assert 0 < other.drafted < other.cycles

    def test_who_insists_drafts_the_plan_that_was_tried_and_lost(self, model, tmp_path):
        lost = Run(plan="tree:2,1", tokens_per_cycle=1, accept_rate=0, tokens_per_second=1, plain_tokens_per_second=2)
        choice = DomainChoice(exit_layer=2, plans={"0": {"1": PlanChoice(plan="none", measured=lost)}})
        profile = profile_of(Engine.from_model(model).model, {"text": choice}, device=HERE)
        engine = Engine.from_model(
            model, profile=profile.save(tmp_path, [random_exit(Engine.from_model(model).model, 2)])
        )
        assert stats_of(engine)[0].disabled_reason == "goodput"
        assert stats_of(engine, speculative_decoding="force")[0].plan == "tree:2,1"

    @pytest.mark.parametrize(
        ("kwargs", "exit_layer", "plan", "reason"),
        [
            ({}, None, "none", "goodput"),
            ({"speculative_decoding": True}, None, "none", "goodput"),
            ({"speculative_decoding": False}, None, "none", "request"),
            ({"speculative_decoding": "force"}, 2, "tree:4,2,2,1", None),
            ({"plan": "chain:2"}, 2, "chain:2", None),
            ({"exit_layer": 1}, 1, "tree:4,2,2,1", None),
        ],
        ids=["default", "asked_for", "refused", "forced", "plan", "exit_layer"],
    )
    @pytest.mark.parametrize("why", ["plan_none", "another_device"])
    def test_where_none_pays_only_who_insists_drafts(self, model, tmp_path, why, kwargs, exit_layer, plan, reason):
        entries = {"plan": "none", "device": HERE} if why == "plan_none" else {"device": ELSEWHERE}
        engine = Engine.from_model(model, profile=save_profile(model, tmp_path, block=True, **entries))
        out = engine.generate(PROMPT, max_new_tokens=24, return_dict_in_generate=True, **kwargs)
        (stats,) = out.stats
        if why == "another_device" and kwargs == {"speculative_decoding": "force"}:
            plan = "chain:3"  # the profile's own: it was chosen elsewhere, but it was chosen
        assert (stats.exit_layer, stats.plan, stats.disabled_reason) == (exit_layer, plan, reason)
        assert (stats.drafted > 0) == (reason is None)
        assert out.sequences.tolist() == model.generate(PROMPT, max_new_tokens=24).tolist()

    @pytest.mark.parametrize("device", [None, HERE], ids=["nowhere", "here"])
    def test_measured_nowhere_or_on_this_kind_of_device_they_hold(self, model, tmp_path, device):
        engine = Engine.from_model(model, profile=save_profile(model, tmp_path, device=device))
        assert stats_of(engine, max_new_tokens=24)[0].plan == "chain:3"

    @pytest.mark.parametrize(
        ("sampling", "plan"),
        [
            ({"temperature": 0.9}, "chain:1"),
            ({**SAMPLE, "temperature": 0.2}, "chain:1"),
            ({**SAMPLE, "temperature": 0.5}, "chain:2"),
            ({**SAMPLE, "temperature": 0.84}, "chain:2"),
            ({**SAMPLE, "temperature": 0.86}, "chain:3"),
            ({**SAMPLE, "temperature": 1.5}, "chain:3"),
        ],
        ids=["greedy", "0.2", "0.5", "0.84", "0.86", "1.5"],
    )
    def test_the_nearest_temperature_has_its_own(self, model, sampling, plan):
        by_temperature = {"0": "chain:1", "0.7": "chain:2", "1": "chain:3"}
        plans = {name: {"1": PlanChoice(plan=of)} for name, of in by_temperature.items()}
        decoder = Engine.from_model(model).model
        profile = profile_of(decoder, {"chat": DomainChoice(exit_layer=2, plans=plans)})
        assert stats_of(Engine.from_model(model, profile=profile), max_new_tokens=24, **sampling)[0].plan == plan

    @pytest.mark.parametrize(
        "kwargs",
        [{"speculative_decoding": False}, {"plan": "none"}, {"stateful_processors": True}, {"domain": "code"}],
        ids=["request", "plan_none", "processor", "goodput"],
    )
    def test_whoever_never_drafts_never_reads_the_exits(self, model, answer, tmp_path, kwargs):
        folder = save_profile(model, tmp_path, block=True)
        (folder / "exits.safetensors").write_bytes(b"broken")
        domains = {"chat": choice_of(2, "chain:2"), "code": choice_of(3, "none")}
        edit_profile(folder, domains={name: choice.model_dump() for name, choice in domains.items()})
        engine = Engine.from_model(model, profile=folder)
        assert engine.generate(PROMPT, max_new_tokens=4, **kwargs).tolist() == answer
        with pytest.raises(ValueError, match="exits.safetensors.*python -m selfspec.calibrate"):
            engine.generate(PROMPT, max_new_tokens=4)


class TestAutomaticProfile:
    """profile='auto' looks under SELFSPEC_HOME."""

    @pytest.fixture
    def home(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setenv("SELFSPEC_HOME", str(tmp_path / "home"))
        return tmp_path / "home" / "profiles"

    @pytest.fixture
    def folder(self, tmp_path, model) -> Path:
        model.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    def test_the_models_profile_is_found(self, home, model, folder):
        save_profile(model, home / "some-name")
        save_profile(tiny_model("llama", seed=1), home / "another-model's")
        engine = Engine.from_pretrained(folder, device="cpu")
        assert engine.profile.folder == home / "some-name"
        assert stats_of(engine)[0].exit_layer == 2

    @pytest.mark.filterwarnings("ignore:decoding plainly")
    @pytest.mark.parametrize("what", ["no-home", "another-model's", "broken"])
    def test_without_one_the_engine_decodes_plainly(self, home, folder, what):
        if what == "another-model's":
            save_profile(tiny_model("llama", seed=1), home / "other")
        if what == "broken":
            (home / "broken").mkdir(parents=True)
            (home / "broken" / "profile.json").write_text("{")
        engine = Engine.from_pretrained(folder, device="cpu")
        assert engine.profile is None
        assert stats_of(engine)[0].disabled_reason == "no_profile"

    def test_a_live_models_profile_is_found(self, home, model):
        save_profile(model, home / "some-name")
        assert Engine.from_model(model).profile.folder == home / "some-name"
        assert Engine.from_model(model, profile=None).profile is None

    def test_a_profile_named_none_is_not_looked_for(self, home, model, folder):
        save_profile(model, home / "some-name")
        assert Engine.from_pretrained(folder, device="cpu", profile=None).profile is None
