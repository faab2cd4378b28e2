"""The sets of prompts that `bench.governor` decodes: text that calibration saw the like of, and text meant to hurt.

Four of the sets force given texts (`bench.forced_text`). In three of them what is written surely changes its kind at a
known place; each of these has a twin that only asks for such a text and decodes freely. In the fourth it is noise, in
which drafts surely lose. What is measured of a set is not known here.
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
HOT = 1.4  # temperature
AWAY = 64  # hostile tokens before code resumes
_RANDOM_PROMPT = 64  # tokens

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
    """A set that cannot be made, and why."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one kind, and how they are to be continued."""

    name: str
    prompts: list[list[int]]
    new_tokens: int
    temperature: float = 0.0
    recital: ForcedTexts | None = None
    turn: int | None = None  # new tokens after which a recited text becomes another one
    resumes: bool = False  # what it becomes then is familiar

    @property
    def is_hostile(self) -> bool:
        return self.name not in IN_DOMAIN


@dataclass
class Source:
    """Where sets come from."""

    engine: Engine
    folder: Path | None  # of NAME.jsonl
    limit: int  # prompts of a set
    new_tokens: int
    seed: int = 0

    def build(self, name: str) -> PromptSet:
        return BUILDERS[name](self, name)

    def prompts(self, name: str) -> list[list[int]]:
        """Those of a file; where there is none, of the prompts that calibration keeps for measuring."""
        path = None if self.folder is None else self.folder / f"{name}.jsonl"
        if path is not None and path.exists():
            entries = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
            return self.encoded(entry.get("prompt") or entry["messages"] for entry in entries)
        shipped = next((domain for domain in shipped_domains() if domain.name == name), None)
        if shipped is None:
            raise Missing(f"{name} is skipped: it needs --prompts with a folder that holds {name}.jsonl")
        return self.encoded(shipped.measuring)

    def encoded(self, prompts: Iterable[Prompt]) -> list[list[int]]:
        """Their tokens, as a chat where the model knows chats; none so long that its text would not fit."""
        tokenizer, room = self.engine.tokenizer, self.engine.context - self.new_tokens - AWAY
        chats = tokenizer.chat_template is not None
        asked = ([{"role": "user", "content": p}] if chats and isinstance(p, str) else p for p in prompts)
        tokens = [encode(tokenizer, prompt) for prompt in asked]
        fitting = [prompt for prompt in tokens if len(prompt) < room]
        if not fitting:
            raise Missing(f"no prompt is short enough to be continued within {self.engine.context} tokens")
        return fitting[: self.limit]

    @cached_property
    def code(self) -> list[list[int]]:
        return self.prompts("code")

    @cached_property
    def own_code(self) -> list[list[int]]:
        """What the model itself answers to the code prompts; where an answer ends early, the next ones follow."""
        write = ours(self.engine, speculative_decoding=False)
        ends = set(self.engine.tokenizer.all_special_ids)
        task, device = Task(self.new_tokens), self.engine.model.device
        answers = [write(Batch([prompt], [0], device), task).tokens[0] for prompt in self.code]
        spoken = [[token for token in answer if token not in ends] for answer in answers]
        if not any(spoken):
            raise Missing("the model answers nothing to the code prompts")
        return [first(self.new_tokens, cycle(chain(*spoken[i:], *spoken[:i]))) for i in range(len(spoken))]

    def at_random(self, draw: random.Random, length: int) -> list[list[int]]:
        """As many random texts as a set has prompts, of so many tokens, none of them special."""
        special = set(self.engine.tokenizer.all_special_ids)
        usual = [token for token in range(self.engine.model.config.vocab_size) if token not in special]
        return [draw.choices(usual, k=length) for _ in range(self.limit)]

    def foreign(self, number: int, count: int) -> list[int]:
        return self._recited(_FOREIGN[number % len(_FOREIGN)], count)

    def phrase(self, number: int, count: int) -> list[int]:
        return self._recited(_PHRASES[number % len(_PHRASES)], count)

    def _recited(self, text: str, count: int) -> list[int]:
        """So many tokens of a text said over and over."""
        return first(count, cycle(self.engine.tokenizer(text, add_special_tokens=False)["input_ids"]))


def first(count: int, tokens: Iterable[int]) -> list[int]:
    return list(islice(tokens, count))


def of_prompts(source: Source, name: str) -> PromptSet:
    return PromptSet(name, source.prompts(name), source.new_tokens)


def at_random(source: Source, name: str) -> PromptSet:
    """Prompts of random tokens."""
    return PromptSet(name, source.at_random(random.Random(source.seed), _RANDOM_PROMPT), source.new_tokens)


def noise(source: Source, name: str) -> PromptSet:
    """The same prompts; their texts go on at random, too."""
    prompts = at_random(source, name).prompts
    texts = source.at_random(random.Random(f"{name} {source.seed}"), source.new_tokens)
    return PromptSet(name, prompts, source.new_tokens, recital=ForcedTexts(prompts, texts))


def hot(source: Source, name: str) -> PromptSet:
    """Familiar prompts, one of each kind in turn, at a high temperature."""
    kinds = zip(*(source.prompts(kind) for kind in IN_DOMAIN), strict=False)
    return PromptSet(name, list(chain(*kinds))[: source.limit], source.new_tokens, temperature=HOT)


def switch(source: Source, name: str) -> PromptSet:
    """The model's own code, then half-way another language."""
    half = source.new_tokens // 2
    texts = [own[:half] + source.foreign(i, source.new_tokens - half) for i, own in enumerate(source.own_code)]
    return PromptSet(name, source.code, source.new_tokens, recital=ForcedTexts(source.code, texts), turn=half)


def repeat(source: Source, name: str) -> PromptSet:
    """A phrase over and over, which flatters drafts, then half-way another language."""
    half, prompts = source.new_tokens // 2, source.prompts("chat")
    count = source.new_tokens - half
    texts = [source.phrase(i, half) + source.foreign(i, count) for i in range(len(prompts))]
    return PromptSet(name, prompts, source.new_tokens, recital=ForcedTexts(prompts, texts), turn=half)


def come_back(source: Source, name: str) -> PromptSet:
    """Another language, then the model's own code; the prompts ask for code throughout."""
    texts = [source.foreign(i, AWAY) + own for i, own in enumerate(source.own_code)]
    recital = ForcedTexts(source.code, texts)
    return PromptSet(name, source.code, AWAY + source.new_tokens, recital=recital, turn=AWAY, resumes=True)


def asked(request: str) -> Callable[[Source, str], PromptSet]:
    """Prompts that ask for a text of two kinds and leave the writing to the model."""
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
    "random": at_random,
    "noise": noise,
    "hot": hot,
    "switch": switch,
    "repeat": repeat,
    "return": come_back,
    "switch-asked": asked("Write a Python function that {task}. Then explain in {language} how it works."),
    "repeat-asked": asked("Write this sentence ten times: {phrase} After that, write a short story in {language}."),
    "return-asked": asked("First write a short poem in {language}. Then write a Python function that {task}."),
}
