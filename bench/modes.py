"""The ways of decoding that `bench.decode` compares, and what is measured of each.

A way takes a batch of prompts and a task and says which tokens it wrote and when. Ours and transformers' share one copy
of the weights. Which ways run in which order, and what is printed, is left to `bench.decode` and `bench.report`.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from selfspec import Engine

PEER_NAMES = ("eager", "compile", "lookup", "early-exit")
LOOKUP_TOKENS = 10  # what transformers' documentation takes


@dataclass(frozen=True)
class Task:
    """What is asked for: so many tokens at this temperature, 0 being greedy."""

    max_new_tokens: int
    temperature: float = 0.0

    @property
    def sampling(self) -> dict[str, Any]:
        return {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together, and a seed for each."""

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    device: torch.device
    pad: int = 0

    @property
    def width(self) -> int:
        return max(map(len, self.prompts))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask [B, T], padded on the left."""
        gaps = [self.width - len(prompt) for prompt in self.prompts]
        ids = [[self.pad] * gap + list(prompt) for gap, prompt in zip(gaps, self.prompts, strict=True)]
        mask = [[0] * gap + [1] * len(prompt) for gap, prompt in zip(gaps, self.prompts, strict=True)]
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)


class Clock:
    """A streamer that notes when tokens came, and how many at once."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.arrivals.append((time.perf_counter(), value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Written:
    """What one call gave."""

    tokens: list[list[int]]  # new ones, by row
    passes: int  # of the whole model, added up over rows
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens at once
    plans: frozenset[str] = frozenset()  # of each row the most used one; transformers has none

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


Way = Callable[[Batch, Task], Written]


def ours(engine: Engine, **settings: Any) -> Way:
    def write(batch: Batch, task: Task) -> Written:
        ids, mask = batch.tensors()
        clock = Clock() if len(batch.prompts) == 1 else None
        out: Any = engine.generate(
            ids, mask, max_new_tokens=task.max_new_tokens, seed=list(batch.seeds), streamer=clock,
            return_dict_in_generate=True, **task.sampling, **settings,
        )  # fmt: skip
        rows = zip(out.sequences.tolist(), out.stats, strict=True)
        tokens = [row[batch.width : batch.width + stats.new_tokens] for row, stats in rows]
        arrivals = in_bursts([at for at, _ in clock.arrivals], out.stats[0].cycles) if clock else []
        plans = frozenset(stats.plan for stats in out.stats)
        return Written(tokens, sum(stats.cycles for stats in out.stats), arrivals, plans)

    return write


def route(engine: Engine, prompts: Sequence[Sequence[int]]) -> str:
    """The domain that the engine finds for prompts that come together."""
    assert engine.profile is not None
    return engine.profile.route(engine.drafters.marks(prompts) if engine.profile.routes else None)


def warm_up(engine: Engine, batches: Sequence[Batch], temperature: float) -> None:
    """Captures whatever the governor may choose for these batches: what it tries differs from call to call."""
    if not engine.has_kernels or engine.profile is None:
        return
    for domain in sorted({route(engine, batch.prompts) for batch in batches}):
        engine.warmup(max(len(batch.prompts) for batch in batches), domain, (temperature,), engine.context)


def in_bursts(stamps: list[float], bursts: int) -> list[tuple[float, int]]:
    """Tokens that arrived one by one, gathered into as many bursts as there were cycles: they are parted where the
    gaps are widest."""
    widest = sorted(range(1, len(stamps)), key=lambda place: stamps[place - 1] - stamps[place])[: bursts - 1]
    edges = [0, *sorted(widest), len(stamps)]
    return [(stamps[start], stop - start) for start, stop in zip(edges, edges[1:], strict=False) if stop > start]


def transformers_way(hf: Any, pad: int, **settings: Any) -> Way:
    def write(batch: Batch, task: Task) -> Written:
        ids, mask = batch.tensors()
        clock = Clock() if len(batch.prompts) == 1 else None
        torch.manual_seed(batch.seeds[0])
        layers = hf.config.num_hidden_layers  # early exits change it for the while, and leave it so if they fail
        try:
            out = hf.generate(
                ids, attention_mask=mask, max_new_tokens=task.max_new_tokens, streamer=clock, pad_token_id=pad,
                **task.sampling, **settings,
            )  # fmt: skip
        finally:
            hf.config.num_hidden_layers = layers
        tokens = [until_end(row, _ends(hf)) for row in out[:, batch.width :].tolist()]
        arrivals = clock.arrivals if clock else []
        return Written(tokens, len(arrivals) or sum(map(len, tokens)), arrivals)

    return write


def until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """A row without the padding behind its end token."""
    place = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: place + 1]


def _ends(hf: Any) -> set[int]:
    ends = hf.generation_config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}


def compiled(hf: Any, pad: int) -> Way:
    """A static cache, with which transformers compiles the model by itself where it can."""
    way = transformers_way(hf, pad, cache_implementation="static")

    def write(batch: Batch, task: Task) -> Written:
        if hf.device.type != "cuda":
            raise NotImplementedError("transformers compiles decoding on accelerators only")
        return way(batch, task)

    return write


def peers(hf: Any, pad: int, chosen: Sequence[str], exit_layers: Sequence[int]) -> dict[str, Way]:
    """transformers' ways of decoding, by name; eager comes first where it is wanted."""
    ways: dict[str, Way] = {}
    if "eager" in chosen:
        ways["transformers eager"] = transformers_way(hf, pad)
    if "compile" in chosen:
        ways["transformers static+compile"] = compiled(hf, pad)
    if "lookup" in chosen:
        ways["transformers prompt lookup"] = transformers_way(hf, pad, prompt_lookup_num_tokens=LOOKUP_TOKENS)
    for layer in exit_layers if "early-exit" in chosen else ():
        ways[f"transformers early exit {layer}"] = transformers_way(hf, pad, assistant_early_exit=layer)
    return ways


@dataclass(frozen=True)
class Sample:
    """One batch, decoded and timed."""

    written: Written
    seconds: float

    @property
    def tokens(self) -> list[list[int]]:
        return self.written.tokens

    @property
    def mean(self) -> float:
        return self.seconds / self.written.count


def per_token(written: Written, seconds: float) -> list[float]:
    """Seconds of each token: tokens that come together share the time since those before them. The first ones waited
    for the prompt and do not count; where nobody watched, there is only the average."""
    gaps = [
        [(now - before) / count] * count
        for (before, _), (now, count) in zip(written.arrivals, written.arrivals[1:], strict=False)
    ]
    return [gap for burst in gaps for gap in burst] or [seconds / max(1, written.count)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass
class Mode:
    """One way in one cell of the table. What fails is remembered and not tried again."""

    name: str
    way: Way
    limit_s: float = float("inf")
    samples: dict[int, Sample] = field(default_factory=dict)  # by the batch's number
    failure: str | None = None
    peak: int = 0  # bytes, everything on the device included

    @property
    def spent_s(self) -> float:
        return sum(sample.seconds for sample in self.samples.values())

    def rehearse(self, batches: Sequence[Batch], task: Task) -> None:
        """Compiles, captures and allocates whatever these batches need."""
        started = time.perf_counter()
        with self._catching():
            for batch in batches:
                if time.perf_counter() - started < self.limit_s:
                    self.way(batch, task)

    def measure(self, number: int, batch: Batch, task: Task) -> None:
        if self.failure or self.spent_s > self.limit_s:
            return
        with self._catching():
            on_gpu = batch.device.type == "cuda"
            if on_gpu:
                torch.cuda.synchronize(batch.device)
                torch.cuda.reset_peak_memory_stats(batch.device)
            started = time.perf_counter()
            written = self.way(batch, task)
            if on_gpu:
                torch.cuda.synchronize(batch.device)
            self.samples[number] = Sample(written, time.perf_counter() - started)
            if on_gpu:
                self.peak = max(self.peak, torch.cuda.max_memory_allocated(batch.device))

    @contextmanager
    def _catching(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a peer throws, out of memory included, must not end the run
            text = " ".join(str(error).split())
            self.failure = f"{type(error).__name__}: {text}"[:200]
        if self.failure:
            release()

    def result(self, eager: Mode | None, plain: Mode | None, peak: int | None) -> dict[str, Any]:
        """Everything measured; `plain` is plain decoding of the same implementation."""
        if self.failure or not self.samples:
            return {"mode": self.name, "failed": self.failure or "not reached within the time limit"}
        samples = list(self.samples.values())
        times = [seconds for sample in samples for seconds in per_token(sample.written, sample.seconds)]
        tokens = sum(sample.written.count for sample in samples)
        return {
            "mode": self.name,
            "tokens_per_s": round(tokens / self.spent_s, 2),
            "ms_per_token_p50": round(1e3 * percentile(times, 0.5), 4),
            "ms_per_token_p99": round(1e3 * percentile(times, 0.99), 4),
            "speedup_median": self.speedup(eager),
            "speedup_over_plain": self.speedup(plain),
            "tokens_per_cycle": round(tokens / sum(sample.written.passes for sample in samples), 3),
            "plans": sorted({plan for sample in samples for plan in sample.written.plans}),
            "peak_bytes": peak,
            "same_tokens_as_plain": self.same_tokens(plain),
            "same_tokens_as_transformers": self.same_tokens(eager),
            "prompts": sum(len(sample.tokens) for sample in samples),
        }

    def speedup(self, other: Mode | None) -> float | None:
        """Median ratio of times per token over the batches that both decoded."""
        ratios = [theirs.mean / mine.mean for mine, theirs in self._pairs(other)]
        return round(median(ratios), 3) if ratios else None

    def same_tokens(self, other: Mode | None) -> str | None:
        """How many of the rows that both decoded have the same tokens: '11/12'."""
        rows = [row for mine, theirs in self._pairs(other) for row in zip(mine.tokens, theirs.tokens, strict=True)]
        return f"{sum(a == b for a, b in rows)}/{len(rows)}" if rows else None

    def _pairs(self, other: Mode | None) -> list[tuple[Sample, Sample]]:
        if other is None:
            return []
        return [(sample, other.samples[n]) for n, sample in self.samples.items() if n in other.samples]


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Memory:
    """Who holds what on the device, so that a mode's peak leaves out what only the others need.

    All modes live in one process: graphs, static caches and the engine's own cache stay while others run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.engine = 0  # our cache and whatever else the engine takes when it is built
        self.exits = 0  # loaded for whoever drafts first, used by all who draft
        self._kept: dict[str, int] = {}  # by mode

    def now(self) -> int:
        if self.device.type != "cuda":
            return 0
        gc.collect()
        return torch.cuda.memory_allocated(self.device)

    @contextmanager
    def keeping(self, name: str, exits: Callable[[], int]) -> Iterator[None]:
        """Whatever is taken in here and not given back belongs to the mode; new exits belong to all who draft."""
        before, exits_before = self.now(), exits()
        yield
        loaded = exits() - exits_before
        self.exits += loaded
        self._kept[name] = self._kept.get(name, 0) + self.now() - before - loaded

    def own_peak(self, name: str, peak: int, is_ours: bool, drafts: bool) -> int | None:
        if self.device.type != "cuda":
            return None
        others = sum(kept for other, kept in self._kept.items() if other != name)
        return peak - others - (0 if is_ours else self.engine) - (0 if drafts else self.exits)
