"""How much memory is free, as the engine sees it; a GPU's is simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.calibrate.__main__ import main
from selfspec.memory import bound_memory, device_room, host_room, memory_bound

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GB = 10**9


class Gpu:
    """What torch says of a GPU of 80 GB."""

    total = 80 * GB

    def __init__(self, others: int, reserved: int, allocated: int) -> None:
        self.others, self.reserved, self.allocated, self.fraction = others, reserved, allocated, 1.0

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        told: dict[str, Any] = {
            "mem_get_info": lambda _: (self.total - self.others - self.reserved, self.total),
            "memory_reserved": lambda _: self.reserved,
            "memory_allocated": lambda _: self.allocated,
            "get_per_process_memory_fraction": lambda _: self.fraction,
            "set_per_process_memory_fraction": lambda fraction, _: setattr(self, "fraction", fraction),
            "get_device_properties": lambda _: type("Properties", (), {"total_memory": self.total}),
        }
        for name, function in told.items():
            patch.setattr(torch.cuda, name, function)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Other processes hold 20 GB of it, this one 10, of which it uses 6."""
    gpu = Gpu(20 * GB, 10 * GB, 6 * GB)
    gpu.patch(monkeypatch)
    return gpu


def test_what_torch_holds_unused_is_free(gpu: Gpu) -> None:
    assert device_room(GPU) == 54 * GB
    assert memory_bound(GPU) is None


def test_a_bound_leaves_what_it_allows_beside_what_is_used(gpu: Gpu) -> None:
    bound_memory(24, GPU)
    assert gpu.fraction == 0.3
    assert memory_bound(GPU) == 24 * GB
    assert device_room(GPU) == 18 * GB


def test_a_bound_makes_no_room_that_others_hold(gpu: Gpu) -> None:
    bound_memory(70, GPU)
    assert device_room(GPU) == 54 * GB


def test_a_bound_below_what_is_used_leaves_nothing(gpu: Gpu) -> None:
    bound_memory(5, GPU)
    assert device_room(GPU) == 0


def test_a_bound_above_what_there_is_bounds_nothing(gpu: Gpu) -> None:
    bound_memory(100, GPU)
    assert memory_bound(GPU) is None
    assert device_room(GPU) == 54 * GB


@pytest.mark.parametrize("gigabytes", [0, -1, float("inf"), float("nan")])
def test_impossible_bounds_are_refused(gpu: Gpu, gigabytes: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        bound_memory(gigabytes, GPU)
    assert gpu.fraction == 1.0


def test_the_cpu_has_the_hosts_room_and_no_bound() -> None:
    assert device_room(CPU) == pytest.approx(host_room(), rel=0.2)
    assert memory_bound(CPU) is None
    with pytest.raises(ValueError, match="24 GB .* needs a CUDA device, and this runs on cpu: leave the bound out"):
        bound_memory(24, CPU)


def test_calibration_on_a_cpu_refuses_a_bound_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "no/such-model", "--device", "cpu", "--memory-gb", "8"]) == 2
    assert "8 GB of GPU memory needs a CUDA device" in capsys.readouterr().out
