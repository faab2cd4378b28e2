"""The sets of prompts that `bench.governor` decodes: the calibrated domains, and texts whose drafts are often rejected.

Four sets force given texts (`bench.forced_text`). `noise` forces random tokens, so that nearly every draft is rejected.
`switch`, `repeat` and `return` force texts that switch to another text at a known token; `switch-asked`, `repeat-asked`
and `return-asked` have prompts that ask for such texts and force nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, cycle, islice, product
from pathlib import Path

from bench.forced_text import ForcedTexts
from bench.modes import Batch, Task, ours
from selfspec import Engine
from selfspec.calibrate.prompts import Prompt, shipped_domains
from selfspec.text import encode

IN_DOMAIN = ("chat", "code", "math", "summarize")
FROM_FILES = ("medical", "multilingual")
HIGH_TEMPERATURE = 1.4  # of the set `hot`; the rules switch drafting off above 1.5
FOREIGN_TOKENS = 64  # tokens in another language before the code in the set `return`: twice `governor_calls.EARLY`
_RANDOM_PROMPT = 64  # tokens of a random prompt

_FOREIGN = (
    "Der alte Leuchtturmwärter stieg jeden Abend die zweihundert Stufen hinauf, obwohl das Licht längst von allein "
    "anging. Er mochte den Wind dort oben, den Geruch von Tang und kaltem Eisen, und er schrieb in ein Heft, welche "
    "Schiffe vorüberfuhren. Im Dorf hielt man ihn für wunderlich, aber niemand wagte es, ihm den Schlüssel "
    "wegzunehmen, denn schon sein Großvater hatte die Lampe geputzt und die Vögel gezählt.",
    "Syksyllä metsä hiljeni, ja lammen pinnalle levisi ohut usva. Vanha kalastaja veti verkkonsa rantaan, korjasi "
    "rikkoutuneet silmukat ja keitti kahvit nokisessa pannussa. Hän ei kaivannut kaupunkiin, sillä siellä kukaan ei "
    "tuntenut tuulen suuntaa eikä osannut lukea pilvistä huomisen säätä. Illalla hän soitti haitaria, ja naapurin "
    "koira ulvoi mukana niin kuin aina ennenkin.",
    "Sabahın erken saatlerinde pazar yeri yavaş yavaş kalabalıklaştı. Balıkçılar tezgâhlarını kurarken kediler "
    "sandıkların arasında dolaşıyor, çaycı çocuk elinde tepsiyle koşuşturuyordu. Yaşlı kadın her zamanki köşesine "
    "oturdu, topladığı otları küçük demetler hâlinde dizdi ve gelen geçenle havadan sudan konuştu. Öğleye doğru "
    "yağmur başlayınca herkes saçakların altına sığındı.",
    "Mvua ilinyesha usiku kucha, na asubuhi njia ya kwenda shambani ilikuwa imejaa matope. Mzee Juma alichukua "
    "jembe lake, akavaa kofia ya majani, akaanza kutembea polepole huku akiimba wimbo wa zamani. Watoto walimfuata "
    "wakicheka, wakimuuliza hadithi za simba na sungura. Alipofika mtoni alikaa juu ya jiwe, akawaambia wasubiri "
    "maji yapungue kabla ya kuvuka ng'ambo.",
    "Az öreg órásmester műhelyében száz inga járt egyszerre, mégis mindegyik kissé másképpen. Azt mondta, az idő "
    "nem siet és nem késik, csak mi hallgatjuk türelmetlenül. Esténként felhúzta a legnagyobb órát, meggyújtotta a "
    "lámpát, és leveleket írt a lányának, aki messze, egy tengerparti városban élt. A leveleket sohasem adta föl, "
    "hanem egy kék dobozban gyűjtögette.",
    "Buổi chiều, con thuyền nhỏ ghé vào bến khi nước vừa lên. Người lái đò buộc dây vào gốc bần, lau mồ hôi rồi "
    "ngồi xuống kể chuyện mùa lũ năm xưa. Trẻ con trong xóm chạy ra, đứa cầm đèn, đứa ôm gối, nằm nghe cho đến lúc "
    "trăng mọc trên những ngọn dừa. Bà cụ bán bánh cười hiền lành, gói thêm vài chiếc bánh lá cho khách đi đường "
    "xa.",
)
_PHRASES = (
    "The quick brown fox jumps over the lazy dog. ",
    "All work and no play makes Jack a dull boy.\n",
    "To be, or not to be, that is the question. ",
    "Row, row, row your boat, gently down the stream.\n",
)
_LANGUAGES = ("German", "Finnish", "Turkish", "Swahili", "Hungarian", "Vietnamese")
_TASKS = (
    "checks whether a string is a palindrome",
    "returns the n-th Fibonacci number",
    "merges two sorted lists",
    "counts the words of a text",
    "converts Celsius to Fahrenheit",
    "removes duplicates from a list",
)


class Missing(LookupError):
    """A set cannot be built; the message says why."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts, how many new tokens each gets at most and at which temperature, and the texts forced on them."""

    name: str
    prompts: list[list[int]]
    new_tokens: int
    temperature: float = 0.0
    forced: ForcedTexts | None = None  # None: the model chooses every token
    switch_at: int | None = None  # new tokens after which the forced texts switch to another text
    ends_in_domain: bool = False  # the text after `switch_at` is in-domain

    @property
    def in_domain(self) -> bool:
        return self.name in IN_DOMAIN


@dataclass
class Source:
    """Builds sets of prompts for an engine."""

    engine: Engine
    folder: Path | None  # of NAME.jsonl files
    limit: int  # prompts of a set at most
    new_tokens: int  # of a sequence at most
    seed: int = 0

    def build(self, name: str) -> PromptSet:
        return BUILDERS[name](self, name)

    def prompts(self, name: str) -> list[list[int]]:
        """Reads the folder's NAME.jsonl; without that file, returns the shipped domain's prompts for measuring."""
        path = None if self.folder is None else self.folder / f"{name}.jsonl"
        if path is not None and path.exists():
            entries = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
            return self.encoded(entry.get("prompt") or entry["messages"] for entry in entries)
        shipped = next((domain for domain in shipped_domains() if domain.name == name), None)
        if shipped is None:
            raise Missing(f"{name} is skipped: it needs --prompts with a folder that holds {name}.jsonl")
        return self.encoded(shipped.measuring)

    def encoded(self, prompts: Iterable[Prompt]) -> list[list[int]]:
        """Tokens of the first `limit` prompts that leave space for the new tokens of every set in the engine's context.
        A prompt becomes a chat message if the tokenizer has a chat template."""
        tokenizer, longest = self.engine.tokenizer, self.engine.context - self.new_tokens - FOREIGN_TOKENS
        chats = tokenizer.chat_template is not None
        asked = ([{"role": "user", "content": p}] if chats and isinstance(p, str) else p for p in prompts)
        tokens = [encode(tokenizer, prompt) for prompt in asked]
        fitting = [prompt for prompt in tokens if len(prompt) < longest]
        if not fitting:
            raise Missing(
                f"no prompt is short enough: {self.new_tokens} new tokens leave {longest} of the engine's "
                f"{self.engine.context} tokens; lower --max-new-tokens"
            )
        return fitting[: self.limit]

    @cached_property
    def code(self) -> list[list[int]]:
        return self.prompts("code")

    @cached_property
    def own_code(self) -> list[list[int]]:
        """The model's answers to the code prompts, plainly decoded, without special tokens; an answer with fewer than
        `new_tokens` tokens is continued with the following answers."""
        write = ours(self.engine, speculative_decoding=False)
        ends = set(self.engine.tokenizer.all_special_ids)
        task, device = Task(self.new_tokens), self.engine.model.device
        answers = [write(Batch([prompt], [0], device), task).tokens[0] for prompt in self.code]
        words = [[token for token in answer if token not in ends] for answer in answers]
        if not any(words):
            raise Missing("the model answers the code prompts with special tokens alone: leave this set out of --sets")
        return [first(self.new_tokens, cycle(chain(*words[i:], *words[:i]))) for i in range(len(words))]

    def random_texts(self, draw: random.Random, length: int) -> list[list[int]]:
        """`limit` texts of `length` random tokens, none of them special."""
        special = set(self.engine.tokenizer.all_special_ids)
        ordinary = [token for token in range(self.engine.model.config.vocab_size) if token not in special]
        return [draw.choices(ordinary, k=length) for _ in range(self.limit)]

    def foreign(self, number: int, count: int) -> list[int]:
        """`count` tokens of a text that is not English."""
        return self._repeated(_FOREIGN[number % len(_FOREIGN)], count)

    def phrase(self, number: int, count: int) -> list[int]:
        """`count` tokens of a repeated sentence."""
        return self._repeated(_PHRASES[number % len(_PHRASES)], count)

    def _repeated(self, text: str, count: int) -> list[int]:
        """The first `count` tokens of a text that is repeated without end."""
        return first(count, cycle(self.engine.tokenizer(text, add_special_tokens=False)["input_ids"]))


def first(count: int, tokens: Iterable[int]) -> list[int]:
    return list(islice(tokens, count))


def of_prompts(source: Source, name: str) -> PromptSet:
    """The prompts of a file or a shipped domain."""
    return PromptSet(name, source.prompts(name), source.new_tokens)


def random_prompts(source: Source, name: str) -> PromptSet:
    """Prompts of random tokens."""
    return PromptSet(name, source.random_texts(random.Random(source.seed), _RANDOM_PROMPT), source.new_tokens)


def noise(source: Source, name: str) -> PromptSet:
    """Prompts of random tokens, and forced texts of random tokens."""
    prompts = random_prompts(source, name).prompts
    texts = source.random_texts(random.Random(f"{name} {source.seed}"), source.new_tokens)
    return PromptSet(name, prompts, source.new_tokens, forced=ForcedTexts(prompts, texts))


def at_high_temperature(source: Source, name: str) -> PromptSet:
    """In-domain prompts, one of each domain and then the next one of each, at a high temperature."""
    domains = zip(*(source.prompts(domain) for domain in IN_DOMAIN), strict=False)
    return PromptSet(name, list(chain(*domains))[: source.limit], source.new_tokens, temperature=HIGH_TEMPERATURE)


def code_then_foreign(source: Source, name: str) -> PromptSet:
    """Forces the model's own answer for the first half of the new tokens, then another language."""
    half = source.new_tokens // 2
    texts = [own[:half] + source.foreign(i, source.new_tokens - half) for i, own in enumerate(source.own_code)]
    return PromptSet(name, source.code, source.new_tokens, forced=ForcedTexts(source.code, texts), switch_at=half)


def repetition_then_foreign(source: Source, name: str) -> PromptSet:
    """Forces a repeated sentence, whose drafts are accepted, for the first half of the new tokens, then another
    language."""
    half, prompts = source.new_tokens // 2, source.prompts("chat")
    count = source.new_tokens - half
    texts = [source.phrase(i, half) + source.foreign(i, count) for i in range(len(prompts))]
    return PromptSet(name, prompts, source.new_tokens, forced=ForcedTexts(prompts, texts), switch_at=half)


def foreign_then_code(source: Source, name: str) -> PromptSet:
    """Forces another language for FOREIGN_TOKENS new tokens, then the model's own answer; the prompts ask for code."""
    texts = [source.foreign(i, FOREIGN_TOKENS) + own for i, own in enumerate(source.own_code)]
    return PromptSet(
        name, source.code, FOREIGN_TOKENS + source.new_tokens, forced=ForcedTexts(source.code, texts),
        switch_at=FOREIGN_TOKENS, ends_in_domain=True,
    )  # fmt: skip


def asked(request: str) -> Callable[[Source, str], PromptSet]:
    """Builds prompts that ask for a text in two languages or with a repetition; forces nothing."""
    pairs = list(product(_TASKS, _LANGUAGES))
    random.Random(0).shuffle(pairs)

    def build(source: Source, name: str) -> PromptSet:
        phrases = zip(pairs, cycle(_PHRASES), strict=False)
        texts = [
            request.format(task=task, language=language, phrase=phrase.strip()) for (task, language), phrase in phrases
        ]
        return PromptSet(name, source.encoded(dict.fromkeys(texts)), source.new_tokens)

    return build


BUILDERS: dict[str, Callable[[Source, str], PromptSet]] = {
    **dict.fromkeys((*IN_DOMAIN, *FROM_FILES), of_prompts),
    "random": random_prompts,
    "noise": noise,
    "hot": at_high_temperature,
    "switch": code_then_foreign,
    "repeat": repetition_then_foreign,
    "return": foreign_then_code,
    "switch-asked": asked("Write a Python function that {task}. Then explain in {language} how it works."),
    "repeat-asked": asked("Write this sentence ten times: {phrase} After that, write a short story in {language}."),
    "return-asked": asked("First write a short poem in {language}. Then write a Python function that {task}."),
}
