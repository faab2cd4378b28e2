"""The model writes its own training text: answers to the domains' prompts and to further user turns that it invents.

Plain decoding by the engine's decoder, many rows in step: every pass takes each row one token further, so a pass has
fixed shapes and runs as one graph. A row writes document after document; what it is given to start from is its script.
A chunk of text is a function of its number and the seed, so a stopped run can go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from selfspec.calibrate.corpus import Corpus
from selfspec.calibrate.graphs import captured, shared_pool
from selfspec.models.decoder import Attend, Decoder
from selfspec.text import encode

_ANSWER_TOKENS, _TURN_TOKENS = 256, 128  # a text that goes on for longer is cut
_TURN_TEMPERATURE = 0.9
_LONGEST_BEGINNING = 12  # tokens of a domain's prompt that an invented turn starts with
_ASKED_AS_THEY_ARE = 0.25  # share of documents that answer a domain's own prompt
_SCRIPTS = 8  # documents a row can begin
_BUCKET = 128  # attention looks back over whole buckets
_MARK = "\u2042mark\u2042"  # nothing a template would change


@dataclass(frozen=True)
class Template:
    """The tokens a chat template puts around a user's turn; for a base model, nothing but the beginning of a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        if not getattr(tokenizer, "chat_template", None):
            return cls(tuple(encode(tokenizer, "a")[:-1]), ())
        chat = [{"role": "user", "content": _MARK}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, found, after = text.partition(_MARK)
        if not found or not after:
            raise ValueError("the tokenizer's chat template does not show a user's text as it is, followed by an end")
        return cls(*(tuple(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after)))


class Script(NamedTuple):
    """What a document starts with: a whole prompt to be answered, or the beginning of a turn for the model to end."""

    tokens: tuple[int, ...]
    whole: bool
    temperature: float  # of the answer; 0 is greedy
    domain: int


class Writer:
    """Writes rows of training text, a chunk of `rows` at a time."""

    def __init__(
        self,
        model: Decoder,
        prompts: list[list[list[int]]],  # for each domain, the tokens of its prompts in full
        template: Template,
        ends: Sequence[int],
        rows: int,
        length: int,
        seed: int = 0,
    ) -> None:
        self.prompts, self.template, self.rows, self.length, self.seed = prompts, template, rows, length, seed
        self.longest = max(length // 2, len(template.before) + _LONGEST_BEGINNING)
        self._hand = _Hand(model, template, ends, rows, length, self.longest)

    def chunk(self, number: int, progress: Callable[[int], None] = lambda _: None) -> Corpus:
        source = random.Random(f"{self.seed}.{number}")
        scripts = [[self._script(source) for _ in range(_SCRIPTS)] for _ in range(self.rows)]
        with _seeded(self._hand.model.device, source.getrandbits(62)):
            return self._hand.write(scripts, progress)

    def _script(self, source: random.Random) -> Script:
        domain = source.randrange(len(self.prompts))
        tokens, before, after = source.choice(self.prompts[domain]), self.template.before, self.template.after
        if source.random() < _ASKED_AS_THEY_ARE and len(tokens) <= self.longest:
            return Script(tuple(tokens), True, source.choice((0.4, 0.8)), domain)
        turn = tokens[len(before) : len(tokens) - len(after)]
        shown = source.randint(0, min(_LONGEST_BEGINNING, len(turn) // 2))
        start = before + tuple(turn[: shown or not before])
        return Script(start, not after, source.choice((0.0, 0.8)), domain)


def write_answers(
    model: Decoder,
    template: Template,
    ends: Sequence[int],
    prompts: list[list[int]],
    temperatures: list[float],
    new_tokens: int,
    seed: int,
) -> Corpus:
    """One row for each prompt: the prompt and at most `new_tokens` of its answer, and nothing after it."""
    longest = max(len(prompt) for prompt in prompts)
    hand = _Hand(model, template, ends, len(prompts), longest + new_tokens, longest, answer_tokens=new_tokens)
    scripts = [
        [Script(tuple(prompt), True, temperature, 0)] * _SCRIPTS
        for prompt, temperature in zip(prompts, temperatures, strict=True)
    ]
    with _seeded(model.device, seed):
        corpus = hand.write(scripts, lambda _: None)
    lengths = torch.tensor([len(prompt) + new_tokens for prompt in prompts])[:, None]
    first = (corpus.documents == 1) & (corpus.positions < lengths)
    corpus.documents.masked_fill_(~first, 0)
    corpus.predicts &= first & first.roll(-1, dims=1)
    return corpus


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draws from this seed, and leaves torch's own generators as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


_SCRIPT, _TURN, _CLOSING, _ANSWER = range(4)  # phases of a document; turns and answers are the model's own


@dataclass
class _State:
    """Where each of the rows stands; all tensors [B] int64, updated in place."""

    token: torch.Tensor  # the newest token
    phase: torch.Tensor
    index: torch.Tensor  # tokens of this phase so far
    script: torch.Tensor  # number of the document's script; -1 before the first
    document: torch.Tensor  # number of the document; the first is 1
    start: torch.Tensor  # the document's first place in the row


class _Hand:
    """The lockstep decoder: fixed tensors, and one pass as a function of the place alone."""

    def __init__(
        self,
        model: Decoder,
        template: Template,
        ends: Sequence[int],
        rows: int,
        length: int,
        longest: int,
        answer_tokens: int | None = None,
    ) -> None:
        config, device = model.config, model.device
        self.model, self.length, self.answer_tokens = model, length, answer_tokens or _ANSWER_TOKENS
        self.ends = torch.tensor([*ends, *template.after[:1]], dtype=torch.int64, device=device)
        self.after = torch.tensor(template.after or (0,), device=device)
        shape = (config.num_layers, rows, length, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=model.dtype)
        self.values = torch.zeros_like(self.keys)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.scripts = torch.zeros(rows, _SCRIPTS, longest, dtype=torch.int64, device=device)
        self.script_length, self.whole, self.domain = (
            torch.zeros(rows, _SCRIPTS, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.temperature = torch.zeros(rows, _SCRIPTS, device=device)
        self.state = _State(*(torch.zeros(rows, dtype=torch.int64, device=device) for _ in fields(_State)))
        self.corpus = Corpus.empty(rows, length).to(device)
        # Which tokens are the model's own, and one place for the token that the last pass decides in vain.
        self.own = torch.zeros(rows, length + 1, dtype=torch.bool, device=device)
        self._passes: dict[int, Callable[[], None]] = {}
        self._pool = shared_pool(device)

    @torch.no_grad()
    def write(self, scripts: list[list[Script]], progress: Callable[[int], None]) -> Corpus:
        """One row of text for every list of scripts."""
        self._load(scripts)
        for place in range(self.length):
            self.place.fill_(place)
            self._pass(place)()
            if place % 16 == 15:
                progress(16 * len(scripts))
        self.corpus.predicts[:, :-1] = self.own[:, 1:-1]  # a token was predicted one place before it stands
        return Corpus(*(tensor.to("cpu", copy=True) for tensor in vars(self.corpus).values()))

    def _load(self, scripts: list[list[Script]]) -> None:
        padded = [[[*s.tokens, *[0] * (self.scripts.shape[2] - len(s.tokens))] for s in row] for row in scripts]
        self.scripts.copy_(torch.tensor(padded))
        self.script_length.copy_(torch.tensor([[len(s.tokens) for s in row] for row in scripts]))
        self.whole.copy_(torch.tensor([[int(s.whole) for s in row] for row in scripts]))
        self.domain.copy_(torch.tensor([[s.domain for s in row] for row in scripts]))
        self.temperature.copy_(torch.tensor([[s.temperature for s in row] for row in scripts]))
        for tensor in vars(self.state).values():
            tensor.zero_()
        self.state.script.fill_(-1)
        self.place.fill_(-1)
        self._advance(self.state.token)

    def _pass(self, place: int) -> Callable[[], None]:
        """The pass that looks back over as many whole buckets as this place needs; replayed from its second time on."""
        seen = min(self.length, (place // _BUCKET + 1) * _BUCKET)
        if seen not in self._passes:
            self._passes[seen] = partial(self._step, seen)
        elif isinstance(self._passes[seen], partial):
            self._passes[seen] = captured(partial(self._step, seen), self.model.device, self._pool)
        return self._passes[seen]

    def _step(self, seen: int) -> None:
        """Places the newest token of every row, runs it, and decides the next one."""
        state, corpus = self.state, self.corpus
        script = (state.script % _SCRIPTS)[:, None]
        positions = self.place - state.start
        placed = {"tokens": state.token, "documents": state.document, "positions": positions}
        placed["domains"] = self.domain.gather(1, script)[:, 0]
        for name, column in placed.items():
            getattr(corpus, name).index_copy_(1, self.place, column[:, None])
        logits = self._logits(positions, seen)
        of_answer = self.temperature.gather(1, script)[:, 0]
        self._advance(_drawn(logits, torch.where(state.phase == _ANSWER, of_answer, _TURN_TEMPERATURE)))

    def _logits(self, positions: torch.Tensor, seen: int) -> torch.Tensor:
        model, state = self.model, self.state
        rotations = model.rotations(positions[:, None])
        slots = torch.arange(seen, device=model.device)
        visible = (slots >= state.start[:, None]) & (slots <= self.place)  # [B, S]
        hidden = model.embed(state.token[:, None])
        for index, (layer, spec) in enumerate(zip(model.layers, model.config.layers, strict=True)):
            mask = visible if spec.window is None else visible & (slots > self.place - spec.window)
            hidden = model.run_layer(layer, spec, hidden, rotations, self._attend(index, mask))
        return model.logits(hidden[:, 0])

    def _attend(self, layer: int, mask: torch.Tensor) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for store, new in ((self.keys, k), (self.values, v)):
                store[layer].index_copy_(1, self.place, new)
            keys, values = (store[layer][:, : mask.shape[1]].transpose(1, 2) for store in (self.keys, self.values))
            grouped = q[:, 0].unflatten(1, (keys.shape[1], -1))  # [B, Hkv, group, D]: heads of a key as its rows
            scale = self.model.config.attention_scale
            out = F.scaled_dot_product_attention(grouped, keys, values, mask[:, None, None], scale=scale)
            return out.flatten(1, 2)[:, None]

        return attend

    def _advance(self, drawn: torch.Tensor) -> None:
        """Decides each row's next token: from its script, from the template's closing of a turn, or what was drawn."""
        state, place = self.state, self.place + 1
        begins = (state.phase == _SCRIPT) & (state.index == 0)
        state.script.add_(begins)
        state.document.add_(begins)
        state.start.copy_(torch.where(begins, place, state.start))
        script = (state.script % _SCRIPTS)[:, None]
        phase, ends = state.phase, torch.isin(drawn, self.ends)
        in_script, in_turn, closing, answering = (phase == which for which in (_SCRIPT, _TURN, _CLOSING, _ANSWER))

        given = self.scripts.gather(1, script[..., None].expand(-1, -1, self.scripts.shape[2]))[:, 0]
        given = given.gather(1, state.index.clamp(max=given.shape[1] - 1)[:, None])[:, 0]
        forced_end = in_turn & ends  # whatever end was drawn, the template's own is placed
        closes = torch.where(forced_end, 0, state.index).clamp(max=len(self.after) - 1)
        token = torch.where(in_script, given, torch.where(closing | forced_end, self.after[closes], drawn))
        own = (in_turn & ~ends) | answering
        self.own.index_copy_(1, place, own[:, None])
        state.token.copy_(token)

        count = torch.where(forced_end, 1, state.index + 1)
        to_closing = in_turn & (ends | (count >= _TURN_TOKENS))
        phase = torch.where(to_closing, _CLOSING, phase)
        count = torch.where(to_closing & ~ends, 0, count)
        script_done = in_script & (count >= self.script_length.gather(1, script)[:, 0])
        closed = (phase == _CLOSING) & (count >= len(self.after))
        answered = answering & (ends | (count >= self.answer_tokens))
        of_script = torch.where(self.whole.gather(1, script)[:, 0] == 1, _ANSWER, _TURN)
        phase = torch.where(script_done, of_script, torch.where(closed, _ANSWER, phase))
        state.phase.copy_(torch.where(answered, _SCRIPT, phase))
        state.index.copy_(torch.where(script_done | closed | answered, 0, count))


def _drawn(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """A token from each row of logits [B, V]; the best where the temperature is 0."""
    noise = torch.empty_like(logits).exponential_().log_()
    warm = logits / temperature.clamp(min=1e-3)[:, None] - noise
    return torch.where(temperature > 0, warm.argmax(-1), logits.argmax(-1))
