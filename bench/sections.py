"""The sections of `bench.all`: how much each measures, with which benchmark, its table and its time budget."""

from __future__ import annotations

import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import decode, exactness, options, passes, result_tables, server, serving, tables
from bench.machine import gpu_bandwidth
from bench.modes import release
from bench.requests import GREEDY, Target, TimedRequest, without_profile
from bench.serving import Load
from bench.timing import Limit
from selfspec.memory import free_device_bytes

Result = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    prompts: int = 16  # of each domain
    option_prompts: int = 10  # for the options, of different domains
    new_tokens: int = 128  # of each sequence
    batches: tuple[int, ...] = (1, 4, 16)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    lengths: tuple[int, ...] = (8, 16, 32)  # new tokens of short requests
    few_prompts: int = 8  # of each domain, for short requests and without a profile
    copied: tuple[str, ...] = ("summarize", "code", "chat", "extract", "qa")  # domains that run without a profile
    streams: tuple[int, ...] = (1, 4, 16, 32)  # over HTTP, at once
    repeat: int = 3  # timed repeats of decoding, options and streams
    compared: int = 50_000  # tokens of each exactness check
    arrivals: int = exactness.ARRIVALS  # requests of a round of one of them
    load: Load = Load()
    formats: tuple[str, ...] = ("bf16", "int4", "int8", "q4_k")  # of the weights of passes
    passes: tuple[int, ...] = (1, 4, 16, 64)  # tokens of a pass
    context: int = 2048  # tokens before a pass
    shape: str = "llama-8b"  # of the model of passes

    @property
    def max_batch(self) -> int:
        """Sequences that decode together at most in any section."""
        return max(self.load.max_batch, *self.batches, *self.streams)


QUICK = Sizes(
    prompts=1, option_prompts=1, new_tokens=6, batches=(1, 2), temperatures=(0.0,), lengths=(2, 4), few_prompts=1,
    streams=(1, 2), repeat=1, compared=50, arrivals=6,
    load=Load(
        new_tokens=4, requests=3, decoding=2, long_prompt=600, running=2, running_tokens=256, chat=100, repeat=1,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """An opened model, how much to measure with it, and the time budget of the section in seconds."""

    target: Target
    sizes: Sizes
    seconds: float
    load_s: float = 0.0  # seconds that opening took


def startup(run: Run) -> Result:
    """Seconds to the first token of a new engine, and of its warm-up for one greedy sequence."""
    engine = run.target.engine
    first = _timed_request(run)
    start = time.perf_counter()
    steps = engine.warmup()
    warm = time.perf_counter()
    engine.warmup()
    again = time.perf_counter()
    second = _timed_request(run)
    return {
        "kernel_cache": "empty" if engine.has_kernels else "not used",
        "load_s": run.load_s,
        "first_token_s": first.first_token_s,
        "warmup_s": warm - start,
        "warmup_steps": steps,
        "repeated_warmup_s": again - warm,
        "warm_first_token_s": second.first_token_s,
        "warm_call_s": second.ended_at - second.submitted_at,
    }


def _timed_request(run: Run) -> TimedRequest:
    target = run.target
    request = TimedRequest(target.engine, target.prompts[0], 0, run.sizes.new_tokens, {**GREEDY, **target.speculation})
    request.submit()
    return request.wait()


def decoding(run: Run) -> Result:
    """Plain and default decoding of every domain, batch size and temperature."""
    sizes = run.sizes
    return _decoded(run.target, sizes.batches, sizes.temperatures, sizes.new_tokens, sizes.repeat, Limit(run.seconds))


def _decoded(
    target: Target, batches: Sequence[int], temperatures: Sequence[float], new_tokens: int, repeat: int, limit: Limit
) -> Result:
    cells = decode.cells_of(target, batches, temperatures)
    return decode.measure(target, decode.ways_of(target, list(target.modes), []), cells, new_tokens, repeat, limit)


def short_requests(run: Run) -> Result:
    """Plain and default decoding of single greedy sequences of each short length; each gets an equal part of the time
    that is left."""
    sizes, limit = run.sizes, Limit(run.seconds)
    target = replace(run.target, domains=_first(run.target.domains, sizes.few_prompts))
    parts = [1 / (len(sizes.lengths) - number) for number in range(len(sizes.lengths))]
    return {
        "lengths": [
            _decoded(target, (1,), (0.0,), length, sizes.repeat, limit.part(part))
            for length, part in zip(sizes.lengths, parts, strict=True)
        ]
    }


def _first(domains: Mapping[str, list[list[int]]], count: int) -> dict[str, list[list[int]]]:
    return {name: prompts[:count] for name, prompts in domains.items()}


def unprofiled(run: Run) -> Result:
    """Plain and default decoding of single greedy sequences by an engine that shares the weights and has no profile."""
    sizes, domains = run.sizes, run.target.domains
    chosen = {name: domains[name] for name in sizes.copied if name in domains}
    target = without_profile(run.target, _first(chosen, sizes.few_prompts))
    return _decoded(target, (1,), (0.0,), sizes.new_tokens, sizes.repeat, Limit(run.seconds))


def request_options(run: Run) -> Result:
    """Every option on prompts of different domains."""
    prompts = {"mixed": run.target.prompts[: run.sizes.option_prompts]}
    target = replace(run.target, domains=prompts)
    offered = options.options_of(target)
    return options.measure(target, offered, run.sizes.new_tokens, run.sizes.repeat, Limit(run.seconds))


def serve(run: Run) -> Result:
    """All parts but the second turn of a chat, which `http` measures."""
    parts = [part for part in serving.PARTS if part != "second_turn"]
    return serving.measure(run.target, run.sizes.load, parts, Limit(run.seconds))


def http(run: Run) -> Result:
    """The second turn of a chat, and streams over HTTP where the extra `serve` is installed."""
    sizes, limit = run.sizes, Limit(run.seconds)
    found: Result = {"second_turn": serving.measure(run.target, sizes.load, ["second_turn"], limit)["second_turn"]}
    try:
        found["streams"] = server.measure(run.target, sizes.streams, sizes.new_tokens, sizes.repeat, limit)
    except ImportError as error:
        found["failed"] = f"Streams over HTTP were not measured: {error}; pip install 'selfspec[serve]'."
    return found


def compare(run: Run) -> Result:
    sizes = run.sizes
    return exactness.measure(
        run.target, exactness.CHECKS, sizes.compared, sizes.new_tokens, run.seconds, 0, sizes.batches, sizes.arrivals
    )


def memory(run: Run) -> Result:
    """Bytes that the engine holds after all sections that it decodes in, and the process's peak."""
    device = run.target.engine.model.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak_host_bytes()
    return {**run.target.engine.memory(), "peak_of_the_process": peak}


def _peak_host_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def quantized(run: Run) -> Result:
    """Passes of a large shape with weights of each format, on a GPU; a format that does not fit is reported."""
    sizes, device = run.sizes, run.target.engine.device
    if device.type != "cuda":
        return {
            "skipped": "needs an NVIDIA GPU, where `python -m bench.passes` times the kernels that read such weights."
        }
    bandwidth, limit = gpu_bandwidth(), Limit(run.seconds)
    formats = [measure_passes(sizes, format, bandwidth, limit) for format in sizes.formats]
    return {"shape": sizes.shape, "bandwidth_gb_s": round(bandwidth / 1e9, 1), "formats": formats}


def measure_passes(sizes: Sizes, format: str, bandwidth: float, limit: Limit) -> Result:
    """The figures of a format, or why there are none."""
    if limit.is_spent:
        return {"format": format, "failed": "not reached within the time budget"}
    release()  # memory of the format before
    free = free_device_bytes(torch.device("cuda", torch.cuda.current_device()))
    try:
        return passes.measure(sizes.shape, format, sizes.passes, [sizes.context], bandwidth)
    except torch.OutOfMemoryError:
        return {"format": format, "failed": f"needs more GPU memory than is free ({free / 1e9:.0f} GB)"}
    except Exception as error:  # a format that fails must not cost the others' figures
        traceback.print_exc()
        return {"format": format, "failed": one_line(error)}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@dataclass(frozen=True)
class Section:
    """A part of the results: its measurement, its table, and its time budget in seconds on a GPU."""

    title: str
    measure: Callable[[Run], Result]
    table: Callable[[Result], list[str]]
    seconds: float


# Budgets add up to 470 s; loading, and items that end after their budget, may take a minute more. Memory's
# figures are those of the engine that most sections share, before exactness forces large trees in large batches, whose
# buffers stay.
SECTIONS = {
    "startup": Section("Start-up", startup, result_tables.startup, 35),
    "decode": Section("Decoding", decoding, tables.decode, 115),
    "short": Section("Short requests", short_requests, result_tables.short_requests, 25),
    "options": Section("Options", request_options, tables.options, 45),
    "serving": Section("Serving", serve, tables.serving, 40),
    "server": Section("Server", http, result_tables.http, 45),
    "memory": Section("Memory", memory, result_tables.memory, 0),
    "exactness": Section("Exactness", compare, tables.exactness, 55),
    "no_profile": Section("Without a profile", unprofiled, result_tables.unprofiled, 35),
    "quantized": Section("Quantized weights", quantized, result_tables.quantized, 75),
}
