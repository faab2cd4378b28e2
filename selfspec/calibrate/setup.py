"""Everything a calibration needs before its first stage: model, prompts as tokens, layers, sizes, and a work folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from selfspec.calibrate import heads
from selfspec.calibrate.prompts import Domain, Prompt, parse_domain, shipped_domains
from selfspec.calibrate.resources import Resources, fit
from selfspec.calibrate.settings import CalibrationSettings
from selfspec.calibrate.training import Recipe
from selfspec.calibrate.work import FOLDER, Work
from selfspec.engine import Engine
from selfspec.memory import limit_memory
from selfspec.models.decoder import Decoder
from selfspec.models.loading import pick_device
from selfspec.profiles.paths import profiles_dir
from selfspec.profiles.profile import ModelIdentity, Profile
from selfspec.text import encode

# The most prompts of a domain to measure with, and the most tokens of their answers; fewer without a GPU.
_MEASURED, _MEASURED_WITHOUT_GPU = (24, 128), (6, 48)
_DISK_BYTES = 2 * 2**30  # of text, checkpoints and exits in the profile's folder
_ROUTER_LAYER = (
    3  # the router reads states after so many layers, or as many as below the deepest exit if that is deeper
)


class Setup:
    """A calibration that is ready to start. Raises ValueError, before any work, for what cannot be done."""

    def __init__(self, settings: CalibrationSettings) -> None:
        self.settings = settings
        self.domains = [parse_domain(text) for text in settings.domains] or shipped_domains()
        if len({domain.name for domain in self.domains}) < len(self.domains):
            raise ValueError("two domains have the same name; give each --domain a name of its own")
        if settings.memory_gb is not None:
            limit_memory(settings.memory_gb, pick_device(settings.device))
        self.engine = Engine.from_pretrained(
            settings.model, settings.device, settings.dtype, profile=None, quantize=settings.quantize,
            prefix_reuse=False,
        )  # fmt: skip
        if self.engine.tokenizer is None:
            raise ValueError(f"{settings.model} has no tokenizer, and prompts are text: add one to its folder")
        self.training_prompts = [self.fitting(domain.name, domain.training) for domain in self.domains]
        on_gpu = self.model.device.type == "cuda"
        self._most_measured, self.answer_tokens = _MEASURED if on_gpu else _MEASURED_WITHOUT_GPU
        self.layers = settings.exit_layers(self.model.config.num_layers)
        self.identity = ModelIdentity.of(self.model)
        self.out = settings.out or profiles_dir() / self.identity.name
        self.trained_before = before = None if settings.train else self._profile_with_exits()
        self.stored_exits = None if before is None else before.exits_file.stored_exits()  # in their own dtype
        self.work = Work(self.out / FOLDER, self._key(), settings.resume, settings.restart)
        _check_disk(self.out)
        recipe = Recipe.for_device(self.model.device, self.engine.context, settings.seed)
        self.resources = self._resources(recipe)
        self.recipe = replace(recipe, rows=self.resources.training_rows, compiled=self.engine.has_kernels)

    @property
    def model(self) -> Decoder:
        return self.engine.model

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.model.config.vocab_size

    @property
    def router_layer(self) -> int:
        """The router reads prompts' states after this many layers."""
        return min(max(_ROUTER_LAYER, *self.layers), self.model.config.num_layers - 1)

    def measuring_prompts(self, domain: Domain) -> list[list[int]]:
        return self.fitting(domain.name, domain.measuring)[: self._most_measured]

    def fitting(self, name: str, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Prompts as tokens, without those longer than half of the model's context."""
        try:
            tokens = [self._tokens_of(prompt) for prompt in prompts]
        except ValueError as error:
            raise ValueError(f"domain {name!r}: {error}") from error
        fitting = [prompt for prompt in tokens if len(prompt) <= self.engine.context // 2]
        if not fitting:
            raise ValueError(
                f"domain {name!r}: every prompt is longer than half of the model's context, {self.engine.context // 2} "
                "tokens; shorten them"
            )
        return fitting

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        """A prompt as tokens, through the chat template where the tokenizer has one."""
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str) and getattr(tokenizer, "chat_template", None):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str) and not getattr(tokenizer, "chat_template", None):
            prompt = "\n".join(message["content"] for message in prompt)
        tokens = encode(tokenizer, prompt)
        largest = max(tokens, default=0)
        if largest >= self.vocabulary:
            raise ValueError(
                f"a prompt has token id {largest}, outside the model's vocabulary (0 to {self.vocabulary - 1}): use "
                "the model's own tokenizer"
            )
        return tokens

    def _key(self) -> dict[str, Any]:
        """Identifies the run: only a run with an equal key is resumed."""
        left_out = ("resume", "restart", "out")
        key: dict[str, Any] = {
            name: str(value) for name, value in asdict(self.settings).items() if name not in left_out
        }
        key |= {"fingerprint": self.identity.fingerprint, "prompts": [domain.training for domain in self.domains]}
        key |= {"resources": [field.name for field in fields(Resources)]}  # which a resumed run reads
        return key | {"text": [sha256(path.read_bytes()).hexdigest() for path in self.settings.text]}

    def _resources(self, recipe: Recipe) -> Resources:
        """Sizes that fit in memory; a resumed run keeps the sizes that it started with."""
        stored = self.work.read_json("resources") if self.work.resumed else None
        if stored is not None:
            return Resources(**stored)
        return fit(self.model, recipe, heads.largest_head(self.vocabulary))

    def _profile_with_exits(self) -> Profile:
        """The profile in the output folder, else the one that is found for the model; sets the layers to its exits'."""
        in_folder = (self.out / "profile.json").exists()
        profile = Profile.load(self.out) if in_folder else Profile.find(self.model)
        layers = profile.exits_file.layers() if profile is not None else []
        if profile is None or not layers:
            raise ValueError("this model has no trained exits yet: leave out --no-train")
        profile.check(self.model)
        self.layers = [layer for layer in layers if not self.settings.exits or layer in self.settings.exits]
        if not self.layers:
            raise ValueError(f"none of the exits {layers} of the profile is among those asked for with --exits")
        return profile


def _check_disk(out: Path) -> None:
    free = shutil.disk_usage(out).free
    if free < _DISK_BYTES:
        raise ValueError(
            f"the disk of {out} has {free / 1e9:.1f} GB free, and calibration needs {_DISK_BYTES / 1e9:.0f} GB: free "
            "some space, or choose another folder with --out"
        )
