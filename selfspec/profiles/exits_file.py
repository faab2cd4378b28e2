"""The file of a profile's trained exits and trimmed heads, `exits.safetensors`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from selfspec.models.checkpoint import read_header
from selfspec.models.decoder import Decoder, Layer, layer_parts
from selfspec.speculation.exit import FEATURE_STATES, Exit, ExitBlock

NAME = "exits.safetensors"
HEAD_ROWS = "head_rows."  # begins the names of the tensors that belong to no exit
HOW_TO_CALIBRATE = "calibrate this model again (python -m selfspec.calibrate), or pass profile=None"


class ExitsFile:
    """Reads and writes the file in a profile's folder."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / NAME if folder else None

    def write(self, exits: list[Exit] | dict[str, torch.Tensor], head_rows: dict[str, torch.Tensor]) -> None:
        """Writes the exits, given as Exits or as tensors from `stored_exits`, and the rows of each domain's trimmed
        head."""
        assert self.path is not None
        tensors = {f"{HEAD_ROWS}{domain}": rows.to(torch.int32) for domain, rows in head_rows.items()}
        if isinstance(exits, dict):
            tensors |= exits
        else:
            for exit in exits:
                tensors |= {f"{exit.layer}.{name}": tensor for name, tensor in exit_tensors(exit).items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.path)

    def exit(self, model: Decoder, layer: int) -> Exit:
        """The exit after `layer` layers with the whole head, on the model's device; without a block where the file has
        none for that layer."""
        prefix = f"{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in self._tensors(model.device, prefix).items()}
        try:
            return _exit_from_tensors(model, layer, own)
        except KeyError as error:
            raise self._unusable(f"lacks {error} of the exit with exit_layer={layer}") from error
        except ValueError as error:
            raise self._unusable(str(error)) from error

    def stored_exits(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors of all exits as the file has them, by their names in it."""
        stored = self._tensors(torch.device("cpu"), "")
        return {name: tensor.clone() for name, tensor in stored.items() if not name.startswith(HEAD_ROWS)}

    def layers(self) -> list[int]:
        """The numbers of layers below the file's trained exits."""
        if self.path is None or not self.path.exists():
            return []
        try:
            with safe_open(self.path, framework="pt") as file:
                return sorted(int(name.split(".")[0]) for name in file.keys() if name.endswith(".affine_weight"))  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            raise self._unusable(f"cannot be read ({error})") from error

    def head_rows(self, model: Decoder, domain: str) -> torch.Tensor | None:
        """The token ids of a domain's trimmed head, ascending; None: the whole head."""
        name = f"{HEAD_ROWS}{domain}"
        device = model.device if model.device.type != "meta" else torch.device("cpu")  # their values are read
        rows = self._tensors(device, name).get(name)
        if rows is None:
            return None
        rows = rows.long()
        ascending = rows.ndim == 1 and bool((rows[1:] > rows[:-1]).all())
        if not ascending or not len(rows) or rows[0] < 0 or rows[-1] >= model.config.vocab_size:
            raise self._unusable(f"{name} are not ascending token ids of this model")
        return rows

    def _tensors(self, device: torch.device, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose names start with `prefix`, on a device; none where there is no file."""
        if self.path is None or not self.path.exists():
            return {}
        if device.type == "meta":
            return {name: tensor.unread() for name, tensor in read_header(self.path).items() if name.startswith(prefix)}
        try:
            with safe_open(self.path, framework="pt", device=str(device)) as file:
                return {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise self._unusable(f"cannot be read ({error})") from error

    def _unusable(self, why: str) -> ValueError:
        return ValueError(f"{self.path}: {why}; {HOW_TO_CALIBRATE}")


def exit_tensors(exit: Exit) -> dict[str, torch.Tensor]:
    """Copies of an exit's tensors, by name."""
    tensors = {"norm": exit.norm}
    if exit.block is not None:
        tensors |= {"affine_weight": exit.block.affine_weight, "affine_bias": exit.block.affine_bias}
        tensors["recall"] = exit.block.feature_weight
        tensors |= {f"block.{name}": tensor for name, tensor in exit.block.layer.tensors().items()}
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
        own = Layer.of({name: weight(f"block.{name}", *shape) for name, shape in shapes.items()})
        block = ExitBlock(
            own,
            weight("affine_weight", hidden, hidden),
            weight("affine_bias", hidden),
            weight("recall", hidden, FEATURE_STATES * hidden),
        )
    norm = weight("norm", hidden) if "norm" in tensors else None
    return Exit(model, layer, norm, block)
