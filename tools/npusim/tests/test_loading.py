"""When the device is there, what it says, and how much memory it has."""

from __future__ import annotations

from pathlib import Path

from simulated import run_script, run_warm

NOTICE = "is a simulation over host memory"


def test_without_the_variable_there_is_no_device() -> None:
    done = run_script(
        """
        import importlib.util, torch
        assert not torch.accelerator.is_available()
        assert importlib.util.find_spec("torch_npu") is None
        """
    )
    assert done.returncode == 0, done.stderr
    assert NOTICE not in done.stderr


def test_an_unmodified_script_runs_and_is_told_once() -> None:
    script = """
        import subprocess, sys, torch, torch_npu
        assert torch.ones(2, device="npu").sum().item() == 2
        if len(sys.argv) < 2:
            subprocess.run([sys.executable, "-c", "import torch, torch_npu"], check=True)
        """
    done = run_script(script, RECSDK_SIM_NPU="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(NOTICE) == 1


def test_refuses_beside_the_real_torch_npu(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("")
    done = run_script("import torch", RECSDK_SIM_NPU="1", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "torch_npu is installed" in done.stderr


def test_memory_can_be_limited(tmp_path: Path) -> None:
    run_warm(
        tmp_path,
        """
        import torch
        kept = torch.empty(100 * 2**20, dtype=torch.uint8, device="npu")
        passing = torch.empty(100 * 2**20, dtype=torch.uint8, device="npu")
        try:
            torch.empty(100 * 2**20, dtype=torch.uint8, device="npu")
        except torch.OutOfMemoryError as error:
            assert "NPU out of memory" in str(error), error
        else:
            raise AssertionError("no error")
        assert torch.npu.memory_allocated() == 200 * 2**20
        assert torch.npu.mem_get_info() == (56 * 2**20, 256 * 2**20)
        del passing
        other = torch.empty(150 * 2**20, dtype=torch.uint8, device="npu")  # what was kept goes
        assert torch.npu.memory_reserved() == 250 * 2**20
        on_another = torch.empty(200 * 2**20, dtype=torch.uint8, device="npu:1")
        """,
        RECSDK_SIM_NPU_MEMORY="256M",
    )


def test_copies_run_at_once_if_not_asynchronous(tmp_path: Path) -> None:
    run_warm(
        tmp_path,
        """
        import torch
        host = torch.ones(8).pin_memory()
        data = host.to("npu", non_blocking=True)
        host.zero_()
        assert data.sum().item() == 8
        assert torch.npu.Stream().query()
        """,
        RECSDK_SIM_NPU_ASYNC="0",
    )
