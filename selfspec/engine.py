"""The engine: one model behind a `generate` like transformers', and behind `complete` and `stream` for text.

Holds the model, its KV cache and the scheduler. `request_builder` checks a call and builds its request, the scheduler
runs it, `results` shapes what is returned, `warmup` captures steps ahead of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex, overload

import torch
from transformers import GenerationConfig

from selfspec.backends.base import Backend
from selfspec.backends.torch_backend import TorchBackend
from selfspec.cache.kv_cache import PAGE_SIZE, Cache
from selfspec.cache.size import SHARE, cache_pages, check_limits, longest_sequence
from selfspec.drafters import Drafters
from selfspec.governor.rules import Mode, Rules
from selfspec.memory import free_device_bytes
from selfspec.memory_plan import limit_to_plan, plan_memory
from selfspec.metrics import Metrics, Summary
from selfspec.models import loading
from selfspec.models.decoder import Decoder
from selfspec.models.pretrained import load_pretrained
from selfspec.models.row_times import time_rows
from selfspec.profiles.profile import Profile
from selfspec.profiles.router import embed_prompts
from selfspec.request import PlanLike, SpeculationRequest, check_rules, read_input_ids, read_prompts, refuse_unknown
from selfspec.request_builder import RequestBuilder
from selfspec.results import Completion, GenerateOutput, Stream, completion_of, output_of, to_tensor
from selfspec.scheduler import MAX_DECODING, Scheduler
from selfspec.sequence import Request
from selfspec.text import Message, Prompt, encode, is_messages
from selfspec.warn import WarnOnce

if TYPE_CHECKING:
    from selfspec.backends.cuda.graphs import Graphs

_log = logging.getLogger(__name__)


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
        name: str | None = None,
        prefix_reuse: bool = True,
    ) -> None:
        check_limits(max_length=max_length, max_batch=max_batch)
        self.model = model
        self.name = name or model.config.model_type
        self.tokenizer = tokenizer
        self.generation_config = generation_config or GenerationConfig()
        self.rules = (check_rules(rules) or Rules()).for_device(model.device.type)
        self.max_batch = max_batch or MAX_DECODING
        self.profile = self._read_profile(profile)
        context = min(model.config.context, max_length or model.config.context)
        most = SHARE * free_device_bytes(model.device)
        pages = cache_pages(model.config, model.dtype, context, max_batch, kv_cache_gb, most)
        self.cache = Cache(model.config, model.device, model.dtype, pages)
        self.context = min(context, longest_sequence(pages))
        self._graphs = self._build_graphs(kernels)
        graphs = self._graphs
        embed = partial(embed_prompts, model, self.cache) if graphs is None else graphs.embed_prompts
        timed = partial(time_rows, model, self.cache) if graphs is None else None
        self.drafters = Drafters(model, self.profile, embed, self.has_kernels, timed)
        self._metrics = Metrics()
        self.scheduler = Scheduler(
            self.cache, self.drafters, self._metrics, self.new_backend, self.max_batch, self._compile_first(graphs),
            prefix_reuse,
        )  # fmt: skip
        self._requests = RequestBuilder(model, self.drafters, self.rules, self.context, self.has_kernels)
        self._shared_embedding: Any = None  # the parameter of a live model whose storage is shared
        if self.device.type == "cpu" and self.dtype in (torch.bfloat16, torch.float16):
            name = _short(self.dtype)
            WarnOnce()(f"{name} is several times slower than float32 on most CPUs: load the model with dtype='float32'")
        self._log_state()

    @classmethod
    @refuse_unknown
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        profile: Profile | str | Path | None = "auto",
        quantize: str | None = None,
        rules: Rules | None = None,
        max_length: int | None = None,
        max_batch: int | None = None,
        kernels: bool | None = None,
        kv_cache_gb: float | None = None,
        memory_gb: float | None = None,
        prefix_reuse: bool = True,
    ) -> Engine:
        """Loads a folder or hub name with safetensors, a GGUF file, or 'demo'.

        `dtype` 'native' keeps the 4- and 8-bit weights of a GGUF file, which any other dtype expands once into a folder
        in the cache. `quantize` 'int8' or 'int4' rounds 16-bit weights while they are loaded; LM head and embedding get
        8 bits. `profile` is 'auto' (the newest one made for these weights), a folder, a Profile, or None.
        `max_length` is in tokens, prompt included; `kv_cache_gb` in 10^9 bytes, as `memory_gb`: the most memory that
        the engine may take in all. A model that does not fit is refused, with a table, before weights are read. With
        `prefix_reuse` the KV cache keeps the pages of ended requests, and prompts that begin with the same tokens reuse
        them; no token changes.
        """
        check_limits(max_length=max_length, max_batch=max_batch)
        if profile != "auto" and isinstance(profile, str | Path):
            profile = Profile.load(profile)  # before the weights: a bad profile must not cost their loading
        device = loading.pick_device(device)
        if memory_gb is not None:
            limits = max_length, max_batch, kv_cache_gb, memory_gb
            plans = plan_memory(path_or_name, device, dtype, profile, quantize, *limits, kernels)
            kv_cache_gb = limit_to_plan(plans, device)
        loaded, name = load_pretrained(path_or_name, device, dtype, quantize), str(path_or_name)
        return cls(*loaded, profile, rules, max_length, max_batch, kernels, kv_cache_gb, name, prefix_reuse)

    @classmethod
    @refuse_unknown
    def from_model(
        cls,
        hf_model: Any,
        tokenizer: Any = None,
        profile: Profile | str | Path | None = "auto",
        rules: Rules | None = None,
        max_length: int | None = None,
        max_batch: int | None = None,
        kernels: bool | None = None,
        kv_cache_gb: float | None = None,
        prefix_reuse: bool = False,
    ) -> Engine:
        """Shares the weights of a live transformers model: no copy is made, and the model stays usable.

        `profile` and the limits are those of `from_pretrained`. `prefix_reuse` is off unless asked for: pages that were
        computed before a change of the live model's weights would be wrong.
        """
        model = loading.adopt(hf_model)
        config = getattr(hf_model, "generation_config", None)
        name = getattr(hf_model.config, "name_or_path", None) or type(hf_model).__name__
        limits = max_length, max_batch, kernels, kv_cache_gb
        engine = cls(model, tokenizer, config, profile, rules, *limits, name, prefix_reuse=prefix_reuse)
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
        response_format: dict[str, Any] | None = None,
        rules: Rules | None = None,
        inputs: torch.Tensor | None = None,
        tokenizer: Any = None,
        **generation_kwargs: Any,
    ) -> torch.Tensor | GenerateOutput:
        """Generates as transformers' `generate` does; speculation changes the speed and no token.

        `speculative_decoding` is None or True (where the rules allow it), False, or "force"; `exit_layer` and `plan`
        override the profile's; `acceptance="rejection"` gives the classical rule, whose tokens do depend on the draft.
        `response_format` is OpenAI's: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}};
        also {"type": "regex", "regex": ...} and {"type": "grammar", "grammar": ...} in Lark's syntax. `inputs` is
        transformers' other name for `input_ids`; `tokenizer`, by default the engine's, reads stop strings and grammars.
        """
        input_ids = read_input_ids(input_ids, inputs)
        if return_dict_in_generate:
            generation_kwargs["return_dict_in_generate"] = True
        speculation = SpeculationRequest(
            speculative_decoding, domain, exit_layer, plan, acceptance, stateful_processors, rules
        )
        settings = self._requests.settings(self.generation_config, generation_config, generation_kwargs)
        prompts = read_prompts(input_ids, attention_mask, settings)
        if streamer is not None and len(prompts) * settings.num_return_sequences > 1:
            raise ValueError("a streamer can follow one sequence only: pass one prompt and num_return_sequences=1")
        self._check_shared_weights()
        tokenizer = tokenizer if tokenizer is not None else self.tokenizer
        callables = logits_processor, stopping_criteria
        request = self._requests.build(
            prompts, input_ids.shape[1], settings, seed, *callables, speculation, tokenizer, response_format
        )
        if streamer is None:
            self._run(request)
        else:
            self._stream_to(streamer, input_ids, request)
        sequences = to_tensor(input_ids, request.sequences, settings)
        if not settings.return_dict:
            return sequences
        return output_of(sequences, request)

    # One prompt gives one completion, unless the call or its generation config asks for several samples.
    @overload
    def complete(
        self, prompt: Prompt, *, generation_config: None = None, num_return_sequences: Literal[1] = 1, **options: Any
    ) -> Completion: ...
    @overload
    def complete(self, prompt: Prompt, **options: Any) -> Completion | list[Completion]: ...
    @overload
    def complete(self, prompt: list[str] | list[list[Message]], **options: Any) -> list[Completion]: ...

    def complete(
        self, prompt: Prompt | list[str] | list[list[Message]], **options: Any
    ) -> Completion | list[Completion]:
        """Completes a text or answers a chat; a list of prompts, or several samples of one, give a list.

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

    def build_request(self, tokens: list[int], **options: Any) -> Request:
        """Returns a request for one prompt of token ids, for `scheduler.submit`; takes the options of `complete`.

        Raises ValueError for an argument that cannot be served; takes no page of the KV cache and runs no pass.
        """
        self._check_shared_weights()
        return self._requests.build_for_tokens(self.tokenizer, self.generation_config, [tokens], options)

    @refuse_unknown
    def warmup(
        self, batch: int = 1, domain: str | None = None, temperatures: Sequence[float] = (0.0,), max_length: int = 2048
    ) -> int:
        """Compiles and captures the steps that requests of up to `batch` sequences and `max_length` tokens will replay,
        so that the first of them does not wait for it. Temperatures above 0 sample as the model's generation config
        says. Returns how many steps there were: 0 without kernels, which need no warm-up."""
        check_limits(batch=batch, max_length=max_length)
        graphs = self._graphs
        if graphs is None:
            return 0
        from selfspec.warmup import ExpectedRequests, warm_up  # imports Triton

        batch, max_length = min(batch, self.max_batch), min(max_length, self.context)
        expected = ExpectedRequests(batch, domain, tuple(temperatures), max_length)

        def capture() -> int:
            self.scheduler.close_idle_batches()  # captured steps belong to the slot buffers that requests will get
            return warm_up(graphs, self.drafters, self.rules, self.generation_config, expected)

        return self.scheduler.call(capture)

    @property
    def device(self) -> torch.device:
        """The device that holds the weights and the KV cache."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and the KV cache."""
        return self.model.dtype

    @property
    def has_kernels(self) -> bool:
        """Whether steps run as Triton kernels in CUDA graphs; otherwise PyTorch's own operations run them."""
        return self._graphs is not None

    def memory(self) -> dict[str, int]:
        """Bytes held, by what holds them. Of `cache`, sequences hold `cache_used` now, and `cache_reusable` keeps
        prefixes of ended requests until sequences need it."""
        page = self.cache.nbytes // self.cache.num_pages
        return {
            "weights": self.model.nbytes,
            "cache": self.cache.nbytes,
            "cache_used": (self.cache.num_pages - self.cache.free_pages) * page,
            "cache_reusable": self.cache.reusable_pages * page,
            "exits": self.drafters.nbytes,
            "graphs": 0 if self._graphs is None else self._graphs.nbytes,
        }

    def metrics(self) -> Summary:
        """Totals over all requests so far: speeds, accept rates, plans, and reasons for plain decoding."""
        return self._metrics.summary()

    def new_backend(self, rejection: bool = False) -> Backend:
        """Returns a backend for one batch. `acceptance="rejection"` needs whole rows of draft logits, which kernels do
        not keep: it runs on PyTorch's operations."""
        if self._graphs is None or rejection:
            return TorchBackend(self.model, self.cache)
        from selfspec.backends.cuda.backend import CudaBackend  # imports Triton

        return CudaBackend(self._graphs)

    def __repr__(self) -> str:
        memory = self.memory()
        return (
            f"Engine({self.name!r}, device={str(self.device)!r}, dtype={_short(self.dtype)}, "
            f"profile={self._profile_name!r}, weights={memory['weights'] / 1e9:.2f} GB, "
            f"kv_cache={memory['cache'] / 1e9:.2f} GB)"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses copy, deepcopy and pickle, which all come here."""
        raise TypeError(
            "an Engine cannot be copied or pickled: it holds device memory and a running thread. Threads may share one "
            "engine; another process needs its own Engine.from_pretrained"
        )

    def _text_request(self, prompts: Sequence[Prompt], options: dict[str, Any]) -> Request:
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer: pass one to Engine.from_model, or call generate() with token ids")
        self._check_shared_weights()
        tokens = [encode(self.tokenizer, prompt) for prompt in prompts]
        return self._requests.build_for_tokens(self.tokenizer, self.generation_config, tokens, options)

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

    def _compile_first(self, graphs: Graphs | None) -> Callable[[Request], None] | None:
        """What the scheduler calls before the first request; None without kernels."""
        if graphs is None:
            return None
        from selfspec.warmup import compile_first  # imports Triton

        return partial(compile_first, graphs, self.drafters)

    def _build_graphs(self, kernels: bool | None) -> Graphs | None:
        """Returns what steps run with as kernels and CUDA graphs: on a GPU that can run them, unless switched off."""
        if not (kernels or (kernels is None and self.model.device.type == "cuda")):
            if kernels is None and self.model.is_quantized:
                WarnOnce()(f"{EXPANDED}; without a GPU a model in float32 decodes several times faster")
            return None
        from selfspec.backends.cuda.decoder import REQUIREMENTS, is_supported
        from selfspec.backends.cuda.graphs import Graphs

        if is_supported(self.model, self.model.device):
            return Graphs(self.model, self.cache, self.context, self.max_batch)
        if kernels:
            raise ValueError(REQUIREMENTS)
        if self.model.is_quantized:
            WarnOnce()(f"{slow_weights(self.model)}: {REQUIREMENTS}")
        return None

    def _check_shared_weights(self) -> None:
        """Refuses to decode with a live model's weights once the model was moved or converted."""
        parameter = self._shared_embedding
        if parameter is not None and parameter.data_ptr() != self.model.embedding.dense.data_ptr():
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

    @property
    def _profile_name(self) -> str | None:
        if self.profile is None:
            return None
        return "in memory" if self.profile.folder is None else self.profile.folder.name

    def _log_state(self) -> None:
        weights, cache = self.model.nbytes / 1e9, self.cache.nbytes / 1e9
        how = "Triton kernels in CUDA graphs" if self.has_kernels else "PyTorch operations"
        _log.info("model %s: %.2f GB in %s on %s, %s", self.name, weights, _short(self.dtype), self.device, how)
        if self.profile is None:
            _log.info("no profile: drafting only what a text repeats unless a request gives an exit layer or a plan")
        else:
            _log.info("profile %s", self.profile.folder or "in memory")
        tokens = self.cache.num_pages * PAGE_SIZE
        _log.info("KV cache: %.2f GB for %d tokens, at most %d in a sequence", cache, tokens, self.context)


EXPANDED = "this model's quantized weights run on PyTorch's operations, which expand each weight in every call"


def slow_weights(model: Decoder) -> str:
    """Says that quantized weights will be slow, and what of the model and its GPU the kernels may not support."""
    config, (major, minor) = model.config, torch.cuda.get_device_capability(model.device)
    sizes = f"hidden size {config.hidden_size}, MLP {config.intermediate_size}, heads of {config.head_dim}"
    return f"{EXPANDED}: it has {sizes}, in {_short(model.dtype)} on sm_{major}{minor}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
