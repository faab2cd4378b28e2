"""Exits: their logits against transformers, their cache after trees, and that whatever they draft changes no token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

from selfspec import Engine, Profile
from selfspec.cache import PAGE_SIZE, Cache, Rows
from selfspec.exits import Exit, ExitBlock
from selfspec.kernels.noise import gumbel, uniform_vocabulary
from selfspec.model import Decoder
from selfspec.profile import DomainChoice, ModelIdentity
from selfspec.runtime import Row, Session
from selfspec.sampling import Sampling
from selfspec.tree import Plan
from selfspec.weights import adopt
from tests.tiny import FAMILIES, VOCABULARY, tiny_model

EXIT_LAYER = 2
HIDDEN = 32
SEED = 7
GREEDY = Sampling()

families = pytest.mark.parametrize("family", FAMILIES)
layers = pytest.mark.parametrize("layer", [1, 2, 3])


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_tensor(*shape: int, seed: int, scale: float) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def quieten(model: PreTrainedModel, from_layer: int, factor: float) -> PreTrainedModel:
    """Scales what the layers from one on add, so that exits before them are right often, and not always."""
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
    """A model with an exit whose block, affine and norm are random, and the same exit as a transformers model."""

    def __init__(self, family: str, layer: int = EXIT_LAYER, quiet: float = 1.0) -> None:
        self.hf = quieten(tiny_model(family), layer, quiet)
        self.model = adopt(self.hf)
        donor = quieten(tiny_model(family, seed=1), layer, quiet)
        self.affine = random_tensor(HIDDEN, HIDDEN, seed=2, scale=0.1 * quiet), random_tensor(HIDDEN, seed=3, scale=0.1)
        self.norm = self.model.norm + random_tensor(HIDDEN, seed=4, scale=0.1)
        self.exit = Exit(self.model, layer, self.norm, ExitBlock(adopt(donor).layers[layer], *self.affine))
        self.as_hf = self._as_hf(family, layer, donor)

    def _as_hf(self, family: str, layer: int, donor: PreTrainedModel) -> PreTrainedModel:
        """The layers below the exit and then the block, as a model of its own; the affine comes before its norm."""
        whole = tiny_model(family, num_hidden_layers=layer + 1)
        block = f"model.layers.{layer}."
        state = {name: tensor for name, tensor in self.hf.state_dict().items() if name in whole.state_dict()}
        state |= {name: tensor for name, tensor in donor.state_dict().items() if name.startswith(block)}
        whole.load_state_dict(state | {"model.norm.weight": self.norm})
        whole.model.norm.register_forward_pre_hook(lambda _, args: (args[0] + F.linear(args[0], *self.affine),))
        return whole


def prefill_logits(exit: Exit, tokens: list[int]) -> torch.Tensor:
    """The exit's draft logits at every position of a text, in one pass."""
    model, count = exit.model, len(tokens)
    cache = Cache(model.config, model.device, model.dtype)
    sequence = cache.open()
    cache.reserve(sequence, count)
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    rows = Rows([sequence], range(count), torch.arange(count), causal, model.device)
    hidden = model.run(model.embed(torch.tensor([tokens])), 0, exit.layer, rows, cache)
    return exit.logits(hidden, rows, cache)[0]


class Script:
    """A policy that takes its plans from a list, the last one for ever."""

    def __init__(self, plans: Sequence[str]) -> None:
        self._plans = [Plan.parse(plan) for plan in plans]

    def choose(self, batch: int) -> tuple[Plan, str | None]:
        return (self._plans.pop(0) if len(self._plans) > 1 else self._plans[0]), None


def open_session(
    exit: Exit, prompts: list[list[int]], plans: Sequence[str] = ("none",), sampling: Sampling = GREEDY
) -> Session:
    """A prefilled session of rows that will not end by themselves."""
    model = exit.model
    cache = Cache(model.config, model.device, model.dtype)
    rows = [Row(prompt, seed=SEED, copy=0, max_length=500) for prompt in prompts]
    session = Session(model, cache, rows, sampling, Script(plans), exit)  # type: ignore[arg-type]
    session.prefill()
    return session


def drafted(exit: Exit, prompt: list[int], plan: str, sampling: Sampling = GREEDY) -> list[int]:
    """The tokens of a drafted tree, its root left out."""
    session = open_session(exit, [prompt], sampling=sampling)
    shape = Plan.parse(plan)
    session.cache.reserve(session.rows[0].sequence, len(prompt) + len(shape))
    with torch.inference_mode():
        return session.draft(session.rows, shape).tokens[0, 1:].tolist()


def engine_with(exit: Exit, hf: PreTrainedModel, folder: Path, plan: str) -> Engine:
    """An engine that drafts with this exit, by way of a profile."""
    return Engine.from_model(hf, profile=profile_of(exit.model, {"text": (exit.layer, plan)}).save(folder, [exit]))


def profile_of(model: Decoder, domains: dict[str, tuple[int, str]]) -> Profile:
    choices = {name: DomainChoice(exit_layer=layer, plan=plan) for name, (layer, plan) in domains.items()}
    return Profile(model=ModelIdentity.of(model), domains=choices)


# Draft logits


@layers
@families
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


@layers
@families
def test_exit_with_a_block_is_a_model_of_that_many_layers_and_the_block(family: str, layer: int) -> None:
    trained, tokens = Trained(family, layer), random_tokens(20)
    with torch.no_grad():
        expected = trained.as_hf(torch.tensor([tokens])).logits[0]
    got = prefill_logits(trained.exit, tokens)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("plan", ["chain:4", "tree:3,2,1", "nodes:0.1,0.0,2.2,1.0,2.0,3.0"])
@families
def test_drafted_children_are_the_best_tokens_of_the_exit_as_a_model_of_its_own(family: str, plan: str) -> None:
    trained, prompt, shape = Trained(family), random_tokens(20), Plan.parse(plan)
    tokens = [prompt[-1], *drafted(trained.exit, prompt, plan)]
    for node in range(1, len(tokens)):
        path = shape.ancestors[shape.parents[node - 1]].nonzero().flatten().tolist()
        with torch.no_grad():
            logits = trained.as_hf(torch.tensor([prompt[:-1] + [tokens[n] for n in path]])).logits[0, -1]
        best = logits.argsort(descending=True)
        assert tokens[node] == best[shape.ranks[node - 1]], f"node {node}"


# Output


@pytest.mark.parametrize("plan", ["chain:4", "tree:3,2,1"])
@families
def test_a_random_block_changes_no_greedy_token(family: str, plan: str, tmp_path: Path) -> None:
    trained, prompt = Trained(family), torch.tensor([random_tokens(20)])
    expected = trained.hf.generate(prompt, max_new_tokens=16, do_sample=False)
    out = engine_with(trained.exit, trained.hf, tmp_path, plan).generate(
        prompt, max_new_tokens=16, return_dict_in_generate=True
    )
    assert out.stats[0].drafted > 0
    assert torch.equal(out.sequences, expected)


def test_a_block_changes_the_drafts() -> None:
    trained, prompt = Trained("llama"), random_tokens(20)
    assert drafted(trained.exit, prompt, "chain:4") != drafted(Exit(trained.model, EXIT_LAYER), prompt, "chain:4")


# The block's keys and values


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The accepted paths, as commits get them."""
    seen: list[list[int]] = []
    commit = Cache.commit

    def remember(self: Cache, sequences: Any, paths: Any) -> None:
        seen.extend(list(path) for path in paths)
        commit(self, sequences, paths)

    monkeypatch.setattr(Cache, "commit", remember)
    yield seen


def block_cache(session: Session, row: Row) -> torch.Tensor:
    """[2, length, Hkv, D]: keys and values of the exit block at the row's committed positions."""
    cache, sequence = session.cache, row.sequence
    slots = [(sequence.pages[slot // PAGE_SIZE], slot % PAGE_SIZE) for slot in range(sequence.length)]
    pages, offsets = (torch.tensor(column) for column in zip(*slots, strict=True))
    layer = session.model.config.num_layers
    return torch.stack((cache.keys[layer, pages, offsets], cache.values[layer, pages, offsets]))


def hf_block_cache(trained: Trained, tokens: list[int]) -> torch.Tensor:
    """The same from transformers, with a cache that keeps what lies outside of windows."""
    cache = DynamicCache()
    with torch.no_grad():
        trained.as_hf(torch.tensor([tokens]), past_key_values=cache)
    last = cache.layers[-1]
    return torch.stack((last.keys, last.values))[:, 0].transpose(1, 2)


@families
def test_block_cache_of_a_prefill_equals_transformers(family: str) -> None:
    trained, prompt = Trained(family), random_tokens(PAGE_SIZE + 9)
    session = open_session(trained.exit, [prompt])
    expected = hf_block_cache(trained, prompt[:-1])
    torch.testing.assert_close(block_cache(session, session.rows[0]), expected, atol=1e-4, rtol=0)


TREE = "tree:3,2,1"
IRREGULAR = "nodes:0.1,0.0,2.1,1.0,2.0,3.0"
TO_AND_FRO = ["none", TREE, TREE, "none", IRREGULAR, "none", "chain:2", TREE] * 2
PLANS = {
    "chains": ["chain:4"],
    "trees": [TREE],
    "irregular_trees": [IRREGULAR],
    "plain": ["none"],
    "plain_then_trees": ["none"] * 5 + [TREE],
    "trees_then_plain": [TREE] * 8 + ["none"],
}


def assert_block_cache_is_that_of_a_fresh_prefill(family: str, plans: list[str], cycles: int) -> None:
    trained = Trained(family, quiet=0.3)
    prompts = [random_tokens(5), random_tokens(PAGE_SIZE - 4, seed=1)]
    session = open_session(trained.exit, prompts, plans)
    for _ in range(cycles):
        session.cycle()
    for row in session.rows:
        fresh = open_session(trained.exit, [row.tokens])
        expected = block_cache(fresh, fresh.rows[0])
        torch.testing.assert_close(block_cache(session, row), expected, atol=1e-11, rtol=0)


@families
def test_block_cache_survives_a_change_of_plans(family: str, paths: list[list[int]]) -> None:
    assert_block_cache_is_that_of_a_fresh_prefill(family, TO_AND_FRO, cycles=len(TO_AND_FRO))
    assert any(path[1:] and path != list(range(len(path))) for path in paths), "nothing ever had to move"


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_block_cache_after_cycles_is_that_of_a_fresh_prefill(family: str, plans: list[str]) -> None:
    assert_block_cache_is_that_of_a_fresh_prefill(family, plans, cycles=12)


# The trimmed head


def head_rows(seed: int = 0) -> torch.Tensor:
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:30].sort().values


@pytest.mark.parametrize("with_block", [False, True], ids=["raw", "with_block"])
def test_trimmed_head_gives_the_logits_of_its_rows(with_block: bool) -> None:
    trained, tokens = Trained("llama"), random_tokens(20)
    block = trained.exit.block if with_block else None
    whole = prefill_logits(Exit(trained.model, EXIT_LAYER, block=block), tokens)
    trimmed = prefill_logits(Exit(trained.model, EXIT_LAYER, block=block, head_rows=head_rows()), tokens)
    torch.testing.assert_close(trimmed, whole[:, head_rows()])


@families
def test_trimmed_head_drafts_the_best_of_its_rows(family: str) -> None:
    trained, prompt = Trained(family), random_tokens(20)
    rows = head_rows()
    trimmed = Exit(trained.model, EXIT_LAYER, trained.norm, trained.exit.block, rows)
    with torch.no_grad():
        logits = trained.as_hf(torch.tensor([prompt])).logits[0, -1]
    best = rows[logits[rows].argsort(descending=True)].tolist()
    assert drafted(trimmed, prompt, "tree:8") == best[:8]


def test_trimmed_head_drafts_nothing_else_at_any_depth() -> None:
    trained = Trained("llama")
    trimmed = Exit(trained.model, EXIT_LAYER, head_rows=head_rows())
    assert set(drafted(trimmed, random_tokens(20), "tree:4,3,2")) <= set(head_rows().tolist())


def test_trimmed_head_drafts_with_the_noise_of_its_token_ids() -> None:
    model, prompt, rows = adopt(tiny_model("llama")), random_tokens(20), head_rows()
    sampling = Sampling(do_sample=True, temperature=0.8)
    key = (torch.tensor([SEED]), torch.tensor([0]), torch.tensor([len(prompt)]))
    noise = gumbel(uniform_vocabulary(*key, VOCABULARY, stream=0))[0]
    noisy = prefill_logits(Exit(model, EXIT_LAYER), prompt)[-1] / 0.8 + noise
    best = rows[noisy[rows].argsort(descending=True)].tolist()
    assert drafted(Exit(model, EXIT_LAYER, head_rows=rows), prompt, "tree:8", sampling) == best[:8]


@pytest.mark.parametrize("seed", range(2))
@families
def test_trimmed_head_changes_no_greedy_token(family: str, seed: int, tmp_path: Path) -> None:
    trained, prompt = Trained(family, quiet=0.3), torch.tensor([random_tokens(20, seed)])
    trimmed = Exit(trained.model, EXIT_LAYER, trained.norm, trained.exit.block, head_rows(seed))
    out = engine_with(trimmed, trained.hf, tmp_path, TREE).generate(prompt, max_new_tokens=16)
    assert torch.equal(out, trained.hf.generate(prompt, max_new_tokens=16, do_sample=False))


@families
def test_block_and_trimmed_head_change_no_sampled_token(family: str, tmp_path: Path) -> None:
    trained, prompt = Trained(family, quiet=0.3), torch.tensor([random_tokens(20)])
    trimmed = Exit(trained.model, EXIT_LAYER, trained.norm, trained.exit.block, head_rows())
    engine = engine_with(trimmed, trained.hf, tmp_path, TREE)
    settings = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    plain, speculative = (
        engine.generate(prompt, speculative_decoding=mode, return_dict_in_generate=True, **settings)
        for mode in (False, True)
    )
    assert (plain.stats[0].drafted, speculative.stats[0].drafted > 0) == (0, True)
    assert torch.equal(speculative.sequences, plain.sequences)


def test_a_rank_past_the_trimmed_head_is_refused(tmp_path: Path) -> None:
    trained = Trained("llama")
    trimmed = Exit(trained.model, EXIT_LAYER, head_rows=torch.tensor([5, 9, 11]))
    engine = engine_with(trimmed, trained.hf, tmp_path, "tree:3")
    with pytest.raises(ValueError, match="rank 3.*3 tokens"):
        engine.generate(torch.tensor([[4, 5]]), max_new_tokens=2, plan="tree:4")


# Memory


def test_raw_exit_holds_nothing_of_its_own() -> None:
    assert Exit(adopt(tiny_model("llama")), 2).nbytes == 0


def test_trimmed_head_counts_its_rows() -> None:
    trimmed = Exit(adopt(tiny_model("llama")), 2, head_rows=head_rows())
    assert trimmed.nbytes == 30 * HIDDEN * 8 + 30 * 8


@families
def test_block_counts_as_a_layer_an_affine_and_a_norm(family: str) -> None:
    trained = Trained(family)
    layer = sum(p.numel() for p in trained.hf.model.layers[EXIT_LAYER].parameters())
    assert trained.exit.nbytes == 8 * (layer + HIDDEN * HIDDEN + HIDDEN + HIDDEN)


# Profiles


@pytest.mark.parametrize("rows", [None, head_rows()], ids=["whole_head", "trimmed_head"])
@families
def test_exit_comes_back_from_a_profile_as_it_was(family: str, rows: torch.Tensor | None, tmp_path: Path) -> None:
    trained, tokens = Trained(family), random_tokens(20)
    saved = Exit(trained.model, EXIT_LAYER, trained.norm, trained.exit.block, rows)
    profile_of(trained.model, {"text": (EXIT_LAYER, TREE)}).save(tmp_path, [saved])
    loaded = Profile.load(tmp_path).exit(trained.model, EXIT_LAYER)
    assert loaded.vocabulary == saved.vocabulary
    assert torch.equal(prefill_logits(loaded, tokens), prefill_logits(saved, tokens))


def test_exits_of_one_profile_are_kept_apart(tmp_path: Path) -> None:
    first, second = Trained("llama", 1), Trained("llama", 3)
    model, tokens = first.model, random_tokens(20)
    saved = [first.exit, Exit(model, 3, second.norm, second.exit.block)]
    profile = profile_of(model, {"text": (1, TREE), "code": (3, TREE)}).save(tmp_path, saved)
    for exit in saved:
        assert torch.equal(prefill_logits(profile.exit(model, exit.layer), tokens), prefill_logits(exit, tokens))


def test_a_layer_without_an_exit_in_the_profile_gets_a_raw_one(tmp_path: Path) -> None:
    trained, tokens = Trained("llama"), random_tokens(20)
    profile = profile_of(trained.model, {"text": (EXIT_LAYER, TREE)}).save(tmp_path, [trained.exit])
    loaded = profile.exit(trained.model, 1)
    assert loaded.nbytes == 0
    assert torch.equal(prefill_logits(loaded, tokens), prefill_logits(Exit(trained.model, 1), tokens))


def test_exit_takes_the_dtype_of_the_model_it_serves(tmp_path: Path) -> None:
    trained, tokens = Trained("llama"), random_tokens(20)
    profile = profile_of(trained.model, {"text": (EXIT_LAYER, TREE)}).save(tmp_path, [trained.exit])
    single = adopt(tiny_model("llama", torch.float32))
    got = prefill_logits(profile.exit(single, EXIT_LAYER), tokens)
    torch.testing.assert_close(got, prefill_logits(trained.exit, tokens), atol=1e-3, rtol=1e-3)


def test_profile_reads_back_what_it_says(tmp_path: Path) -> None:
    model = adopt(tiny_model("qwen3"))
    profile = profile_of(model, {"text": (2, TREE), "code": (1, "chain:3")})
    assert Profile.load(profile.save(tmp_path, []).folder) == profile.model_copy(update={"folder": tmp_path})


def test_domains_choose_exit_and_plan(tmp_path: Path) -> None:
    trained, prompt = Trained("llama", quiet=0.3), torch.tensor([random_tokens(20)])
    domains = {"text": (EXIT_LAYER, TREE), "code": (1, "chain:3")}
    engine = Engine.from_model(trained.hf, profile=profile_of(trained.model, domains).save(tmp_path, [trained.exit]))

    def used(**request: Any) -> tuple[int | None, str]:
        out = engine.generate(prompt, max_new_tokens=20, return_dict_in_generate=True, **request)
        return out.stats[0].exit_layer, out.stats[0].plan

    assert (used(), used(domain="code")) == ((EXIT_LAYER, TREE), (1, "chain:3"))
    assert used(domain="code", plan="chain:2") == (1, "chain:2")


# Bounds


@pytest.mark.parametrize("layer", [0, 4, 5, -1, True, 1.0, "2", None], ids=repr)
def test_impossible_exit_layer_is_refused_with_the_possible_ones(layer: Any) -> None:
    with pytest.raises(ValueError, match=f"exit_layer={layer!r} .*4 layers.*1 to 3"):
        Exit(adopt(tiny_model("llama")), layer)


@layers
def test_exit_can_follow_any_layer_but_the_last(layer: int) -> None:
    assert Exit(adopt(tiny_model("llama")), layer).layer == layer


def test_a_model_of_one_layer_has_no_exit() -> None:
    with pytest.raises(ValueError, match="exit_layer=1"):
        Exit(adopt(tiny_model("llama", num_hidden_layers=1)), 1)
