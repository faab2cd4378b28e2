"""Exits: logits equal transformers'; block KV and features after any steps; drafts change no token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

from selfspec import Engine, Profile
from selfspec.backends import torch_backend
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.cache.layout import Rows
from selfspec.kernels.philox import gumbel, uniform_vocabulary
from selfspec.models.loading import adopt
from selfspec.sampling import SamplingParams
from selfspec.sequence import Sequence as Sequence_
from selfspec.speculation.draft_tree import Draft
from selfspec.speculation.exit import FEATURE_STATES, Exit, ExitBlock, HeadRows, position_features
from selfspec.speculation.plan import Plan
from tests.profiles import choice_of, profile_of, random_rows, watch_vocabularies
from tests.scripted import Decoding, new_cache
from tests.strategies import paths, plans
from tests.tiny import FAMILIES, VOCABULARY, tiny_model

EXIT_LAYER = 2
HIDDEN = 32
SEED = 7
GREEDY = SamplingParams()

families = pytest.mark.parametrize("family", FAMILIES)
families_and_layers = pytest.mark.parametrize(("family", "layer"), [*zip(FAMILIES, (1, 2, 3, 1, 2), strict=True)])


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_tensor(*shape: int, seed: int, scale: float) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def quieten(model: PreTrainedModel, from_layer: int, factor: float) -> PreTrainedModel:
    """Scales the output of the layers from `from_layer` on, so that an exit's drafts are often accepted."""
    with torch.no_grad():
        for layer in model.model.layers[from_layer:]:
            if model.config.model_type == "gemma3_text":
                for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
                    norm.weight.copy_((1 + norm.weight) * factor - 1)
            else:
                for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    projection.weight.mul_(factor)
    return model


class Trained:
    """A model with an exit whose block, affine map, recall and norm are random; and it as a transformers model."""

    def __init__(self, family: str, layer: int = EXIT_LAYER, quiet: float = 1.0) -> None:
        self.hf = quieten(tiny_model(family), layer, quiet)
        self.model = adopt(self.hf)
        donor = quieten(tiny_model(family, seed=1), layer, quiet)
        self.affine = random_tensor(HIDDEN, HIDDEN, seed=2, scale=0.1 * quiet), random_tensor(HIDDEN, seed=3, scale=0.1)
        self.norm = self.model.norm + random_tensor(HIDDEN, seed=4, scale=0.1)
        self.recall = random_tensor(HIDDEN, FEATURE_STATES * HIDDEN, seed=5, scale=0.2 * quiet)
        block = ExitBlock(adopt(donor).layers[layer], *self.affine, self.recall)
        self.exit = Exit(self.model, layer, self.norm, block)
        self.as_hf = self._as_hf(family, layer, donor)

    def _as_hf(self, family: str, layer: int, donor: PreTrainedModel) -> PreTrainedModel:
        """A transformers model of the layers below the exit and the block; the affine map comes before its norm."""
        whole = tiny_model(family, num_hidden_layers=layer + 1)
        block = f"model.layers.{layer}."
        state = {name: tensor for name, tensor in self.hf.state_dict().items() if name in whole.state_dict()}
        state |= {name: tensor for name, tensor in donor.state_dict().items() if name.startswith(block)}
        whole.load_state_dict(state | {"model.norm.weight": self.norm})
        whole.model.layers[layer].register_forward_pre_hook(lambda _, args: (args[0] + self._projected, *args[1:]))
        whole.model.norm.register_forward_pre_hook(lambda _, args: (args[0] + F.linear(args[0], *self.affine),))
        return whole

    @torch.no_grad()
    def hf_features(self, tokens: list[int]) -> torch.Tensor:
        """The features of all positions: the model's normed final state, and the state half-way up or at the exit."""
        out = self.hf.model(torch.tensor([tokens]), output_hidden_states=True)
        middle = out.hidden_states[max(self.hf.config.num_hidden_layers // 2, self.exit.layer)]
        return torch.cat((out.last_hidden_state, F.rms_norm(middle, (HIDDEN,))), dim=-1)[0]

    @torch.no_grad()
    def hf_exit_logits(self, tokens: list[int], drafted: int = 0) -> torch.Tensor:
        """The exit's logits at every position; the last `drafted` tokens are nodes of a draft tree."""
        features = self.hf_features(tokens)
        for end in range(len(tokens) - drafted, len(tokens)):  # a drafted token recalls only what the exit's head read
            features[end - 1] = F.pad(self.hf_exit_head_input(tokens[:end], features)[-1], (0, HIDDEN))
        return self.as_hf.lm_head(self.hf_exit_head_input(tokens, features))

    @torch.no_grad()
    def hf_exit_head_input(
        self, tokens: list[int], features: torch.Tensor, cache: DynamicCache | None = None
    ) -> torch.Tensor:
        """The exit's normed states, from the features of all positions."""
        previous = torch.cat((torch.zeros_like(features[:1]), features))[: len(tokens)]
        self._projected = F.linear(previous, self.recall)
        return self.as_hf.model(torch.tensor([tokens]), past_key_values=cache).last_hidden_state[0]


@cache
def trained_once(family: str) -> Trained:
    """For tests that do not change it: an exit some of whose drafts are accepted and some rejected."""
    return Trained(family, quiet=0.3)


def prefill_logits(exit: Exit, tokens: list[int]) -> torch.Tensor:
    """The exit's draft logits at every position, in one pass."""
    model, count = exit.model, len(tokens)
    cache = new_cache(model)
    sequence = cache.open()
    cache.reserve(sequence, count)
    rows = Rows.causal([sequence], count, model.device)
    hidden = model.run(model.embed(torch.tensor([tokens])), 0, exit.layer, rows, cache)
    middle = model.run(hidden, exit.layer, exit.feature_layer, rows, cache)
    features = position_features(
        model, middle, model.run(middle, exit.feature_layer, model.config.num_layers, rows, cache)
    )
    previous = torch.cat((torch.zeros_like(features[:, :1]), features[:, :-1]), dim=1)
    return exit.logits(exit.head_input(hidden, previous, rows, cache))[0]


def decoding(
    exit: Exit,
    prompts: list[list[int]],
    plans: Sequence[str] = ("none",),
    params: SamplingParams = GREEDY,
    samples: int = 1,
) -> Decoding:
    """Prefilled sequences without an end token."""
    model = exit.model
    options: dict[str, Any] = {"params": params, "samples": samples, "seed": SEED, "new_tokens": 400}
    return Decoding(model, new_cache(model), prompts, exit, plans, **options).prefill()


def drafted(exit: Exit, prompt: list[int], plan: str, params: SamplingParams = GREEDY) -> list[int]:
    """The tokens of a draft tree, without the root's."""
    return decoding(exit, [prompt], params=params).draft(plan)[0]


def engine_with(exit: Exit, hf: PreTrainedModel, folder: Path, plan: str) -> Engine:
    """An engine whose profile has this exit and its head rows."""
    rows = {} if exit.head_rows is None else {"text": exit.head_rows}
    profile = profile_of(exit.model, {"text": choice_of(exit.layer, plan)})
    return Engine.from_model(hf, profile=profile.save(folder, [exit], rows))


# Draft logits


@families_and_layers
def test_raw_exit_is_the_final_norm_and_head_of_an_earlier_hidden_state(family: str, layer: int) -> None:
    hf, tokens = tiny_model(family), random_tokens(20)
    with torch.no_grad():
        states = hf(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        expected = hf.lm_head(hf.model.norm(states[layer]))[0]
    got = prefill_logits(Exit(adopt(hf), layer), tokens)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)


def test_raw_exit_caps_its_logits_as_the_model_does() -> None:
    hf, tokens = tiny_model("gemma3_text", final_logit_softcapping=2.0), random_tokens(20)
    with torch.no_grad():
        state = hf(torch.tensor([tokens]), output_hidden_states=True).hidden_states[2]
        expected = torch.tanh(hf.lm_head(hf.model.norm(state))[0] / 2.0) * 2.0
    got = prefill_logits(Exit(adopt(hf), 2), tokens)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)


@families_and_layers
def test_exit_with_a_block_is_a_model_of_that_many_layers_and_the_block(family: str, layer: int) -> None:
    trained, tokens = Trained(family, layer), random_tokens(20)
    expected = trained.hf_exit_logits(tokens)
    got = prefill_logits(trained.exit, tokens)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)


@families
def test_drafted_children_are_the_best_tokens_of_the_exit_as_a_model_of_its_own(family: str) -> None:
    plan = "nodes:0.1,0.0,2.2,1.0,2.0,3.0"
    trained, prompt, shape = Trained(family), random_tokens(20), Plan.parse(plan)
    tokens = [prompt[-1], *drafted(trained.exit, prompt, plan)]
    for node in range(1, len(tokens)):
        path = shape.ancestors[shape.parents[node - 1]].nonzero().flatten().tolist()
        text = prompt[:-1] + [tokens[n] for n in path]
        best = trained.hf_exit_logits(text, drafted=len(path) - 1)[-1].argsort(descending=True)
        assert tokens[node] == best[shape.ranks[node - 1]], f"node {node}"


# Output


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_random_block_changes_no_greedy_token(family: str, tmp_path: Path) -> None:
    trained, prompt = Trained(family), torch.tensor([random_tokens(20)])
    expected = trained.hf.generate(prompt, max_new_tokens=16, do_sample=False)
    out = engine_with(trained.exit, trained.hf, tmp_path, TREE).generate(
        prompt, max_new_tokens=16, return_dict_in_generate=True
    )
    assert out.stats[0].drafted > 0
    assert torch.equal(out.sequences, expected)


def test_a_block_changes_the_drafts() -> None:
    trained, prompt = Trained("llama"), random_tokens(20)
    assert drafted(trained.exit, prompt, "chain:4") != drafted(Exit(trained.model, EXIT_LAYER), prompt, "chain:4")


# The block's keys and values


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The accepted paths that `Cache.commit` is called with."""
    seen: list[list[int]] = []
    commit = Cache.commit

    def remember(self: Cache, sequences: Any, paths: Any) -> None:
        seen.extend(list(path) for path in paths)
        commit(self, sequences, paths)

    monkeypatch.setattr(Cache, "commit", remember)
    yield seen


def block_cache(running: Decoding, sequence: Sequence_) -> torch.Tensor:
    """[2, length, Hkv, D]: keys and values of the exit block at the sequence's committed positions."""
    return contents(running, sequence)[:, -1]


def hf_block_cache(trained: Trained, tokens: list[int]) -> torch.Tensor:
    """The same from transformers, with a cache that keeps positions outside of sliding windows."""
    cache = DynamicCache()
    trained.hf_exit_head_input(tokens, trained.hf_features(tokens), cache)
    last = cache.layers[-1]
    return torch.stack((last.keys, last.values))[:, 0].transpose(1, 2)


@families
def test_block_cache_of_a_prefill_equals_transformers(family: str) -> None:
    trained, prompt = Trained(family), random_tokens(PAGE_SIZE + 9)
    running = decoding(trained.exit, [prompt])
    expected = hf_block_cache(trained, prompt[:-1])
    torch.testing.assert_close(block_cache(running, running.sequences[0]), expected, atol=1e-4, rtol=0)


TREE = "tree:3,2,1"
IRREGULAR = "nodes:0.1,0.0,2.1,1.0,2.0,3.0"
TO_AND_FRO = ["none", TREE, TREE, "none", IRREGULAR, "none", "chain:2", TREE] * 2
PLANS = {
    "chains": ["chain:4"],
    "irregular_trees": [IRREGULAR],
    "plain": ["none"],
    "plain_then_trees": ["none"] * 5 + [TREE] * 7,
    "trees_then_plain": [TREE] * 8 + ["none"] * 4,
}


def assert_as_after_a_fresh_prefill(running: Decoding) -> None:
    """Asserts that a prefill of each sequence's tokens gives the same block keys and values and the same feature."""
    assert running.exit is not None
    running.fill_exit()
    for sequence in running.batch.running:
        fresh = decoding(running.exit, [sequence.tokens])
        assert sequence.kv.length == len(sequence.tokens) - 1
        assert_close(block_cache(running, sequence), block_cache(fresh, fresh.sequences[0]))
        assert_close(sequence.previous_feature, fresh.sequences[0].previous_feature)


def assert_close(got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    torch.testing.assert_close(got, expected, atol=1e-11, rtol=0)


def assert_block_cache_is_that_of_a_fresh_prefill(family: str, plans: list[str], steps: int) -> None:
    prompts = [random_tokens(5), random_tokens(PAGE_SIZE - 4, seed=1)]
    running = decoding(trained_once(family).exit, prompts, plans)
    running.step(steps)
    assert_as_after_a_fresh_prefill(running)


@families
def test_block_cache_survives_a_change_of_plans(family: str, accepted: list[list[int]]) -> None:
    assert_block_cache_is_that_of_a_fresh_prefill(family, TO_AND_FRO, steps=len(TO_AND_FRO))
    assert any(path[1:] and path != list(range(len(path))) for path in accepted), "nothing ever had to move"


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
def test_block_cache_after_steps_is_that_of_a_fresh_prefill(plans: list[str]) -> None:
    assert_block_cache_is_that_of_a_fresh_prefill("gemma3_text", plans, steps=12)


# Features of the previous position


class Taken(NamedTuple):
    """The arguments and result of `Exit.head_input` for one level of a draft tree."""

    nodes: range
    previous: torch.Tensor  # [B, M, hidden or more] what was recalled
    head_input: torch.Tensor  # [B, M, hidden] what the exit's head then read


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Taken]:
    """The calls of `Exit.head_input`, in order."""
    seen: list[Taken] = []
    head_input = Exit.head_input

    def remember(self: Exit, hidden: torch.Tensor, previous: torch.Tensor, rows: Rows, cache: Cache) -> torch.Tensor:
        seen.append(Taken(rows.nodes, previous, head_input(self, hidden, previous, rows, cache)))
        return seen[-1].head_input

    monkeypatch.setattr(Exit, "head_input", remember)
    return seen


@families
def test_the_root_reads_the_models_feature_of_the_previous_position(family: str, taken: list[Taken]) -> None:
    trained = trained_once(family)
    running = decoding(trained.exit, [random_tokens(20), random_tokens(9)], [TREE])
    for _ in range(3):
        texts = [sequence.tokens[:-1] for sequence in running.sequences]
        taken.clear()
        running.step()
        assert taken[0].nodes == range(1)
        expected = torch.stack([trained.hf_features(text)[-1] for text in texts])
        torch.testing.assert_close(taken[0].previous[:, 0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("plan", ["chain:4", IRREGULAR])
def test_a_drafted_node_reads_the_exits_normed_state_of_its_parent(plan: str, taken: list[Taken]) -> None:
    decoding(trained_once("llama").exit, [random_tokens(20), random_tokens(9)], [plan]).step()
    head_inputs = torch.cat([level.head_input for level in taken], dim=1)
    previous = torch.cat([level.previous for level in taken[1:]], dim=1)
    parents = Plan.parse(plan).parents[: taken[-1].nodes.stop - 1]  # leaves of the last level are not read
    assert len(parents) >= 3
    assert torch.equal(previous, head_inputs[:, list(parents)])


def test_the_feature_before_the_first_position_is_zero(taken: list[Taken], monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[torch.Tensor] = []
    monkeypatch.setattr(Exit, "fill", lambda self, hidden, previous, rows, cache: filled.append(previous))
    running = decoding(trained_once("llama").exit, [random_tokens(1), random_tokens(7)], ["chain:1"])
    assert running.sequences[0].previous_feature is None
    running.step()
    prompt, verified = filled
    drafted = taken[0].previous
    assert [features.any(dim=-1).tolist() for features in (prompt[0], verified[0], drafted[:, 0])] == [
        [False, True, True, True, True, True],
        [False, True],
        [False, True],
    ]


class AnyPlan:
    """A policy that draws the plan of each step."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def reason(self, batch: int) -> str | None:
        return None

    def choose(self, batch: int) -> tuple[Plan, str | None]:
        return self.data.draw(plans()), None


def accept_anything(running: Decoding, data: st.DataObject) -> None:
    """Draws plans, accepted paths and ends of sequences."""
    running.request.policy = AnyPlan(data)  # type: ignore[assignment]

    def accept(sequences: list[Sequence_], draft: Draft, *_: Any) -> tuple[list[list[int]], list[int]]:
        walks = paths(draft.plan, data.draw(st.sampled_from(["always", "mostly", "never", "at random"])))
        accepted = [data.draw(walks) for _ in sequences]
        for index, (sequence, path) in enumerate(zip(sequences, accepted, strict=True)):
            own = data.draw(st.integers(3, VOCABULARY - 1))
            sequence.tokens += [*draft.tokens[index, path[1:]].tolist(), own]
        if len(sequences) > 1 and data.draw(st.booleans()):
            data.draw(st.sampled_from(sequences)).finish_reason = "stop"
        return accepted, [path[-1] for path in accepted]

    running.backend.accept = accept  # type: ignore[method-assign]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@settings(max_examples=12)
@given(data=st.data(), lengths=st.lists(st.sampled_from([1, 2, 9, PAGE_SIZE - 2]), min_size=1, max_size=3))
def test_after_any_steps_cache_and_features_are_those_of_a_fresh_prefill(
    family: str, data: st.DataObject, lengths: list[int]
) -> None:
    prompts = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
    running = decoding(trained_once(family).exit, prompts)
    accept_anything(running, data)
    for _ in range(data.draw(st.integers(1, 4))):
        running.step()
        assert_as_after_a_fresh_prefill(running)


@pytest.mark.parametrize("plan", ["none", TREE])
def test_sequences_of_one_prompt_start_with_its_feature_and_then_have_their_own(plan: str) -> None:
    exit, prompts = trained_once("llama").exit, [random_tokens(9), random_tokens(PAGE_SIZE + 2), random_tokens(9, 1)]
    running = decoding(exit, prompts, [plan], SamplingParams(do_sample=True, temperature=1.0), samples=3)
    assert_as_after_a_fresh_prefill(running)
    running.step(4)
    assert len({tuple(sequence.tokens) for sequence in running.sequences}) == 9
    assert_as_after_a_fresh_prefill(running)


def contents(running: Decoding, sequence: Sequence_) -> torch.Tensor:
    """[2, layers + 1, length, Hkv, D]: keys and values of all layers at the sequence's committed positions."""
    both = torch.stack((running.cache.keys, running.cache.values))[:, :, sequence.kv.pages]
    return both.flatten(2, 3)[:, :, : sequence.kv.length]


def assert_same_sequences(running: Decoding, expected: Decoding) -> None:
    """Asserts equal keys and values of all layers, and equal features."""
    for got, sequence in zip(running.sequences, expected.sequences, strict=True):
        assert_close(contents(running, got), contents(expected, sequence))
        assert_close(got.previous_feature, sequence.previous_feature)


@pytest.mark.parametrize(("family", "chunk"), [("llama", 1), ("gemma3_text", 7), ("llama", 18), ("gemma3_text", 19)])
def test_features_cross_the_boundaries_of_prefill_chunks(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exit, prompts = trained_once(family).exit, [random_tokens(20)]
    expected = decoding(exit, prompts)
    monkeypatch.setattr(torch_backend, "PREFILL_CHUNK", chunk)
    assert_same_sequences(decoding(exit, prompts), expected)


# The trimmed head


def head_rows(seed: int = 0) -> torch.Tensor:
    return random_rows(30, seed)


def with_own(rows: torch.Tensor, prompt: torch.Tensor) -> int:
    """Number of tokens in a head of these rows and the prompt's own tokens."""
    return len({*rows.tolist(), *prompt.flatten().tolist()})


@pytest.mark.parametrize("with_block", [False, True], ids=["raw", "with_block"])
def test_trimmed_head_gives_the_logits_of_its_rows(with_block: bool) -> None:
    trained, tokens = Trained("llama"), random_tokens(20)
    block = trained.exit.block if with_block else None
    whole = prefill_logits(Exit(trained.model, EXIT_LAYER, block=block), tokens)
    trimmed = prefill_logits(Exit(trained.model, EXIT_LAYER, block=block, head_rows=head_rows()), tokens)
    torch.testing.assert_close(trimmed, whole[:, head_rows()])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_trimmed_head_drafts_the_best_of_its_rows(family: str) -> None:
    trained, prompt = Trained(family), random_tokens(20)
    rows = head_rows()
    trimmed = Exit(trained.model, EXIT_LAYER, trained.norm, trained.exit.block, rows)
    logits = trained.hf_exit_logits(prompt)[-1]
    best = rows[logits[rows].argsort(descending=True)].tolist()
    assert drafted(trimmed, prompt, "tree:8") == best[:8]


def test_trimmed_head_drafts_nothing_else_at_any_depth() -> None:
    trained = Trained("llama")
    trimmed = Exit(trained.model, EXIT_LAYER, head_rows=head_rows())
    assert set(drafted(trimmed, random_tokens(20), "tree:4,3,2")) <= set(head_rows().tolist())


def test_trimmed_head_drafts_with_the_noise_of_its_token_ids() -> None:
    model, prompt, rows = adopt(tiny_model("llama")), random_tokens(20), head_rows()
    sampling = SamplingParams(do_sample=True, temperature=0.8)
    key = (torch.tensor([SEED]), torch.tensor([0]), torch.tensor([len(prompt)]))
    noise = gumbel(uniform_vocabulary(*key, VOCABULARY, stream=0))[0]
    noisy = prefill_logits(Exit(model, EXIT_LAYER), prompt)[-1] / 0.8 + noise
    best = rows[noisy[rows].argsort(descending=True)].tolist()
    assert drafted(Exit(model, EXIT_LAYER, head_rows=rows), prompt, "tree:8", sampling) == best[:8]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_trimmed_head_changes_no_greedy_token(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, prompt = Trained(family, quiet=0.3), torch.tensor([random_tokens(20)])
    trimmed = replace(trained.exit, head_rows=head_rows())
    vocabularies = watch_vocabularies(monkeypatch)
    out = engine_with(trimmed, trained.hf, tmp_path, TREE).generate(prompt, max_new_tokens=16)
    assert vocabularies == {with_own(head_rows(), prompt)}
    assert torch.equal(out, trained.hf.generate(prompt, max_new_tokens=16, do_sample=False))


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_block_and_trimmed_head_change_no_sampled_token(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, prompt = Trained(family, quiet=0.3), torch.tensor([random_tokens(20)])
    vocabularies = watch_vocabularies(monkeypatch)
    engine = engine_with(replace(trained.exit, head_rows=head_rows()), trained.hf, tmp_path, TREE)
    settings = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    plain, speculative = (
        engine.generate(prompt, speculative_decoding=mode, return_dict_in_generate=True, **settings)
        for mode in (False, True)
    )
    assert (plain.stats[0].drafted, speculative.stats[0].drafted > 0) == (0, True)
    assert vocabularies == {with_own(head_rows(), prompt)}
    assert torch.equal(speculative.sequences, plain.sequences)


def test_a_rank_past_the_trimmed_head_is_refused(tmp_path: Path) -> None:
    """The domain's head has tokens 5, 9 and 11; the prompt's own tokens do not count."""
    trained, prompt = Trained("llama"), torch.tensor([[4, 5]])
    trimmed = replace(trained.exit, head_rows=torch.tensor([5, 9, 11]))
    engine = engine_with(trimmed, trained.hf, tmp_path, "tree:3")
    with pytest.raises(ValueError, match="rank 3.*3 tokens"):
        engine.generate(prompt, max_new_tokens=2, plan="tree:4")
    assert engine.generate(prompt, max_new_tokens=2, plan="tree:3").shape == (1, 4)


def test_a_prompts_own_tokens_are_in_its_trimmed_head() -> None:
    exit = trained_once("llama").exit
    trimmed = exit.with_head_rows(torch.tensor([5, 9, 11]), [[4, 9, 4], [100, 5]])
    assert trimmed.head_rows is not None
    assert trimmed.head_rows.tolist() == [5, 9, 11, 4, 100]
    assert trimmed.block is exit.block and trimmed.norm is exit.norm


@pytest.mark.parametrize("prompts", [[], [[]], [[5], [11, 5]]], ids=str)
def test_a_prompt_without_other_tokens_takes_the_rows_as_they_are(prompts: list[list[int]]) -> None:
    rows = HeadRows(torch.tensor([5, 9, 11]))
    assert trained_once("llama").exit.with_head_rows(rows, prompts).head_rows is rows.ids
    assert len(rows) == 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_prompts_other_tokens_follow_the_domains_rows_which_stay_as_they_are(dtype: torch.dtype) -> None:
    ids = head_rows().to(dtype)
    rows, prompts = HeadRows(ids), [random_tokens(12), random_tokens(7, 1)]
    joined = rows.with_tokens_of(prompts)
    assert joined.dtype == dtype
    assert joined.tolist() == [*ids.tolist(), *sorted({*prompts[0], *prompts[1]} - set(ids.tolist()))]
    assert torch.equal(rows.ids, head_rows().to(dtype))
    assert rows.with_tokens_of([]) is ids, "the tokens of one request must not be drafted for another"


def test_a_domain_without_head_rows_drafts_with_the_full_head() -> None:
    exit = trained_once("llama").exit
    assert exit.with_head_rows(None, [[4, 9, 4]]) is exit


def test_every_request_and_domain_has_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, vocabularies = trained_once("llama"), watch_vocabularies(monkeypatch)
    choice = choice_of(EXIT_LAYER, TREE)
    profile = profile_of(trained.model, {"text": choice, "code": choice, "whole": choice})
    rows = {"text": head_rows(), "code": random_rows(50, 1)}
    engine = Engine.from_model(trained.hf, profile=profile.save(tmp_path, [trained.exit], rows))
    for prompt in (torch.tensor([random_tokens(9)]), torch.tensor([random_tokens(4), random_tokens(4, 1)])):
        for domain in profile.domains:
            vocabularies.clear()
            engine.generate(prompt, max_new_tokens=3, domain=domain)
            expected = with_own(rows[domain], prompt) if domain in rows else VOCABULARY
            assert vocabularies == {expected}, domain


# Memory


def test_raw_exit_takes_no_memory() -> None:
    assert Exit(adopt(tiny_model("llama")), 2).nbytes == 0


def test_trimmed_head_counts_its_index_and_once_it_has_drafted_its_rows() -> None:
    trimmed = Exit(adopt(tiny_model("llama")), 2, head_rows=head_rows())
    assert trimmed.nbytes == 30 * 8
    trimmed.logits(torch.zeros(1, 1, HIDDEN, dtype=torch.float64))
    assert trimmed.nbytes == 30 * HIDDEN * 8 + 30 * 8


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])  # with biases, with all norms
def test_block_counts_as_a_layer_an_affine_a_recall_and_a_norm(family: str) -> None:
    trained = Trained(family)
    layer = sum(p.numel() for p in trained.hf.model.layers[EXIT_LAYER].parameters())
    assert trained.exit.nbytes == 8 * (layer + HIDDEN * HIDDEN + HIDDEN + 2 * HIDDEN * HIDDEN + HIDDEN)


# Profiles


@pytest.mark.parametrize(
    ("family", "rows"),
    [("qwen2", head_rows()), ("gemma3_text", None)],
    ids=["biases-trimmed_head", "norms-full_head"],
)
def test_exit_read_from_a_profile_equals_the_saved_one(family: str, rows: torch.Tensor | None, tmp_path: Path) -> None:
    trained, tokens = Trained(family), random_tokens(20)
    saved = replace(trained.exit, head_rows=rows)
    of_domain = {} if rows is None else {"text": rows}
    profile_of(trained.model, {"text": choice_of(EXIT_LAYER, TREE)}).save(tmp_path, [saved], of_domain)
    profile = Profile.load(tmp_path)
    loaded = replace(
        profile.exits_file.exit(trained.model, EXIT_LAYER),
        head_rows=profile.exits_file.head_rows(trained.model, "text"),
    )
    assert (loaded.vocabulary, loaded.nbytes) == (saved.vocabulary, saved.nbytes)
    assert torch.equal(prefill_logits(loaded, tokens), prefill_logits(saved, tokens))


def test_exits_of_one_profile_are_kept_apart(tmp_path: Path) -> None:
    first, second = Trained("llama", 1), Trained("llama", 3)
    model, tokens = first.model, random_tokens(20)
    saved = [first.exit, Exit(model, 3, second.norm, second.exit.block)]
    profile = profile_of(model, {"text": choice_of(1, TREE), "code": choice_of(3, TREE)}).save(tmp_path, saved)
    for exit in saved:
        assert torch.equal(
            prefill_logits(profile.exits_file.exit(model, exit.layer), tokens), prefill_logits(exit, tokens)
        )


def test_a_layer_without_an_exit_in_the_profile_gets_a_raw_one(tmp_path: Path) -> None:
    trained, tokens = Trained("llama"), random_tokens(20)
    profile = profile_of(trained.model, {"text": choice_of(EXIT_LAYER, TREE)}).save(tmp_path, [trained.exit])
    loaded = profile.exits_file.exit(trained.model, 1)
    assert loaded.nbytes == 0
    assert torch.equal(prefill_logits(loaded, tokens), prefill_logits(Exit(trained.model, 1), tokens))


def test_exit_takes_the_dtype_of_the_model_it_serves(tmp_path: Path) -> None:
    trained, tokens = Trained("llama"), random_tokens(20)
    profile = profile_of(trained.model, {"text": choice_of(EXIT_LAYER, TREE)}).save(tmp_path, [trained.exit])
    single = adopt(tiny_model("llama", torch.float32))
    got = prefill_logits(profile.exits_file.exit(single, EXIT_LAYER), tokens)
    torch.testing.assert_close(got, prefill_logits(trained.exit, tokens), atol=1e-3, rtol=1e-3)


def test_a_loaded_profile_equals_the_saved_one(tmp_path: Path) -> None:
    model = adopt(tiny_model("qwen3"))
    profile = profile_of(model, {"text": choice_of(2, TREE), "code": choice_of(1, "chain:3")})
    assert Profile.load(profile.save(tmp_path, []).folder) == profile.model_copy(update={"folder": tmp_path})


def test_domains_choose_exit_and_plan(tmp_path: Path) -> None:
    trained, prompt = Trained("llama", quiet=0.3), torch.tensor([random_tokens(20)])
    domains = {"text": choice_of(EXIT_LAYER, TREE), "code": choice_of(1, "chain:3")}
    engine = Engine.from_model(trained.hf, profile=profile_of(trained.model, domains).save(tmp_path, [trained.exit]))

    def used(**request: Any) -> tuple[int | None, str]:
        out = engine.generate(prompt, max_new_tokens=20, return_dict_in_generate=True, **request)
        return out.stats[0].exit_layer, out.stats[0].plan

    assert (used(), used(domain="code")) == ((EXIT_LAYER, TREE), (1, "chain:3"))
    assert used(domain="code", plan="chain:2") == (1, "chain:2")


# Bounds


@pytest.mark.parametrize("layer", [-1, 4, True, 1.0], ids=repr)
def test_impossible_exit_layer_is_refused_with_the_possible_ones(layer: Any) -> None:
    with pytest.raises(ValueError, match=f"exit_layer={layer!r} .*4 layers.*0 to 3"):
        Exit(adopt(tiny_model("llama")), layer)


@pytest.mark.parametrize("layer", [0, 3])
def test_exit_can_follow_the_embedding_and_any_layer_but_the_last(layer: int) -> None:
    assert Exit(adopt(tiny_model("llama")), layer).layer == layer


def test_a_model_of_one_layer_has_no_exit() -> None:
    with pytest.raises(ValueError, match="exit_layer=1"):
        Exit(adopt(tiny_model("llama", num_hidden_layers=1)), 1)
