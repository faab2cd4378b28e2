"""The engine: one model behind a `generate` that feels like transformers', and behind `complete` and `stream` for text.

Reads requests, chooses the exit, opens a session, and shapes what comes back. How tokens are made is `runtime`'s job.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import track
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
)

from selfspec.backends.torch_backend import Session, Stop
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.drafters import Drafter, Drafters
from selfspec.governor.governor import Watch
from selfspec.governor.rules import Mode, Policy, Rules
from selfspec.metrics import Metrics, Summary
from selfspec.models import loading as weights
from selfspec.models.decoder import Decoder
from selfspec.models.row_times import time_rows
from selfspec.profiles.profile import Profile
from selfspec.profiles.router import marks_of
from selfspec.request import (
    PlanLike,
    Settings,
    SpeculationRequest,
    check_prompts,
    check_rules,
    read_prompts,
    read_seeds,
    read_settings,
    split_options,
)
from selfspec.results import Completion, GenerateOutput, Stream, completion_of, stats_of
from selfspec.sampling import Sampling
from selfspec.sequence import Row
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import MAX_NODES, NONE, Plan
from selfspec.text import Message, encode, is_messages

if TYPE_CHECKING:
    from selfspec.backends.cuda.graphs import Machine

DEFAULT_COMPLETION_TOKENS = 512

Prompt = str | list[Message]


class Engine:
    """Generates with one model that drafts and verifies with itself."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any = None,
        generation_config: GenerationConfig | None = None,
        profile: Profile | str | Path | None = None,
        rules: Rules | None = None,
        max_length: int | None = None,
        max_batch: int | None = None,
        kernels: bool | None = None,
    ) -> None:
        _check_limits(max_length=max_length, max_batch=max_batch)
        self.model = model
        self.tokenizer = tokenizer
        self.generation_config = generation_config or GenerationConfig()
        self.rules = (check_rules(rules) or Rules()).on(model.device.type)
        self.context = min(model.config.context, max_length or model.config.context)
        self.max_batch = max_batch
        self.cache = Cache(model.config, model.device, model.dtype)
        self._machine = self._build_machine(kernels)
        slots = self.context + (MAX_NODES + 1) * (1 if self._machine is None else 3)  # cycles in flight need theirs
        pages = -(-slots // PAGE_SIZE)
        self.cache.max_pages = max_batch and max_batch * pages + (self._machine is not None)
        self.profile = self._read_profile(profile)
        mark = partial(marks_of, model, self.cache) if self._machine is None else self._machine.marks
        timed = partial(time_rows, model, self.cache) if self._machine is None else None
        self.drafters = Drafters(model, self.profile, mark, self.has_kernels, timed)
        self._metrics = Metrics()
        self._warned_no_profile = False

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        profile: Profile | str | Path | None = "auto",
        rules: Rules | None = None,
        max_length: int | None = None,
        max_batch: int | None = None,
        kernels: bool | None = None,
    ) -> Engine:
        """Loads a folder or hub name with safetensors, a GGUF file, or 'demo'."""
        _check_limits(max_length=max_length, max_batch=max_batch)
        if profile != "auto" and isinstance(profile, str | Path):
            profile = Profile.load(profile)  # before the weights: a bad profile must not cost their loading
        device = weights.pick_device(device)
        folder = weights.resolve(path_or_name)
        model = weights.load_folder(folder, device, dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder) if _has_tokenizer(folder) else None
        return cls(model, tokenizer, _generation_config(folder), profile, rules, max_length, max_batch, kernels)

    @classmethod
    def from_model(
        cls,
        hf_model: Any,
        tokenizer: Any = None,
        profile: Profile | str | Path | None = None,
        rules: Rules | None = None,
        max_length: int | None = None,
        max_batch: int | None = None,
        kernels: bool | None = None,
    ) -> Engine:
        """Shares the weights of a live transformers model: no copy is made, and the model stays usable."""
        model = weights.adopt(hf_model)
        config = getattr(hf_model, "generation_config", None)
        return cls(model, tokenizer, config, profile, rules, max_length, max_batch, kernels)

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Callable] | None = None,
        stopping_criteria: Sequence[Callable] | None = None,
        streamer: Any = None,
        return_dict_in_generate: bool = False,
        seed: int | Sequence[int] | None = None,
        speculative_decoding: Mode = None,
        domain: str = "auto",
        exit_layer: int | None = None,
        plan: PlanLike | None = None,
        acceptance: str = "coupled",
        stateful_processors: bool = False,
        rules: Rules | None = None,
        **generation_kwargs: Any,
    ) -> torch.Tensor | GenerateOutput:
        """transformers' `generate` for what it supports; speculation is there for the speed, not for other tokens.

        `speculative_decoding` is None or True (where the rules allow it), False, or "force"; `exit_layer` and `plan`
        override the profile's; `acceptance="rejection"` gives the classical rule, whose tokens do depend on the draft.
        """
        request = SpeculationRequest(
            speculative_decoding, domain, exit_layer, plan, acceptance, stateful_processors, rules
        )
        settings = read_settings(self.generation_config, generation_config, generation_kwargs)
        prompts = read_prompts(input_ids, attention_mask, settings)
        if streamer is not None and len(prompts) * settings.num_return_sequences > 1:
            raise ValueError("a streamer can follow one sequence only: pass one prompt and num_return_sequences=1")
        session = self._session(
            prompts, input_ids.shape[1], settings, seed, logits_processor, stopping_criteria, request
        )
        if streamer is not None:
            streamer.put(input_ids.cpu())
            session.on_token = lambda row, token: streamer.put(torch.tensor([token]))
        for _ in session.run():
            pass
        if streamer is not None:
            streamer.end()
        sequences = _to_tensor(input_ids, session.rows, settings)
        if not (return_dict_in_generate or settings.return_dict):
            return sequences
        return GenerateOutput(sequences, [stats_of(row, session) for row in session.rows])

    def complete(
        self, prompt: Prompt | list[str] | list[list[Message]], **options: Any
    ) -> Completion | list[Completion]:
        """Completes a text or answers a chat; a list of prompts gives a list.

        Takes `generate`'s arguments but for input_ids, attention_mask, streamer and return_dict_in_generate.
        """
        single = isinstance(prompt, str) or is_messages(prompt)
        if not single and not isinstance(prompt, list | tuple):
            raise ValueError(f"a prompt must be a string, messages, or a list of these, not a {type(prompt).__name__}")
        prompts: Sequence[Prompt] = [prompt] if single else prompt  # type: ignore[assignment, list-item]
        session = self._text_session(prompts, options)
        for _ in session.run():
            pass
        completions = [completion_of(row, session, self.tokenizer) for row in session.rows]
        return completions[0] if single and len(completions) == 1 else completions

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Yields the completion of one prompt piece by piece; closing the stream frees its cache."""
        session = self._text_session([prompt], options)
        if len(session.rows) > 1:
            raise ValueError("stream() follows one sequence: pass one prompt and num_return_sequences=1")
        return Stream(session, self.tokenizer)

    def warmup(
        self, batch: int = 1, domain: str | None = None, temperatures: Sequence[float] = (0.0,), max_length: int = 2048
    ) -> int:
        """Compiles and captures the cycles that requests of up to `batch` rows and `max_length` tokens will replay, so
        that the first of them does not wait for it; shows its progress. Temperatures above 0 are drawn as the model's
        generation config says. Without kernels there is nothing to do. Returns how many cycles there were."""
        if self._machine is None:
            return 0
        longest = min(max_length, self.context)
        cycles = list(dict.fromkeys(self._expected_cycles(batch, domain, temperatures)))
        marked = self.profile.router_layer if self.profile is not None and self.profile.routes else None
        judged = self.profile is not None and any(c.prompt_agreement for c in self.profile.domains.values())
        most_judged = self.rules.max_tree_batch if judged else 0  # rows, as in sessions; on up to twice as many seats
        for exit in dict.fromkeys(exit for _, _, exit, _ in cycles):
            self._machine.prepare_prompts(exit, batch, marked)
        for cycle in track(cycles, description="capturing cycles", transient=True):
            self._machine.prepare(*cycle, longest, judged=cycle[0] // 2 < most_judged)
        return len(cycles)

    def _expected_cycles(
        self, batch: int, domain: str | None, temperatures: Sequence[float]
    ) -> Iterator[tuple[int, Plan, Exit | None, Sampling]]:
        """Plain decoding, and the profile's plans for the domain or all of them."""
        domains = [] if self.profile is None else [domain] if domain is not None else list(self.profile.domains)
        sizes = [1 << power for power in range((batch - 1).bit_length(), -1, -1)]  # rows end at different times
        for temperature, rows in product(temperatures, sizes):
            asked = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
            sampling = read_settings(self.generation_config, None, asked).sampling
            yield rows, NONE, None, sampling
            policy = Policy(self.rules, sampling)
            for plan, exit in self.drafters.expected(min(rows, batch), domains, policy):
                yield rows, plan, exit, sampling

    @property
    def has_kernels(self) -> bool:
        """Whether cycles run as kernels and CUDA graphs, or as PyTorch's own operations."""
        return self._machine is not None

    def memory(self) -> dict[str, int]:
        """Bytes held, by what holds them."""
        return {
            "weights": self.model.nbytes,
            "cache": self.cache.nbytes,
            "exits": self.drafters.nbytes,
            "cycles": 0 if self._machine is None else self._machine.nbytes,
        }

    def metrics(self) -> Summary:
        """What all requests so far came to: speeds, accept rates, and how often which plan was used, and why."""
        return self._metrics.summary()

    def _text_session(self, prompts: Sequence[Prompt], options: dict[str, Any]) -> Session:
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer: pass one to Engine.from_model, or call generate() with token ids")
        options = dict(options)
        for name in ("input_ids", "attention_mask", "streamer"):
            if name in options:
                raise ValueError(f"{name} goes with generate(), not with text: use stream() to follow a completion")
        names = ("generation_config", "logits_processor", "stopping_criteria", "seed")
        config, processors, criteria, seed = (options.pop(name, None) for name in names)
        request, kwargs = split_options(options)
        lengths = ("max_new_tokens", "max_length")
        if all(kwargs.get(name) is None and getattr(config, name, None) is None for name in lengths):
            kwargs["max_new_tokens"] = DEFAULT_COMPLETION_TOKENS
        settings = read_settings(self.generation_config, config, kwargs)
        tokens = [encode(self.tokenizer, prompt) for prompt in prompts]
        width = max((len(prompt) for prompt in tokens), default=0)
        return self._session(tokens, width, settings, seed, processors, criteria, request)

    def _session(
        self,
        prompts: list[list[int]],
        width: int,
        settings: Settings,
        seed: int | Sequence[int] | None,
        processors: Sequence[Callable] | None,
        criteria: Sequence[Callable] | None,
        request: SpeculationRequest,
    ) -> Session:
        """Checks everything that can be checked and opens a session; no page is taken, and nothing computed but, where
        a profile routes, the prompts' domain."""
        check_prompts(prompts, self.model.config.vocab_size, self.context)
        if self._machine is not None:
            self._machine.take_memory()
        batch = len(prompts) * settings.num_return_sequences
        if self.max_batch is not None and batch > self.max_batch:
            raise ValueError(
                f"{batch} sequences exceed max_batch={self.max_batch}: send fewer, or raise it when building the engine"
            )
        allowed = settings.new_tokens_allowed(width)
        seeds = read_seeds(seed, len(prompts), settings.sampling.do_sample)
        sampling = _less_replaced(settings.sampling, processors or ())
        stops = self._stops(settings, criteria)
        plan = None if request.plan is None else Plan.parse(request.plan)
        layer = self.drafters.own_exit_layer(request, plan)
        policy = Policy(
            rules=(request.rules or self.rules).on(self.model.device.type),
            sampling=sampling,
            mode=request.speculative_decoding,
            plan=plan,
            has_exit=layer is not None or self.profile is not None,
            stateful_processors=request.stateful_processors,
        )
        if policy.off_for_good == "no_profile":
            self._warn_no_profile()
        rejection = request.acceptance == "rejection"
        costs = self.drafters.costs((sampling.do_sample, _touches_every_token(sampling, processors), rejection))
        drafter = Drafter() if policy.off_for_good else self.drafters.drafter(request, prompts, policy, layer, costs)
        rows = [
            Row(prompt, seeds[index], copy, max_length=min(len(prompt) + allowed, self.context))
            for index, prompt in enumerate(prompts)
            for copy in range(settings.num_return_sequences)
        ]
        for index, far in enumerate(drafter.far):
            rows[index * settings.num_return_sequences].watch = Watch.of_prompt(far)  # its copies take it over
        return self.open(
            rows, sampling, policy, drafter.exit, processors=processors or (), stops=stops, rejection=rejection,
            governor=drafter.governor, costs=costs,
        )  # fmt: skip

    def open(
        self, rows: list[Row], sampling: Sampling, policy: Policy, exit: Exit | None = None, **options: Any
    ) -> Session:
        """A session of rows that are known to be sound, on kernels where the engine has them. The classical rejection
        looks at whole rows of draft logits, which kernels do not keep."""
        options["metrics"] = self._metrics
        if self._machine is None or options.get("rejection"):
            return Session(self.model, self.cache, rows, sampling, policy, exit=exit, **options)
        from selfspec.backends.cuda.session import DeviceSession  # imports Triton, which nobody needs elsewhere

        return DeviceSession(
            self.model, self.cache, rows, sampling, policy, exit=exit, **options, machine=self._machine
        )

    def _build_machine(self, kernels: bool | None) -> Machine | None:
        """Cycles as kernels and CUDA graphs: on a GPU that can run them, unless switched off."""
        if not (kernels or (kernels is None and self.model.device.type == "cuda")):
            return None
        from selfspec.backends.cuda.decoder import WANTED, is_supported
        from selfspec.backends.cuda.graphs import Machine

        if is_supported(self.model):
            return Machine(self.model, self.cache, self.context)
        if kernels:
            raise ValueError(WANTED)
        return None

    def _read_profile(self, profile: Profile | str | Path | None) -> Profile | None:
        if profile is None:
            return None
        if profile == "auto":
            return Profile.find(self.model)
        loaded = profile if isinstance(profile, Profile) else Profile.load(profile)
        loaded.check(self.model)
        return loaded

    def _stops(self, settings: Settings, criteria: Sequence[Callable] | None) -> list[Stop]:
        every = list(criteria or ())
        if settings.stop_strings:
            if self.tokenizer is None:
                raise ValueError("stop_strings need a tokenizer: pass one to Engine.from_model")
            every.append(StopStringCriteria(tokenizer=self.tokenizer, stop_strings=list(settings.stop_strings)))
        return [_as_stop(criterion) for criterion in every]

    def _warn_no_profile(self) -> None:
        if not self._warned_no_profile:
            self._warned_no_profile = True
            warnings.warn(
                "decoding plainly: this model has no profile, so there is no trained exit to draft with. Calibrate it "
                "(python -m selfspec.calibrate --model ...), or pass exit_layer= and plan= to draft with an untrained "
                "exit.",
                UserWarning,
                stacklevel=_stacklevel_of_caller(),
            )


def _check_limits(**limits: int | None) -> None:
    for name, limit in limits.items():
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError(f"{name}={limit!r} is not possible: it must be an integer of at least 1")


def _touches_every_token(sampling: Sampling, processors: Sequence[Callable] | None) -> bool:
    """Whether the host has a hand in every choice, which takes its own time."""
    return bool(processors) or sampling.repetition_penalty != 1 or sampling.min_new_tokens > 0


def _less_replaced(sampling: Sampling, processors: Sequence[Callable]) -> Sampling:
    """A processor that the caller brings replaces the built-in one of its kind, as in transformers."""
    kinds = {type(processor) for processor in processors}
    if RepetitionPenaltyLogitsProcessor in kinds:
        sampling = replace(sampling, repetition_penalty=1.0)
    if MinNewTokensLengthLogitsProcessor in kinds:
        sampling = replace(sampling, min_new_tokens=0)
    return sampling


def _stacklevel_of_caller() -> int:
    """For a warning raised by the function that calls this: the first frame that is not this module's."""
    level, frame = 1, inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_code.co_filename == __file__:
        level, frame = level + 1, frame.f_back
    return level


def _as_stop(criterion: Callable) -> Stop:
    return lambda prefix: bool(torch.as_tensor(criterion(prefix, None)).any())


def _to_tensor(input_ids: torch.Tensor, rows: list[Row], settings: Settings) -> torch.Tensor:
    """Prompts as they came, padding included, then the new tokens, padded on the right to the longest."""
    prompts = input_ids.repeat_interleave(settings.num_return_sequences, dim=0)
    longest = max(row.new_tokens for row in rows)
    pad = settings.pad_token_id if settings.pad_token_id is not None else 0
    new = [row.tokens[len(row.prompt) :] + [pad] * (longest - row.new_tokens) for row in rows]
    return torch.cat((prompts, torch.tensor(new, device=input_ids.device)), dim=1)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


def _generation_config(folder: Path) -> GenerationConfig:
    if (folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
