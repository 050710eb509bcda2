"""What every test stands on: one thread, fixed seeds, a plain terminal, torch's switches left as found."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

# Before typer, rich and matplotlib are imported: they look at these once, at import.
for variable in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "GITHUB_ACTIONS", "PY_COLORS"):
    os.environ.pop(variable, None)
os.environ["TERM"] = "xterm"  # of a service it is "dumb", or missing
os.environ["MPLBACKEND"] = "Agg"
# In the background (`make test &`) a shell has Ctrl-C ignored, and the commands to interrupt inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# The same examples in every run, so a failure is everybody's. Torch's first call is slow: no deadline.
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None)
hypothesis.settings.load_profile("reproducible")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Sums then run in one order, and parallel test processes do not fight over the cores.
    torch.set_num_threads(1)


def default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:  # in torch 2.6 after set_default_device(None)
        return torch.device("cpu")


def read_global_torch_state() -> dict[str, object]:
    """The process-wide switches of torch that a test, or the code it calls, might leave turned."""
    cuda = torch.backends.cuda
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "cuDNN, MKL-DNN": (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled),
        "flash, math SDPA": (cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()),
        "memory-efficient, cuDNN SDPA": (cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        "fast path of multi-head attention": torch.backends.mha.get_fastpath_enabled(),
    }


@pytest.fixture(autouse=True)
def _torch_left_as_found(_one_thread: None) -> Iterator[None]:
    """Seed the test, and fail it when it leaves a switch of `read_global_torch_state` changed."""
    torch.manual_seed(0)
    before = read_global_torch_state()
    yield
    after = read_global_torch_state()
    changed = [f"{name}: {before[name]} → {after[name]}" for name in before if before[name] != after[name]]
    if changed:  # put back what spoils later tests, so that one guilty test is reported, not all after it
        torch.set_default_dtype(before["default dtype"])
        torch.set_default_device(before["default device"])
        torch.set_grad_enabled(bool(before["grad mode"]))
        torch.use_deterministic_algorithms(bool(before["deterministic algorithms"]))
        torch.set_num_threads(int(str(before["threads"])))
        pytest.fail("the test left global torch state changed: " + "; ".join(changed))
