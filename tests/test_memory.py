"""Free memory of host and GPU, and a limit on GPU memory; the GPU is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.calibrate.__main__ import main
from selfspec.memory import free_device_bytes, free_host_bytes, limit_memory, memory_limit

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GB = 10**9


class Gpu:
    """torch's functions for a GPU of 80 GB."""

    total = 80 * GB

    def __init__(self, others: int, reserved: int, allocated: int) -> None:
        self.others, self.reserved, self.allocated, self.fraction = others, reserved, allocated, 1.0

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        functions: dict[str, Any] = {
            "mem_get_info": lambda _: (self.total - self.others - self.reserved, self.total),
            "memory_reserved": lambda _: self.reserved,
            "memory_allocated": lambda _: self.allocated,
            "get_per_process_memory_fraction": lambda _: self.fraction,
            "set_per_process_memory_fraction": lambda fraction, _: setattr(self, "fraction", fraction),
            "get_device_properties": lambda _: type("Properties", (), {"total_memory": self.total}),
        }
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Other processes have allocated 20 GB; this one has reserved 10 GB and allocated 6 GB of these."""
    gpu = Gpu(20 * GB, 10 * GB, 6 * GB)
    gpu.patch(monkeypatch)
    return gpu


def test_memory_that_torch_has_reserved_and_not_allocated_is_free(gpu: Gpu) -> None:
    assert free_device_bytes(GPU) == 54 * GB
    assert memory_limit(GPU) is None


def test_a_limit_leaves_its_bytes_less_the_allocated_ones(gpu: Gpu) -> None:
    limit_memory(24, GPU)
    assert gpu.fraction == 0.3
    assert memory_limit(GPU) == 24 * GB
    assert free_device_bytes(GPU) == 18 * GB


def test_a_limit_does_not_free_memory_of_other_processes(gpu: Gpu) -> None:
    limit_memory(70, GPU)
    assert free_device_bytes(GPU) == 54 * GB


def test_a_limit_below_the_allocated_bytes_leaves_0(gpu: Gpu) -> None:
    limit_memory(5, GPU)
    assert free_device_bytes(GPU) == 0


def test_a_limit_above_the_gpus_memory_has_no_effect(gpu: Gpu) -> None:
    limit_memory(100, GPU)
    assert memory_limit(GPU) is None
    assert free_device_bytes(GPU) == 54 * GB


@pytest.mark.parametrize("gigabytes", [0, -1, float("inf"), float("nan")])
def test_impossible_limits_are_refused(gpu: Gpu, gigabytes: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        limit_memory(gigabytes, GPU)
    assert gpu.fraction == 1.0


def test_the_cpu_has_the_hosts_free_memory_and_no_limit() -> None:
    assert free_device_bytes(CPU) == pytest.approx(free_host_bytes(), rel=0.2)
    assert memory_limit(CPU) is None
    with pytest.raises(ValueError, match="24 GB .* needs a CUDA device, and this runs on cpu: leave the limit out"):
        limit_memory(24, CPU)


# The host's memory within cgroups; the system has 64 GB available

V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
NAMES = {V2: ("memory.max", "memory.current", ""), V1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}


def system(root: Path, cgroup: str) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:   {64 * GB // 1024} kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    return root


def limit(root: Path, version: str, path: str, most: str | int, used: int = 0, files: int = 0) -> None:
    """Writes the files of a cgroup: its limit, its used bytes, and those of them that cache files."""
    folder = root / version / path
    folder.mkdir(parents=True, exist_ok=True)
    of_limit, of_usage, prefix = NAMES[version]
    (folder / of_limit).write_text(f"{most}\n")
    (folder / of_usage).write_text(f"{used}\n")
    cached = f"{prefix}active_file {files // 2}\n{prefix}inactive_file {files - files // 2}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{cached}unevictable 0\n")


@pytest.mark.parametrize(("version", "line"), [(V2, "0::/pod/own\n"), (V1, "7:cpu,memory:/pod/own\n0::/\n")], ids="21")
class TestCgroup:
    def test_the_limit_less_used_bytes_that_do_not_cache_files(self, tmp_path: Path, version: str, line: str) -> None:
        limit(system(tmp_path, line), version, "pod/own", 8 * GB, used=5 * GB, files=2 * GB)
        assert free_host_bytes(tmp_path) == 5 * GB

    def test_the_limit_of_a_parent_cgroup_counts(self, tmp_path: Path, version: str, line: str) -> None:
        limit(system(tmp_path, line), version, "pod/own", 8 * GB)
        limit(tmp_path, version, "pod", 6 * GB, used=4 * GB)
        assert free_host_bytes(tmp_path) == 2 * GB

    def test_a_container_sees_its_own_cgroup_as_the_root(self, tmp_path: Path, version: str, line: str) -> None:
        limit(system(tmp_path, line), version, ".", 3 * GB)
        assert free_host_bytes(tmp_path) == 3 * GB

    def test_a_limit_above_the_systems_memory_has_no_effect(self, tmp_path: Path, version: str, line: str) -> None:
        limit(system(tmp_path, line), version, "pod/own", "max" if version == V2 else 2**63 - 4096)
        assert free_host_bytes(tmp_path) == 64 * GB // 1024 * 1024

    def test_more_used_bytes_than_the_limit_leave_0(self, tmp_path: Path, version: str, line: str) -> None:
        limit(system(tmp_path, line), version, "pod/own", GB, used=2 * GB)
        assert free_host_bytes(tmp_path) == 0

    @pytest.mark.parametrize("damaged", NAMES[V2][:2] + NAMES[V1][:2] + ("memory.stat",))
    def test_an_empty_file_is_ignored(self, tmp_path: Path, version: str, line: str, damaged: str) -> None:
        limit(system(tmp_path, line), version, "pod/own", 8 * GB)
        (tmp_path / version / "pod/own" / damaged).write_text("\n")
        assert free_host_bytes(tmp_path) in (8 * GB, 64 * GB // 1024 * 1024)


def test_calibration_on_a_cpu_refuses_a_limit_before_loading_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "no/such-model", "--device", "cpu", "--memory-gb", "8"]) == 2
    assert "8 GB of GPU memory needs a CUDA device" in capsys.readouterr().err
