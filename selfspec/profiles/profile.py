"""Profiles: what calibration learned about one model, in a folder that people can read and engines can check.

`profile.json` names the model it was made for, the exit and plans of each domain, and what was measured to choose them;
`exits.safetensors` holds the trained exits. Loading checks identity and schema and refuses a profile of other weights.
Making one is calibration's job, using one the engine's.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, field_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from selfspec.governor.acceptance import hotter
from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.models.decoder import Decoder, Layer, layer_parts
from selfspec.models.loading import fingerprint, same_fingerprint
from selfspec.profiles.paths import profiles_dir, shipped_dir
from selfspec.profiles.router import Outskirts, Router
from selfspec.speculation.exit import FEATURE_STATES, Exit, ExitBlock, check_exit_layer
from selfspec.speculation.plan import MAX_NODES, Plan

SCHEMA = 2
_ROUNDING = 1e-6  # a sum of shares may exceed 1 by this much
HOW_TO_CALIBRATE = "calibrate this model again (python -m selfspec.calibrate), or pass profile=None"

# No number of a profile needs 32 bits; the bound keeps arithmetic with a damaged one within float64.
Count = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, lt=1e6)]  # of one step: less than 12 days


class Entry(BaseModel):
    """Part of a profile: cannot be changed; refuses unknown entries and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelIdentity(Entry):
    """The weights that a profile belongs to, in any file format and dtype."""

    model_type: str
    num_layers: Positive
    hidden_size: Positive
    vocab_size: Positive
    fingerprint: list[float]

    @classmethod
    def of(cls, model: Decoder) -> ModelIdentity:
        config = model.config
        return cls.model_construct(  # unchecked: a model whose weights are not finite has no profile, but runs
            model_type=config.model_type,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            fingerprint=fingerprint(model),
        )

    @property
    def name(self) -> str:
        """Names a folder: family, layers, hidden size, and a digest of the fingerprint. The digest is of values rounded
        to bfloat16, so that the same checkpoint loaded in float32 and in bfloat16 has one name."""
        rounded = torch.tensor(self.fingerprint).bfloat16().tolist()
        digest = hashlib.sha256(json.dumps(rounded).encode()).hexdigest()
        return f"{self.model_type}-{self.num_layers}x{self.hidden_size}-{digest[:12]}"

    def matches(self, other: ModelIdentity) -> bool:
        shape = {"fingerprint"}
        same_shape = self.model_dump(exclude=shape) == other.model_dump(exclude=shape)
        return same_shape and same_fingerprint(self.fingerprint, other.fingerprint)


class Device(Entry):
    """What the costs were measured on."""

    type: str
    name: str
    dtype: str
    torch: str
    kernels: bool = False  # or by PyTorch's own operations


class Expected(Entry):
    """What calibration predicts of a plan."""

    tokens_per_cycle: NonNegativeFloat
    accept_rate: Share
    speedup: NonNegativeFloat


class Run(Entry):
    """What was measured when a plan was run against plain decoding of the same prompts."""

    plan: str
    tokens_per_cycle: NonNegativeFloat
    accept_rate: Share
    tokens_per_second: NonNegativeFloat
    plain_tokens_per_second: PositiveFloat

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


class PlanChoice(Entry):
    """The plan for one temperature and batch, what it promised and, where it was run, what it did."""

    plan: str
    expected: Expected | None = None
    measured: Run | None = None

    def parsed(self, forced: bool) -> Plan:
        tried = self.measured.plan if self.measured is not None else self.plan
        return Plan.parse(tried if forced else self.plan)


class ExitRates(Entry):
    """How one exit did in one domain, greedy: what the choice between exits was made from."""

    top1: Share  # of positions where the exit's best token is the model's
    top4: Share
    accept_rate: Share  # in the same tree for all exits, policy.DEFAULT_TREE
    tokens_per_cycle: NonNegativeFloat  # predicted of the exit's own best plan for a single row
    speedup: NonNegativeFloat  # predicted of it


class Spread(Entry):
    mean: float
    deviation: NonNegativeFloat


class CycleCost(Entry):
    """Seconds of a cycle of some batch on the profile's device, by what it consists of, as in `costs.StepCost`."""

    plain: Annotated[Seconds, Field(gt=0)]
    depth: Seconds
    drafting: list[tuple[Annotated[int, Field(ge=1, le=MAX_NODES)], Seconds]] = Field(min_length=1)
    head_row: Annotated[float, Field(gt=-1e6, lt=1e6)] = 0.0
    head_rows: Count = 0

    @field_validator("drafting")
    @classmethod
    def _ascending(cls, drafting: list[tuple[int, float]]) -> list[tuple[int, float]]:
        nodes = [count for count, _ in drafting]
        if nodes != sorted(set(nodes)):
            raise ValueError("numbers of nodes must ascend")
        return drafting


class DomainChoice(Entry):
    """What to draft with for one kind of text."""

    exit_layer: Positive
    plans: dict[str, dict[str, PlanChoice]]  # temperature -> batch -> plan, by the names in `policy`
    head_rows: Count = 0  # rows of the draft head; 0: all
    head_coverage: Share = 1.0  # share of the model's tokens that these rows, and the prompt's, can draft
    exits: dict[Positive, ExitRates] = {}  # by layer; chosen or not
    most_accepting_exit: Positive | None = None
    chain: Run | None = None  # chain:4 in the place of the chosen tree
    # temperature -> [depth][rank]: of the places that a draft reaches, the share where the model's token has that rank
    ranks: dict[str, list[list[float]]] = {}
    costs: dict[str, CycleCost] = {}  # batch -> with the chosen exit
    prompt_agreement: Spread | None = None  # the exit's agreement with the model on the last positions of prompts
    text_agreement: Spread | None = None  # and on the text that followed
    centroid: list[float] = []  # of the domain's prompts, as the router sees them
    distance: Spread | None = None  # to it, of prompts that it was not made from; see `routing`
    direction: list[float] = []  # the router's score of a prompt for this domain: along this direction, plus the offset
    offset: float = 0.0

    @classmethod
    def of(cls, exit_layer: int, plan: str) -> DomainChoice:
        """One plan for every batch and temperature."""
        return cls(exit_layer=exit_layer, plans={t: {b: PlanChoice(plan=plan) for b in BATCHES} for t in TEMPERATURES})

    def check(self) -> None:
        """Every plan can be read, shares are shares, and requests can be matched to every temperature and batch."""
        if not self.plans or not all(self.plans.values()):
            raise ValueError("a domain has no plans")
        _check_names("plans", self.plans, {name for of_batch in self.plans.values() for name in of_batch})
        _check_names("ranks", self.ranks)
        _check_names("costs", batches=self.costs)
        for of_batch in self.plans.values():
            for choice in of_batch.values():
                choice.parsed(forced=True)
                choice.parsed(forced=False)
        if self.chain is not None:
            Plan.parse(self.chain.plan)
        for temperature, depths in self.ranks.items():
            for depth, shares in enumerate(depths):
                if not all(0 <= share <= 1 for share in shares) or sum(shares) > 1 + _ROUNDING:
                    raise ValueError(f"the ranks at temperature {temperature}, depth {depth} are not shares of a whole")

    @staticmethod
    def nearest(known: Iterable[str], temperature: float) -> str:
        """The one of some temperatures' names that is nearest to a temperature."""
        names = [name for name in TEMPERATURES if name in known]
        return min(names, key=lambda name: abs(TEMPERATURES[name] - temperature))

    def ranks_at(self, temperature: float) -> list[list[float]]:
        """How often the model's own token had which rank, by depth: at the nearest temperature or, where it is hotter
        than any that was measured, as the two hottest let one expect."""
        measured = sorted((name for name, of in self.ranks.items() if any(of[:1])), key=lambda name: TEMPERATURES[name])
        if len(measured) > 1 and temperature > TEMPERATURES[measured[-1]]:
            cool, hot = (TEMPERATURES[name] for name in measured[-2:])
            steps = (temperature - hot) / (hot - cool)
            return hotter(self.ranks[measured[-2]], self.ranks[measured[-1]], steps)
        return self.ranks[self.nearest(self.ranks, temperature)]

    def plans_at(self, temperature: float, forced: bool = False) -> dict[int, Plan]:
        """The plans for a temperature (0: greedy), by the largest batch each is for. Whoever forces speculation gets
        the plan that was tried even where it lost."""
        of_batch = self.plans[self.nearest(self.plans, temperature)]
        return {size: of_batch[name].parsed(forced) for name, size in BATCHES.items() if name in of_batch}


class Profile(Entry):
    """A model's exits and plans, by domain."""

    schema_version: int = SCHEMA
    model: ModelIdentity
    domains: dict[str, DomainChoice]
    device: Device | None = None  # None: plans were not measured anywhere
    created: str = ""
    objective: str = "throughput"
    trained: dict[str, float] = {}  # how much went into it: tokens, steps, seconds
    router_layer: int = 1  # prompts are told apart by the hidden states after this layer
    folder: Path | None = None  # where it was loaded from or saved to; not part of the file

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Reads a profile folder; raises ValueError, saying what to do, for anything that is not a current one."""
        folder = Path(folder)
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
        """The newest profile under SELFSPEC_HOME that was made for these weights, else the shipped one, if any. Skips a
        profile that cannot be used, with a warning that names it."""
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
                warnings.warn(f"a profile is skipped: {error}", UserWarning, stacklevel=2)
                continue
            return profile
        return None

    def save(self, folder: str | Path, exits: list[Exit], head_rows: dict[str, torch.Tensor] | None = None) -> Profile:
        """Writes the profile, its exits and the rows of each domain's head; returns it as loading would."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"head_rows.{domain}": rows.to(torch.int32) for domain, rows in (head_rows or {}).items()}
        for exit in exits:
            tensors |= {f"{exit.layer}.{name}": tensor for name, tensor in _exit_tensors(exit).items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "exits.safetensors")
        text = json.dumps(self.model_dump(mode="json", exclude={"folder"}), indent=1)
        (folder / "profile.json").write_text(_numbers_on_one_line(text) + "\n", encoding="utf-8")
        return self.model_copy(update={"folder": folder})

    def check(self, model: Decoder, identity: ModelIdentity | None = None) -> None:
        """Refuses to serve other weights than the profile was made for, and entries that fit no model like it."""
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
        """The choice for a domain by name."""
        if domain not in self.domains:
            raise ValueError(f"the profile has no domain {domain!r}; it knows {', '.join(self.domains)} and 'auto'")
        return self.domains[domain]

    def route(self, marks: torch.Tensor | None) -> str:
        """The domain of a batch of prompts with these marks [P, hidden]; the first where nothing tells them apart."""
        names = list(self.domains)
        return names[0] if marks is None or not self.routes else names[self._router.route(marks)]

    def far(self, marks: torch.Tensor, deviations: float) -> list[bool]:
        """For each mark, whether it lies farther from every domain's centroid than so many deviations of the domain's
        own prompts."""
        known = self.routes and self._outskirts
        return known.beyond(marks, deviations) if known else [False] * len(marks)

    @property
    def routes(self) -> bool:
        """Whether telling prompts apart takes looking at them."""
        return len(self.domains) > 1 and any(choice.direction for choice in self.domains.values())

    @cached_property
    def _router(self) -> Router:
        choices = self.domains.values()
        centroids, directions = (torch.tensor([getattr(c, n) for c in choices]) for n in ("centroid", "direction"))
        return Router(centroids, directions, torch.tensor([choice.offset for choice in choices]))

    @cached_property
    def _outskirts(self) -> Outskirts | None:
        """Of the domains whose prompts' distances are known."""
        known = [(choice.centroid, choice.distance) for choice in self.domains.values() if choice.distance]
        if not known:
            return None
        centroids, spreads = zip(*known, strict=True)
        return Outskirts(torch.tensor(centroids), [of.mean for of in spreads], [of.deviation for of in spreads])

    def exit(self, model: Decoder, layer: int) -> Exit:
        """The profile's exit after `layer` layers, on the model's device, over the whole head; a raw one where none
        was trained."""
        prefix = f"{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in self._tensors(model, prefix).items()}
        try:
            return _exit_from_tensors(model, layer, own)
        except KeyError as error:
            raise self._unusable(f"lacks {error} of the exit after layer {layer}") from error
        except ValueError as error:
            raise self._unusable(str(error)) from error

    def trained_layers(self) -> list[int]:
        """The layers after which the profile has trained exits."""
        path = self._exits_file
        if path is None or not path.exists():
            return []
        try:
            with safe_open(path, framework="pt") as file:
                return sorted(int(name.split(".")[0]) for name in file.keys() if name.endswith(".affine_weight"))  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            raise self._unusable(f"cannot be read ({error})") from error

    def head_rows(self, model: Decoder, domain: str) -> torch.Tensor | None:
        """The token ids that a domain's drafts are chosen from, ascending; None: all."""
        name = f"head_rows.{domain}"
        rows = self._tensors(model, name).get(name)
        if rows is None:
            return None
        rows = rows.long()
        ascending = rows.ndim == 1 and bool((rows[1:] > rows[:-1]).all())
        if not ascending or not len(rows) or rows[0] < 0 or rows[-1] >= model.config.vocab_size:
            raise self._unusable(f"{name} are not ascending token ids of this model")
        return rows

    def _tensors(self, model: Decoder, prefix: str) -> dict[str, torch.Tensor]:
        path = self._exits_file
        if path is None or not path.exists():
            return {}
        try:
            with safe_open(path, framework="pt", device=str(model.device)) as file:
                return {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise self._unusable(f"cannot be read ({error})") from error

    @property
    def _exits_file(self) -> Path | None:
        return self.folder / "exits.safetensors" if self.folder else None

    def _unusable(self, why: str) -> ValueError:
        return ValueError(f"{self._exits_file}: {why}; {HOW_TO_CALIBRATE}")


def _last_written(path: Path) -> float:
    """Seconds since 1970; 0 for a file that cannot be looked at, such as a link to nothing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _check_names(what: str, temperatures: Iterable[str] = (), batches: Iterable[str] = ()) -> None:
    """Refuses what a domain has for temperatures or batches that are unknown."""
    if unknown := {*temperatures} - TEMPERATURES.keys() | {*batches} - BATCHES.keys():
        raise ValueError(
            f"a domain has {what} for {', '.join(sorted(unknown))}; known temperatures are "
            f"{', '.join(TEMPERATURES)} and batches {', '.join(BATCHES)}"
        )


def _numbers_on_one_line(text: str) -> str:
    """JSON with every list of numbers on a line of its own instead of one line for each number."""
    return re.sub(r"\[[\s\d.,eE+-]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)


def _exit_tensors(exit: Exit) -> dict[str, torch.Tensor]:
    tensors = {"norm": exit.norm}
    if exit.block is not None:
        tensors |= {name: getattr(exit.block, name) for name in ("affine_weight", "affine_bias", "recall")}
        tensors |= {f"block.{name}": tensor for name, tensor in vars(exit.block.layer).items()}
    return {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}


def _exit_from_tensors(model: Decoder, layer: int, tensors: dict[str, torch.Tensor]) -> Exit:
    """Builds an exit; KeyError for a tensor that is missing, ValueError for one of the wrong shape."""
    hidden = model.config.hidden_size

    def weight(name: str, *shape: int) -> torch.Tensor:
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} is {list(tensors[name].shape)} instead of {list(shape)}")
        return tensors[name].to(model.dtype)

    block = None
    if any(name.startswith(("affine", "block.")) for name in tensors):
        shapes = {
            name: (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            for name, parts in layer_parts(model.config, "").items()
        }
        own = Layer(**{name: weight(f"block.{name}", *shape) for name, shape in shapes.items()})
        recall = weight("recall", hidden, FEATURE_STATES * hidden) if "recall" in tensors else None
        block = ExitBlock(own, weight("affine_weight", hidden, hidden), weight("affine_bias", hidden), recall)
    norm = weight("norm", hidden) if "norm" in tensors else None
    return Exit(model, layer, norm, block)
