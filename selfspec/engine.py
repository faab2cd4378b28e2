"""The engine: one model behind a `generate` that feels like transformers', and behind `complete` and `stream` for text.

Checks requests, submits them to the scheduler, and shapes the results.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import track
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, StopStringCriteria

from selfspec.backends.base import Backend
from selfspec.backends.torch_backend import TorchBackend
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.cache.size import cache_pages
from selfspec.drafters import Drafter, Drafters
from selfspec.governor.governor import Watch
from selfspec.governor.rules import Mode, Policy, Rules
from selfspec.metrics import Metrics, Summary
from selfspec.models import loading
from selfspec.models.checkpoint import read_json
from selfspec.models.decoder import Decoder
from selfspec.models.row_times import time_rows
from selfspec.profiles.profile import Profile
from selfspec.profiles.router import marks_of
from selfspec.request import (
    PlanLike,
    Resolved,
    Settings,
    SpeculationRequest,
    check_prompts,
    check_rules,
    check_token_ids,
    read_input_ids,
    read_prompts,
    read_seeds,
    read_settings,
    split_options,
)
from selfspec.results import Completion, GenerateOutput, Stream, completion_of, stats_of
from selfspec.sampling import SamplingParams
from selfspec.scheduler import MAX_DECODING, Scheduler
from selfspec.sequence import Request
from selfspec.sequence import Sequence as Sequence_
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import NONE, SPARE_POSITIONS, Plan
from selfspec.text import Message, encode, is_messages

if TYPE_CHECKING:
    from selfspec.backends.cuda.graphs import Graphs

DEFAULT_COMPLETION_TOKENS = 512

Prompt = str | list[Message]


class Engine:
    """Generates with one model that drafts and verifies with itself. Any thread may call any method at any time."""

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
        kv_cache_gb: float | None = None,
    ) -> None:
        _check_limits(max_length=max_length, max_batch=max_batch)
        self.model = model
        self.tokenizer = tokenizer
        self.generation_config = generation_config or GenerationConfig()
        self.rules = (check_rules(rules) or Rules()).on(model.device.type)
        self.max_batch = max_batch or MAX_DECODING
        self.profile = self._read_profile(profile)
        context = min(model.config.context, max_length or model.config.context)
        pages = cache_pages(model.config, model.device, model.dtype, context, max_batch, kv_cache_gb)
        self.cache = Cache(model.config, model.device, model.dtype, pages)
        self.context = min(context, (pages - 1) * PAGE_SIZE - SPARE_POSITIONS)
        self._graphs = self._build_graphs(kernels)
        mark = partial(marks_of, model, self.cache) if self._graphs is None else self._graphs.marks
        timed = partial(time_rows, model, self.cache) if self._graphs is None else None
        self.drafters = Drafters(model, self.profile, mark, self.has_kernels, timed)
        self._metrics = Metrics()
        self.scheduler = Scheduler(self.cache, self.drafters, self._metrics, self.new_backend, self.max_batch)
        self._shared_embedding: Any = None  # the parameter of a live model whose storage is shared
        self._warned: set[str] = set()

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
        kv_cache_gb: float | None = None,
    ) -> Engine:
        """Loads a folder or hub name with safetensors, a GGUF file, or 'demo'."""
        _check_limits(max_length=max_length, max_batch=max_batch)
        if profile != "auto" and isinstance(profile, str | Path):
            profile = Profile.load(profile)  # before the weights: a bad profile must not cost their loading
        device = loading.pick_device(device)
        folder = loading.resolve(path_or_name)
        tokenizer, config = _load_tokenizer(folder), _generation_config(folder)
        model = loading.load_folder(folder, device, dtype)
        return cls(model, tokenizer, config, profile, rules, max_length, max_batch, kernels, kv_cache_gb)

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
        kv_cache_gb: float | None = None,
    ) -> Engine:
        """Shares the weights of a live transformers model: no copy is made, and the model stays usable."""
        model = loading.adopt(hf_model)
        config = getattr(hf_model, "generation_config", None)
        engine = cls(model, tokenizer, config, profile, rules, max_length, max_batch, kernels, kv_cache_gb)
        engine._shared_embedding = hf_model.get_input_embeddings().weight
        return engine

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
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
        inputs: torch.Tensor | None = None,
        tokenizer: Any = None,
        **generation_kwargs: Any,
    ) -> torch.Tensor | GenerateOutput:
        """transformers' `generate` for what it supports; speculation is there for the speed, not for other tokens.

        `speculative_decoding` is None or True (where the rules allow it), False, or "force"; `exit_layer` and `plan`
        override the profile's; `acceptance="rejection"` gives the classical rule, whose tokens do depend on the draft.
        `inputs` is transformers' other name for `input_ids`; `tokenizer` reads `stop_strings`, by default the engine's.
        """
        input_ids = read_input_ids(input_ids, inputs)
        if return_dict_in_generate:
            generation_kwargs["return_dict_in_generate"] = True
        wishes = SpeculationRequest(
            speculative_decoding, domain, exit_layer, plan, acceptance, stateful_processors, rules
        )
        settings = read_settings(self.generation_config, generation_config, generation_kwargs)
        prompts = read_prompts(input_ids, attention_mask, settings)
        if streamer is not None and len(prompts) * settings.num_return_sequences > 1:
            raise ValueError("a streamer can follow one sequence only: pass one prompt and num_return_sequences=1")
        request = self._request(
            prompts, input_ids.shape[1], settings, seed, logits_processor, stopping_criteria, wishes, tokenizer
        )
        if streamer is None:
            self._run(request)
        else:
            self._stream_to(streamer, input_ids, request)
        sequences = _to_tensor(input_ids, request.sequences, settings)
        if not settings.return_dict:
            return sequences
        return GenerateOutput(sequences, [stats_of(sequence) for sequence in request.sequences])

    def _run(self, request: Request) -> None:
        self.scheduler.submit(request)
        self.scheduler.wait(request)

    def _stream_to(self, streamer: Any, input_ids: torch.Tensor, request: Request) -> None:
        """Calls the streamer on this thread, so that it delays no step."""
        streamer.put(input_ids.cpu())
        self.scheduler.submit(request)
        sequence, shown = request.sequences[0], 0
        try:
            for count in self.scheduler.follow(request):
                for token in sequence.tokens[len(sequence.prompt) + shown : len(sequence.prompt) + count]:
                    streamer.put(torch.tensor([token]))
                shown = count
        except BaseException:
            self.scheduler.cancel(request)
            raise
        streamer.end()

    def complete(
        self, prompt: Prompt | list[str] | list[list[Message]], **options: Any
    ) -> Completion | list[Completion]:
        """Completes a text or answers a chat; a list of prompts gives a list.

        Takes `generate`'s arguments but for input_ids, attention_mask, streamer and return_dict_in_generate.
        """
        single = isinstance(prompt, str) or is_messages(prompt)
        if not single and not isinstance(prompt, list | tuple):
            raise ValueError(f"a prompt must be a string, messages, or a list of these, not a {type(prompt).__name__}")
        if not prompt and not single:
            return []  # as many completions as prompts
        prompts: Sequence[Prompt] = [prompt] if single else prompt  # type: ignore[assignment, list-item]
        request = self._text_request(prompts, options)
        self._run(request)
        completions = [completion_of(sequence, self.tokenizer) for sequence in request.sequences]
        return completions[0] if single and len(completions) == 1 else completions

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Yields the completion of one prompt piece by piece; closing the stream frees its cache."""
        request = self._text_request([prompt], options)
        if len(request.sequences) > 1:
            raise ValueError("stream() follows one sequence: pass one prompt and num_return_sequences=1")
        return Stream(request, self.scheduler, self.tokenizer)

    def warmup(
        self, batch: int = 1, domain: str | None = None, temperatures: Sequence[float] = (0.0,), max_length: int = 2048
    ) -> int:
        """Compiles and captures the steps that requests of up to `batch` sequences and `max_length` tokens will replay,
        so that the first of them does not wait for it; shows its progress. Temperatures above 0 sample as the model's
        generation config says. Without kernels there is nothing to do. Returns how many steps there were."""
        return (
            0
            if self._graphs is None
            else self.scheduler.call(partial(self._warm_up, batch, domain, temperatures, max_length))
        )

    @property
    def has_kernels(self) -> bool:
        """Whether steps run as kernels and CUDA graphs, or as PyTorch's own operations."""
        return self._graphs is not None

    def memory(self) -> dict[str, int]:
        """Bytes held, by what holds them; of the KV cache also how much of it is in use."""
        pages = self.cache.num_pages - self.cache.free_pages
        return {
            "weights": self.model.nbytes,
            "cache": self.cache.nbytes,
            "cache_used": pages * (self.cache.nbytes // self.cache.num_pages),
            "exits": self.drafters.nbytes,
            "graphs": 0 if self._graphs is None else self._graphs.nbytes,
        }

    def metrics(self) -> Summary:
        """What all requests so far came to: speeds, accept rates, and how often which plan was used, and why."""
        return self._metrics.summary()

    def _text_request(self, prompts: Sequence[Prompt], options: dict[str, Any]) -> Request:
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer: pass one to Engine.from_model, or call generate() with token ids")
        options = dict(options)
        for name in ("input_ids", "inputs", "attention_mask", "streamer"):
            if name in options:
                raise ValueError(f"{name} goes with generate(), not with text: use stream() to follow a completion")
        names = ("generation_config", "logits_processor", "stopping_criteria", "seed", "tokenizer")
        config, processors, criteria, seed, tokenizer = (options.pop(name, None) for name in names)
        wishes, kwargs = split_options(options)
        lengths = ("max_new_tokens", "max_length")
        if all(kwargs.get(name) is None and getattr(config, name, None) is None for name in lengths):
            kwargs["max_new_tokens"] = DEFAULT_COMPLETION_TOKENS
        settings = read_settings(self.generation_config, config, kwargs)
        tokens = [encode(self.tokenizer, prompt) for prompt in prompts]
        width = max((len(prompt) for prompt in tokens), default=0)
        return self._request(tokens, width, settings, seed, processors, criteria, wishes, tokenizer)

    def _request(
        self,
        prompts: list[list[int]],
        width: int,
        settings: Settings,
        seed: int | Sequence[int] | None,
        processors: Sequence[Callable] | None,
        criteria: Sequence[Callable] | None,
        wishes: SpeculationRequest,
        tokenizer: Any = None,
    ) -> Request:
        """Checks everything that can be checked before work starts; takes no page and runs no pass."""
        self._check_shared_weights()
        check_prompts(prompts, self.model.config.vocab_size, self.context)
        resolved = settings.resolve(width, processors, criteria, self.model.device)
        params, callables, allowed = resolved.params, resolved.processors, resolved.max_new_tokens
        check_token_ids(params, self.model.config.vocab_size)
        seeds = read_seeds(seed, len(prompts), params.do_sample)
        plan = None if wishes.plan is None else Plan.parse(wishes.plan)
        layer = self.drafters.own_exit_layer(wishes, plan)
        policy = Policy(
            rules=(wishes.rules or self.rules).on(self.model.device.type),
            sampling=params,
            mode=wishes.speculative_decoding,
            plan=plan,
            has_exit=layer is not None or self.profile is not None,
            stateful_processors=wishes.stateful_processors,
        )
        if policy.off_for_good == "no_profile":
            self._warn_no_profile()
        if callables and self.has_kernels:
            self._warn_callables(callables)
        sequences: list[Sequence_] = []
        for index, prompt in enumerate(prompts):
            samples = [
                Sequence_(prompt, seeds[index], sample, min(len(prompt) + allowed, self.context), params)
                for sample in range(settings.num_return_sequences)
            ]
            for sample in samples[1:]:
                sample.parent = samples[0]
            sequences += samples
        request = Request(
            sequences,
            device=self.model.device,
            processors=tuple(callables),
            criteria=tuple(self._criteria(resolved, tokenizer)),
            policy=policy,
            rejection=wishes.acceptance == "rejection" and params.do_sample,
        )
        if not policy.off_for_good:
            request.find_drafter = partial(self._find_drafter, request, wishes, prompts, layer)
        return request

    def _find_drafter(
        self, request: Request, wishes: SpeculationRequest, prompts: list[list[int]], layer: int | None
    ) -> Drafter | None:
        """The request's domain, exit and plans; sequences whose prompts are unlike what calibration saw are marked."""
        assert request.policy is not None
        drafter, far = self.drafters.drafter(wishes, prompts, request.policy, layer)
        samples = len(request.sequences) // len(prompts)
        for index, is_far in enumerate(far):
            for sequence in request.sequences[index * samples : (index + 1) * samples]:
                sequence.watch = Watch.of_prompt(is_far)
        return drafter

    def new_backend(self, rejection: bool = False) -> Backend:
        """Executes the steps of one batch. The classical rejection looks at whole rows of draft logits, which kernels
        do not keep."""
        if self._graphs is None or rejection:
            return TorchBackend(self.model, self.cache)
        from selfspec.backends.cuda.backend import CudaBackend  # imports Triton

        return CudaBackend(self._graphs)

    def _build_graphs(self, kernels: bool | None) -> Graphs | None:
        """Steps as kernels and CUDA graphs: on a GPU that can run them, unless switched off."""
        if not (kernels or (kernels is None and self.model.device.type == "cuda")):
            return None
        from selfspec.backends.cuda.decoder import WANTED, is_supported
        from selfspec.backends.cuda.graphs import Graphs

        if is_supported(self.model):
            return Graphs(self.model, self.cache, self.context, self.max_batch)
        if kernels:
            raise ValueError(WANTED)
        return None

    def _check_shared_weights(self) -> None:
        """A live model that was moved or converted no longer shares its weights with this engine."""
        parameter = self._shared_embedding
        if parameter is not None and parameter.data_ptr() != self.model.embedding.data_ptr():
            raise ValueError(
                "the transformers model that this engine shares its weights with was moved or converted since "
                "(.to, .half, .cuda ...), so the engine would use the old weights: build a new Engine.from_model"
            )

    def _read_profile(self, profile: Profile | str | Path | None) -> Profile | None:
        if profile is None:
            return None
        if profile == "auto":
            return Profile.find(self.model)
        loaded = profile if isinstance(profile, Profile) else Profile.load(profile)
        loaded.check(self.model)
        return loaded

    def _criteria(self, resolved: Resolved, tokenizer: Any) -> list[Callable]:
        every = list(resolved.criteria)
        if resolved.stop_strings:
            tokenizer = tokenizer if tokenizer is not None else self.tokenizer
            if tokenizer is None:
                raise ValueError("stop_strings need a tokenizer: pass tokenizer=, or one to Engine.from_model")
            every.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=list(resolved.stop_strings)))
        return every

    def _warn_callables(self, callables: Sequence[Callable]) -> None:
        names = ", ".join(dict.fromkeys(getattr(of, "__name__", type(of).__name__) for of in callables))
        self._warn_once(
            f"the logits processors {names} are Python callables: every step waits for them on the host, so decoding "
            "is slower. Built-in options (penalties, logit_bias, allowed_token_ids, ...) run on the device."
        )

    def _warn_no_profile(self) -> None:
        self._warn_once(
            "decoding plainly: this model has no profile, so there is no trained exit to draft with. Calibrate it "
            "(python -m selfspec.calibrate --model ...), or pass exit_layer= and plan= to draft with an untrained exit."
        )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=_stacklevel_of_caller())

    def _warm_up(self, batch: int, domain: str | None, temperatures: Sequence[float], max_length: int) -> int:
        from selfspec.backends.cuda.warmup import ExpectedStep, WarmUp  # imports Triton

        assert self._graphs is not None
        self.scheduler.close_idle_batches()  # captured steps belong to a slot table: the one that requests will get
        marked = self.profile.router_layer if self.profile is not None and self.profile.routes else None
        scored = self.profile is not None and any(c.prompt_agreement for c in self.profile.domains.values())
        expected = [ExpectedStep(*step) for step in dict.fromkeys(self._expected_steps(batch, domain, temperatures))]
        warm_up = WarmUp(self._graphs, min(max_length, self.context), self.rules.max_tree_batch if scored else 0)
        exits = dict.fromkeys(step.exit for step in expected)
        with warm_up.compiling():
            for exit in exits:
                warm_up.prepare_prompts(exit, batch, marked)
            for step in expected:
                warm_up.prepare(step)
        for exit in exits:
            warm_up.prepare_prompts(exit, batch, marked)
        for step in track(expected, description="capturing steps", transient=True):
            warm_up.prepare(step)
        return len(expected)

    def _expected_steps(
        self, batch: int, domain: str | None, temperatures: Sequence[float]
    ) -> Iterator[tuple[int, Plan, Exit | None, SamplingParams]]:
        """Plain decoding, and the profile's plans for the domain or all of them."""
        domains = [] if self.profile is None else [domain] if domain is not None else list(self.profile.domains)
        sizes = [1 << power for power in range((batch - 1).bit_length(), -1, -1)]  # sequences end at different times
        for temperature, size in product(temperatures, sizes):
            asked = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
            params = read_settings(self.generation_config, None, asked).resolve(1).params
            yield size, NONE, None, params
            policy = Policy(self.rules, params)
            for plan, exit in self.drafters.expected(min(size, batch), domains, policy):
                yield size, plan, exit, params


def _check_limits(**limits: int | None) -> None:
    for name, limit in limits.items():
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError(f"{name}={limit!r} is not possible: it must be an integer of at least 1")


def _stacklevel_of_caller() -> int:
    """For a warning raised by the function that calls this: the first frame that is not this module's."""
    level, frame = 1, inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_code.co_filename == __file__:
        level, frame = level + 1, frame.f_back
    return level


def _to_tensor(input_ids: torch.Tensor, rows: list[Sequence_], settings: Settings) -> torch.Tensor:
    """Prompts as they came, padding included, then the new tokens, padded on the right to the longest."""
    prompts = input_ids.repeat_interleave(settings.num_return_sequences, dim=0)
    longest = max(row.new_tokens for row in rows)
    pad = settings.pad_token_id if settings.pad_token_id is not None else 0
    new = [row.tokens[len(row.prompt) :] + [pad] * (longest - row.new_tokens) for row in rows]
    return torch.cat((prompts, torch.tensor(new, device=input_ids.device)), dim=1)


def _load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checked model folder; None if the folder has none."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise errors of many kinds for a damaged file
        raise ValueError(f"the tokenizer in {folder} cannot be read ({error}); download or save it again") from error


def _generation_config(folder: Path) -> GenerationConfig:
    path = folder / "generation_config.json"
    if path.exists():
        read_json(path)  # its errors say what to do
        try:
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise ValueError(f"{path} cannot be used ({error}); download or save it again") from error
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return GenerationConfig.from_model_config(config)
