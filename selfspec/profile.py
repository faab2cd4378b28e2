"""Profiles: what calibration learned about one model, in a folder that people can read and engines can check.

`profile.json` names the model it was made for and the exit and plan of each domain; `exits.safetensors` holds the
trained exits. Loading checks identity and schema and refuses a profile of other weights. Making one is calibration's
job, using one the engine's.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from selfspec.exits import Exit, ExitBlock, check_exit_layer
from selfspec.home import profiles_dir
from selfspec.model import Decoder, Layer, layer_parts
from selfspec.tree import Plan
from selfspec.weights import fingerprint, same_fingerprint

SCHEMA = 1
HOW_TO_CALIBRATE = "calibrate this model again, or pass profile=None"


class ModelIdentity(BaseModel):
    """Which weights a profile belongs to, whatever file or dtype they come in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    fingerprint: list[float]

    @classmethod
    def of(cls, model: Decoder) -> ModelIdentity:
        config = model.config
        return cls(
            model_type=config.model_type,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            fingerprint=fingerprint(model),
        )

    def matches(self, other: ModelIdentity) -> bool:
        shape = {"fingerprint"}
        same_shape = self.model_dump(exclude=shape) == other.model_dump(exclude=shape)
        return same_shape and same_fingerprint(self.fingerprint, other.fingerprint)


class DomainChoice(BaseModel):
    """What to draft with for one kind of text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    exit_layer: int
    plan: str


class Profile(BaseModel):
    """A model's exits and plans, by domain."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA
    model: ModelIdentity
    domains: dict[str, DomainChoice]
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
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}); {HOW_TO_CALIBRATE}") from error
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA:
            raise ValueError(f"{path} has schema version {version}, this selfspec reads {SCHEMA}; {HOW_TO_CALIBRATE}")
        try:
            profile = cls(**content, folder=folder)
            for choice in profile.domains.values():
                Plan.parse(choice.plan)
        except (ValidationError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is not a valid profile: {error}; {HOW_TO_CALIBRATE}") from error
        if not profile.domains:
            raise ValueError(f"{path} has no domain; {HOW_TO_CALIBRATE}")
        return profile

    @classmethod
    def find(cls, model: Decoder) -> Profile | None:
        """The newest profile under SELFSPEC_HOME that was made for these weights, if any."""
        identity = ModelIdentity.of(model)
        files = sorted(profiles_dir().glob("*/profile.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files:
            try:
                profile = cls.load(path.parent)
            except ValueError:
                continue  # someone else's broken or older profile must not stop this model
            if profile.model.matches(identity):
                return profile
        return None

    def save(self, folder: str | Path, exits: list[Exit]) -> Profile:
        """Writes the profile and its exits; returns it as loading would."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        for exit in exits:
            tensors |= {f"{exit.layer}.{name}": tensor for name, tensor in _exit_tensors(exit).items()}
        save_file(tensors, folder / "exits.safetensors")
        text = json.dumps(self.model_dump(mode="json", exclude={"folder"}), indent=2)
        (folder / "profile.json").write_text(text + "\n", encoding="utf-8")
        return self.model_copy(update={"folder": folder})

    def check(self, model: Decoder) -> None:
        """Refuses to serve other weights than the profile was made for."""
        identity = ModelIdentity.of(model)
        where = f" at {self.folder}" if self.folder else ""
        for domain, choice in self.domains.items():
            try:
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

    def choice(self, domain: str) -> DomainChoice:
        """The choice for a domain; 'auto' takes the first."""
        if domain == "auto":
            return next(iter(self.domains.values()))
        if domain not in self.domains:
            raise ValueError(f"the profile has no domain {domain!r}; it knows {', '.join(self.domains)} and 'auto'")
        return self.domains[domain]

    def exit(self, model: Decoder, layer: int) -> Exit:
        """The profile's exit after `layer` layers on the model's device, or a raw one where none was trained."""
        path = self.folder / "exits.safetensors" if self.folder else None
        if path is None or not path.exists():
            return Exit(model, layer)
        prefix = f"{layer}."
        try:
            with safe_open(path, framework="pt", device=str(model.device)) as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
                own = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}); {HOW_TO_CALIBRATE}") from error
        try:
            return _exit_from_tensors(model, layer, own)
        except KeyError as error:
            raise ValueError(f"{path} lacks {error} of the exit after layer {layer}; {HOW_TO_CALIBRATE}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}; {HOW_TO_CALIBRATE}") from error


def _exit_tensors(exit: Exit) -> dict[str, torch.Tensor]:
    tensors = {"norm": exit.norm, "head_rows": exit.head_rows}
    if exit.block is not None:
        tensors |= {"affine_weight": exit.block.affine_weight, "affine_bias": exit.block.affine_bias}
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
        block = ExitBlock(own, weight("affine_weight", hidden, hidden), weight("affine_bias", hidden))
    norm = weight("norm", hidden) if "norm" in tensors else None
    return Exit(model, layer, norm, block, tensors.get("head_rows"))
