"""Profiles: the result of calibrating one model, in a folder.

`profile.json` identifies the model's weights and has the exit and plans of each domain with the measurements that they
were chosen from; `exits.safetensors` has the trained exits. Loading checks every entry; a profile of other weights is
refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

from selfspec.governor.acceptance import extrapolated
from selfspec.governor.costs import StepCost
from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.models.decoder import Decoder
from selfspec.models.loading import fingerprint, same_fingerprint
from selfspec.profiles.exits_file import HOW_TO_CALIBRATE, ExitsFile
from selfspec.profiles.exits_file import NAME as EXITS
from selfspec.profiles.paths import profiles_dir, shipped_dir
from selfspec.profiles.router import Router, distances, normalised
from selfspec.speculation.exit import Exit, check_exit_layer
from selfspec.speculation.plan import Plan

SCHEMA = 2
_ROUNDING = 1e-6  # a sum of shares may exceed 1 by this much

# Counts fit in 31 bits; the bound keeps arithmetic with damaged numbers within float64.
Count = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
LayerNumber = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]


class Entry(BaseModel):
    """Part of a profile: immutable; refuses unknown entries and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelIdentity(Entry):
    """Identifies the weights of a model, in any file format and dtype."""

    model_type: str
    num_layers: Positive
    hidden_size: Positive
    vocab_size: Positive
    fingerprint: list[float]  # empty: of weights that are not loaded

    @classmethod
    def of(cls, model: Decoder) -> ModelIdentity:
        config = model.config
        return cls.model_construct(  # unchecked: the fingerprint of a model may be infinite
            model_type=config.model_type,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            fingerprint=[] if model.device.type == "meta" else fingerprint(model),
        )

    @property
    def name(self) -> str:
        """A folder name: family, layers, hidden size, and a digest of the fingerprint rounded to bfloat16, so that a
        checkpoint has the same name in float32 and in bfloat16."""
        rounded = torch.tensor(self.fingerprint).bfloat16().tolist()
        digest = hashlib.sha256(json.dumps(rounded).encode()).hexdigest()
        return f"{self.model_type}-{self.num_layers}x{self.hidden_size}-{digest[:12]}"

    def matches(self, other: ModelIdentity) -> bool:
        """Whether both are of the same weights; where `other`'s are not loaded, of the same sizes."""
        shape = {"fingerprint"}
        same_shape = self.model_dump(exclude=shape) == other.model_dump(exclude=shape)
        return same_shape and (not other.fingerprint or same_fingerprint(self.fingerprint, other.fingerprint))


class Device(Entry):
    """The device on which a profile was measured."""

    type: str
    name: str
    dtype: str
    torch: str
    kernels: bool = False  # steps ran as Triton kernels; False: as PyTorch operations


class Expected(Entry):
    """The figures of a plan that calibration expects from ranks and costs."""

    tokens_per_cycle: NonNegativeFloat
    accept_rate: Share
    speedup: NonNegativeFloat


class Run(Entry):
    """A measurement: a plan and plain decoding on the same prompts."""

    plan: str
    tokens_per_cycle: NonNegativeFloat
    accept_rate: Share
    tokens_per_second: NonNegativeFloat
    plain_tokens_per_second: PositiveFloat

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


class PlanChoice(Entry):
    """The plan for one temperature and batch, with its expected and its measured figures."""

    plan: str
    expected: Expected | None = None
    measured: Run | None = None

    def parsed(self, forced: bool) -> Plan:
        """The plan; with `forced`, the plan that was measured even where it was slower than plain decoding."""
        tried = self.measured.plan if self.measured is not None else self.plan
        return Plan.parse(tried if forced else self.plan)


class ExitRates(Entry):
    """Greedy figures of one exit in one domain, from which the domain's exit was chosen."""

    top1: Share  # of positions where the model's token is the exit's best
    top4: Share  # of positions where it is one of the exit's best four
    accept_rate: Share  # in rules.DEFAULT_TREE
    tokens_per_cycle: NonNegativeFloat  # expected of the exit's best plan for one sequence
    speedup: NonNegativeFloat  # expected of that plan


class Spread(Entry):
    mean: float
    deviation: NonNegativeFloat


class DomainChoice(Entry):
    """The exit, head and plans of one domain, and the measurements that they were chosen from."""

    exit_layer: LayerNumber
    plans: dict[str, dict[str, PlanChoice]]  # temperature -> batch -> plan, by their names in `rules`
    head_rows: Count = 0  # of the trimmed head; 0: the whole head
    head_coverage: Share = 1.0  # of the model's tokens have a row in the trimmed head or occur in the prompt
    exits: dict[LayerNumber, ExitRates] = {}  # by layer, all that were measured
    most_accepting_exit: LayerNumber | None = None
    chain: Run | None = None  # measurement of chain:4, one greedy sequence
    # temperature -> [depth][rank]: share of the positions reached at a depth where the model's token has that rank
    ranks: dict[str, list[list[float]]] = {}
    costs: dict[str, StepCost] = {}  # batch -> costs of steps with the chosen exit
    prompt_agreement: Spread | None = None  # of the exit with the model on the last positions of prompts
    text_agreement: Spread | None = None  # of the exit with the model on answers
    centroid: list[float] = []  # mean embedding of the domain's training prompts, see `router`
    distance: Spread | None = None  # of measuring prompts to the centroid
    direction: list[float] = []  # the router's score of an embedding: its product with this vector, plus the offset
    offset: float = 0.0

    def check(self) -> None:
        """Raises ValueError for a plan that cannot be parsed, an unknown temperature or batch, or shares above 1."""
        if not self.plans or not all(self.plans.values()):
            raise ValueError("a domain has no plans")
        _check_names("plans", self.plans, {name for of_batch in self.plans.values() for name in of_batch})
        _check_names("ranks", self.ranks)
        _check_names("costs", batches=self.costs)
        for of_batch in self.plans.values():
            for choice in of_batch.values():
                if choice.parsed(forced=True).beam or choice.parsed(forced=False).beam:
                    raise ValueError(f"the plan {choice.plan} has no fixed tree; a profile's plans need one")
        if self.chain is not None:
            Plan.parse(self.chain.plan)
        for temperature, depths in self.ranks.items():
            for depth, shares in enumerate(depths):
                if not all(0 <= share <= 1 for share in shares) or sum(shares) > 1 + _ROUNDING:
                    raise ValueError(f"the ranks at temperature {temperature}, depth {depth} are not shares of a whole")

    @staticmethod
    def nearest(known: Iterable[str], temperature: float) -> str:
        """The name in `known` whose temperature is nearest."""
        names = [name for name in TEMPERATURES if name in known]
        return min(names, key=lambda name: abs(TEMPERATURES[name] - temperature))

    def ranks_at(self, temperature: float) -> list[list[float]]:
        """Rank shares by depth: those of the nearest measured temperature, or, above the highest, extrapolated from the
        two highest."""
        measured = sorted(
            (name for name, shares in self.ranks.items() if any(shares[:1])), key=lambda name: TEMPERATURES[name]
        )
        if len(measured) > 1 and temperature > TEMPERATURES[measured[-1]]:
            cool, hot = (TEMPERATURES[name] for name in measured[-2:])
            steps = (temperature - hot) / (hot - cool)
            return extrapolated(self.ranks[measured[-2]], self.ranks[measured[-1]], steps)
        return self.ranks[self.nearest(self.ranks, temperature)]

    def plans_at(self, temperature: float, forced: bool = False) -> dict[int, Plan]:
        """The plans for a temperature (0: greedy), by the largest batch of each. With `forced`, plans that were slower
        than plain decoding are kept."""
        of_batch = self.plans[self.nearest(self.plans, temperature)]
        return {size: of_batch[name].parsed(forced) for name, size in BATCHES.items() if name in of_batch}


class Profile(Entry):
    """A model's exits and plans, by domain."""

    schema_version: int = SCHEMA
    model: ModelIdentity
    domains: dict[str, DomainChoice]
    device: Device | None = None  # None: the plans were not measured
    created: str = ""
    objective: str = "throughput"
    trained: dict[str, float] = {}  # amounts of the calibration: tokens, steps, seconds
    router_layer: int = 1  # the router reads hidden states after this many layers
    folder: Path | None = None  # of the profile's files; not stored in them

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Of `repr` and `str`: without the measurements, which are tens of thousands of numbers."""
        folder = None if self.folder is None else str(self.folder)
        return [("model", self.model.name), ("domains", list(self.domains)), ("folder", folder)]

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Reads a profile folder. Raises ValueError, with the fix, for a missing, damaged or outdated profile."""
        folder = Path(folder).expanduser()
        path = folder / "profile.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"there is no profile at {folder}: profile.json is missing; {HOW_TO_CALIBRATE}") from None
        except (OSError, ValueError, RecursionError) as error:  # the last: for JSON nested too deep
            raise ValueError(f"{path} cannot be read ({error}); {HOW_TO_CALIBRATE}") from error
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA:
            raise ValueError(f"{path} has schema version {version}, this selfspec reads {SCHEMA}; {HOW_TO_CALIBRATE}")
        try:
            profile = cls(**content, folder=folder)
            for choice in profile.domains.values():
                choice.check()
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a valid profile: {error}; {HOW_TO_CALIBRATE}") from error
        if not profile.domains:
            raise ValueError(f"{path} has no domain; {HOW_TO_CALIBRATE}")
        return profile

    @classmethod
    def find(cls, model: Decoder) -> Profile | None:
        """The profile for these weights that `profile="auto"` uses: the newest under SELFSPEC_HOME that drafts, else a
        shipped one that drafts, else the newest; None where there is none. Warns of each profile that cannot be used.
        """
        plain = None
        for profile in cls._found(model):
            if profile.drafts:
                return profile
            plain = plain or profile
        return plain

    @classmethod
    def _found(cls, model: Decoder) -> Iterator[Profile]:
        """The usable profiles of these weights: those under SELFSPEC_HOME, newest first, then shipped ones."""
        identity = ModelIdentity.of(model)
        own = sorted(profiles_dir().glob("*/profile.json"), key=_last_written, reverse=True)
        shipped = sorted(shipped_dir().glob("profiles/*/profile.json"))
        for path in (*own, *shipped):
            try:
                profile = cls.load(path.parent)
                if not profile.model.matches(identity):
                    continue
                profile.check(model, identity)
            except ValueError as error:
                warnings.warn(f"a profile is skipped: {error}", UserWarning, stacklevel=3)
                continue
            yield profile

    def save(
        self,
        folder: str | Path,
        exits: list[Exit] | dict[str, torch.Tensor],
        head_rows: dict[str, torch.Tensor] | None = None,
    ) -> Profile:
        """Writes the profile, its exits (or another profile's `stored_exits`) and the rows of each domain's trimmed
        head; returns the profile with its folder."""
        folder = Path(folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        ExitsFile(folder).write(exits, head_rows or {})
        text = json.dumps(self.model_dump(mode="json", exclude={"folder"}), indent=1)
        (folder / "profile.json").write_text(_numbers_on_one_line(text) + "\n", encoding="utf-8")
        shutil.copymode(folder / "profile.json", folder / EXITS)  # safetensors lets only the owner read its files
        return self.model_copy(update={"folder": folder})

    def check(self, model: Decoder, identity: ModelIdentity | None = None) -> None:
        """Raises ValueError where the profile is of other weights, or its entries do not fit the model."""
        identity = identity or ModelIdentity.of(model)
        where = f" at {self.folder}" if self.folder else ""
        for domain, choice in self.domains.items():
            try:
                choice.check()
                check_exit_layer(choice.exit_layer, self.model.num_layers)
            except ValueError as error:
                raise ValueError(f"domain {domain!r} of the profile{where}: {error}; {HOW_TO_CALIBRATE}") from error
        if not self.model.matches(identity):
            raise ValueError(
                f"the profile{where} was made for other weights: a {self.model.model_type} of {self.model.num_layers} "
                f"layers, and this model is a {identity.model_type} of {identity.num_layers} layers"
                + ("" if self.model.num_layers != identity.num_layers else " with different values")
                + f"; {HOW_TO_CALIBRATE}"
            )
        most_rows = max((choice.head_rows for choice in self.domains.values()), default=0)
        if most_rows > identity.vocab_size:
            raise ValueError(
                f"the profile{where} has heads of {most_rows} rows, the model one of {identity.vocab_size}; "
                + HOW_TO_CALIBRATE
            )
        if self.routes and not self._router_fits(identity):
            raise ValueError(f"the router of the profile{where} does not fit the model; {HOW_TO_CALIBRATE}")

    def _router_fits(self, identity: ModelIdentity) -> bool:
        choices, hidden = self.domains.values(), identity.hidden_size
        centroids = {len(choice.centroid) for choice in choices}
        without = centroids == {0} and not any(choice.distance for choice in choices)
        directions = {len(choice.direction) for choice in choices}
        fits = directions == {hidden} and (centroids == {hidden} or without)
        return fits and 1 <= self.router_layer < identity.num_layers

    def choice(self, domain: str) -> DomainChoice:
        """The entries of a domain. Raises ValueError for an unknown name."""
        if domain not in self.domains:
            raise ValueError(f"domain={domain!r} is not in the profile; use {', '.join(self.domains)} or 'auto'")
        return self.domains[domain]

    def route(self, embeddings: torch.Tensor | None) -> str:
        """The domain of a request whose prompts have these embeddings [P, hidden]; without a router the first one."""
        names = list(self.domains)
        return names[0] if embeddings is None or not self.routes else names[self._router.route(embeddings)]

    def are_unfamiliar(self, embeddings: torch.Tensor, deviations: float) -> list[bool]:
        """For each prompt embedding [P, hidden], whether its distance to every centroid exceeds the mean of the
        domain's prompts by more than so many standard deviations."""
        centroids, means, spreads = self._distances
        if not self.routes or not len(means):
            return [False] * len(embeddings)
        exceeds = distances(embeddings, centroids) > means + deviations * spreads
        return [bool(row.all()) for row in exceeds]

    @property
    def drafts(self) -> bool:
        """Whether any plan of the profile has nodes."""
        batches = [of_batch for choice in self.domains.values() for of_batch in choice.plans.values()]
        return any(len(Plan.parse(choice.plan)) for of_batch in batches for choice in of_batch.values())

    @property
    def routes(self) -> bool:
        """Whether a request's domain depends on its prompts."""
        return len(self.domains) > 1 and any(choice.direction for choice in self.domains.values())

    @cached_property
    def _router(self) -> Router:
        choices = self.domains.values()
        centroids, directions = (torch.tensor([getattr(c, n) for c in choices]) for n in ("centroid", "direction"))
        return Router(centroids, directions, torch.tensor([choice.offset for choice in choices]))

    @cached_property
    def _distances(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of domains with a measured distance: normalised centroids [D, hidden], and mean and deviation [D] of prompts'
        distances to them. Made once: indexing a tensor can take milliseconds in a request, where it wakes PyTorch's
        threads."""
        measured = [(number, choice.distance) for number, choice in enumerate(self.domains.values()) if choice.distance]
        means, spreads = (
            np.array([getattr(distance, name) for _, distance in measured]) for name in ("mean", "deviation")
        )
        return normalised(self._router.centroids[[number for number, _ in measured]]), means, spreads

    @property
    def exits_file(self) -> ExitsFile:
        """The file of the profile's exits and trimmed heads."""
        return ExitsFile(self.folder)


def _last_written(path: Path) -> float:
    """Seconds since 1970; 0 for a file that cannot be read, such as a dangling link."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _check_names(what: str, temperatures: Iterable[str] = (), batches: Iterable[str] = ()) -> None:
    """Raises ValueError for unknown names of temperatures or batches."""
    if unknown := {*temperatures} - TEMPERATURES.keys() | {*batches} - BATCHES.keys():
        raise ValueError(
            f"a domain has {what} for {', '.join(sorted(unknown))}; known temperatures are "
            f"{', '.join(TEMPERATURES)} and batches {', '.join(BATCHES)}"
        )


def _numbers_on_one_line(text: str) -> str:
    """Puts each list of numbers in a JSON text on one line."""
    return re.sub(r"\[[\s\d.,eE+-]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
